"""Tests of means of learning curves, by hand and of the results that docs/studies.md cites."""

import argparse
import json
import math

import numpy as np
import pytest

from benchmarks import curve_means
from benchmarks.picture import RESULTS

CURVE = np.array([100.0, 200.0, 400.0]), np.array([-1.0, 1.0, 0.0])


@pytest.mark.parametrize(
  ("begin", "end", "mean"),
  [(100, 400, 1 / 3), (150, 300, (25 + 75) / 150), (200, None, 0.5), (250, 350, 0.5)],
)
def test_a_mean_is_that_of_the_line_through_the_points(begin, end, mean):
  assert curve_means.mean_between(CURVE, begin, end) == pytest.approx(mean)


@pytest.mark.parametrize(("begin", "end"), [(99, 200), (200, 401), (300, 300), (400, None)])
def test_nothing_is_extrapolated(begin, end):
  with pytest.raises(ValueError, match="within 100 to 400"):
    curve_means.mean_between(CURVE, begin, end)


def test_a_return_is_reached_at_the_first_point():
  assert [curve_means.reached(CURVE, level) for level in (-1, 0, 1)] == [100, 200, 200]
  assert math.isnan(curve_means.reached(CURVE, 1.1))


@pytest.mark.parametrize(
  ("name", "begin", "reach", "difference", "lines"),
  [
    ("large_batch", 1000, None, ["clipped_lars512", "sgd512_lower"], [
      "adam512, Catch: 0.782 ± 0.0195", "sgd512_lower, Catch: 0.577 ± 0.033",
      "clipped_lars512 - sgd512_lower, Catch: 0.0856 ± 0.0346, 95% interval -0.0105 to 0.182",
    ]),
    ("backward", None, None, ["", ""], ["sims8, CartPole: 44.2 ± 3.38"]),
    ("actors", 0, 0.8, ["", ""], ["threads, Catch: 30,38"]),
  ],
)  # fmt: skip
def test_numbers_of_committed_results(name, begin, reach, difference, lines):
  options = argparse.Namespace(begin=begin, end=None, reach=reach, difference=difference)
  found = curve_means.report(json.loads((RESULTS / f"{name}.json").read_text()), options)
  assert all(any(line.startswith(start) for line in found) for start in lines)


def test_a_larger_batch_needs_more_samples_by_the_noise_scale():
  """With noise scale N, (N + C) / (N + B) times as many as batch B."""
  x = np.array([100.0, 200.0, 900.0])
  line = x, 3 * x
  steps, returns = curve_means.predicted(line, (np.array([0.0]), np.array([384.0])), 64, 512)
  assert returns[[0, -1]] == pytest.approx([300, 3 * (100 + 800 / 2)])  # twice as many
  noise = np.array([100.0, 300.0, 500.0]), np.array([384.0, 384.0, 1e9])
  steps, returns = curve_means.predicted(line, noise, 64, 512)
  assert np.interp(500, steps, returns) == pytest.approx(3 * 300, rel=1e-3)
  slope = np.diff(returns)[[-1]] / np.diff(steps)[[-1]]
  assert slope == pytest.approx(3, rel=1e-3)  # without noise, larger batches cost nothing


def test_noise_is_read_in_order_and_of_one_batch_size(tmp_path):
  rows = [{"env_steps": at, "scale": 2.0 * at, "batch_size": 64} for at in (30, 10)]
  path = tmp_path / "noise.json"
  path.write_text(json.dumps({"runs": rows}))
  assert [x.tolist() for x in curve_means.read_noise(path, 64)] == [[10, 30], [20, 60]]
  for wrong, message in (
    ([rows[0] | {"scale": None}], "finite, and of batch size 64"),
    ([rows[0] | {"batch_size": 512}], "finite, and of batch size 64"),
    ([*rows, rows[0]], "scales of one run"),
    ([], "scales of one run"),
  ):
    path.write_text(json.dumps({"runs": wrong}))
    with pytest.raises(ValueError, match=message):
      curve_means.read_noise(path, 64)


def test_each_seed_counts_once():
  content = json.loads((RESULTS / "large_batch.json").read_text())
  options = argparse.Namespace(begin=1000, end=None, reach=None, difference=["", ""])
  expected = curve_means.report(content, options)
  again = content["runs"][0] | {"repeats": "another"}
  assert curve_means.report(content | {"runs": [again, *content["runs"]]}, options) == expected
  with pytest.raises(ValueError, match="another run has the same variant, game and seed"):
    curve_means.report(content | {"runs": content["runs"] * 2}, options)
