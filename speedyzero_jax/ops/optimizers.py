"""Optimizers and the learning-rate schedule: Clipped LARS, LARS, SGD and Adam.

SpeedyZero (Mei et al. 2023) names Clipped LARS without a published formula. The formula, bounds and
defaults here are this project's reading: LARS (You et al. 2017) with the trust ratio of each layer
clipped.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedyzero_jax.config.schema import OptimConfig


class ClippedTrustRatioState(NamedTuple):
  """The trust ratios of the last update, and the leaves that have none.

  Trees with the structure of the params, with `optax.MaskedNode` for leaves not adapted.
  """

  ratio: Any  # float32 scalars, after clipping; 1 before the first update
  clipped: Any  # bool scalars, whether a bound changed the ratio
  exempt: Any  # bool scalars, the leaf was zero at initialization: its ratio is always 1


def scale_by_clipped_trust_ratio(
  trust_coefficient: Any = 0.001,
  trust_min: Any = 0.0,
  trust_max: Any = 1.0,
  weight_decay: Any = 0.0,
  eps: Any = 0.0,
) -> optax.GradientTransformation:
  """Adds weight decay to kernels and scales each by its clipped trust ratio.

  A leaf of rank 2 or more, with weights `w` and gradient `g`, becomes
  `ratio * (g + weight_decay * w)`, where

    ratio = clip(trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), trust_min, trust_max)

  and `|.|` is the Euclidean norm over the whole leaf. If either norm is zero the ratio is 1 before
  clipping. The ratio of a leaf that is zero at initialization is always 1: it has no norm to trust,
  and with a ratio in proportion to its tiny norm it would stay tiny. Norms, ratio and product are
  computed in float32; the result has the gradient's dtype. Other leaves pass through unchanged. The
  update needs the params. `optax.lars` differs: it adds the decay to the gradient before taking its
  norm, and applies momentum last.
  """

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

  def init(params):
    return ClippedTrustRatioState(
      ratio=jax.tree.map(lambda _: jnp.ones([], jnp.float32), params),
      clipped=jax.tree.map(lambda _: jnp.zeros([], jnp.bool), params),
      exempt=jax.tree.map(lambda w: jnp.logical_not(jnp.any(w != 0)), params),
    )

  def update(updates, state, params=None):
    exempt, unclipped = state.exempt, jax.tree.map(unclipped_ratio, updates, params)
    ratio = jax.tree.map(bounded, unclipped, exempt)
    clipped = jax.tree.map(
      lambda r, free: ((r < trust_min) | (r > trust_max)) & ~free, unclipped, exempt
    )
    new = ClippedTrustRatioState(ratio, clipped, exempt)
    return jax.tree.map(scaled, ratio, updates, params), new

  return optax.masked(optax.GradientTransformation(init, update), _kernels)


def _kernels(tree: Any) -> Any:
  """Leaves that are adapted and decayed: not biases and normalization parameters."""
  return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, tree)


def _norm(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))


def learning_rate_schedule(config: OptimConfig) -> optax.Schedule:
  """The learning rate: a linear warm-up from 0, then a staircase decay.

  At step t it is `learning_rate * t / warmup_steps` up to step `warmup_steps` and
  `learning_rate * decay_rate ** ((t - warmup_steps) // decay_steps)` from it on. With a warm-up the
  first step has rate 0; `decay_steps=0` means no decay.

  Source: EfficientZero (Ye et al. 2021), released code.
  """

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

  Gradients are first clipped to the global norm `clip_norm` (unless 0). Weight decay applies to
  kernels only; for Adam it is decoupled (`optax.adamw`), for the others it enters the momentum
  buffer. LARS is Clipped LARS without bounds.

  The order of (Clipped) LARS is trust ratio, momentum, learning rate, as in `optax.sgd`: where
  every ratio is clipped at 1 it is SGD with momentum and weight decay, under any schedule. You et
  al. put the learning rate inside the momentum buffer, which is the same at a constant rate.
  """
  rate, decay = learning_rate_schedule(config), config.weight_decay
  optimizer: optax.GradientTransformation
  if config.name == "adam":
    optimizer = optax.adamw(rate, b1=config.momentum, weight_decay=decay, mask=_kernels)
  elif config.name == "sgd":
    optimizer = optax.chain(
      optax.add_decayed_weights(decay, mask=_kernels), optax.sgd(rate, momentum=config.momentum)
    )
  else:
    clipped = config.name == "clipped_lars"
    bounds = (config.trust_min, config.trust_max) if clipped else (0.0, math.inf)
    optimizer = optax.chain(
      scale_by_clipped_trust_ratio(config.trust_coefficient, *bounds, decay, config.trust_eps),
      optax.trace(decay=config.momentum),
      optax.scale_by_learning_rate(rate),
    )
  if config.clip_norm:
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
  return optimizer


def trust_ratios(opt_state: optax.OptState) -> dict[str, jax.Array]:
  """The trust ratio of every adapted leaf at the last update, by the leaf's path in the params.

  Float32 scalars under names such as `dynamics/conv/kernel`; empty without (Clipped) LARS.
  """
  state = _trust_ratio_state(opt_state)
  return (
    {}
    if state is None
    else {
      jax.tree_util.keystr(path, simple=True, separator="/"): ratio
      for path, ratio in jax.tree_util.tree_leaves_with_path(state.ratio)
    }
  )


def trust_ratio_summary(opt_state: optax.OptState) -> dict[str, jax.Array]:
  """Summary of the trust ratios of the last update, over the adapted leaves; usable inside `jit`.

  `min`, `mean`, `max` and `fraction_clipped` (the share of leaves whose ratio a bound changed),
  float32 scalars in which leaves count equally; empty if no leaf is adapted.
  """
  state = _trust_ratio_state(opt_state)
  if state is None or not jax.tree.leaves(state.ratio):
    return {}
  ratio = jnp.stack(jax.tree.leaves(state.ratio))
  clipped = jnp.stack(jax.tree.leaves(state.clipped))
  return {
    "min": ratio.min(),
    "mean": ratio.mean(),
    "max": ratio.max(),
    "fraction_clipped": clipped.mean(dtype=jnp.float32),
  }


def _trust_ratio_state(opt_state: optax.OptState) -> ClippedTrustRatioState | None:
  """The part of an optimizer's state, however chained or masked; None if there is none."""

  def is_ours(node: Any) -> bool:
    return isinstance(node, ClippedTrustRatioState)

  found = filter(is_ours, jax.tree.leaves(opt_state, is_leaf=is_ours))
  return next(found, None)
