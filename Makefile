PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints-dev.txt
PINS := pyproject.toml constraints-dev.txt
BENCH := .bench
# Two processes of one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu lint docs test-lowest bench bench-engine bench-peers bench-memory bench-processes bench-budget bench-views bench-mislabel bench-whole-case bench-lds bench-lds-peers bench-alibi clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(VENV)/.demo ## Train on digits with wrong labels and show the samples behind the mistakes
	$(BIN)/python examples/mislabel_digits.py

test: $(VENV)/.dev ## Run the tests, without the slow ones
	$(PYTEST) -n 2

test-slow: $(VENV)/.dev ## Run the slow tests
	$(PYTEST) -n 2 -m slow

test-gpu: $(VENV)/.dev ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu -s

test-lowest: $(BENCH)/lowest/.ready ## Run the tests with the lowest supported releases
	$(BENCH)/lowest/bin/python -m pytest -W ignore tests

lint: $(VENV)/.dev ## Check style, types, import contracts and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

docs: $(VENV)/.dev ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.demo ## Time the pass over the head layer
	$(BIN)/python benchmarks/head_pass.py

bench-engine: $(VENV)/.demo ## Time the whole pass on four networks, beside the peers that have an environment
	$(BIN)/python benchmarks/engine.py --peers $(BENCH)

bench-peers: $(BENCH)/alibi/.ready $(BENCH)/captum/.ready $(BENCH)/dattri/.ready ## Build the peers' environments

bench-memory: $(VENV)/.demo ## Measure the peak memory of passes over few and many samples, and within a budget
	$(BIN)/python benchmarks/memory.py

bench-processes: $(VENV)/.demo ## Time a pass in one process and in two
	$(BIN)/python benchmarks/processes.py

bench-budget: $(VENV)/.demo ## Measure the share of a run that reports take, with and without a budget
	$(BIN)/python benchmarks/budget.py

bench-views: $(VENV)/.demo ## Time drawing and writing a report
	$(BIN)/python benchmarks/views.py

bench-mislabel: $(BENCH)/mislabel/.ready ## Compare mislabel scores, in the folder GRADSIM_CACHE, with human noise from GRADSIM_DATA
	PYTHONPATH=. $(BENCH)/mislabel/bin/python benchmarks/mislabel.py --rivals cleanlab captum --act

bench-whole-case: $(BENCH)/mislabel/.ready ## Find, relabel, train again on human label noise, data and folder as for bench-mislabel
	PYTHONPATH=. $(BENCH)/mislabel/bin/python benchmarks/whole_case.py

bench-lds: $(VENV)/.demo ## Compare scores with retraining, in the folder GRADSIM_CACHE, on mnist_60k.npz from GRADSIM_DATA
	PYTHONPATH=. $(BIN)/python benchmarks/lds.py

bench-alibi: $(VENV)/.demo $(BENCH)/alibi/.ready ## Compare scores and prototypes with alibi's
	PYTHONPATH=. $(BIN)/python benchmarks/alibi_parity.py --peers $(BENCH)
	PYTHONPATH=. $(BIN)/python benchmarks/alibi_prototypes.py --peers $(BENCH)

bench-lds-peers: $(BENCH)/lds/.ready ## Compare scores of kronfluence and dattri with the same retraining
	TQDM_DISABLE=1 $(BENCH)/lds/bin/python benchmarks/lds_peers.py

clean: ## Remove the environment, caches and built files
	rm -rf $(VENV) $(BENCH) site build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache lightning_logs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Two stamps, so that the demo does not wait for the development tools.
$(VENV)/.demo: $(PINS) | $(BIN)/python
	$(INSTALL) -e ".[examples]"
	touch $@

$(VENV)/.dev: $(PINS) | $(BIN)/python
	$(INSTALL) -e ".[dev]"
	touch $(VENV)/.demo $@

$(BENCH)/lowest/.ready: constraints-lowest.txt pyproject.toml
	$(PYTHON) -m venv $(BENCH)/lowest
	$(BENCH)/lowest/bin/pip install --quiet --disable-pip-version-check -r constraints-lowest.txt
	$(BENCH)/lowest/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# Each has its own: their dependencies exclude one another, and ours.
$(BENCH)/%/.ready: benchmarks/peers/requirements-%.txt
	$(PYTHON) -m venv $(BENCH)/$*
	$(BENCH)/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
