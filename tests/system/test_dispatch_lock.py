"""Tests of launches of programs with collectives: one at a time, except on a single device."""

import re
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

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


def add(variables, inputs, key, explore):
  return inputs + variables


def act(mesh, lanes=3):
  inference = Inference(SimpleNamespace(act=add, tasks={}), mesh)
  return lambda: inference.act(np.ones(()), np.zeros(lanes), jax.random.key(0), explore=True)


def act_in_equal_parts(mesh):
  return act(mesh, lanes=4)  # without collectives


@pytest.mark.parametrize("program", [learner_step, gradient, apply, act, act_in_equal_parts])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_launch_on_several_devices_waits_for_another(program, devices):
  waits = devices > 1 and program is not act_in_equal_parts
  mesh = make_mesh(jax.devices()[:devices])
  launch, launched = program(mesh), threading.Event()
  launch()  # compiles it
  with dispatch_lock(mesh):
    thread = threading.Thread(target=lambda: (launch(), launched.set()))
    thread.start()
    assert launched.wait(0.5 if waits else 60) != waits
  thread.join(60)
  assert launched.is_set()


def test_inference_in_equal_parts_has_no_collectives():
  mesh = make_mesh(jax.devices()[:2])
  program = Inference(SimpleNamespace(act=add, tasks={}), mesh).act.function
  lowered = program.lower(np.ones(()), np.zeros(4), jax.random.key(0), explore=True)
  assert not re.search("all-|reduce-scatter|collective|permute", lowered.compile().as_text())
