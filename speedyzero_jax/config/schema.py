"""Typed configuration of a run: one frozen dataclass per section, and the base of an agent's own.

Every number that is a choice is a field with its meaning and source. An agent brings sections of
its own (`AgentConfig`); `loader.py` reads presets and overrides.

Sources: EZ = EfficientZero (Ye et al. 2021) and its released code; EZ-V2 = EfficientZero V2 (Wang
et al. 2024); SZ = SpeedyZero (Mei et al., ICLR 2023); "ours" = this project's choice or reading.

Limits without a source are those below which nothing overflows: counts are int32 in places, and
computations with these numbers are float32.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from speedyzero_jax.config.fields import opt


@dataclasses.dataclass(frozen=True)
class EnvConfig:
  """The environment and its conventions."""

  game: str = opt("Breakout", "an Atari game by its Atari-100k name, or Catch, or CartPole")
  frame_size: int = opt(
    96, "height and width of a frame after area resizing, pixels (EZ: 96)", "[8, 512]"
  )
  grayscale: bool = opt(False, "one grey channel instead of RGB (EZ: RGB)")
  frame_stack: int = opt(4, "frames stacked into an observation (EZ: 4)", "[1, 1000]")
  frame_skip: int = opt(4, "raw frames per agent step, max over the last two (EZ: 4)", "[1, 1000]")
  noop_max: int = opt(
    30, "up to this many no-op raw frames after a reset, at least 1 (EZ: 30)", "[1, 1000]"
  )
  fire_reset: bool = opt(False, "press fire after a reset in games that wait for it (EZ: no)")
  episodic_life: bool = opt(True, "a lost life ends the training episode (EZ: yes)")
  clip_rewards: bool = opt(
    True, "train on the sign of the reward (EZ: yes); evaluation is always raw"
  )
  sticky_actions: float = opt(
    0.0, "probability that the emulator repeats the last action (EZ: 0, NoFrameskip-v4)", "[0, 1]"
  )
  max_episode_steps: int = opt(
    3000, "agent steps after which a training episode is truncated (EZ: 3,000)", "[1, 1e9]"
  )
  discount: float = opt(0.997**4, "discount per agent step (EZ as released: 0.997^4)", "(0, 1]")
  threads: int = opt(0, "envpool threads; 0 lets envpool choose", "[0, 1e9]", mutable=True)


@dataclasses.dataclass(frozen=True)
class ActorConfig:
  """Collecting experience."""

  lanes: int = opt(
    16,
    "environments stepped together (SZ collects in parallel; its number is not published: ours)",
    "[1, 1e5]",
    divided="exactly",
  )
  random_steps: int = opt(
    2000,
    "agent steps of uniformly random play before training starts (EZ: 2,000)",
    "[0, 1e9]",
    divided="exactly",
  )
  random_hold: float = opt(
    1.0,
    "random play holds an action for this many steps on average; more reaches rewards that lie far away (ours, EZ: 1)",
    "[1, 1e6]",
  )
  weights_interval: int = opt(
    10, "learner steps between updates of the actor's weights (SZ: 10)", "[1, 1e9]"
  )
  max_lag: int = opt(
    0,
    "the learner waits rather than take in steps that were chosen with weights of more learner steps ago (run.mode=async); 0: it doesn't (ours)",
    "[0, 1e9]",
  )


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """The prioritized buffer and the targets made from it."""

  capacity: int = opt(
    0,
    "frames kept, the oldest leave first; 0 keeps everything the run collects (EZ: everything)",
    "[0, 1e9]",
    divided="exactly",
  )
  frames: Literal["auto", "device", "host"] = opt(
    "auto",
    "where batches are gathered: on the learner's devices, which then hold all frames (each a share of the lanes), in host memory, or on devices that are no CPUs and have three times the room (ours)",
  )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimiser and its schedule."""

  name: Literal["clipped_lars", "lars", "sgd", "adam"] = opt(
    "clipped_lars", "Clipped LARS (SZ), LARS, SGD (EZ) or Adam"
  )
  learning_rate: float = opt(0.2, "base learning rate (EZ: 0.2 at batch 256)", "(0, 1e9]")
  momentum: float = opt(0.9, "momentum; Adam's b1 (EZ: 0.9)", "[0, 1)")
  weight_decay: float = opt(
    1e-4, "weight decay on leaves of rank 2 and more (EZ: 1e-4)", "[0, 1e9]"
  )
  trust_coefficient: float = opt(
    0.001, "LARS eta (You et al. 2017: 0.001; SZ's value is not published)", "(0, 1e9]"
  )
  trust_min: float = opt(
    0.0, "Clipped LARS: lower bound of a layer's trust ratio (our reading)", "[0, 1e9]"
  )
  trust_max: float = opt(
    1.0,
    "Clipped LARS: upper bound, 1 = never faster than SGD at the base rate (our reading)",
    "(0, 1e9]",
  )
  trust_eps: float = opt(
    0.0,
    "(Clipped) LARS: added to the denominator of a layer's trust ratio (ours, as optax: 0)",
    "[0, 1e9]",
  )
  clip_norm: float = opt(
    5.0, "gradients are clipped to this global norm; 0: never (EZ: 5)", "[0, 1e9]"
  )
  warmup_steps: int = opt(
    1000, "learner steps over which the rate rises linearly from 0 (EZ: 1,000)", "[0, 1e9]"
  )
  decay_steps: int = opt(
    100_000,
    "learner steps at which the rate is multiplied by decay_rate, again and again; 0: never (EZ: 100k)",
    "[0, 1e9]",
  )
  decay_rate: float = opt(0.1, "factor applied every decay_steps (EZ: 0.1)", "(0, 1]")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """The training step."""

  batch_size: int = opt(
    256,
    "samples per learner step, over all devices (EZ: 256, SZ: 8 x 256)",
    "[1, 1e6]",
    divided="exactly",
  )
  steps: int = opt(100_000, "learner steps in all (EZ: 100k + 20k, SZ: 15k)", "[1, 1e9]")
  tail_steps: int = opt(
    0,
    "of these, steps taken after the last agent step; the others are spread over collection (EZ: 20k)",
    "[0, 1e9]",
  )
  devices: int = opt(0, "devices in the learner's mesh; 0 takes all local devices", "[0, 1e9]")
  prefetch: int = opt(2, "async mode: batches prepared ahead of the learner", "[1, 1000]")


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
  """Which processes a run is made of. Alone, a process has all roles, and of these settings none matters."""

  learners: int = opt(
    0,
    "processes that learn as one mesh, each with its own lanes; 0: all but actors and refreshers",
    "[0, 1e5]",
    divided="exactly",
  )
  actors: int = opt(
    0,
    "processes that only act, dealt to the learners; a learner without one acts itself",
    "[0, 1e5]",
    mutable=True,
    divided="exactly",
  )
  refreshers: int = opt(
    0,
    "processes that only recompute what the replay stores, dealt likewise; without one a learner does it",
    "[0, 1e5]",
    mutable=True,
    divided="exactly",
  )
  host: str = opt(
    "",
    "address or name of the learners' machine, if it is one; empty: the address that each learner has on its way to the coordinator or, with TLS, its host name",
    mutable=True,
  )
  token_file: str = opt(
    "",
    "file, on every machine, with the secret that all processes show; empty: made at the start, told by process 0",
    mutable=True,
  )
  tls_certificate: str = opt(
    "", "PEM file of this process, for TLS between actors, refreshers and learners", mutable=True
  )
  tls_key: str = opt("", "PEM file with its key", mutable=True)
  tls_authority: str = opt(
    "", "PEM file of the authority that signed all processes' certificates", mutable=True
  )
  weights_dtype: Literal["float32", "bfloat16"] = opt(
    "float32",
    "how weights travel to actors and refreshers; bfloat16 is half the traffic, but not what was trained",
    mutable=True,
  )
  block_timeout: float = opt(
    30.0,
    "seconds after which a block of states is given to another refresher; after two times, none waits for it",
    "(0, 1e9]",
    mutable=True,
  )
  bound_age: bool = opt(
    False,
    "the learner waits for refresher processes, as long as it takes, rather than exceed the maximum ages of the agent's tasks or train on a batch that was not recomputed",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Playing full episodes with the trained network: no noise, best action, raw rewards."""

  episodes: int = opt(32, "episodes played (EZ: 32)", "[1, 1e6]", mutable=True)
  max_episode_steps: int = opt(
    27_000, "cap on an episode, agent steps (EZ: 27,000 = 108k frames)", "[1, 1e9]", mutable=True
  )
  interval: int = opt(
    0, "learner steps between evaluations during training; 0: none", "[0, 1e9]", mutable=True
  )
  at_end: bool = opt(True, "evaluate the last checkpoint when training ends", mutable=True)


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """A look at where the time goes, which changes nothing of what the run does."""

  steps: int = opt(
    0,
    "learner steps to time, and as many more to trace, once nothing compiles any more, also after --resume: profile.json and a trace in the run folder, tables on the screen; 0: none",
    "[0, 1e5]",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The run as a whole."""

  dir: str = opt(
    "", "folder of the run; empty: a new one under runs/, named after preset, game and seed"
  )
  seed: int = opt(0, "seed of everything random", "[0, 4294967296)")
  env_steps: int = opt(
    100_000,
    "agent steps collected, exactly (Atari-100k: 100,000 = 400k frames)",
    "[1, 1e9]",
    divided="exactly",
  )
  mode: Literal["async", "lockstep"] = opt(
    "async", "roles overlap in threads, or take turns and reproduce bit for bit"
  )
  checkpoint_interval: int = opt(1000, "learner steps between checkpoints", "[1, 1e9]")
  keep_checkpoints: int = opt(
    3,
    "checkpoints kept: the newest, and from the newest on that all learners have",
    "[1, 1e9]",
    mutable=True,
  )
  log_interval: int = opt(
    20, "learner steps between lines in metrics.jsonl", "[1, 1e9]", mutable=True
  )
  compile_cache: str = opt(
    "",
    "folder for XLA's persistent compilation cache; empty: ~/.cache/speedyzero_jax/xla",
    mutable=True,
  )


@dataclasses.dataclass(frozen=True)
class PriorityConfig:
  """Prioritized replay, for agents that sample transitions by their TD errors."""

  alpha: float = opt(0.6, "exponent of the priorities (EZ: 0.6, EZ-V2: 1)", "[0, 10]")
  beta_start: float = opt(0.4, "importance exponent at the start (EZ: 0.4, EZ-V2: 1)", "[0, 2]")
  beta_end: float = opt(1.0, "importance exponent at the end of training (EZ: 1)", "[0, 2]")
  min_priority: float = opt(1e-6, "added to every priority (EZ: 1e-6)", "[1e-12, 1e6]")
  min_weight: float = opt(
    0.0,
    "importance weights, once divided by their maximum, are at least this (EZ-V2: 0.1)",
    "[0, 1]",
  )


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """Base of an agent's configuration: a field per section, each a frozen dataclass of `opt` fields."""

  name: ClassVar[str]  # of the agent's module, as in `agent=NAME`

  def problems(self, config: "Config") -> Iterable[str]:
    """Yields `key: what is wrong` for settings that do not fit each other."""
    return ()


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that defines a run. `agent` holds the sections that the chosen agent brings."""

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
