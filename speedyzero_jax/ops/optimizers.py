"""Optimizers and the learning-rate schedule: Clipped LARS, LARS, SGD and Adam.

SpeedyZero (Mei et al. 2023) names Clipped LARS without a published formula. The formula, bounds and
defaults here are this project's reading: LARS (You et al. 2017) with the trust ratio of each layer
clipped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedyzero_jax.config.schema import OptimConfig

__all__ = [
  "ScaleByClippedTrustRatioState",
  "clipped_lars",
  "lars",
  "learning_rate_schedule",
  "make_optimizer",
  "scale_by_clipped_trust_ratio",
  "trust_ratio_summary",
  "trust_ratios",
]


class ScaleByClippedTrustRatioState(NamedTuple):
  """The trust ratios of the last update, and the leaves that have none.

  Both trees have the structure of the params, with `optax.MaskedNode` for leaves not adapted.
  """

  ratio: Any  # float32 scalars, after clipping; 1 before the first update
  clipped: Any  # bool scalars, whether a bound changed the ratio
  exempt: Any  # bool scalars, the leaf was zero at initialization: its ratio is always 1


def scale_by_clipped_trust_ratio(
  trust_coefficient: jax.typing.ArrayLike = 0.001,
  trust_min: jax.typing.ArrayLike = 0.0,
  trust_max: jax.typing.ArrayLike = 1.0,
  weight_decay: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 0.0,
  mask: optax.MaskOrFn = None,
) -> optax.GradientTransformation:
  """Adds weight decay and scales each layer by its clipped trust ratio.

  A leaf with weights `w` and gradient `g` becomes `ratio * (g + weight_decay * w)`, where

    ratio = clip(trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), trust_min, trust_max)

  and `|.|` is the Euclidean norm over the whole leaf. If either norm is zero the ratio is 1 before
  clipping. The ratio of a leaf that is zero at initialization is always 1: it has no norm to trust,
  and with a ratio in proportion to its tiny norm it would stay tiny. Norms, ratio and product are
  computed in float32; the result has the gradient's dtype. Do not chain it with
  `optax.add_decayed_weights`: the ratio needs the two norms separately.

  This is the ratio of LARS with two bounds added, our reading of Clipped LARS; `trust_max=1` means
  that no layer moves faster than under SGD.

  Args:
    trust_coefficient: The coefficient eta of LARS, at least 0.
    trust_min: Lower bound of the ratio, at least 0.
    trust_max: Upper bound of the ratio, at least `trust_min`; `inf` for none.
    weight_decay: Strength of the weight decay, at least 0.
    eps: Added to the ratio's denominator, at least 0.
    mask: A tree of booleans with the structure of the params or a prefix of it, or a callable that
      returns one given the params or updates. True for leaves to decay and adapt; the others pass
      through unchanged. By default leaves of rank 2 and more: kernels, but not biases and
      normalization parameters. Name a callable mask in the `static_args` of
      `optax.inject_hyperparams`.

  Returns:
    An `optax.GradientTransformation` with a `ScaleByClippedTrustRatioState`.

  Raises:
    ValueError: `trust_min > trust_max`, or a negative number (not checked for values traced by
      JAX); or, from the update, no params given.

  References:
    You et al., `Large Batch Training of Convolutional Networks
    <https://arxiv.org/abs/1708.03888>`_, 2017

    Mei et al., SpeedyZero: Mastering Atari with Limited Data and Time, ICLR 2023
  """
  _check_non_negative(
    trust_coefficient=trust_coefficient,
    trust_min=trust_min,
    trust_max=trust_max,
    weight_decay=weight_decay,
    eps=eps,
  )
  _check_ordered(trust_min, trust_max)

  def unclipped_ratio(g, w):
    g_norm, w_norm = _norm(g), _norm(w)
    zero = (g_norm == 0) | (w_norm == 0)
    denominator = g_norm + weight_decay * w_norm + eps
    ratio = jnp.where(zero, 1.0, trust_coefficient * w_norm / jnp.where(zero, 1.0, denominator))
    return ratio.astype(jnp.float32)

  def bounded(ratio, free):
    return jnp.where(free, 1.0, jnp.clip(ratio, trust_min, trust_max)).astype(jnp.float32)

  def scaled(ratio, g, w):
    return (ratio * (g.astype(jnp.float32) + weight_decay * w.astype(jnp.float32))).astype(g.dtype)

  def init_fn(params):
    return ScaleByClippedTrustRatioState(
      ratio=jax.tree.map(lambda _: jnp.ones([], jnp.float32), params),
      clipped=jax.tree.map(lambda _: jnp.zeros([], jnp.bool), params),
      exempt=jax.tree.map(lambda w: jnp.logical_not(jnp.any(w != 0)), params),
    )

  def update_fn(updates, state, params=None):
    if params is None:
      raise ValueError(
        "scale_by_clipped_trust_ratio needs the current params: call update(updates, state, params)"
      )
    exempt, unclipped = state.exempt, jax.tree.map(unclipped_ratio, updates, params)
    ratio = jax.tree.map(bounded, unclipped, exempt)
    clipped = jax.tree.map(
      lambda r, free: ((r < trust_min) | (r > trust_max)) & ~free, unclipped, exempt
    )
    new = ScaleByClippedTrustRatioState(ratio, clipped, exempt)
    return jax.tree.map(scaled, ratio, updates, params), new

  return optax.masked(
    optax.GradientTransformation(init_fn, update_fn), _rank_two_and_more if mask is None else mask
  )


def clipped_lars(
  learning_rate: optax.ScalarOrSchedule,
  *,
  trust_coefficient: jax.typing.ArrayLike = 0.001,
  trust_min: jax.typing.ArrayLike = 0.0,
  trust_max: jax.typing.ArrayLike = 1.0,
  weight_decay: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 0.0,
  momentum: jax.typing.ArrayLike = 0.9,
  mask: optax.MaskOrFn = None,
) -> optax.GradientTransformation:
  """Clipped LARS: SGD with momentum in which every layer has a bounded trust ratio.

  Bounds and defaults are this project's reading (see `scale_by_clipped_trust_ratio`).

  The order is trust ratio, momentum, learning rate, as in `optax.sgd`: where every ratio is clipped
  at 1 this is SGD with momentum and masked weight decay, under any schedule. You et al. put the
  learning rate inside the momentum buffer, which is the same at a constant rate.

  Args:
    learning_rate: Global step size, a number or a schedule of the update count.
    trust_coefficient: The coefficient eta of LARS.
    trust_min: Lower bound of the trust ratio.
    trust_max: Upper bound of the trust ratio.
    weight_decay: Strength of the weight decay.
    eps: Added to the denominator of the trust ratio.
    momentum: Decay rate of the momentum buffer.
    mask: Leaves to decay and adapt, by default those of rank 2 and more; the others take plain
      momentum SGD.

  Returns:
    The corresponding `optax.GradientTransformation`.

  Raises:
    ValueError: as `scale_by_clipped_trust_ratio`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> solver = clipped_lars(learning_rate=0.2, weight_decay=1e-4)
    >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
    >>> grads = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    >>> updates, state = solver.update(grads, solver.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> {name: f"{ratio:.6f}" for name, ratio in trust_ratios(state).items()}
    {'kernel': '0.001000'}
  """
  return optax.chain(
    scale_by_clipped_trust_ratio(
      trust_coefficient=trust_coefficient,
      trust_min=trust_min,
      trust_max=trust_max,
      weight_decay=weight_decay,
      eps=eps,
      mask=mask,
    ),
    optax.trace(decay=momentum),
    optax.scale_by_learning_rate(learning_rate),
  )


def lars(
  learning_rate: optax.ScalarOrSchedule,
  *,
  trust_coefficient: jax.typing.ArrayLike = 0.001,
  weight_decay: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 0.0,
  momentum: jax.typing.ArrayLike = 0.9,
  mask: optax.MaskOrFn = None,
) -> optax.GradientTransformation:
  """LARS: `clipped_lars` without bounds.

  It differs from `clipped_lars` in the bounds alone. `optax.lars` by default also adapts and decays
  biases, adds the decay to the gradient before taking its norm, and applies momentum last.

  Args and Raises: as `clipped_lars`.

  References:
    You et al., `Large Batch Training of Convolutional Networks
    <https://arxiv.org/abs/1708.03888>`_, 2017
  """
  return clipped_lars(
    learning_rate,
    trust_coefficient=trust_coefficient,
    trust_min=0.0,
    trust_max=float("inf"),
    weight_decay=weight_decay,
    eps=eps,
    momentum=momentum,
    mask=mask,
  )


def learning_rate_schedule(config: OptimConfig) -> optax.Schedule:
  """The learning rate: a linear warm-up from 0, then a staircase decay.

  At step t it is `learning_rate * t / warmup_steps` up to step `warmup_steps` and
  `learning_rate * decay_rate ** ((t - warmup_steps) // decay_steps)` from it on. With a warm-up the
  first step has rate 0; `decay_steps=0` means no decay.

  Source: EfficientZero (Ye et al. 2021), released code.

  Args:
    config: `learning_rate`, `warmup_steps`, `decay_steps` and `decay_rate` are read.

  Returns:
    A schedule, from the number of updates so far (int32 scalar) to the rate (float32 scalar).

  Raises:
    ValueError: one of the four is negative.
  """
  _check_non_negative(
    learning_rate=config.learning_rate,
    warmup_steps=config.warmup_steps,
    decay_steps=config.decay_steps,
    decay_rate=config.decay_rate,
  )

  def schedule(count: jax.typing.ArrayLike) -> jax.Array:
    rate = jnp.asarray(config.learning_rate, jnp.float32)
    if config.warmup_steps:
      rate *= jnp.minimum(1.0, jnp.asarray(count) / config.warmup_steps)
    if config.decay_steps:
      since = jnp.maximum(jnp.asarray(count) - config.warmup_steps, 0)
      rate *= config.decay_rate ** (since // config.decay_steps)
    return rate

  return schedule


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
  """The configured optimizer, with its schedule and gradient clipping.

  Gradients are first clipped to the global norm `clip_norm` (unless 0). Weight decay applies only
  to leaves of rank 2 and more; for Adam it is decoupled (`optax.adamw`), for the others it enters
  the momentum buffer.

  Args:
    config: See `OptimConfig`.

  Returns:
    An `optax.GradientTransformation` whose update needs the params.

  Raises:
    ValueError: an unknown name, a negative number, or `trust_min > trust_max`.
  """
  _check_non_negative(
    momentum=config.momentum, weight_decay=config.weight_decay, clip_norm=config.clip_norm
  )
  rate = learning_rate_schedule(config)
  optimizer: optax.GradientTransformation
  match config.name:
    case "clipped_lars":
      optimizer = clipped_lars(
        rate,
        trust_coefficient=config.trust_coefficient,
        trust_min=config.trust_min,
        trust_max=config.trust_max,
        weight_decay=config.weight_decay,
        eps=config.trust_eps,
        momentum=config.momentum,
      )
    case "lars":
      optimizer = lars(
        rate,
        trust_coefficient=config.trust_coefficient,
        weight_decay=config.weight_decay,
        eps=config.trust_eps,
        momentum=config.momentum,
      )
    case "sgd":
      optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=_rank_two_and_more),
        optax.sgd(rate, momentum=config.momentum),
      )
    case "adam":
      optimizer = optax.adamw(
        rate, b1=config.momentum, weight_decay=config.weight_decay, mask=_rank_two_and_more
      )
    case _:
      raise ValueError(f"optim.name must be clipped_lars, lars, sgd or adam, got {config.name!r}")
  if config.clip_norm:
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
  return optimizer


def trust_ratios(opt_state: optax.OptState) -> dict[str, jax.Array]:
  """The trust ratio of every adapted leaf at the last update, by the leaf's path in the params.

  Args:
    opt_state: The state of any optimizer, however chained, masked or wrapped.

  Returns:
    float32 scalars under names such as `dynamics/conv/kernel`; empty if the optimizer has no
    clipped trust ratio. If several transforms adapt one leaf, the last one's ratio. Usable inside
    `jit`.
  """
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): ratio
    for state in _trust_ratio_states(opt_state)
    for path, ratio in jax.tree_util.tree_leaves_with_path(state.ratio)
  }


def trust_ratio_summary(opt_state: optax.OptState) -> dict[str, jax.Array]:
  """Summary of the trust ratios of the last update, over the adapted leaves.

  Args:
    opt_state: The state of any optimizer, however chained, masked or wrapped.

  Returns:
    `min`, `mean`, `max` and `fraction_clipped` (the share of leaves whose ratio a bound changed) as
    float32 scalars; empty if no leaf is adapted. Leaves count equally. Usable inside `jit`.
  """
  states = _trust_ratio_states(opt_state)
  ratios = jax.tree.leaves([state.ratio for state in states])
  if not ratios:
    return {}
  ratio = jnp.stack(ratios)
  clipped = jnp.stack(jax.tree.leaves([state.clipped for state in states]))
  return {
    "min": ratio.min(),
    "mean": ratio.mean(),
    "max": ratio.max(),
    "fraction_clipped": clipped.mean(dtype=jnp.float32),
  }


def _trust_ratio_states(opt_state: optax.OptState) -> list[ScaleByClippedTrustRatioState]:
  def is_ours(node: Any) -> bool:
    return isinstance(node, ScaleByClippedTrustRatioState)

  return [node for node in jax.tree.leaves(opt_state, is_leaf=is_ours) if is_ours(node)]


def _rank_two_and_more(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, tree)


def _norm(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))


def _check_ordered(trust_min: Any, trust_max: Any) -> None:
  if not (_traced(trust_min) or _traced(trust_max)) and trust_min > trust_max:
    raise ValueError(f"trust_min must not exceed trust_max, got {trust_min} > {trust_max}")


def _traced(value: Any) -> bool:
  return isinstance(value, jax.core.Tracer)


def _check_non_negative(**values: Any) -> None:
  for name, value in values.items():
    if not _traced(value) and not value >= 0:  # also refuses nan
      raise ValueError(f"{name} must be at least 0, got {value}")
