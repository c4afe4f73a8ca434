"""Test of the bound on the ages of stored values and targets, in whole runs."""

import time as clock

import numpy as np
import pytest

import tiny
from speedyzero_jax.run import loops
from whole_runs import quick

BOUNDS = {
  "two sweeps": (),
  "one sweep for both": ("reanalyse.max_age=6", "refresh.max_age=7"),
  "refresh beside batches": ("reanalyse.schedule=batch",),
  "refresh alone": ("reanalyse.schedule=off", "refresh.block=16", "refresh.max_age=5"),
  "backward": ("reanalyse.reuse=true", "reanalyse.simulations=1"),
  "tight": ("reanalyse.max_age=5", "refresh.max_age=4"),
}


@pytest.mark.parametrize(
  ("mode", "bounds"),
  [*(("lockstep", name) for name in BOUNDS), ("async", "tight")],
)
def test_nothing_stored_is_older_than_the_bound(tmp_path, mode, bounds):
  """The hard bound of Priority Refresh at every learner step, in a growing and in a full replay."""
  steps = ("learner.steps=24", "learner.tail_steps=8", "run.checkpoint_interval=1000")
  overrides = (*BOUNDS[bounds], f"run.mode={mode}", *steps)
  own, ages = tiny.config(*overrides).agent, []
  with quick(tmp_path, *overrides) as experiment:
    replay = experiment.replay

    def look():
      step = experiment.limiter.learner_steps
      stored = [step - replay.oldest_step(stamp) for stamp in ("value_step", "policy_step")]
      ages.append((replay.stats(step)["priority_age_max"], *stored))

    experiment.after_step.append(look)
    if mode == "async":
      at_once = experiment.run_task

      def slow(work, key):  # the learner must wait
        clock.sleep(0.01)
        return at_once(work, key)

      experiment.run_task = slow
    assert loops.run(experiment)
  priority, value, target = np.array(ages).T
  assert len(ages) == 24
  assert 0 < priority.max() <= own.refresh.max_age and value.max() <= own.refresh.max_age
  if own.reanalyse.schedule == "sweep":
    assert target.max() <= own.reanalyse.max_age
