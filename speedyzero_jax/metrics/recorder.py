"""Writes a run's metrics: `metrics.jsonl` for programs and people, TensorBoard events for curves.

Measuring must never stop training: once the files are open, a disk that refuses (full, over quota, gone) costs lines
and one warning. Knows nothing of jax; values are anything `float` takes.
"""

import json
import logging
import math
import numbers
import operator
import os
import pathlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2, summary_pb2

from speedyzero_jax.metrics import jsonl, names

_log = logging.getLogger(__name__)

Number = int | float | None  # None: the value was NaN or infinite


class Recorder:
  """Appends lines of metrics to `run_dir/metrics.jsonl` and scalars to `run_dir/tensorboard/`. Thread-safe.

  A line is {"step": learner step, "env_steps": if given, "time": seconds the run has been running, name: value, ...}.
  """

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    *,
    resume_step: int | None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Opens the files, creating folders as needed.

    Args:
      run_dir: the run's folder.
      resume_step: None for a new run. Otherwise the learner step the run goes on from (0 if it had not got as far as a
        checkpoint): lines of later steps are removed, so that no curve goes back in time.
      clock: seconds, from any origin.

    Raises:
      ValueError: a new run in a folder that already holds metrics, or a negative `resume_step`.
      OSError: the files cannot be opened.
    """
    if resume_step is not None and resume_step < 0:
      raise ValueError(f"resume_step is {resume_step}, a learner step is at least 0")
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    if resume_step is None and path.exists() and path.stat().st_size:
      raise ValueError(
        f"{path} holds the metrics of another run: resume that run, or choose a new folder"
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    elapsed = 0.0 if resume_step is None else jsonl.drop_after(path, resume_step)
    self._lines = jsonl.AppendFile(path)
    self._events = _EventFile(path.parent / "tensorboard", resume_step)
    self._clock = clock
    self._started = clock() - elapsed
    self._lock = threading.Lock()
    self._closed = False
    self._failed: set[str] = set()
    self.nonfinite: dict[str, int] = {}  # metric -> values that were NaN or infinite

  def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Number]:
    """Writes one line.

    Args:
      step: the learner step it belongs to.
      values: metric -> number (Python, NumPy, or a device scalar, which is waited for). NaN and infinities are written
        as null, counted in `nonfinite`, and warned of once for each metric.

    Returns:
      The line as written, ready to be shown.

    Raises:
      ValueError: a value is not a number, `step` is negative or contradicts `values`, or the recorder is closed.
        Nothing is written then. A disk that refuses raises nothing.
    """
    step = operator.index(step)
    if step < 0 or values.get(names.STEP, step) != step:
      raise ValueError(f"step is {step}, but must be at least 0 and agree with values['step']")
    if names.TIME in values:
      raise ValueError("values must not hold 'time': the recorder measures it")
    numbers_ = {name: _number(name, value) for name, value in values.items()}
    head: dict[str, Number] = {names.STEP: step}
    if names.ENV_STEPS in values:
      head[names.ENV_STEPS] = None  # keeps its place in front; its value follows with the others
    with self._lock:
      if self._closed:
        raise ValueError("write to a closed Recorder")
      row = head | {names.TIME: round(self._clock() - self._started, 3)} | numbers_
      for name in (name for name, value in row.items() if value is None):
        if name not in self.nonfinite:
          _log.warning("metric %s is not finite at learner step %d: written as null", name, step)
        self.nonfinite[name] = self.nonfinite.get(name, 0) + 1
      line = json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"
      self._attempt("metrics.jsonl", self._lines.append, line.encode())
      scalars = {
        name: value for name, value in row.items() if value is not None and name != names.STEP
      }
      self._attempt("tensorboard", self._events.append, step, scalars)
    return row

  def close(self) -> None:
    """Closes the files; a second call does nothing."""
    with self._lock:
      if not self._closed:
        self._closed = True
        self._attempt("metrics.jsonl", self._lines.close)
        self._attempt("tensorboard", self._events.close)

  def __enter__(self) -> "Recorder":
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def _attempt(self, what: str, call: Callable[..., None], *args: Any) -> None:
    try:
      call(*args)
    except OSError as error:
      if what not in self._failed:
        self._failed.add(what)
        _log.warning(
          "cannot write %s (%s): training goes on, lines are lost until it works again", what, error
        )


def _number(name: str, value: Any) -> Number:
  if not isinstance(name, str) or not name:
    raise ValueError(f"a metric's name must be a non-empty string, not {name!r}")
  if isinstance(value, numbers.Integral):
    return int(value)
  if value is None:
    return None
  try:
    if isinstance(value, str | bytes):  # float("1") would pass
      raise TypeError
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(f"metric {name} is {value!r}, not a number") from None
  return number if math.isfinite(number) else None


class _EventFile:
  """One TensorBoard event file, in the TFRecord format.

  tensorboardX's own writers hand events to a thread through a bounded queue. A full disk ends that thread and, ten
  events later, blocks the caller for good. Here the caller writes, and errors are its to see.
  """

  def __init__(self, folder: pathlib.Path, resume_step: int | None):
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names, so time comes first.
    name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
    self._file = jsonl.AppendFile(folder / name)
    self._append(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
    if resume_step is not None:  # hides what earlier files hold from this step on
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._append(event_pb2.Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

  def append(self, step: int, scalars: Mapping[str, int | float]) -> None:
    values = [
      summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()
    ]
    self._append(
      event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values))
    )

  def close(self) -> None:
    self._file.close()

  def _append(self, event: event_pb2.Event) -> None:
    body = event.SerializeToString()
    length = struct.pack("<Q", len(body))
    self._file.append(length + _masked_crc(length) + body + _masked_crc(body))


def _masked_crc(data: bytes) -> bytes:
  crc = crc32c(data)
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
