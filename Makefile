# Everything a newcomer or a contributor runs. `make help` lists it.
#
# Python packages go to .venv, by uv; nothing is installed again while pyproject.toml stays the same.
# uv itself (where this machine has none), models, kernels and logs go to ~/.cache/kvoy.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# torch, or sim: a timing model that needs neither torch nor a model.
RUNNER ?= torch
# An index for torch alone, e.g. one with CPU builds; empty: from where everything else comes.
TORCH_INDEX ?=
# How many tests `make test` runs side by side; each may start a Kubernetes of its own, about 3 GB.
WORKERS ?= 4
# After which time each half of the tests is ended, whatever it does.
LIMIT ?= 40m
# Options of `kvoy up`, `kvoy bench` or pytest, whichever the target runs.
ARGS ?=
# What container images stand on, and what they are called; tools/images.sh has the defaults.
BASE_IMAGE ?=
IMAGE_REGISTRY ?=
IMAGE_TAG ?=
only ?=
# Where images-load brings them.
TO ?= kind
export TORCH_INDEX BASE_IMAGE IMAGE_REGISTRY IMAGE_TAG

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CLUSTER := PYTHONPATH=tests/cluster $(BIN)/python -m kvoy_cluster

ifeq ($(filter torch sim,$(RUNNER)),)
$(error RUNNER is torch or sim, not '$(RUNNER)')
endif
EXTRAS_torch := engine,router,cli
EXTRAS_sim := sim,router,cli

.PHONY: help up test check lint unit model format proto crds monitoring cluster cluster-down cluster-programs images images-load kind chart system-packages gpu-smoke bench bench-operator bench-peers soak-streams soak-prompts clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) \
		| while IFS=$$'\t' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done
	@echo; printf '  %s\n' \
		"make up RUNNER=sim          no torch and no model: a timing model answers" \
		"make up TORCH_INDEX=URL     torch from another index than everything else" \
		"make up ARGS='--engines 3'  any options of kvoy up"

up: $(STAMPS)/$(RUNNER) ## a router and two engines on this machine, serving until Ctrl-C
	@$(BIN)/kvoy up --runner $(RUNNER) $(ARGS)

test: ## all checks and all tests, with the time that each part took
	@WORKERS=$(WORKERS) LIMIT=$(LIMIT) tools/test.sh $(ARGS)

# Side by side: tests of processes and sockets mostly wait.
check: $(STAMPS)/dev ## the fast part: format, lint, types, import layers, unit tests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

lint: $(STAMPS)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	tools/proto.sh $(BIN)/python --check

unit: $(STAMPS)/dev
	$(BIN)/python -m pytest -m 'not slow' --numprocesses=2 --dist=loadfile $(ARGS)

model: $(STAMPS)/dev
	$(BIN)/kvoy model add smollm2-135m-instruct

format: $(STAMPS)/dev ## format the code, and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(STAMPS)/dev ## generate the telemetry stubs
	tools/proto.sh $(BIN)/python

monitoring: $(STAMPS)/dev ## generate the chart's dashboards and alerts
	PYTHONPATH=deploy/monitoring $(BIN)/python -m kvoy_monitoring charts/kvoy

crds: $(STAMPS)/dev ## write crds/ from the operator's typed specs
	$(BIN)/python -m kvoy_operator.crd crds

cluster: $(STAMPS)/dev system-packages ## real Kubernetes with two nodes on this machine, without Docker; needs root
	@$(CLUSTER) up $(ARGS)

cluster-down: $(STAMPS)/dev ## stop it
	@$(CLUSTER) down

cluster-programs: $(STAMPS)/dev
	@$(CLUSTER) build

images: ## build the container images; only=router for one, BASE_IMAGE, TORCH_INDEX, IMAGE_REGISTRY, IMAGE_TAG
	@tools/images.sh build $(only)

images-load: ## bring them to a cluster: TO=kind, or TO=containerd for this machine
	@tools/images.sh load $(TO) $(only)

kind: ## Kubernetes in Docker, by kind
	kind create cluster --config deploy/kind/cluster.yaml

chart: crds monitoring ## bring the chart up to date with what it packs
	cp crds/*.yaml charts/kvoy/definitions/

system-packages:
	@tools/system-packages.sh

gpu-smoke: $(STAMPS)/dev ## the engine on a CUDA device, compared with the CPU
	$(BIN)/python -m kvoy_engine.gpu_smoke $(ARGS)

bench: $(STAMPS)/dev ## every benchmark with its goals; ARGS=NAME for one
	$(BIN)/kvoy bench $(or $(ARGS),all --check)

bench-operator: $(STAMPS)/dev cluster-programs ## the operator with 1,000 services, about 25 minutes; ARGS='--services 100 --steady-s 60'
	PYTHONPATH=tests/cluster $(BIN)/python -m kvoy_operator_bench $(or $(ARGS),--check)

bench-peers: $(STAMPS)/dev ## the router beside other routers on the same engines; ARGS='--peers envoy smg --parts cost'
	$(BIN)/python -m kvoy_peers $(or $(ARGS),--check)

soak-streams: $(STAMPS)/dev ## 5,000 streams through the router for ten minutes, every chunk checked; ARGS='--streams 1000 --duration 60'
	$(BIN)/kvoy bench soak streams $(or $(ARGS),--check)

soak-prompts: $(STAMPS)/dev ## new prompts for an hour, until all that the router remembers is full and stays so
	$(BIN)/kvoy bench soak prompts $(or $(ARGS),--check)

clean: ## remove .venv and the tools' caches; ~/.cache/kvoy stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed: one stamp for each set of extras.

$(STAMPS)/torch $(STAMPS)/sim: $(STAMPS)/%: pyproject.toml
	@tools/install.sh $(VENV) $(EXTRAS_$*)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: pyproject.toml
	@tools/install.sh $(VENV) dev
	@mkdir -p $(STAMPS) && touch $@
