# `make` regenerates everything at the scale of config.yaml; `make test` runs the tests. Both set up .venv first, once.
# SNAKEMAKE_ARGS passes further arguments: make SNAKEMAKE_ARGS="--config scale=desk"

SHELL := /bin/bash
.DEFAULT_GOAL := all
.PHONY: all setup test help

STAMP := .venv/.installed
# The first Python that runs and is 3.11 or 3.12.
PYTHON ?= $(shell for name in python3.11 python3.12 python3 python; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$name && break; done)
IN_VENV := . .venv/bin/activate &&

help:
	@echo "make          set up .venv, then regenerate every table and figure (config.yaml: scale, quick by default)"
	@echo "make test     set up .venv, then run the tests"
	@echo "make setup    set up .venv only"

all: setup
	@echo "== regenerating everything: snakemake --cores all $(SNAKEMAKE_ARGS)"
	$(IN_VENV) snakemake --profile workflow/profiles/local $(SNAKEMAKE_ARGS)

test: setup
	@echo "== running the tests"
	$(IN_VENV) OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

setup: $(STAMP)

$(STAMP): pyproject.toml envs/constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed (with pip and venv); none found on PATH" >&2; exit 1; }
	@echo "== setting up .venv with $(PYTHON) (once; a few minutes)"
	$(PYTHON) -m venv --clear .venv
	$(IN_VENV) python -m pip install --quiet --disable-pip-version-check -c envs/constraints.txt -e '.[test]'
	@touch $(STAMP)
