"""Layers of EfficientZero's networks: convolutions, batch norm, LSTM and residual blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.agents.efficientzero.config import NetworkConfig
from speedyzero_jax.ops.batch_norm import BatchNorm, relu
from speedyzero_jax.ops.conv import convolve

Carry = tuple[jax.Array, jax.Array]  # the LSTM's (c, h), each [B, lstm_hidden]

_HE = nnx.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
_LECUN = nnx.initializers.lecun_normal()
EPSILON = 1e-5  # added to variances
_ZEROS = nnx.initializers.zeros


def _uniform(fan_in: int) -> nnx.Initializer:
  """Uniform in +-1/sqrt(fan_in), PyTorch's default for kernels and biases."""
  limit = fan_in**-0.5

  def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32, *_: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -limit, limit)

  return init


class Layers:
  """Factory of layers that share a configuration; if `folded`, kernels include batch norm."""

  def __init__(
    self,
    config: NetworkConfig,
    axis_name: str | None,
    rngs: nnx.Rngs,
    *,
    vectors: bool,
    folded: bool = False,
  ):
    self.dtype, self.folded = jnp.dtype(config.dtype), folded
    self.kernel = (1, 1) if vectors else (3, 3)
    self._config, self._axis_name, self._rngs = config, axis_name, rngs
    self._pytorch = config.init == "pytorch"

  def conv(
    self,
    inputs: int,
    outputs: int,
    *,
    kernel: tuple[int, int] | None = None,
    stride: int = 1,
    normed: bool = True,
  ) -> nnx.Conv:
    kernel = kernel or self.kernel
    pad = kernel[0] // 2
    return nnx.Conv(
      inputs, outputs, kernel, strides=stride, padding=pad, use_bias=self.folded and normed,
      dtype=self.dtype, rngs=self._rngs, conv_general_dilated=convolve,
      kernel_init=_uniform(inputs * kernel[0] * kernel[1]) if self._pytorch else _HE,
    )  # fmt: skip

  def norm(self, features: int, *, foldable: bool = True) -> Any:
    if self.folded and foldable:
      return _folded_norm
    return BatchNorm(
      features,
      momentum=self._config.bn_momentum,
      epsilon=EPSILON,
      dtype=self.dtype,
      axis_name=self._axis_name,
      rngs=self._rngs,
    )

  def linear(self, inputs: int, outputs: int) -> nnx.Linear:
    init = _uniform(inputs) if self._pytorch else _LECUN
    return nnx.Linear(
      inputs,
      outputs,
      dtype=self.dtype,
      kernel_init=init,
      bias_init=init if self._pytorch else _ZEROS,
      rngs=self._rngs,
    )

  def logits(self, inputs: int, outputs: int) -> nnx.Linear:
    """A linear layer that starts at zero, in float32, as bfloat16 has steps of 1/16 above 8.

    `NetworkDef.fold` recognizes it by the name `linear2`.
    """
    return nnx.Linear(inputs, outputs, dtype=jnp.float32, kernel_init=_ZEROS, rngs=self._rngs)

  def lstm(self, inputs: int, hidden: int) -> Any:
    if self.folded:
      return _FoldedLstm(self.linear(inputs + hidden, 4 * hidden))
    # PyTorch adds two such biases; here there is one.
    kinds = ("kernel_init", "recurrent_kernel_init", "bias_init") if self._pytorch else ()
    inits: dict[str, Any] = dict.fromkeys(kinds, _uniform(hidden))
    return nnx.OptimizedLSTMCell(inputs, hidden, dtype=self.dtype, rngs=self._rngs, **inits)


def linear_before_norm(linear: Any, x: jax.Array) -> jax.Array:
  """Linear layer before a batch norm, which cancels the bias; the bias gets no gradient."""
  y = x @ linear.kernel[...].astype(x.dtype)
  return y + jax.lax.stop_gradient(linear.bias[...]).astype(x.dtype)


class _FoldedLstm(nnx.Module):
  """`nnx.OptimizedLSTMCell` with one matrix product."""

  def __init__(self, linear: nnx.Linear):
    self.linear = linear

  def __call__(self, carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
    c, h = carry
    input_gate, forget_gate, candidate, output_gate = jnp.split(
      self.linear(jnp.concatenate([x, h], -1)), 4, axis=-1
    )
    c = nnx.sigmoid(forget_gate) * c + nnx.sigmoid(input_gate) * jnp.tanh(candidate)
    h = nnx.sigmoid(output_gate) * jnp.tanh(c)
    return (c, h), h


def _folded_norm(x: jax.Array, use_running_average: bool) -> jax.Array:
  assert use_running_average, "folded variables are for inference"
  return x


class ResBlock(nnx.Module):
  """Two normalized convolutions, and a skip connection with a convolution if the shape changes."""

  def __init__(self, layers: Layers, inputs: int, outputs: int, stride: int = 1):
    self.stride = stride
    self.conv1, self.norm1 = layers.conv(inputs, outputs, stride=stride), layers.norm(outputs)
    self.conv2, self.norm2 = layers.conv(outputs, outputs), layers.norm(outputs)
    self.skip = (
      layers.conv(inputs, outputs, stride=stride, normed=False)
      if stride != 1 or inputs != outputs
      else None
    )

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    if self.skip is None:
      y = self.conv1(x)
    elif train:  # one convolution reads the input once
      kernel = jnp.concatenate([self.conv1.kernel[...], self.skip.kernel[...]], axis=-1)
      y, x = jnp.split(convolve_same(x, kernel.astype(x.dtype), self.stride), 2, axis=-1)
    else:
      y, x = self.conv1(x), self.skip(x)
    y = nnx.relu(self.norm1(y, use_running_average=not train))
    y = self.norm2(self.conv2(y), use_running_average=not train)
    return relu(y + x)


def blocks_of(layers: Layers, channels: int, count: int) -> nnx.List:
  return nnx.List([ResBlock(layers, channels, channels) for _ in range(count)])


def convolve_same(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
  """Convolution [B, H, W, C] -> [B, H / stride, W / stride, C'] with zero padding."""
  pads = [(size // 2, size // 2) for size in kernel.shape[:2]]
  return convolve(x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
