"""Tests of the networks against NumPy: sizes, forward pass, running statistics and types."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from speedyzero_jax.agents.efficientzero import layers, networks
from speedyzero_jax.agents.efficientzero.config import NetworkConfig
from speedyzero_jax.agents.efficientzero.network_def import NetworkDef, variables_of

# No two sizes alike, so that no pair of axes can be swapped unnoticed.
TINY = NetworkConfig(
  channels=4, downsample=1, reduced_channels=3, head_hidden=5, lstm_hidden=6,
  value_prefix_horizon=1, support=4, projection_hidden=7, projection_out=8, prediction_hidden=9,
)  # fmt: skip
_OBSERVATION = (2, 3, 2)
_ACTIONS = 3


def _random(network_def, seed=0):
  """Variables other than 0 and 1; variances of about 4 keep the activations moderate."""
  rng = np.random.default_rng(seed)

  def number(path, x):
    center = {"scale": 1, "var": 4}.get(path[-1].key, 0)
    return (center + rng.uniform(-0.5, 0.5, x.shape)).astype(x.dtype)

  return jax.tree.map_with_path(number, jax.eval_shape(network_def.init, jax.random.key(0)))


def _leaves(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): x
    for path, x in jax.tree.leaves_with_path(tree)
  }


def _abstract(config, observation=(96, 96, 12), actions=6):
  network_def = NetworkDef(config, observation, actions)
  return network_def, jax.eval_shape(network_def.init, jax.random.key(0))


def _linear(inputs, outputs):
  return inputs * outputs + outputs


def _conv(kernel, inputs, outputs):
  return kernel * kernel * inputs * outputs  # without bias: batch norm follows


def _norm(features):
  return 2 * features


def _block(channels):
  return 2 * (_conv(3, channels, channels) + _norm(channels))


def _head(outputs):
  """1x1 convolution to 16 channels, 6x6 pixels flattened, 32 hidden units."""
  return _conv(1, 64, 16) + _norm(16) + _linear(6 * 6 * 16, 32) + _norm(32) + _linear(32, outputs)


def test_parameters_of_the_full_network_are_those_of_the_paper_by_hand():
  downsampling_block = (
    _conv(3, 32, 64) + _norm(64) + _conv(3, 64, 64) + _norm(64) + _conv(3, 32, 64)
  )
  lstm = 4 * 512 * (16 * 36 + 512) + 4 * 512  # one bias, where PyTorch has two
  expected = {
    "representation": (
      _conv(3, 12, 32) + _norm(32) + _block(32) + downsampling_block + 3 * _block(64)
    ),
    "dynamics": _conv(3, 65, 64) + _norm(64) + _block(64),
    "value_prefix": (
      _conv(1, 64, 16) + _norm(16) + lstm + _norm(512) + _linear(512, 32) + _norm(32)
      + _linear(32, 601)
    ),
    "trunk": _block(64),
    "value": _head(601),
    "policy": _head(6),
    "consistency": (
      _linear(2304, 1024) + _linear(1024, 1024) + _linear(1024, 1024) + 3 * _norm(1024)
      + _linear(1024, 512) + _norm(512) + _linear(512, 1024)
    ),
  }  # fmt: skip
  _, variables = _abstract(NetworkConfig())
  found = {
    part: sum(x.size for x in jax.tree.leaves(tree)) for part, tree in variables.params.items()
  }
  assert found == expected


class Reference:
  """EfficientZero's network in evaluation mode, float64 numpy, from the same variables."""

  def __init__(self, variables, config, actions):
    self.params, self.stats = jax.tree.map(lambda x: np.asarray(x, np.float64), tuple(variables))
    self.config, self.actions = config, actions

  def _conv(self, x, path, stride=1):
    kernel = self._at(self.params, path)["kernel"]
    size = kernel.shape[0]
    x = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))[
      :, ::stride, ::stride
    ]
    return np.einsum("bhwcij,ijco->bhwo", windows, kernel)

  def _norm(self, x, path):
    params, stats = self._at(self.params, path), self._at(self.stats, path)
    return (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) * params["scale"] + params["bias"]

  def _linear(self, x, path):
    params = self._at(self.params, path)
    return x @ params["kernel"] + params["bias"]

  @staticmethod
  def _at(tree, path):
    for part in path:
      tree = tree[part]
    return tree

  def _block(self, x, path, stride=1):
    y = np.maximum(self._norm(self._conv(x, path + ("conv1",), stride), path + ("norm1",)), 0)
    y = self._norm(self._conv(y, path + ("conv2",)), path + ("norm2",))
    return np.maximum(y + (self._conv(x, path + ("skip",), 2) if stride == 2 else x), 0)

  def _blocks(self, x, *path):
    for i in range(self.config.blocks):
      x = self._block(x, path + (i,))
    return x

  @staticmethod
  def _pool(x):
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].mean(
      (-2, -1)
    )

  def represent(self, x):
    strided = self.config.downsample > 1
    x = self._conv(x, ("representation", "conv"), 2 if strided else 1)
    x = np.maximum(self._norm(x, ("representation", "norm")), 0)
    stage = 0
    if strided:
      x = self._blocks(x, "representation", "stages", stage)
      x = self._block(x, ("representation", "down"), 2)
      stage += 1
    remaining = self.config.downsample // 4
    while remaining > 1:
      x = self._pool(self._blocks(x, "representation", "stages", stage))
      stage, remaining = stage + 1, remaining // 2
    return self._blocks(x, "representation", "stages", stage)

  def dynamics(self, state, action):
    if self.config.action_encoding == "plane":
      planes = np.full(state.shape[:3] + (1,), action[:, None, None, None] / self.actions)
    else:
      planes = np.zeros(state.shape[:3] + (self.actions,))
      for sample, a in enumerate(action):
        planes[sample, :, :, a] = 1
    x = self._norm(
      self._conv(np.concatenate([state, planes], -1), ("dynamics", "conv")), ("dynamics", "norm")
    )
    return self._blocks(np.maximum(x + state, 0), "dynamics", "blocks")

  def _mlp(self, x, part):
    x = np.maximum(self._norm(self._linear(x, (part, "mlp", "linear1")), (part, "mlp", "norm1")), 0)
    return self._linear(x, (part, "mlp", "linear2"))

  def _reduced(self, state, part):
    x = np.maximum(self._norm(self._conv(state, (part, "conv")), (part, "norm")), 0)
    return x.reshape(len(x), -1)

  def predict(self, state):
    state = self._blocks(state, "trunk")
    return [self._mlp(self._reduced(state, part), part) for part in ("value", "policy")]

  def value_prefix(self, state, carry):
    """One step of the LSTM (Hochreiter & Schmidhuber 1997, with a forget gate) and its head."""
    weights = self.params["value_prefix"]["lstm"]
    x = self._reduced(state, "value_prefix")
    gates = (
      x @ weights["dense_i"]["kernel"]
      + carry[1] @ weights["dense_h"]["kernel"]
      + weights["dense_h"]["bias"]
    )
    i, f, g, o = np.split(gates, 4, axis=-1)
    cell = carry[0] / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
    output = np.tanh(cell) / (1 + np.exp(-o))
    normed = np.maximum(self._norm(output, ("value_prefix", "lstm_norm")), 0)
    return (cell, output), self._mlp(normed, "value_prefix")

  def project(self, state):
    x = state.reshape(len(state), -1)
    for i in range(3):
      x = self._norm(self._linear(x, ("consistency", "linears", i)), ("consistency", "norms", i))
      x = np.maximum(x, 0) if i < 2 else x
    return x

  def predict_projection(self, x):
    x = self._norm(self._linear(x, ("consistency", "predict1")), ("consistency", "predict_norm"))
    return self._linear(np.maximum(x, 0), ("consistency", "predict2"))


@pytest.mark.parametrize(
  ("changes", "observation"),
  [
    ({}, _OBSERVATION),
    ({"downsample": 8, "action_encoding": "one_hot"}, (16, 8, 2)),
  ],
  ids=["grids", "images"],
)
def test_forward_is_that_of_a_plain_numpy_network(changes, observation):
  config = dataclasses.replace(TINY, **changes)
  network_def = NetworkDef(config, observation, _ACTIONS)
  variables = _random(network_def)
  rng = np.random.default_rng(1)
  frames = rng.uniform(size=(4,) + observation).astype(np.float32)
  actions = rng.integers(0, _ACTIONS, (2, 4)).astype(np.int32)
  carry = tuple(rng.normal(size=(4, 6)).astype(np.float32) for _ in range(2))

  @jax.jit
  def forward(variables, frames, actions, carry):
    network = network_def.bind(variables)
    states = [network.represent(frames, False)]
    for action in actions:
      states.append(network.dynamics(states[-1], action, False))
    last, prefix = network.value_prefix(jnp.stack(states[1:]), carry, False)
    stepped = network.step(states[0], carry, actions[0])
    projection = network.consistency.project(states[1], False)
    predicted = network.consistency.predict(projection, False)
    folded = network_def.bind_folded(network_def.fold(variables))
    represented = folded.represent(frames, False)
    following = represented, folded.step(represented, carry, actions[0])
    once_more = *following, folded.predict(states[1], False)
    return (
      (states, last, prefix, stepped, network.predict(states[1], False), projection, predicted),
      once_more,
    )

  with jax.default_matmul_precision("float32"):
    (states, last, prefix, stepped, heads, projection, predicted), folded = forward(
      variables, frames, actions, carry
    )

  reference = Reference(variables, config, _ACTIONS)
  expected = [reference.represent(frames.astype(np.float64))]
  expected_carry, expected_prefix = tuple(np.asarray(x, np.float64) for x in carry), []
  for k, action in enumerate(actions):
    expected.append(reference.dynamics(expected[-1], action))
    if k == 1:  # the horizon
      expected_carry = (np.zeros((4, 6)), np.zeros((4, 6)))
    expected_carry, logits = reference.value_prefix(expected[-1], expected_carry)
    expected_prefix.append(logits)
    if k == 0:
      expected_step = (expected[1], expected_carry, logits)
  expected_projection = reference.project(expected[1])

  def close(ours, theirs):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5 * np.abs(y).max()),
      ours,
      theirs,
    )

  close(states, expected)
  close((last, prefix), (expected_carry, np.stack(expected_prefix)))
  close(stepped, expected_step)
  close(list(heads), reference.predict(expected[1]))
  # With batch norm folded into the kernels: the same network.
  close((folded[0], folded[1], list(folded[2])), (expected[0], expected_step, list(heads)))
  close(projection, expected_projection)
  close(predicted, reference.predict_projection(expected_projection))
  assert all(
    np.abs(state).max() > 0.1 and state.std() > 0.01 for state in expected
  )  # nothing has died out


def test_training_moves_running_statistics_by_a_tenth():
  network_def = NetworkDef(TINY, (1, 1, 2), _ACTIONS)
  variables = _random(network_def)
  frames = np.random.default_rng(2).uniform(size=(6, 1, 1, 2)).astype(np.float32)

  @jax.jit
  def after(variables):
    network = network_def.bind(variables)
    state = network.represent(frames, True)
    network.predict(state, True)
    following = network.dynamics(state, np.arange(6) % _ACTIONS, True)
    network.value_prefix(following[None], network.initial_carry(6), True)
    network.consistency.predict(network.consistency.project(following, True), True)
    return variables_of(network)

  touched = after(variables)
  jax.tree.map(np.testing.assert_array_equal, touched.params, variables.params)
  convolved = frames @ variables.params["representation"]["conv"]["kernel"][0, 0]
  for moment, now in (("mean", convolved.mean((0, 1, 2))), ("var", convolved.var((0, 1, 2)))):
    old = variables.batch_stats["representation"]["norm"][moment]
    new = touched.batch_stats["representation"]["norm"][moment]
    np.testing.assert_allclose(new, 0.9 * old + 0.1 * now, rtol=1e-5, atol=1e-6)
  before, now = _leaves(variables.batch_stats), _leaves(touched.batch_stats)
  for name, x in before.items():
    assert (x != now[name]).any(), name


def test_evaluation_with_the_statistics_of_a_batch_is_a_training_pass():
  config = dataclasses.replace(TINY, downsample=8, bn_momentum=0.0)
  network_def = NetworkDef(config, (16, 8, 2), _ACTIONS)
  frames = np.random.default_rng(2).uniform(size=(4, 16, 8, 2)).astype(np.float32)

  @jax.jit
  def both(variables):
    network = network_def.bind(variables)
    return network.represent(frames, True), network.represent(frames, False)

  with jax.default_matmul_precision("float32"):
    trained, evaluated = both(_random(network_def))
  assert trained.std() > 0.01
  np.testing.assert_allclose(trained, evaluated, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_for_activations_only():
  config = dataclasses.replace(TINY, dtype="bfloat16")
  network_def, variables = _abstract(config, _OBSERVATION, _ACTIONS)

  def forward(variables, frames):
    network = network_def.bind(variables)
    state = network.represent(frames, True)
    following, carry, prefix = network.step(state, network.initial_carry(6), jnp.arange(6) % 3)
    logits = prefix, *network.predict(following, True)
    return (state, following, carry), (logits, variables_of(network))

  frames = np.zeros((6, *_OBSERVATION), np.float32)
  activations, others = jax.eval_shape(forward, variables, frames)
  assert {x.dtype for x in jax.tree.leaves(activations)} == {jnp.dtype("bfloat16")}
  assert {x.dtype for x in jax.tree.leaves((variables, others))} == {np.dtype(np.float32)}


def test_logits_are_not_rounded_to_the_dtype_of_activations():
  network_def, variables = _abstract(dataclasses.replace(TINY, dtype="bfloat16"), _OBSERVATION)
  variables = jax.tree.map(jnp.zeros_like, variables)
  names = "value", "policy", "value_prefix"
  last = [variables.params[name]["mlp"]["linear2"] for name in names]
  for low, layer in enumerate(last):
    layer["bias"] = jnp.linspace(10 + low, 11 + low, layer["bias"].size)

  @jax.jit
  def logits(variables):
    folded = network_def.bind_folded(network_def.fold(variables))
    results = []
    for network in (network_def.bind(variables), folded):
      state = network.represent(jnp.zeros((1, *_OBSERVATION)), False)
      prefix = network.step(state, network.initial_carry(1), jnp.zeros(1, int))[2]
      results.append([*network.predict(state, False), prefix])
    return results

  for result in logits(variables):
    for found, layer in zip(result, last, strict=True):
      np.testing.assert_array_equal(found[0], layer["bias"])


def test_pytorchs_initial_scale():
  """Kernels and biases are uniform within 1/sqrt(inputs); those of an LSTM cell, 1/sqrt(hidden)."""
  config = dataclasses.replace(TINY, init="pytorch")

  @jax.jit
  def made():
    factory = layers.Layers(config, None, nnx.Rngs(0), vectors=False)
    some = {9 * 5: factory.conv(5, 9), 20: factory.linear(20, 16), 32: factory.lstm(7, 32)}
    return {inputs: nnx.state(layer, nnx.Param) for inputs, layer in some.items()}

  for inputs, params in made().items():
    limit = inputs**-0.5
    for x in jax.tree.leaves(params):
      assert limit / 2 < np.abs(x).max() <= limit
      if x.size > 200:
        np.testing.assert_allclose(np.std(x), limit / 3**0.5, rtol=0.15)
        assert abs(np.mean(x)) < 0.1 * limit


def test_a_batch_norm_without_a_layer_to_be_folded_into_is_refused():
  class Odd(networks.Network):
    def __init__(self, *args, rngs, folded=False):
      super().__init__(*args, rngs=rngs, folded=folded)
      self.norm9 = nnx.BatchNorm(4, rngs=rngs)

  network_def = NetworkDef(TINY, (1, 1, 2), _ACTIONS, network=Odd)
  with pytest.raises(ValueError, match=r"batch norm 'norm9' has no 'conv' or 'linear'"):
    network_def.fold(network_def.init(jax.random.key(0)))


def test_a_head_for_the_loss_only_is_left_out_of_the_folded_network():
  class Own(networks.Network):
    def __init__(self, *args, rngs, folded=False):
      super().__init__(*args, rngs=rngs, folded=folded)
      if not folded:
        self.own = nnx.Linear(4, 1, rngs=rngs)

  network_def = NetworkDef(TINY, (1, 1, 2), _ACTIONS, network=Own)
  variables = network_def.init(jax.random.key(0))
  assert hasattr(network_def.bind(variables), "own")
  assert not hasattr(network_def.bind_folded(network_def.fold(variables)), "own")


def test_heads_with_other_layers_are_refused():
  class Odd(networks.Network):
    def __init__(self, *args, rngs, folded=False):
      super().__init__(*args, rngs=rngs, folded=folded)
      self.value = nnx.Linear(4, 1, rngs=rngs)

  network_def = NetworkDef(TINY, (1, 1, 2), _ACTIONS, network=Odd)
  with pytest.raises(ValueError, match=r"can't fold .*, got bias, kernel"):
    network_def.fold(network_def.init(jax.random.key(0)))
