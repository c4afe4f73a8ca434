"""Typed configuration of a run: frozen dataclasses, one per section.

Each field documents its meaning, unit and source. Agents add sections (`AgentConfig`).

Sources: EZ = EfficientZero (Ye et al. 2021) and its released code; EZ-V2 = EfficientZero V2 (Wang
et al. 2024); SZ = SpeedyZero (Mei et al., ICLR 2023); "ours" = chosen by this project.

Ranges without a source prevent overflow of int32 counts and float32 computations.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from speedyzero_jax.config.fields import opt


@dataclasses.dataclass(frozen=True)
class EnvConfig:
  """The environment and its conventions."""

  game: str = opt(
    "Breakout",
    "Atari game by its Atari-100k name, Catch, MemoryCatch, DecoyCatch, CartPole, TicTacToe, "
    "ConnectFour, Go9, or gymnasium:ID (gymnasium:MODULE:ID for your own)",
  )
  frame_size: int = opt(96, "frames' height and width after area resizing (EZ: 96)", "[8, 512]")
  grayscale: bool = opt(False, "one gray channel instead of RGB (EZ: RGB)")
  frame_stack: int = opt(4, "frames stacked into an observation (EZ: 4)", "[1, 1000]")
  frame_skip: int = opt(4, "raw frames per step, the last two max-pooled (EZ: 4)", "[1, 1000]")
  noop_max: int = opt(
    30, "maximum of the random number of no-op raw frames after a reset (EZ: 30)", "[1, 1000]"
  )
  fire_reset: bool = opt(
    False, "press FIRE where a training episode begins, in evaluation as well (EZ: no)"
  )
  episodic_life: bool = opt(True, "a lost life ends the training episode (EZ: yes)")
  clip_rewards: bool = opt(True, "train on the sign of rewards (EZ: yes); evaluation uses raw ones")
  event_rewards: tuple[float, ...] = opt(
    (),
    "train on the sum of these rewards, one for each event that the game reports, unclipped; "
    "evaluation uses the game's own rewards; empty: so does training",
    "[-1e6, 1e6]",
  )
  sticky_actions: float = opt(0.0, "probability of repeating the last action (EZ: 0)", "[0, 1]")
  max_episode_steps: int = opt(3000, "agent steps until truncation (EZ: 3,000)", "[1, 1e9]")
  discount: float = opt(0.997**4, "discount per agent step (EZ as released: 0.997^4)", "(0, 1]")
  threads: int = opt(0, "envpool threads; 0 lets envpool choose", "[0, 1e9]", mutable=True)


@dataclasses.dataclass(frozen=True)
class ActorConfig:
  """Collection of experience."""

  lanes: int = opt(16, "environments, stepped together (ours)", "[1, 1e5]", divided="exactly")
  random_steps: int = opt(
    2000, "agent steps of random play before training (EZ: 2,000)", "[0, 1e9]", divided="exactly"
  )
  weights_interval: int = opt(
    10, "learner steps between updates of the actors' weights (SZ: 10)", "[1, 1e9]"
  )
  max_lag: int = opt(
    0,
    "async: largest policy lag when an action is stored, in learner steps; the learner waits "
    "rather than exceed it; 0: no bound (ours)",
    "[0, 1e9]",
  )


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """Storage of experience."""

  capacity: int = opt(
    0,
    "number of newest frames kept; 0: all, if episodes last four steps or more on average and no "
    "lane is far ahead of others, as when one of two actors is down (EZ: all)",
    "[0, 1e9]",
    divided="exactly",
  )
  frames: Literal["auto", "device", "host"] = opt(
    "auto",
    "where batches are gathered: in host memory, or on the learner's devices, which then store all "
    "frames; auto: on the devices if they are accelerators with twice the required memory (ours)",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimizer and its schedule."""

  name: Literal["clipped_lars", "lars", "sgd", "adam"] = opt(
    "clipped_lars", "Clipped LARS (SZ), LARS, SGD (EZ) or Adam"
  )
  learning_rate: float = opt(0.2, "base learning rate (EZ: 0.2 at batch 256)", "(0, 1e9]")
  momentum: float = opt(0.9, "momentum; Adam's b1 (EZ: 0.9)", "[0, 1)")
  weight_decay: float = opt(
    1e-4,
    "decay of parameters of rank 2 and more (EZ: 1e-4); with Adam decoupled, multiplied by the "
    "learning rate only (AdamW: 1e-2)",
    "[0, 1e9]",
  )
  trust_coefficient: float = opt(
    0.001, "(Clipped) LARS: eta (You et al. 2017: 0.001; SZ's is unknown to us)", "(0, 1e9]"
  )
  trust_min: float = opt(0.0, "Clipped LARS: minimum trust ratio (our interpretation)", "[0, 1e9]")
  trust_max: float = opt(
    1.0,
    "Clipped LARS: maximum trust ratio; 1: no layer faster than SGD (our interpretation)",
    "(0, 1e9]",
  )
  min_weight_norm: float = opt(
    0.0,
    "(Clipped) LARS: minimum weight norm, times sqrt(outputs), of biases, norm parameters and "
    "kernels that start at zero; 0: their ratio is 1 (ours)",
    "[0, 1e9]",
  )
  clip_norm: float = opt(5.0, "maximum global gradient norm; 0: no clipping (EZ: 5)", "[0, 1e9]")
  warmup_steps: int = opt(1000, "learner steps of linear warm-up from 0 (EZ: 1,000)", "[0, 1e9]")
  decay: Literal["staircase", "linear"] = opt(
    "staircase",
    "after the warm-up: multiplied by decay_rate every decay_steps (EZ), or decreasing linearly to "
    "0 within decay_steps (PPO)",
  )
  decay_steps: int = opt(
    100_000,
    "learner steps between decays, or of the whole linear decay; 0: no decay (EZ: 100k)",
    "[0, 1e9]",
  )
  decay_rate: float = opt(0.1, "staircase: factor every decay_steps (EZ: 0.1)", "(0, 1]")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """The training step."""

  batch_size: int = opt(256, "samples per step (EZ: 256, SZ: 2,048)", "[1, 1e6]", divided="exactly")
  steps: int = opt(100_000, "learner steps (EZ: 100k + 20k, SZ: 15k)", "[1, 1e9]")
  tail_steps: int = opt(
    0, "number of the last learner steps, taken after all agent steps (EZ: 20k)", "[0, 1e9]"
  )
  devices: int = opt(
    0, "devices of each learner process in the mesh; 0: the fewest that any of them has", "[0, 1e9]"
  )
  prefetch: int = opt(2, "async: batches prepared ahead of the learner", "[1, 1000]", mutable=True)


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
  """The processes of a run. More than one process needs `--processes` or a cluster."""

  learners: int = opt(
    0,
    "learner processes, forming one mesh, each with its own lanes; 0: all processes that are not "
    "actors or refreshers",
    "[0, 1e5]",
    divided="exactly",
  )
  actors: int = opt(
    0,
    "actor processes, divided among the learners; a learner that has none collects experience "
    "itself",
    "[0, 1e5]",
    mutable=True,
    divided="exactly",
  )
  refreshers: int = opt(
    0,
    "processes that recompute stored data, divided among the learners; a learner that has none "
    "recomputes it itself",
    "[0, 1e5]",
    mutable=True,
    divided="exactly",
  )
  inference: Literal["actors", "central"] = opt(
    "actors",
    "where actions are computed; actors: in the actor processes, with copies of the weights; "
    "central: in the learner process, while actors only step environments (SEED RL)",
    mutable=True,
  )
  gradients: Literal["learner", "actors"] = opt(
    "learner",
    "where gradients are computed; learner: in the learner process, from experience in its replay; "
    "actors: in the actor processes, each from its own experience; applied as they arrive (A3C)",
  )
  host: str = opt(
    "",
    "address of the learners, if all run on one machine; empty: each learner's own address on the "
    "route to the coordinator",
    mutable=True,
  )
  token_file: str = opt(
    "",
    "file, on every machine, with the secret shared by all processes; empty: process 0 generates "
    "the secret",
    mutable=True,
  )
  weights_dtype: Literal["float32", "bfloat16"] = opt(
    "float32",
    "dtype of kernels sent to actors and refreshers; bfloat16 halves the traffic, with rounding",
    mutable=True,
  )
  block_timeout: float = opt(
    30.0,
    "seconds until an unfinished block of a batch goes to another refresher; after twice this time "
    "the learner stops waiting for the blocks of a batch, except while they compile at the start",
    "(0, 1e9]",
    mutable=True,
  )
  bound_age: bool = opt(
    False,
    "make the learner wait for refreshers whenever it would exceed the age bounds of the agent's "
    "tasks or train on a batch that is not recomputed yet",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Evaluation over full episodes with raw rewards."""

  episodes: int = opt(32, "episodes played (EZ: 32)", "[1, 1e6]", mutable=True)
  max_episode_steps: int = opt(
    27_000, "agent steps until truncation (EZ: 27,000 = 108k frames)", "[1, 1e9]", mutable=True
  )
  explore: bool = opt(
    False,
    "act as at the end of training: with search noise, epsilon-greedily, or sampling from the "
    "policy; otherwise greedily",
    mutable=True,
  )
  interval: int = opt(0, "learner steps between evaluations; 0: none", "[0, 1e9]", mutable=True)
  at_end: bool = opt(True, "evaluate the weights when training ends or pauses", mutable=True)


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """Profiling, without effect on the results."""

  steps: int = opt(
    0,
    "learner steps to time, and then as many to trace, after compilation; writes profile.json and "
    "a trace into the run folder and prints tables; 0: none",
    "[0, 1e5]",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The run as a whole."""

  dir: str = opt("", "run folder; empty: a new one under runs/, named after preset, game and seed")
  seed: int = opt(0, "random seed", "[0, 4294967296)")
  env_steps: int = opt(100_000, "agent steps (Atari-100k: 100,000)", "[1, 1e9]", divided="exactly")
  mode: Literal["async", "lockstep"] = opt(
    "async",
    "async: actor, learner and refresher run in parallel threads; lockstep: they take turns, and "
    "results are reproducible bit for bit",
  )
  checkpoint_interval: int = opt(1000, "learner steps between checkpoints", "[1, 1e9]")
  keep_checkpoints: int = opt(
    3,
    "newest checkpoints kept; with several learners also all since their last common one",
    "[1, 1e9]",
    mutable=True,
  )
  log_interval: int = opt(20, "learner steps between lines of metrics", "[1, 1e9]", mutable=True)
  pause_at: int = opt(
    0,
    "learner step after which the run saves a checkpoint and exits with code 0; resume it with "
    "another value; 0: never",
    "[0, 1e9]",
    mutable=True,
  )
  compile_cache: str = opt(
    "",
    "folder of XLA's compilation cache; empty: that of JAX_COMPILATION_CACHE_DIR, or else "
    "~/.cache/speedyzero_jax/xla",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class PriorityConfig:
  """Prioritized replay, for agents that sample transitions by TD error."""

  alpha: float = opt(0.6, "exponent of the priorities (EZ: 0.6, EZ-V2: 1)", "[0, 10]")
  beta_start: float = opt(0.4, "initial importance-sampling exponent (EZ: 0.4, EZ-V2: 1)", "[0, 2]")
  beta_end: float = opt(1.0, "final importance-sampling exponent (EZ: 1)", "[0, 2]")
  min_priority: float = opt(1e-6, "added to every priority (EZ: 1e-6)", "[1e-12, 1e6]")
  min_weight: float = opt(0.0, "minimum weight, relative to the largest (EZ-V2: 0.1)", "[0, 1]")


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """Base of an agent's configuration: one field per section, each a frozen dataclass of `opt`s."""

  name: ClassVar[str]  # the agent's module, as in `agent=NAME`

  @property
  def refreshes(self) -> bool:
    """Whether the agent recomputes stored data, so that refreshers have work."""
    return False

  @property
  def trains_once(self) -> bool:
    """Whether it trains on each trajectory once, right after collection, as in A2C."""
    return False

  def problems(self, config: "Config") -> Iterable[str]:
    """Yields `key: problem` for inconsistent settings."""
    return ()


@dataclasses.dataclass(frozen=True)
class Config:
  """A run's complete configuration; `agent` holds the sections of the chosen agent."""

  agent: Any  # an AgentConfig
  env: EnvConfig = EnvConfig()
  actor: ActorConfig = ActorConfig()
  replay: ReplayConfig = ReplayConfig()
  optim: OptimConfig = OptimConfig()
  learner: LearnerConfig = LearnerConfig()
  topology: TopologyConfig = TopologyConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  profile: ProfileConfig = ProfileConfig()
  run: RunConfig = RunConfig()

  def complete(self, learner_steps: float, env_steps: float) -> bool:
    """Whether a run with these counts has taken all its steps."""
    used_up = learner_steps >= self.learner.steps, env_steps >= self.run.env_steps
    # Actors that compute gradients also use agent steps for trajectories that are lost with them.
    return any(used_up) if self.topology.gradients == "actors" else all(used_up)

  def problems(self) -> Iterable[str]:
    """Yields `key: problem` for inconsistent settings that concern every agent."""
    actor, learner, optim, topology = self.actor, self.learner, self.optim, self.topology
    for key, value, bound, limit in (
      ("actor.random_steps", actor.random_steps, "run.env_steps", self.run.env_steps),
      ("learner.tail_steps", learner.tail_steps, "learner.steps", learner.steps),
      ("optim.trust_min", optim.trust_min, "optim.trust_max", optim.trust_max),
    ):
      if value > limit:
        yield f"{key}: must be at most {bound} ({limit}), got {value}"
    decayed = optim.warmup_steps + optim.decay_steps
    if optim.decay == "linear" and optim.decay_steps > 0 and decayed < learner.steps:
      yield (
        "optim.decay_steps: with optim.decay=linear must be 0 or at least learner.steps - "
        f"optim.warmup_steps ({learner.steps - optim.warmup_steps}), as the learning rate is 0 "
        f"afterwards, got {optim.decay_steps}"
      )
    if 0 < actor.max_lag <= actor.weights_interval:
      yield (
        "actor.max_lag: must be 0 or more than actor.weights_interval "
        f"({actor.weights_interval}), got {actor.max_lag}"
      )
    if learner.devices and learner.batch_size % learner.devices:
      yield (
        f"learner.batch_size: must be a multiple of learner.devices ({learner.devices}), "
        f"got {learner.batch_size}"
      )
    if topology.refreshers and not self.agent.refreshes:
      yield (
        f"topology.refreshers: must be 0, as {self.agent.name} recomputes nothing with these "
        f"settings (AgentConfig.refreshes is false), got {topology.refreshers}"
      )
    if topology.gradients == "actors":
      if not self.agent.trains_once:
        yield (
          f"topology.gradients: must be learner, as {self.agent.name} with these settings does not "
          "train once on each trajectory right after its collection (agent=impala with "
          "loss.synchronous=true does), got actors"
        )
      if actor.max_lag:
        yield f"actor.max_lag: must be 0 with topology.gradients=actors, got {actor.max_lag}"
