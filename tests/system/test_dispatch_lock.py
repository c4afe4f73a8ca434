"""Tests of launches of programs with collectives: one at a time, except on a single device."""

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.system.dispatch_lock import dispatch_lock
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import DeviceResult, Learner, Scalars, make_mesh


def trained(*_):
  zero = jax.numpy.zeros(1)
  return None, DeviceResult(Scalars(zero, ("a",)), zero)


def learner_step(mesh):
  learner = SimpleNamespace(mesh=mesh, update=trained, _flags={False: None})
  return lambda: Learner.step(learner, None, None, None)


def gradient(mesh):
  learner = SimpleNamespace(mesh=mesh, _differentiate=lambda *_: None)
  return lambda: Learner.gradient(learner, None, None, None)


def apply(mesh):
  learner = SimpleNamespace(mesh=mesh, _apply=trained)
  return lambda: Learner.apply(learner, None, None)


def gather(mesh):
  sizes = {"lanes": 2, "capacity": 4}
  frames = DeviceFrames(mesh, Column("frame", "uint8", (1, 1, 1)), **sizes)
  index = np.zeros((2, 1), np.int64)
  return lambda: frames.gather(index[:, 0], index)


def act(mesh):
  def add(variables, inputs, key, explore):
    return inputs + variables

  inference = Inference(SimpleNamespace(act=add, tasks={}), mesh)
  return lambda: inference.act(np.ones(()), np.zeros(3), jax.random.key(0), explore=True)


@pytest.mark.parametrize("program", [learner_step, gradient, apply, gather, act])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_launch_on_several_devices_waits_for_another(program, devices):
  mesh = make_mesh(jax.devices()[:devices])
  launch, launched = program(mesh), threading.Event()
  launch()  # compiles it
  with dispatch_lock(mesh):
    thread = threading.Thread(target=lambda: (launch(), launched.set()))
    thread.start()
    assert launched.wait(0.5 if devices > 1 else 60) == (devices == 1)
  thread.join(60)
  assert launched.is_set()
