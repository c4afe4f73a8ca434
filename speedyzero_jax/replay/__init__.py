"""The replay: storage, priorities, targets and whole-buffer sweeps behind one thread-safe facade."""

from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sum_tree import importance_weights

__all__ = ["Replay", "importance_weights"]
