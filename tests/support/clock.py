"""Fake clock for tests of metrics and of the display."""


class Clock:
  """Clock that advances only when a test sets `now`."""

  def __init__(self) -> None:
    self.now = 1000.0

  def __call__(self) -> float:
    return self.now
