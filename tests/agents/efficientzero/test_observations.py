"""Tests of stacking, normalization and augmentation of frames."""

import jax
import numpy as np
import pytest

from speedyzero_jax.agents.efficientzero import observations


@pytest.mark.parametrize(("stack", "unroll", "channels"), [(1, 2, 3), (4, 0, 1), (3, 2, 2)])
def test_stacks_are_the_newest_frames_oldest_first(stack, unroll, channels):
  shape = (2, stack + unroll, 3, 2, channels)
  frames = np.random.default_rng(stack).integers(0, 256, shape, np.uint8)
  stacked = jax.jit(observations.stack_frames, static_argnums=1)(frames, stack)
  assert stacked.dtype == np.uint8 and stacked.shape == (2, unroll + 1, 3, 2, stack * channels)
  for k in range(unroll + 1):
    for i in range(stack):
      part = stacked[:, k, :, :, i * channels : (i + 1) * channels]
      np.testing.assert_array_equal(part, frames[:, k + i])


def _images(count, height=5, width=6, channels=2):
  return (
    np.random.default_rng(3).integers(0, 256, (count, height, width, channels)).astype(np.uint8)
  )


_augment = jax.jit(observations.augment, static_argnums=(2, 3))


def _keys(count):
  return jax.random.split(jax.random.key(5), count)


def test_a_shifted_image_is_a_crop_of_the_edge_padded_one_and_every_crop_occurs():
  shift, count = 2, 200
  images = _images(count)
  shifted = np.rint(np.asarray(_augment(_keys(count), images, shift, 0.0)) * 255)
  seen = set()
  for image, ours in zip(images, shifted, strict=True):
    padded = np.pad(image, ((shift, shift), (shift, shift), (0, 0)), mode="edge")
    offsets = [
      (y, x)
      for y in range(5)
      for x in range(5)
      if np.array_equal(padded[y : y + 5, x : x + 6], ours)
    ]
    assert len(offsets) == 1
    seen.update(offsets)
  assert len(seen) == 25


def test_brightness_is_one_factor_per_image_within_two_scales():
  scale, count = 0.05, 200
  images = _images(count) // 2 + 100
  factors = np.asarray(_augment(_keys(count), images, 0, scale)) / (images / 255)
  np.testing.assert_allclose(
    factors, np.broadcast_to(factors[:, :1, :1, :1], factors.shape), rtol=1e-5
  )
  noise = (factors[:, 0, 0, 0] - 1) / scale
  assert np.abs(noise).max() == pytest.approx(
    2, abs=1e-4
  )  # of 200 normals some are beyond 2, and clipped
  assert abs(noise.mean()) < 0.25 and 0.75 < noise.std() < 1.05  # a normal clipped at 2 has 0.96


def test_augmentation_belongs_to_the_key_whatever_the_batch():
  images, keys = _images(6), _keys(6)
  whole = _augment(keys, images, 2, 0.1)
  parts = [_augment(keys[i : i + 2], images[i : i + 2], 2, 0.1) for i in (0, 2, 4)]
  np.testing.assert_array_equal(whole, np.concatenate(parts))
  other = _augment(keys[::-1], images, 2, 0.1)
  assert all((a != b).any() for a, b in zip(whole, other, strict=True))


def test_vectors_are_not_augmented():
  vectors = np.random.default_rng(0).normal(size=(8, 1, 1, 4)).astype(np.float32) * 100
  np.testing.assert_array_equal(_augment(_keys(8), vectors, 3, 0.1), vectors)
