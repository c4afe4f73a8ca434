"""Runs of the commands in the README and docs/, in the order of each page: `make commands`.

Commands run as they are written, in a folder with the example files of all pages. Settings are
added that make runs short, and studies and populations have few runs. What takes long or changes
the environment is a dry run (`DRY_RUN`), or runs elsewhere (`ELSEWHERE`). `make train` runs once
more, in full.
"""

import glob
import itertools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

import pages
import tiny
from launch import multihost, plan, profile_run, suite
from pages import PAGES, ROOT
from speedyzero_jax.config import loader
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.study import study as studies

pytestmark = [pytest.mark.commands, pytest.mark.timeout(1800)]

TRAINED = "runs/quickstart-Catch-s0"  # pages refer to this run
SHORT = (
  "learner.steps=2", "run.env_steps=2100", "run.checkpoint_interval=1", "run.log_interval=1",
  "learner.devices=1", "replay.capacity=0", "search.simulations=2",
)  # fmt: skip
EVALUATION = "evaluation.episodes=2", "evaluation.max_episode_steps=20"
DRY_RUN = {"docs", "commands", "cuda12", "cuda13", "wandb"}  # .ci/run runs the first two
ELSEWHERE = {
  "benchmarks/picture.py",  # tests/test_docs.py compares its figures
  "launch/slurm/train.sbatch",  # tests/launch/test_recipes.py, with a fake Slurm
  "launch/wandb_sync.py",  # tests/launch/test_wandb_sync.py, without a network
}


def short(*agents, given=()):
  """Settings for a short run of any of these agents, except for the keys in `given`."""
  known = set.intersection(*(set(loader.fields_of(agent)) for agent in agents))
  settings = tiny.OVERRIDES if "reanalyse.schedule" in known else SHORT
  left_out = {text.partition("=")[0] for text in given} - {"learner.batch_size"}
  left_out |= {"run.mode", "evaluation.at_end"}
  keys = {text.partition("=")[0]: text for text in (*settings, *EVALUATION)}
  return [text for key, text in keys.items() if key in known - left_out]


def short_for(presets, overrides=()):
  return short(loader.load(presets, overrides).agent.name, given=overrides)


def _train(arguments):
  if "--help" in arguments:
    return [arguments]
  if "--resume" in arguments:
    return [[*arguments, "run.pause_at=0"]]
  parsed = multihost.parse(arguments)
  if parsed.coordinator is None:
    return [[*arguments, *short_for(parsed.config, parsed.overrides)]]
  with socket.socket() as reserved:
    reserved.bind(("localhost", 0))
    place = ["--coordinator", f"localhost:{reserved.getsockname()[1]}", "--num-processes", "2"]
  run = ["--config", "quickstart", "topology.actors=1", *short_for(["quickstart"])]
  return [[*place, "--process-id", str(number), *run] for number in range(2)]


def _plan(arguments):
  parsed = plan.parse(arguments)
  programs = [] if parsed.only else ["--only", "publish"]
  agent = loader.load(parsed.config, parsed.overrides).agent.name
  kept = [*parsed.overrides, "reanalyse.schedule"]  # it determines which programs there are
  return [arguments + programs + short(agent, given=kept)]


def _profile(arguments):
  parsed = profile_run.parse(arguments)
  fill = [] if parsed.fill is None else ["--fill", "60"]
  return [arguments + fill + short_for(parsed.config, parsed.overrides)]


def _suite(arguments):
  """One seed of a study's first game and variant."""
  parsed = suite._parser().parse_intermixed_args(arguments)
  runs = studies.runs_of(suite._study(parsed, arguments), parsed.dir or Path())
  settings = short(*{run.config.agent.name for run in runs})
  if not parsed.study:
    return [[*arguments, "--seeds", "1", *settings]]
  path = Path(parsed.study[0])
  described = yaml.safe_load(path.read_text())
  vary = {name: dict([*of.items()][:1]) for name, of in described["vary"].items()}
  vary["length"] = {"short": settings}  # last, so it takes precedence
  described |= {"vary": vary, "games": described["games"][:1], "seeds": 1}
  path.write_text(yaml.safe_dump(described, sort_keys=False))
  return [arguments]


def _population(arguments):
  path = Path(arguments[0])
  described = yaml.safe_load(path.read_text())
  settings = described.get("settings", [])
  settings = settings + short_for(described["config"])
  described |= {"settings": settings, "members": 2, "rounds": 2, "share": 0.5}
  path.write_text(yaml.safe_dump(described))
  return [arguments]


LAUNCHERS = {
  "launch/multihost.py": _train, "launch/plan.py": _plan, "launch/profile_run.py": _profile,
  "launch/suite.py": _suite, "launch/population.py": _population,
}  # fmt: skip


def _make(words):
  goal = next(word for word in words[1:] if "=" not in word)
  in_root = [*(word for word in words if not word.startswith("ARGS=")), "-C", str(ROOT)]
  if goal in DRY_RUN:
    return [[*in_root, "-n"]]
  if goal == "help":
    return [in_root]
  given = dict(word.split("=", 1) for word in words[1:] if "=" in word)
  settings = [given.get("ARGS", "")]
  if goal == "test":
    settings += ["--collect-only", "-q"]
  elif goal == "train":
    folder = tempfile.mkdtemp(dir=Path.cwd())
    preset = given.get("CONFIG", "quickstart")
    settings += [f"run.dir={folder}/run", *short_for([preset])]
  else:
    settings += ["--only publish", *short_for(["atari300k", "sweep", "gpu"])]
  return [[*in_root, f"ARGS={' '.join(settings)}"]]


def _lines(words):
  """The command lines to run at the same time."""
  if words[0] == "sbatch" and "--wrap" in words:
    return _lines(shlex.split(words[-1].replace("\\$SLURM_ARRAY_TASK_ID", "0")))
  if words[0] == "make":
    return _make(words)
  program, script, *arguments = words
  assert program in ("python", ".venv/bin/python")
  lines = LAUNCHERS.get(script, lambda arguments: [arguments])(arguments)
  return [[sys.executable, script, *line] for line in lines]


def _filled(words):
  """The words with paths for placeholders and patterns; trains a run if there is none yet."""
  needs = any("RUN_DIR" in word or "*" in word for word in words) and not os.path.exists("runs")
  if needs or (TRAINED in words and not os.path.exists(TRAINED)):
    new = ["--config", "quickstart", "run.pause_at=4"]  # to be resumed
    _run(_lines(["python", "launch/multihost.py", *new]), {})
  if any("RUN_DIR" in word for word in words):
    written = sorted(Path("runs").rglob("config.yaml"), key=lambda path: path.stat().st_mtime)
    run = [path.parent for path in written if Checkpoints(path.parent).steps()][-1]
    if "OTHER_RUN_DIR" in words:
      shutil.copytree(run, "other")
    names = {"OTHER_RUN_DIR": "other", "RUN_DIR@500": f"{run}@{max(Checkpoints(run).steps())}"}
    words = [names.get(word, word).replace("RUN_DIR", str(run)) for word in words]
  return [path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word])]


def _run(lines, variables):
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | variables
  started = [
    subprocess.Popen(
      line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for line in lines
  ]
  try:
    for line, process in zip(lines, started, strict=True):
      output, _ = process.communicate()
      assert process.returncode == 0, f"{line}\n{output[-3000:]}"
  finally:
    for process in started:
      process.terminate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page, tmp_path, monkeypatch):
  for name, text in pages.examples().items():
    (tmp_path / name).write_text(text)
  shutil.copytree(ROOT / "configs", tmp_path / "configs")
  for name in ("launch", "benchmarks"):
    (tmp_path / name).symlink_to(ROOT / name)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  for command in pages.commands(page):
    words = ["dqn" if word == "NAME" else word for word in command.words]
    if ELSEWHERE.isdisjoint(words):
      variables = dict(text.split("=", 1) for text in command.environment)
      _run(_lines(_filled(words)), variables)
      outputs = [b for a, b in itertools.pairwise(words) if a in ("--out", "--video", "--json")]
      assert all(map(os.path.exists, outputs)), words


def test_make_train_learns_catch(tmp_path):
  # Without what conftest.py sets for tests with tiny networks.
  environment = {name: x for name, x in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
  command = ["make", "train", f"ARGS=run.dir={tmp_path}/run"]
  subprocess.run(command, cwd=ROOT, env=environment, check=True)
  evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
  assert evaluation["mean"] >= 0.9  # all 10 seeds in benchmarks/results end at 1, the maximum
