"""The name, meaning and unit of every metric: defined here once, used by whoever writes or shows one.

Groups follow what people search for elsewhere (`charts/`, `losses/`, ...). Names not listed here are allowed in
`metrics.jsonl`; they are averaged like the others and merely not shown.
"""

import dataclasses
from typing import Literal

Reduction = Literal["mean", "min", "max"]
Across = Literal["own", "sum", "mean", "max"]


@dataclasses.dataclass(frozen=True)
class Metric:
  """What a metric says.

  `reduction` is how its values between two log lines become one. `across` is how those of several units become the
  run's, in unit 0's lines; own: all have the same, or unit 0's is meant.
  """

  name: str
  unit: str
  meaning: str
  reduction: Reduction = "mean"
  across: Across = "own"


METRICS: dict[str, Metric] = {}


def _metric(
  name: str, unit: str, meaning: str, reduction: Reduction = "mean", across: Across = "own"
) -> str:
  METRICS[name] = Metric(name, unit, meaning, reduction, across)
  return name


# Every line of metrics.jsonl begins with these.
STEP = _metric("step", "learner steps", "Learner steps taken so far.")
ENV_STEPS = _metric(
  "env_steps", "agent steps", "Agent steps collected so far, over all lanes.", across="sum"
)
TIME = _metric("time", "s", "Seconds the run has been running, summed over its restarts.")

EPISODE_RETURN = _metric(
  "charts/episode_return",
  "points",
  "Mean raw return of the last 100 finished games.",
  across="mean",
)
EPISODE_RETURN_LAST = _metric(
  "charts/episode_return_last", "points", "Raw return of the game finished last."
)
EPISODE_RETURN_BEST = _metric(
  "charts/episode_return_best",
  "points",
  "Highest raw return of any game finished so far.",
  across="max",
)
EPISODE_LENGTH = _metric(
  "charts/episode_length",
  "agent steps",
  "Mean length of the last 100 finished games.",
  across="mean",
)
EPISODES = _metric(
  "charts/episodes", "games", "Games finished so far, lost lives not counted.", across="sum"
)
AGENT_STEPS_PER_SECOND = _metric(
  "charts/agent_steps_per_second", "1/s", "Agent steps collected a second.", across="sum"
)
LEARNER_STEPS_PER_SECOND = _metric(
  "charts/learner_steps_per_second", "1/s", "Learner steps taken a second."
)
SAMPLES_PER_SECOND = _metric(
  "charts/samples_per_second", "1/s", "Samples trained on a second, over all devices.", across="sum"
)
SAMPLES_PER_INSERT = _metric(
  "charts/samples_per_insert",
  "1",
  "Samples trained on so far, per agent step collected after the random play.",
)
LEARNING_RATE = _metric(
  "charts/learning_rate", "1", "Base learning rate of the latest learner step."
)

LOSS_TOTAL = _metric("losses/total", "nats", "The weighted sum that is minimised.")
LOSS_VALUE = _metric("losses/value", "nats", "Cross-entropy of the value, before its coefficient.")
LOSS_POLICY = _metric(
  "losses/policy", "nats", "Cross-entropy of the policy, before its coefficient."
)
LOSS_VALUE_PREFIX = _metric(
  "losses/value_prefix", "nats", "Cross-entropy of the value prefix, before its coefficient."
)
LOSS_CONSISTENCY = _metric(
  "losses/consistency", "1", "Negative cosine of the SimSiam pair, before its coefficient."
)
POLICY_ENTROPY = _metric(
  "losses/policy_entropy", "nats", "Entropy of the policy predicted at the sampled states."
)
TD_ERROR = _metric("losses/td_error", "points", "Mean |value - target| of the sampled states.")

GRADIENT_NORM = _metric(
  "learner/gradient_norm", "1", "Global norm of the gradient before it is clipped."
)
UPDATE_NORM = _metric(
  "learner/update_norm", "1", "Global norm of the step taken in parameter space."
)
PARAMETER_NORM = _metric("learner/parameter_norm", "1", "Global norm of the parameters.")
HOST_TO_DEVICE_BYTES = _metric(
  "learner/host_to_device_bytes",
  "B",
  "Bytes that the host hands to devices each learner step: new frames, what is searched or evaluated, the batch.",
  across="sum",
)
TRUST_RATIO_MIN = _metric(
  "learner/trust_ratio_min", "1", "Smallest LARS trust ratio of any adapted layer.", "min"
)
TRUST_RATIO_MEAN = _metric(
  "learner/trust_ratio_mean", "1", "Mean LARS trust ratio of the adapted layers."
)
TRUST_RATIO_MAX = _metric(
  "learner/trust_ratio_max", "1", "Largest LARS trust ratio of any adapted layer.", "max"
)
TRUST_RATIO_CLIPPED = _metric(
  "learner/trust_ratio_clipped", "share", "Share of adapted layers whose ratio is clipped."
)

REPLAY_TRANSITIONS = _metric(
  "replay/transitions", "transitions", "Transitions held in the replay.", across="sum"
)
REPLAY_BYTES_PER_TRANSITION = _metric(
  "replay/bytes_per_transition", "B", "Memory of the replay per transition held.", across="mean"
)
REPLAY_MEMORY = _metric("replay/memory_gb", "GB", "Memory of the replay, 1e9 bytes.", across="sum")
PRIORITY_AGE_MEAN = _metric(
  "replay/priority_age_mean",
  "learner steps",
  "Mean over the replay of the age of the priorities.",
  across="mean",
)
PRIORITY_AGE_MAX = _metric(
  "replay/priority_age_max",
  "learner steps",
  "Age of the oldest priority in the replay, since its weights were current.",
  "max",
  across="max",
)
TARGET_AGE_MEAN = _metric(
  "replay/target_age_mean",
  "learner steps",
  "Mean age of the policy targets trained on.",
  across="mean",
)
TARGET_AGE_MAX = _metric(
  "replay/target_age_max",
  "learner steps",
  "Age of the oldest policy target trained on.",
  "max",
  across="max",
)

REANALYSED_PER_SECOND = _metric(
  "reanalyse/states_per_second", "1/s", "Stored states searched anew a second.", across="sum"
)
REANALYSED_PER_STEP = _metric(
  "reanalyse/states_per_learner_step",
  "1",
  "Stored states searched anew a learner step.",
  across="sum",
)
REFRESHED_PER_SECOND = _metric(
  "refresh/states_per_second", "1/s", "Stored priorities recomputed a second.", across="sum"
)
POLICY_LAG = _metric(
  "stats/policy_lag", "learner steps", "Age of the weights the actors act with.", across="mean"
)
POLICY_LAG_MAX = _metric(
  "stats/policy_lag_max",
  "learner steps",
  "Age of the oldest weights an actor acted with.",
  "max",
  across="max",
)
LEARNER_WAIT = _metric(
  "queue/learner_wait_seconds", "s", "Time a learner step waits for its batch.", across="max"
)
ACTOR_WAIT = _metric(
  "queue/actor_wait_seconds",
  "s",
  "Time an actor step waits for the learner to catch up.",
  across="max",
)
REANALYSER_WAIT = _metric(
  "queue/reanalyser_wait_seconds",
  "s",
  "Time a reanalyser waits for a block of states.",
  across="max",
)

# Of a run's other processes, as its learners see them.
PRESENT_ACTORS = _metric(
  "present/actors", "processes", "Actors heard of in the last ten seconds.", across="sum"
)
PRESENT_REANALYSERS = _metric(
  "present/reanalysers", "processes", "Reanalysers heard of in the last ten seconds.", across="sum"
)
RESTARTS_LEARNERS = _metric(
  "restarts/learners", "restarts", "Times the run was gone on with, all processes anew."
)
RESTARTS_ACTORS = _metric(
  "restarts/actors", "restarts", "Times an actor came back while learners went on.", across="sum"
)
RESTARTS_REANALYSERS = _metric(
  "restarts/reanalysers",
  "restarts",
  "Times a reanalyser came back while learners went on.",
  across="sum",
)

CHECKPOINT_STEP = _metric(
  "checkpoint/step", "learner steps", "Learner step of the newest complete checkpoint."
)
EVALUATION_STEP = _metric(
  "evaluation/step", "learner steps", "Learner step of the weights last evaluated."
)
EVALUATION_MEAN = _metric("evaluation/mean", "points", "Mean raw return of the last evaluation.")
EVALUATION_MEDIAN = _metric(
  "evaluation/median", "points", "Median raw return of the last evaluation."
)
EVALUATION_STD = _metric(
  "evaluation/std", "points", "Standard deviation of the raw returns of the last evaluation."
)
EVALUATION_HUMAN_NORMALISED = _metric(
  "evaluation/human_normalised", "1", "(evaluation/mean - random play) / (human - random play)."
)

# time/<part>: seconds per learner step that a thread spends in this part. In lockstep mode all share one thread, in
# async mode act, sample to gather, the sweeps and the rest overlap.
#   act      environments and their search
#   sample   drawing a batch and making its targets
#   search   reanalysis, of a batch or of the buffer
#   refresh  Priority Refresh
#   gather   the batch's frames, and handing it to the devices
#   wait     the learner waits for a batch
#   train    the training step: launching one and waiting for one
#   publish  weights for the others
#   save, evaluate, profile
TIME_PREFIX = "time/"


def reduction(name: str) -> Reduction:
  """How several values of this metric become one; `mean` for names not listed here."""
  return METRICS[name].reduction if name in METRICS else "mean"


def across(name: str) -> Across:
  """How several units' values of this metric become the run's; `own` for names not listed here."""
  return METRICS[name].across if name in METRICS else "own"
