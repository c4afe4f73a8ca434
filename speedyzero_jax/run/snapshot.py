"""Snapshots of an experiment: saving and restoring the state of all its parts.

`recovery.py` picks the checkpoint to restore and `checkpoint.py` reads and writes the files.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from speedyzero_jax.agents.base import Agent, Variables
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics import names
from speedyzero_jax.replay.journal import JournalDamage
from speedyzero_jax.run.checkpoint import Snapshot
from speedyzero_jax.run.experiment import ACT, Experiment, TrainingError
from speedyzero_jax.types import Params, Slots
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.learner import Learner, LearnerState
from speedyzero_jax.workers.weights import ACTOR, DivergedError, Version

# Most agent steps that an asynchronous run repeats to continue its games; takes about 3 minutes.
_REPEATED = 500_000
_NO_GAMES = f"other processes played them, or the actor took more than {_REPEATED:,} agent steps"


def templates(learner: Learner, agent: Agent) -> dict[str, Params]:
  """Structure and shapes of the items restored as pytrees; others are dicts of arrays."""
  state = learner.abstract()
  published = jax.eval_shape(agent.published, state.variables)
  return _trees(state, dict.fromkeys((ACTOR, *agent.subscriptions), published))


def _trees(state: LearnerState, weights: dict[str, Variables]) -> dict[str, Params]:
  optimizer = {"state": state.opt_state, "target": state.target}
  return {"network": state.variables, "optimizer": optimizer, "weights": weights}


def save(experiment: Experiment, *, required: bool = False) -> None:
  """Starts saving a checkpoint in the background; reports a failure of the previous one.

  With `required`, blocks until it is written and raises CheckpointError if that fails; otherwise a
  failure does not stop training, all learner processes must call this, and TrainingError is raised
  if their networks differ. Raises DivergedError if parameters are not finite. Saves nothing then.
  """
  experiment.recovery.wait()
  step = experiment.limiter.learner_steps
  replay, local = experiment.replay, experiment.collector.local
  with experiment.collector.lock:
    heads, tails = replay.heads, replay.tails
    stored, env_steps = replay.state_dict(), experiment.limiter.env_steps
    acted = local.state_dict() if local is not None else {}
    episodes = experiment.collector.episodes.state_dict()
  versions = experiment.weights.snapshot()
  weights = {name: version.variables for name, version in versions.items()}
  items = jax.device_get(_trees(experiment.state, weights))
  if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(items["network"])):
    raise DivergedError(step)
  if not required:
    check_same_network(experiment, step, items["network"])
  meta = {
    "weights": {name: version.step for name, version in versions.items()},
    "sweepers": {sweeper.name: sweeper.state_dict() for sweeper in experiment.sweepers},
    "episodes": episodes,
  }
  items |= {"replay": stored, "actor": acted}
  experiment.recovery.save(Snapshot(step, env_steps, items, meta, heads, tails), required=required)


def restore(experiment: Experiment, restored: Snapshot) -> None:
  """Restores a checkpoint into newly built parts, except the actor.

  Raises TrainingError if the networks of several learner processes differ.
  """
  meta, step = restored.meta, restored.step
  check_same_network(experiment, step, experiment.state.variables)
  for slots in joined(experiment.recovery.journal.read(restored.tails, restored.heads)):
    experiment.replay.import_frames(slots)
  experiment.replay.load_state_dict(restored.items["replay"])
  steps: dict[str, Any] = meta["weights"]
  experiment.weights.restore(
    {name: Version(steps[name], variables) for name, variables in restored.items["weights"].items()}
  )
  for sweeper in experiment.sweepers:
    sweeper.load_state_dict(meta["sweepers"][sweeper.name])
  experiment.limiter.restore(restored.env_steps, step)
  experiment.collector.episodes.load_state_dict(meta["episodes"])
  evaluated = experiment.logger.last_row().get(names.EVALUATION_STEP, 0)
  experiment.evaluated, *_ = experiment.membership.all_gather(int(evaluated))
  experiment.logger.message(f"resuming at learner step {step}, agent step {restored.env_steps}")


def check_same_network(experiment: Experiment, step: int, variables: Variables) -> None:
  """Raises TrainingError if learner processes have different variables after learner step `step`.

  All of them must call this.
  """
  digest = int(hash_of(variables)[:15], 16) if experiment.membership.units > 1 else 0
  if len(set(experiment.membership.all_gather(digest))) > 1:
    raise TrainingError(
      f"the networks of the learner processes differ after learner step {step}: their programs or "
      "devices compute different results, or their run folders are of different runs. Delete the "
      "compilation cache (run.compile_cache) of every machine; before resuming, move checkpoints "
      "of this step, if there are any, out of the run folder and out of its units/*"
    )


def replay_journal(experiment: Experiment) -> bool:
  """Appends the slots that the journal has after the checkpoint. Returns whether it had any.

  If some are damaged or missing, those after them in their lanes are deleted from the journal.
  """
  limiter, replay, journal = experiment.limiter, experiment.replay, experiment.recovery.journal
  before, heads = limiter.env_steps, replay.heads
  try:
    for slots in joined(journal.read(heads)):
      experiment.collector.replay_recorded(slots)
  except JournalDamage as damage:
    lost = journal.continue_from(replay.heads, drop=True)
    experiment.logger.message(
      f"warning: {damage}; {lost.sum()} frames after this checkpoint are lost and will be "
      "collected again"
    )
  if limiter.env_steps > before:
    experiment.logger.message(f"replayed {limiter.env_steps - before} agent steps of the journal")
  return bool((replay.heads > heads).any())  # a reset adds a slot, but no agent step


def joined(rows: Iterable[Slots]) -> Iterator[Slots]:
  """Joins single slots of ascending lanes, such as those of a step, as their import is slow."""
  group: list[Slots] = []
  damage: JournalDamage | None = None
  try:
    for row in rows:
      if group and (len(row) > 1 or len(group[-1]) > 1 or row.lane[0] <= group[-1].lane[0]):
        yield Slots.concatenate(group)
        group = []
      group.append(row)
  except JournalDamage as error:  # after the intact slots
    damage = error
  if group:
    yield Slots.concatenate(group)
  if damage:
    raise damage


def start_actor(experiment: Experiment, restored: Snapshot | None, *, later: bool) -> None:
  """Creates the local actor, once the replay is restored; it continues the checkpoint's games.

  If that is impossible, or the journal had steps `later` than the checkpoint, open episodes are
  truncated and new games begin. Raises TrainingError instead if the mode is lockstep.
  """
  collector = experiment.collector
  if restored is not None and not later:
    try:
      if not (saved := restored.items.get("actor")):
        raise RuntimeError(f"the games can't be continued: {_NO_GAMES}")
      if (saved["start"] + len(saved["actions"]) > experiment.replay.heads).any():
        raise RuntimeError("the games are ahead of the replay, as the run failed while acting")
      count = saved["actions"].size
      experiment.logger.message(f"repeating {count} agent steps to continue the games")
      collector.local = _new_actor(experiment, saved["start"])
      collector.local.load_state_dict(saved)
      return
    except (RuntimeError, ValueError) as error:  # ValueError: an action illegal in another game
      if experiment.config.run.mode == "lockstep":
        raise TrainingError(
          f"can't continue from step {restored.step}: {error}. A lockstep run must resume bit for "
          "bit: use the same versions and machine type, and environments that take all random "
          "numbers from their seed, or start a new run."
        ) from error
      experiment.logger.message(
        f"warning: {error}; unfinished episodes are truncated and new games begin"
      )
      collector.close()
  collector.truncate(range(experiment.local_config.actor.lanes))
  collector.local = _new_actor(experiment, experiment.replay.heads)


def _new_actor(experiment: Experiment, start: np.ndarray) -> Actor:
  """Creates an actor of all lanes, in new environments whose first frames are slots `start` [L].

  A run's first environments start at slot 0; replacements for lost environments are seeded
  differently.
  """
  local_config = experiment.local_config
  # Distinct from the seeds of evaluation and of other runs.
  seed = experiment.seed("environments") + (int(start.sum()) << 32)
  env = make_env(local_config.env, local_config.actor.lanes, seed, training=True)
  exact = experiment.config.run.mode == "lockstep"
  return Actor(
    local_config, experiment.agent, env, experiment.inference, experiment.key(ACT),
    start=start, resumable_for=None if exact else _REPEATED // local_config.actor.lanes,
  )  # fmt: skip


def hash_of(variables: Variables) -> str:
  """SHA-256 of arrays on the host or on devices."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(variables)):
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return digest.hexdigest()
