# Everything a person needs: `make run` to use it, `make test` to check it. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.keystroke-base
LAB_STAMP := $(VENV)/.keystroke-lab
DEV_STAMP := $(VENV)/.keystroke-dev
LOCK := requirements-dev.lock
TORCH = $(shell sed -nE 's/^ *"(torch==[^"]+)".*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help run lab editors dist test suite test-gpu test-coder test-lowest test-editors lint style types format coverage web demo pictures figures docs lock hooks clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##|^bench-%:.*##' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  %-14s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Keystroke needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV)"
	@$(PIP) install --editable .
	@touch $@

# The newest versions that pyproject.toml allows, so that what they break is seen early. `make LOCKED=1 ...` takes
# exactly those of the lock, every file checked against its hash (torch apart: its builds differ by machine).
$(DEV_STAMP): pyproject.toml lab/pyproject.toml $(if $(LOCKED),$(LOCK)) | $(VENV)/bin/python
	@echo "setting up $(VENV) with the development tools (a few minutes the first time)"
ifdef LOCKED
	@$(PIP) install --require-hashes -r $(LOCK)
	@$(PIP) install --no-deps $(TORCH)
	@$(PIP) install --no-deps --no-build-isolation --editable . --editable lab
else
	@$(PIP) install --editable '.[dev]' --editable lab
endif
	@touch $(STAMP) $(LAB_STAMP) $@

run: $(STAMP)  ## set up, then complete code with the embedded model
	@$(BIN)/keystroke demo

$(LAB_STAMP): pyproject.toml lab/pyproject.toml | $(VENV)/bin/python
	@$(PIP) install --editable . --editable lab
	@touch $(STAMP) $@

lab: $(LAB_STAMP)  ## install what makes models (torch and the commands of `keystroke train`)

# Types take one core two minutes: they are checked beside the tests.
test: style  ## set up, then every check and every test
	@$(BIN)/keystroke models add smollm2 --if-missing
	@$(MAKE) --no-print-directory -j2 types suite

suite: $(DEV_STAMP)
	@env -u MAKEFLAGS -u MFLAGS $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not coder'

test-lowest:  ## the tests on the lowest versions that pyproject.toml allows (ARGS="tests/text" for a part)
	@$(PYTHON) -m venv .venv-lowest
	@$(PYTHON) .ci/lowest.py dev > .venv-lowest/constraints.txt
	@.venv-lowest/bin/python -m pip --disable-pip-version-check -q install --editable '.[dev]' --editable lab --constraint .venv-lowest/constraints.txt
	@.venv-lowest/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

coverage: $(DEV_STAMP)  ## every test with its lines counted; fails below the floor in pyproject.toml
	@$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term $(ARGS)

test-scale: $(DEV_STAMP)  ## replicas on a local Ray, the long tests too
	@TEST_SCALE=1 $(BIN)/python -m pytest tests/scale

test-gpu: $(DEV_STAMP)  ## the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu -rfE tests/gpu

test-coder: $(DEV_STAMP)  ## the tests that need the 1.1 GB code model (CODER_GGUF=FILE, or `keystroke models add coder`)
	@$(BIN)/python -m pytest -m coder -rs tests/engine tests/agent tests/gpu

lint: style types  ## formatting, lint and types

style: $(DEV_STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check --no-cache .  # a cached verdict on import order outlives a moved file

types: $(DEV_STAMP)
	@$(BIN)/mypy

format: $(DEV_STAMP)  ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

web: | $(VENV)/bin/python  ## build the playground (its output is part of the repository)
	@cd web && $(abspath $(BIN))/python node.py npm ci --no-audit --no-fund --silent && $(abspath $(BIN))/python node.py npm run --silent build

demo: $(DEV_STAMP)  ## make the README's animated picture from the real page (needs a Chromium)
	@$(BIN)/python -m web.demo

test-editors: $(DEV_STAMP)  ## the editors for real: fetches a VS Code and builds the extension; Neovim 0.10 if installed
	@$(BIN)/python editors/fetch.py
	@$(BIN)/python -m pytest -rs tests/e2e/test_vscode_real.py tests/e2e/test_neovim.py

editors: | $(VENV)/bin/python  ## build dist/keystroke.vsix for VS Code and dist/keystroke.nvim.tar.gz for Neovim
	@$(BIN)/python editors/build.py

dist: editors | $(VENV)/bin/python  ## build the wheel in dist/, with the extension for VS Code, and try it in an environment of its own
	@rm -f dist/keystroke-*.whl
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@rm -rf build/try && $(PYTHON) -m venv build/try
	@build/try/bin/python -m pip --disable-pip-version-check -q install dist/keystroke-*.whl
	@cd build/try && KEYSTROKE_SHARING_ENABLED=0 bin/keystroke demo
	@ls -l dist/keystroke-*.whl

pictures: $(DEV_STAMP)  ## take the pictures of docs/tour.md anew (needs a Chromium)
	@KEYSTROKE_PICTURES=docs/pictures $(BIN)/python -m pytest tests/e2e/test_tour.py tests/e2e/test_tour_terminal.py tests/e2e/test_vscode_real.py tests/e2e/test_neovim.py

bench-%: $(DEV_STAMP)  ## run bench/NAME.py; `ls bench` shows them, each says in its docstring what it measures
	@$(BIN)/python -m bench.$(subst -,_,$*) $(ARGS)

figures: $(DEV_STAMP)  ## write BENCHMARKS.md from bench/results
	@$(BIN)/python -m bench.figures

docs: $(DEV_STAMP)  ## the documentation as a site in site/, built offline
	@$(BIN)/python -c 'import sphinx, myst_parser, furo' 2>/dev/null || $(PIP) install --editable '.[docs]'
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs -b html . site
	@echo "open site/index.html"

lock: $(DEV_STAMP)  ## write requirements-dev.lock anew from pyproject.toml
	@printf 'hatchling\neditables\n' | $(BIN)/uv pip compile pyproject.toml - --extra dev --extra docs --universal --upgrade \
		--python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url -q -o $(VENV)/lock
	@awk '/^[^ ]/ {drop = /^(torch|triton|nvidia-|cuda-)/} !drop' $(VENV)/lock > $(LOCK)

hooks: $(DEV_STAMP)  ## run formatting, lint and types before every commit (pre-commit)
	@$(BIN)/pre-commit install

clean:  ## remove the environment and caches of the tools
	@rm -rf $(VENV) .venv-lowest .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* build dist site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
