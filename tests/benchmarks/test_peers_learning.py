"""Tests of the points and the summary of learning curves in benchmarks/peers_learning.py."""

import math

import numpy as np

import peer_side
import peers_learning


def test_time_of_evaluations_is_left_out(monkeypatch):
  clocks = iter(np.array([[10, 1], [12, 2], [50, 22], [53, 23], [99, 99]]))
  monkeypatch.setattr(peer_side.Curve, "_clocks", staticmethod(lambda: next(clocks)))
  curve = peer_side.Curve()
  for samples, score in ((64, 9.0), (128, 200.0)):
    with curve.evaluation(samples, samples // 64) as point:
      point.append(score)
  assert curve.points == [[64, 1, 2, 1, 9.0], [128, 2, 5, 2, 200.0]]


def test_a_summary_is_of_the_first_point_at_the_threshold():
  curve = [
    [64, 1, 6, 3, 9.0],
    [128, 2, 60, 30, 195.0],
    [192, 3, 90, 40, 200.0],
    [256, 4, 99, 50, 7.0],
  ]
  values = peers_learning.summary(curve)
  assert list(values.values()) == [128, 2, 1.0, 0.5, 7.0]
  assert math.isnan(peers_learning.summary(curve[:1])["samples"])
