# One command each; every target does its own set-up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for real processes, so more of them than there are cores run at once.
PYTEST ?= -n 4 --dist loadfile
PROTOS := $(shell find protos -name '*.proto')

.PHONY: setup demo test lint clean

setup: $(VENV)/.stubs

$(VENV)/.installed: requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked packages into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.stubs: $(VENV)/.installed $(PROTOS) scripts/generate_stubs.py
	@$(BIN)/python scripts/generate_stubs.py
	@touch $@

demo: setup
	@$(BIN)/hearth demo

test: setup
	@$(BIN)/python -m pytest $(PYTEST)

lint: setup
	@$(BIN)/buf lint
	@$(BIN)/python scripts/generate_docs.py --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) .hearth .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find hearth -path '*/v1/*_pb2*' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
