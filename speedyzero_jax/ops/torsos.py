"""Torsos, the layers from an observation to features, and utilities for networks.

A vector of D numbers is an image of one pixel, [1, 1, D].
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs.batched_env import frame_sides
from speedyzero_jax.ops.conv import convolve
from speedyzero_jax.ops.param_rngs import param_rngs
from speedyzero_jax.types import Params

_INIT = nnx.initializers.he_normal()
# Convolutions: channels over `channels`, kernel, stride.
_NATURE = ((1, 8, 4), (2, 4, 2), (2, 3, 1))
_SMALL = ((1, 4, 2), (2, 4, 2))
_NATURE_SIDE = 36  # pixels, minimum side for which the last convolution has an output


@dataclasses.dataclass(frozen=True)
class TorsoConfig:
  """Layers from an observation to features."""

  torso: Literal["auto", "mlp", "nature", "small", "resnet"] = opt(
    "auto",
    "mlp, nature: convolutions of DQN (Mnih et al. 2015), small: two convolutions for images of "
    "about 42 pixels (RLlib), resnet: residual network of IMPALA (Espeholt et al. 2018); auto: mlp "
    "for vectors, nature for images of at least 36 pixels, resnet for smaller ones",
  )
  standardize: bool = opt(
    False,
    "standardize each observation, a stack of images, to mean 0 and standard deviation 1, for low "
    "contrast (ours)",
  )
  hidden: int = opt(512, "width of the hidden layers and the features (DQN: 512)", "[1, 1e5]")
  layers: int = opt(2, "mlp: number of hidden layers", "[1, 100]")
  channels: int = opt(
    32, "channels of the first convolutions; later ones have twice as many (DQN: 32)", "[1, 1e5]"
  )


class Mlp(nnx.Module):
  """Linear layers with ReLU."""

  def __init__(self, config: TorsoConfig, shape: tuple[int, ...], rngs: nnx.Rngs):
    height, width, channels = shape
    sizes = [height * width * channels, *[config.hidden] * config.layers]
    self.layers = nnx.List([_linear(i, o, rngs) for i, o in itertools.pairwise(sizes)])

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.reshape(len(x), -1)
    for layer in self.layers:
      x = nnx.relu(layer(x))
    return x


class Convolutions(nnx.Module):
  """Convolutions and a linear layer.

  nature: three convolutions without padding (Mnih et al. 2015, methods); small: two with padding,
  the first layers of RLlib's network for images of 42x42.
  """

  def __init__(
    self, config: TorsoConfig, shape: tuple[int, ...], rngs: nnx.Rngs, small: bool = False
  ):
    height, width, inputs = shape
    convs = []
    for times, kernel, stride in _SMALL if small else _NATURE:
      outputs = times * config.channels
      convs.append(_conv(inputs, outputs, kernel, stride, "SAME" if small else "VALID", rngs))
      lost = 1 if small else kernel
      height, width = (height - lost) // stride + 1, (width - lost) // stride + 1
      inputs = outputs
    self.convs = nnx.List(convs)
    self.linear = _linear(height * width * inputs, config.hidden, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    for conv in self.convs:
      x = nnx.relu(conv(x))
    return nnx.relu(self.linear(x.reshape(len(x), -1)))


class ResidualBlock(nnx.Module):
  """Two 3x3 convolutions after ReLU, and a skip connection; no normalization."""

  def __init__(
    self,
    channels: int,
    rngs: nnx.Rngs,
    init: nnx.Initializer = _INIT,
    last_init: nnx.Initializer = _INIT,
  ):
    self.conv1 = _conv(channels, channels, 3, 1, "SAME", rngs, init)
    self.conv2 = _conv(channels, channels, 3, 1, "SAME", rngs, last_init)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x + self.conv2(nnx.relu(self.conv1(nnx.relu(x))))


class ResNet(nnx.Module):
  """Three stages, each a convolution, a pool and two residual blocks; a linear layer.

  Source: Espeholt et al. 2018, figure 3, the large architecture.
  """

  def __init__(self, config: TorsoConfig, shape: tuple[int, ...], rngs: nnx.Rngs):
    height, width, inputs = shape
    convs, blocks = [], []
    for times in (1, 2, 2):
      outputs = times * config.channels
      convs.append(_conv(inputs, outputs, 3, 1, "SAME", rngs))
      blocks += [ResidualBlock(outputs, rngs) for _ in range(2)]
      height, width, inputs = (height + 1) // 2, (width + 1) // 2, outputs
    self.convs, self.blocks = nnx.List(convs), nnx.List(blocks)
    self.linear = _linear(height * width * inputs, config.hidden, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    for i, conv in enumerate(self.convs):
      x = nnx.max_pool(conv(x), (3, 3), (2, 2), padding="SAME")
      for block in self.blocks[2 * i : 2 * i + 2]:
        x = block(x)
    return nnx.relu(self.linear(nnx.relu(x).reshape(len(x), -1)))


class Standardized(nnx.Module):
  """A torso whose observations are standardized, each over all its pixels and channels."""

  def __init__(self, torso: nnx.Module):
    self.torso = torso

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.torso(jax.nn.standardize(x, axis=(1, 2, 3), epsilon=255**-2))


class Decoder(nnx.Module):
  """Features [..., D] -> reconstructed observations [B, H, W, C], with leading dimensions merged.

  A linear layer and three transposed convolutions; for vectors, two linear layers.
  """

  def __init__(self, config: TorsoConfig, shape: tuple[int, int, int], rngs: nnx.Rngs):
    height, width, outputs = self._shape = shape
    self._flat, first = min(height, width) == 1, 2 * config.channels
    self._start = (config.hidden,) if self._flat else (-(-height // 8), -(-width // 8), first)
    self.linear = _linear(config.hidden, math.prod(self._start), rngs)
    channels = first, first, config.channels, outputs
    self.layers = nnx.List(
      [_linear(config.hidden, math.prod(shape), rngs)] if self._flat else
      [
        nnx.ConvTranspose(i, o, (4, 4), (2, 2), kernel_init=_INIT, rngs=rngs)
        for i, o in itertools.pairwise(channels)
      ]
    )  # fmt: skip

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.linear(x).reshape(-1, *self._start)
    for layer in self.layers:
      x = layer(nnx.relu(x))
    return x.reshape(-1, *self._shape) if self._flat else x[:, : self._shape[0], : self._shape[1]]


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
  return nnx.Linear(inputs, outputs, kernel_init=_INIT, rngs=rngs)


def _conv(
  inputs: int,
  outputs: int,
  size: int,
  stride: int,
  padding: str,
  rngs: nnx.Rngs,
  init: nnx.Initializer = _INIT,
) -> nnx.Conv:
  return nnx.Conv(
    inputs, outputs, (size, size), stride, padding=padding, kernel_init=init, rngs=rngs,
    conv_general_dilated=convolve,
  )  # fmt: skip


def make_torso(config: TorsoConfig, shape: tuple[int, int, int], rngs: nnx.Rngs) -> nnx.Module:
  """Makes the configured torso: observations [B, *shape] float32 -> features [B, hidden]."""
  kind = config.torso
  if kind == "auto":
    side = min(shape[:2])
    kind = "mlp" if side == 1 else "nature" if side >= _NATURE_SIDE else "resnet"
  make: dict[str, Callable[..., nnx.Module]] = {
    "mlp": Mlp,
    "nature": Convolutions,
    "small": functools.partial(Convolutions, small=True),
    "resnet": ResNet,
  }
  torso = make[kind](config, shape, rngs)
  return Standardized(torso) if config.standardize else torso


def torso_problems(config: TorsoConfig, env: EnvConfig) -> Iterable[str]:
  """Yields `key: problem` if the torso does not fit the environment's observations."""
  try:
    side = min(frame_sides(env))
  except ValueError as error:
    yield f"env.game: {error}"
    return
  if side == 1 and config.torso not in ("auto", "mlp"):
    yield f"network.torso: must be mlp for {env.game}, whose frames are vectors, got {config.torso}"
  elif side == 1 and config.standardize:
    yield f"network.standardize: must be false for {env.game}, whose frames are vectors"
  elif side < _NATURE_SIDE and config.torso == "nature":
    yield (
      f"network.torso: nature needs images of at least {_NATURE_SIDE} pixels on each side, got "
      f"{side}"
    )


def normalize(x: jax.Array) -> jax.Array:
  """Converts uint8 images to float32 in [0, 1], and vectors to float32."""
  return x.astype(jnp.float32) / (255 if x.dtype == jnp.uint8 else 1)


def observe(frames: jax.Array) -> jax.Array:
  """Stacked frames [..., S, H, W, C] -> float32 observations [..., H, W, S*C]; images in [0, 1]."""
  x = jnp.moveaxis(frames, -4, -2)
  return normalize(x.reshape(*x.shape[:-2], -1))


def stacked(frames: jax.Array, index: jax.Array) -> jax.Array:
  """Frames [B, F, H, W, C] of a window, indices [B, T, S] into F -> stacks [B, T, S, H, W, C].

  Indices are out of range only for evicted samples, which are masked.
  """
  return jax.vmap(lambda frames, at: frames.at[at].get(mode="clip"))(frames, index)


class FunctionalNetwork(NamedTuple):
  """A network as functions of its parameters."""

  init: Callable[[jax.Array], Params]  # from a random key
  apply: Callable[..., Any]  # (params, *arguments) -> outputs


def functional(make: Callable[[nnx.Rngs], nnx.Module]) -> FunctionalNetwork:
  """Turns a network that `make` constructs, with no state but parameters, into pure functions."""
  graph = nnx.graphdef(nnx.eval_shape(lambda: make(param_rngs(jax.random.key(0)))))

  def init(key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(make(param_rngs(key)), nnx.Param))

  def apply(params: Params, *arguments: Any) -> Any:
    return nnx.merge(graph, params)(*arguments)

  return FunctionalNetwork(init, apply)
