# `make demo`, `make test` and `make test-all` work on a fresh machine: they make their own environment in .venv.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= demo
ALONE  := $(BIN)/python -m pytest
TESTS  := $(ALONE) --numprocesses 3 --dist worksteal

# Compiled modules are kept, whatever the environment says: the tests' processes and their children import the same ones.
unexport PYTHONDONTWRITEBYTECODE

MEASURED = $(shell grep -rl --include='test_*.py' 'mark.alone' tests)

.PHONY: demo docs package check lint types quick measured full test test-all clean

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev,docs]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m tools.examples.demo $(DEMO)

# The site, in docs/_build; a warning is an error.
docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

# Wheel and sdist, in dist/.
package: $(VENV)/.ready
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tools.packaging.check dist

check: lint types

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

# OOC_TESTS=quick: tests/scale.py. Three tests at a time, as some wait for the disk or a process; behind them, one by one,
# those that measure their process.
quick: $(VENV)/.ready
	OOC_TESTS=quick $(TESTS) -m "not slow and not alone"

measured: $(VENV)/.ready
	OOC_TESTS=quick $(ALONE) -m "not slow and alone" $(MEASURED)

full: $(VENV)/.ready
	$(TESTS) -m "not alone"
	$(ALONE) -m alone $(MEASURED)

# Types are checked beside the tests that measure nothing.
test: lint
	$(MAKE) --jobs 2 types quick
	$(MAKE) measured

test-all: check full

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache build dist docs/_build
