"""Cost analysis of optimized HLO text: kernels with their FLOPs, bytes and launch counts.

Costs are per device. A kernel's bytes are those of its operands and results, assuming that nothing
stays in caches between kernels; slices, gathers, scatters and in-place updates count only the
elements that they access. Loops of unknown length are assumed to run `steps` times.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_TILE = 64  # output channels that a convolution's kernel computes together; fewer take as long
_BITS = {"pred": 8, "token": 0, "opaque": 0}  # other dtypes have their bits in their name
_NO_KERNEL = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
  "replica-id", "opt-barrier",
}  # fmt: skip
COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
  "collective-broadcast",
)  # fmt: skip
_TRANSFERS = ("infeed", "outfeed", "send", "recv")
_PARTIAL = {"gather", "dynamic-slice", "slice"}
_ELEMENTWISE = {
  "add", "bitcast", "convert", "divide", "maximum", "minimum", "multiply", "negate", "select",
  "subtract",
}  # fmt: skip

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_CONTRACTED = re.compile(  # contracted axes of a dot or a cuBLAS call
  r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Shape(NamedTuple):
  """Shape and dtype of an array."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> float:
    """Bytes in memory."""
    bits = _BITS.get(self.dtype)
    if bits is None:
      digits = re.search(r"\d+", self.dtype)
      bits = int(digits[0]) if digits else 32
    return self.size * bits / 8


class Instruction(NamedTuple):
  """An instruction of a computation."""

  name: str
  opcode: str
  shapes: tuple[Shape, ...]  # shapes of the result; tuples are flattened
  operands: tuple[str, ...]  # names
  rest: str  # text of the attributes
  root: bool

  @property
  def bytes(self) -> float:
    """Bytes of the result."""
    return sum(shape.bytes for shape in self.shapes)

  def attribute(self, name: str) -> str | None:
    """Value of the attribute `name`, without a leading percent sign; None if it is not set."""
    match = re.search(rf"\b{name}=%?([^,\s}}]+)", self.rest)
    return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel launched `count` times; costs are per launch."""

  name: str
  kind: str  # opcode, or the target of a custom call
  count: float
  flops: float
  computed: float  # FLOPs including padding: convolutions compute multiples of 64 channels
  bytes: float
  dtype: str  # dtype of the first operand


@dataclasses.dataclass(frozen=True)
class Cost:
  """Costs of a program on each device."""

  kernels: tuple[Kernel, ...]
  round_trips: float  # host synchronizations for loop and branch conditions
  unknown_loops: int  # loops whose length the compiler does not know
  transfers: int  # instructions that exchange data with the host

  @property
  def launches(self) -> float:
    """Number of kernel launches, including collectives."""
    return sum(kernel.count for kernel in self.kernels)

  @property
  def collectives(self) -> float:
    """Number of collective operations."""
    return sum(kernel.count for kernel in self.kernels if kernel.kind in COLLECTIVES)

  @property
  def flops(self) -> float:
    """FLOPs of matrix products and convolutions."""
    return sum(kernel.count * kernel.flops for kernel in self.kernels)

  @property
  def bytes(self) -> float:
    """Bytes read and written."""
    return sum(kernel.count * kernel.bytes for kernel in self.kernels)


Computation = Mapping[str, Instruction]


def parse(text: str) -> tuple[Mapping[str, Computation], str]:
  """Parses a module into its computations by name, and the name of its entry computation."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = computations.setdefault(match[2], {})
      entry = match[2] if match[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      instruction = _instruction(match[2], match[3], bool(match[1]))
      current[instruction.name] = instruction
  if not entry:
    raise ValueError("not an HLO module: it has no ENTRY computation")
  return computations, entry


def cost(text: str, steps: float) -> Cost:
  """Computes the costs of a module.

  Args:
    text: text of the optimized module.
    steps: assumed iterations of loops of unknown length.
  """
  computations, entry = parse(text)
  walk = _Walk(computations, steps)
  kernels = tuple(walk.kernels(entry, 1.0))
  return Cost(kernels, walk.round_trips, walk.unknown_loops, walk.transfers)


class _Walk:
  """Walks kernels in execution order; those in loops count once per iteration."""

  def __init__(self, computations: Mapping[str, Computation], steps: float):
    self._computations, self._steps = computations, steps
    self.round_trips, self.unknown_loops, self.transfers = 0.0, 0, 0

  def kernels(self, name: str, count: float) -> Iterator[Kernel]:
    computation = self._computations[name]
    for x in computation.values():
      if x.opcode in _NO_KERNEL or x.opcode.endswith(("-done", "-update")):
        continue
      if x.opcode == "while":
        yield from self._loop(x, count)
      elif x.opcode in ("call", "async-start"):
        yield from self.kernels(x.attribute("to_apply") or x.attribute("calls") or "", count)
      elif x.opcode == "conditional":
        named = re.findall(r"%([\w.-]+)", x.rest)
        branches = [list(self.kernels(b, count)) for b in named if b in self._computations]
        self.round_trips += count
        yield from max(branches, key=lambda kernels: sum(k.bytes for k in kernels), default=[])
      else:
        kernel = self._kernel(computation, x, count)
        self.transfers += kernel.kind in _TRANSFERS or "callback" in kernel.kind
        yield kernel

  def _loop(self, x: Instruction, count: float) -> Iterator[Kernel]:
    trips = _TRIPS.search(x.rest)
    times = float(trips[1]) if trips else self._steps
    if not trips:
      self.unknown_loops += 1
      self.round_trips += count * (times + 1)
      yield from self.kernels(x.attribute("condition") or "", count * (times + 1))
    yield from self.kernels(x.attribute("body") or "", count * times)

  def _kernel(self, computation: Computation, x: Instruction, count: float) -> Kernel:
    operands = [computation[name] for name in x.operands if name in computation]
    kind = x.opcode.removesuffix("-start")
    if kind == "custom-call":
      kind = (x.attribute("custom_call_target") or kind).strip('"')
    fused = self._computations.get(x.attribute("calls") or "") if kind == "fusion" else None
    if fused is not None:
      inside, moved = [(fused, y) for y in fused.values()], _traffic(fused)
    else:
      inside = [(computation, x)]
      moved = _touched(computation, x) + sum(_read(computation, y, [x]) for y in operands)
    flops = sum(_flops(*pair) for pair in inside)
    computed = sum(_flops(*pair) * _padding(*pair) for pair in inside)
    dtype = operands[0].shapes[0].dtype if operands and operands[0].shapes else ""
    return Kernel(x.name, kind, count, flops, computed, moved, dtype)


def _traffic(fused: Computation) -> float:
  """Bytes read and written by a fusion."""
  users: dict[str, list[Instruction]] = {}
  for x in fused.values():
    for name in x.operands:
      users.setdefault(name, []).append(x)
  read = sum(_read(fused, x, _through(x, users)) for x in fused.values() if x.opcode == "parameter")
  root = next(x for x in fused.values() if x.root)
  roots = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
  return read + sum(_touched(fused, x) for x in roots)


def _through(x: Instruction, users: Mapping[str, list[Instruction]]) -> list[Instruction]:
  """Users of a value within a fusion.

  Elementwise users, and gathers of which only slices are used, are replaced by their own users, as
  only the accessed elements are computed.
  """
  result: list[Instruction] = []
  for user in users.get(x.name, []):
    inside = user.opcode in _ELEMENTWISE and user.name in users
    if user.opcode == "gather":
      inside = {y.opcode for y in _through(user, users)} == {"slice"}
    result += _through(user, users) if inside else [user]
  return result


def _read(computation: Computation, x: Instruction, users: list[Instruction]) -> float:
  """Bytes of a value read by its users."""
  total = 0.0
  for user in users:
    if user.opcode in _PARTIAL:
      total += user.shapes[0].size / x.shapes[0].size * x.bytes
    elif user.opcode in ("dynamic-update-slice", "scatter") and _first(computation, user) == x.name:
      total += 0  # updated in place
    else:
      return x.bytes
  return min(total, x.bytes)


def _first(computation: Computation, x: Instruction) -> str:
  """Name of the first operand, ignoring bitcasts."""
  name = x.operands[0]
  while name in computation and computation[name].opcode == "bitcast":
    name = computation[name].operands[0]
  return name


def _touched(computation: Computation, x: Instruction) -> float:
  """Bytes written for a result."""
  while x.opcode == "bitcast":
    x = computation[x.operands[0]]
  if x.opcode == "dynamic-update-slice":
    return computation[x.operands[1]].bytes
  if x.opcode == "scatter":
    return 2 * computation[x.operands[-1]].bytes
  return sum(shape.bytes for shape in _written(x))


def _written(x: Instruction) -> tuple[Shape, ...]:
  """Shapes that are written: no workspaces of libraries, no operands in asynchronous results."""
  if x.opcode == "custom-call" and ("__cublas$" in x.rest or "__cudnn$" in x.rest):
    return x.shapes[:1]
  repeated = x.opcode.endswith("-start") and len(x.shapes) > len(x.operands)
  return x.shapes[len(x.operands) :] if repeated else x.shapes


def _flops(computation: Computation, x: Instruction) -> float:
  """FLOPs of a matrix product or convolution; 0 for other instructions."""
  operands = [computation[name].shapes[0] for name in x.operands if name in computation]
  if x.opcode == "dot" or "__cublas$" in x.rest:
    dims = _CONTRACTED.search(x.rest)
    axes = [int(axis) for axis in re.findall(r"\d+", dims[1])] if dims else []
    return 2.0 * x.shapes[0].size * math.prod(operands[0].dims[axis] for axis in axes)
  channels = _channels(computation, x)
  if not channels:
    return 0.0
  # The output of the forward convolution; gradients permute operands and result.
  output = operands[0] if "BackwardInput" in x.rest else x.shapes[0]
  if "BackwardFilter" in x.rest:
    output = operands[1]
  return 2.0 * math.prod(channels.values()) * output.size / channels["o"]


def _channels(computation: Computation, x: Instruction) -> dict[str, int]:
  """Sizes of a convolution kernel's axes: `i` and `o` are channels; {} for other instructions."""
  labels = x.attribute("dim_labels")  # input_kernel->output
  if not labels:
    return {}
  gradient = "BackwardFilter" in x.rest
  kernel = x.shapes[0] if gradient else computation[x.operands[1]].shapes[0]
  return dict(zip(labels.partition("_")[2].partition("->")[0], kernel.dims, strict=True))


def _padding(computation: Computation, x: Instruction) -> float:
  """FLOPs of an instruction, including padded channels, as a multiple of those without."""
  channels = _channels(computation, x)
  padded = "i" if "BackwardInput" in x.rest else "io" if "BackwardFilter" in x.rest else "o"
  sizes = [channels[axis] for axis in padded if channels]
  return math.prod(-(-size // _TILE) * _TILE / size for size in sizes)


def _instruction(name: str, text: str, root: bool) -> Instruction:
  end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
  shapes = tuple(
    Shape(dtype, tuple(int(n) for n in dims.split(",") if n))
    for dtype, dims in _SHAPE.findall(text[:end])
  )
  opcode = _OPCODE.match(text, end)
  if opcode is None:
    raise ValueError(f"not an HLO instruction: {text[:200]}")
  close = _closing(text, opcode.end() - 1)
  arguments, rest = text[opcode.end() : close], text[close + 1 :]
  operands = tuple(re.findall(r"%([^\s,()]+)", arguments))
  return Instruction(name, opcode[1], shapes, operands, rest, root)


def _closing(text: str, at: int) -> int:
  """Index of the parenthesis that closes the one at `at`."""
  depth = 0
  for i in range(at, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  raise ValueError(f"unbalanced parentheses: {text[:200]}")
