# The commands of the course; `make` alone lists them. A machine with python3, venv and make is enough:
# each command does its own set-up. Works with GNU make 3.81, and with spaces in VENV.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PORT ?=
NB ?=
WEEKLY ?=

MODULES = torch numpy pandas matplotlib ipywidgets jupyterlab PIL psutil pynvml tqdm nbclient nbformat cloudpickle filelock
TEST_MODULES = nbval pytest pytest_timeout xdist ruff codespell_lib

override VENV := $(patsubst ~/%,$(HOME)/%,$(VENV))
export JUPYTER_CONFIG_PATH := $(CURDIR)/.jupyter$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))
ifeq ($(VENV),)
PY = "$(PYTHON)"
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY = "$(VENV)/bin/python"
export PYTHONNOUSERSITE := 1
export PIP_USER := 0
unexport PYTHONPATH
endif

.NOTPARALLEL:
.PHONY: help lab test course doctor data record notebooks lint clean setup setup-test

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) PIP_ARGS=$(PIP_ARGS) PORT=$(PORT)"
	@echo "VENV= uses PYTHON as it is and installs nothing."

lab: setup data ## open the course in JupyterLab (PORT=8890 to name the port)
	@exec $(PY) -m perflab lab $(if $(PORT),--port $(PORT))

seldom = $(if $(WEEKLY),, and not weekly)
test: setup-test data $(if $(NB),,lint) ## run everything as CI does (NB=03 for one notebook, WEEKLY=1 for all)
ifneq ($(NB),)
	$(PY) -m pytest tests/notebooks tests/browser --notebook "$(NB)"
else
	@side=0; alone=0; \
	$(PY) -m pytest -n 2 --dist worksteal -m "not timed$(seldom)" tests || side=$$?; \
	$(PY) -m pytest -m "timed$(seldom)" tests || alone=$$?; \
	echo "perflab: exit status $$side (side by side), $$alone (timed, alone)"; \
	[ $$side -eq 0 ] && [ $$alone -eq 0 ]
endif

course: setup data ## run all notebooks on this machine and write report/index.html
	@exec $(PY) -m perflab course $(NB)

doctor: setup ## say what this machine is and what it lacks
	@exec $(PY) -m perflab doctor

data: setup ## make the images that the course reads
	@$(PY) -m perflab data

record: setup ## measure all studies in full, to keep this machine's results
	@$(PY) -m perflab data --full
	@exec $(PY) -m perflab record $(NB)

notebooks: setup data ## run and normalise the notebooks, as they are committed
	@exec $(PY) -m perflab notebooks $(NB)

lint: setup-test ## check style and spelling
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib

clean: ## remove what was made here: the venv, images, reports (your results stay)
	rm -rf report build perflab.egg-info .pytest_cache .ruff_cache data/images
	@[ ! -f "$(VENV)/.set-up" ] || rm -rf "$(VENV)"

# Set-up. Every reason to refuse comes before the first download. The stamp in the venv holds what it was
# made from: an unchanged venv is left alone, and an interrupted set-up is gone through again.
setup-test: extra = [test]
setup-test: MODULES += $(TEST_MODULES)
die = { printf 'perflab: %s\n' $(1) >&2; exit 1; }
check_version = command -v "$$python" >/dev/null \
	|| $(call die,"there is no $$python: install Python 3.11 to 3.14 or name one with PYTHON=..."); \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || $(call die,"$$python is \
	$$("$$python" -V 2>&1) and 3.11 to 3.14 is needed: name another with PYTHON=... and a new VENV=...")

ifeq ($(VENV),)
setup setup-test:
	@python="$(PYTHON)"; $(check_version); "$$python" -c 'import sys; from importlib.util import find_spec; \
	lacks = ", ".join(name for name in sys.argv[1:] if not find_spec(name)); \
	sys.exit(f"perflab: {sys.executable} lacks {lacks}: install it there or leave out VENV=." if lacks else 0)' \
	$(MODULES)
else
setup setup-test:
	@key="$$(cksum pyproject.toml constraints.txt) $(CURDIR) $(TORCH) $(PIP_ARGS)"; \
	[ "$$(cat "$(VENV)/.set-up$(extra)" 2>/dev/null)" = "$$key" ] && $(PY) -c "" && exit; \
	python=$(PY); [ -x "$$python" ] || python="$(PYTHON)"; $(check_version); \
	[ -f "$(VENV)/pyvenv.cfg" ] || [ -z "$$(ls -A "$(VENV)" 2>/dev/null)" ] \
		|| $(call die,"$(VENV) holds something else than a venv: name another folder with VENV=..."); \
	[ -x $(PY) ] || "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null \
		|| $(call die,"$(PYTHON) lacks venv or pip: install them (Debian: apt install python3-venv)."); \
	echo "perflab: set-up in $(VENV) downloads what is missing: torch (190 MB for CPU, about 3 GB with" \
		"CUDA, the default on Linux x86-64) and about $(if $(extra),170,110) MB of other packages."; \
	[ -x $(PY) ] || "$(PYTHON)" -m venv "$(VENV)" || $(call die,"no venv in $(VENV): remove it and try again."); \
	$(PY) -m pip -V >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null 2>&1 \
		|| $(call die,"$(VENV) has no pip: remove it and try again."); \
	rm -f "$(VENV)/.set-up" "$(VENV)/.set-up[test]"; \
	$(PY) -m pip install --upgrade $(PIP_ARGS) -c constraints.txt "$(TORCH)" -e ".$(extra)" \
		|| $(call die,"set-up is not complete: the same command goes on with it."); \
	echo "$$key" >"$(VENV)/.set-up"; [ -z "$(extra)" ] || echo "$$key" >"$(VENV)/.set-up$(extra)"
endif
