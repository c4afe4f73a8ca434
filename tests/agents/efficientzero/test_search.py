"""Tests of the search against an independent one on random models; roots, keys and data types."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference_search
from speedyzero_jax.agents.efficientzero import search as search_lib
from speedyzero_jax.agents.efficientzero.config import SearchConfig
from speedyzero_jax.system.platform import planned

_ROOTS = 12
_DISCOUNT = 0.9
_CONSTANTS = {"c_visit": 12.0, "c_scale": 0.25, "c1": 1.6, "c2": 20.0}  # none of them the default
# A decision closer than this may fall either way in float32; such roots are not compared.
_CLOSE = 1e-4


class Tables(NamedTuple):
  """A random model. States and carries are numbers below 997, for a path of actions each."""

  prefix: Any  # [997], by the next carry: the value prefix depends on all actions since the reset
  value: Any  # [997], by the next state
  logits: Any  # [997, A]

  @classmethod
  def random(cls, seed: int, num_actions: int) -> "Tables":
    rng = np.random.default_rng(seed)
    f32 = np.float32
    return cls(*(rng.normal(size=s).astype(f32) for s in ((997,), (997,), (997, num_actions))))

  def step(self, state, carry, action):
    """One transition, of one state for the reference or of a batch under jax."""
    next_state = (state * 31 + action * 7 + 1) % 997
    next_carry = (carry * 17 + state * 5 + action * 3 + 11) % 997
    return (
      self.prefix[next_carry],
      self.logits[next_state],
      self.value[next_state],
      next_state,
      next_carry,
    )


def _recurrent(params: Tables, state, carry, action) -> search_lib.ModelStep:
  prefix, logits, value, state, carry = params.step(state, carry, action)
  return search_lib.ModelStep(
    value_prefix=prefix, policy_logits=logits, value=value, state=state, carry=carry
  )


def _root(tables: Tables, codes) -> search_lib.Root:
  return search_lib.Root(
    policy_logits=tables.logits[codes], value=tables.value[codes], state=jnp.asarray(codes)
  )


@dataclasses.dataclass(frozen=True)
class Case:
  """Settings of a search; hashable, so that compiled searches are cached by it."""

  algorithm: Literal["gumbel", "puct"]
  actions: int
  simulations: int
  horizon: int
  considered: int = 8
  min_range: float = 0.01
  dirichlet_fraction: float = 0.25
  uniform_fraction: tuple[float, ...] = (0.2,)
  temperatures: tuple[float, ...] = (1.0,)

  @property
  def config(self) -> SearchConfig:
    return SearchConfig(
      algorithm=self.algorithm,
      simulations=self.simulations,
      max_considered=self.considered,
      min_value_range=self.min_range,
      dirichlet_fraction=self.dirichlet_fraction,
      dirichlet_alpha=0.4,
      uniform_fraction=self.uniform_fraction,
      temperatures=self.temperatures,
      **_CONSTANTS,
    )

  def reference(self, tables: Tables, code: int, logits, gumbel, *known) -> reference_search.Result:
    settings = reference_search.Settings(
      algorithm=self.algorithm,
      simulations=self.simulations,
      discount=_DISCOUNT,
      horizon=self.horizon,
      min_range=self.min_range,
      max_considered=self.considered,
      **_CONSTANTS,
    )
    exact = Tables(*(np.asarray(x, np.float64) for x in tables))
    search = reference_search.Search(exact.step, settings, initial_carry=0)
    return search.run(
      code,
      np.asarray(logits, np.float64),
      float(tables.value[code]),
      np.asarray(gumbel, np.float64),
      *known,
    )


def _noise(key, alpha, shape):
  """Replaces Dirichlet noise, which takes long to compile."""
  return jax.nn.softmax(jax.random.normal(key, (*shape, *alpha.shape)) / alpha)


def _make(case: Case, **options):
  return search_lib.make_search(
    case.config,
    discount=_DISCOUNT,
    value_prefix_horizon=case.horizon,
    recurrent_fn=_recurrent,
    initial_carry=lambda batch: jnp.zeros([batch], jnp.int32),
    **options,
  )


@functools.cache
def _searcher(case: Case, platform: str = "cpu", **options):
  search = jax.jit(_make(case, **options), static_argnames="explore")

  def run(*arguments, **options):
    # Both matter when it is traced.
    with planned(platform), mock.patch.object(jax.random, "dirichlet", _noise):
      return search(*arguments, **options)

  return run


CASES = [
  Case("gumbel", actions=5, simulations=20, horizon=2, considered=4),
  Case("puct", actions=3, simulations=20, horizon=2),
  Case("gumbel", actions=3, simulations=11, horizon=2, considered=1, min_range=1.0),
  Case("puct", actions=3, simulations=15, horizon=1, min_range=2.0),
]
GUMBEL, PUCT = CASES[:2]


def _name(case: Case) -> str:
  return f"{case.algorithm}-A{case.actions}-h{case.horizon}"


def _codes(seed: int) -> np.ndarray:
  return np.random.default_rng(seed + 1).integers(0, 997, _ROOTS).astype(np.int32)


def _compare(
  case: Case, tables: Tables, codes, found, logits, gumbel, *known, action: bool = True
) -> int:
  """Asserts that `found` equals the reference's result, except where decisions were close.

  Returns the deepest node's depth.
  """
  expected = [
    case.reference(tables, int(c), *x) for c, *x in zip(codes, logits, gumbel, *known, strict=True)
  ]
  clear = [i for i, e in enumerate(expected) if e.margin > _CLOSE]
  hypothesis.assume(len(clear) > _ROOTS // 2)
  for i in clear:
    np.testing.assert_allclose(found.policy[i], expected[i].policy, atol=1e-5)
    np.testing.assert_allclose(found.search_value[i], expected[i].search_value, atol=1e-5)
    shares = expected[i].visits / expected[i].visits.sum()
    np.testing.assert_allclose(found.visits[i], shares, atol=1e-6)
    assert not action or found.action[i] == expected[i].action
  return max(expected[i].depth for i in clear)


# On a GPU trees are searched in another way.
@pytest.mark.parametrize(
  ("case", "platform"),
  [*((case, "cuda") for case in CASES), (GUMBEL, "cpu"), (PUCT, "cpu")],
  ids=lambda x: x if isinstance(x, str) else _name(x),
)
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31))
def test_agrees_with_reference(case: Case, platform: str, seed: int):
  tables, codes = Tables.random(seed, case.actions), _codes(seed)
  found = _searcher(case, platform)(
    tables, _root(tables, codes), jax.random.key(seed), explore=False
  )
  depth = _compare(
    case, tables, codes, found, tables.logits[codes], np.zeros([_ROOTS, case.actions])
  )
  np.testing.assert_array_equal(found.value, tables.value[codes])
  # Otherwise the examples would not show what they are here to show.
  assert depth > case.horizon


# With one action considered, often no visited action is the one of the largest prior.
@pytest.mark.parametrize("case", [GUMBEL, CASES[2]], ids=_name)
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31))
def test_gumbel_noise_and_a_share_of_the_uniform_prior_agree_with_reference(case: Case, seed: int):
  tables, codes, key = Tables.random(seed, case.actions), _codes(seed), jax.random.key(seed)
  found = _searcher(case)(tables, _root(tables, codes), key, explore=True)
  # The noise is drawn from the second of two keys, as in mctx.
  gumbel = jax.random.gumbel(jax.random.split(key)[1], (_ROOTS, case.actions))
  prior = np.asarray(jax.nn.softmax(tables.logits[codes]))
  _compare(case, tables, codes, found, np.log(0.8 * prior + 0.2 / case.actions), gumbel)


@pytest.mark.parametrize(("case", "platform"), [(GUMBEL, "cuda"), (CASES[2], "cpu")])
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31))
def test_known_edges_are_never_simulated_and_complete_the_root(case, platform, seed):
  tables, codes = Tables.random(seed, case.actions), _codes(seed)
  rng = np.random.default_rng(seed)
  actions = rng.integers(-1, case.actions, _ROOTS).astype(np.int32)
  edges = search_lib.KnownEdge(actions, rng.normal(size=_ROOTS).astype(np.float32))
  found = _searcher(case, platform, improved_values=True)(
    tables, _root(tables, codes), jax.random.key(seed), explore=False, known=edges
  )
  known = [None if a < 0 else (int(a), float(q)) for a, q in zip(*edges, strict=True)]
  quiet, improved = np.zeros([_ROOTS, case.actions]), [True] * _ROOTS
  _compare(case, tables, codes, found, tables.logits[codes], quiet, known, improved)


def test_a_known_edge_saves_the_simulation_that_would_have_found_it():
  every, fewer = (Case("gumbel", actions=5, simulations=n, horizon=2) for n in (5, 4))
  tables, codes = Tables.random(3, 5), _codes(3)
  root, action = _root(tables, codes), np.arange(_ROOTS, dtype=np.int32) % 5
  prefix, _, value, *_ = tables.step(codes, 0, action)  # what one simulation sees
  edges = search_lib.KnownEdge(action, prefix + np.float32(_DISCOUNT) * value)
  none = search_lib.KnownEdge(np.full_like(action, -1), np.zeros(_ROOTS, np.float32))
  results = [
    _searcher(case, improved_values=True)(
      tables, root, jax.random.key(0), explore=False, known=known
    )
    for case, known in ((every, none), (fewer, edges))
  ]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31))
def test_dirichlet_noise_agrees_with_reference(seed: int):
  tables, codes, key = Tables.random(seed, PUCT.actions), _codes(seed), jax.random.key(seed)
  found = _searcher(PUCT)(tables, _root(tables, codes), key, explore=True)
  # The search draws its noise from the first of three keys.
  noise = _noise(jax.random.split(key, 3)[0], np.full(PUCT.actions, 0.4, np.float32), (_ROOTS,))
  prior = np.asarray(jax.nn.softmax(tables.logits[codes]))
  mixed = np.log(np.maximum(0.75 * prior + 0.25 * noise, 1e-30))
  _compare(PUCT, tables, codes, found, mixed, np.zeros_like(mixed), action=False)


# No noise in the prior: what is left to chance is the sampled action, and the order of equals.
_QUIET = dataclasses.replace(PUCT, dirichlet_fraction=0.0)
_MANY = 2000


def test_puct_samples_by_visits_at_the_temperature_and_leaves_the_policy_alone():
  tables, temperatures = Tables.random(1, 3), (1.0, 0.5, 1e-6)
  search = _searcher(dataclasses.replace(_QUIET, temperatures=temperatures))
  root = _root(tables, np.full(_MANY, 0, np.int32))
  results = {
    t: search(tables, root, jax.random.key(0), explore=True, stage=stage)
    for stage, t in enumerate(temperatures)
  }
  visits = np.asarray(results[1.0].policy[0])
  assert len(set(visits)) == 3 and (visits > 0.1).all()  # so that the temperature shows
  for temperature, result in results.items():
    np.testing.assert_array_equal(result.policy, np.broadcast_to(visits, (_MANY, 3)))
    np.testing.assert_array_equal(result.search_value, results[1.0].search_value)
    frequency = np.bincount(result.action, minlength=3) / _MANY
    expected = (visits / visits.max()).astype(np.float64) ** (1 / temperature)
    np.testing.assert_allclose(frequency, expected / expected.sum(), atol=0.04)


def test_equals_are_ordered_at_random_when_exploring_and_by_index_when_not():
  # All is zero: the three actions are visited in turn, of 20 visits the last in order gets 6.
  flat = Tables(*(np.zeros_like(x) for x in Tables.random(0, 3)))
  search, root = _searcher(_QUIET), _root(flat, np.zeros(_MANY, np.int32))
  last = np.argmin(search(flat, root, jax.random.key(0), explore=True).policy, axis=-1)
  np.testing.assert_allclose(np.bincount(last, minlength=3) / _MANY, 1 / 3, atol=0.04)
  root = _root(flat, np.zeros(_ROOTS, np.int32))
  quiet = _searcher(PUCT)(flat, root, jax.random.key(0), explore=False)
  np.testing.assert_allclose(quiet.policy, np.tile([0.35, 0.35, 0.3], (_ROOTS, 1)), rtol=1e-6)
  assert (quiet.action == 0).all()


def test_chain_recovers_its_rewards_across_resets():
  # One action, so the tree is a chain, and simulation k reaches depth k. The model sums rewards in
  # its carry and has no resets; values are zero.
  rewards, discount, n = np.array([1.0, -2.0, 0.5, 3.0, 0.25, -1.0, 2.0], np.float32), 0.75, 7

  def chain(params, state, carry, action):
    total = carry + params[state]
    zero = jnp.zeros_like(total)
    return search_lib.ModelStep(
      value_prefix=total, policy_logits=zero[:, None], value=zero, state=state + 1, carry=total
    )

  search = search_lib.make_search(
    SearchConfig(algorithm="gumbel", simulations=n),
    discount=discount,
    value_prefix_horizon=3,
    recurrent_fn=chain,
    initial_carry=lambda batch: jnp.zeros([batch]),
  )
  root = search_lib.Root(
    policy_logits=jnp.zeros([1, 1]), value=jnp.full([1], 8.0), state=jnp.zeros([1], jnp.int32)
  )
  found = jax.jit(search, static_argnames="explore")(
    jnp.asarray(rewards), root, jax.random.key(0), explore=False
  )
  returns = [sum(discount**d * rewards[d] for d in range(k)) for k in range(1, n + 1)]
  np.testing.assert_allclose(found.search_value[0], (8.0 + sum(returns)) / (n + 1), rtol=1e-6)
  np.testing.assert_array_equal(found.policy, [[1.0]])


@pytest.mark.parametrize("case", [GUMBEL, PUCT], ids=_name)
def test_predictions_in_bfloat16_are_searched_in_float32(case: Case):
  tables = Tables(*(jnp.asarray(x, jnp.bfloat16) for x in Tables.random(0, case.actions)))
  search, root, key = _make(case), _root(tables, _codes(0)), jax.random.key(0)
  found = jax.eval_shape(lambda: search(tables, root, key, explore=True))
  assert found.action.dtype == jnp.int32
  assert {x.dtype for x in (found.policy, found.search_value, found.value)} == {np.dtype("f4")}
