# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# The versions that CI tests. On a GPU machine choose your own torch (2.11 to 2.13): make install CONSTRAINTS=
CONSTRAINTS ?= constraints.txt
# For what is built as for what is installed; pip before 25.3 reads the first for both.
PINNED := $(if $(CONSTRAINTS),PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard native/*.cpp native/*.h)
DEMO := examples/guess_and_check
SEED ?= 0

.PHONY: demo test check bench install clean
.DEFAULT_GOAL := demo

install: $(STAMP)

$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS)) $(NATIVE)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Paceline needs Python 3.11 or later. Name yours: make PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv $(VENV); }
	@case "$$CMAKE_ARGS" in *PACELINE_NATIVE=OFF*) ;; *) command -v $(firstword $(CXX)) >/dev/null || \
	  { echo "Paceline needs a C++ compiler ($(CXX) is not there): apt install g++, or see docs/troubleshooting.md" >&2; \
	    exit 1; } ;; esac
	@echo "==> installing into $(VENV) (once; a few minutes with the downloads)"
	$(PINNED) $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.guess_and_check.make_data --seed 0
	$(BIN)/python -m launch train $(DEMO)/config.yaml run.seed=$(SEED) run.name=demo-seed$(SEED)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes, a whole file each at a time; plain `python -m pytest` does the same one test after another.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The README's figures in short, beside the committed ones. ROWS=driver,rollout: only these. What not every machine has:
# VLLM_PYTHON=PATH, TRL_PYTHON=PATH, ARCTIC=PATH.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS)) $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
	  $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON)) $(if $(ARCTIC),--arctic $(ARCTIC))

clean:
	rm -rf $(VENV) build runs $(DEMO)/data
