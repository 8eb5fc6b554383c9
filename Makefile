# make demo        install into .venv and let the embedded model write
# make serve       the same, and serve it on this machine: prints the address
# make test        install into .venv, check and test all but the slow tests (some 16 minutes on two cores)
# make test-full   the slow tests, which `make test` leaves out
# make test-speed  comparisons of time, with nothing else on the machine
# make mutants     change 200 lines, one at a time, and see whether the tests notice (half an hour)
# make test-gpu    the tests that need a CUDA GPU; writes benchmarks/results/gpu_tests_*.json
# make bench-gpu   measure the small model's committed throughputs again on a GPU and compare
# make lint        ruff, mypy, import-linter
# make wheels      every distribution, into dist/
# make docs        the site of the documents, into site/; warnings are errors
#
# `make test PYTHON=/path/to/python` uses that environment and installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

DISTRIBUTIONS := . $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
EXAMPLES := $(sort $(patsubst %/pyproject.toml,%,$(wildcard examples/plugins/*/pyproject.toml)))
PACKAGES := nanovllm_core $(sort $(patsubst %/__init__.py,%,\
	$(wildcard plugins/*/nanovllm_*/__init__.py examples/plugins/*/nanovllm_*/__init__.py)))
METADATA := constraints.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS) $(EXAMPLES))

# The examples are linted from their folders, so that PYTHON=... needs none of them installed.
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

ifeq ($(origin PYTHON),undefined)
PY := .venv/bin/python
RUN_ENV := .venv/.run-installed
SERVE_ENV := .venv/.serve-installed
DEV_ENV := .venv/.dev-installed
else
PY := $(PYTHON)
RUN_ENV :=
SERVE_ENV :=
DEV_ENV :=
endif

# The first interpreter of a version that we support, asked for only when .venv has to be made.
FIND_PYTHON = for python in python3 python3.13 python3.12 python3.11; do \
	if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	then echo "$$python"; exit; fi; done; \
	echo "nanovllm needs Python 3.11, 3.12 or 3.13 on PATH" >&2; exit 1

# The tests start more than a hundred processes. Where this variable is set, as in many images of
# containers, each would compile torch, transformers and the core again.
export PYTHONDONTWRITEBYTECODE :=

# Threads of torch and of pytest's workers would fight over the cores.
# Of several threads each waits for all others in every operation: where another process has a core,
# or a container may use fewer than it sees, a small model writes ten times slower than with one.
ONE_THREAD := OMP_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(PY) -m pytest -n 2 --dist worksteal
COVERED := --cov=nanovllm_core --cov-report=
# Where a mistake would be silent, every line is tested.
FULLY_COVERED := nanovllm_core/engine/*,nanovllm_core/config/*,nanovllm_core/registry/*,nanovllm_core/selection/attention.py,nanovllm_core/selection/decisions.py,nanovllm_core/selection/fit.py,nanovllm_core/selection/kernels.py

.PHONY: help demo serve test test-full test-speed test-gpu mutants bench-gpu unit lint format wheels docs clean

help:
	@sed -n 's/^# \?//;1,/^$$/p' Makefile

.venv/bin/python:
	python=$$($(FIND_PYTHON)); "$$python" -m venv .venv

# The build back end comes first, so that it is pinned too and not fetched once per package. Python
# compiles what is imported, a small part of what torch and transformers bring.
INSTALL = $(PY) -m pip install -q --no-compile -c constraints.txt

# A machine with an NVIDIA GPU gets the kernels that are made for one.
COMMA := ,
ON_GPU := $(if $(shell command -v nvidia-smi 2>/dev/null),attention_triton kernels_triton)

.venv/.run-installed: $(METADATA) | .venv/bin/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e ".[qwen3,sdpa,demo$(if $(ON_GPU),$(COMMA)triton)]" \
		$(addprefix -e plugins/,model_qwen3 attention_sdpa checkpoint_demo $(ON_GPU))
	touch $@

.venv/.serve-installed: .venv/.run-installed
	$(INSTALL) --no-build-isolation -e ".[server]" -e plugins/server -e plugins/engine_processes
	touch $@

.venv/.dev-installed: $(METADATA) | .venv/bin/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation \
		-e ".[all,kit,dev]" $(addprefix -e ,$(filter-out .,$(DISTRIBUTIONS)) $(EXAMPLES))
	touch $@

demo: $(RUN_ENV)
	$(ONE_THREAD) $(PY) -m nanovllm_core generate --model demo --chat --stream \
		"Write a story about a fox named Mia, the forest and a key." "What is 27 + 15?"

serve: $(SERVE_ENV)
	$(ONE_THREAD) $(PY) -m nanovllm_core serve --model demo

lint: $(DEV_ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(PACKAGES)
	$(dir $(shell command -v $(PY)))lint-imports --config importlinter.toml
	PYTHONPATH="$(subst $(SPACE),:,$(EXAMPLES))" \
		$(dir $(shell command -v $(PY)))lint-imports --config examples/plugins/importlinter.toml

format: $(DEV_ENV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# What runs whole engines, kernels and plugins, suites on copies with planted bugs, and environments made
# for the purpose: without coverage, which makes it half as long again and measures the core by its guests.
UNCOVERED := plugins examples/plugins $(addprefix tests/,\
	benchmarks conformance e2e examples kernels mutants scaffold worker \
	test_docs.py test_docs_code.py test_packaging.py test_readme.py test_site.py test_tutorials.py)

# Coverage is judged before the summary is lost to view: pytest's exit status, then two thresholds.
unit: $(DEV_ENV)
	$(PYTEST) $(COVERED) -m "not slow" tests $(addprefix --ignore=,$(UNCOVERED))
	$(PY) -m coverage report --fail-under=90
	$(PY) -m coverage report --fail-under=100 --include="$(FULLY_COVERED)"
	$(PYTEST) -m "not slow" $(UNCOVERED)

test: lint unit

test-full: $(DEV_ENV)
	$(PYTEST) -m "slow and not alone"

test-speed: $(DEV_ENV)
	$(PY) -m pytest -m alone

# Most of their time is compilation, so the tests that can share a GPU run side by side.
GPU_JOBS ?= 8
# The suites of plugins, which take a GPU where there is one.
GPU_SUITES := $(wildcard plugins/attention_*/tests/test_conformance.py) \
	$(wildcard plugins/kernels_*/tests/test_conformance.py)
PYTEST_GPU := $(ONE_THREAD) $(PY) -m pytest -q -rfE

test-gpu: $(DEV_ENV)
	failed=0; \
	$(PYTEST_GPU) -m "gpu and not whole_gpu" -n $(GPU_JOBS) --dist worksteal \
		--report-json benchmarks/results/gpu_tests_shared.json || failed=1; \
	$(PYTEST_GPU) -m "gpu and whole_gpu" \
		--report-json benchmarks/results/gpu_tests_whole.json || failed=1; \
	$(PYTEST_GPU) -n $(GPU_JOBS) $(GPU_SUITES) || failed=1; \
	exit $$failed

# Another seed draws other lines.
SEED ?= 0
COUNT ?= 200
mutants: $(DEV_ENV)
	$(ONE_THREAD) $(PY) -m tests.mutants --seed $(SEED) --count $(COUNT)

bench-gpu: $(DEV_ENV)
	$(PY) benchmarks/remeasure.py benchmarks/results/h200/throughput_*.json \
		$(wildcard benchmarks/results/h200/fixed_*.json)

wheels: $(DEV_ENV)
	for distribution in $(DISTRIBUTIONS); do \
		$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist "./$$distribution"; done

# Nothing is fetched; the variable silences what the theme prints about another product.
docs: $(DEV_ENV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf .venv dist build site .coverage .mutants .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
