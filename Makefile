# `make help` lists the targets. Each works alone on a fresh checkout: what it needs is installed once into .venv.

.PHONY: help demo test check bench clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
ONE_THREAD := OMP_NUM_THREADS=1

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile

demo: $(RUNTIME) ## answer the prompts of docs/demo_prompts.txt with a 135M model
	@$(BIN)/megallm generate --prompts docs/demo_prompts.txt --max-tokens 64 --progress

# Two processes, each with whole files: no test needs more than one core for long, and a GPU's can't share it.
test: $(DEV) ## run the tests
	@$(ONE_THREAD) $(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist loadfile)

check: $(DEV) ## lint, format, types, floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache

bench: $(BENCH) ## measure: make bench ARGS="offline --model smollm2-135m"
	@$(BIN)/python -m benchmarks $(or $(ARGS),control_plane)

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml
	@.ci/install
	@touch $@

# The extras bring the runtime's own requirements along, so the runtime needs no installation of its own.
$(DEV): pyproject.toml
	@.ci/install dev
	@touch $@ $(RUNTIME)

$(BENCH): pyproject.toml
	@.ci/install hf
	@touch $@ $(RUNTIME)
