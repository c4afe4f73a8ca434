"""Reanalysis and Priority Refresh: recomputed policies, values and priorities of stored states.

There are three background tasks:

- `reanalyse` searches the states of each sampled batch (EfficientZero, SpeedyZero), or sweeps the
  whole replay with a bound on the age of targets (whole-buffer reanalysis, ReZero, Xuan et al.
  2024, arXiv 2404.16364). With `reanalyse.reuse`, the sweep goes backward in time, and a search
  takes the value of the action taken from the next state's search.
- `bootstrap` evaluates the states from which the n-step returns of a sampled batch bootstrap, if
  value targets contain such returns.
- `refresh` is SpeedyZero's Priority Refresh: it sweeps the whole replay, evaluates states and
  recomputes priorities, with reanalysis sweeps also the values from which returns bootstrap. A
  reanalysis sweep with `reanalyse.max_age` <= `refresh.max_age` replaces it.

See also `agents/refresh.py` for Priority Refresh in general, `targets.py` for the errors, and
`workers/sweeper.py` for the schedule.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from speedyzero_jax.agents.base import Arrays, Task, Work
from speedyzero_jax.agents.efficientzero import metric_names, targets
from speedyzero_jax.agents.efficientzero.config import EfficientZeroConfig
from speedyzero_jax.agents.refresh import REFRESHER, recompute_priorities, refresh_task
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.selector import Selection

REANALYSER = "reanalyser"  # subscription to weights
# With `reanalyse.reuse`: states by which values move backward in a pass, and inputs of a search.
_PHASES = 4
EDGES = (Column("known_action", "int32"), Column("known_qvalue", "float32"))


def make_tasks(
  config: Config, search: Callable, values: Callable, actions: int
) -> tuple[dict[str, int], dict[str, Task]]:
  """Returns the subscriptions to weights and the background tasks of a run.

  `search` is the program of the task `reanalyse`; `values` is that of `bootstrap` and `refresh`.
  """
  agent_config: EfficientZeroConfig = config.agent
  reanalyse, refresh = agent_config.reanalyse, agent_config.refresh
  sweeping = reanalyse.schedule == "sweep"

  def write_search(
    replay: Replay, lane: np.ndarray, time: np.ndarray, results: Arrays, step: int
  ) -> None:
    searched = {name: results[name] for name in ("policy", "search_value")}
    replay.rewrite("policy_step", lane, time, step, searched)
    write = write_values if sweeping and refresh.enabled else write_bootstrap
    write(replay, lane, time, results, step)

  def write_bootstrap(
    replay: Replay, lane: np.ndarray, time: np.ndarray, results: Arrays, step: int
  ) -> None:
    replay.rewrite("bootstrap_step", lane, time, step, {"bootstrap": results["value"]})

  def write_values(
    replay: Replay, lane: np.ndarray, time: np.ndarray, results: Arrays, step: int
  ) -> None:
    replay.rewrite("value_step", lane, time, step, {"value": results["value"]})
    if sweeping:
      write_bootstrap(replay, lane, time, results, step)
    recompute_priorities(
      replay, lane, time, agent_config.loss.td_steps,
      lambda lane, time: targets.refreshed_errors(replay.store, lane, time, config, step),
    )  # fmt: skip

  subscriptions: dict[str, int] = {}
  tasks: dict[str, Task] = {}
  value = Column("value", "float32")
  if reanalyse.schedule != "off":
    subscriptions[REANALYSER] = reanalyse.weights_interval
    tasks["reanalyse"] = Task(
      program=search,
      results=(Column("policy", "float32", (actions,)), Column("search_value", "float32"), value),
      write=write_search,
      subscription=REANALYSER,
      part="search",
      rate=metric_names.REANALYSED_STATES,
      stamp="policy_step",
      max_age=reanalyse.max_age if sweeping else 0,
      block=reanalyse.block,
      phases=_PHASES if reanalyse.reuse else 1,
      reads=EDGES if reanalyse.reuse else (),
      read=partial(_known_edges, config) if reanalyse.reuse else None,
    )
  if reanalyse.schedule == "batch" and reanalyse.value_target != "search":
    tasks["bootstrap"] = Task(values, (value,), write_bootstrap, REANALYSER, part="search")
  if agent_config.refresh_sweeps:
    subscriptions[REFRESHER] = refresh.weights_interval
    tasks["refresh"] = refresh_task(refresh, values, (value,), write_values)
  return subscriptions, tasks


def _known_edges(
  config: Config, replay: Replay, lane: np.ndarray, time: np.ndarray, after: int
) -> Arrays:
  _, time = replay.clamp(lane, time)
  edges = targets.known_edges(replay.store, lane, time, after, config)
  return dict(zip((column.name for column in EDGES), edges, strict=True))


def batch_work(config: Config, replay: Replay, selection: Selection) -> list[Work]:
  """Returns the states to search and to evaluate before targets of a batch are computed."""
  reanalyse, unroll = config.agent.reanalyse, config.agent.loss.unroll_steps
  if reanalyse.schedule != "batch":
    return []
  store, lane = replay.store, selection.lane
  _, time = replay.clamp(lane, selection.time)
  # Taking the first samples is unbiased, since samples are independent.
  states = targets.unrolled_times(store, lane, time, unroll)[: round(reanalyse.ratio * len(time))]
  times_of = {"reanalyse": states}
  if reanalyse.value_target != "search":
    times_of["bootstrap"] = targets.bootstrap_times(store, lane, time, config, unroll)
  works = []
  for task, times in times_of.items():
    if len(times):
      real = times == times[:, :1] + np.arange(unroll + 1)
      works.append(Work(task, lane[: len(times)], times[:, 0], real))
  return works
