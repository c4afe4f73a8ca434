"""Programs with collectives are sent one at a time, whichever role sends them; on one device nobody waits."""

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.system.dispatch_lock import in_order
from speedyzero_jax.workers.learner import Learner, make_mesh


def learner_step(mesh):
  learner = SimpleNamespace(
    mesh=mesh, update=lambda *_: (None, ({}, None, None)), _flags={False: None}
  )
  return lambda: Learner.step(learner, None, None, None)


def gather(mesh):
  frames = DeviceFrames(
    mesh, lanes=2, capacity=4, rows=4, frame_shape=(1, 1, 1), frame_dtype=np.uint8
  )
  index = np.zeros((2, 1), np.int64)
  return lambda: frames.gather(index, index, spread=False)


@pytest.mark.parametrize("program", [learner_step, gather])
@pytest.mark.parametrize("devices", [1, 2])
def test_who_sends_to_several_devices_waits_its_turn(program, devices):
  mesh = make_mesh(jax.devices()[:devices])
  send, sent = program(mesh), threading.Event()
  send()  # compiled from now on
  with in_order(mesh):
    thread = threading.Thread(target=lambda: (send(), sent.set()))
    thread.start()
    assert sent.wait(0.5 if devices > 1 else 60) == (devices == 1)
  thread.join(60)
  assert sent.is_set()
