"""Tests of torsos: shapes, convolutions against float64 arithmetic, and observations."""

import jax
import numpy as np
import pytest

from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.ops import torsos
from speedyzero_jax.ops.torsos import TorsoConfig
from speedyzero_jax.system.platform import planned


def _torso(shape, **sizes):
  config = TorsoConfig(**{"hidden": 8, "channels": 4, **sizes})
  return torsos.functional(lambda rngs: torsos.make_torso(config, shape, rngs))


@pytest.mark.parametrize(
  ("torso", "shape", "parameters"),
  [
    ("auto", (1, 1, 5), 5 * 8 + 8 + 8 * 8 + 8),
    ("mlp", (2, 3, 2), 12 * 8 + 8 + 8 * 8 + 8),
    # 42 -> 9 -> 3 -> 1
    ("auto", (42, 42, 3), (64 * 3 * 4 + 4) + (16 * 4 * 8 + 8) + (9 * 8 * 8 + 8) + (8 * 8 + 8)),
    # 21x24 -> 11x12 -> 6x6
    ("small", (21, 24, 3), (16 * 3 * 4 + 4) + (16 * 4 * 8 + 8) + (36 * 8 * 8 + 8)),
    # 21x22 -> 11x11 -> 6x6 -> 3x3
    (
      "resnet",
      (21, 22, 3),
      (27 * 4 + 4) + 4 * (36 * 4 + 4) + (36 * 8 + 8) + (72 * 8 + 8) + 8 * (72 * 8 + 8) + 72 * 8 + 8,
    ),
  ],
)
def test_features_and_parameters(torso, shape, parameters):
  network = _torso(shape, torso=torso)
  params = jax.eval_shape(network.init, jax.random.key(0))
  features = jax.eval_shape(network.apply, params, np.zeros((3, *shape), np.float32))
  assert features.shape == (3, 8) and features.dtype == np.float32
  assert sum(x.size for x in jax.tree.leaves(params)) == parameters


def test_gradients_on_cpus_are_those_of_large_batches():
  network = _torso((42, 42, 3), torso="nature")
  params = jax.eval_shape(network.init, jax.random.key(0))

  def gradient(params, x):
    return jax.grad(lambda params: network.apply(params, x).sum())(params)

  with planned("cpu"):
    x = jax.ShapeDtypeStruct((256, 42, 42, 3), np.float32)
    text = jax.jit(gradient).trace(params, x).lower().as_text()
  assert "stablehlo.convolution" in text and "lhs_dilate = [2, 2]" not in text


@pytest.mark.parametrize("shape", [(42, 45, 3), (1, 1, 5), (4, 1, 2)])
def test_a_decoder_is_transposed_convolutions_or_linear_for_vectors(shape):
  config, rng = TorsoConfig(hidden=16, channels=4), np.random.default_rng(0)
  network = torsos.functional(lambda rngs: torsos.Decoder(config, shape, rngs))
  params = jax.eval_shape(network.init, jax.random.key(0))
  params = jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), params)
  features = rng.normal(size=(2, 3, 16)).astype(np.float32)
  ours = jax.jit(network.apply)(params, features)

  p = jax.tree.map(np.float64, params)
  y = features.reshape(6, 16) @ p["linear"]["kernel"] + p["linear"]["bias"]
  if 1 in shape:
    layer = p["layers"][0]
    y = (np.maximum(y, 0) @ layer["kernel"] + layer["bias"]).reshape(6, *shape)
  else:
    y = y.reshape(6, -(-shape[0] // 8), -(-shape[1] // 8), 8)
    for i in range(3):
      height, width = 2 * np.array(y.shape[1:3])
      spread = np.zeros((6, height + 3, width + 3, y.shape[-1]))
      spread[:, 2:-1:2, 2:-1:2] = np.maximum(y, 0)
      found = np.lib.stride_tricks.sliding_window_view(spread, (4, 4), (1, 2))
      layer = p["layers"][i]
      y = np.tensordot(np.moveaxis(found, 3, -1), layer["kernel"], 3) + layer["bias"]
  np.testing.assert_allclose(ours, y[:, : shape[0], : shape[1]], rtol=1e-4, atol=1e-4)


def test_nature_is_three_strided_convolutions_and_a_linear_layer():
  network = _torso((38, 36, 2))
  params, rng = jax.eval_shape(network.init, jax.random.key(1)), np.random.default_rng(1)
  params = jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), params)
  x = rng.random((2, 38, 36, 2), np.float32)
  ours = jax.jit(network.apply)(params, x)

  p, y = jax.tree.map(np.float64, params), x.astype(np.float64)
  for layer, stride in zip((p["convs"][i] for i in range(3)), (4, 2, 1), strict=True):
    k = layer["kernel"].shape[0]
    rows, columns = ((side - k) // stride + 1 for side in y.shape[1:3])
    out = np.zeros((len(y), rows, columns, layer["kernel"].shape[-1]))
    for i in range(rows):
      for j in range(columns):
        patch = y[:, i * stride : i * stride + k, j * stride : j * stride + k]
        out[:, i, j] = np.tensordot(patch, layer["kernel"], 3)
    y = np.maximum(out + layer["bias"], 0)
  y = np.maximum(y.reshape(2, -1) @ p["linear"]["kernel"] + p["linear"]["bias"], 0)
  np.testing.assert_allclose(ours, y, rtol=1e-4, atol=1e-5)


def _windows(x, size, stride, fill):
  """Padded windows [B, h, w, size, size, C] of images, as XLA's padding SAME."""
  widths = []
  for side in x.shape[1:3]:
    missing = max((-(-side // stride) - 1) * stride + size - side, 0)
    widths.append((missing // 2, missing - missing // 2))
  padded = np.pad(x, ((0, 0), *widths, (0, 0)), constant_values=fill)
  found = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
  return np.moveaxis(found[:, ::stride, ::stride], 3, -1)


def test_resnet_is_convolutions_max_pools_and_residual_blocks():
  network = _torso((9, 6, 2), torso="resnet", channels=2)
  params, rng = jax.eval_shape(network.init, jax.random.key(1)), np.random.default_rng(1)
  params = jax.tree.map(lambda x: 0.4 * rng.normal(size=x.shape).astype(np.float32), params)
  x = rng.normal(size=(3, 9, 6, 2)).astype(np.float32)
  ours = jax.jit(network.apply)(params, x)

  def conv(layer, y):
    return np.tensordot(_windows(y, 3, 1, 0), layer["kernel"], 3) + layer["bias"]

  p, y = jax.tree.map(np.float64, params), x.astype(np.float64)
  for i in range(3):
    y = _windows(conv(p["convs"][i], y), 3, 2, -np.inf).max((3, 4))
    for block in (p["blocks"][2 * i], p["blocks"][2 * i + 1]):
      y = y + conv(block["conv2"], np.maximum(conv(block["conv1"], np.maximum(y, 0)), 0))
  assert y.min() < 0
  y = np.maximum(y, 0).reshape(3, -1) @ p["linear"]["kernel"] + p["linear"]["bias"]
  np.testing.assert_allclose(ours, np.maximum(y, 0), rtol=1e-4, atol=1e-5)


def test_standardized_observations_do_not_depend_on_brightness_and_contrast():
  rng = np.random.default_rng(2)
  x = rng.random((3, 21, 22, 2), np.float32)
  plain, network = (_torso(x.shape[1:], torso="small", standardize=on) for on in (False, True))
  params = jax.jit(network.init)(jax.random.key(0))
  z = (x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True)
  expected = plain.apply(params["torso"], z)
  np.testing.assert_allclose(network.apply(params, x), expected, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(network.apply(params, 0.4 + 0.1 * x), expected, rtol=0.01, atol=0.01)
  constant = network.apply(params, np.full_like(x, 0.4))
  np.testing.assert_allclose(constant, plain.apply(params["torso"], np.zeros_like(x)), atol=0.02)


def test_observations_put_the_frames_of_a_stack_side_by_side():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (2, 5, 3, 6, 7, 2), np.uint8)  # [B, T, S, H, W, C]
  expected = np.concatenate([images[:, :, s] for s in range(3)], axis=-1) / 255
  np.testing.assert_allclose(torsos.observe(images), expected, rtol=1e-6)
  vectors = rng.normal(size=(4, 1, 1, 1, 3)).astype(np.float32)
  np.testing.assert_array_equal(torsos.observe(vectors), vectors[:, 0])


@pytest.mark.parametrize(
  ("game", "size", "torso", "key"),
  [
    ("Catch", 96, "nature", "network.torso"),
    ("Catch", 96, "resnet", "network.torso"),
    ("Pong", 35, "nature", "network.torso"),
    ("Pong", 35, "auto", None),
    ("Catch", 8, "auto", None),
    ("Pong", 36, "nature", None),
    ("Pong", 8, "resnet", None),
    ("Pong", 8, "mlp", None),
  ],
)
def test_a_torso_that_does_not_fit_is_named(game, size, torso, key):
  env = EnvConfig(game=game, frame_size=size)
  found = [line.split(":")[0] for line in torsos.torso_problems(TorsoConfig(torso=torso), env)]
  assert found == ([key] if key else [])


def test_vectors_are_not_standardized():
  problems = torsos.torso_problems(TorsoConfig(standardize=True), EnvConfig(game="CartPole"))
  assert [line.split(":")[0] for line in problems] == ["network.standardize"]
