# Every target makes the environment it needs; nothing is installed outside this folder and the package cache.
PYTHON ?= python3
ARGS ?=
WHEELS ?=
FUZZ_SECONDS ?= 60

VENV := .venv
DEMO := .venv-demo
BENCH := .venv-bench
CUBINS := .venv-cubins
TRANSFORMERS := 5.17.0 5.23.0
SHIM := requirements/vllm-metadata
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo bench gpu test test-transformers lint types fuzz vectors mutations audit cubins locks env clean clean-bench distclean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO)/.ready ## Encrypt a real language model and let it answer through Transformers and vLLM
	@$(DEMO)/bin/python examples/demo.py $(ARGS)

bench: $(BENCH)/.ready ## Measure against the other loaders: results, charts and tables (ARGS="--only load" and the like)
	@$(BENCH)/bin/python -m benchmarks $(ARGS)
	@$(BENCH)/bin/python -m benchmarks.charts
	@$(BENCH)/bin/python -m benchmarks.report --write

# The machine's own Python: its torch fits its driver. What else is missing goes into build/gpu, from WHEELS or the registry.
gpu: ## Build, test and measure the device path on this machine's GPU, in ten minutes (PYTHON= with torch, WHEELS=folder)
	@$(PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

test: $(VENV)/.ready ## The whole test suite, in its own environment (ARGS="-k header" and the like go to pytest)
	@$(VENV)/bin/python -m pytest $(ARGS)

test-transformers: $(TRANSFORMERS:%=.venv-transformers-%/.ready) ## The Transformers tests at both ends of the supported range
	@set -e; for version in $(TRANSFORMERS); do \
		echo "== Transformers $$version"; \
		.venv-transformers-$$version/bin/python -m pytest tests/integration/hf tests/contract/test_transformers_names.py $(ARGS); \
	done

lint: $(VENV)/.ready ## Style, formatting, and who may import whom
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/lint-imports

types: $(VENV)/.ready ## mypy, strict, on the package
	@$(VENV)/bin/mypy

fuzz: $(VENV)/.ready ## Fuzz the parsers of untrusted bytes for a minute (FUZZ_SECONDS=60)
	@set -e; set -- tests/fuzz/fuzz_*.py; test -e "$$1" || { echo "error: no tests/fuzz/fuzz_*.py" >&2; exit 1; }; \
	seconds=$$(( $(FUZZ_SECONDS) / $$# + 1 )); \
	for target; do \
		name=$$(basename "$$target" .py); mkdir -p build/fuzz/$$name; \
		seeds=$$(ls -d tests/fuzz/seeds/$$name 2>/dev/null || true); \
		echo "== $$name, $$seconds s"; \
		$(VENV)/bin/python "$$target" -max_total_time=$$seconds -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
			-print_final_stats=1 -artifact_prefix=build/fuzz/$$name- build/fuzz/$$name $$seeds; \
	done

vectors: $(VENV)/.ready ## Write tests/vectors again from their script
	@$(VENV)/bin/python -m tests.vectors.make

mutations: $(VENV)/.ready ## Plant faults in the device source and see that the tests catch each of them (needs g++)
	@$(VENV)/bin/python -m tests.unit.device.mutations $(ARGS)

audit: $(VENV)/.ready ## Follow secrets through the machine code of the device kernels (needs no GPU)
	@$(VENV)/bin/python csrc/audit.py $(ARGS)

cubins: $(CUBINS)/.locked ## Compile csrc into the device code that the wheel carries (no GPU, no compiler needed)
	@PYTHONPATH=src $(CUBINS)/bin/python tools/make_cubins.py $(ARGS)

locks: $(VENV)/.ready ## Resolve requirements/*.in into the locks again (ARGS=--upgrade for new versions)
	@UV=$(CURDIR)/$(VENV)/bin/uv requirements/lock $(ARGS)

env: $(VENV)/.ready ## Only make the environment of the tests

clean: ## Remove what the targets above built, but not the environments
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis .coverage
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-bench: ## Remove the models that benchmarks were run on (several GB, outside this folder)
	@$(PYTHON) -m benchmarks.cache --remove

distclean: clean ## Remove the environments as well
	@rm -rf $(VENV) $(DEMO) $(BENCH) $(CUBINS) $(TRANSFORMERS:%=.venv-transformers-%)

# Two stamps for each environment: .locked follows the locks, .ready also our own metadata (entry points). The project is
# installed in place, built with the pinned backend that the locks have put there.
$(VENV)/.locked: requirements/test.txt
$(DEMO)/.locked: requirements/demo.txt
$(BENCH)/.locked: requirements/bench.txt
$(VENV)/.locked $(DEMO)/.locked $(BENCH)/.locked: requirements/models.txt requirements/build.txt requirements/sync
	@requirements/sync $(@D) $(filter-out %/sync %/build.txt,$^)
	@touch $@

$(VENV)/.ready $(DEMO)/.ready $(BENCH)/.ready: %/.ready: %/.locked pyproject.toml $(SHIM)/pyproject.toml
	@$*/bin/uv pip install --quiet --python $*/bin/python --no-deps --no-build-isolation ./$(SHIM) --editable .
	@touch $@

$(CUBINS)/.locked: requirements/cubins.txt requirements/build.txt requirements/sync
	@requirements/sync $(@D) $<
	@touch $@

.venv-transformers-%/.locked: requirements/transformers-%.txt requirements/models.txt requirements/sync
	@requirements/sync $(@D) $(filter-out %/sync,$^)
	@touch $@

.venv-transformers-%/.ready: .venv-transformers-%/.locked pyproject.toml
	@$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

.PRECIOUS: .venv-transformers-%/.locked
