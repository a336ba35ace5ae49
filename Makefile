# Works with GNU Make 3.81 (macOS) and newer. `make` alone lists the targets.

# The first Python that is new enough; name another with `make PYTHON=/path/to/python3 ...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# More flags for pip, for example an index that holds the CPU build of torch.
PIP_FLAGS ?=
# Arguments of the demo: make demo ARGS="--minutes 30 --seed 1"
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test check format bench clean

help:
	@echo "make demo     the whole loop on this machine, about 15 minutes (ARGS=\"--minutes 30 --seed 1\")"
	@echo "make install  .venv with every pinned dependency"
	@echo "make test     every test, under 15 minutes on two cores"
	@echo "make check    format, lint, types"
	@echo "make format   rewrite to the format that check wants"
	@echo "make bench    every benchmark in benchmarks/"
	@echo "make clean    remove .venv and every build output"

install: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "keepgrad needs Python 3.11 or newer and found none: install it (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python), or name one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "keepgrad needs Python 3.11 or newer and $(PYTHON) is older: name a newer one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: on Debian and Ubuntu install python3-venv (apt install python3-venv), then run make again" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "$(VENV) has no pip: run make clean, install python3-venv (Debian, Ubuntu: apt install python3-venv), then run make again" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: install
	$(BIN)/keepgrad demo $(ARGS)

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	@for file in benchmarks/bench_*.py; do \
		if [ -f "$$file" ]; then echo "== $$file"; $(BIN)/python "$$file" || exit 1; fi; \
	done

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find keepgrad tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
