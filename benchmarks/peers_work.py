"""What the sides of peers.py share: their problem, and a loop that prepares work and does it when asked.

A side is a process of its own, which `peers.py` talks to over pipes, one JSON line each way. Standard library and numpy
only: the sides live in different environments.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Work = Callable[[], dict[str, Any] | None]  # waits for its own results; what it returns is reported
Piece = Callable[..., tuple[Work, dict[str, Any]]]  # makes work, and facts about it

ACTIONS, STACK, UNROLL, TD_STEPS, EPISODE = 6, 4, 5, 5, 400


class Run(NamedTuple):
  """A whole program on Breakout."""

  frame_size: int
  grey: bool
  batch: int
  lanes: int
  stored: int  # random transitions before it learns; its replay holds as many
  each: float  # agent steps a learner step


RUNS = {
  "small": Run(
    64, True, 64, 8, 16_000, 4
  ),  # configs/atari_small.yaml's, but for the frames: LightZero's smallest
  "full": Run(
    96, False, 256, 16, 20_000, 2.5
  ),  # EfficientZero's, at SpeedyZero's 102.4 samples an agent step
}


class Episode(NamedTuple):
  """`EPISODE` transitions of noise."""

  frames: np.ndarray  # [EPISODE + 1, H, W, C] uint8
  action: np.ndarray  # [EPISODE]
  reward: np.ndarray  # [EPISODE] float32
  policy: np.ndarray  # [EPISODE, ACTIONS] float32
  value: np.ndarray  # [EPISODE] float32
  priority: np.ndarray  # [EPISODE] float32


def episodes(transitions: int) -> Iterator[Episode]:
  """The same ones on every side, as many as hold at least that many transitions."""
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
  """Bytes of memory this process has in use."""
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(pieces: dict[str, Piece]) -> None:
  """Answers requests until there are no more: `prepare` work under a name, `do` it."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # whatever libraries print is no answer
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
    except Exception as error:  # a side that can't do something says so, and goes on
      traceback.print_exc()
      answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
