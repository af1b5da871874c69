# Every target does its own set-up: the first one to run makes .venv, once.
#   PYTHON=python3.12 make test     another interpreter for a new .venv (3.11 or later)
#   make test ARGS="-k paths -x"    more arguments for pytest
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers-installed
BUILDERS := $(VENV)/.builders-installed
OTHERS := build/integration
OTHERS_STAMP := $(OTHERS)/.installed
INSTALL := python -m pip install -qq --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/$(INSTALL)
PYTEST := $(BIN)/python -m pytest
WORKERS := --numprocesses=2
SOURCES := $(wildcard statetree tests examples benchmarks docs)

# Only for the checkpoint files (resemblyzer, lpips) and tensor subclasses (torchao) that they ship:
# their dependencies would add gigabytes and are never imported.
WITHOUT_DEPENDENCIES := resemblyzer lpips torchao

.DEFAULT_GOAL := help
.PHONY: help venv demo test slow check lint types doctest docs coverage mutation thorough soak bench package versions integration fuzz instructions gpu format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## Make .venv with the package (editable) and all development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	@echo "Installing into $(VENV): once, this takes a minute or more."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip  # the pip that comes with Python 3.11 does not know --group
	@$(PIP) --editable . --group dev
	@$(PIP) --no-deps $(WITHOUT_DEPENDENCIES)
	@touch $@

demo: $(STAMP)  ## Train, checkpoint, kill and resume a small transformer
	@$(BIN)/python examples/train_resume.py

# Each of the many processes that tests start would compile the package again.
test slow coverage thorough: export PYTHONDONTWRITEBYTECODE :=

# The profiles quick and ci (15 and 100 examples) take the same ones every time: a run here means what a run there means.
test: $(STAMP)  ## Run the tests but the slow ones (four minutes on two idle cores)
	@HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-quick}" $(PYTEST) $(WORKERS) -m "not slow" $(ARGS)

slow: $(STAMP)  ## Run the slow tests: kills, exhaustion, many ranks, examples, types, whole products
	@HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-ci}" $(PYTEST) $(WORKERS) -m slow $(ARGS)

check: lint types doctest docs coverage  ## Check format, lint, types, doctests, documentation, tests and their coverage

lint: $(STAMP)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP)
	@$(BIN)/mypy

doctest: $(STAMP)
	@$(PYTEST) --doctest-modules statetree

docs: $(STAMP)  ## Build the documentation into build/docs
	@$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

# A profile with fewer examples than tests have: which lines run does not depend on it much.
coverage: $(STAMP)  ## Run all tests, and see which lines and branches they run: 98 % at least
	@rm -rf build/coverage
	@HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-dev}" $(BIN)/python -m coverage run -m pytest $(WORKERS) $(ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

mutation: $(STAMP)  ## Change one thing at a time in the core, and see whether the tests notice (two hours)
	@HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-dev}" $(BIN)/python -m tests.mutation --jobs 2 $(ARGS)

thorough: $(STAMP)  ## Run all tests with 3,000 hypothesis examples each, on all cores
	@HYPOTHESIS_PROFILE=thorough $(PYTEST) --numprocesses=auto $(ARGS)

soak: $(STAMP)  ## Stage 10,000 times, and from eight threads, and look for what is left behind
	@$(BIN)/python -m tests.soak $(ARGS)

$(PEERS): $(STAMP)
	@$(PIP) --group bench
	@$(PIP) --no-deps torch-checkpointing
	@touch $@

bench: $(PEERS)  ## Measure against the peers, side by side
	@$(BIN)/python -m benchmarks $(ARGS)

$(BUILDERS): $(STAMP)
	@$(PIP) --group build
	@touch $@

package: $(BUILDERS)  ## Build the package, install it into an empty environment, and run tests there
	@HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-ci}" $(BIN)/python -m tests.package build/package $(ARGS)

versions: $(STAMP)  ## Run the tests on torch 2.11, 2.13 and 2.15, each in an environment of its own (large downloads)
	@$(BIN)/python -m tests.versions $(ARGS)

# An environment of its own: what these packages bring along may not be there when the other tests run.
$(OTHERS_STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(OTHERS): once, this takes some minutes."
	@$(PYTHON) -m venv $(OTHERS)
	@$(OTHERS)/bin/$(INSTALL) --upgrade pip
	@$(OTHERS)/bin/$(INSTALL) --editable . --group test --group integration
	@touch $@

integration: $(OTHERS_STAMP)  ## Run transformers, peft, torchao, accelerate and safetensors on it
	@$(OTHERS)/bin/python -m pytest tests/integration tests/integrations --numprocesses=2 $(ARGS)

fuzz: $(STAMP)  ## Damage checkpoints for ten minutes, and read them (ARGS="--minutes 1")
	@$(BIN)/python -m tests.cli.fuzz $(ARGS)

instructions: $(STAMP)  ## Count the instructions of hot paths, and compare with the recorded counts
	@$(BIN)/python -m benchmarks.instructions $(ARGS)

# No environment is made: the machine may have no network. `make gpu ARGS=--carry` fetches, elsewhere, what it lacks.
gpu:  ## Run the tests and rows that are about a GPU, where there is one (ARGS=--dry: without)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu $(ARGS)

format: $(STAMP)  ## Format, and mend what the linter can mend
	@$(BIN)/ruff check --fix-only $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

clean:  ## Remove .venv, caches and builds
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
