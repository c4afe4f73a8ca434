"""Definitions for the processes of both sides of a comparison: sizes, data, requests, curves.

Also imported in the peers' virtual environments, so it uses only the standard library and NumPy.
"""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

ACTIONS, STACK, UNROLL, TD_STEPS, EPISODE = 6, 4, 5, 5, 400
CARTPOLE_STEPS, REUSE = 200, 64  # of `learn`: CartPole-v0's cap, and samples per agent step
Work = Callable[[], dict[str, Any] | None]  # blocks on its results; returns values to report
Piece = Callable[..., tuple[Work, dict[str, Any]]]  # prepares work; also returns values to report


class Program(NamedTuple):
  """Settings of a complete program on Breakout."""

  frame_size: int
  grey: bool
  batch: int
  lanes: int
  stored: int  # replay capacity, and number of random transitions before learning starts
  agent_steps: float  # per learner step


PROGRAMS = {
  "small": Program(64, True, 64, 8, 16_000, 4),  # configs/atari_small.yaml with larger frames
  "full": Program(96, False, 256, 16, 20_000, 2.5),  # as SpeedyZero: 102.4 samples per agent step
}


class Episode(NamedTuple):
  """`EPISODE` random transitions."""

  frames: np.ndarray  # [EPISODE + 1, H, W, C] uint8
  action: np.ndarray  # [EPISODE]
  reward: np.ndarray  # [EPISODE] float32
  policy: np.ndarray  # [EPISODE, ACTIONS] float32
  value: np.ndarray  # [EPISODE] float32
  priority: np.ndarray  # [EPISODE] float32


def episodes(transitions: int) -> Iterator[Episode]:
  """Yields episodes with at least this many transitions in total, the same for every side."""
  rng = np.random.default_rng(0)
  for _ in range(-(-transitions // EPISODE)):
    yield Episode(
      frames=rng.integers(0, 256, (EPISODE + 1, 96, 96, 3), dtype=np.uint8),
      action=rng.integers(0, ACTIONS, EPISODE),
      reward=rng.integers(-1, 2, EPISODE).astype(np.float32),
      policy=rng.dirichlet(np.ones(ACTIONS), EPISODE).astype(np.float32),
      value=rng.normal(size=EPISODE).astype(np.float32),
      priority=rng.random(EPISODE).astype(np.float32),
    )


def resident() -> int:
  """Resident host memory of this process, in bytes."""
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(pieces: dict[str, Piece]) -> None:
  """Serves a side's requests, as JSON lines: to `prepare` named work, or to `do` it."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # libraries print to stdout
  prepared: dict[str, Work] = {}
  for line in sys.stdin:
    request = json.loads(line)
    answer: dict[str, Any] = {}
    try:
      if request["request"] == "prepare":
        prepared[request["name"]], answer = pieces[request["piece"]](**request["arguments"])
      else:
        begin = time.perf_counter()
        facts = prepared[request["name"]]()
        answer = {"seconds": time.perf_counter() - begin, **(facts or {})}
    except Exception as error:  # reported as missing; other pieces continue
      traceback.print_exc()
      answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


class Curve:
  """Learning curve: points of samples trained on, agent steps, seconds, CPU seconds and score.

  Seconds are since the last `begin`, without evaluations.
  """

  def __init__(self) -> None:
    self.points: list[list[float]] = []
    self.begin()

  def begin(self) -> None:
    self._begin = self._clocks()

  @contextlib.contextmanager
  def evaluation(self, samples: int, agent_steps: int) -> Iterator[list[float]]:
    """Adds a point; the caller evaluates within, which takes no time here, and appends a score."""
    now = self._clocks()
    point = [samples, agent_steps, *(now - self._begin).round(2).tolist()]
    yield point
    self.points.append(point)
    self._begin += self._clocks() - now

  @staticmethod
  def _clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])
