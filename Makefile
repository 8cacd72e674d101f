# `make help` lists the targets. Everything runs in .venv, which the first target builds: the
# package alone for the demo, the tools too for the rest.

BASE_PYTHON ?= python3
# The interpreter of test-gpu and bench: a GPU machine brings its own torch and kernels.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

# Tests marked "slow" repeat in breadth what the others check once; `make test-all` runs them too.
PYTEST_ARGS ?= -n 2 --dist worksteal
EVIDENCE := tests/bench tests/verify/drift tests/docs/test_notebooks.py
PYTEST_GPU_ARGS ?=
COMPARE_ARGS ?=
BENCH_ARGS ?=
EXTERNAL_ARGS ?=
FUZZ_ARGS ?=
NOTEBOOKS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# OpenMP threads that spin while they wait starve each other where cores are few or shared.
export OMP_WAIT_POLICY ?= PASSIVE

INSTALLED := .venv/.installed
DEV := .venv/.dev
# The checkout first, then whatever the caller put there (FlashAttention unpacked in a folder, say).
WITH_CHECKOUT := PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}"

.DEFAULT_GOAL := help
.PHONY: help demo test test-evidence test-all test-gpu test-external fuzz lint notebooks bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(INSTALLED) $(DEV): pyproject.toml constraints.txt
	@echo "Installing flexvarlen$(if $(filter $(DEV),$@), and the tools of its tests) into .venv (a minute or two) ..."
	@test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq -c constraints.txt -e ".$(if $(filter $(DEV),$@),[dev])"
	@touch $@

demo: $(INSTALLED) ## Compare every backend on tiny Llama, Qwen3 and Qwen3.5, on real text
	.venv/bin/flexvarlen compare --tokens 512 --out build/compare $(COMPARE_ARGS)

test: $(DEV) ## Run the tests of the library (PYTEST_ARGS="-k boundary" for some of them)
	.venv/bin/python -m pytest $(addprefix --ignore=,$(EVIDENCE)) $(PYTEST_ARGS)

test-evidence: $(DEV) ## Run the tests of the benchmarks, drift and the notebooks
	.venv/bin/python -m pytest $(EVIDENCE) $(PYTEST_ARGS)

test-all: $(DEV) ## Run all tests that need no GPU, the slow ones too
	.venv/bin/python -m pytest --slow $(PYTEST_ARGS)

test-gpu: ## Run the tests that need CUDA, with PYTHON; installs nothing
	$(WITH_CHECKOUT) $(PYTHON) -m pytest -m gpu --slow $(PYTEST_GPU_ARGS)

test-external: $(DEV) ## Run transformers' own tests with our attention (minutes; pip fetches them once)
	.venv/bin/python -m tests.external $(EXTERNAL_ARGS)

fuzz: $(DEV) ## Run random batches, patched against unpatched (FUZZ_ARGS="--minutes 30"; default 1)
	.venv/bin/python -m tests.fuzz $(FUZZ_ARGS)

lint: $(DEV) ## Run ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

notebooks: $(DEV) ## Run the notebooks of examples/, and write their .ipynb anew
	.venv/bin/python -m tests.notebooks $(NOTEBOOKS)

bench: ## Run benchmarks on a GPU, with PYTHON (BENCH_ARGS="list" lists the suites; default: all)
	$(WITH_CHECKOUT) $(PYTHON) -m flexvarlen bench $(or $(BENCH_ARGS),all)

clean: ## Remove what was built; .venv stays
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
