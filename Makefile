# make audit | test | check | fix | bench: each sets up .venv by itself.
# On Linux, PyPI's torch brings CUDA packages; PIP_EXTRA_INDEX_URL set to PyTorch's CPU index gets the small build.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: audit test check fix bench setup clean
audit: setup
	$(BIN)/kvaudit run examples/quickstart.yaml --out runs/quickstart --resume

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m bench.decode
	$(BIN)/python -m bench.learner
	$(BIN)/python -m bench.report

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv runs
