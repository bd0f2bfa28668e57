# `make demo`, `make test` and `make test-all` work on a fresh machine: they make their own environment in .venv.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= demo
ALONE  := $(BIN)/python -m pytest
TESTS  := $(ALONE) --numprocesses 2 --dist worksteal

.PHONY: demo check quick full test test-all clean

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m tools.examples.demo $(DEMO)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two tests at a time; behind them, one by one, those that measure their process. OOC_TESTS=quick: tests/scale.py.
quick: $(VENV)/.ready
	OOC_TESTS=quick $(TESTS) -m "not slow and not alone"
	OOC_TESTS=quick $(ALONE) -m "not slow and alone"

full: $(VENV)/.ready
	$(TESTS) -m "not alone"
	$(ALONE) -m alone

test: check quick

test-all: check full

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache build dist
