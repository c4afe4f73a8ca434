"""What the tests of roles, checkpoints and whole runs share: one small configuration, and plain stand-ins for parts."""

import zlib

import numpy as np

from speedyzero_jax import config_io
from speedyzero_jax.envs import BatchedEnv
from speedyzero_jax.inference import Inference
from speedyzero_jax.types import EnvStep, SearchResult

# One set of shapes, so that every program compiles once for all files (and stays in the compilation cache).
OVERRIDES = (
  "env.frame_stack=2", "network.channels=8", "network.reduced_channels=4", "network.head_hidden=8",
  "network.lstm_hidden=8", "network.projection_hidden=8", "network.projection_out=8", "network.prediction_hidden=8",
  "search.simulations=2", "search.max_considered=2", "actor.lanes=3", "actor.random_steps=40", "actor.weights_interval=2",
  "reanalyse.schedule=sweep", "reanalyse.max_age=8", "reanalyse.weights_interval=3", "reanalyse.block=32",
  "refresh.max_age=6", "refresh.weights_interval=2", "refresh.block=32", "optim.warmup_steps=4", "learner.batch_size=8",
  "learner.steps=12", "learner.tail_steps=2", "learner.unroll_steps=3", "learner.devices=1", "replay.td_steps=3",
  "evaluation.episodes=2", "evaluation.at_end=false", "run.env_steps=150", "run.mode=lockstep",
  "run.checkpoint_interval=4", "run.log_interval=3",
)  # fmt: skip


def config(*overrides: str):
  """The tiny configuration of Catch, with `key=value` changes."""
  return config_io.load(["quickstart"], [*OVERRIDES, *overrides])
