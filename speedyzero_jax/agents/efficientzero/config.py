"""Configuration sections of EfficientZero, EfficientZero V2 and SpeedyZero."""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Literal

from speedyzero_jax.agents import refresh
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config, PriorityConfig
from speedyzero_jax.envs.batched_env import check_game, frame_sides

_SMALL = 16  # pixels, maximum side of images for which downsample=1 is allowed


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
  """Sizes of h, g, f and the consistency heads (defaults: EZ, except `init`)."""

  channels: int = opt(
    64, "channels of the hidden state; the first stages of h have half as many (EZ: 64)", "[1, 1e5]"
  )
  downsample: int = opt(
    16,
    "ratio of frame side to hidden-state side: 16, 8 or 4; 1 for vectors and small images (EZ: 16)",
  )
  blocks: int = opt(1, "residual blocks in each place where EZ has one (EZ: 1)", "[1, 1000]")
  reduced_channels: int = opt(
    16, "channels of the 1x1 convolution before each head (EZ: 16)", "[1, 1e5]"
  )
  head_hidden: int = opt(
    32, "hidden width of the value, policy and value-prefix heads (EZ: 32)", "[1, 1e5]"
  )
  lstm_hidden: int = opt(512, "width of the value-prefix LSTM (EZ: 512)", "[1, 1e5]")
  value_prefix_horizon: int = opt(
    5, "unroll steps between resets of the value-prefix LSTM (EZ: 5)", "[1, 1e9]"
  )
  support: int = opt(
    300, "the atoms of h(value) are -support, ..., support (EZ: 300, so 601 atoms)", "[1, 1e5]"
  )
  projection_hidden: int = opt(1024, "SimSiam projection, hidden width (EZ: 1024)", "[1, 1e5]")
  projection_out: int = opt(1024, "SimSiam projection, output width (EZ: 1024)", "[1, 1e5]")
  prediction_hidden: int = opt(512, "SimSiam predictor, hidden width (EZ: 512)", "[1, 1e5]")
  action_encoding: Literal["plane", "one_hot"] = opt(
    "plane", "one plane with the value a/|A| (EZ), or one plane per action (ours)"
  )
  init: Literal["he", "pytorch"] = opt(
    "he",
    "initializers: He's for convolutions and LeCun's for linear layers (ours), or PyTorch's "
    "defaults (EZ), which are 2.4 and 1.7 times smaller; both set the heads' last layers to 0 (EZ)",
  )
  bn_momentum: float = opt(
    0.9, "decay of the running statistics per update (EZ: 0.9, momentum 0.1 in PyTorch)", "[0, 1]"
  )
  dtype: Literal["float32", "bfloat16"] = opt(
    "float32", "dtype of activations; parameters and logits are always float32"
  )
  batch_norm: Literal["sync", "local"] = opt(
    "sync", "batch statistics of the whole batch, or of each device's shard (EZ: one device)"
  )


@dataclasses.dataclass(frozen=True)
class SearchConfig:
  """Tree search for acting, reanalysis and evaluation."""

  algorithm: Literal["gumbel", "puct"] = opt(
    "gumbel", "Gumbel MuZero with sequential halving (EZ-V2), or PUCT (EZ)"
  )
  simulations: int = opt(16, "simulations per root (EZ: 50, EZ-V2: 16)", "[1, 1e5]")
  max_considered: int = opt(
    8,
    "Gumbel: root actions considered, at most the number of actions (EZ-V2: 4 if |A|<16, else 8)",
    "[1, 1e9]",
  )
  c_visit: float = opt(
    50.0, "Gumbel: visit offset in the value transformation (EZ-V2: 50)", "[0, 1e6]"
  )
  c_scale: float = opt(0.1, "Gumbel: scale of the value transformation (EZ-V2: 0.1)", "[0, 1e6]")
  uniform_fraction: tuple[float, ...] = opt(
    (0.0,),
    "Gumbel: share of the uniform policy in the root's prior in searches with noise (acting, and "
    "reanalyse.explore), constant or in each stage; keeps all actions explored while their values "
    "are indistinguishable (ours; EZ-V2: 0)",
    "[0, 1]",
  )
  c1: float = opt(1.25, "PUCT: exploration constant c1 (EZ: 1.25)", "[0, 1e6]")
  c2: float = opt(19652.0, "PUCT: exploration constant c2 (EZ: 19652)", "[1e-6, 1e6]")
  dirichlet_alpha: float = opt(0.3, "PUCT: root noise concentration (EZ: 0.3)", "[1e-6, 1e6]")
  dirichlet_fraction: float = opt(
    0.25, "PUCT: share of root noise in the prior (EZ: 0.25)", "[0, 1]"
  )
  min_value_range: float = opt(
    0.01, "floor on max - min when Q is normalized over the tree (EZ: 0.01)", "[1e-6, 1e6]"
  )
  temperatures: tuple[float, ...] = opt(
    (1.0, 0.5, 0.25), "PUCT: temperature of action sampling in each stage (EZ)", "[1e-6, 1e6]"
  )
  temperature_stages: tuple[float, ...] = opt(
    (0.5, 0.75),
    "shares of training at which the second and later stages of temperatures and "
    "uniform_fraction begin (EZ)",
    "[0, 1]",
  )


@dataclasses.dataclass(frozen=True)
class ReanalyseConfig:
  """New policy and value targets for stored states."""

  schedule: Literal["batch", "sweep", "off"] = opt(
    "batch", "search the states of each sampled batch (EZ, SZ), or sweep the whole replay (ours)"
  )
  ratio: float = opt(
    1.0,
    "batch: share of samples whose policy is recomputed; others keep the stored one (EZ: 0.99)",
    "[0, 1]",
  )
  explore: bool = opt(
    True, "search with noise and search.uniform_fraction at the root, as the actor does (EZ: yes)"
  )
  weights_interval: int = opt(
    25,
    "learner steps between updates of the weights used by reanalysis (SZ: 25, EZ: 200)",
    "[1, 1e9]",
  )
  simulations: int = opt(
    0, "simulations per root in reanalysis; 0: search.simulations (ours)", "[0, 1e5]"
  )
  reuse: bool = opt(
    False,
    "sweep, Gumbel: Q of the action taken is reward + discount * the search value of the next "
    "state, so it needs no simulations (ReZero)",
  )
  max_age: int = opt(
    100,
    "sweep: maximum age of stored targets, learner steps; batches are sampled up to "
    "learner.prefetch + 1 steps ahead (ours)",
    "[1, 1e9]",
  )
  block: int = opt(
    0, "sweep: states searched per call; 0: 256 on CPUs, else 4,096 (ours)", "[0, 1e6]"
  )
  value_target: Literal["n_step", "search", "mixed"] = opt(
    "n_step", "n-step return (EZ), search value, or search value for old data only (EZ-V2)"
  )
  mixed_start: int = opt(
    30_000, "mixed: first learner step that uses search values (EZ-V2: 30k)", "[0, 1e9]"
  )
  mixed_newest: int = opt(
    5_000,
    "mixed: number of newest transitions that keep the n-step target (EZ-V2: 5k)",
    "[0, 1e9]",
    divided="exactly",
  )


@dataclasses.dataclass(frozen=True)
class RefreshConfig(refresh.RefreshConfig):
  """Priority Refresh: continuous recomputation of all priorities.

  A reanalysis sweep with `reanalyse.max_age` <= `refresh.max_age` also recomputes priorities;
  `weights_interval` and `block` then have no effect.
  """

  enabled: bool = opt(
    True, "recompute all priorities continuously (SZ); off: only those of sampled transitions (EZ)"
  )


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Targets, augmentation and coefficients of the unrolled loss."""

  td_steps: int = opt(5, "n of the n-step value target (EZ: 5)", "[1, 1000]")
  age_interval: int = opt(
    30_000,
    "n decreases by 1 per this many transitions of age, to a minimum of 1; 0: constant n "
    "(EZ: 30,000)",
    "[0, 1e9]",
    divided="at least 1",
  )
  unroll_steps: int = opt(5, "K, model steps unrolled in the loss (EZ: 5)", "[1, 1000]")
  absorbing_states: bool = opt(
    True,
    "train on states after a terminal frame, with value and reward 0 (MuZero's pseudocode: yes, "
    "EZ: no)",
  )
  gradient_scaling: Literal["muzero", "efficientzero"] = opt(
    "muzero",
    "muzero: recurrent terms have weight 1/K, and state_gradient scales gradients at g's input "
    "(MuZero, appendix G); efficientzero: all terms have weight 1/K, and it scales gradients at "
    "g's output, before all heads (EZ)",
  )
  state_gradient: float = opt(
    0.5, "scale of the gradient into the hidden state at each model step (EZ: 0.5)", "[0, 1]"
  )
  value_coefficient: float = opt(0.25, "weight of the value loss (EZ: 0.25)", "[0, 1e6]")
  value_prefix_coefficient: float = opt(1.0, "weight of the value-prefix loss (EZ: 1)", "[0, 1e6]")
  policy_coefficient: float = opt(1.0, "weight of the policy loss (EZ: 1)", "[0, 1e6]")
  consistency_coefficient: float = opt(
    2.0, "weight of the SimSiam consistency loss (EZ: 2, EZ-V2: 5)", "[0, 1e6]"
  )
  consistency_statistics: Literal["batch", "running"] = opt(
    "batch",
    "batch-norm statistics with which the representation of the consistency loss's targets is "
    "computed; running: batch norm is folded into the kernels, and only roots update the "
    "representation's statistics (EZ: batch)",
  )
  shift: int = opt(4, "augmentation: maximum random shift, pixels; 0: none (EZ: 4)", "[0, 1000]")
  intensity: float = opt(
    0.05, "augmentation: scale of random brightness; 0: none (EZ: 0.05)", "[0, 1000]"
  )


@dataclasses.dataclass(frozen=True)
class EfficientZeroConfig(AgentConfig):
  """Configuration of EfficientZero, EfficientZero V2 and SpeedyZero."""

  name: ClassVar[str] = "efficientzero"
  network: NetworkConfig = NetworkConfig()
  search: SearchConfig = SearchConfig()
  priority: PriorityConfig = PriorityConfig()
  loss: LossConfig = LossConfig()
  reanalyse: ReanalyseConfig = ReanalyseConfig()
  refresh: RefreshConfig = RefreshConfig()

  @property
  def refreshes(self) -> bool:
    return self.reanalyse.schedule != "off" or self.refresh.enabled

  @property
  def refresh_sweeps(self) -> bool:
    """Whether Priority Refresh has a sweep of its own, which no reanalysis sweep replaces."""
    reanalyse, refresh = self.reanalyse, self.refresh
    replaced = reanalyse.schedule == "sweep" and reanalyse.max_age <= refresh.max_age
    return refresh.enabled and not replaced

  def problems(self, config: Config) -> Iterable[str]:
    yield from self._network_problems(config)
    yield from self._search_problems()
    if self.reanalyse.reuse and self.reanalyse.schedule != "sweep":
      yield f"reanalyse.reuse: needs reanalyse.schedule=sweep, got {self.reanalyse.schedule}"
    if self.reanalyse.reuse and self.search.algorithm != "gumbel":
      yield f"reanalyse.reuse: needs search.algorithm=gumbel, got {self.search.algorithm}"
    if self.refresh_sweeps:
      yield from refresh.sweep_problems("refresh", self.refresh, config)
    if self.reanalyse.schedule == "sweep":
      yield from refresh.sweep_problems("reanalyse", self.reanalyse, config)

  def _network_problems(self, config: Config) -> Iterable[str]:
    env, network = config.env, self.network
    try:
      sides = frame_sides(env)
      if max(sides) > 1 and network.downsample == 1:
        check_game(env.game)  # may be a misspelled game with vector observations
    except ValueError as error:
      yield f"env.game: {error}"
      return
    vectors, small = max(sides) == 1, max(sides) <= _SMALL
    frames = "vectors" if vectors else f"images of {sides[0]} x {sides[1]} pixels"
    allowed = (1,) if vectors else (1, 4, 8, 16) if small else (4, 8, 16)
    if network.downsample not in allowed:
      factors = " or ".join(map(str, allowed))
      yield (
        f"network.downsample: must be {factors} for {env.game}, whose frames are {frames}, "
        f"got {network.downsample}"
      )
    elif any(side % network.downsample for side in sides):
      yield (
        f"network.downsample: must divide the sides of {env.game}'s {frames}, "
        f"got {network.downsample}"
      )
    if network.channels == 1 and network.downsample > 1:
      yield f"network.channels: must be at least 2 for {frames} (h begins with half), got 1"

  def _search_problems(self) -> Iterable[str]:
    stages, temperatures = self.search.temperature_stages, self.search.temperatures
    if len(temperatures) != len(stages) + 1:
      yield (
        f"search.temperatures: must have {len(stages) + 1} values, one more than "
        f"search.temperature_stages, got {list(temperatures)}"
      )
    if len(uniform := self.search.uniform_fraction) not in (1, len(temperatures)):
      yield (
        f"search.uniform_fraction: must have one value or {len(temperatures)}, as "
        f"search.temperatures, got {list(uniform)}"
      )
    if list(stages) != sorted(stages):
      yield f"search.temperature_stages: must not decrease, got {list(stages)}"
