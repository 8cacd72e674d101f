# `make help` lists the targets. Everything runs in .venv, which the first target builds: the
# package alone for the demo, the tools too for the rest.

BASE_PYTHON ?= python3
# The interpreter of test-gpu and bench: a GPU machine brings its own torch and kernels.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

# Tests marked "slow" repeat in breadth what the others check once; `make test-all` runs them too.
PYTEST_ARGS ?= -n 2 --dist worksteal
EVIDENCE := tests/bench tests/verify/experiment tests/docs/test_docs.py tests/docs/test_notebooks.py \
	$(addprefix tests/docs/test_examples_,preference.py recipes.py train.py) tests/test_same_answers.py
# What test-newest runs: each mechanism that touches another package, in a few minutes.
CORE := $(addprefix tests/patches/,test_names.py test_patch_undo.py test_accelerate.py test_trainer.py \
	test_trainers.py test_trl.py test_verify_unknown.py test_shared_config.py test_embed.py \
	test_lm_head.py forward/test_adapters.py forward/test_neftune.py \
	attention/test_routing.py attention/test_generate.py batch/test_found_layout.py \
	batch/test_keywords.py batch/test_caches.py forward/test_pooling_heads.py \
	forward/test_recurrent_layers.py forward/test_unpad.py forward/test_context_parallel.py \
	forward/test_liger.py forward/test_replaced_forward.py models/test_gemma4.py \
	models/test_image_masks.py models/test_vision_towers.py \
	forward/test_compile_regions.py::test_the_model_that_regions_were_made_of_is_left_as_it_was) \
	tests/parallel/test_documents.py tests/packing/test_sampler_accelerate.py \
	tests/packing/test_trainer_ranks.py tests/packing/test_trainer_columns.py \
	tests/attention/test_traceable_operators.py \
	tests/verify/isolation/test_isolation_trainer.py
SLOW_OF_CORE := bf16 recompilations compiled two_processes mixed_backends
PYTEST_GPU_ARGS ?=
COMPARE_ARGS ?=
BENCH_ARGS ?=
EXTERNAL_ARGS ?=
FUZZ_ARGS ?=
NOTEBOOKS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# OpenMP threads that spin while they wait starve each other where cores are few or shared.
export OMP_WAIT_POLICY ?= PASSIVE
# Else each worker, and each process that a test starts, would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

INSTALLED := .venv/.installed
DEV := .venv/.dev
DOCS := .venv/.docs
# An environment over .venv, whose torch it uses: what is installed into it comes first.
OVER := import pathlib, sysconfig, sys; pathlib.Path(sysconfig.get_path("purelib"), "base.pth") \
	.write_text(f"import site; site.addsitedir({sys.argv[1]!r})")
define over_venv
	@test -x $(1)/bin/python || .venv/bin/python -m venv --without-pip $(1)
	@$(1)/bin/python -c '$(OVER)' $$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
endef
NEWEST := .venv-newest$(if $(TORCH),-torch-$(TORCH))
RELEASES := transformers accelerate trl peft sentence-transformers
OLDEST := einops markdown-it-py matplotlib packaging rich typer

# Commands that print only when they fail: their output goes to a file of build/dist.
quietly = $(2) >"$(CURDIR)/build/dist/$(1).log" 2>&1 || { cat "$(CURDIR)/build/dist/$(1).log"; exit 1; }

# The checkout first, then whatever the caller put there (FlashAttention unpacked in a folder, say).
WITH_CHECKOUT := PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}"

.DEFAULT_GOAL := help
.PHONY: help demo test test-evidence test-all test-newest test-oldest test-gpu test-external fuzz lint notebooks docs dist bench report clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# pip would compile every module of torch and transformers; Python compiles those that are imported.
$(INSTALLED) $(DEV) $(DOCS): pyproject.toml constraints.txt
	@echo "Installing flexvarlen$(if $(filter $(DEV),$@), and the tools of its tests)$(if $(filter $(DOCS),$@), and mkdocs) into .venv (a minute or two) ..."
	@test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --no-compile -c constraints.txt -e ".$(if $(filter-out $(INSTALLED),$@),[$(@:.venv/.%=%)])"
	@touch $@

demo: $(INSTALLED) ## Compare every backend on tiny Llama, Qwen3 and Qwen3.5, on real text
	.venv/bin/flexvarlen compare --tokens 512 --out build/compare $(COMPARE_ARGS)

test: $(DEV) ## Run the tests of the library (PYTEST_ARGS="-k boundary" for some of them)
	.venv/bin/python -m pytest $(addprefix --ignore=,$(EVIDENCE)) $(PYTEST_ARGS)

test-evidence: $(DEV) ## Run the tests of the benchmarks, drift, the pages, examples and notebooks
	.venv/bin/python -m pytest $(EVIDENCE) $(PYTEST_ARGS)

test-all: $(DEV) ## Run all tests that need no GPU, the slow ones too
	.venv/bin/python -m pytest --slow $(PYTEST_ARGS)

# With TORCH=2.15.0 that torch too, with its CUDA libraries: gigabytes, into a folder of its own. Where
# pip's configuration caps torch, put PIP_CONFIG_FILE=/dev/null before it.
test-newest: $(DEV) ## Run the core tests with the newest transformers, accelerate, TRL, PEFT (TORCH=2.15.0)
	$(call over_venv,$(NEWEST))
	@$(NEWEST)/bin/python -m pip install -qq --upgrade \
		$(if $(TORCH),torch==$(TORCH),-c constraints.txt) $(RELEASES)
	@$(NEWEST)/bin/python -m pip install -qq --upgrade --no-deps --target $(NEWEST)/fla \
		fla-core flash-linear-attention
	@$(NEWEST)/bin/python -m pip list 2>/dev/null | grep -E "^(torch|$(subst $() ,|,$(RELEASES))) "
	PYTHONPATH=.:$(NEWEST)/fla $(NEWEST)/bin/python -m pytest -q tests/test_private_names.py
	@if ls $(NEWEST)/lib/python*/site-packages/*.dist-info >/dev/null 2>&1; then \
		PYTHONPATH=. $(NEWEST)/bin/python -m pytest $(CORE) \
			-k "not $(subst $() , and not ,$(SLOW_OF_CORE))" $(PYTEST_ARGS); \
	else echo "No release is newer than those of make test, so its tests are not run again."; fi

# click is typer's: the oldest that its oldest allows.
test-oldest: $(DEV) ## Run the tests of the commands and figures with the oldest packages allowed
	$(call over_venv,.venv-oldest)
	@.venv-oldest/bin/python -m pip install -qq $(foreach name,$(OLDEST),\
		$(shell sed -n 's/^  "\($(name)\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)) click==8.0
	@.venv-oldest/bin/python -m pip list 2>/dev/null | grep -E "^($(subst $() ,|,$(OLDEST))|click) "
	PYTHONPATH=. .venv-oldest/bin/python -m pytest tests/cli tests/report tests/mask/test_mask_picture.py \
		$(PYTEST_ARGS)

test-gpu: ## Run the tests that need CUDA, with PYTHON; installs nothing
	$(WITH_CHECKOUT) $(PYTHON) -m pytest -m gpu --slow $(PYTEST_GPU_ARGS)

test-external: $(DEV) ## Run transformers' own tests with our attention (minutes; pip fetches them once)
	.venv/bin/python -m tests.external $(EXTERNAL_ARGS)

fuzz: $(DEV) ## Run random batches, patched against unpatched (FUZZ_ARGS="--minutes 30"; default 1; with --heads only heads)
	.venv/bin/python -m tests.fuzz $(FUZZ_ARGS)

lint: $(DEV) ## Run ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

notebooks: $(DEV) ## Run the notebooks of examples/, and write their .ipynb anew
	.venv/bin/python -m tests.notebooks $(NOTEBOOKS)

docs: $(DOCS) ## Build the site of the pages and the reference into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build

# The wheel of dist/ is built from the sdist, and must be the one that the checkout gives. It is
# installed with its own dependencies only, and runs away from the checkout.
dist: $(DEV) ## Build the sdist and the wheel into dist/, and run the wheel in an empty environment
	@rm -rf dist build/dist && mkdir -p build/dist
	@echo "Building dist/ ..."
	@$(call quietly,build,.venv/bin/python -m build --no-isolation .)
	@$(call quietly,direct,.venv/bin/python -m build --no-isolation --wheel --outdir build/dist/direct .)
	@cmp dist/*.whl build/dist/direct/*.whl
	@echo "Installing the wheel into an empty environment ..."
	@$(BASE_PYTHON) -m venv build/dist/venv
	@build/dist/venv/bin/python -m pip install -qq --no-compile -c constraints.txt dist/*.whl
	@build/dist/venv/bin/python -I tests/installed.py
	@cd build/dist/venv && $(call quietly,doctor,env -u PYTHONPATH bin/flexvarlen doctor)
	@rm -rf build/dist
	@ls -sh dist

bench: ## Run benchmarks on a GPU, with PYTHON (BENCH_ARGS="list" lists the suites; default: all)
	$(WITH_CHECKOUT) $(PYTHON) -m flexvarlen bench $(or $(BENCH_ARGS),all)

report: $(DEV) ## Make the tables and figures of all pages anew from bench/results
	.venv/bin/flexvarlen bench report bench/results/*.jsonl --tables bench/results/tables --figures docs/images \
		$(foreach page,$(shell grep -rl "<!-- bench:" README.md docs),--page $(page)) >/dev/null
	.venv/bin/python docs/make_agents.py
	.venv/bin/python docs/make_several_gpus.py

clean: ## Remove what was built; the .venv folders stay
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +
