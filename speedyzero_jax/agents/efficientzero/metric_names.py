"""Names of EfficientZero's metrics, beside those in `metrics/names.py`."""

LOSS_VALUE = "losses/value"  # cross-entropies in nats, each before its coefficient
LOSS_POLICY = "losses/policy"
LOSS_VALUE_PREFIX = "losses/value_prefix"
LOSS_CONSISTENCY = "losses/consistency"  # negative cosine of the SimSiam pair
POLICY_ENTROPY = "losses/policy_entropy"  # nats, of the policy predicted at the sampled states
TD_ERROR = "losses/td_error"  # mean |value - target| of the sampled states

# LARS trust ratios of the adapted layers; clipped: share of layers whose ratio is.
TRUST_RATIO_MIN = "learner/trust_ratio_min"
TRUST_RATIO_MEAN = "learner/trust_ratio_mean"
TRUST_RATIO_MAX = "learner/trust_ratio_max"
TRUST_RATIO_CLIPPED = "learner/trust_ratio_clipped"

# Age in learner steps of the policy targets trained on.
TARGET_AGE_MEAN = "replay/target_age_mean"
TARGET_AGE_MAX = "replay/target_age_max"

# Stored states searched again, and stored priorities computed again.
REANALYSED_PER_SECOND = "reanalyse/states_per_second"
REANALYSED_PER_STEP = "reanalyse/states_per_learner_step"
REFRESHED_PER_SECOND = "refresh/states_per_second"
