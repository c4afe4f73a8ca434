"""What the tests of metrics and of the display share."""


class Clock:
  """Time that passes when told."""

  def __init__(self) -> None:
    self.now = 1000.0

  def __call__(self) -> float:
    return self.now
