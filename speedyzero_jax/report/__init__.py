"""Reports on run folders: tables in a terminal, and an HTML page with scores and curves.

The command is `launch/report.py`. This package does not import jax.
"""
