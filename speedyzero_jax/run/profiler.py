"""Trace of a few learner steps of a run, for xprof or ui.perfetto.dev."""

from collections.abc import Iterator
from pathlib import Path

import jax

from speedyzero_jax.run.experiment import Experiment

_WARM_UP = 5  # learner steps before the trace, in which jax compiles what is small


def trace(experiment: Experiment, folder: Path) -> Iterator[None]:
  """Traces `profile.steps` learner steps of the run that begins, into `folder/plugins/profile/`.

  To be resumed after each learner step. Begins once all sweeps have begun. Writes nothing if the
  run ends before.
  """
  for _ in range(_WARM_UP):
    yield
  sweepers = experiment.sweepers if experiment.membership.sweeps else []
  while not all(sweeper.states for sweeper in sweepers):
    yield
  first, steps = experiment.limiter.learner_steps, experiment.config.profile.steps
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # tracing every call of Python would slow it down
  with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
    for step in range(first, first + steps):
      with jax.profiler.StepTraceAnnotation("learner step", step_num=step):
        yield
    jax.block_until_ready(experiment.state)
  experiment.logger.message(f"trace of {steps} learner steps in {folder / 'plugins/profile'}")
