# Two commands on a fresh machine: `make demo` and `make test`. Each brings .venv up to date by itself.

PYTHON ?= python3
# Each worker runs vLLM engines, and those of one file share captures.
WORKERS ?= 2
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint types format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## Create or update .venv (the first time: about 4 minutes and 3.5 GB)
	@$(PYTHON) scripts/setup_venv.py

demo: venv ## Find a planted fault in a small vLLM, start to finish
	$(BIN)/localize demo

test: lint types ## Check style and types, then run every test that is neither slow nor needs a GPU
	$(PYTEST) -m "not slow and not gpu"

test-all: lint types ## The same with the slow tests
	$(PYTEST) -m "not gpu"

lint: venv ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## Check types
	$(BIN)/python -m mypy

format: venv ## Put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and build outputs; captures stay
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
