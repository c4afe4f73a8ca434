"""Tests of the benchmarks of speed and of kills, with tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import actors
import chaos
import journals
import peers
import replay
import speed
from launch import multihost
from speedyzero_jax.config import loader

TINY = "agent=quick_agent", "env.frame_size=24", "actor.lanes=2"


@pytest.fixture
def results(tmp_path, monkeypatch):
  """Runs a benchmark; returns what it writes."""

  def run(program, *arguments):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [program.__file__, *arguments, "--out", str(out)])
    program.main()
    return json.loads(out.read_text())

  return run


def test_operations_of_a_replay_are_timed(results):
  sizes = "--slots", "1000", "--gather-slots", "500", "--batch", "16", "--lanes", "2"
  found = results(replay, *sizes, "--repeat", "1", "--side", "16")
  rows = [*(row for rows in found["operations"].values() for row in rows), found["gather"]]
  assert len(rows) == 10 and all(row["median_s"] > 0 for row in rows)


def test_pieces_of_training_are_timed(results):
  sizes = "--roots", "2", "--simulations", "2", "--batch", "2", "--repeat", "1", "--devices", "1"
  rows = results(speed, "--config", "atari_small", "--set", *TINY, *sizes)["rows"]
  names = ["train step", "search", "reanalysed batch", "value", "environment"]
  assert [row["piece"] for row in rows] == names
  assert all(row["per_second"] > 0 for row in rows)
  assert all(row["mfu"] == 0 for row in rows[:-1])  # this agent has no matrices


def test_a_side_of_a_comparison_prepares_and_does_its_work():
  side = peers.Side(Path(sys.executable), "ours.py")
  try:
    sizes = {"batch": 4, "transitions": 200}
    assert side.ask("prepare", name=0, piece="draw", arguments=sizes)["transitions"] >= 200
    assert side.ask("do", name=0)["seconds"] > 0
    with pytest.raises(peers.Missing, match="nothing"):
      side.ask("prepare", name=1, piece="nothing", arguments={})
  finally:
    side.close()


class StartedError(Exception):
  """A benchmark has started this command."""


def start(command, **_):
  raise StartedError(*command)


def test_runs_to_be_measured_have_settings_that_exist(tmp_path, monkeypatch):
  monkeypatch.setattr(subprocess, "run", start)
  monkeypatch.setattr(subprocess, "Popen", start)
  monkeypatch.setattr(sys, "argv", ["chaos.py"])
  starts = [chaos.main]
  for case in actors.cases([8], [1]):
    starts.append(lambda case=case: actors.run("Catch", case, 1000, tmp_path))
  assert len(starts) == 4
  for each in starts:
    with pytest.raises(StartedError) as started:
      each()
    parsed = multihost.parse(started.value.args[2:])
    loader.load(parsed.config, parsed.overrides)


def test_lost_and_repeated_slots_are_counted(tmp_path):
  for unit, path in enumerate(chaos.journals(tmp_path, 2)):
    path.parent.mkdir(exist_ok=True, parents=True)
    with journals.opened(path) as journal:
      for t in range(2):
        journal.append(journals.play_all(t))
        if unit or not t:
          journal.flush()
  rows, repeated = chaos.stored(tmp_path, 2)
  assert rows.keys() == {
    (unit, lane, t) for unit in range(2) for lane in range(journals.LANES) for t in range(1 + unit)
  }
  assert repeated == 0 and {size for size, _ in rows.values()} == {1}
  witness = tmp_path / "witness"
  witness.write_text("2 0 0\n3 2 1\n4 1 1\n")  # of actors 0, 1 and 2: units 0, 1 and 0
  assert chaos.missing(chaos.acknowledged(witness, 2), rows) == 1
  copy = "INSERT INTO segment SELECT NULL, lane, start, size, crc, slots, frames FROM segment"
  journals.edit(tmp_path / "journal.sqlite", copy)
  assert chaos.stored(tmp_path, 2)[1] == journals.LANES
