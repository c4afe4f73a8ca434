"""Names of EfficientZero's metrics, beside those in `metrics/names.py`."""

LOSS_VALUE = "losses/value"  # cross-entropies in nats, each before its coefficient
LOSS_POLICY = "losses/policy"
LOSS_VALUE_PREFIX = "losses/value_prefix"
LOSS_CONSISTENCY = "losses/consistency"  # negative cosine of the SimSiam pair
POLICY_ENTROPY = "losses/policy_entropy"  # nats, of the policy predicted at the sampled states
TD_ERROR = "losses/td_error"  # mean |value - target| of the sampled states

# Age in learner steps of the policy targets trained on.
TARGET_AGE_MEAN = "replay/target_age_mean"
TARGET_AGE_MAX = "replay/target_age_max"

REANALYSED_STATES = "reanalyse/states"  # stored states searched again, per second and learner step
