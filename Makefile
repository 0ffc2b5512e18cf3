# Two commands do everything: `make quickstart` and `make test`. Both set up .venv first.
# CORPUS=path uses your own text in the quickstart; SHORT=1 makes it a smoke test; FRESH=1 starts it anew.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
TORCH ?= torch==2.13.0
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-layouts lint bench clean

help:
	@echo "make quickstart   train, refine, export, evaluate and sample a small elastic model (CPU, minutes)"
	@echo "make test         lint, types and every test that needs no GPU"
	@echo "make test-layouts the whole matrix of parallel layouts, as processes on the CPU"
	@echo "make lint         ruff and mypy alone"
	@echo "make bench        speed of this machine's working path, as a table and JSON"
	@echo "make clean        remove build products (not .venv, not out/)"

.venv/.installed: pyproject.toml setup.py $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or 3.12; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

setup: .venv/.installed

quickstart: setup
	$(BIN)/python tools/quickstart.py $(if $(CORPUS),--corpus "$(CORPUS)") $(if $(SHORT),--short) $(if $(FRESH),--fresh)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Every layout of (tensor parallel, data parallel) and more, as real processes on the CPU: some minutes.
test-layouts: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m layouts tests/parallel tests/training

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python tools/benchmark.py --json out/benchmark.json

clean:
	rm -rf build *.egg-info megatron_essh/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
