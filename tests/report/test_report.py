"""Tests of reading run folders in any state, and of the report's summaries."""

import io
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import recorded
from launch import report
from speedyzero_jax.report import curves, page, terminal
from speedyzero_jax.report.groups import differences, methods
from speedyzero_jax.report.runs import read_run

ROOT = pathlib.Path(__file__).parents[2]


def table(out):
  """The tab-separated tables as a list of dicts each."""
  tables = []
  for block in out.strip("\n").split("\n\n"):
    heads, *rows = [line.split("\t") for line in block.splitlines()]
    tables.append([dict(zip(heads, row, strict=True)) for row in rows])
  return tables


def test_one_row_says_what_a_run_did(tmp_path, capsys):
  recorded.run(tmp_path / "a", seed=3, mean=12.5, returns=(1.0, None, 9.0, None))
  assert report.main([str(tmp_path / "a")]) == 0
  (((row,),)) = table(capsys.readouterr().out)
  assert row == {
    "run": str(tmp_path / "a"),
    "game": "Pong",
    "seed": "3",
    "steps": "40",
    "env steps": "160",
    "return": "9",
    "curve": "▁█",
    "evaluation": "12.5 ± 1.5",
    "human": "0.941",
    "min": "4.0",
    "notes": "",
  }


def test_seeds_are_summarized_and_other_differences_are_not(tmp_path, capsys):
  means = [10.0, 20.0, 30.0, 100.0]
  paths = [recorded.run(tmp_path / f"s{i}", seed=i, mean=mean) for i, mean in enumerate(means)]
  paths += [recorded.run(tmp_path / "rate", seed=9, mean=1.0, settings={"learning_rate": 0.1})]
  paths += [
    recorded.run(tmp_path / f"g{i}", game="Qbert", seed=i, returns=(0.0, 4.0 + 2 * i))
    for i in range(2)
  ]
  assert report.main([*map(str, paths), "--json", str(tmp_path / "out.json")]) == 0
  runs, groups = table(capsys.readouterr().out)
  assert len(runs) == 7
  stderr = statistics.stdev(means) / math.sqrt(4)  # 20.4
  found = [
    [row[name] for name in ("game", "evaluated", "mean ± stderr", "training return")]
    for row in groups
  ]
  assert sorted(found) == [
    ["Pong", "1 of 1", "1", "3"],
    ["Pong", "4 of 4", f"40 ± {stderr:.1f}", "3"],
    ["Qbert", "0 of 2", "-", "5"],
  ]
  written = json.loads((tmp_path / "out.json").read_text())
  assert [run["evaluation_mean"] for run in written["runs"]] == [*means, 1.0, None, None]


@pytest.mark.parametrize(
  ("name", "content", "note"),
  [
    ("config.yaml", None, "no config.yaml"),
    ("config.yaml", b"a: [", "config.yaml is damaged"),
    ("config.yaml", b"- 1", "config.yaml is damaged"),
    ("config.yaml", b"env: 1\nrun: {}", "config.yaml is damaged"),
    ("config.yaml", b"\xff\xff", "config.yaml is damaged"),
    ("config.yaml", b"env: {game: Pong}\nrun: {seed: .inf}", "config.yaml is damaged"),
    ("metrics.jsonl", None, "no metrics.jsonl"),
    ("metrics.jsonl", b'{"step":1%s}\n' % (b"0" * 400), "metrics.jsonl is empty"),
    ("metrics.jsonl", b"", "metrics.jsonl is empty"),
    (
      "metrics.jsonl",
      b'{"step":30}\nxx\n{"step":31}\n{"st',
      "metrics.jsonl: 1 damaged line skipped",
    ),
    ("evaluation.json", None, "no evaluation.json"),
    ("evaluation.json", b'{"mean": 1', "evaluation.json is damaged"),
    ("evaluation.json", b"[1]", "evaluation.json is damaged"),
    ("evaluation.json", b'{"mean": "high"}', "evaluation.json is damaged"),
    (
      "evaluation.json",
      b'{"mean": NaN, "std": 1, "step": 1, "episodes": 1}',
      "evaluation.json is damaged",
    ),
    ("starts.jsonl", None, "no starts.jsonl"),
    (
      "starts.jsonl",
      b'{"step": 0, "devices": "many", "versions": {}}\n',
      "starts.jsonl is damaged",
    ),
  ],
)
def test_a_damaged_run_says_so_in_its_row(tmp_path, capsys, name, content, note):
  good, bad = (
    recorded.run(tmp_path / "good", mean=1.0),
    recorded.run(tmp_path / "bad", seed=1, mean=2.0),
  )
  (bad / name).unlink()
  if content is not None:
    (bad / name).write_bytes(content)
  assert report.main([str(good), str(bad), "--out", str(tmp_path / "page.html")]) == 0
  first, second = table(capsys.readouterr().out)[0]
  assert second["notes"] == note and first["notes"] == ""
  assert second["game"] == "Pong"  # evaluation.json says it, too


def test_an_unreadable_file_says_so(tmp_path, capsys):
  run = recorded.run(tmp_path / "a", mean=1.0)
  (run / "metrics.jsonl").unlink()
  (run / "metrics.jsonl").mkdir()
  assert report.main([str(run)]) == 0
  assert "metrics.jsonl: Is a directory" in capsys.readouterr().out


def test_a_folder_of_runs_stands_for_them(tmp_path, capsys):
  runs = [recorded.run(tmp_path / "study" / name, mean=1.0) for name in "abc"]
  (tmp_path / "study" / "a.log").touch()
  (runs[2] / "config.yaml").unlink()
  assert report.main([str(tmp_path / "study"), str(runs[1])]) == 0
  rows = table(capsys.readouterr().out)[0]
  assert [row["run"] for row in rows] == [str(path) for path in runs]
  assert "no config.yaml" in rows[2]["notes"]


def test_folders_without_a_run(tmp_path, capsys):
  recorded.run(tmp_path / "a", mean=1.0)
  (tmp_path / "empty").mkdir()
  assert report.main([str(tmp_path / "empty"), str(tmp_path / "a"), str(tmp_path / "absent")]) == 0
  rows = table(capsys.readouterr().out)[0]
  assert [row["notes"] for row in rows] == ["no run here", "", "no run here"]
  assert report.main([str(tmp_path / "empty"), str(tmp_path / "absent")]) == 2
  assert "no run in" in capsys.readouterr().err


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100))
def test_sparkline_keeps_order(values):
  line = terminal.sparkline(values)
  assert len(line) == min(len(values), 16) and set(line) <= set("▁▂▃▄▅▆▇█")
  if len(values) <= 16:
    for a, b in zip(range(len(values)), range(1, len(values)), strict=False):
      assert values[a] <= values[b] or line[a] >= line[b]
      assert values[a] >= values[b] or line[a] <= line[b]


def test_sparkline_examples():
  assert (
    terminal.sparkline([]) == ""
    and terminal.sparkline([5.0]) == "▁" == terminal.sparkline([5.0, 5.0])[0]
  )
  assert terminal.sparkline(list(range(8))) == "▁▂▃▄▅▆▇█"
  assert terminal.sparkline([0, 0, 7, 7], width=2) == "▁█"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("game", ["CrazyClimber", "gymnasium:my_module.environments:Corridor-v1"])
def test_a_terminal_gets_drawn_tables_that_fit(tmp_path, width, game):
  paths = [recorded.run(tmp_path / f"run-{i}", game=game, seed=i, mean=1e5) for i in range(3)]
  (paths[2] / "config.yaml").write_text("- [bold]")
  runs = [read_run(path) for path in paths]
  file = io.StringIO()
  terminal.show(runs, Console(file=file, width=width, force_terminal=True))
  text = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
  assert "100,000 ± 1.5" in text and "100,000 ± 0" in text and "\t" not in text
  assert re.search(r" run +game .* return ", text) and re.search(r" game +method ", text)
  assert ("▁" in text) == (width == 120)
  assert f"{paths[2]}: config.yaml is damaged" in text
  assert all(len(line.rstrip()) <= width for line in text.splitlines() if "damaged" not in line)


def test_the_script_runs_on_its_own_and_needs_no_jax(tmp_path):
  for seed in (0, 1):
    recorded.run(tmp_path / f"a{seed}", seed=seed, mean=1.0)
  code = (
    "import runpy, sys; sys.modules['jax'] = None\n"
    f"sys.argv = ['report.py', {str(tmp_path)!r}]\n"
    f"runpy.run_path('launch/report.py', run_name='__main__')"
  )
  result = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
    env=os.environ | {"PYTHONIOENCODING": "ascii"},
  )  # fmt: skip
  assert result.returncode == 0 and "1 ? 0" in result.stdout, result.stderr


def test_a_folder_without_permission_does_not_hide_the_others(tmp_path, monkeypatch):
  """Files in it can't be examined; root may, in a real one."""
  whole, locked = (recorded.run(tmp_path / name, mean=1.0) for name in ("whole", "locked"))
  stat = os.stat

  def refuse(path, **options):
    if pathlib.Path(path).parent == locked:
      raise PermissionError(13, "Permission denied")
    return stat(path, **options)

  monkeypatch.setattr(os, "stat", refuse)
  assert [run.problems for run in report.read_runs([whole, locked])] == [[], ["no run here"]]


def test_runs_that_ended_early_or_repeat_another_say_so(tmp_path):
  whole = recorded.run(tmp_path / "whole", mean=1.0)
  torn = recorded.run(tmp_path / "torn", mean=1.0, metrics=lambda i: {"checkpoint/step": 10 * i})
  rows = (torn / "metrics.jsonl").read_text().splitlines(keepends=True)
  (torn / "metrics.jsonl").write_text("".join(rows[:2]))
  evaluation = json.loads((torn / "evaluation.json").read_text())
  (torn / "evaluation.json").write_text(json.dumps(evaluation | {"step": 10}))
  runs = report.read_runs([whole, torn, tmp_path / "torn" / ".." / "torn"])
  assert [run.problems for run in runs] == [
    [],
    [
      "unfinished: learner step 20 of 30",
      "evaluated at learner step 10, not at the last checkpoint (20)",
      f"repeats the seed of {whole}: not an independent run, not counted",
    ],
  ]
  other = recorded.run(tmp_path / "other", seed=1, mean=3.0)
  begun = recorded.run(tmp_path / "begun", seed=1)
  torn_first = report.read_runs([torn, begun, whole, other])
  (method,) = methods(torn_first)
  assert [run.path for run in method.runs] == [str(whole), str(other)]


def test_scores_with_exploration_are_marked(tmp_path, capsys):
  for name, explore in (("greedy", False), ("sampled", True)):
    file = recorded.run(tmp_path / name, mean=1.0) / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"explore": explore}))
  assert report.main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
  rows, *_ = table(capsys.readouterr().out)
  assert ["explored" in row["evaluation"] for row in rows] == [False, True]
  assert "32, explored" in (tmp_path / "page.html").read_text()


def test_seeds_without_an_evaluation_belong_to_the_evaluated_ones(tmp_path):
  for seed, mean in ((0, 1.0), (1, None)):
    folder = recorded.run(tmp_path / f"a-Catch-s{seed}", seed=seed, mean=mean)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["evaluation"] = {"explore": True}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if mean is not None:
      file = folder / "evaluation.json"
      file.write_text(json.dumps(json.loads(file.read_text()) | {"explore": True}))
  assert [len(method.runs) for method in methods(report.read_runs([tmp_path]))] == [2]


@pytest.mark.parametrize(
  ("starts", "minutes"),  # rows have steps 10, 20 and 30, and a minute each
  [
    ([(0, 2)], [2, 4, 6]),
    ([(0, 2), (20, 4)], [2, 4, 8]),
    ([(0, 1), (20, 8), (10, 3)], [1, 4, 7]),  # the last start went back behind the one before
  ],
)
def test_device_minutes_follow_the_devices_of_each_start(tmp_path, starts, minutes):
  lines = [recorded.start(step, devices) for step, devices in starts]
  run = read_run(recorded.run(tmp_path / "a", starts=lines))
  assert [seconds / 60 for seconds in run.device_seconds_by_row] == minutes
  assert run.device_seconds == 60 * minutes[-1]


def test_methods_are_runs_that_differ_in_game_and_seed_only(tmp_path):
  paths = [
    recorded.run(tmp_path / f"{game}{seed}{rate}", game=game, seed=seed, agent=agent,
                 settings={"learning_rate": rate, "name": "sgd"})
    for game, seed, rate, agent in [("Pong", 0, 1, "dqn"), ("Qbert", 1, 1, "dqn"),
                                    ("Pong", 0, 2, "dqn"), ("Pong", 0, 3, "ppo")]
  ]  # fmt: skip
  found = methods(report.read_runs(paths))
  assert [(method.name, list(method.games())) for method in found] == [
    ("A: dqn learning_rate=1", ["Pong", "Qbert"]),
    ("B: dqn learning_rate=2", ["Pong"]),
    ("C: ppo", ["Pong"]),
  ]


def test_methods_are_named_as_their_folders(tmp_path):
  paths = [
    recorded.run(tmp_path / f"{name}-{game.replace('/', '-')}-s{seed}", game=game, seed=seed,
                 agent="dqn", settings={"learning_rate": rate, "steps": rate, "size": rate})
    for name, rate in (("slow", 1), ("fast-2", 2)) for game in ("Pong", "ALE/Pong-v5")
    for seed in (0, 1)
  ]  # fmt: skip
  assert [method.name for method in methods(report.read_runs(paths))] == ["A: slow", "B: fast-2"]


def test_settings_of_single_games_do_not_divide_a_method(tmp_path):
  """In one folder runs of a name are one method, unless they differ within a game."""
  paths = [
    recorded.run(tmp_path / folder / f"{name}-{game}-s{seed}", game=game, seed=seed,
                 settings={"learning_rate": rate, "size": size})
    for folder, name, game, seed, rate, size in [
      ("a", "x", "Pong", 0, 1, 0), ("a", "x", "Pong", 1, 1, 0), ("a", "x", "Qbert", 0, 2, 0),
      ("a", "y", "Pong", 0, 1, 5), ("a", "y", "Qbert", 0, 2, 5), ("a", "y", "Qbert", 1, 3, 5),
      ("b", "x", "Krull", 0, 4, 0),
    ]
  ]  # fmt: skip
  found = methods(report.read_runs(paths))
  assert [[len(runs) for runs in method.games().values()] for method in found] == [
    [2, 1], [1, 1], [1], [1],
  ]  # fmt: skip
  assert differences([method.runs for method in found[:2]]) == {"optim.size": [0, 5]}
  assert differences([method.runs for method in found[1:3]])["optim.learning_rate"] == [2, 3]
  note = "Settings that differ between games: optim.learning_rate. "
  assert note in page.render([run for method in found[:2] for run in method.runs]).decode()


def test_a_band_ends_where_the_first_seed_ends(tmp_path):
  """Row i has minute i; evaluations appear one row late and stay until the next."""

  def evaluated(i):
    last = i - 1 - (i - 1) % 2
    return {"evaluation/step": 10 * last, "evaluation/mean": float(last)}

  runs = [
    read_run(recorded.run(tmp_path / name, returns=returns, metrics=evaluated))
    for name, returns in (("long", (0.0, 2.0, 4.0, 6.0)), ("short", (2.0, 8.0)))
  ]
  *thin, mean = curves.lines(runs, "charts/episode_return", "minutes", 0, "x", single=True)
  assert [len(line.x) for line in thin] == [4, 2]
  at_end = {name: getattr(mean, name)[[0, -1]].tolist() for name in ("x", "y", "low", "high")}
  assert at_end == {"x": [1, 2], "y": [1, 5], "low": [0, 2], "high": [2, 8]}
  x, y = curves.curve(runs[0], "evaluation/mean", "agent steps")
  assert (x.tolist(), y.tolist()) == ([40, 80], [0, 2])
  assert runs[0].summary()["evaluations"] == [[0, 0.0, None], [20, 2.0, None]]
  again = {**runs[0].rows[-1], "evaluation/mean": 9.0}  # the run was resumed at its end
  runs[0].rows.append(again)
  assert curves.curve(runs[0], "evaluation/mean", "agent steps")[1].tolist() == [0, 9]
  assert curves.curve(runs[0], "no/metric", "minutes") is None


def test_runs_of_one_point_have_no_part_in_the_mean(tmp_path):
  runs = [
    read_run(recorded.run(tmp_path / f"{seed}", seed=seed, returns=returns))
    for seed, returns in enumerate([(1.0, 3.0), (3.0, 5.0), (9.0,)])
  ]
  (mean,) = curves.lines(runs, "charts/episode_return", "minutes", 0, "x", single=False)
  assert mean.label == "x: mean of 2 runs" and mean.y[[0, -1]].tolist() == [2, 4]
  (alone,) = curves.lines(runs[1:], "charts/episode_return", "minutes", 0, "x", single=False)
  assert alone.label == f"x: {runs[1].path}" and alone.y.tolist() == [3, 5]
  (point,) = curves.lines([runs[2]] * 2, "charts/episode_return", "minutes", 0, "x", single=False)
  assert point.y.tolist() == [9]
  each = [curves.curve(run, "charts/episode_return", "minutes") for run in runs]
  aggregate = curves.aggregate_line({"Pong": each}, 0, "x")
  assert aggregate.y[[0, -1]].tolist() == [2, 4]


def test_files_are_written_before_a_closed_pipe_ends_the_process(tmp_path):
  for seed in range(2):
    recorded.run(tmp_path / f"{seed}", seed=seed, mean=1.0)
  out = tmp_path / "out.json"
  command = [sys.executable, "launch/report.py", str(tmp_path), "--json", str(out)]
  read, write = os.pipe()
  os.close(read)
  environment = os.environ | {"PYTHONUNBUFFERED": "1"}
  done = subprocess.run(command, cwd=ROOT, stdout=write, timeout=60, env=environment)
  os.close(write)
  assert done.returncode == -signal.SIGPIPE
  assert len(json.loads(out.read_text())["runs"]) == 2


def test_settings_that_affect_no_result_do_not_separate_seeds(tmp_path):
  runs = [recorded.run(tmp_path / str(seed), seed=seed, mean=1.0) for seed in range(2)]
  config = yaml.safe_load((runs[0] / "config.yaml").read_text())
  config["run"] |= {"pause_at": 10, "keep_checkpoints": 3}
  (runs[0] / "config.yaml").write_text(yaml.safe_dump(config))
  (method,) = methods(report.read_runs(runs))
  assert [len(group) for group in method.games().values()] == [2]
