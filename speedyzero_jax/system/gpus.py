"""This machine's GPUs, counted without jax."""

import itertools
import os
import re
from pathlib import Path

_GPU = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")  # a number or an id


def local_gpus() -> int:
  """Number of NVIDIA devices of this machine that this process may use."""
  platforms = os.environ.get("JAX_PLATFORMS")
  if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
    return 0
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:  # CUDA ignores entries from the first invalid one on (-1, "", ...)
    return len(list(itertools.takewhile(_GPU.fullmatch, visible.split(","))))
  driver = Path("/proc/driver/nvidia/gpus")
  return len(list(driver.iterdir())) if driver.is_dir() else 0
