# One line each: nox does the work. Options go in ARGS: make bench ARGS="--gpu h100 --quick".
# nox itself is installed into .nox/bootstrap, unless one is named: make test NOX=nox.
PYTHON ?= python3
ARGS ?=
BOOTSTRAP := .nox/bootstrap
ifndef NOX
NOX := $(BOOTSTRAP)/bin/nox
NEEDS := $(NOX)
endif
RUN = $(NOX) -s $@ $(if $(ARGS),-- $(ARGS))

.PHONY: help setup test bench profile report compare lint clean

help: ## print this list (the default)
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf 'make %-9s %s\n' "$$name" "$$what"; done

setup: $(NEEDS) ## create the shared environment, .venv
	$(RUN)

test: $(NEEDS) ## run all tests except the slow ones
	$(RUN)

bench: $(NEEDS) ## check and time every kernel; without a GPU: check, compile, roofline bounds
	$(RUN)

profile: $(NEEDS) ## profile every kernel with Nsight Compute
	$(RUN)

report: $(NEEDS) ## generate the reports (Markdown and SVG) from the records
	$(RUN)

compare: $(NEEDS) ## compare two sets of records: ARGS="--baseline A --current B"
	$(RUN)

lint: $(NEEDS) ## run ruff check and ruff format --check
	$(RUN)

clean: ## remove environments, caches and build products; reports stay
	rm -rf .nox .venv .out dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis && find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A Debian without python3-venv has no ensurepip: its own pip, if it is there, then installs into the bare environment.
$(BOOTSTRAP)/bin/nox: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or later is needed: make PYTHON=python3.x" >&2; exit 1; }
	@echo "installing nox into $(BOOTSTRAP)"
	@rm -rf $(BOOTSTRAP)
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv $(BOOTSTRAP) && $(BOOTSTRAP)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt nox; \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	    $(PYTHON) -m venv --without-pip $(BOOTSTRAP) && $(PYTHON) -m pip --python $(BOOTSTRAP)/bin/python install -q -c constraints.txt nox; \
	else \
	    echo "this Python has neither ensurepip nor pip: install python3-venv, or use an installed nox: make NOX=…" >&2; exit 1; \
	fi
	@touch $@
