"""Reports on run folders: tables in a terminal, and a page with scores and curves.

Nothing here imports jax; `launch/report.py` is the command.
"""
