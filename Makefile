# Everything a person needs: `make run` to use it, `make test` to check it. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.keystroke-base
DEV_STAMP := $(VENV)/.keystroke-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help run test test-gpu lint format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##|^bench-%:.*##' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  %-14s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Keystroke needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV)"
	@$(PIP) install --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) with the development tools (a few minutes the first time)"
	@$(PIP) install --editable '.[dev]'
	@touch $(STAMP) $@

run: $(STAMP)  ## set up, then complete code with the embedded model
	@$(BIN)/keystroke demo

test: $(DEV_STAMP) lint  ## set up, then every check and every test
	@$(BIN)/keystroke models add smollm2 --if-missing
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: $(DEV_STAMP)  ## the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(DEV_STAMP)  ## formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(DEV_STAMP)  ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench-%: $(DEV_STAMP)  ## run bench/NAME.py (engine, gateway, cuda, completion, keystroke, audit)
	@$(BIN)/python -m bench.$(subst -,_,$*) $(ARGS)

clean:  ## remove the environment and caches of the tools
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
