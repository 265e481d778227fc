# Two commands: `make demo` shows what the tool does, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONSAFEPATH := 1
# two test processes share the cores: more threads in each only wait for one another
export OMP_NUM_THREADS ?= 1
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test test-slow test-gpu check docs format clean help

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

demo: $(STAMP) ## Convert a small generated K3 checkpoint to DCP and back, and prove the files identical
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(STAMP) ## Run the quick tests
	$(TESTS) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(STAMP) ## Run the long tests: kills and resumes, large checkpoints
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

test-gpu: $(STAMP) ## Run the checks that need a CUDA device, at most 9 minutes
	PYTHON=$(BIN)/python tools/gpu_check.sh gpu-check

check: $(STAMP) ## Lint, format, types, import directions, file sizes, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/generate_docs.py --check

docs: $(STAMP) ## Write the generated pages again, and the output that the other pages show
	$(BIN)/python tools/generate_docs.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/run_docs.py --write README.md docs/*/*.md

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo-output
