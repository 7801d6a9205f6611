# `make demo`: a fresh machine to an answer spoken aloud. `make test`: a fresh machine to green tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test check lint types floors crds docs format cluster-test voice-test clean

help:
	@grep -E '^# |^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/'

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[runtime,operator,dev]'
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[runtime,demo]'
	@touch $@

format: $(VENV)/.dev ## rewrite the code in the house format
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(VENV)/.dev
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

floors: $(VENV)/.dev
	$(BIN)/lint-imports

check: lint types floors ## lint, types and the import floors

test: $(VENV)/.dev ## every test that needs no cluster and no models
	$(BIN)/pytest -m "not cluster and not voice and not gpu and not rdma"

crds: $(VENV)/.dev ## regenerate crds/omnipipelines.yaml and the references in docs/
	$(BIN)/python -m omnipipeline_spec.schema && $(BIN)/python -m omnipipeline_spec.reference
