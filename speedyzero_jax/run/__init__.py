"""The run as one process sees it: its parts, loops, checkpoints and entry point."""
