"""Numerical building blocks shared by agents: optimizers, torsos, convolution, TD, V-trace."""
