"""Tests of the division of an agent's programs among devices, with a fake agent."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.agents.base import ActInputs, ActOutput
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import DivergedError, Version

_KEY, _WEIGHT = jax.random.key(0), np.float32(3)


def _act(weight, inputs, key, progress, *, explore):
  noise = jax.random.randint(key, inputs.lane.shape, 0, 1000) if explore else 0
  return ActOutput(inputs.lane + noise, {"sum": weight * inputs.frames.sum((1, 2))}, (), {})


def _task(weight, inputs, key):
  return {"value": weight * inputs["frames"].sum(-1)}


@functools.cache
def _inference(devices):
  agent = SimpleNamespace(act=_act, tasks={"task": SimpleNamespace(program=_task)})
  return Inference(agent, make_mesh(jax.devices()[:devices]))


def test_devices_that_share_the_work_find_the_same():
  one, two = _inference(1), _inference(2)
  frames = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
  for n in (4, 3):  # shares of equal size, and one that is short
    inputs = ActInputs(frames[:n], np.zeros(n, bool), np.arange(n, dtype=np.int32), ())
    task = two.tasks["task"](_WEIGHT, {"frames": frames[:n]}, _KEY)["value"]
    np.testing.assert_allclose(task, 3 * frames[:n].sum(-1), rtol=1e-4, atol=1e-5)
    assert n == 3 or len(task.sharding.device_set) == 2
    acted, alone = (x.act(_WEIGHT, inputs, _KEY, 0.5, explore=False) for x in (two, one))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), acted, alone)


def test_devices_explore_apart_and_keys_decide():
  inputs = ActInputs(np.zeros((4, 1, 1), np.float32), np.zeros(4, bool), jnp.zeros(4, int), ())
  noise = [
    np.asarray(_inference(2).act(_WEIGHT, inputs, jax.random.key(i), 0.5, explore=True).action)
    for i in (1, 1, 2)
  ]
  assert (noise[0][:2] != noise[0][2:]).any() and (noise[0] != noise[2]).any()
  np.testing.assert_array_equal(noise[0], noise[1])


def test_outputs_that_are_not_finite_mean_divergence():
  inference, frames = _inference(1), np.ones((2, 1, 1), np.float32)
  inputs = ActInputs(frames, np.zeros(2, bool), np.arange(2, dtype=np.int32), ())
  nan, infinite = (Version(7, np.float32(x)) for x in (np.nan, np.inf))
  for call in (
    lambda: inference.decide(nan, inputs, _KEY, 0.5, explore=False),
    lambda: inference.compute(infinite, "task", {"frames": frames}, _KEY),
  ):
    with pytest.raises(DivergedError, match=r"learner step 7 .* not finite \([\w.]+\)"):
      call()


def test_each_device_computes_its_share():
  frames = np.zeros((8, 64, 64), np.float32)

  def flops(devices):
    program = _inference(devices).tasks["task"].function
    return program.lower(_WEIGHT, {"frames": frames}, _KEY).compile().cost_analysis()["flops"]

  assert 0.4 < flops(2) / flops(1) < 0.7


def test_tasks_get_the_learner_step_of_their_weights():
  task = SimpleNamespace(program=lambda weight, inputs, key: {"value": inputs["step"]})
  agent = SimpleNamespace(act=_act, tasks={"task": task})
  inference = Inference(agent, make_mesh(jax.devices()[:1]))
  found = inference.compute(Version(7, _WEIGHT), "task", {"frames": np.zeros((2, 1, 1))}, _KEY)
  assert found["value"].tolist() == [7, 7]
