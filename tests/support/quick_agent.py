"""Agent that compiles quickly, for runs with real processes: `agent=quick_agent`.

Its network is a single number. Storage, reanalysis, Priority Refresh, prioritized sampling and
targets are EfficientZero's. Processes can import it if tests/support is on their PYTHONPATH.
"""

import dataclasses
from typing import ClassVar

from speedyzero_jax.agents.efficientzero.config import EfficientZeroConfig


@dataclasses.dataclass(frozen=True)
class AGENT_CONFIG(EfficientZeroConfig):
  """The settings of EfficientZero."""

  name: ClassVar[str] = "quick_agent"


def make_agent(config, frame_shape, frame_dtype, actions):
  """Creates an agent for games with three actions."""
  from speedyzero_jax.agents.base import LossOutput
  from tiny import ChecksumAgent

  class QuickAgent(ChecksumAgent):
    """Learns the mean of the value targets."""

    def loss(self, params, batch_stats, target, batch, keys):
      error = params["w"].mean() - batch["value"][:, 0]
      loss = (batch["weight"] * error**2).mean()
      return loss, LossOutput({"n": batch_stats["n"] + 1}, {}, error)

  return QuickAgent(config, frame_shape, frame_dtype, actions)
