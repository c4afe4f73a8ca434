"""Static structure of EfficientZero's network, which initializes, binds and folds variables."""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.agents.efficientzero.layers import EPSILON
from speedyzero_jax.agents.efficientzero.networks import Network, split_kernel
from speedyzero_jax.ops.param_rngs import param_rngs
from speedyzero_jax.types import Params


class NetworkDef:
  """A network's structure without values; initializes variables and binds them inside jit.

  Takes the arguments of `network`, a subclass of `Network`, except `rngs`.
  """

  def __init__(self, *arguments: Any, network: type[Network] = Network, **options: Any):
    self._make = partial(network, *arguments, **options)
    config, (height, width, _), *_ = arguments
    self._dtype, d = jnp.dtype(config.dtype), config.downsample
    self._state_shape = height // d, width // d, config.channels

  @cached_property
  def _graph(self) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: self._make(rngs=param_rngs(jax.random.key(0)))))

  @cached_property
  def _folded(self) -> tuple[Any, set[str]]:
    """Graph of the folded network, and the names of its modules with variables."""
    network = nnx.eval_shape(lambda: self._make(rngs=param_rngs(jax.random.key(0)), folded=True))
    return nnx.graphdef(network), set(nnx.to_pure_dict(nnx.state(network)))

  def init(self, key: jax.Array) -> Variables:
    """Returns initial variables."""
    return variables_of(self._make(rngs=param_rngs(key)))

  def bind(self, variables: Variables) -> Network:
    """Returns the network with these variables. Cheap; for use while tracing."""
    return nnx.merge(self._graph, variables.params, variables.batch_stats)

  def fold(self, variables: Variables) -> Variables:
    """Returns variables for inference, to be computed once for many calls of `bind_folded`.

    Batch norm with running statistics is folded into the preceding kernel and a bias. The output of
    the dynamics' first convolution for the action planes is precomputed, see `split_kernel`. The
    heads of value and policy become one with block-diagonal kernels, and the LSTM's two kernels
    become one. Everything except the norm of the LSTM's output and the layers of logits is cast to
    the dtype of activations. Modules that a folded network lacks, such as the consistency heads,
    are left out.

    Raises ValueError if the heads of value and policy have other layers than those of `Network`.
    """
    params, stats = variables
    needed = {"value", "policy", *self._folded[1]}
    params = _fold({k: x for k, x in params.items() if k in needed}, stats)
    params["heads"] = _side_by_side(params.pop("value"), params.pop("policy"))
    prefix = params["value_prefix"]
    inputs, hidden = prefix["lstm"]["dense_i"], prefix["lstm"]["dense_h"]
    kernel = jnp.concatenate([inputs["kernel"], hidden["kernel"]])
    prefix["lstm"] = {"linear": {"kernel": kernel, "bias": hidden["bias"]}}
    params = jax.tree_util.tree_map_with_path(self._cast, params)
    dynamics = params["dynamics"]
    kernel, dynamics["action_terms"] = split_kernel(dynamics["conv"]["kernel"], self._state_shape)
    dynamics["conv"]["kernel"] = kernel
    kept = {"value_prefix": {"lstm_norm": stats["value_prefix"]["lstm_norm"]}}
    return Variables(params, kept)

  def _cast(self, path: tuple[Any, ...], x: jax.Array) -> jax.Array:
    exact = any(key.key in ("lstm_norm", "linear2") for key in path)
    return x if exact else x.astype(self._dtype)

  def bind_folded(self, variables: Variables) -> Network:
    """Returns the network with variables from `fold`, for `train=False` only."""
    return nnx.merge(self._folded[0], variables.params, variables.batch_stats)


def _fold(params: Params, stats: Params) -> Params:
  """Folds each batch norm `norm`, `norm1`, ... into the sibling `conv` or `linear` of that suffix.

  Raises ValueError for a batch norm without such a sibling.
  """
  folded: Params = {}
  for key, child in params.items():
    name = str(key)  # keys of lists are integers
    norm = name.replace("conv", "norm").replace("linear", "norm")
    if not isinstance(child, dict):
      folded[key] = child
    elif name.startswith("norm") and name in stats:
      if params.keys().isdisjoint(name.replace("norm", layer) for layer in ("conv", "linear")):
        raise ValueError(f"batch norm '{name}' has no 'conv' or 'linear' with the same suffix")
    elif norm != name and norm in stats:
      scale = params[norm]["scale"] * jax.lax.rsqrt(stats[norm]["var"] + EPSILON)
      shift = (child.get("bias", 0) - stats[norm]["mean"]) * scale
      folded[key] = {"kernel": child["kernel"] * scale, "bias": params[norm]["bias"] + shift}
    else:
      folded[key] = _fold(child, stats.get(key, {}))
  return folded


def _side_by_side(head: Params, other: Params) -> Params:
  """Joins two folded heads into one with the outputs of both."""

  def join(x: Params, y: Params, inputs: int) -> Params:
    """Block-diagonal kernel for groups of `inputs` features of x, each followed by those of y."""
    first, second = (z["kernel"].reshape(-1, inputs, z["kernel"].shape[-1]) for z in (x, y))
    first = jnp.pad(first, ((0, 0), (0, 0), (0, y["bias"].size)))
    second = jnp.pad(second, ((0, 0), (0, 0), (x["bias"].size, 0)))
    kernel = jnp.concatenate([first, second], axis=1).reshape(-1, first.shape[-1])
    return {"kernel": kernel, "bias": jnp.concatenate([x["bias"], y["bias"]])}

  for each in (head, other):
    names = {*each, *each.get("mlp", {})}
    if names != {"conv", "mlp", "linear1", "linear2"}:
      raise ValueError(
        "can't fold the network for search: the heads of value and policy must consist of conv, "
        f"mlp.linear1 and mlp.linear2 and their batch norms, got {', '.join(sorted(names))}"
      )
  x, y = head["mlp"], other["mlp"]
  conv = jax.tree.map(lambda *z: jnp.concatenate(z, axis=-1), head["conv"], other["conv"])
  linear1 = join(x["linear1"], y["linear1"], head["conv"]["bias"].size)
  linear2 = join(x["linear2"], y["linear2"], x["linear1"]["bias"].size)
  return {"conv": conv, "mlp": {"linear1": linear1, "linear2": linear2}}


def variables_of(network: Network) -> Variables:
  """Returns the variables of a bound network as plain pytrees."""
  kinds = (nnx.Param, nnx.BatchStat)
  return Variables(*(nnx.to_pure_dict(nnx.state(network, kind)) for kind in kinds))
