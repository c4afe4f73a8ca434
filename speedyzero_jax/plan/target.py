"""Target GPUs of ahead-of-time compilation, which need not be present.

XLA compiles for a described device if jax's CUDA plugin is installed (`make gpu-plan` installs it)
and `JAX_PLATFORMS=cpu` was set before jax was imported. The descriptions are in `targets/`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from speedyzero_jax.workers.learner import make_mesh

_FILES = Path(__file__).parent / "targets"
# Common to all devices of compute capability 8.0 and 9.0 (CUDA programming guide).
_COMMON = {
  "threads_per_block_limit": 1024,
  "threads_per_warp": 32,
  "shared_memory_per_block": 49152,
  "block_dim_limit_x": 2147483647,
  "block_dim_limit_y": 65535,
  "block_dim_limit_z": 65535,
  "registers_per_core_limit": 65536,
  "registers_per_block_limit": 65536,
}


@dataclasses.dataclass(frozen=True)
class Target:
  """Published specifications of a GPU."""

  name: str
  source: str
  memory_bytes: int
  bandwidth: float  # memory bandwidth, bytes/s
  flops: dict[str, float]  # peak FLOP/s of dense matrix products, by dtype
  xla: dict[str, Any]  # fields of XLA's device description

  def peak(self, dtype: str) -> float:
    """Peak FLOP/s for operands of an XLA dtype; float32 uses TF32."""
    return self.flops["bfloat16" if dtype in ("bf16", "f16") else "float32"]

  def describe(self) -> str:
    """The GPU as XLA's GpuTargetConfigProto in text format."""
    fields = _COMMON | {key: x for key, x in self.xla.items() if key != "compute_capability"}
    fields |= {"memory_bandwidth": int(self.bandwidth), "device_memory_size": self.memory_bytes}
    major, minor = self.xla["compute_capability"]
    lines = [f"  {key}: {value}" for key, value in fields.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
      ["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"',
       "dnn_version_info { major: 9 minor: 10 }", f'device_description_str: "{self.name}"']
    )  # fmt: skip

  def mesh(self, devices: int, processes: int = 1) -> Mesh:
    """Creates a mesh of `devices` of this GPU, a multiple of `processes`.

    Raises RuntimeError if jax's CUDA plugin is not installed.
    """
    shape = f"{processes}x1x{devices // processes}"
    try:
      topology = topologies.get_topology_desc(
        platform="cuda", topology=shape, target_config=self.describe()
      )
    except Exception as error:
      raise RuntimeError(
        f"jax {jax.__version__} can't compile for GPUs on this machine: {error}; `make gpu-plan` "
        "installs the CUDA plugin"
      ) from error
    return make_mesh(topology.devices)


def names() -> list[str]:
  """Names of the known targets."""
  return sorted(path.stem for path in _FILES.glob("*.json"))


def load(name: str) -> Target:
  """Loads a target by name. Raises ValueError if it is unknown."""
  if name not in names():
    raise ValueError(f"unknown target {name!r}; available: {', '.join(names())}")
  return Target(**json.loads((_FILES / f"{name}.json").read_text()))
