# Two commands on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all lint docs reproduce clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make the environment in .venv, and say how a shell finds `confide`
	@echo 'ready; so that this shell finds confide, say:  export PATH="$(CURDIR)/$(BIN):$$PATH"'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Confide needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about two minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,cifar,beam,speech,formats,arrow,retrieval,deploy,figures,tensorboard,export,ui]'
	@touch $@

demo: $(STAMP) ## speech recognition that is private as trained, over simulated people, from nothing
	$(BIN)/confide demo --out runs/demo
	$(BIN)/confide guarantee runs/demo/epsilon-2

# One thread a process, and a worker without work takes some from another.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: $(STAMP) ## the tests that are quick, on all cores: some minutes
	$(PYTEST) -m 'not slow'

test-slow: $(STAMP) ## the others: real federations, torchrun, cold processes that are killed, wheels, long tutorials
	$(PYTEST) -m slow

test-all: test test-slow ## all of them

lint: $(STAMP) ## ruff, mypy in strict mode, and the law of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

docs: $(STAMP) ## the documents as a site, in site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

reproduce: $(STAMP) ## NORM's figures and tables (about an hour on two cores; goes on after a stop)
	$(BIN)/confide reproduce norm/quadratics
	$(BIN)/confide reproduce norm/table1 --dataset fashion-mnist
	$(BIN)/confide reproduce norm/table1 --dataset cifar10

clean: ## remove the environment and caches, keep runs and results
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
