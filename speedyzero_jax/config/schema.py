"""What a run is made of: frozen, typed settings, one dataclass per part.

Every number that is a choice lives here with its meaning and its source. Reading presets, overrides and
`--help` is `config_io.py`; this module imports nothing of ours.

Sources: EZ = EfficientZero (Ye et al. 2021) and its released code; EZ-V2 = EfficientZero V2 (Wang et al. 2024);
SZ = SpeedyZero (Mei et al., ICLR 2023); "ours" = this project's own choice or reading.
"""

import dataclasses
from typing import Any, Literal


def opt(default: Any, help: str) -> Any:
  """A field with its default and the sentence that `--help` prints for it."""
  return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class EnvConfig:
  """The environment and its conventions."""

  game: str = opt("Breakout", "an Atari game by its Atari-100k name, or Catch, or CartPole")
  frame_size: int = opt(96, "height and width of a frame after area resizing, pixels (EZ: 96)")
  grayscale: bool = opt(False, "one grey channel instead of RGB (EZ: RGB)")
  frame_stack: int = opt(4, "frames stacked into an observation (EZ: 4)")
  frame_skip: int = opt(4, "raw frames per agent step, max over the last two (EZ: 4)")
  noop_max: int = opt(30, "up to this many no-op raw frames after a reset, at least 1 (EZ: 30)")
  fire_reset: bool = opt(False, "press fire after a reset in games that wait for it (EZ: no)")
  episodic_life: bool = opt(True, "a lost life ends the training episode (EZ: yes)")
  clip_rewards: bool = opt(
    True, "train on the sign of the reward (EZ: yes); evaluation is always raw"
  )
  sticky_actions: float = opt(
    0.0, "probability that the emulator repeats the last action (EZ: 0, NoFrameskip-v4)"
  )
  max_episode_steps: int = opt(
    3000, "agent steps after which a training episode is truncated (EZ: 3,000)"
  )
  discount: float = opt(0.997**4, "discount per agent step (EZ as released: 0.997^4)")
  threads: int = opt(0, "envpool threads; 0 lets envpool choose")


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
  """Sizes of h, g, f and the consistency heads (EZ's by default)."""

  channels: int = opt(64, "channels of the hidden state; the first stages of h use half (EZ: 64)")
  downsample: int = opt(
    16,
    "side of a frame over side of the hidden state: 16, 8 or 4 for images, 1 for vectors (EZ: 16)",
  )
  blocks: int = opt(1, "residual blocks at each place where EZ has one (EZ: 1)")
  reduced_channels: int = opt(16, "channels of the 1x1 convolution before each head (EZ: 16)")
  head_hidden: int = opt(
    32, "width of the hidden layer in the value, policy and value-prefix heads (EZ: 32)"
  )
  lstm_hidden: int = opt(512, "width of the value-prefix LSTM (EZ: 512)")
  value_prefix_horizon: int = opt(
    5, "unroll steps after which the value-prefix LSTM starts anew (EZ: 5)"
  )
  support: int = opt(
    300,
    "values are categorical over the integers -support..support of h(x) (EZ: 300, so 601 atoms)",
  )
  projection_hidden: int = opt(1024, "SimSiam projection, hidden width (EZ: 1024)")
  projection_out: int = opt(1024, "SimSiam projection, output width (EZ: 1024)")
  prediction_hidden: int = opt(512, "SimSiam predictor, hidden width (EZ: 512)")
  action_encoding: Literal["plane", "one_hot"] = opt(
    "plane", "one plane holding a/|A| (EZ), or one plane per action (ours)"
  )
  bn_momentum: float = opt(
    0.9, "share of the old running statistics kept at each update (EZ: 0.9, PyTorch's 0.1)"
  )
  dtype: Literal["float32", "bfloat16"] = opt(
    "float32", "compute type of activations; parameters are always float32"
  )


@dataclasses.dataclass(frozen=True)
class SearchConfig:
  """Tree search, for acting, reanalysis and evaluation alike."""

  algorithm: Literal["gumbel", "puct"] = opt(
    "gumbel", "Gumbel MuZero with sequential halving (EZ-V2), or PUCT (EZ)"
  )
  simulations: int = opt(16, "simulations per root (EZ: 50, EZ-V2: 16)")
  max_depth: int = opt(0, "deepest node visited; 0 means the number of simulations (ours)")
  max_considered: int = opt(
    8, "Gumbel: root actions considered, at most the number of actions (EZ-V2: 4 if |A|<16, else 8)"
  )
  c_visit: float = opt(50.0, "Gumbel: visit offset in the value transformation (EZ-V2: 50)")
  c_scale: float = opt(0.1, "Gumbel: scale of the value transformation (EZ-V2: 0.1)")
  c1: float = opt(1.25, "PUCT: exploration constant c1 (EZ: 1.25)")
  c2: float = opt(19652.0, "PUCT: exploration constant c2 (EZ: 19652)")
  dirichlet_alpha: float = opt(0.3, "PUCT: root noise concentration (EZ: 0.3)")
  dirichlet_fraction: float = opt(0.25, "PUCT: share of root noise in the prior (EZ: 0.25)")
  value_scaling: Literal["tree", "node"] = opt(
    "tree",
    "Q normalised by min and max over the whole tree (EZ), or over the siblings (mctx's way)",
  )
  min_value_range: float = opt(0.01, "floor on max - min when Q is normalised (EZ: 0.01)")


@dataclasses.dataclass(frozen=True)
class ActorConfig:
  """Collecting experience."""

  lanes: int = opt(
    16, "environments stepped together (SZ collects in parallel; its number is not published: ours)"
  )
  random_steps: int = opt(
    2000, "agent steps of uniformly random play before training starts (EZ: 2,000)"
  )
  random_hold: float = opt(
    1.0,
    "random play holds an action for this many steps on average; more reaches rewards that lie far away (ours, EZ: 1)",
  )
  weights_interval: int = opt(10, "learner steps between updates of the actor's weights (SZ: 10)")
  max_lag: int = opt(
    0,
    "the learner waits rather than take in steps that were chosen with weights of more learner steps ago (run.mode="
    "async); 0: it doesn't (ours)",
  )
  temperatures: tuple[float, ...] = opt(
    (1.0, 0.5, 0.25), "PUCT: temperature of the sampled action, by stage (EZ)"
  )
  temperature_stages: tuple[float, ...] = opt(
    (0.5, 0.75), "shares of training at which the next temperature begins (EZ)"
  )


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """The prioritized buffer and the targets made from it."""

  capacity: int = opt(
    0, "frames kept, the oldest leave first; 0 keeps everything the run collects (EZ: everything)"
  )
  frames: Literal["auto", "device", "host"] = opt(
    "auto",
    "where batches are gathered: on the learner's devices, which then hold all frames (each a share of the lanes), in "
    "host memory, or on devices that are no CPUs and have three times the room (ours)",
  )
  alpha: float = opt(0.6, "exponent of the priorities (EZ: 0.6, EZ-V2: 1)")
  beta_start: float = opt(0.4, "importance exponent at the start (EZ: 0.4, EZ-V2: 1)")
  beta_end: float = opt(1.0, "importance exponent at the end of training (EZ: 1)")
  min_priority: float = opt(1e-6, "added to every priority (EZ: 1e-6)")
  min_weight: float = opt(
    0.0, "importance weights, once divided by their maximum, are at least this (EZ-V2: 0.1)"
  )
  td_steps: int = opt(5, "n of the n-step value target (EZ: 5)")
  age_interval: int = opt(
    30_000,
    "n shrinks by one for each of these many transitions of age, down to 1; 0: n never shrinks (EZ: 30,000)",
  )


@dataclasses.dataclass(frozen=True)
class ReanalyseConfig:
  """Fresh policy and value targets for old states."""

  schedule: Literal["batch", "sweep", "off"] = opt(
    "batch",
    "search the states of each sampled batch (EZ, SZ), or the whole buffer round and round (ours), or never",
  )
  ratio: float = opt(
    1.0,
    "batch: share of the samples whose policy is searched anew; others keep their stored one (EZ: 0.99)",
  )
  explore: bool = opt(True, "search with noise at the root, as the actor does (EZ: yes)")
  weights_interval: int = opt(
    25,
    "learner steps between updates of the reanalyser's weights, which are also the target network (SZ: 25, EZ: 200)",
  )
  max_age: int = opt(
    100,
    "sweep: every stored target is at most this many learner steps old; batches are drawn ahead, so that those in use "
    "may be up to learner.prefetch + 1 older (ours)",
  )
  block: int = opt(
    0,
    "sweep: states searched in one call; 0: 256 where the learner's devices are CPUs, else 4,096 (ours)",
  )
  value_target: Literal["bootstrap", "search", "mixed"] = opt(
    "bootstrap", "n-step return (EZ), value of the search, or the latter for old data only (EZ-V2)"
  )
  mixed_start: int = opt(30_000, "mixed: learner steps before search values are used (EZ-V2: 30k)")
  mixed_newest: int = opt(
    5_000, "mixed: the newest transitions that keep the n-step target (EZ-V2: 5k)"
  )


@dataclasses.dataclass(frozen=True)
class RefreshConfig:
  """Priority Refresh: the priorities of the whole buffer, recomputed continuously.

  A reanalyse sweep with a bound as tight refreshes them in passing; then `weights_interval` and `block` are not used.
  """

  enabled: bool = opt(
    True, "recompute all priorities continuously (SZ); off: only those of sampled transitions (EZ)"
  )
  max_age: int = opt(
    100, "no priority is older than this many learner steps (our reading: the paper gives no bound)"
  )
  weights_interval: int = opt(
    10,
    "learner steps between updates of the refresher's weights (SZ: 10); unused if a reanalyse sweep does its work",
  )
  block: int = opt(
    0,
    "states evaluated in one call; 0: 256 where the learner's devices are CPUs, else 4,096 (ours); unused if a "
    "reanalyse sweep does its work",
  )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimiser and its schedule."""

  name: Literal["clipped_lars", "lars", "sgd", "adam"] = opt(
    "clipped_lars", "Clipped LARS (SZ), LARS, SGD (EZ) or Adam"
  )
  learning_rate: float = opt(0.2, "base learning rate (EZ: 0.2 at batch 256)")
  momentum: float = opt(0.9, "momentum; Adam's b1 (EZ: 0.9)")
  weight_decay: float = opt(1e-4, "weight decay on leaves of rank 2 and more (EZ: 1e-4)")
  trust_coefficient: float = opt(
    0.001, "LARS eta (You et al. 2017: 0.001; SZ's value is not published)"
  )
  trust_min: float = opt(0.0, "Clipped LARS: lower bound of a layer's trust ratio (our reading)")
  trust_max: float = opt(
    1.0, "Clipped LARS: upper bound, 1 = never faster than SGD at the base rate (our reading)"
  )
  trust_eps: float = opt(
    0.0, "(Clipped) LARS: added to the denominator of a layer's trust ratio (ours, as optax: 0)"
  )
  clip_norm: float = opt(5.0, "gradients are clipped to this global norm; 0: never (EZ: 5)")
  warmup_steps: int = opt(
    1000, "learner steps over which the rate rises linearly from 0 (EZ: 1,000)"
  )
  decay_steps: int = opt(
    100_000,
    "learner steps at which the rate is multiplied by decay_rate, again and again; 0: never (EZ: 100k)",
  )
  decay_rate: float = opt(0.1, "factor applied every decay_steps (EZ: 0.1)")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """The training step."""

  batch_size: int = opt(256, "samples per learner step, over all devices (EZ: 256, SZ: 8 x 256)")
  steps: int = opt(100_000, "learner steps in all (EZ: 100k + 20k, SZ: 15k)")
  tail_steps: int = opt(
    0,
    "of these, steps taken after the last agent step; the others are spread over collection (EZ: 20k)",
  )
  unroll_steps: int = opt(5, "K, model steps unrolled in the loss (EZ: 5)")
  state_gradient: float = opt(
    0.5, "share of the gradient that passes into the hidden state at each of them (EZ: 0.5)"
  )
  value_coefficient: float = opt(0.25, "weight of the value loss (EZ: 0.25)")
  value_prefix_coefficient: float = opt(1.0, "weight of the value-prefix loss (EZ: 1)")
  policy_coefficient: float = opt(1.0, "weight of the policy loss (EZ: 1)")
  consistency_coefficient: float = opt(
    2.0, "weight of the SimSiam consistency loss (EZ: 2, EZ-V2: 5)"
  )
  shift: int = opt(4, "augmentation: random shift by up to this many pixels; 0: none (EZ: 4)")
  intensity: float = opt(0.05, "augmentation: scale of the random brightness; 0: none (EZ: 0.05)")
  batch_norm: Literal["sync", "local"] = opt(
    "sync", "batch statistics over the whole batch, or over each device's share"
  )
  devices: int = opt(0, "devices in the learner's mesh; 0 takes all local devices")
  prefetch: int = opt(2, "async mode: batches prepared ahead of the learner")


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
  """Which processes a run is made of. Alone, a process has all roles, and of these settings none matters."""

  learners: int = opt(
    0,
    "processes that learn as one mesh, each with its own lanes; 0: all that are not actors or reanalysers",
  )
  actors: int = opt(
    0, "processes that only act, dealt to the learners; a learner without one acts itself"
  )
  reanalysers: int = opt(
    0, "processes that only reanalyse and refresh, dealt likewise; without one a learner does it"
  )
  host: str = opt(
    "",
    "address or name of the learners' machine, if it is one; empty: the address that each learner has on its way to "
    "the coordinator or, with TLS, its host name",
  )
  token_file: str = opt(
    "",
    "file, on every machine, with the secret that all processes show; empty: made at the start, told by process 0",
  )
  tls_certificate: str = opt(
    "", "PEM file of this process, for TLS between actors, reanalysers and learners"
  )
  tls_key: str = opt("", "PEM file with its key")
  tls_authority: str = opt("", "PEM file of the authority that signed all processes' certificates")
  weights_dtype: Literal["float32", "bfloat16"] = opt(
    "float32",
    "how weights travel to actors and reanalysers; bfloat16 is half the traffic, but not what was trained",
  )
  block_timeout: float = opt(
    30.0,
    "seconds after which a block of states is given to another reanalyser; after two times, none waits for it",
  )
  bound_age: bool = opt(
    False,
    "the learner waits for reanalyser processes, as long as it takes, rather than exceed reanalyse.max_age and "
    "refresh.max_age or, with reanalyse.schedule=batch, train on what was not reanalysed",
  )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Playing full episodes with the trained network: no noise, best action, raw rewards."""

  episodes: int = opt(32, "episodes played (EZ: 32)")
  max_episode_steps: int = opt(27_000, "cap on an episode, agent steps (EZ: 27,000 = 108k frames)")
  interval: int = opt(0, "learner steps between evaluations during training; 0: none")
  at_end: bool = opt(True, "evaluate the last checkpoint when training ends")


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """A look at where the time goes, which changes nothing of what the run does."""

  steps: int = opt(
    0,
    "learner steps to time, and as many more to trace, once nothing compiles any more, also after --resume: "
    "profile.json and a trace in the run folder, tables on the screen; 0: none",
  )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The run as a whole."""

  dir: str = opt(
    "", "folder of the run; empty: a new one under runs/, named after preset, game and seed"
  )
  seed: int = opt(0, "seed of everything random")
  env_steps: int = opt(
    100_000, "agent steps collected, exactly (Atari-100k: 100,000 = 400k frames)"
  )
  mode: Literal["async", "lockstep"] = opt(
    "async", "roles overlap in threads, or take turns and reproduce bit for bit"
  )
  checkpoint_interval: int = opt(1000, "learner steps between checkpoints")
  keep_checkpoints: int = opt(
    3, "checkpoints kept: the newest, and from the newest on that all learners have"
  )
  log_interval: int = opt(20, "learner steps between lines in metrics.jsonl")
  compile_cache: str = opt(
    "", "folder for XLA's persistent compilation cache; empty: ~/.cache/speedyzero_jax/xla"
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that defines a run."""

  env: EnvConfig = EnvConfig()
  network: NetworkConfig = NetworkConfig()
  search: SearchConfig = SearchConfig()
  actor: ActorConfig = ActorConfig()
  replay: ReplayConfig = ReplayConfig()
  reanalyse: ReanalyseConfig = ReanalyseConfig()
  refresh: RefreshConfig = RefreshConfig()
  optim: OptimConfig = OptimConfig()
  learner: LearnerConfig = LearnerConfig()
  topology: TopologyConfig = TopologyConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  profile: ProfileConfig = ProfileConfig()
  run: RunConfig = RunConfig()
