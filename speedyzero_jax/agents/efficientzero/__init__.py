"""SpeedyZero and its relatives EfficientZero and EfficientZero V2, chosen by presets."""

from speedyzero_jax.agents.efficientzero.config import EfficientZeroConfig as AGENT_CONFIG


def make_agent(config, frame_shape, frame_dtype, actions):
  """See `agents.base.Agent`."""
  from speedyzero_jax.agents.efficientzero.agent import EfficientZero  # imports mctx

  return EfficientZero(config, frame_shape, frame_dtype, actions)


__all__ = ["AGENT_CONFIG", "make_agent"]
