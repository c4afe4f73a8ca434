"""Optimizers and the learning-rate schedule: Clipped LARS, LARS, SGD and Adam.

SpeedyZero (Mei et al. 2023) uses Clipped LARS. We do not know its formula; the formula, bounds
and defaults here are our interpretation: LARS (You et al. 2017) with the trust ratio of
each layer clipped, see `clipped_trust_ratio` and docs/clipped_lars.md.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from speedyzero_jax.config.schema import OptimConfig

_ROW = 1024  # elements per matrix row


class Layout:
  """Packs the leaves of a tree into a matrix [rows, 1024], each starting at a new row.

  An update of the matrix takes a few large operations instead of several per leaf. The last row of
  a leaf is padded with zeros, so that sums over a leaf are sums over rows, in a fixed order.
  """

  def __init__(self, tree: Any):
    self.leaves, self._structure = jax.tree.flatten(jax.eval_shape(lambda: tree))
    self._rows = [-(-math.prod(leaf.shape) // _ROW) for leaf in self.leaves]
    self.owner = np.repeat(np.arange(len(self.leaves)), self._rows)  # [rows], number of the leaf

  def pack(self, tree: Any) -> jax.Array:
    """Packs a tree of this structure into a float32 matrix."""
    parts = []
    for leaf, rows in zip(jax.tree.leaves(tree), self._rows, strict=True):
      parts += [jnp.ravel(leaf).astype(jnp.float32), jnp.zeros(rows * _ROW - jnp.size(leaf))]
    return jnp.concatenate(parts).reshape(-1, _ROW) if parts else jnp.zeros((0, _ROW))

  def unpack(self, matrix: jax.Array) -> Any:
    """Unpacks a matrix into a tree with the leaves' original dtypes."""
    ends = np.cumsum(self._rows)
    leaves = [
      matrix[end - rows : end].ravel()[: math.prod(leaf.shape)].reshape(leaf.shape)
      for leaf, rows, end in zip(self.leaves, self._rows, ends, strict=True)
    ]
    cast = (x.astype(leaf.dtype) for x, leaf in zip(leaves, self.leaves, strict=True))
    return jax.tree.unflatten(self._structure, cast)

  def sums(self, matrix: jax.Array) -> jax.Array:
    """Returns the sum of each leaf's elements, [leaves]."""
    of_leaf = np.arange(len(self.leaves))[:, None] == self.owner
    return jnp.sum(jnp.where(of_leaf, jnp.sum(matrix, axis=1), 0.0), axis=1)

  @property
  def is_kernel(self) -> np.ndarray:
    """[leaves] bool, true for leaves of rank 2 or more; others, such as biases, are not decayed."""
    return np.array([leaf.ndim >= 2 for leaf in self.leaves], bool)


def on_matrix(make: Callable[[Layout], optax.GradientTransformation]) -> Any:
  """Turns a transformation of packed matrices, made by `make`, into one of trees."""

  def init(params):
    layout = Layout(params)
    return make(layout).init(layout.pack(params))

  def update(updates, state, params):
    layout = Layout(updates)
    inner = make(layout).update
    matrix, state = inner(layout.pack(updates), state, layout.pack(params))
    return layout.unpack(jax.lax.optimization_barrier(matrix)), state

  return optax.GradientTransformation(init, update)


def norm(tree: Any) -> jax.Array:
  """Euclidean norm over all leaves, like `optax.tree.norm`."""
  return jnp.sqrt(jnp.sum(jnp.square(Layout(tree).pack(tree))))


def apply_updates(params: Any, updates: Any) -> Any:
  """Like `optax.apply_updates`."""
  layout = Layout(params)
  # Adding just before unpacking lets XLA unpack leaves of the same shape in one kernel on GPUs.
  old, change = jax.lax.optimization_barrier((layout.pack(params), layout.pack(updates)))
  return layout.unpack(old + change)


class ClippedTrustRatioState(NamedTuple):
  """Trust ratios of the last update.

  Arrays are [kernels], in the order of the params' leaves of rank 2 or more.
  """

  ratio: jax.Array  # float32, after clipping; 1 before the first update
  exempt: jax.Array  # bool, the leaf was zero at initialization


def clipped_trust_ratio(
  layout: Layout,
  trust_coefficient: Any = 0.001,
  trust_min: Any = 0.0,
  trust_max: Any = 1.0,
  weight_decay: Any = 0.0,
  floor: float = 0.0,
) -> optax.GradientTransformation:
  """Adds weight decay to gradients of kernels and scales them by clipped trust ratios.

  Operates on packed matrices. The gradient `g` of a kernel, a leaf of rank 2 or more with weights
  `w`, becomes `ratio * (g + weight_decay * w)`, where

    ratio = clip(trust_coefficient * |w| / (|g| + weight_decay * |w|), trust_min, trust_max)

  and `|.|` is the Euclidean norm over the whole leaf. If either norm is zero, the ratio is 1 before
  clipping. The ratio is proportional to the weight norm, so a leaf near zero would stay near zero.
  Therefore kernels that are zero at initialization, and leaves of rank below 2, are treated
  differently: without `floor` their ratio is 1; with `floor`, `|w|` is at least
  `floor * sqrt(size of the last axis)`, which for a floor of 1 is about the norm of a kernel at
  initialization. Leaves of rank below 2 are never decayed. `optax.lars` differs: it adds the decay
  to the gradient before taking its norm, and applies momentum last.
  """
  kernels = np.flatnonzero(layout.is_kernel)
  least = np.array([floor * math.sqrt(x.shape[-1] if x.shape else 1) for x in layout.leaves], "f4")

  def init(w):
    exempt = layout.sums((w != 0).astype(jnp.float32))[kernels] == 0
    return ClippedTrustRatioState(jnp.ones(len(kernels)), exempt)

  def update(g, state, w):
    g_norm, w_norm = (jnp.sqrt(layout.sums(jnp.square(x))) for x in (g, w))
    small = jnp.ones(len(layout.leaves), bool).at[kernels].set(state.exempt)
    w_norm = jnp.where(small, jnp.maximum(w_norm, least), w_norm)
    decay = jnp.where(layout.is_kernel, weight_decay, 0.0)
    zero = (g_norm == 0) | (w_norm == 0)
    denominator = jnp.where(zero, 1.0, g_norm + decay * w_norm)
    unclipped = jnp.where(zero, 1.0, trust_coefficient * w_norm / denominator)
    adapted = jnp.ones_like(small) if floor else ~small
    ratio = jnp.where(adapted, jnp.clip(unclipped, trust_min, trust_max), 1.0).astype(jnp.float32)
    scaled = ratio[layout.owner][:, None] * (g + decay[layout.owner][:, None] * w)
    return scaled, ClippedTrustRatioState(ratio[kernels], state.exempt)

  return optax.GradientTransformation(init, update)


def _decay_kernels(layout: Layout, decay: float) -> optax.GradientTransformation:
  """`optax.add_decayed_weights` on matrices, for kernels only."""
  rate = np.where(layout.is_kernel, decay, 0.0).astype(np.float32)[layout.owner][:, None]
  return optax.stateless(lambda g, w: g + rate * w)


def learning_rate_schedule(config: OptimConfig) -> optax.Schedule:
  """Returns the learning-rate schedule: a linear warm-up from 0, then a decay.

  At step t the rate is `learning_rate * t / warmup_steps` until step `warmup_steps`, so the first
  step has rate 0. Afterwards it is, for `decay=staircase`,
  `learning_rate * decay_rate ** ((t - warmup_steps) // decay_steps)`, and for `decay=linear`,
  `learning_rate * max(1 - (t - warmup_steps) / decay_steps, 0)`. `decay_steps=0` disables decay.

  Source: EfficientZero (Ye et al. 2021), released code.
  """

  def schedule(count: jax.typing.ArrayLike) -> jax.Array:
    rate = jnp.asarray(config.learning_rate, jnp.float32)
    if config.warmup_steps:
      rate *= jnp.minimum(1.0, jnp.asarray(count) / config.warmup_steps)
    if config.decay_steps:
      since = jnp.maximum(jnp.asarray(count) - config.warmup_steps, 0)
      linear = jnp.maximum(1 - since / config.decay_steps, 0)
      staircase = config.decay_rate ** (since // config.decay_steps)
      rate *= linear if config.decay == "linear" else staircase
    return rate

  return schedule


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
  """Returns the configured optimizer, with its schedule and gradient clipping.

  Gradients are first clipped to the global norm `clip_norm` (unless 0). Weight decay applies to
  kernels only. For Adam it is decoupled (as in `optax.adamw`); for the others it enters the
  momentum buffer. LARS is Clipped LARS without bounds.

  (Clipped) LARS applies trust ratio, momentum and learning rate in this order. So if every ratio is
  clipped to 1, it equals SGD with momentum and weight decay, under any schedule. You et al. put the
  learning rate inside the momentum buffer, which is equivalent at a constant rate.
  """
  return on_matrix(functools.partial(_on_layout, config))


def _on_layout(config: OptimConfig, layout: Layout) -> optax.GradientTransformation:
  rate, decay = optax.scale_by_learning_rate(learning_rate_schedule(config)), config.weight_decay
  steps: list[optax.GradientTransformation]
  if config.name == "adam":
    steps = [optax.scale_by_adam(b1=config.momentum), _decay_kernels(layout, decay), rate]
  elif config.name == "sgd":
    steps = [_decay_kernels(layout, decay), optax.trace(config.momentum), rate]
  elif config.name in ("lars", "clipped_lars"):
    clipped = config.name == "clipped_lars"
    bounds = (config.trust_min, config.trust_max) if clipped else (0.0, math.inf)
    ratio = clipped_trust_ratio(
      layout, config.trust_coefficient, *bounds, decay, config.min_weight_norm
    )
    steps = [ratio, optax.trace(config.momentum), rate]
  else:
    raise ValueError(f"optim.name: no optimizer {config.name!r}")
  clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
  return optax.chain(*clip, *steps)


def trust_ratios(opt_state: optax.OptState, params: Any) -> dict[str, np.ndarray]:
  """Returns the trust ratio of every kernel at the last update, by path in the params.

  Values are float32 scalars on the host, with names such as `dynamics/conv/kernel`. Empty for
  optimizers other than (Clipped) LARS.
  """
  state = optax.tree.get(opt_state, "ClippedTrustRatioState")
  names = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if jnp.ndim(leaf) >= 2
  ]
  return {} if state is None else dict(zip(names, jax.device_get(state.ratio), strict=True))
