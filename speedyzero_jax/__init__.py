"""SpeedyZero in JAX."""
