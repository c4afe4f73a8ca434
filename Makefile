# `make help` lists the targets. Requires Linux on x86-64, make, and Python 3.11 or newer with pip.

PYTHON ?= python3
CONFIG ?= quickstart
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILER := $(VENV)/gpu-compiler/.installed
INSTALL := $(BIN)/python -m pip install --quiet --require-hashes --no-deps --only-binary :all:
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup cuda12 cuda13 wandb train gpu-plan test commands lint docs lock clean
.DEFAULT_GOAL := help

help:
	@echo "make train     train CONFIG (quickstart); ARGS=\"env.game=CartPole ...\" is passed to the launcher"
	@echo "make test      the whole test suite; ARGS=\"tests/config -k yaml\" narrows it, -n0 uses one process"
	@echo "make gpu-plan  estimate memory and time of a full-size run on one H200 and on eight, without a GPU"
	@echo "make commands  make train, and the other commands in the README and docs/, shortened (installations as dry runs); 15 minutes"
	@echo "make lint      ruff and mypy"
	@echo "make docs      build/docs/index.html from docs/, with Sphinx; broken links are errors"
	@echo "make setup     install into $(VENV) (train, test, lint and docs do this when needed)"
	@echo "make cuda12    setup, then install jax for CUDA 12 GPUs; make cuda13 for CUDA 13"
	@echo "make wandb     setup, then install Weights & Biases for launch/wandb_sync.py"
	@echo "make lock      resolve requirements*.lock again from pyproject.toml (needs uv)"
	@echo "make clean     remove $(VENV), caches and build outputs, but not runs/"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV): 550 MB to download, 1.7 GB on disk; 1 to 2 minutes on a fast network. This is done once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@# Packages that were added before must match the new lock: jax ignores a plugin of another version.
	@for added in $(wildcard $(VENV)/.added-*); do $(INSTALL) -r requirements-$${added#*.added-}.lock || exit 1; done
	@touch $@

cuda12 cuda13 wandb: setup
	@echo "Installing the packages in requirements-$@.lock (CUDA: 3 GB to download, a few minutes)."
	$(INSTALL) -r requirements-$@.lock
	@touch $(VENV)/.added-$@

train: setup
	$(BIN)/python launch/multihost.py --config $(CONFIG) $(ARGS)

gpu-plan: $(COMPILER)
	$(BIN)/python launch/plan.py --config atari300k sweep gpu --devices 1,8 $(ARGS)

# jax's compiler for GPUs, installed separately: with it on the path, jax looks for a GPU driver.
$(COMPILER): $(STAMP) requirements-cuda12.lock
	awk '/^[a-z]/ {wanted = /^jax-cuda12-(pjrt|plugin)=/} wanted' requirements-cuda12.lock > $(VENV)/compiler.lock
	rm -rf $(dir $@)
	$(INSTALL) --target $(dir $@) -r $(VENV)/compiler.lock
	@touch $@

test: $(STAMP) $(COMPILER)
	$(BIN)/python -m pytest -n $$(($$(nproc) < 3 ? $$(nproc) + 1 : 4)) --dist worksteal $(ARGS)

commands: $(STAMP) $(COMPILER)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m commands tests/test_doc_commands.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(INSTALL) -r requirements-docs.lock
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

COMPILE := uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
  --no-emit-package colorama --no-emit-package nest-asyncio pyproject.toml

lock:
	$(COMPILE) --upgrade --extra dev -o requirements.lock
	@# The packages that each extra adds.
	for extra in cuda12 cuda13 docs wandb; do \
	  $(COMPILE) --extra $$extra -c requirements.lock | grep -vxFf requirements.lock > requirements-$$extra.lock || exit 1; \
	done

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
