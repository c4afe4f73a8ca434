"""Tests of the report page, as text and in a real browser."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recorded
from launch import report
from speedyzero_jax.envs.scores import table
from speedyzero_jax.report import charts, page, scores
from speedyzero_jax.report.groups import methods
from speedyzero_jax.report.runs import read_runs

GAMES = ("Breakout", "Pong")
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"&\x00\x1b"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM and "/snap/" in os.path.realpath(CHROMIUM):
  CHROMIUM = None  # a snap does not see /tmp


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Two methods on two games with two seeds, runs in every bad state, and one of another game."""
  root, reference = tmp_path_factory.mktemp("runs"), table()
  made = []
  for rate, devices in ((0.2, 1), (1.6, 8)):
    for game in GAMES:
      for seed in range(2):
        human, chance = reference["human"][game], reference["random"][game]
        made.append(recorded.learning(
          root / f"{game}-{rate}-{seed}", game, seed, human, chance, speed=devices,
          settings={"learning_rate": rate}, starts=[recorded.start(devices=devices)],
        ))  # fmt: skip
  made.append(recorded.run(root / "old", game="Catch", agent="dqn", mean=1.0))
  (made[-1] / "starts.jsonl").unlink()
  made.append(recorded.run(
    root / EVIL.replace("/", "_").replace("\x00", ""), game=EVIL, agent=EVIL,
    settings={EVIL: EVIL}, starts=[recorded.start(device=EVIL, versions={EVIL: EVIL})],
    metrics=lambda i: {f"{EVIL}_per_second": i, f"time/{EVIL}": 1.0},
  ))  # fmt: skip
  made.append(recorded.run(root / "torn", seed=7))
  (made[-1] / "metrics.jsonl").write_text('{"step": 10}\n{"step": 1')
  (root / "empty").mkdir()
  return [*made, root / "empty"]


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
  path = tmp_path_factory.mktemp("page") / "report.html"
  assert report.main([*map(str, folders), "--out", str(path)]) == 0
  return path.read_text()


class Parsed(html.parser.HTMLParser):
  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text = set(), set(), []
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.tags.add(tag)
    self.attributes |= {name for name, _ in attributes}

  def handle_data(self, data):
    self.text.append(data)


def test_nothing_from_a_run_folder_becomes_markup(written):
  parsed = Parsed(written)
  assert EVIL.replace("\x00", "") in "".join(parsed.text).replace("\x00", "")
  assert not parsed.tags & {"script", "img", "iframe", "object", "a"}
  assert not {name for name in parsed.attributes if name.startswith("on") or name == "src"}
  assert not re.search(r"https?://|url\(|@import", written)


def test_the_page_says_what_the_runs_did(written):
  text = " ".join(Parsed(written).text)
  for expected in (
    "unfinished: learner step 10 of 30", "no starts.jsonl", "no run here",  # problems
    "learning_rate=0.2", "DIAMOND (100k)", "± ", "charts/agent_steps_per_second",
    "replay/target_age_max", "8 x NVIDIA H200", "0c30b09", "optim.learning_rate",
  ):  # fmt: skip
    assert expected in text
  assert "charts/episode_length" not in text


def test_the_tables_of_scores_and_of_runs(tmp_path):
  """Three seeds of Pong with 3, 6 and 9 minutes and 4 devices; the last is not evaluated."""
  for seed, (mean, final) in enumerate([(-2.0, 7.0), (4.0, 9.0), (None, 5.0)]):
    recorded.run(
      tmp_path / f"{seed}", seed=seed, returns=(1.0, 2.0, final), mean=mean,
      starts=[recorded.start(devices=4)], metrics=lambda i, slow=seed + 1: {"time": 60 * i * slow},
    )  # fmt: skip
  runs = read_runs(sorted(tmp_path.iterdir()))
  compared = methods(runs)
  heads, (row,) = scores.by_game(compared)
  assert dict(zip(heads, row, strict=True)) == {
    "game": "Pong", "method": compared[0].name, "evaluated": "2 of 3", "episodes": "32",
    "mean ± stderr": "1 ± 3", "lowest": "-2", "highest": "4", "training return": "7",
    "minutes": "6", "device-minutes": "24",
  }  # fmt: skip
  cells = [[cell.text for cell in row] for row in page._runs(runs).iter("tr")]
  first, second = (dict(zip(cells[0], row, strict=True)) for row in cells[2:])
  assert first == {
    "run": str(tmp_path / "1"), "game": "Pong", "seed": "1", "learner steps": "30",
    "agent steps": "120", "minutes": "6", "device-minutes": "24", "training return": "9",
    "evaluation": "4", "episodes": "32", "at step": "30",
    "human-normalized": f"{(4 + 20.7) / (14.6 + 20.7):.3g}",
  }  # fmt: skip
  assert (second["minutes"], second["evaluation"], second["episodes"]) == ("9", "-", "-")


def test_scores_are_over_the_games_that_all_methods_have(tmp_path):
  """Seeds that play as random, as a human, and half-way; both methods have Pong and Qbert."""
  levels = {("Pong", 0): 0.0, ("Pong", 1): 1.0, ("Qbert", 0): 0.5, ("Qbert", 1): 0.5,
            ("Freeway", 0): 9.0}  # fmt: skip
  for rate in (1, 2):
    for (game, seed), level in levels.items():
      low, high = table()["random"][game], table()["human"][game]
      reached = low + (high - low) * level
      if game != "Freeway" or rate == 1:
        recorded.run(tmp_path / f"{rate}{game}{seed}", game=game, seed=seed, mean=reached,
                     returns=(low, reached), settings={"learning_rate": rate})  # fmt: skip
  found = methods(read_runs(sorted(tmp_path.iterdir())))
  games = scores.common_games(found)
  assert games == ["Pong", "Qbert"]
  assert page._left_out(found, games) == f", without Freeway (not evaluated: {found[1].name})"
  _, (first, second, efficientzero, *_) = scores.aggregate_table(found, games)
  # Resampled Pong has a mean of 0, 0.5 or 1. The quarters without the extremes are Qbert's.
  assert first[1:4] == second[1:4] == ["4", "0.500 [0.250, 0.750]", "0.500 [0.250, 0.750]"]
  assert first[4].startswith("0.500 [") and first[5] == "0.500 [0.250, 0.750]"
  pong, qbert = (20 + 20.7) / (14.6 + 20.7), (13782 - 163.9) / (13455 - 163.9)
  assert efficientzero[2] == f"{(pong + qbert) / 2:.3f}"
  metric = scores.training_metric(found, games)
  assert metric == "charts/episode_return"  # there are no evaluations on the way
  line, _ = scores.training_lines(found, games, metric, "minutes")
  assert line.x.tolist() == [1, 2] and line.y == pytest.approx([0, 0.5])
  assert scores.published_table(found)[1][0][3].text == "266.4"  # Freeway: 9 times human


def test_methods_without_a_game_in_common_are_not_aggregated(tmp_path):
  for game, rate in (("Pong", 1), ("Qbert", 2)):
    recorded.run(tmp_path / game, game=game, settings={"learning_rate": rate}, mean=9.0)
  path = tmp_path / "report.html"
  assert report.main([*map(str, sorted(tmp_path.iterdir())), "--out", str(path)]) == 0
  assert "no evaluated game in common" in path.read_text()


def test_where_the_time_goes(tmp_path):
  """Rows are 10 learner steps and a minute apart: one second per step is a sixth of the time."""
  runs = read_runs([recorded.run(tmp_path / "a", metrics=lambda i: {"time/train": 1.0})])
  assert page._time_shares(runs) == pytest.approx({"until the first line": 1 / 3, "train": 1 / 6})


def test_a_page_of_runs_without_any_number(tmp_path):
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
  (tmp_path / "a" / "config.yaml").write_text("env: {game: Pong}\nrun: {seed: 0}")
  (tmp_path / "b" / "metrics.jsonl").write_text("")
  text = page.render(read_runs([tmp_path / "a", tmp_path / "b"])).decode()
  assert "metrics.jsonl is empty" in text and "<svg" not in text


def test_a_page_that_cannot_be_written_is_an_error(folders, tmp_path, capsys):
  assert report.main([str(folders[0]), "--out", str(tmp_path / "no" / "page.html")]) == 1
  assert "no/page.html" in capsys.readouterr().err


numbers = st.floats(-1e300, 1e300)


@given(numbers, numbers, st.integers(3, 6))
def test_ticks_are_few_and_enclose_what_they_are_for(a, b, about):
  low, high = sorted((a, b))
  found = charts.ticks(low, high, about)
  assert 2 <= len(found) <= about + 3 and found == sorted(set(found))
  slack = 1e-6 * max(abs(low), abs(high)) + 1e-289  # which no chart shows
  assert found[0] <= low + slack and high - slack <= found[-1]


def test_ticks_are_round():
  assert charts.ticks(0, 97, 5) == [0, 20, 40, 60, 80, 100]
  assert charts.ticks(-20.7, 18, 4) == [-30, -20, -10, 0, 10, 20]
  assert [charts.tick_text(x) for x in (0, 0.25, 1500, -20, 2e6)] == [
    "0",
    "0.25",
    "1.5k",
    "-20",
    "2M",
  ]


# --- in a browser

# A window of each width shows the page; every choice of the x axis is made and measured in it.
HARNESS = """<!DOCTYPE html><body><script>
const text = PAGE, found = {};
console.log("measuring");
let open = 2;
for (const width of [1400, 390]) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.onload = () => {
    const inside = frame.contentDocument, root = inside.documentElement, axes = [];
    for (const choice of inside.querySelectorAll("input[type=radio]")) {
      choice.click();
      const boxes = [...inside.querySelectorAll("svg")].map(x => x.getBoundingClientRect());
      const shown = boxes.filter(box => box.width > 0);
      axes.push({shown: shown.length, all: boxes.length, overflow: root.scrollWidth - width,
                 narrowest: Math.min(...shown.map(box => box.width)),
                 lowest: Math.min(...shown.map(box => box.height)),
                 rightmost: Math.max(...shown.map(box => box.right))});
    }
    found[width] = axes;
    if (--open == 0) {
      const out = document.createElement("pre");
      out.textContent = JSON.stringify(found);
      document.body.replaceChildren(out);
    }
  };
  frame.srcdoc = text;
  document.body.append(frame);
}
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
def test_a_browser_shows_it_on_wide_and_narrow_windows(written, tmp_path):
  harness = tmp_path / "harness.html"
  harness.write_text(HARNESS.replace("PAGE", json.dumps(written).replace("</", "<\\/")))
  command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=10000", harness.as_uri()]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  said = re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)
  assert said == ["measuring"]  # so errors would be seen, too
  measured = json.loads(re.search(r"<pre>(.*?)</pre>", done.stdout)[1])
  assert set(measured) == {"1400", "390"}
  for width, axes in measured.items():
    assert len(axes) == 3
    for axis in axes:
      assert axis["overflow"] <= 0 and axis["rightmost"] <= int(width)
      assert axis["narrowest"] > 250 and axis["lowest"] > 140
    # Each chart is shown over one axis; the profile is over scores; one run has no device-minutes.
    steps, minutes, device_minutes = (axis["shown"] for axis in axes)
    assert steps == minutes > device_minutes > 10
    assert axes[0]["all"] == steps + minutes + device_minutes - 2
