"""A whole run, or a unit's part of one: builds the roles from a configuration, connects them, saves and restores them.

`Training` has one method for each thing a role does; `modes.py` decides who does it when and in which thread.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.reanalyse import BatchReanalyser, Reanalyse, Sweeper
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats, PartTimes
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.run import batch_pipeline
from speedyzero_jax.run.builders import evaluation_seed, game_of, make_replay, sweeps
from speedyzero_jax.run.checkpoint import Checkpoints, Snapshot
from speedyzero_jax.run.rate_limiter import Pacer
from speedyzero_jax.run.recovery import Keeper
from speedyzero_jax.run.topology import derived_seed, unit_config
from speedyzero_jax.types import Params, Segment
from speedyzero_jax.workers.evaluator import Evaluation, evaluate
from speedyzero_jax.workers.learner import Learner, StepResult, make_mesh
from speedyzero_jax.workers.local_actor import Collecting
from speedyzero_jax.workers.weights import (
  ACTOR,
  REANALYSER,
  REFRESHER,
  DivergedError,
  Version,
  WeightsStore,
)

_INIT, _LEARN, _ACT, _SEARCH, _SWEEP = range(5)  # what a key is for


class TrainingError(Exception):
  """The run can't go on; the message says why and what is safe."""


class Part(NamedTuple):
  """What of a run this process has. The defaults: all of it."""

  unit: int = 0
  units: int = 1
  mesh: Mesh | None = None  # of all units; None: this process' devices
  acts: bool = True  # with an actor of its own
  reanalyses: bool = True  # with a reanalyser of its own
  journal: Journal | None = None  # where experience is made durable before it counts
  frame_memory: np.ndarray | None = None  # where the replay's frames are to be kept
  agree: Callable[[int], Sequence[int]] = lambda step: [
    step
  ]  # tells all units a number and returns all of theirs
  # Tells this unit's numbers, returns what there is to report on: in unit 0 what all told last.
  share: Callable[[Mapping[str, float]], Sequence[Mapping[str, float]]] = lambda numbers: [numbers]
  meet: Callable[[], None] = lambda: None  # waits for all units, as long as it takes


WHOLE = Part()


class Training:
  """The roles of a run and what connects them.

  Args:
    config: of the run.
    run_dir: its folder, or the unit's, held by this process.
    reporter: takes what there is to tell.
    resume: go on from the newest readable checkpoint.
    part: what of the run this process has.

  Raises:
    CheckpointError: resuming, but no checkpoint can be read.
    TrainingError: the run can't go on here: a batch that the devices can't share, another number of learners, or, in
      lockstep, environments that play differently.
  """

  def __init__(
    self, config: Config, run_dir: Path, reporter: Reporter, *, resume: bool, part: Part = WHOLE
  ):
    self.config, self.reporter, self.part = config, reporter, part
    self.own = unit_config(config, part.unit, part.units)  # this unit's share
    self.interrupted = False
    self.leaving = False  # all units know that one of them was interrupted
    self.failure: Exception | None = None  # of somebody who could tell nobody else
    self._begun = False  # from here on it is the learner steps that tell units of an interruption
    self._acting_bytes = self._batch_bytes = (
      0  # handed to devices so far, each counted in a thread of its own
    )
    self._told_bytes: int | None = None  # of all bytes handed to devices, those that were reported
    self.times = PartTimes(mark=jax.profiler.TraceAnnotation)  # parts show in a trace too
    self.after_step: list[
      Callable[[], object]
    ] = []  # called after each learner step, in its thread
    self._key = jax.random.fold_in(jax.random.key(config.run.seed), _LEARN)
    checkpoints = Checkpoints(run_dir, config.run.keep_checkpoints)
    self.keeper = Keeper(checkpoints, part.journal, part.agree, reporter.message, units=part.units)
    game, devices = game_of(config), jax.local_devices()
    local = make_mesh(devices[: config.learner.devices or len(devices)])
    try:
      self.learner = Learner(
        config,
        game.observation_shape(config),
        game.num_actions,
        part.mesh or local,
        report=reporter.message,
      )
    except ValueError as error:  # a batch that these devices can't share
      raise TrainingError(str(error)) from error
    self.inference = Inference(config, self.learner.blueprint, local, report=reporter.message)
    self.replay = make_replay(
      self.own,
      game,
      local,
      reporter.message,
      seed=self._seed("replay"),
      frame_memory=part.frame_memory,
    )
    self.episodes = EpisodeStats(self.own.actor.lanes)
    self._collect_lock = threading.Lock()  # held while actor, journal and replay disagree

    restored, frames = self.keeper.restore(self._abstract()) if resume else (None, iter(()))
    if restored is None:
      self.state = self.learner.init(jax.random.fold_in(jax.random.key(config.run.seed), _INIT))
      if resume:
        reporter.rewind(0)
    else:
      self.state = self.learner.restore(restored.network, restored.optimizer, restored.step)
      self._agree_on_network(restored.step)
    intervals = {
      ACTOR: config.actor.weights_interval,
      REANALYSER: config.agent.reanalyse.weights_interval,
      REFRESHER: config.agent.refresh.weights_interval,
    }
    everywhere = NamedSharding(local, PartitionSpec())
    self.weights = WeightsStore(intervals, everywhere, self.state.variables)
    self.collecting = self._make_collecting() if part.acts else None
    self.sweepers = [
      Sweeper(self.own, kind, self.inference, self.weights, self._purpose(_SWEEP))
      for kind in sweeps(config)
    ]
    self.batch_reanalyser = BatchReanalyser(
      self.own, self.inference, self.weights, self._purpose(_SEARCH)
    )
    self.reanalyse: Reanalyse | None = (
      self.batch_reanalyser if config.agent.reanalyse.schedule == "batch" else None
    )
    self.pacer = Pacer(self.own)
    if restored is not None:
      self._restore_roles(restored, frames)
    self._replay_journal()
    reporter.watch(lambda: {names.ENV_STEPS: self.pacer.env_steps})

  def _make_collecting(self) -> Collecting:
    return Collecting(
      self.own,
      self.inference,
      self.replay,
      seed=self._seed("environments"),
      key=self._purpose(_ACT),
      stats=self.episodes,
    )

  def _seed(self, name: str) -> int:
    """Of what each unit has for itself."""
    seed = self.config.run.seed
    return derived_seed(seed, f"{name} of unit {self.part.unit}") if self.part.unit else seed

  def _purpose(self, purpose: int) -> jax.Array:
    """A key of what each unit has for itself."""
    return jax.random.fold_in(jax.random.key(self._seed("search")), purpose)

  # --- what the roles do ---

  def collect(self) -> None:
    """One step of all lanes, into the replay. Call while `pacer.may_collect`."""
    assert self.collecting is not None
    self.pacer.begin_acting(self)
    version = self.weights.latest(ACTOR)
    with self.times.part("act"), self._collect_lock:
      random = self.pacer.playing_randomly
      segments, count = self.collecting.actor.step(
        version, budget=self.pacer.pool, progress=self.pacer.progress, random=random
      )
      self._acting_bytes += 0 if random else self.collecting.actor.observation_bytes
      self._take(segments)
      self.pacer.add_env_steps(count)
    self.reporter.count(names.AGENT_STEPS_PER_SECOND, count)
    self._report_lag(version.step)
    self.pacer.end_acting(self)

  def take(self, segments: Sequence[Segment], episodes: Sequence[Episode], *, granted: int) -> None:
    """Takes what an actor in another process collected, of so many steps granted: durably, then into the replay.

    Raises ValueError if anything is wrong with it; nothing has changed then. If it can't be made durable, or anything
    else fails, the run ends with that error, which is raised here too.
    """
    count = sum(int((segment.action >= 0).sum()) for segment in segments)
    with self._collect_lock:
      self.replay.check(segments)
      try:
        self._take(segments)
      except Exception as error:  # the run must not go on with what would be lost, or is on disk and not in the replay
        self.failure = error
        self.pacer.stop()
        raise
      self.pacer.add_env_steps(count, reserved=granted)
    for episode in episodes:
      self.episodes.record(episode)
    self.reporter.count(names.AGENT_STEPS_PER_SECOND, count)
    if count:
      self._report_lag(min(int(segment.step.min()) for segment in segments))

  def _report_lag(self, acted_with: int) -> None:
    lag = self.pacer.learner_steps - acted_with
    self.reporter.mean({names.POLICY_LAG: lag, names.POLICY_LAG_MAX: lag})

  def _take(self, segments: Sequence[Segment]) -> None:
    self.keeper.record(segments)
    self.replay.append_many(segments)

  def cut(self, lanes: Sequence[int]) -> None:
    """The environments of these lanes are lost: what comes next begins new episodes."""
    with self._collect_lock:
      for lane in lanes:
        self.replay.truncate(lane)

  def sweep(self, sweeper: Sweeper) -> None:
    """One block of a whole-buffer pass. Call while `sweeper.due`."""
    before = sweeper.states
    with self.times.part("refresh" if sweeper.kind == "refresh" else "search"):
      sweeper.sweep(self.replay)
    name = names.REFRESHED_PER_SECOND if sweeper.kind == "refresh" else names.REANALYSED_PER_SECOND
    self.reporter.count(name, sweeper.states - before)

  def draw(self, learner_step: int) -> batch_pipeline.Fed:
    """The batch of a learner step on its devices, reanalysed if the schedule says so."""
    states = self.batch_reanalyser.states
    before = self.host_bytes if self._told_bytes is None else self._told_bytes
    fed = batch_pipeline.draw(self.own, self.replay, self.reanalyse, learner_step, self.times)
    self._batch_bytes += fed.host_bytes
    self.reporter.count(names.REANALYSED_PER_SECOND, self.batch_reanalyser.states - states)
    self._told_bytes = self.host_bytes
    self.reporter.mean({names.HOST_TO_DEVICE_BYTES: self._told_bytes - before})
    with self.times.part("gather"):
      return fed._replace(batch=self.learner.put(fed.batch))

  @property
  def program_bytes(self) -> int:
    """Memory on each device that what is compiled so far needs beside its arguments; 0 where XLA does not say."""
    return self.learner.update.bytes + self.inference.search.bytes + self.inference.value.bytes

  @property
  def host_bytes(self) -> int:
    """Handed to devices so far: frames as they come, what is searched and evaluated, batches. Weights stay there."""
    looked_at = self.batch_reanalyser.host_bytes + sum(
      sweeper.host_bytes for sweeper in self.sweepers
    )
    return self._acting_bytes + self._batch_bytes + looked_at + self.replay.bytes_to_devices

  def learn(self, fed: batch_pipeline.Fed) -> StepResult:
    """One learner step; its results stay on the device."""
    with self.times.part("train"):
      self.state, result = self.learner.step(
        self.state, fed.batch, self._key, stop=self.interrupted
      )
    self.pacer.add_learner_step()
    with self.times.part("publish"):
      self.weights.publish(self.pacer.learner_steps, self.state.variables)
    self.reporter.mean(
      {**result.metrics, names.TARGET_AGE_MEAN: fed.age, names.TARGET_AGE_MAX: fed.age_max}
    )
    self.reporter.count(names.LEARNER_STEPS_PER_SECOND, 1)
    self.reporter.count(names.SAMPLES_PER_SECOND, len(fed.lane))
    return result

  def learned(self, fed: batch_pipeline.Fed, result: StepResult, step: int) -> None:
    """Takes the new priorities of learner step `step` (from 0) into the replay; waits for the device.

    Raises:
      DivergedError: they, or the parameters after the step, are not finite.
    """
    with self.times.part("train"):
      td_error = self.learner.local(result.td_error)
      finite = np.isfinite(td_error).all() and np.isfinite(result.metrics[names.PARAMETER_NORM])
    if not finite:
      raise DivergedError(step + 1)
    self.replay.set_priorities(fed.lane, fed.time, td_error, step)
    self.leaving = self.leaving or bool(result.stopping)

  def begin_learning(self) -> bool:
    """To be called before the first step. Waits for all units to be ready. False if a unit is not going to take it."""
    self._begun = True
    self.times.take(self.pacer.learner_steps)  # what came before belongs to no step
    self.reporter.refresh()  # so that the first line has what all units know
    return not any(self.part.agree(int(self.interrupted)))

  @property
  def in_full_work(self) -> bool:
    """Whether the sweeps that are done here, which begin late, have begun."""
    return not self.part.reanalyses or all(sweeper.states for sweeper in self.sweepers)

  @property
  def saving_due(self) -> bool:
    """Whether `bookkeeping` will save a checkpoint at this learner step."""
    step = self.pacer.learner_steps
    return step % self.config.run.checkpoint_interval == 0 and step < self.config.learner.steps

  def bookkeeping(self) -> None:
    """What is due after a learner step: a line of metrics, a checkpoint, an evaluation, and whoever looks on."""
    step, config = self.pacer.learner_steps, self.config
    if step % config.run.log_interval == 0 or step == config.learner.steps:
      self.log()
    if self.saving_due:
      with self.times.part("save"):
        self.save()
    if (
      config.evaluation.interval
      and step % config.evaluation.interval == 0
      and step < config.learner.steps
    ):
      with self.times.part("evaluate"):
        if self.part.unit == 0:
          self.evaluate()
        self.part.meet()
    for call in self.after_step:
      call()

  def log(self) -> None:
    """Writes a line of metrics now."""
    step = self.pacer.learner_steps
    self.reporter.latest(self.times.take(step))
    self.reporter.line(learner_steps=step, replay=self.replay.stats(step), episodes=self.episodes)

  def evaluate(self) -> Evaluation | None:
    """Plays full episodes with the current weights; None if the run is being stopped."""
    result = evaluate(
      self.config,
      self.inference,
      Version(self.pacer.learner_steps, self.weights.to_device(self.state.variables)),
      episodes=self.config.evaluation.episodes,
      seed=evaluation_seed(self.config),
      should_stop=lambda: self.interrupted,
      report=self.reporter.message,
    )
    if result is not None:
      self.reporter.evaluated(result)
    return result

  def parameters_hash(self) -> str:
    """SHA-256 of the learner's variables: equal for equal lockstep runs."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(self.state.variables)):
      digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()

  def interrupt(self) -> None:
    """Ends the run soon; safe to call from a signal handler.

    One process stops where it is. Of several that have begun to learn, each takes steps until all know, so that none
    waits for another forever.
    """
    self.interrupted = True
    if self.part.units > 1 and self._begun and self.pacer.learner_steps < self.config.learner.steps:
      self.pacer.hurry()
    else:
      self.pacer.stop()

  def close(self) -> None:
    """Lets go of environments and files."""
    if self.collecting is not None:
      self.collecting.close()
    self.keeper.close()

  # --- saving and restoring ---

  def save(self, *, required: bool = False) -> None:
    """Starts a checkpoint of this learner step in the background, and shows it when the one before failed.

    Args:
      required: wait for it.

    Raises:
      CheckpointError: it is required and failed. Otherwise training goes on and the next one is tried.
      DivergedError: what is not finite is never saved.
    """
    saved = self.keeper.settle()
    step = self.pacer.learner_steps
    with self._collect_lock:
      heads = self.replay.heads
      slots = self.replay.export_slots(np.zeros_like(heads) if saved is None else saved)
      replay, env_steps = self.replay.state_dict(), self.pacer.env_steps
      acted = self.collecting.state() if self.collecting is not None else {}
    versions = self.weights.snapshot()
    network, optimizer, weights = jax.device_get(
      (
        self.state.variables,
        self.state.opt_state,
        {name: version.variables for name, version in versions.items()},
      )
    )
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(network)):
      raise DivergedError(step)
    meta = {
      "weights": {name: version.step for name, version in versions.items()},
      "sweepers": {sweeper.kind: sweeper.counters() for sweeper in self.sweepers},
      "reanalyser_calls": self.batch_reanalyser.calls,
      "units": self.part.units,
    }
    self.reporter.latest({names.CHECKPOINT_STEP: step})
    snapshot = Snapshot(
      step, env_steps, network, optimizer, weights, replay, acted, meta, slots, heads
    )
    self.keeper.save(snapshot, required=required)

  def _abstract(self) -> dict[str, Params]:
    """Shapes of what is restored to devices."""
    state = self.learner.abstract()
    weights = dict.fromkeys((ACTOR, REANALYSER, REFRESHER), state.variables)
    return {"network": state.variables, "optimizer": state.opt_state, "weights": weights}

  def _agree_on_network(self, step: int) -> None:
    if len(set(self.part.agree(int(self.parameters_hash()[:15], 16)))) > 1:
      raise TrainingError(
        f"the learners' checkpoints of step {step} hold different networks: move checkpoints/{step} away, in the run "
        "folder and in its units/*, to go on from older ones"
      )

  def _restore_roles(self, snapshot: Snapshot, frames: Iterator[dict[str, np.ndarray]]) -> None:
    meta = snapshot.meta
    if meta["units"] != self.part.units:
      raise TrainingError(
        f"the run's experience lies with {meta['units']} learners, it can't go on with {self.part.units}"
      )
    self.reporter.rewind(snapshot.step)
    for slots in frames:
      self.replay.import_slots(slots)
      del slots  # before the next ones are loaded
    self.replay.load_state_dict(snapshot.replay)
    steps = meta["weights"]
    self.weights.restore(
      {name: Version(steps[name], variables) for name, variables in snapshot.weights.items()}
    )
    for sweeper in self.sweepers:
      sweeper.restore(meta["sweepers"][sweeper.kind])
    self.batch_reanalyser.calls = meta["reanalyser_calls"]
    self.pacer = Pacer(self.own, env_steps=snapshot.env_steps, learner_steps=snapshot.step)
    self.reporter.message(
      f"resuming at learner step {snapshot.step}, agent step {snapshot.env_steps}"
    )
    if self.collecting is not None:
      self._restore_collecting(self.collecting, snapshot)

  def _restore_collecting(self, collecting: Collecting, snapshot: Snapshot) -> None:
    try:
      if not snapshot.actor:
        raise RuntimeError("the games went on in other processes")
      collecting.restore(snapshot.actor)
    except RuntimeError as error:
      if self.config.run.mode == "lockstep":
        raise TrainingError(
          f"can't go on from step {snapshot.step}: {error}. A lockstep run goes on bit for bit or not at all: resume "
          "it with the envpool and on the kind of machine that it began with, or start a new run."
        ) from error
      self.reporter.message(
        f"warning: {error}; games begin anew, those that were going on are cut where they stood"
      )
      collecting.cut()

  def _replay_journal(self) -> None:
    """Takes in what was made durable after the checkpoint."""
    before, heads = self.pacer.env_steps, self.replay.heads
    for segments in self.keeper.recorded(self.replay.heads):
      for segment in segments:
        if segment.first[0]:
          self.replay.truncate(segment.lane)  # its environment was lost then
      now = self.pacer.learner_steps  # they may be of later ones, that are lost
      self.replay.append_many(
        [segment._replace(step=np.minimum(segment.step, now)) for segment in segments]
      )
      self.pacer.add_env_steps(sum(int((segment.action >= 0).sum()) for segment in segments))
    if self.pacer.env_steps > before:
      self.reporter.message(f"{self.pacer.env_steps - before} agent steps more from the journal")
    if (
      self.collecting is not None and (self.replay.heads > heads).any()
    ):  # also by resets, which are no agent steps
      self.collecting.cut()
