"""Names of EfficientZero's metrics, in addition to those in `metrics/names.py`."""

# Cross-entropies in nats, without coefficients and importance weights; masked states count as 0.
LOSS_VALUE = "losses/value"
LOSS_POLICY = "losses/policy"
LOSS_VALUE_PREFIX = "losses/value_prefix"
LOSS_CONSISTENCY = "losses/consistency"  # negative cosine of the SimSiam pair
POLICY_ENTROPY = "losses/policy_entropy"  # nats, of the predicted policy in the sampled states
TARGET_ENTROPY = "losses/target_entropy"  # nats, of policy targets: the minimum of LOSS_POLICY
TD_ERROR = "losses/td_error"  # mean |value - target| in the sampled states

# Age of the policy targets of a batch, in learner steps.
TARGET_AGE_MEAN = "replay/target_age_mean"
TARGET_AGE_MAX = "replay/target_age_max"

REANALYSED_STATES = "reanalyse/states"  # states searched, per second and per learner step
