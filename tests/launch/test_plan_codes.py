"""Tests of the exit codes of launch/plan.py, with plans that are made up."""

import jax
import pytest

from launch import plan as launcher
from speedyzero_jax.plan import plan, target
from speedyzero_jax.workers.learner import make_mesh


@pytest.mark.parametrize(
  ("available", "only", "code"), [(7, (), 0), (6, (), 3), (6, ("--only", "act"), 0)]
)
def test_a_plan_that_does_not_fit_has_a_code_of_its_own(monkeypatch, capsys, available, only, code):
  acting = {"interval": 2.0, "wait": 1.0}
  made = plan.Plan([], {"weights": 4, "replay": 3}, available, {"total": 1.0}, acting)
  monkeypatch.setattr(plan, "make_plan", lambda *_, **__: made)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert launcher.main(["--config", "quickstart", *only]) == code
  assert "weights" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("quickstart --target v100", "unknown target 'v100'; available: a100, h100, h200"),
    ("quickstart --devices 0", "--devices: 0 can't be divided among 1 learners"),
    ("a3c", "topology.gradients: only programs of a learner that trains can be planned"),
  ],
)
def test_wrong_use_is_reported_in_one_line(monkeypatch, capsys, arguments, message):
  monkeypatch.setattr(plan, "make_plan", pytest.fail)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert launcher.main(["--config", *arguments.split()]) == 2
  assert capsys.readouterr().err.startswith(f"error: {message}")


def test_an_unknown_program_is_reported_in_one_line(monkeypatch, capsys):
  monkeypatch.setattr(target.Target, "mesh", lambda *_: make_mesh(jax.local_devices()[:1]))
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert launcher.main(["--config", "quickstart", "agent=quick_agent", "--only", "trian"]) == 2
  printed = capsys.readouterr().err
  assert printed.startswith("error: unknown program 'trian'; available: train, publish, ")
  assert printed.count("\n") == 1


def test_a_file_that_cannot_be_written_is_found_first(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(plan, "make_plan", pytest.fail)
  for path in (tmp_path, tmp_path / "none" / "plan.json"):
    assert launcher.main(["--config", "quickstart", "--out", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out: can't write {path}")


def test_a_machine_that_cannot_plan_is_a_failure(monkeypatch, capsys):
  def without_compiler(*_, **__):
    raise RuntimeError("run make gpu-plan first")

  monkeypatch.setattr(plan, "make_plan", without_compiler)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert launcher.main(["--config", "quickstart"]) == 1
  assert capsys.readouterr().err == "error: run make gpu-plan first\n"
