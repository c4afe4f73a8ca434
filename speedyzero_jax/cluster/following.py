"""Copies of the learner's state that threads of a worker keep up to date."""

import threading
from collections.abc import Callable

from speedyzero_jax.cluster.grpc_server import RunOver


class Following:
  """Base of copies that are updated in threads, and waited for in others."""

  def __init__(self) -> None:
    self.changed = threading.Condition()  # notify it of each update
    self._error: BaseException | None = None

  def follow(self, name: str, update: Callable[[], None]) -> None:
    """Calls `update` again and again in a thread, until it raises an error."""

    def body() -> None:
      try:
        while True:
          update()
      except BaseException as error:  # raised again in `wait_for`
        with self.changed:
          self._error = error
          self.changed.notify_all()

    threading.Thread(target=body, name=name, daemon=True).start()

  def wait_for(self, condition: Callable[[], bool]) -> None:
    """Waits for a condition on the copy.

    Raises what ended a thread; RunOver only if the condition does not hold: if it does, the
    caller's work can still be done.
    """
    with self.changed:
      self.changed.wait_for(lambda: self._error is not None or condition())
      if self._error is not None and not (isinstance(self._error, RunOver) and condition()):
        raise self._error
