"""EfficientZero's network apart from its values: making, binding and folding its variables."""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.agents.efficientzero.networks import EPSILON, Network, split_kernel
from speedyzero_jax.types import Params


class NetworkDef:
  """A network's structure without values; makes variables and binds them inside jit.

  Arguments are those of `network`, a subclass of `Network`, without `rngs`.
  """

  def __init__(self, *arguments: Any, network: type[Network] = Network, **options: Any):
    self._make = partial(network, *arguments, **options)
    config, (height, width, _), *_ = arguments
    self._dtype, d = jnp.dtype(config.dtype), config.downsample
    self._state_shape = height // d, width // d, config.channels

  @cached_property
  def _graph(self) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: self._make(rngs=nnx.Rngs(0))))

  @cached_property
  def _folded_graph(self) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: self._make(rngs=nnx.Rngs(0), folded=True)))

  def init(self, key: jax.Array) -> Variables:
    """Initial variables."""
    return variables_of(self._make(rngs=nnx.Rngs(key)))

  def bind(self, variables: Variables) -> Network:
    """The network with these variables; cheap, for use while tracing."""
    return nnx.merge(self._graph, variables.params, variables.batch_stats)

  def fold(self, variables: Variables) -> Variables:
    """Variables for inference, to be prepared once for many calls, see `bind_folded`.

    Batch norm by running statistics is folded into the kernel before it, which thereby has a bias;
    the action planes' part of the dynamics is reduced to its effect; and all but the norm of the
    LSTM's output is cast to the compute type. The consistency heads are left out.
    """
    params, stats = variables
    params = _fold({k: x for k, x in params.items() if k != "consistency"}, stats)
    norm = params["value_prefix"]["lstm_norm"]
    params = jax.tree.map(lambda x: x.astype(self._dtype), params)
    params["value_prefix"]["lstm_norm"] = norm
    dynamics = params["dynamics"]
    kernel, dynamics["response"] = split_kernel(dynamics["conv"]["kernel"], self._state_shape)
    dynamics["conv"]["kernel"] = kernel
    kept = {"value_prefix": {"lstm_norm": stats["value_prefix"]["lstm_norm"]}}
    return Variables(params, kept)

  def bind_folded(self, variables: Variables) -> Network:
    """The network with variables from `fold`, for `train=False` only."""
    return nnx.merge(self._folded_graph, variables.params, variables.batch_stats)


def _fold(params: Params, stats: Params) -> Params:
  """Folds each `norm`, `norm1`, ... into the `conv` or `linear` with the same ending beside it."""
  folded: Params = {}
  for name, child in params.items():
    norm = str(name).replace("conv", "norm").replace("linear", "norm")
    if not isinstance(child, dict):
      folded[name] = child
    elif norm != str(name) and norm in params:
      scale = params[norm]["scale"] * jax.lax.rsqrt(stats[norm]["var"] + EPSILON)
      shift = (child.get("bias", 0) - stats[norm]["mean"]) * scale
      folded[name] = {"kernel": child["kernel"] * scale, "bias": params[norm]["bias"] + shift}
    elif not str(name).startswith("norm"):
      folded[name] = _fold(child, stats.get(name, {}))
  return folded


def variables_of(network: Network) -> Variables:
  """The variables of a bound network as plain pytrees."""
  kinds = (nnx.Param, nnx.BatchStat)
  return Variables(*(nnx.to_pure_dict(nnx.state(network, kind)) for kind in kinds))
