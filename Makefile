# `make` lists the targets. `make run` and `make test` do all their set-up on a fresh machine.

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Options of the study: make run ARGS="--model mlp --accumulate 1,4"
ARGS ?=
# Options of pytest: make test PYTEST_ARGS="-k parts"
PYTEST_ARGS ?=
# How many tests at a time, where they may run beside each other.
JOBS ?= 2
# One more index to find torch in. On Linux plain PyPI has the CUDA build of several GB; a machine
# without a GPU is better served by the CPU wheels that pytorch.org offers:
# make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

# Installed again only when these change.
SOURCES_OF_INSTALL := pyproject.toml constraints.txt
# As many ranks as GPUs; without a GPU two, so that there is something to communicate.
COUNT_RANKS := import os, torch; gpus = torch.cuda.device_count(); \
	cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(); \
	ranks = gpus or min(2, cores); print(ranks, max(1, cores // ranks))

.DEFAULT_GOAL := help
.PHONY: help run test lint docs docs-links notebooks clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.installed ## Install what is missing, then measure a small model on this machine
	@set -- $$($(BIN)/python -c '$(COUNT_RANKS)') && \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$2} \
	$(BIN)/torchrun --standalone --nproc_per_node=$$1 -m ddp_profiler.run $(ARGS)

test: $(VENV)/.installed-test system ## Install what is missing, then run all checks and tests
	@$(MAKE) --no-print-directory lint docs
	$(BIN)/python tests/in_two_parts.py $(JOBS) $(PYTEST_ARGS)
	$(BIN)/pytest --doctest-modules -q ddp_profiler

lint: $(VENV)/.installed-test ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# A link or an anchor that does not hold and a page that the index does not name are errors; nothing
# is fetched. -E reads all pages anew: of one that has not changed nothing would be said again.
docs: $(VENV)/.installed-test ## Build the site of the documents into build/docs
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs -d build/doctrees . build/docs

docs-links: $(VENV)/.installed-test ## Ask the network whether the documents' external links hold
	$(BIN)/sphinx-build -q -b linkcheck -c docs -d build/doctrees . build/linkcheck

notebooks: $(VENV)/.installed-test ## Run the notebooks again and keep their outputs
	$(BIN)/python notebooks/execute.py

clean: ## Remove what was installed and built; measured runs stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The tests of the network lab need ip and tc, those of report.html a browser; without root and
# without these they are skipped.
.PHONY: system
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		! { command -v ip && command -v tc; } >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q iproute2; \
	fi
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		! { command -v chromium || command -v chromium-browser || command -v google-chrome; } \
		>/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
		--no-install-recommends chromium; \
	fi

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "This needs Python 3.11 or later, and there is none on the PATH." >&2; \
		echo "Install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv; \
		else \
			echo "$(PYTHON) cannot make virtual environments: its venv module is missing." >&2; \
			echo "Install it; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; \
		fi; fi
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the other index is asked for nothing else, and with the pinned version in
# place nothing that follows can bring another. Its dependencies come with the next step.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(BIN)/pip install -q --no-deps -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.installed: $(SOURCES_OF_INSTALL) $(VENV)/.torch
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(SOURCES_OF_INSTALL) $(VENV)/.torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test,docs]'
	@touch $@ $(VENV)/.installed
