"""Snapshots of an experiment: the saved state of each part, and its restoration."""

import hashlib
from typing import Any

import jax
import numpy as np

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics import names
from speedyzero_jax.run.checkpoint import Snapshot
from speedyzero_jax.run.experiment import ACT, Experiment, TrainingError
from speedyzero_jax.types import Params
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.learner import Learner, LearnerState
from speedyzero_jax.workers.weights import ACTOR, DivergedError, Version


def templates(learner: Learner, agent: Agent) -> dict[str, Params]:
  """Structure and shapes of a checkpoint's items; of the others, only their parts know them."""
  state = learner.abstract()
  weights = dict.fromkeys((ACTOR, *agent.subscriptions), state.variables)
  optimizer = {"state": state.opt_state, "target": state.target}
  return {"network": state.variables, "optimizer": optimizer, "weights": weights}


def learner_state(learner: Learner, restored: Snapshot) -> LearnerState:
  network, optimizer = restored.items["network"], restored.items["optimizer"]
  return learner.restore(network, optimizer["target"], optimizer["state"], restored.step)


def save(experiment: Experiment, *, required: bool = False) -> None:
  """Starts saving a checkpoint in the background; reports a failure of the previous one.

  A `required` one is waited for, and raises CheckpointError; other failures don't stop training.
  Raises DivergedError if parameters are not finite; nothing is saved then.
  """
  experiment.recovery.wait()
  step = experiment.limiter.learner_steps
  replay, local = experiment.replay, experiment.collector.local
  with experiment.collector.lock:
    heads, tails = replay.heads, replay.tails
    stored, env_steps = replay.state_dict(), experiment.limiter.env_steps
    acted = local.state_dict() if local is not None else {}
  versions, state = experiment.weights.snapshot(), experiment.state
  network, optimizer, weights = jax.device_get(
    (
      state.variables,
      {"state": state.opt_state, "target": state.target},
      {name: version.variables for name, version in versions.items()},
    )
  )
  if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(network)):
    raise DivergedError(step)
  meta = {
    "weights": {name: version.step for name, version in versions.items()},
    "sweepers": {sweeper.name: sweeper.state_dict() for sweeper in experiment.sweepers},
    "units": experiment.membership.units,
  }
  experiment.logger.log_latest({names.CHECKPOINT_STEP: step})
  items = {
    "network": network,
    "optimizer": optimizer,
    "weights": weights,
    "replay": stored,
    "actor": acted,
  }
  experiment.recovery.save(Snapshot(step, env_steps, items, meta, heads, tails), required=required)


def restore(experiment: Experiment, restored: Snapshot) -> None:
  """Restores a checkpoint into newly made parts, except the actor.

  Raises TrainingError if it is of another number of learner processes, or differs from theirs.
  """
  meta = restored.meta
  _check_same_network(experiment, restored.step)
  if meta["units"] != experiment.membership.units:
    raise TrainingError(
      f"the run's experience is divided among {meta['units']} learner processes; it can't "
      f"continue with {experiment.membership.units}"
    )
  experiment.logger.rewind(restored.step)
  for segment in experiment.recovery.journal.read(restored.tails, restored.heads):
    experiment.replay.import_frames([segment])
  experiment.replay.load_state_dict(restored.items["replay"])
  steps: dict[str, Any] = meta["weights"]
  experiment.weights.restore(
    {name: Version(steps[name], variables) for name, variables in restored.items["weights"].items()}
  )
  for sweeper in experiment.sweepers:
    sweeper.load_state_dict(meta["sweepers"][sweeper.name])
  experiment.limiter.restore(restored.env_steps, restored.step)
  experiment.logger.message(
    f"resuming at learner step {restored.step}, agent step {restored.env_steps}"
  )


def _check_same_network(experiment: Experiment, step: int) -> None:
  digests = experiment.membership.all_gather(int(parameters_hash(experiment)[:15], 16))
  if len(set(digests)) > 1:
    raise TrainingError(
      f"the learner processes' checkpoints of step {step} hold different networks: to continue "
      f"from older ones, move checkpoints/{step}-* away, in the run folder and in its units/*"
    )


def replay_journal(experiment: Experiment) -> bool:
  """Appends the segments recorded after the checkpoint. Returns whether there were any."""
  limiter, replay = experiment.limiter, experiment.replay
  before, heads = limiter.env_steps, replay.heads
  for segment in experiment.recovery.journal.read(heads):
    experiment.collector.replay_recorded([segment])
  if limiter.env_steps > before:
    experiment.logger.message(f"{limiter.env_steps - before} more agent steps from the journal")
  return bool((replay.heads > heads).any())  # resets, too, are slots


def start_actor(experiment: Experiment, restored: Snapshot | None, *, later: bool) -> None:
  """Makes the local actor, once the replay is restored; it continues the games of the checkpoint.

  Where that can't be, or the replay holds steps from `later` than the checkpoint, their episodes
  are cut and new games begin. Raises TrainingError instead if the mode is lockstep.
  """
  collector = experiment.collector
  if restored is not None and not later:
    try:
      if not (saved := restored.items.get("actor")):
        raise RuntimeError("the games were played in other processes")
      collector.local = _new_actor(experiment, saved["start"])
      collector.local.load_state_dict(saved)
      return
    except RuntimeError as error:
      if experiment.config.run.mode == "lockstep":
        raise TrainingError(
          f"can't continue from step {restored.step}: {error}. A lockstep run continues bit for "
          "bit or not at all: resume it with the envpool and on the kind of machine that it began "
          "with, or start a new run."
        ) from error
      experiment.logger.message(
        f"warning: {error}; new games begin, and unfinished episodes end where they were"
      )
      collector.close()
  collector.truncate(range(experiment.local_config.actor.lanes))
  collector.local = _new_actor(experiment, experiment.replay.heads)


def _new_actor(experiment: Experiment, start: np.ndarray) -> Actor:
  """An actor of all lanes, in new environments whose first frames are slots `start` [L].

  The first ones of a run start at 0; later ones, for lost ones, have another seed.
  """
  local_config, episodes = experiment.local_config, experiment.collector.episodes
  # Distinct from the seeds of evaluation and of other runs.
  seed = experiment.seed("environments") + (int(start.sum()) << 32)
  env = make_env(local_config.env, local_config.actor.lanes, seed, training=True)
  episodes.clear()  # also of games finished by a replay that diverged
  agent, key = experiment.agent, experiment.key(ACT)
  return Actor(local_config, agent, env, experiment.inference, key, episodes, start=start)


def parameters_hash(experiment: Experiment) -> str:
  """SHA-256 of the learner's variables: equal for equal lockstep runs."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(experiment.state.variables)):
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return digest.hexdigest()
