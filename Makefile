# make demo | drills | test | stores | test-gpu | test-server | docs | results | missed | bench | lint | compat | dist      SGLANG=0.5.22 or 0.5.23 (default)
SGLANG ?= 0.5.23
PYTHON ?= python3
VENV := .venv-$(SGLANG)
BIN := $(VENV)/bin
PINS := requirements/common.txt requirements/sglang-$(SGLANG).txt
WORKERS ?= $(shell nproc)
# A torch that sees a GPU is used as it is, with the sglang beside it; elsewhere a CPU environment is made.
GPU := $(shell $(PYTHON) -c "import sglang, torch; print(int(torch.cuda.is_available()))" 2>/dev/null)
ifeq ($(GPU),1)
RUN := PYTHONPATH=$(CURDIR) $(PYTHON)
READY :=
else
RUN := $(BIN)/python
READY := $(BIN)/.ready
endif

.PHONY: stores results missed demo drills docs test test-gpu test-server bench lint format compat dist clean

demo: $(READY)
	$(RUN) -m sglang_dsv4.cli.main demo $(ARGS)

# One thread a worker: pools of threads that spin are what makes a suite slow on busy cores.
test: export OMP_NUM_THREADS := 1
test: export MKL_NUM_THREADS := 1
test: export OPENBLAS_NUM_THREADS := 1
test: $(BIN)/.ready-test
	$(BIN)/python -m pytest -m "cpu and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# A real Mooncake and NIXL for test/cpu/store; without them those tests are skipped, and say so.
stores: $(BIN)/.ready-stores

# Five faults, really provoked: what a user sees of each.
drills: $(READY)
	$(RUN) -m sglang_dsv4.cli.main drill $(ARGS)

# The tables of settings and metrics in docs/, from the code.
docs: $(BIN)/.ready-test
	$(BIN)/python -W ignore tools/docs/tables.py $(ARGS)

# Figures of README and docs/ that are not the results'; a test asks, too. ARGS=--write writes them.
results:
	$(PYTHON) tools/docs/check_results.py $(ARGS)

# Bounds that a recorded result misses, to read.
missed:
	$(PYTHON) tools/docs/check_results.py --missed

define HAS_GPU
import importlib.util, sys
if importlib.util.find_spec("torch") is None: sys.exit("torch is not installed for $(PYTHON): 0 GPU tests ran")
import torch
if not torch.cuda.is_available(): sys.exit("no CUDA device: 0 GPU tests ran")
endef
export HAS_GPU

# Without a GPU nothing runs, which must not look like success.
test-gpu:
	@$(PYTHON) -c "$$HAS_GPU"
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -m gpu -p no:cacheprovider $(ARGS)

# Live servers whose clients leave and whose weights change: SERVER_MODEL=FOLDER make test-server
test-server:
	@test -n "$$SERVER_MODEL" || { echo "SERVER_MODEL=FOLDER is needed: 0 server tests ran"; exit 3; }
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -m server -p no:cacheprovider $(ARGS)

bench: $(READY)
	$(RUN) -m sglang_dsv4.cli.main bench $(ARGS)

lint: .venv-lint/.ready
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/mypy

format: .venv-lint/.ready
	.venv-lint/bin/ruff format .
	.venv-lint/bin/ruff check --fix .

compat: $(BIN)/.ready
	$(BIN)/python -m tools.compat $(ARGS)

# A wheel and the sources it was built from, in dist/.
dist: .venv-lint/.ready
	.venv-lint/bin/python -m build

$(BIN)/.ready: $(PINS) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check --no-deps $(addprefix -r ,$(PINS))
	flock Makefile $(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . # two at once would clash
	touch $@

$(BIN)/.ready-test: $(BIN)/.ready requirements/test.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -r requirements/test.txt
	touch $@

$(BIN)/.ready-stores: $(BIN)/.ready-test .ci/install-mooncake
	.ci/install-mooncake $(BIN)/python
	touch $@

.venv-lint/.ready: requirements/lint.txt
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/pip install -q --disable-pip-version-check -r requirements/lint.txt
	touch $@

clean:
	rm -rf .venv-* .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
