"""Sample Factory's side of peers_appo.py: trains until it is stopped.

    python appo.py TASK FOLDER SEED CORES

After every training iteration a line is added to FOLDER/run/metrics.jsonl: the agent steps trained
on and the mean return of the last 100 training episodes.
"""

import functools
import json
import statistics
import sys
from pathlib import Path

import envpool
import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.train import make_runner
from sf_examples import train_gym_env
from sf_examples.envpool.atari import train_envpool_atari

# It reads attributes that EnvPool 1.2.5 does not set. Replaced on import, since all processes of
# Sample Factory import this file.
gymnasium.vector.VectorEnv.close = lambda self: None
if "Pong42" in sys.argv:
  envpool.make = functools.partial(envpool.make, img_height=42, img_width=42)

# The command in the docstring of sf_examples/train_gym_env.py.
CARTPOLE = [
  "--env=CartPole-v1", "--use_rnn=False", "--num_envs_per_worker=20", "--recurrence=1",
  "--policy_workers_per_policy=2", "--with_vtrace=False", "--batch_size=512", "--reward_scale=0.1",
  "--save_every_sec=10", "--experiment_summaries_interval=10",
]  # fmt: skip
# Without the option, steps are counted as four frames each.
PONG = ["--env=atari_pong", "--summaries_use_frameskip=False"]


class Lines(AlgoObserver):
  """Writes a line of metrics, with our names, after every training iteration."""

  def __init__(self, path: Path):
    self._file = path.open("w", buffering=1)

  def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
    row = {"env_steps": runner.env_steps.get(0, 0)}
    if returns := runner.policy_avg_stats.get("reward", [[]])[0]:
      row["charts/episode_return"] = statistics.fmean(map(float, returns))
    self._file.write(json.dumps(row) + "\n")


def main(task: str, folder: str, seed: str, cores: str) -> None:
  settings = ["--device=cpu", f"--seed={seed}", f"--train_dir={folder}", "--experiment=run"]
  if task == "CartPole":
    train_gym_env.register_custom_components()
    # By default there is a worker per core of the machine, whichever cores the process has.
    settings = [*CARTPOLE, f"--num_workers={cores}", *settings]
    config = train_gym_env.parse_custom_args(settings)
  else:
    train_envpool_atari.register_atari_components()
    config = train_envpool_atari.parse_atari_args([*PONG, *settings])
  config, runner = make_runner(config)
  runner.register_observer(Lines(Path(folder) / "run/metrics.jsonl"))
  runner.init()
  runner.run()


if __name__ == "__main__":
  main(*sys.argv[1:])
