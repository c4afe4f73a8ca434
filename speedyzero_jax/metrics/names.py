"""Names of metrics common to all agents, and rules for combining values of any metric.

A metric need not be listed here: its name's pattern determines how its values are combined.
"""

import fnmatch
import functools
from collections.abc import Mapping

# In every line of metrics.jsonl:
STEP = "step"  # learner steps so far
ENV_STEPS = "env_steps"  # agent steps so far, over all lanes
TIME = "time"  # elapsed seconds of the run, summed over restarts

# An episode is a whole game, over all lives; returns are raw.
EPISODES = "charts/episodes"  # number finished so far
EPISODE_RETURN = "charts/episode_return"  # mean over the last 100
EPISODE_RETURN_LAST = "charts/episode_return_last"
EPISODE_RETURN_BEST = "charts/episode_return_best"
EPISODE_LENGTH = "charts/episode_length"  # agent steps, mean over the last 100
# Means over the states of the episodes that end in one step, averaged over steps. An episode ends
# with a life if `env.episodic_life`.
VALUE = "charts/value"  # predicted while acting
DISCOUNTED_RETURN = "charts/discounted_return"  # of training rewards, to compare with the value
AGENT_STEPS_PER_SECOND = "charts/agent_steps_per_second"
LEARNER_STEPS_PER_SECOND = "charts/learner_steps_per_second"
SAMPLES_PER_SECOND = "charts/samples_per_second"  # trained on, over all devices
SAMPLES_PER_INSERT = "charts/samples_per_insert"  # samples trained on per non-random agent step
LEARNING_RATE = "charts/learning_rate"

LOSS_TOTAL = "losses/total"  # the minimized loss; each agent names its terms
GRADIENT_NORM = "learner/gradient_norm"  # before clipping
UPDATE_NORM = "learner/update_norm"
PARAMETER_NORM = "learner/parameter_norm"
TRUST_RATIO_PREFIX = "trust_ratio/"  # (Clipped) LARS: per layer, at the last learner step

REPLAY_PREFIX = "replay/"  # metrics reported by the replay, such as:
REPLAY_BYTES = "replay/bytes"

POLICY_LAG = "stats/policy_lag"  # age of the actors' weights, learner steps
POLICY_LAG_MAX = "stats/policy_lag_max"
STALENESS = "stats/gradient_staleness"  # actors' gradients: age of their weights when applied
STALENESS_MAX = "stats/gradient_staleness_max"

INFERENCE_LANES = "inference/lanes_mean"  # central inference: lanes per batch
INFERENCE_SECONDS = "inference/seconds_mean"  # central inference: latency of a request

CHECKPOINT_STEP = "checkpoint/step"  # learner step of the newest complete checkpoint
EVALUATION_PREFIX = "evaluation/"  # results of the last evaluation
EVALUATION_STEP = "evaluation/step"  # learner step of the evaluated weights
EVALUATION_MEAN, EVALUATION_STD = "evaluation/mean", "evaluation/std"
TIME_PREFIX = "time/"  # seconds per learner step, by part of the work (`MetricsLogger.part`)

RATE_SUFFIX = "_per_second"
PER_STEP_SUFFIX = "_per_learner_step"
COUNTER_SUFFIXES = (RATE_SUFFIX, PER_STEP_SUFFIX)


def present(kind: str) -> str:
  """Metric: number of live processes of a kind (actor, refresher)."""
  return f"present/{kind}s"


def wait(kind: str) -> str:
  """Metric: seconds for which a process of a kind waits for its next work item."""
  return f"queue/{kind}_wait_seconds"


# Statistic -> patterns of metric names. The first match applies; the default is the mean.
_OVER_TIME = {"min": ("*_min",), "max": ("*_max",), "last": ("*_last",)}
_ACROSS_LEARNERS = {
  # Local: learner 0's value is the run's, as the learners' agree or only learner 0 has one.
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
  """How a metric's values between two lines are combined: mean, min, max or last."""
  return _match(_OVER_TIME, name)


@functools.cache
def across_learners(name: str) -> str:
  """How a metric's values are combined over learners: local, mean, min, max or sum."""
  return _match(_ACROSS_LEARNERS, name)


def _match(rules: Mapping[str, tuple[str, ...]], name: str) -> str:
  for how, patterns in rules.items():
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
      return how
  return "mean"
