"""Replay: storage of steps, selection of training data, and recomputation of stored values."""
