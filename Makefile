# `make test` checks everything that a change must pass; `make demo` shows what the project does.
# Set-up happens by itself, once, and again only when what it is made of changed.

# Tried in this order; the first that is Python 3.11 or newer and can make virtual environments is taken.
PYTHON ?= python3.11 python3.12 python3.13 python3

READY := .venv/.ready
TESTS_READY := .venv/.ready-for-tests
BIN := .venv/bin

# Tests start hundreds of Python processes, and pytest rewrites each file of tests: what was compiled is kept.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests side by side; auto: two more than there are cores, as much of what tests do is to wait.
JOBS ?= auto

# Goals named together run in the order given, also with -j: tests and demo measure time and want the cores.
.NOTPARALLEL:
.PHONY: help setup horovod demo docs check compiled test test-more test-all test-versions test-seconds chaos fuzz dist lock clean

help:
	@echo "make demo      train, share, meter and combine an ensemble; about a minute"
	@echo "make test      lint, types and tests, ten to fifteen minutes on two cores: what a change must pass"
	@echo "make test-more the same properties on Ray, in a browser, over MPI, with more examples; twenty minutes"
	@echo "make docs      the documentation as a site, build/site/index.html"
	@echo "make check     lint and types only"
	@echo "make test-seconds  measure the CPU-seconds of both tiers, for docs/how-to/test.md"
	@echo "make test-versions  the demo, searches and Ray's tests with the oldest and the newest Ray and Optuna"
	@echo "make test-all  every test but the chaos tests: before a release"
	@echo "make chaos     drawn histories of what is killed and stops: a hundred of the stream, 150 of whole runs"
	@echo "make fuzz      damaged JPEG files through the library in C, under the sanitizers of gcc; MINUTES=10 SEED=0"
	@echo "make setup     only make .venv, without what tests need        make clean     remove what make made"
	@echo "make dist      build the wheel and the source distribution into dist/"
	@echo "make lock      resolve deploy/requirements.lock again, from pyproject.toml and constraints.txt"
	@echo "make horovod   build Horovod into .venv, for members and feeders that communicate over it (optional)"

setup: $(READY)
	@:

# -qq keeps errors and drops pip's warnings about package locations that do not exist on this machine.
$(READY): pyproject.toml constraints.txt setup.py pipelines/prepare/jpeg_part.c
	@for python in $(PYTHON); do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: Python 3.11 or newer with its venv module is needed; none of these is that: $(PYTHON)." >&2; \
	  echo "make: install it (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	if ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  "$$found" -m venv --clear .venv; \
	fi
	@echo "Setting up .venv with $$($(BIN)/python --version): a minute or two, once"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e .
	@touch $@

# What only tests, lint and documentation need.
$(TESTS_READY): $(READY)
	@echo "Adding to .venv what the tests need: some minutes, once"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@# It asks for pandas below 3.1, and runs with that of constraints.txt; only tests use these two.
	@$(BIN)/python -m pip install -qq --no-deps -c constraints.txt pytorch-forecasting peft
	@$(BIN)/python deploy/mend_torchvision.py
	@touch $@

# Kept in the user's cache once it is built.
horovod: $(READY)
	@deploy/build-horovod.sh $(BIN)/python

demo: $(READY)
	@$(BIN)/ensemble demo --dashboard

# Of a warning, such as a link that leads nowhere, the build fails.
docs: $(TESTS_READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

check: $(TESTS_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

compiled: $(TESTS_READY)
	@$(BIN)/python -m compileall -q ensemble pipelines

test: check compiled
	$(BIN)/python -m pytest -n $(JOBS) -m "not more and not slow and not chaos"

test-more: compiled
	$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile more -m "(more or hypothesis) and not slow and not chaos"

test-all: check compiled
	$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile more -m "not chaos"

test-versions: compiled
	$(BIN)/python deploy/try_versions.py

test-seconds: compiled
	rm -rf build/cpu
	CPU_SECONDS=build/cpu $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not chaos"
	$(BIN)/python tests/support/kit/cpu_seconds.py build/cpu

chaos: $(TESTS_READY)
	$(BIN)/python -m pytest -m chaos

MINUTES ?= 10
SEED ?= 0
fuzz: $(TESTS_READY)
	$(BIN)/python tests/fuzz/jpeg_part.py --minutes $(MINUTES) --seed $(SEED)

dist: $(TESTS_READY)
	$(BIN)/python -m build --no-isolation .

# Every version with its hashes, of an installation with all extras but those for development and documentation.
LOCKED := compression tensorboard mlflow wandb serve data torchvision notebook lightning transformers
lock: $(TESTS_READY)
	$(BIN)/uv pip compile pyproject.toml $(LOCKED:%=--extra %) -c constraints.txt --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --quiet \
	  --custom-compile-command "make lock" --output-file deploy/requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
