"""Location of errors in code that is neither this package nor an installed one."""

import os
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen", "<string")


def location(error: BaseException) -> str:
  """Returns ` (FILE:LINE)` of the innermost frame in a user's own code; "" if there is none.

  The frame that caught the error does not count.
  """
  frames = traceback.extract_tb(error.__traceback__)[1:]
  others = (_PACKAGE, *_INSTALLED)
  own = [frame for frame in frames if not any(other in frame.filename for other in others)]
  return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
