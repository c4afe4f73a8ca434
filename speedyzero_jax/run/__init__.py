"""A training run in one process: its parts, loops, checkpoints and entry point."""
