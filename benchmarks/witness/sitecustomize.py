"""Hook for chaos.py that records acknowledged slots in a file outside the run.

Python imports this module in every process with this folder in PYTHONPATH. Each line of the file is
an actor's process id within the run, and lane and time of a slot whose append was acknowledged.
"""

import os
import sys
from typing import Any

from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.messages import Step

_call = Client.call


def _recorded(self: Client, request: Any) -> Any:
  answer = _call(self, request)
  if not isinstance(request, Step) or not request.slots:
    return answer
  process = sys.argv[sys.argv.index("--process-id") + 1]
  places = zip(request.slots["lane"].tolist(), request.slots["time"].tolist(), strict=True)
  lines = [f"{process} {lane} {time}\n" for lane, time in places]
  file = os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
  os.write(file, "".join(lines).encode())  # one write: lines of several processes stay whole
  os.close(file)
  return answer


Client.call = _recorded
