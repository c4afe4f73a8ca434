"""The replay: storage, priorities, targets and whole-buffer sweeps behind one thread-safe facade."""

from speedyzero_jax.replay.buffer import Replay
from speedyzero_jax.replay.priorities import importance_weights

__all__ = ["Replay", "importance_weights"]
