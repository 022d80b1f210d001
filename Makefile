# make setup | test | test-system | test-full | demo. Each works on a fresh machine with Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# How many processes run tests.
WORKERS ?= 3
# Hundreds of processes import the same modules: compiled once.
export PYTHONDONTWRITEBYTECODE :=

# The development environment but for torch, with hashes, for the Python that it was made for.
LOCK := requirements/dev.lock
# Versions of what test-system needs beside it, for that Python too.
CONSTRAINTS = $$($(BIN)/python -c 'import sys; print(("/dev/null", "requirements/system.txt")[sys.version_info[:2] == (3, 11)])')

.PHONY: setup lock test lint types floors pytest test-system long system test-full demo clean

setup: $(VENV)/.ready

# Anew whenever what is declared has changed. Compiled here, because a shell may forbid a command to keep what it
# compiles: then each would compile again what it imports, a quarter of a second for `shoal plan`.
$(VENV)/.ready: pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shoal needs Python 3.11 or newer; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two"
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
		$(BIN)/python -m pip install -qq --no-deps --require-hashes --requirement $(LOCK) && \
		$(BIN)/python -m pip install -qq --no-build-isolation --editable '.[hf,dev]'; \
	else \
		echo "$(LOCK) is for Python 3.11: here versions are what pyproject.toml allows" && \
		$(BIN)/python -m pip install -qq --upgrade pip && \
		$(BIN)/python -m pip install -qq --editable '.[hf,dev]'; \
	fi
	@$(BIN)/python -m compileall -q src
	@touch $@

# Newer versions: what pip chooses today, with the hash of every file of it. Takes minutes.
lock:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python requirements/lock.py

# Side by side: most of the checks need one core, and most tests wait for processes.
test: setup
	@$(MAKE) --no-print-directory --output-sync=line --jobs=2 lint types floors pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

floors: setup
	$(BIN)/lint-imports

# Most tests wait for processes: more of them at once than there are cores.
pytest: setup
	$(BIN)/python -m pytest -m 'not system and not long and not full' -n $(WORKERS) --dist worksteal

# Tests that take long, beside tests that need system packages or root, which mostly wait.
test-system: setup
	@$(BIN)/python -m pip install -qq --constraint $(CONSTRAINTS) --editable '.[system]' || echo "not all of [system] could be installed: tests of what is missing are skipped"
	@apt-get update -qq > /dev/null 2>&1 || true
	@command -v chromium > /dev/null || apt-get install -qq -y chromium > /dev/null 2>&1 || echo "no chromium: pages are not opened in a browser"
	@command -v ip > /dev/null || apt-get install -qq -y iproute2 > /dev/null 2>&1 || echo "no iproute2: no network is cut between nodes"
	@command -v slurmctld > /dev/null || apt-get install -qq -y --no-install-recommends slurm-wlm munge > /dev/null 2>&1 || echo "no Slurm: its jobs are not tested"
	@$(MAKE) --no-print-directory --output-sync=line --jobs=2 long system

long: setup
	$(BIN)/python -m pytest -m 'long and not full' -n $(WORKERS) --dist worksteal

# Two files at a time: one of them waits for Slurm or Ray for most of its time.
system: setup
	$(BIN)/python -m pytest -m system -n 2 --dist loadfile

# Every member of products of layouts, recipes and models whose covering members the other two run. Half an hour or more.
test-full: setup
	$(BIN)/python -m pytest -m full -n $(WORKERS) --dist worksteal

# Starts anew each time; an earlier demo's run is moved aside.
demo: setup
	$(BIN)/shoal doctor
	$(BIN)/shoal plan tiny --on local --seq 128 --batch 16 --precision fp32
	$(BIN)/shoal parity examples/tiny.toml --layouts "dp=2;fsdp=2;tp=2;pp=2" --precision fp64 --set recipe.seq=32 --set cluster.share=true
	$(BIN)/shoal train examples/tiny.toml --fresh

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
