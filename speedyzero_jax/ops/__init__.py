"""Numerics shared by agents: optimizers, torsos, convolution, TD errors and V-trace."""
