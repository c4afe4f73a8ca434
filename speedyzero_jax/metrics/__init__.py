"""Metrics of a run: names, aggregation, files and the terminal display.

Training processes use `MetricsLogger` in `logger.py`; readers of metrics need only `jsonl.py`. Only
`logger.py` imports jax.
"""
