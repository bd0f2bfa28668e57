# `make demo` and `make test` work on a fresh machine: they make their own environment in .venv.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= demo

.PHONY: demo test check pytest clean

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

pytest: $(VENV)/.ready
	$(BIN)/python -m pytest

test: check pytest

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache build dist
