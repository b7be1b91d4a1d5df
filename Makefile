# TraPPM's everyday commands; `make` alone lists them.
# Everything runs in .venv, which is made on demand: a clone, Python 3.11 to 3.13 with venv, git and
# make are all that is needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?=

# The tests start hundreds of processes; each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
UNFINISHED := $(VENV)/.unfinished

# With --quiet, mkdocs counts no warnings, and --strict has no effect.
BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# One line of progress; all that pip says is shown only if it fails.
QUIETLY := $(PYTHON) deploy/quiet_pip.py

# Debian keeps what `venv` needs to install pip in a package of its own (python3-venv); without it, the
# pip that is there installs one into the new environment.
MAKE_VENV = $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 \
  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
       && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }

.PHONY: help install campaign test test-slow test-gpu lint types check check-deps format wheel release docs default-snapshot lock clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s  %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## make .venv with the pinned versions of everything

# An installation that was cut off may have left half a package behind, which pip cannot see: the
# next one starts over. The stamp carries the time at which installing began, so a pyproject.toml
# edited meanwhile is noticed.
$(INSTALLED): pyproject.toml constraints.txt
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "Making $(VENV)"; $(MAKE_VENV); fi
	@rm -f $(INSTALLED); touch $(UNFINISHED)
	@echo "Installing into $(VENV) what constraints.txt pins (some minutes the first time)"
	@export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1; \
	  $(QUIETLY) $(BIN)/python -m pip install -c constraints.txt setuptools; \
	  $(QUIETLY) $(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	@mv $(UNFINISHED) $(INSTALLED)

campaign: $(INSTALLED) ## run a whole labelling campaign on this machine (ARGS='--help' for options)
	@$(BIN)/trappm campaign launch --preset laptop $(ARGS)

# A file's tests stay in one process: they share what is dear to make. A test that measures takes the
# lock of its device, so two of them wait for each other and do not disturb each other.
test: $(INSTALLED) ## run the tests (ARGS='-k name' for some of them)
	@$(BIN)/python -m pytest -m 'not slow and not gpu' -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(INSTALLED) ## run the tests that take minutes
	@$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

test-gpu: $(INSTALLED) ## run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(INSTALLED) ## check style, formatting, imports, texts and the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python deploy/check_texts.py
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  $(BUILD_DOCS) --site-dir "$$folder/site" >"$$folder/log" 2>&1 || { cat "$$folder/log" >&2; exit 1; }

types: $(INSTALLED) ## check types
	@$(BIN)/mypy

check: lint types test ## all that CI checks

# The audit is strict: an index that does not have PyPI's vulnerabilities answers that it knows no
# package, which would pass for a clean result. pip-audit stays out of .venv.
check-deps: $(INSTALLED) ## check .venv against constraints.txt, and that against known vulnerabilities
	@export PIP_DISABLE_PIP_VERSION_CHECK=1; $(BIN)/python -m pip check; \
	  others=$$($(BIN)/python -m pip freeze --all --exclude-editable \
	    | sed -E 's/\+[a-z0-9.]+$$//; / @ /d; /^(pip|triton)==/d; /^cuda-/d; /^nvidia-ml-py/p; /^nvidia-/d' \
	    | grep -vxF -f constraints.txt | paste -sd ' ' || true); \
	  if [ -n "$$others" ]; then echo "not as constraints.txt pins it: $$others; try: make clean install" >&2; exit 1; fi; \
	  folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  $(BIN)/python -m pip install -q --target "$$folder" pip-audit 2>"$$folder/why" \
	    && PYTHONPATH="$$folder" $(BIN)/python -m pip_audit --strict --progress-spinner off \
	      --no-deps --disable-pip -r constraints.txt 2>"$$folder/why" \
	    || { grep '^Found' "$$folder/why" >&2 \
	         || echo "not audited: $$(tail -n 1 "$$folder/why")" >&2; exit 1; }

format: $(INSTALLED) ## put formatting right, and what of style can be
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

wheel: $(INSTALLED) ## build dist/trappm-*.whl, which the nodes of ray_config.yaml install
	@rm -rf build dist
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@rm -rf build; ls dist

# twine stays out of .venv, as pip-audit does.
release: wheel ## build dist/ whole, wheel and sdist, and check what an index would show of them
	@$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder" *.egg-info' EXIT; \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --target "$$folder" twine; \
	  PYTHONPATH="$$folder" $(BIN)/python -m twine check --strict dist/*

docs: $(INSTALLED) ## build the documentation into site/, reference included (any warning is an error)
	@$(BUILD_DOCS); ls site/index.html

# Profiles that are missing are made first (an hour on two cores), and kept; DATA is not copied.
DATA ?= ../shared/data
default-snapshot: $(INSTALLED) ## train the snapshot that ships with the package anew (DATA=folder)
	@TRAPPM_DATA=$(DATA) $(BIN)/python -m research snapshot

# torch and torchvision stay as constraints.txt has them (change the two lines there to move them);
# everything else goes to its newest version. torch names the CUDA libraries that it needs, so they
# are left out: the same file serves machines with and without a GPU.
lock: ## write constraints.txt anew, with the newest versions
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1; \
	  grep -E '^torch(vision)?==' constraints.txt >"$$folder/torch.txt"; \
	  $(PYTHON) -m venv "$$folder/venv"; \
	  $(QUIETLY) "$$folder/venv/bin/python" -m pip install --upgrade setuptools; \
	  $(QUIETLY) "$$folder/venv/bin/python" -m pip install -c "$$folder/torch.txt" \
	    --no-build-isolation -e '.[dev]'; \
	  "$$folder/venv/bin/python" -m pip check; \
	  { sed -n '/^#/p' constraints.txt; \
	    "$$folder/venv/bin/python" -m pip freeze --all --exclude-editable \
	    | sed -E 's/\+[a-z0-9.]+$$//; / @ /d; /^(pip|triton)==/d; /^cuda-/d; /^nvidia-ml-py/p; /^nvidia-/d'; \
	  } >"$$folder/constraints.txt"; \
	  cp "$$folder/constraints.txt" constraints.txt
	@wc -l constraints.txt

clean: ## remove .venv and everything made by tools
	@rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
