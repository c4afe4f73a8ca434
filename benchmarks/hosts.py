"""Hosts on one machine: network namespaces with wires between them. Needs root, util-linux and iproute2; knows no run.

A host also has a host name and process numbers of its own, and an /etc/hosts as Debian writes it, in which its own name
is 127.0.1.1. There is no way out of it but its wires, one to each other host, that end in veth devices: what went
through each is counted, in packets as on Ethernet. A host ends with its process, its wires with it, and all with the
process that made them, whatever happens.
"""

import contextlib
import itertools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# In the new namespaces: name, address and folder of the host, then its command, which a line on standard input starts.
_BEGIN = (
  'hostname "$0" && ip link set lo up && ip address add "$1" dev lo && mount --bind "$2/$0.hosts" /etc/hosts && '
  'echo made && read -r _ || exit 1; exec >> "$2/$0.log" 2>&1; shift 2; exec "$@"'
)
_UNSHARE = [
  "unshare",
  "--net",
  "--uts",
  "--pid",
  "--mount-proc",
  "--fork",
  "--kill-child",
  "sh",
  "-c",
  _BEGIN,
]
_SENT = 8  # column of /proc/net/dev


class NoHosts(Exception):
  """They can't be made here; the message says why."""


class Host:
  """One host and the process in it, which waits for `begin`; its output goes to `log`.

  Raises NoHosts.
  """

  def __init__(self, name: str, address: str, command: Sequence[str], folder: Path):
    self.name, self.address, self.log = name, address, folder / f"{name}.log"
    pipe = subprocess.PIPE
    try:
      self.process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, name, address, str(folder), *command],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
      )  # fmt: skip
    except FileNotFoundError as error:
      raise NoHosts(str(error)) from error
    assert self.process.stdout is not None
    if self.process.stdout.readline() != "made\n":
      raise NoHosts(self.process.communicate()[1].strip())
    self._counts = open(f"/proc/{self.process.pid}/net/dev")  # noqa: SIM115, keeps the network when the process has ended

  def ip(self, *arguments: str) -> None:
    """Runs `ip` in its network. Raises NoHosts."""
    command = ["nsenter", "--target", str(self.process.pid), "--net", "ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      raise NoHosts(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

  def begin(self) -> None:
    """Lets its process go."""
    assert self.process.stdin is not None
    self.process.stdin.write("\n")
    self.process.stdin.close()

  def sent(self) -> dict[str, int]:
    """Bytes that have left it, by the host at the wire's other end; those to itself as `lo`."""
    self._counts.seek(0)
    wires = (line.rpartition(":") for line in self._counts.read().splitlines()[2:])
    return {name.strip(): int(counts.split()[_SENT]) for name, _, counts in wires}

  def end(self) -> None:
    """Kills its process; nothing of it is left."""
    self._counts.close()
    self.process.kill()
    self.process.wait()


def _connect(a: Host, b: Host) -> None:
  """Lays a wire. Its ends are named after the host that they lead to."""
  a.ip(
    "link",
    "add",
    "name",
    b.name,
    "type",
    "veth",
    "peer",
    "name",
    a.name,
    "netns",
    str(b.process.pid),
  )
  for here, there in ((a, b), (b, a)):
    # One packet at a time, as a network card would send them; veth would pass on 64 kB at once.
    here.ip("link", "set", "dev", there.name, "addrgenmode", "none", "gso_max_segs", "1", "up")
    here.ip("route", "add", there.address, "dev", there.name, "src", here.address)


@contextlib.contextmanager
def hosts(commands: Mapping[str, Sequence[str]], folder: Path) -> Iterator[dict[str, Host]]:
  """A host for each command, by name (15 characters at most), all of them connected; none is left at the end.

  Args:
    commands: to begin with, by the name of the host.
    folder: an absolute path, for their logs.

  Raises NoHosts.
  """
  addresses = {name: f"10.77.0.{number}" for number, name in enumerate(commands, 1)}
  made: dict[str, Host] = {}
  try:
    for name, address in addresses.items():
      known = {"localhost": "127.0.0.1", **addresses, name: "127.0.1.1"}
      (folder / f"{name}.hosts").write_text(
        "".join(f"{where} {who}\n" for who, where in known.items())
      )
      made[name] = Host(name, address, commands[name], folder)
    for a, b in itertools.combinations(made.values(), 2):
      _connect(a, b)
    for host in made.values():  # the way to anywhere, where nobody is
      host.ip(
        "route",
        "add",
        "default",
        "dev",
        next(name for name in made if name != host.name),
        "src",
        host.address,
      )
    yield made
  finally:
    for host in made.values():
      host.end()
