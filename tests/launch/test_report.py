"""The report reads any run folder, whatever its state, and its summaries are right."""

import importlib.util
import io
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "report.py"


def _load():
  spec = importlib.util.spec_from_file_location("report", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  sys.modules["report"] = module
  spec.loader.exec_module(module)
  return module


report = _load()


def make_run(path, *, game="Pong", seed=0, returns=(1.0, 2.0, 3.0), mean=None, rate=0.2, human=0.5):
  path.mkdir()
  config = {
    "env": {"game": game},
    "optim": {"learning_rate": rate},
    "run": {"seed": seed, "dir": str(path)},
  }
  (path / "config.yaml").write_text(yaml.safe_dump(config))
  rows = [
    {"step": 10 * i, "env_steps": 40 * i, "time": 60.0 * i, "charts/episode_return": value}
    for i, value in enumerate(returns, start=1)
  ]
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  if mean is not None:
    evaluation = {
      "game": game,
      "step": 30,
      "mean": mean,
      "median": mean,
      "std": 1.5,
      "human_normalised": human,
    }
    (path / "evaluation.json").write_text(
      json.dumps(evaluation | {"returns": [mean], "episodes": 1})
    )
  return path


def table(out):
  """The tab-separated tables as a list of dicts each."""
  tables = []
  for block in out.strip("\n").split("\n\n"):
    heads, *rows = [line.split("\t") for line in block.splitlines()]
    tables.append([dict(zip(heads, row, strict=True)) for row in rows])
  return tables


def test_one_row_says_what_a_run_did(tmp_path, capsys):
  make_run(tmp_path / "a", seed=3, mean=12.5, returns=(1.0, None, 9.0, None))
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
    "human": "0.5",
    "min": "4.0",
    "notes": "",
  }


def test_seeds_are_summarised_and_other_differences_are_not(tmp_path, capsys):
  scores = [10.0, 20.0, 30.0, 100.0]
  paths = [make_run(tmp_path / f"s{i}", seed=i, mean=score) for i, score in enumerate(scores)]
  paths += [make_run(tmp_path / "rate", seed=9, mean=1.0, rate=0.1)]
  paths += [
    make_run(tmp_path / f"g{i}", game="Qbert", seed=i, returns=(0.0, 4.0 + 2 * i)) for i in range(2)
  ]
  assert report.main([*map(str, paths), "--json", str(tmp_path / "out.json")]) == 0
  runs, groups = table(capsys.readouterr().out)
  assert len(runs) == 7
  pong, qbert = groups
  stderr = statistics.stdev(scores) / math.sqrt(4)  # 20.4
  assert (pong["game"], pong["seeds"], pong["return of"]) == ("Pong", "0,1,2,3", "evaluation")
  assert (pong["mean ± stderr"], pong["IQM"], pong["human"]) == (f"40 ± {stderr:.1f}", "25", "0.5")
  assert (qbert["return of"], qbert["mean ± stderr"], qbert["human"]) == ("training", "5 ± 1", "-")
  written = json.loads((tmp_path / "out.json").read_text())
  assert [run["evaluation_mean"] for run in written["runs"]] == [*scores, 1.0, None, None]
  assert written["groups"][0]["iqm"] == 25.0 and written["groups"][0]["stderr"] == pytest.approx(
    stderr
  )


@pytest.mark.parametrize(
  ("name", "content", "note"),
  [
    ("config.yaml", None, "no config.yaml"),
    ("config.yaml", b"a: [", "config.yaml is damaged"),
    ("config.yaml", b"- 1", "config.yaml is damaged"),
    ("config.yaml", b"env: 1\nrun: {}", "config.yaml is damaged"),
    ("config.yaml", b"\xff\xff", "config.yaml is damaged"),
    ("metrics.jsonl", None, "no metrics.jsonl"),
    ("metrics.jsonl", b"", "metrics.jsonl is empty"),
    ("metrics.jsonl", b'{"step":1}\nxx\n{"step":2}\n{"st', "metrics.jsonl: 1 damaged line skipped"),
    ("evaluation.json", None, "no evaluation.json"),
    ("evaluation.json", b'{"mean": 1', "evaluation.json is damaged"),
    ("evaluation.json", b"[1]", "evaluation.json is damaged"),
    ("evaluation.json", b'{"mean": "high"}', "evaluation.json is damaged"),
  ],
)
def test_a_damaged_run_says_so_in_its_row(tmp_path, capsys, name, content, note):
  good, bad = make_run(tmp_path / "good", mean=1.0), make_run(tmp_path / "bad", seed=1, mean=2.0)
  (bad / name).unlink()
  if content is not None:
    (bad / name).write_bytes(content)
  assert report.main([str(good), str(bad)]) == 0
  first, second = table(capsys.readouterr().out)[0]
  assert second["notes"] == note and first["notes"] == ""
  assert second["game"] == "Pong"  # evaluation.json says it, too


def test_an_unreadable_file_says_so(tmp_path, capsys):
  run = make_run(tmp_path / "a", mean=1.0)
  (run / "metrics.jsonl").unlink()
  (run / "metrics.jsonl").mkdir()
  assert report.main([str(run)]) == 0
  assert "metrics.jsonl: Is a directory" in capsys.readouterr().out


def test_folders_without_a_run(tmp_path, capsys):
  make_run(tmp_path / "a", mean=1.0)
  (tmp_path / "empty").mkdir()
  assert report.main([str(tmp_path / "empty"), str(tmp_path / "a"), str(tmp_path / "absent")]) == 0
  rows = table(capsys.readouterr().out)[0]
  assert [row["notes"] for row in rows] == ["no run here", "", "no run here"]
  assert report.main([str(tmp_path / "empty"), str(tmp_path / "absent")]) == 2
  assert "no run in" in capsys.readouterr().err


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_interquartile_mean(scores):
  quarter = len(scores) // 4
  middle = sorted(scores)[quarter:][: len(scores) - 2 * quarter]
  assert report.interquartile_mean(scores) == pytest.approx(sum(middle) / len(middle), abs=1e-6)
  assert min(scores) - 1e-6 <= report.interquartile_mean(scores) <= max(scores) + 1e-6


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100))
def test_sparkline_keeps_order(values):
  line = report.sparkline(values)
  assert len(line) == min(len(values), 16) and set(line) <= set("▁▂▃▄▅▆▇█")
  if len(values) <= 16:
    for a, b in zip(range(len(values)), range(1, len(values)), strict=False):
      assert values[a] <= values[b] or line[a] >= line[b]
      assert values[a] >= values[b] or line[a] <= line[b]


def test_sparkline_examples():
  assert (
    report.sparkline([]) == "" and report.sparkline([5.0]) == "▁" == report.sparkline([5.0, 5.0])[0]
  )
  assert report.sparkline(list(range(8))) == "▁▂▃▄▅▆▇█"
  assert report.sparkline([0, 0, 7, 7], width=2) == "▁█"


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_drawn_tables_that_fit(tmp_path, width):
  paths = [
    make_run(tmp_path / f"atari100k-CrazyClimber-s{i}", game="CrazyClimber", seed=i, mean=1e5)
    for i in range(2)
  ]
  (paths[1] / "config.yaml").write_text("- [bold]")
  runs = [report.read_run(path) for path in paths]
  file = io.StringIO()
  report.show(
    runs,
    report.group_runs([runs[0], runs[0]]),
    Console(file=file, width=width, force_terminal=True),
  )
  text = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
  assert (
    text.count("CrazyClimber") >= 3
    and "100,000 ± 1.5" in text
    and "100,000 ± 0" in text
    and "\t" not in text
  )
  assert ("▁" in text) == (width == 120)
  assert f"{paths[1]}: config.yaml is damaged" in text
  assert all(len(line.rstrip()) <= width for line in text.splitlines() if "damaged" not in line)


def test_the_script_runs_on_its_own_and_needs_no_jax(tmp_path):
  make_run(tmp_path / "a", mean=1.0)
  code = (
    "import runpy, sys; sys.modules['jax'] = None\n"
    f"sys.argv = ['report.py', {str(tmp_path / 'a')!r}]\n"
    f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
  )
  result = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert result.returncode == 0 and "Pong" in result.stdout, result.stderr
