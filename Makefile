# Everything a newcomer runs. `make` alone prints the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

AIRFLOW := .venvs/airflow/bin
ENGINE := .venvs/engine/bin
# Both environments are complete and locked: nothing of the user's own may leak in.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME

UV ?= uv
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header
ENGINE_EXTRAS := --extra engine --extra test --extra fake-s3 --extra build
# In requirements-engine-cpu.txt already.
NOT_CUDA := triton filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing-extensions

.PHONY: help setup demo test stop clean lock

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Build .venvs/airflow and .venvs/engine from the locks (a second run does nothing)
	@docker/install.sh airflow & airflow=$$!; status=0; docker/install.sh engine || status=$$?; wait $$airflow && exit $$status

demo: setup ## Prompts to a served drafter, through Airflow (TARGET=smollm2 or a directory, PROMPTS=file)
	@exec $(AIRFLOW)/eagle3 demo $(if $(TARGET),--target '$(TARGET)') $(if $(PROMPTS),--prompts '$(PROMPTS)')

test: setup ## Linters, types, import contracts, then the tests of both environments
	$(AIRFLOW)/ruff check .
	$(AIRFLOW)/mypy --python-executable $(ENGINE)/python --package eagle3_core
	$(AIRFLOW)/mypy --python-executable $(ENGINE)/python benchmarks
	$(AIRFLOW)/mypy operators dags
	$(AIRFLOW)/lint-imports
	$(ENGINE)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/integration tests/unit tests/contract
	$(AIRFLOW)/python -m pytest -q tests/operators tests/dags

stop: ## Stop the Airflow that `make demo` started, and every job of its runs
	@$(AIRFLOW)/eagle3 stop

clean: ## Remove the environments and caches; runs and artifacts under .eagle3 stay
	rm -rf .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock: ## Compile the lock files anew (needs uv; for maintainers)
	$(COMPILE) pyproject.toml --extra airflow --extra lint --extra test --extra build -o requirements-airflow.txt
	$(COMPILE) pyproject.toml requirements-engine-cpu.in $(ENGINE_EXTRAS) --excludes requirements-engine-cpu.excludes \
		-o requirements-engine-cpu.txt
	$(COMPILE) pyproject.toml requirements-engine-gpu.in $(ENGINE_EXTRAS) --prerelease-package flash-attn-4=allow \
		-o requirements-engine-gpu.txt
	sed -n 's/^\(torch==[^ +]*\)+cpu.*/\1/p' requirements-torch-cpu.txt | $(COMPILE) - -c requirements-engine-cpu.txt \
		$(NOT_CUDA:%=--no-emit-package %) -o requirements-torch-cuda.txt
