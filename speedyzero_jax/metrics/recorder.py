"""Writer of a run's metrics, to `metrics.jsonl` and TensorBoard event files.

Once the files are open, write errors lose lines and log one warning, but never stop the run.
"""

import contextlib
import errno
import io
import logging
import math
import numbers
import os
import pathlib
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from speedyzero_jax.metrics import jsonl, names

_log = logging.getLogger(__name__)

Number = int | float | None  # None: the value was NaN or infinite


class Recorder:
  """Appends metrics to `run_dir/metrics.jsonl` and `run_dir/tensorboard/`. Not thread-safe.

  `resume_step` is None for a new run, else the learner step from which the run resumes (0 without a
  checkpoint). Lines of later steps are removed, so that steps never decrease. `begun` is the time
  on the clock at which the process began, if not now. Raises OSError if the files cannot be opened.
  """

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    resume_step: int | None,
    clock: Callable[[], float] = time.monotonic,
    begun: float | None = None,
  ):
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    folder = path.with_name("tensorboard")
    folder.mkdir(parents=True, exist_ok=True)
    elapsed = 0.0 if resume_step is None else jsonl.drop_after(path, resume_step)
    self._warned: set[str] = set()
    self._lines = io.FileIO(path, "a")
    # TensorBoard reads files in the order of their names, so these begin with the time.
    now = f"{time.time_ns() // 1000:016d}"
    events = folder / f"events.out.tfevents.{now}.{socket.gethostname()}.{os.getpid()}"
    self._events = io.FileIO(events, "a")
    self._append("tensorboard", self._events, _event(file_version="brain.Event:2"))
    if resume_step is not None:  # hides later steps in earlier event files
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      event = _event(step=resume_step + 1, session_log=start)
      self._append("tensorboard", self._events, event)
    self._clock, self._started = clock, (clock() if begun is None else begun) - elapsed

  def elapsed(self) -> float:
    """Elapsed seconds of the run, summed over restarts."""
    return round(self._clock() - self._started, 3)

  def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Number]:
    """Writes the line of a learner step, with `elapsed` as `time`, and returns it as written.

    Values are Python or NumPy numbers, or device scalars, on which this blocks. NaN and infinities
    are written as null, with a warning the first time per metric. Raises ValueError or TypeError
    for anything else.
    """
    row: dict[str, Number] = {names.STEP: int(step), names.TIME: self.elapsed()}
    row |= {name: _number(value) for name, value in values.items()}
    for name, value in row.items():
      if value is None:
        self._warn(name, "metric %s is not finite at learner step %d: written as null", name, step)
    self._append("metrics.jsonl", self._lines, jsonl.line(row))
    scalars = [
      summary_pb2.Summary.Value(tag=name, simple_value=value)
      for name, value in row.items()
      if value is not None and name != names.STEP
    ]
    event = _event(step=step, summary=summary_pb2.Summary(value=scalars))
    self._append("tensorboard", self._events, event)
    return row

  def close(self) -> None:
    self._lines.close()
    self._events.close()

  def _append(self, what: str, file: io.FileIO, record: bytes) -> None:
    """Appends and flushes a complete record; on failure removes any partial write."""
    end = None
    try:
      end = os.fstat(file.fileno()).st_size
      if file.write(record) < len(record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
      with contextlib.suppress(OSError):
        if end is not None:
          file.truncate(end)
      self._warn(what, "cannot write %s (%s): lines are lost until writing succeeds", what, error)

  def _warn(self, what: str, text: str, *args: object) -> None:
    if what not in self._warned:
      self._warned.add(what)
      _log.warning(text, *args)


def _number(value: Any) -> Number:
  if isinstance(value, numbers.Integral):
    return int(value)
  number = float(value)
  return number if math.isfinite(number) else None


def _event(**fields: Any) -> bytes:
  """Serializes a TensorBoard event as a TFRecord.

  tensorboardX's writers are not used: they pass events to a thread through a bounded queue, and if
  a full disk ends that thread, the caller soon blocks forever.
  """
  body = event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
  length = struct.pack("<Q", len(body))
  return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, body))
