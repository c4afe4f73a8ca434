"""Metrics of a run: names, aggregation, files and the terminal display; none of it imports jax.

A process that trains uses `MetricsLogger` in `logger.py`; one that reads metrics needs `jsonl.py`.
"""
