"""Numerics shared by agents: optimizers and transforms."""
