"""Shared test setup: CPU devices for meshes, a persistent compilation cache, hypothesis profiles.

Environment variables are set before jax is imported, and are inherited by processes that tests
start. Existing values take precedence, so `JAX_PLATFORMS=cuda make test` runs the suite on GPUs.
Compilation dominates the suite's time; disabling most optimizations halves it.
"""

import importlib.metadata
import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # makes the package importable without installation

jax_version = tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if jax_version < (0, 11):  # fusion emitters are slow to compile; later versions lack the flag
  os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Child processes inherit ignored signals. SIGHUP is ignored under nohup, and SIGINT in background
# jobs of scripts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "local")
