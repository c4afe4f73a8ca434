"""SpeedyZero and its relatives EfficientZero and EfficientZero V2, chosen by presets."""

from speedyzero_jax.agents.efficientzero.config import EfficientZeroConfig as AGENT_CONFIG

__all__ = ["AGENT_CONFIG"]
