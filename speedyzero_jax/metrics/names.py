"""The name, meaning and unit of every metric: defined here once, used by whoever writes or shows one.

Groups follow what people search for elsewhere (`charts/`, `losses/`, ...). Names not listed here are allowed in
`metrics.jsonl`; they are averaged like the others and merely not shown.
"""

import dataclasses
from typing import Literal

Reduction = Literal["mean", "min", "max"]


@dataclasses.dataclass(frozen=True)
class Metric:
  """What a metric says. `reduction` is how its values between two log lines become one."""

  name: str
  unit: str
  meaning: str
  reduction: Reduction = "mean"


METRICS: dict[str, Metric] = {}


def _metric(name: str, unit: str, meaning: str, reduction: Reduction = "mean") -> str:
  METRICS[name] = Metric(name, unit, meaning, reduction)
  return name


# Every line of metrics.jsonl begins with these.
STEP = _metric("step", "learner steps", "Learner steps taken so far.")
ENV_STEPS = _metric("env_steps", "agent steps", "Agent steps collected so far, over all lanes.")
TIME = _metric("time", "s", "Seconds the run has been running, summed over its restarts.")

EPISODE_RETURN = _metric("charts/episode_return", "points", "Mean raw return of the last 100 finished games.")
EPISODE_RETURN_LAST = _metric("charts/episode_return_last", "points", "Raw return of the game finished last.")
EPISODE_RETURN_BEST = _metric("charts/episode_return_best", "points", "Highest raw return of any game finished so far.")
EPISODE_LENGTH = _metric("charts/episode_length", "agent steps", "Mean length of the last 100 finished games.")
EPISODES = _metric("charts/episodes", "games", "Games finished so far, lost lives not counted.")
AGENT_STEPS_PER_SECOND = _metric("charts/agent_steps_per_second", "1/s", "Agent steps collected a second.")
LEARNER_STEPS_PER_SECOND = _metric("charts/learner_steps_per_second", "1/s", "Learner steps taken a second.")
SAMPLES_PER_SECOND = _metric("charts/samples_per_second", "1/s", "Samples trained on a second, over all devices.")
SAMPLES_PER_INSERT = _metric("charts/samples_per_insert", "1", "Samples trained on per agent step collected, so far.")
LEARNING_RATE = _metric("charts/learning_rate", "1", "Base learning rate of the latest learner step.")

LOSS_TOTAL = _metric("losses/total", "nats", "The weighted sum that is minimised.")
LOSS_VALUE = _metric("losses/value", "nats", "Cross-entropy of the value, before its coefficient.")
LOSS_POLICY = _metric("losses/policy", "nats", "Cross-entropy of the policy, before its coefficient.")
LOSS_VALUE_PREFIX = _metric("losses/value_prefix", "nats", "Cross-entropy of the value prefix, before its coefficient.")
LOSS_CONSISTENCY = _metric("losses/consistency", "1", "Negative cosine of the SimSiam pair, before its coefficient.")
POLICY_ENTROPY = _metric("losses/policy_entropy", "nats", "Entropy of the policy predicted at the sampled states.")
TD_ERROR = _metric("losses/td_error", "points", "Mean |value - target| of the sampled states.")

GRADIENT_NORM = _metric("learner/gradient_norm", "1", "Global norm of the gradient before it is clipped.")
UPDATE_NORM = _metric("learner/update_norm", "1", "Global norm of the step taken in parameter space.")
PARAMETER_NORM = _metric("learner/parameter_norm", "1", "Global norm of the parameters.")
TRUST_RATIO_MIN = _metric("learner/trust_ratio_min", "1", "Smallest LARS trust ratio of any adapted layer.", "min")
TRUST_RATIO_MEAN = _metric("learner/trust_ratio_mean", "1", "Mean LARS trust ratio of the adapted layers.")
TRUST_RATIO_MAX = _metric("learner/trust_ratio_max", "1", "Largest LARS trust ratio of any adapted layer.", "max")
TRUST_RATIO_CLIPPED = _metric("learner/trust_ratio_clipped", "share", "Share of adapted layers whose ratio is clipped.")

REPLAY_TRANSITIONS = _metric("replay/transitions", "transitions", "Transitions held in the replay.")
REPLAY_BYTES_PER_TRANSITION = _metric("replay/bytes_per_transition", "B", "Memory of the replay per transition held.")
REPLAY_MEMORY = _metric("replay/memory_gb", "GB", "Memory of the replay, 1e9 bytes.")
PRIORITY_AGE_MEAN = _metric(
  "replay/priority_age_mean", "learner steps", "Mean over the replay of the age of the priorities."
)
PRIORITY_AGE_MAX = _metric(
  "replay/priority_age_max",
  "learner steps",
  "Age of the oldest priority in the replay, since its weights were current.",
  "max",
)
TARGET_AGE_MEAN = _metric("replay/target_age_mean", "learner steps", "Mean age of the policy targets trained on.")
TARGET_AGE_MAX = _metric("replay/target_age_max", "learner steps", "Age of the oldest policy target trained on.", "max")

REANALYSED_PER_SECOND = _metric("reanalyse/states_per_second", "1/s", "Stored states searched anew a second.")
REFRESHED_PER_SECOND = _metric("refresh/states_per_second", "1/s", "Stored priorities recomputed a second.")
POLICY_LAG = _metric("stats/policy_lag", "learner steps", "Age of the weights the actor acts with.")
LEARNER_WAIT = _metric("queue/learner_wait_seconds", "s", "Time a learner step waits for its batch.")
ACTOR_WAIT = _metric("queue/actor_wait_seconds", "s", "Time an actor step waits for the learner to catch up.")

CHECKPOINT_STEP = _metric("checkpoint/step", "learner steps", "Learner step of the newest complete checkpoint.")
EVALUATION_STEP = _metric("evaluation/step", "learner steps", "Learner step of the weights last evaluated.")
EVALUATION_MEAN = _metric("evaluation/mean", "points", "Mean raw return of the last evaluation.")
EVALUATION_MEDIAN = _metric("evaluation/median", "points", "Median raw return of the last evaluation.")
EVALUATION_STD = _metric("evaluation/std", "points", "Standard deviation of the raw returns of the last evaluation.")
EVALUATION_HUMAN_NORMALISED = _metric(
  "evaluation/human_normalised", "1", "(evaluation/mean - random play) / (human - random play)."
)

TIME_PREFIX = "time/"  # time/<part>: seconds spent in that part per learner step, for any part


def reduction(name: str) -> Reduction:
  """How several values of this metric become one; `mean` for names not listed here."""
  return METRICS[name].reduction if name in METRICS else "mean"
