# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# The versions that CI tests. On a GPU machine choose your own torch (2.11 to 2.13): make install CONSTRAINTS=
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard native/*.cpp native/*.h)
DEMO := examples/guess_and_check
SEED ?= 0

.PHONY: demo test check bench install clean
.DEFAULT_GOAL := demo

install: $(STAMP)

$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS)) $(NATIVE)
	@echo "==> installing into $(VENV) (once; a few minutes with the downloads)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.guess_and_check.make_data --seed 0
	$(BIN)/python -m launch train $(DEMO)/config.yaml run.seed=$(SEED) run.name=demo-seed$(SEED)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python -m benchmarks.engine_throughput
	$(BIN)/python -m benchmarks.learner_packing
	$(BIN)/python -m benchmarks.control_latency

clean:
	rm -rf $(VENV) build runs $(DEMO)/data
