"""Reanalysis and Priority Refresh: recomputed policies, values and priorities of stored states.

There are three background tasks:

- `reanalyse` searches the states of each sampled batch (EfficientZero, SpeedyZero), or sweeps the
  whole replay with a bound on the age of targets (whole-buffer reanalysis, ReZero, Xuan et al.
  2024, arXiv 2404.16364).
- `bootstrap` evaluates the states from which the n-step returns of a sampled batch bootstrap.
- `refresh` is SpeedyZero's Priority Refresh: it sweeps the whole replay, evaluates states and
  recomputes priorities. A reanalysis sweep with `reanalyse.max_age` <= `refresh.max_age` replaces
  it.

See also `agents/refresh.py` for Priority Refresh in general, `targets.py` for the errors, and
`workers/sweeper.py` for the schedule.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from speedyzero_jax.agents.base import Task, Work
from speedyzero_jax.agents.efficientzero import metric_names, targets
from speedyzero_jax.agents.efficientzero.config import EfficientZeroConfig
from speedyzero_jax.agents.efficientzero.targets import TargetSpec
from speedyzero_jax.agents.refresh import REFRESHER, refresh_task, rescore
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.selector import Selection

REANALYSER = "reanalyser"  # subscription to weights

Results = dict[str, np.ndarray]


class Reanalysis:
  """Background tasks of a run and the subscriptions to weights that they use.

  Args:
    config: of the run.
    spec: settings of the targets.
    search: program of the task `reanalyse`.
    values: program of the tasks `bootstrap` and `refresh`.
    actions: |A|.
  """

  def __init__(
    self, config: Config, spec: TargetSpec, search: Callable, values: Callable, actions: int
  ):
    agent_config: EfficientZeroConfig = config.agent
    self._agent_config, self._spec = agent_config, spec
    self._unroll = agent_config.loss.unroll_steps
    self._one_state = dataclasses.replace(spec, unroll_steps=0)
    schedule, refresh = agent_config.reanalyse.schedule, agent_config.refresh
    self.subscriptions: dict[str, int] = {}
    self.tasks: dict[str, Task] = {}
    sweeping = schedule == "sweep"
    value = Column("value", "float32")
    if schedule != "off":
      self.subscriptions[REANALYSER] = agent_config.reanalyse.weights_interval
      self.tasks["reanalyse"] = Task(
        program=search,
        results=(Column("policy", "float32", (actions,)), Column("search_value", "float32"), value),
        write=self._write_search,
        subscription=REANALYSER,
        part="search",
        rate=metric_names.REANALYSED_STATES,
        stamp="policy_step",
        max_age=agent_config.reanalyse.max_age if sweeping else 0,
        block=agent_config.reanalyse.block,
      )
    if schedule == "batch":
      self.tasks["bootstrap"] = Task(
        program=values,
        results=(value,),
        write=self._write_bootstrap,
        subscription=REANALYSER,
        part="search",
      )
    if refresh.enabled and not (sweeping and agent_config.reanalyse.max_age <= refresh.max_age):
      self.subscriptions[REFRESHER] = refresh.weights_interval
      self.tasks["refresh"] = refresh_task(refresh, values, (value,), self._write_values)

  def batch_work(self, replay: Replay, selection: Selection) -> list[Work]:
    """Returns the states to search and to evaluate before targets of a batch are computed."""
    if self._agent_config.reanalyse.schedule != "batch":
      return []
    store, lane = replay.store, selection.lane
    _, time = replay.clamp(lane, selection.time)
    # Taking the first samples is unbiased, since samples are independent.
    searched = round(self._agent_config.reanalyse.ratio * len(time))
    states = targets.unrolled_times(store, lane, time, self._unroll)[:searched]
    bootstraps = targets.bootstrap_times(store, lane, time, self._spec)
    works = []
    for task, times in (("reanalyse", states), ("bootstrap", bootstraps)):
      if len(times):
        real = times == times[:, :1] + np.arange(self._unroll + 1)
        works.append(Work(task, lane[: len(times)], times[:, 0], real))
    return works

  def _write_search(
    self, replay: Replay, lane: np.ndarray, time: np.ndarray, results: Results, step: int
  ) -> None:
    searched = {name: results[name] for name in ("policy", "search_value")}
    replay.rewrite("policy_step", lane, time, step, searched)
    self._write_bootstrap(replay, lane, time, results, step)
    if self._agent_config.reanalyse.schedule == "sweep" and self._agent_config.refresh.enabled:
      self._write_values(replay, lane, time, results, step)

  @staticmethod
  def _write_bootstrap(
    replay: Replay, lane: np.ndarray, time: np.ndarray, results: Results, step: int
  ) -> None:
    replay.rewrite("bootstrap_step", lane, time, step, {"bootstrap": results["value"]})

  def _write_values(
    self, replay: Replay, lane: np.ndarray, time: np.ndarray, results: Results, step: int
  ) -> None:
    replay.rewrite("value_step", lane, time, step, {"value": results["value"]})
    rescore(
      replay, lane, time, self._spec.td_steps,
      lambda lane, time: targets.refreshed_errors(replay.store, lane, time, self._one_state, step),
    )  # fmt: skip
