"""SpeedyZero, distributed sample-efficient reinforcement learning with a learned model, in JAX."""
