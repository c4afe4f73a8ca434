"""Names of the metrics that every agent has, and the rules that combine values of any metric.

A metric needs no entry here to be logged: how its values combine follows from its name.
"""

import fnmatch
import functools
from collections.abc import Mapping

# Every line of metrics.jsonl has these.
STEP = "step"  # learner steps so far
ENV_STEPS = "env_steps"  # agent steps so far, over all lanes
TIME = "time"  # seconds the run has been running, summed over its restarts

# An episode is a whole game, across lost lives; returns are raw.
EPISODES = "charts/episodes"  # finished so far
EPISODE_RETURN = "charts/episode_return"  # mean over the last 100
EPISODE_RETURN_LAST = "charts/episode_return_last"
EPISODE_RETURN_BEST = "charts/episode_return_best"
EPISODE_LENGTH = "charts/episode_length"  # agent steps, mean over the last 100
AGENT_STEPS_PER_SECOND = "charts/agent_steps_per_second"
LEARNER_STEPS_PER_SECOND = "charts/learner_steps_per_second"
SAMPLES_PER_SECOND = "charts/samples_per_second"  # trained on, over all devices
SAMPLES_PER_INSERT = "charts/samples_per_insert"  # trained on, per agent step after the random ones
LEARNING_RATE = "charts/learning_rate"

LOSS_TOTAL = "losses/total"  # what is minimized; its terms are the agent's
GRADIENT_NORM = "learner/gradient_norm"  # before clipping
UPDATE_NORM = "learner/update_norm"
PARAMETER_NORM = "learner/parameter_norm"
TRUST_RATIO_PREFIX = "trust_ratio/"  # (Clipped) LARS: of each layer, at the last learner step

REPLAY_PREFIX = "replay/"  # whatever the replay reports, such as:
REPLAY_TRANSITIONS = "replay/transitions"
REPLAY_BYTES = "replay/bytes"

POLICY_LAG = "stats/policy_lag"  # learner steps since the weights that actors act with
POLICY_LAG_MAX = "stats/policy_lag_max"

INFERENCE_LANES = "inference/lanes_mean"  # central inference: lanes in a batch
INFERENCE_SECONDS = "inference/seconds_mean"  # until an actor has its actions

CHECKPOINT_STEP = "checkpoint/step"  # of the newest complete checkpoint
EVALUATION_PREFIX = "evaluation/"  # the last evaluation
EVALUATION_MEAN = "evaluation/mean"
TIME_PREFIX = "time/"  # seconds per learner step that threads spend in a part of their work

RATE_SUFFIX = "_per_second"
PER_STEP_SUFFIX = "_per_learner_step"
COUNTER_SUFFIXES = (RATE_SUFFIX, PER_STEP_SUFFIX)


def present(kind: str) -> str:
  """Processes of a kind (actor, refresher) heard of lately."""
  return f"present/{kind}s"


def wait(kind: str) -> str:
  """Seconds a process of a kind waits for its next piece of work."""
  return f"queue/{kind}_wait_seconds"


# Patterns by the way values combine. The first match counts; without one it is the mean.
_OVER_TIME = {"min": ("*_min",), "max": ("*_max",), "last": ("*_last",)}
_ACROSS_LEARNERS = {
  # Learner 0's value stands for the run: learners agree, or only it has one.
  "local": (STEP, "*/step", TIME, "time/*", "*_last", "losses/*", "learner/*_norm", "evaluation/*",
            "trust_ratio/*", LEARNING_RATE, LEARNER_STEPS_PER_SECOND),
  "mean": ("*_mean", "*_per_transition"),
  "min": ("*_min",),
  "max": ("*_max", "*_best", "queue/*"),
  "sum": (ENV_STEPS, EPISODES, "*_per_second", "*_per_learner_step", "*_bytes", "replay/*",
          "present/*"),
}  # fmt: skip


@functools.cache
def over_time(name: str) -> str:
  """How values of a metric between two lines become one: mean, min, max or last."""
  return _match(_OVER_TIME, name)


@functools.cache
def across_learners(name: str) -> str:
  """How values from several learners become the run's: local, mean, min, max or sum."""
  return _match(_ACROSS_LEARNERS, name)


def _match(rules: Mapping[str, tuple[str, ...]], name: str) -> str:
  for how, patterns in rules.items():
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
      return how
  return "mean"
