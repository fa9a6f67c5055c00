# make serve | test | lint | bench | aot | clean. Needs make and Python 3.11 to 3.14; everything else goes into $(VENV).
#   make PYTHON=python3.13 ...      another Python (the virtual environment is built again if it has a different one)
#   make serve ARGS="--port 9000"   options for what runs; also for test, bench and aot

VENV ?= .venv
PYTHON ?=
ARGS ?=

CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)
RUN := $(VENV)/bin/python
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
PLAN := $(VENV)/.installed-plan
# Exists while an install runs: where one stays behind, the environment is half made and is made again.
BUSY := $(VENV)/.installing

# Prints the version of a Python from 3.11 to before 3.$(1); fails for others, and for a pyenv shim that leads nowhere.
probe = 'import platform, sys; (3, 11) <= sys.version_info < (3, $(1)) or sys.exit(1); print(platform.python_version())'
# tensorstore has no wheels for Python 3.15 yet, so such a Python is taken only when PYTHON names it.
PROBE := $(call probe,$(if $(PYTHON),99,15))
HAVE := $(shell $(RUN) -c $(call probe,99) 2>/dev/null)
WANT := $(if $(PYTHON),$(shell $(PYTHON) -c $(PROBE) 2>/dev/null),$(HAVE))

.PHONY: help serve test lint bench aot clean
.NOTPARALLEL:

help:
	@echo "make serve   serve the default model on 127.0.0.1:8000 (ARGS: options of jaxpage.serve)"
	@echo "make test    run the tests (ARGS: options of pytest)"
	@echo "make lint    check formatting, lint and types"
	@echo "make bench   measure throughput and latency here (ARGS: options of both benchmarks)"
	@echo "make aot     compile the kernels for chips that are not here (ARGS: options of pallas_kernels.aot)"
	@echo "make clean   remove the virtual environments and caches"

serve: $(BASE)
	@$(RUN) -m jaxpage.serve $(ARGS)

test: $(DEV)
	@$(RUN) -m pytest $(ARGS)

lint: $(DEV)
	@echo "ruff format --check" && $(RUN) -m ruff format --check .
	@echo "ruff check" && $(RUN) -m ruff check .
	@echo "basedpyright" && $(RUN) -m basedpyright --pythonpath $(RUN)

bench: $(BASE)
	@$(RUN) -m jaxpage.benchmarks.throughput $(ARGS)
	@$(RUN) -m jaxpage.benchmarks.latency $(ARGS)

aot: $(PLAN)
	@$(RUN) -m pallas_kernels.aot $(ARGS)

clean:
	@echo "Removing $(VENV), .venv-newest and caches"
	@rm -rf $(VENV) .venv-newest build dist .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is half made, does not run or is not of the Python asked for is mended, whatever its stamps say.
ifneq ($(or $(HAVE),none)$(wildcard $(BUSY)),$(WANT))
.PHONY: $(BASE) $(DEV) $(PLAN)
endif

$(BASE): SPEC := .
$(DEV): SPEC := .[dev]
$(PLAN): SPEC := .[plan]
$(DEV) $(PLAN): STAMPS := $(BASE)

$(BASE) $(DEV) $(PLAN): pyproject.toml constraints.txt
	@set -e; \
	if [ -e $(BUSY) ] || [ "$(or $(HAVE),none)" != "$(WANT)" ] || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  found=; bare=; \
	  for python in $(CANDIDATES); do \
	    version=$$($$python -c $(PROBE) 2>/dev/null) || continue; \
	    if $$python -c 'import ensurepip, venv' 2>/dev/null; then found=$$python; break; fi; \
	    bare="$${bare:-$$python}"; \
	  done; \
	  if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	    echo "$$bare cannot make virtual environments: its ensurepip module is missing." >&2; \
	    echo "Install it (Debian, Ubuntu: apt install python3-venv) or name another Python: make PYTHON=..." >&2; exit 1; \
	  elif [ -z "$$found" ]; then \
	    echo "No Python 3.11 to 3.14 runs here (tried: $(CANDIDATES))." >&2; \
	    echo "Install one, or name one: make PYTHON=/path/to/python3" >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with Python $$version ($$found)"; \
	  rm -rf $(VENV); mkdir -p $(VENV); touch $(BUSY); \
	  $$found -m venv $(VENV); \
	fi; \
	touch $(BUSY); \
	echo "Installing jaxpage and what it needs into $(VENV) (slow the first time: it downloads them)"; \
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$(SPEC)"; \
	rm $(BUSY); touch $@ $(STAMPS)
