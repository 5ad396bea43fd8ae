# Every target does its own set-up: a clone, Python 3.11 or newer and make are enough.
# A second call finds the stamp and starts at once.

PYTHON ?= python3
CONFIG ?= configs/fsdp2_fp16.toml
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup pretrain compare bench test soak soak-torch lint format hooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo '  variables: PYTHON=python3.12  CONFIG=configs/....toml  ARGS="--resume" (pretrain, compare; NPROC=4 for four ranks) or "-k name" (test)'

setup: $(READY) ## make the virtual environment in .venv

# distscale itself is installed editable: only other requirements or another native library ask for a new installation.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(foreach part,sweep fp8,$(wildcard distscale/$(part)/*.h distscale/$(part)/*.cpp))
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo 'There is no $(PYTHON) here; install Python 3.11 or newer, or say which: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "distscale needs Python 3.11 or newer; $(PYTHON) is $$('$(PYTHON)' -V 2>&1). Say which one to use: make PYTHON=python3.11" >&2; exit 1; }
	@'$(PYTHON)' -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)' >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,test,dev]'
	@touch $@

pretrain: $(READY) ## pretrain the small GPT and print a verdict
	exec launch/torchrun.sh $(CONFIG) $(ARGS)

compare: $(READY) ## the same, and again in FP32 and without scales; SEEDS="0 1 2": with each, as a table
ifdef SEEDS
	for seed in $(SEEDS); do \
	  launch/torchrun.sh $(CONFIG) --compare --set run.out=runs/seeds --set run.name=seed_$$seed --set run.seed=$$seed $(ARGS) || exit; done
	$(BIN)/python launch/seeds.py $(SEEDS:%=runs/seeds/seed_%)
else
	exec launch/torchrun.sh $(CONFIG) --compare $(ARGS)
endif

bench: $(READY) ## measure the sweep beside torch's operators
	$(BIN)/distscale bench $(ARGS)

test: $(READY) ## run the tests
	$(BIN)/python -m pytest $(ARGS)

soak: $(READY) ## play 10,000 random steps with random faults on every layout
	DISTSCALE_SOAK_STEPS=$${DISTSCALE_SOAK_STEPS:-10000} $(BIN)/python -m pytest tests/soak $(ARGS)

soak-torch: $(READY) ## the same beside torch's own scaler, as a table
	PYTHONPATH=tests:tests/distributed:tests/soak $(BIN)/python -W ignore tests/soak/soak_table.py

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo 'some files are not formatted: run make format' >&2; exit 1; }
	$(BIN)/mypy

format: $(READY) ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

hooks: $(READY) ## run the checks of lint before every git commit
	$(BIN)/pre-commit install

clean: ## remove the virtual environment and all caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find distscale launch tests -name __pycache__ -type d -prune -exec rm -rf {} +
