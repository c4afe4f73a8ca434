"""EfficientZero's networks: representation h, dynamics g, value-prefix LSTM, prediction f, SimSiam.

Images are [B, H, W, S*C]. Vectors are images of one pixel, [B, 1, 1, S*D], with 1x1 kernels.
Parameters and logits are float32, activations `config.dtype`. For inference (search, values)
variables are folded, see `network_def`.

Source: EfficientZero (Ye et al. 2021), appendix A and released code.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speedyzero_jax.agents.efficientzero.config import NetworkConfig
from speedyzero_jax.agents.efficientzero.layers import (
  Carry,
  Layers,
  ResBlock,
  blocks_of,
  convolve_same,
  linear_before_norm,
)
from speedyzero_jax.ops.batch_norm import relu


def _pool(x: jax.Array) -> jax.Array:
  return nnx.avg_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))


class Representation(nnx.Module):
  """h: observation [B, H, W, S*C] in [0, 1] -> hidden state [B, H/d, W/d, channels]."""

  def __init__(self, config: NetworkConfig, layers: Layers, inputs: int):
    channels, half, d = config.channels, config.channels // 2, config.downsample
    first = channels if d == 1 else half
    self.conv, self.norm = layers.conv(inputs, first, stride=1 if d == 1 else 2), layers.norm(first)
    stages: list[nnx.List] = []
    if d > 1:
      stages.append(blocks_of(layers, half, config.blocks))
      self.down: ResBlock | None = ResBlock(layers, half, channels, stride=2)
    else:
      self.down = None
    # Beyond a factor of 4, each halving is a residual stage and an average pool. Another residual
    # stage follows at the end.
    self.pools = {1: 0, 4: 0, 8: 1, 16: 2}[d]
    stages.extend(blocks_of(layers, channels, config.blocks) for _ in range(self.pools + 1))
    self.stages = nnx.List(stages)

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    x = nnx.relu(self.norm(self.conv(x), use_running_average=not train))
    stages = list(self.stages)
    if self.down is not None:
      for block in stages.pop(0):
        x = block(x, train)
      x = self.down(x, train)
    for i, stage in enumerate(stages):
      for block in stage:
        x = block(x, train)
      if i < self.pools:
        x = _pool(x)
    return x


class Head(nnx.Module):
  """1x1 convolution, then an MLP with one hidden layer; or `count` of these side by side."""

  def __init__(
    self, config: NetworkConfig, layers: Layers, pixels: int, outputs: int, count: int = 1
  ):
    reduced = count * config.reduced_channels
    self.conv = layers.conv(config.channels, reduced, kernel=(1, 1))
    self.norm = layers.norm(reduced)
    self.mlp = Mlp(layers, pixels * reduced, count * config.head_hidden, outputs)

  def __call__(self, state: jax.Array, train: bool) -> jax.Array:
    x = nnx.relu(self.norm(self.conv(state), use_running_average=not train))
    return self.mlp(x.reshape(x.shape[0], -1), train)


class Mlp(nnx.Module):
  """Linear, batch norm, ReLU, linear (initialized to zero); float32 output."""

  def __init__(self, layers: Layers, inputs: int, hidden: int, outputs: int):
    self.linear1, self.norm1 = layers.linear(inputs, hidden), layers.norm(hidden)
    self.linear2 = layers.logits(hidden, outputs)

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    x = nnx.relu(self.norm1(linear_before_norm(self.linear1, x), use_running_average=not train))
    return self.linear2(x)


class Dynamics(nnx.Module):
  """g without the reward: (hidden state, action) -> next hidden state.

  The inputs of the first convolution are the state and constant planes that encode the action. A
  plane's contribution to the output is the same for all samples up to a factor. So it is computed
  once and added, and the convolution itself keeps an even number of channels.
  """

  def __init__(
    self, config: NetworkConfig, layers: Layers, num_actions: int, shape: tuple[int, int]
  ):
    self.num_actions, self.one_hot = num_actions, config.action_encoding == "one_hot"
    channels, planes = config.channels, num_actions if self.one_hot else 1
    self.dtype = layers.dtype
    self.conv = layers.conv(channels if layers.folded else channels + planes, channels)
    self.action_terms = (
      nnx.Param(jnp.zeros((planes, *shape, channels), self.dtype)) if layers.folded else None
    )
    self.norm = layers.norm(channels)
    self.blocks = blocks_of(layers, channels, config.blocks)

  def __call__(self, state: jax.Array, action: jax.Array, train: bool) -> jax.Array:
    if self.action_terms is None:
      of_state, terms = split_kernel(self.conv.kernel[...].astype(self.dtype), state.shape[1:])
      x = convolve_same(state, of_state) + self._action_term(action, terms)
      x = relu(self.norm(x, use_running_average=not train) + state)
    else:  # one addition to the convolution's result, which cuDNN does itself
      x = nnx.relu(self.conv(state) + (self._action_term(action, self.action_terms[...]) + state))
    for block in self.blocks:
      x = block(x, train)
    return x

  def _action_term(self, action: jax.Array, terms: jax.Array) -> jax.Array:
    """Outputs of the first convolution for the planes of the actions [B] -> [B, h, w, C]."""
    if not self.one_hot:
      return (action[:, None, None, None] / self.num_actions).astype(terms.dtype) * terms
    if self.action_terms is not None:
      return terms[action]
    one_hot = jax.nn.one_hot(action, self.num_actions, dtype=terms.dtype)
    return jnp.tensordot(one_hot, terms, 1)  # the gradient of an index would be a scatter


def split_kernel(kernel: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Splits the dynamics' first convolution into a kernel for the state and outputs for the planes.

  Args:
    kernel: [k, k, C + planes, C].
    shape: [h, w, C] of the state.

  Returns:
    The kernel for the state, and the convolution's output for each plane of ones,
    [planes, h, w, C]; it varies near the edges because of zero padding.
  """
  *size, channels = shape
  inside = []  # [h, k] and [w, k]: whether an output's tap is inside of the image
  for length, taps in zip(size, kernel.shape[:2], strict=True):
    position = np.arange(length)[:, None] + np.arange(taps) - taps // 2
    inside.append((position >= 0) & (position < length))
  mask = np.einsum("hi,wj->hwij", *inside)
  of_planes = jnp.moveaxis(kernel[:, :, channels:], 2, 0)[:, None, None]  # [planes, 1, 1, k, k, C]
  terms = jnp.sum(jnp.where(mask[..., None], of_planes, 0), axis=(3, 4))
  return kernel[:, :, :channels], terms


class ValuePrefix(nnx.Module):
  """Logits of the value prefix [.., 2*support+1] from hidden states, by an LSTM over the unroll."""

  def __init__(self, config: NetworkConfig, layers: Layers, pixels: int):
    self.conv = layers.conv(config.channels, config.reduced_channels, kernel=(1, 1))
    self.norm = layers.norm(config.reduced_channels)
    self.lstm = layers.lstm(pixels * config.reduced_channels, config.lstm_hidden)
    self.lstm_norm = layers.norm(config.lstm_hidden, foldable=False)  # no kernel precedes it
    self.mlp = Mlp(layers, config.lstm_hidden, config.head_hidden, 2 * config.support + 1)
    self.horizon = config.value_prefix_horizon

  def __call__(self, states: jax.Array, carry: Carry, train: bool) -> tuple[Carry, jax.Array]:
    """Unrolled states [K, B, ...] -> last carry, logits [K, B, atoms].

    Within the unroll the carry is reset every `horizon` steps.
    """
    steps, batch = states.shape[:2]
    x = states.reshape(-1, *states.shape[2:])
    x = nnx.relu(self.norm(self.conv(x), use_running_average=not train)).reshape(steps, batch, -1)
    outputs = []
    for k in range(steps):
      if k and k % self.horizon == 0:
        carry = jax.tree.map(jnp.zeros_like, carry)
      carry, output = self.lstm(carry, x[k])
      outputs.append(output)
    x = jnp.concatenate(outputs)
    x = nnx.relu(self.lstm_norm(x, use_running_average=not train))
    return carry, self.mlp(x, train).reshape(steps, batch, -1)


class Consistency(nnx.Module):
  """SimSiam heads (Chen & He 2020): `project` both branches, `predict` the one with gradient."""

  def __init__(self, config: NetworkConfig, layers: Layers, inputs: int):
    hidden, out = config.projection_hidden, config.projection_out
    sizes = [(inputs, hidden), (hidden, hidden), (hidden, out)]
    self.linears = nnx.List([layers.linear(i, o) for i, o in sizes])
    self.norms = nnx.List([layers.norm(o) for _, o in sizes])
    narrow = config.prediction_hidden
    self.predict1, self.predict_norm = layers.linear(out, narrow), layers.norm(narrow)
    self.predict2 = layers.linear(narrow, out)

  def project(self, state: jax.Array, train: bool) -> jax.Array:
    x = state.reshape(state.shape[0], -1)
    for i, (linear, norm) in enumerate(zip(self.linears, self.norms, strict=True)):
      x = norm(linear_before_norm(linear, x), use_running_average=not train)
      if i < len(self.linears) - 1:
        x = nnx.relu(x)
    return x

  def predict(self, projection: jax.Array, train: bool) -> jax.Array:
    x = linear_before_norm(self.predict1, projection)
    x = nnx.relu(self.predict_norm(x, use_running_average=not train))
    return self.predict2(x)


def initial_carry(config: NetworkConfig, batch: int) -> Carry:
  """The LSTM's (c, h) after a reset: zeros [B, lstm_hidden] of dtype `config.dtype`."""
  zeros = jnp.zeros((batch, config.lstm_hidden), config.dtype)
  return zeros, zeros


class Network(nnx.Module):
  """All networks. With `train`, batch norm uses batch statistics and updates the running ones.

  Args:
    observation_shape: [H, W, S*C].
    axis_name: mesh axis over which batch statistics are averaged; None: per device.
    folded: build the network for variables from `NetworkDef.fold`, without modules that only the
      loss uses.
  """

  def __init__(
    self,
    config: NetworkConfig,
    observation_shape: tuple[int, int, int],
    num_actions: int,
    *,
    axis_name: str | None = None,
    rngs: nnx.Rngs,
    folded: bool = False,
  ):
    height, width, channels = observation_shape
    layers = Layers(config, axis_name, rngs, vectors=height * width == 1, folded=folded)
    shape = height // config.downsample, width // config.downsample
    pixels = math.prod(shape)
    self.config, self.dtype, self.folded = config, layers.dtype, folded
    self.representation = Representation(config, layers, channels)
    self.dynamics = Dynamics(config, layers, num_actions, shape)
    self.value_prefix = ValuePrefix(config, layers, pixels)
    self.trunk = blocks_of(layers, config.channels, config.blocks)
    atoms = 2 * config.support + 1
    if folded:
      self.heads = Head(config, layers, pixels, atoms + num_actions, 2)
    else:
      self.value = Head(config, layers, pixels, atoms)
      self.policy = Head(config, layers, pixels, num_actions)
      self.consistency = Consistency(config, layers, pixels * config.channels)

  def represent(self, observation: jax.Array, train: bool) -> jax.Array:
    """[B, H, W, S*C] -> hidden state [B, h, w, channels]."""
    return self.representation(observation.astype(self.dtype), train)

  def predict(self, state: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
    """Hidden state -> value logits [B, 2*support+1], policy logits [B, A], both float32."""
    for block in self.trunk:
      state = block(state, train)
    if self.folded:
      value, policy = jnp.split(self.heads(state, train), [2 * self.config.support + 1], axis=-1)
      return value, policy
    return self.value(state, train), self.policy(state, train)

  def step(
    self, state: jax.Array, carry: Carry, action: jax.Array
  ) -> tuple[jax.Array, Carry, jax.Array]:
    """One step in search, action [B] -> next state, next carry, value-prefix logits [B, atoms]."""
    state = self.dynamics(state, action, False)
    carry, prefix_logits = self.value_prefix(state[None], carry, False)
    return state, carry, prefix_logits[0]

  def initial_carry(self, batch: int) -> Carry:
    """See `initial_carry`."""
    return initial_carry(self.config, batch)
