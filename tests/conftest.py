"""What all tests share: CPU devices to build meshes from, compiled code kept between runs,
hypothesis profiles.

The variables are set before anything imports jax, and are inherited by the processes that tests
start. Those already in the environment win, so that `JAX_PLATFORMS=cuda make test` runs the suite
on GPUs. Most of its time is compilation, which takes half as long with few optimizations.
"""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package, without an install

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Processes that are started inherit what is ignored: the first under nohup, the second in the
# background of a script.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "local")
