"""Run folders as real runs leave them, for tests of reports."""

import json
import math
import random

import yaml

VERSIONS = {"python": "3.11.7", "code": "0c30b09", "jax": "0.10.2"}


def start(step=0, devices=1, **changes):
  """A line of starts.jsonl."""
  row = {"step": step, "devices": devices, "device": "NVIDIA H200", "cpu": "2 x EPYC"}
  row |= {"system": "Linux", "host": "node1", "versions": VERSIONS}
  return row | changes


def run(
  path, *, game="Pong", seed=0, returns=(1.0, 2.0, 3.0), mean=None, starts=None,
  settings=(), agent="efficientzero", metrics=None,
):  # fmt: skip
  """Writes a run. `mean` is the mean return of its evaluation; None: no evaluation.

  Row i, from 1, has learner step 10 i, 40 i agent steps, i minutes and the i-th return.
  """
  path.mkdir(parents=True)
  config = {
    "agent": agent,
    "env": {"game": game},
    "optim": {"learning_rate": 0.2} | dict(settings),
    "learner": {"steps": 10 * len(returns)},
    "run": {"seed": seed, "dir": str(path), "log_interval": 20},
  }
  (path / "config.yaml").write_text(yaml.safe_dump(config))
  rows = [
    {"step": 10 * i, "env_steps": 40 * i, "time": 60.0 * i, "charts/episode_return": value}
    | (metrics(i) if metrics else {})
    for i, value in enumerate(returns, start=1)
  ]
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  starts = [start()] if starts is None else starts
  (path / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
  if mean is not None:
    evaluation = {"game": game, "step": 10 * len(returns), "episodes": 32, "mean": mean,
                  "median": mean, "std": 1.5}  # fmt: skip
    (path / "evaluation.json").write_text(json.dumps(evaluation))
  return path


def learning(path, game, seed, final, random_play, rows=60, speed=1.0, **options):
  """Writes a run with a return that rises to about `final`, and with system metrics."""
  rng = random.Random(f"{game} {seed} {speed}")
  end = final * rng.uniform(0.8, 1.2)
  rise = lambda i: random_play + (end - random_play) * (1 - math.exp(-4 * i / rows))  # noqa: E731

  def metrics(i):
    noise = rng.uniform(0.9, 1.1)
    evaluated = i - i % 10
    evaluation = {"evaluation/step": evaluated * 10, "evaluation/mean": rise(evaluated) * 1.1}
    return {
      "charts/agent_steps_per_second": 40 * noise * speed,
      "charts/learner_steps_per_second": 9 * noise * speed,
      "replay/target_age_max": 80 + 20 * noise,
      "stats/policy_lag": 5 * noise,
      "queue/learner_wait_seconds": 0.02 * noise,
      "time/train": 4.0 * noise,
      "time/search": 3.0 * noise,
      "time/wait": 0.004,
      "time": 60.0 * i / speed,
    } | (evaluation if evaluated else {})

  returns = [rise(i) * rng.uniform(0.93, 1.07) for i in range(1, rows + 1)]
  return run(path, game=game, seed=seed, returns=returns, mean=end, metrics=metrics,
             **options)  # fmt: skip
