"""Construction of an experiment from a configuration or a checkpoint."""

from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.metrics.values import ValueStats
from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.run import factories, snapshot
from speedyzero_jax.run.checkpoint import Checkpoints, Snapshot
from speedyzero_jax.run.collector import Collector
from speedyzero_jax.run.experiment import (
  ALONE,
  INIT,
  Experiment,
  Membership,
  unit_seed,
)
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.run.recovery import RecoveryManager
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner, make_mesh
from speedyzero_jax.workers.sweeper import make_sweepers
from speedyzero_jax.workers.weights import ACTOR, WeightsStore, publication


def _continue(experiment: Experiment, restored: Snapshot | None) -> None:
  """Restores the checkpoint, if there is one, and the journal, and starts this process's actor."""
  if restored is not None:
    snapshot.restore(experiment, restored)
  later = snapshot.replay_journal(experiment)
  if experiment.membership.runs_actor and not experiment.limiter.collected:
    snapshot.start_actor(experiment, restored, later=later)


def build(
  config: Config,
  run_dir: Path,
  logger: MetricsLogger,
  *,
  resume: bool,
  membership: Membership = ALONE,
) -> Experiment:
  """Builds all parts and, on resume, restores them from the newest usable checkpoint.

  `run_dir` is the folder of the run, whose lock this process must hold, or of a further learner.
  Raises CheckpointError, JournalError, TrainingError or OSError if the run can't continue.
  """
  local_config = loader.divide(config, membership.unit, membership.units)
  agent = factories.make_agent(local_config)
  run_dir.mkdir(parents=True, exist_ok=True)  # that of a further learner
  journal = Journal(run_dir / "journal.sqlite", local_config.actor.lanes, agent.schema)
  try:
    recovery = RecoveryManager(
      Checkpoints(run_dir, config.run.keep_checkpoints),
      journal,
      logger.message,
      durable=membership.durable and not agent.on_policy,  # else a resumed run discards it
      exact=config.run.mode == "lockstep" or agent.on_policy,
      all_gather=membership.all_gather,
      units=membership.units,
    )
    mesh = membership.mesh or make_mesh(jax.local_devices()[: config.learner.devices or None])
    local = make_mesh(mesh.local_devices)
    learner = Learner(config, agent, mesh, report=logger.message)
    inference = Inference(agent, local, report=logger.message)
    seed = unit_seed(config, "replay", membership)
    replay = factories.make_replay(local_config, agent, local, logger.message, seed=seed)
    restored = recovery.restore(snapshot.templates(learner, agent)) if resume else None
    logger.open((restored.step if restored else 0) if resume else None)
    if restored is None:
      state = learner.init(jax.random.fold_in(jax.random.key(config.run.seed), INIT))
    else:
      network, optimizer = restored.items["network"], restored.items["optimizer"]
      state = learner.restore(network, optimizer["target"], optimizer["state"], restored.step)
    intervals = {ACTOR: config.actor.weights_interval, **agent.subscriptions}
    everywhere = NamedSharding(local, PartitionSpec())
    weights = WeightsStore(intervals, everywhere, state.variables, publication(agent))
    limiter = RateLimiter(local_config, synchronous=agent.synchronous)
    values = ValueStats(local_config.actor.lanes, config.env.discount, agent.value_scale)
    collector = Collector(replay, limiter, weights, logger, values, recovery.append)
    sweepers = make_sweepers(agent, config.actor.weights_interval)
    experiment = Experiment(
      config=config, local_config=local_config, membership=membership, agent=agent, logger=logger,
      learner=learner, inference=inference, replay=replay, weights=weights, limiter=limiter,
      collector=collector, sweepers=sweepers, recovery=recovery, state=state,
    )  # fmt: skip
    _continue(experiment, restored)
    logger.add_source(lambda: {names.ENV_STEPS: limiter.env_steps})
    logger.add_source(
      lambda: {} if recovery.newest is None else {names.CHECKPOINT_STEP: recovery.newest}
    )
    return experiment
  except BaseException:
    journal.close()
    raise
