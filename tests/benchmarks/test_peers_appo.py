"""Tests of how benchmarks/peers_appo.py watches a run and summarizes its curve."""

import sys

import pytest

import peers_appo

PROGRAM = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1], "run")
folder.mkdir()
with (folder / "metrics.jsonl").open("w", buffering=1) as file:
  for step in range(3):
    file.write(json.dumps({"env_steps": 100 * step, "charts/episode_return": 10 * step}) + "\\n")
  file.write('{"env_steps": 3')
  file.flush()
  time.sleep(600)
"""


@pytest.mark.parametrize("seconds, threshold", [(600, 20), (2, 1000)])
def test_a_run_ends_at_the_threshold_or_the_limit(tmp_path, seconds, threshold):
  words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
  curve = peers_appo.watch(words, tmp_path, seconds, threshold)
  assert [point[1:] for point in curve] == [[0, 0], [100, 10], [200, 20]]


def test_a_failed_run_is_missing_with_its_last_words(tmp_path):
  with pytest.raises(peers_appo.Missing, match="no such game"):
    peers_appo.watch([sys.executable, "-c", "exit('no such game')"], tmp_path, 1, 1)


def test_rates_are_of_the_last_two_thirds_and_of_all_seconds():
  curve = [[10.0, 0, 1.0], [20.0, 100, 2.0], [30.0, 400, 3.0], [40.0, 700, 2.5]]
  assert peers_appo.summary(curve, 3) == {
    "minutes": 0.5, "agent steps": 400, "steps/s": 30, "with start": 17.5, "last return": 2.5,
  }  # fmt: skip
