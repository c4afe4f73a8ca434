"""A whole run in one process: builds the roles from a configuration, connects them, saves and restores them.

`Training` has one method for each thing a role does; `modes.py` decides who does it when and in which thread.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from speedyzero_jax import feed
from speedyzero_jax.actor import Actor, ActorState
from speedyzero_jax.checkpoint import CheckpointError, Checkpoints, Snapshot
from speedyzero_jax.config import Config
from speedyzero_jax.envs import BatchedEnv, make_env
from speedyzero_jax.evaluation import Evaluation, evaluate
from speedyzero_jax.inference import Inference
from speedyzero_jax.learner import Learner, StepResult, make_mesh
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.rates import EpisodeStats
from speedyzero_jax.networks import make_blueprint
from speedyzero_jax.pacing import Pacer
from speedyzero_jax.reanalyser import REANALYSER, REFRESHER, BatchReanalyser, Sweeper
from speedyzero_jax.replay.buffer import Replay, SweepName
from speedyzero_jax.replay.device_frames import place_frames
from speedyzero_jax.replay.lanes import LaneStore
from speedyzero_jax.reporting import Reporter
from speedyzero_jax.weights import Version, WeightsStore

ACTOR = "actor"  # subscriber of weights
_INIT, _LEARN, _ACT, _SEARCH, _SWEEP = range(5)  # what a key is for


class TrainingError(Exception):
  """The run can't go on; the message says why and what is safe."""


class Training:
  """The roles of a run and what connects them.

  Args:
    config: of the run.
    run_dir: its folder, held by this process.
    reporter: takes what there is to tell.
    resume: go on from the newest readable checkpoint.

  Raises:
    CheckpointError: resuming, but no checkpoint can be read.
    TrainingError: the run can't go on here: a batch that the devices can't share, or, in lockstep, environments that
      play differently.
  """

  def __init__(self, config: Config, run_dir: Path, reporter: Reporter, *, resume: bool):
    self.config, self.reporter = config, reporter
    self.interrupted = False
    self._compiled = False  # the training step
    self._generation = 0  # how often the environments could not be replayed and were made anew
    self.checkpoints = Checkpoints(run_dir, config.run.keep_checkpoints)
    self._env = self._make_env()
    height, width, channels = self._env.frame_shape
    devices = jax.local_devices()
    mesh = make_mesh(devices[: config.learner.devices or len(devices)])
    shape = (height, width, channels * config.env.frame_stack)
    try:
      self.learner = Learner(config, shape, self._env.num_actions, mesh)
    except ValueError as error:  # a batch that these devices can't share
      raise TrainingError(str(error)) from error
    self.inference = Inference(config, self.learner.blueprint)
    self.replay = make_replay(config, self._env, mesh, reporter.message)
    self.episodes = EpisodeStats(config.actor.lanes)
    self._collect_lock = threading.Lock()  # held while actor and replay disagree

    restored, segments = self._read_checkpoint() if resume else (None, iter(()))
    if restored is None:
      self.state = self.learner.init(self._purpose(_INIT))
    else:
      self.state = self.learner.restore(restored.network, restored.optimizer, restored.step)
    intervals = {
      ACTOR: config.actor.weights_interval,
      REANALYSER: config.reanalyse.weights_interval,
      REFRESHER: config.refresh.weights_interval,
    }
    self.weights = WeightsStore(intervals, devices[0], self.state.variables)
    self.actor = Actor(config, self._env, self.inference, self._purpose(_ACT), self.episodes)
    self.reanalyser = (
      BatchReanalyser(config, self.inference, self.weights, self._purpose(_SEARCH))
      if config.reanalyse.schedule == "batch"
      else None
    )
    self.sweepers = [
      Sweeper(config, kind, self.inference, self.weights, self._purpose(_SWEEP)) for kind in sweeps(config)
    ]
    self.pacer = Pacer(config)
    if restored is not None:
      self._restore_roles(restored, segments)

  # --- what the roles do ---

  def collect(self) -> None:
    """One step of all lanes, into the replay. Call while `pacer.may_collect`."""
    version = self.weights.latest(ACTOR)
    taken = self.pacer.env_steps
    with self._collect_lock:
      segments, count = self.actor.step(
        version,
        budget=self.config.run.env_steps - taken,
        progress=self.pacer.progress,
        random=taken < self.config.actor.random_steps,
      )
      self.replay.append_many(segments)
      self.pacer.add_env_steps(count)
    self.reporter.count(names.AGENT_STEPS_PER_SECOND, count)
    self.reporter.mean({names.POLICY_LAG: self.pacer.learner_steps - version.step})

  def sweep(self, sweeper: Sweeper) -> None:
    """One block of a whole-buffer pass. Call while `sweeper.due`."""
    before = sweeper.states
    sweeper.sweep(self.replay)
    name = names.REFRESHED_PER_SECOND if sweeper.kind == "refresh" else names.REANALYSED_PER_SECOND
    self.reporter.count(name, sweeper.states - before)

  def draw(self, learner_step: int) -> feed.Fed:
    """The batch of a learner step on its devices, reanalysed if the schedule says so."""
    before = self.reanalyser.states if self.reanalyser else 0
    fed = feed.draw(self.config, self.replay, self.reanalyser, learner_step)
    if self.reanalyser:
      self.reporter.count(names.REANALYSED_PER_SECOND, self.reanalyser.states - before)
    return fed._replace(batch=self.learner.put(fed.batch))

  def learn(self, fed: feed.Fed) -> StepResult:
    """One learner step; its results stay on the device."""
    begin = time.monotonic()
    if not self._compiled:
      self.reporter.message("compiling the training step: up to a minute or two, less when it was compiled before")
    self.state, result = self.learner.step(self.state, fed.batch, self._purpose(_LEARN))
    if not self._compiled:
      self._compiled = True
      self.reporter.message(f"compiled in {time.monotonic() - begin:.0f} s")
    self.pacer.add_learner_step()
    self.weights.publish(self.pacer.learner_steps, self.state.variables)
    self.reporter.mean({**result.metrics, names.TARGET_AGE_MEAN: fed.age, names.TARGET_AGE_MAX: fed.age_max})
    self.reporter.count(names.LEARNER_STEPS_PER_SECOND, 1)
    self.reporter.count(names.SAMPLES_PER_SECOND, len(fed.lane))
    return result

  def learned(self, fed: feed.Fed, result: StepResult, step: int) -> None:
    """Takes the new priorities of learner step `step` (from 0) into the replay; waits for the device.

    Raises:
      TrainingError: they, or the parameters after the step, are not finite: training has diverged.
    """
    td_error = np.asarray(result.td_error)
    if not (np.isfinite(td_error).all() and np.isfinite(result.metrics[names.PARAMETER_NORM])):
      raise _diverged(step + 1)
    self.replay.set_priorities(fed.lane, fed.time, td_error, step)

  @property
  def saving_due(self) -> bool:
    """Whether `bookkeeping` will save a checkpoint at this learner step."""
    step = self.pacer.learner_steps
    return step % self.config.run.checkpoint_interval == 0 and step < self.config.learner.steps

  def bookkeeping(self) -> None:
    """What is due after a learner step: a line of metrics, a checkpoint, an evaluation."""
    step, config = self.pacer.learner_steps, self.config
    if step % config.run.log_interval == 0 or step == config.learner.steps:
      self.log()
    if self.saving_due:
      self.save()
    if config.evaluation.interval and step % config.evaluation.interval == 0 and step < config.learner.steps:
      self.evaluate()

  def log(self) -> None:
    """Writes a line of metrics now."""
    step = self.pacer.learner_steps
    self.reporter.line(
      learner_steps=step, env_steps=self.pacer.env_steps, replay=self.replay.stats(step), episodes=self.episodes
    )

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
    """Ends the run soon; safe to call from a signal handler."""
    self.interrupted = True
    self.pacer.stop()

  def close(self) -> None:
    """Lets go of environments and files."""
    self._env.close()
    try:
      self.checkpoints.close()
    except CheckpointError as error:  # of a save that nobody waited for
      self.reporter.message(f"{error}; earlier checkpoints are intact")

  # --- saving and restoring ---

  def save(self, *, required: bool = False) -> None:
    """Starts a checkpoint of this learner step in the background, and shows it when the one before failed.

    Args:
      required: wait for it.

    Raises:
      CheckpointError: it is required and failed. Otherwise training goes on and the next one is tried.
      TrainingError: training has diverged; what is not finite is never saved.
    """
    try:
      self.checkpoints.wait()
    except CheckpointError as error:
      self.reporter.message(f"{error}; training goes on, earlier checkpoints are intact")
    step = self.pacer.learner_steps
    with self._collect_lock:
      heads, saved = self.replay.heads, self.checkpoints.heads
      slots = self.replay.export_slots(np.zeros_like(heads) if saved is None else saved)
      replay, actor, env_steps = self.replay.state_dict(), self.actor.state(), self.pacer.env_steps
    versions = self.weights.snapshot()
    network, optimizer, weights = jax.device_get(
      (self.state.variables, self.state.opt_state, {name: version.variables for name, version in versions.items()})
    )
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(network)):
      raise _diverged(step)
    meta = {
      "weights": {name: version.step for name, version in versions.items()},
      "sweepers": {sweeper.kind: sweeper.counters() for sweeper in self.sweepers},
      "reanalyser_calls": self.reanalyser.calls if self.reanalyser else 0,
    }
    acted = {
      "actions": actor.actions,
      "frames_crc": np.array([actor.frames_crc], np.int64),
      "start": actor.start,
      "generation": np.array([self._generation], np.int64),
    }
    self.checkpoints.save(Snapshot(step, env_steps, network, optimizer, weights, replay, acted, meta, slots, heads))
    self.reporter.latest({names.CHECKPOINT_STEP: step})
    if required:
      self.checkpoints.wait()

  def _read_checkpoint(self) -> tuple[Snapshot, Iterator[dict[str, np.ndarray]]]:
    state = self.learner.abstract()
    weights = dict.fromkeys((ACTOR, REANALYSER, REFRESHER), state.variables)
    abstract = {"network": state.variables, "optimizer": state.opt_state, "weights": weights}
    return self.checkpoints.restore(abstract, self.reporter.message)

  def _restore_roles(self, snapshot: Snapshot, segments: Iterator[dict[str, np.ndarray]]) -> None:
    meta = snapshot.meta
    self.reporter.rewind(snapshot.step)
    for slots in segments:
      self.replay.import_slots(slots)
      del slots  # before the next ones are loaded
    self.replay.load_state_dict(snapshot.replay)
    steps = meta["weights"]
    self.weights.restore({name: Version(steps[name], variables) for name, variables in snapshot.weights.items()})
    for sweeper in self.sweepers:
      sweeper.restore(meta["sweepers"][sweeper.kind])
    if self.reanalyser:
      self.reanalyser.calls = meta["reanalyser_calls"]
    self.pacer = Pacer(self.config, env_steps=snapshot.env_steps, learner_steps=snapshot.step)
    self.reporter.message(f"resuming at learner step {snapshot.step}, agent step {snapshot.env_steps}")
    self._restore_actor(snapshot)

  def _restore_actor(self, snapshot: Snapshot) -> None:
    saved = snapshot.actor
    if generation := int(saved["generation"][0]):
      self._replace_actor(generation)
    try:
      self.actor.restore(ActorState(saved["actions"], int(saved["frames_crc"][0]), saved["start"]))
    except RuntimeError as error:
      if self.config.run.mode == "lockstep":
        raise TrainingError(
          f"can't go on from step {snapshot.step}: {error}. A lockstep run goes on bit for bit or not at all: resume "
          "it with the envpool and on the kind of machine that it began with, or start a new run."
        ) from error
      self.reporter.message(f"warning: {error}; games begin anew, those that were going on are cut where they stood")
      for lane in range(self.config.actor.lanes):
        self.replay.truncate(lane)
      self._replace_actor(generation + 1)

  def _replace_actor(self, generation: int) -> None:
    """Environments from another seed, whose first frames come after all that the replay holds."""
    self._generation = generation
    self._env.close()
    self._env = self._make_env()
    self.episodes = EpisodeStats(self.config.actor.lanes)
    key = self._purpose(_ACT)
    self.actor = Actor(self.config, self._env, self.inference, key, self.episodes, start=self.replay.heads)

  def _make_env(self) -> BatchedEnv:
    seed = self.config.run.seed + (self._generation << 32)  # far from any other run's, and from the evaluation's
    return make_env(self.config.env, self.config.actor.lanes, seed, training=True)

  def _purpose(self, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(self.config.run.seed), purpose)


def _diverged(step: int) -> TrainingError:
  return TrainingError(
    f"learner step {step} gave values that are not finite: training has diverged. Checkpoints are intact; "
    "lower optim.learning_rate or optim.clip_norm and start again, or resume from before."
  )


def replay_bytes(config: Config) -> int:
  """Host memory that the replay has in use when a run ends, at least: a slot for each agent step, as far as they are
  kept. An episode has one slot more than it has steps.
  """
  env = make_env(config.env, 1, 0, training=True)
  slot = LaneStore(1, 1, env.frame_shape, env.frame_dtype, env.num_actions).memory()["reserved_bytes"]
  env.close()
  return int(slot) * min(config.replay.capacity or config.run.env_steps, config.run.env_steps)


def make_replay(config: Config, env: BatchedEnv, mesh: Mesh, report: Callable[[str], None]) -> Replay:
  """The replay that a configuration asks for, its frames also on the devices of the mesh if it says so.

  With `replay.capacity` 0 it is as long as a run can make it: one frame per agent step and one more per episode. Host
  memory is committed only as it is used; devices start with room for episodes of ten steps and more.
  """
  wanted = config.replay.capacity or 2 * config.run.env_steps
  shortest = config.env.frame_stack + config.learner.unroll_steps + config.replay.td_steps
  capacity = max(-(-wanted // config.actor.lanes), shortest)
  rows = capacity if config.replay.capacity else max(-(-11 * capacity // 20), shortest)
  form: dict[str, Any] = {
    "lanes": config.actor.lanes,
    "capacity": capacity,
    "frame_shape": env.frame_shape,
    "frame_dtype": env.frame_dtype,
  }
  return Replay(
    **form,
    num_actions=env.num_actions,
    replay=config.replay,
    reanalyse=config.reanalyse,
    unroll_steps=config.learner.unroll_steps,
    value_prefix_horizon=config.network.value_prefix_horizon,
    frame_stack=config.env.frame_stack,
    discount=config.env.discount,
    rng_seed=config.run.seed,
    device_frames=place_frames(config.replay.frames, mesh, rows=rows, report=report, **form),
  )


def sweeps(config: Config) -> list[SweepName]:
  """The whole-buffer passes a configuration needs. Sweep reanalysis refreshes priorities too: one may do for both."""
  passes: list[SweepName] = []
  if config.reanalyse.schedule == "sweep":
    passes.append("reanalyse")
  if config.refresh.enabled and not (passes and config.reanalyse.max_age <= config.refresh.max_age):
    passes.append("refresh")
  return passes


def restore_for_evaluation(config: Config, run_dir: Path, report: Callable[[str], None]) -> tuple[Inference, Version]:
  """What is needed to play with the newest readable checkpoint of a run. Raises CheckpointError if there is none."""
  env = make_env(config.env, 1, 0, training=False)
  height, width, channels = env.frame_shape
  blueprint = make_blueprint(config.network, (height, width, channels * config.env.frame_stack), env.num_actions)
  env.close()
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = jax.eval_shape(blueprint.init, jax.random.key(0))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
  step, variables = Checkpoints(run_dir).restore_network(abstract, report)
  return Inference(config, blueprint), Version(step, variables)


def enable_compilation_cache(config: Config) -> None:
  """Keeps compiled programs between runs."""
  folder = config.run.compile_cache or str(Path.home() / ".cache" / "speedyzero_jax" / "xla")
  jax.config.update("jax_compilation_cache_dir", folder)


def evaluation_seed(config: Config) -> int:
  """Of the environments that a run's evaluations play in."""
  return config.run.seed + 1_000_003
