import asyncio
import copy
import gc
import inspect
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


ELEMENT = {"prompt_token_ids": [[1, 2]], "completion_token_ids": [[3]], "logprobs": [[-0.5]]}

# The suite of a change sees the same few examples in every run, the first and smallest; `make test-nightly`
# looks for new ones, four times as many.
settings.register_profile(
    "same_examples", derandomize=True, deadline=None, database=None, max_examples=25
)
settings.register_profile("new_examples", derandomize=False, deadline=None, max_examples=100)


# What the collected modules import, 800,000 objects with torch and Transformers, lives as long as the
# process. Otherwise the garbage collector walks through it while it is imported and, every second or so
# of the tests, again: a twelfth of their CPU time.
gc.disable()


def pytest_ignore_collect(collection_path, config):
    """Import no module of a folder whose marker is left out, unless it is named on the command line."""
    name = collection_path.name
    if collection_path.parent == ROOT / "tests" and name in {"browser", "gpu", "vllm"}:
        return True if f"not {name}" in config.option.markexpr else None
    return None


def pytest_collection_modifyitems(items):
    """Keep all tests of a server where `make test-vllm` looks for them."""
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("nightly"):
            assert ROOT / "tests" / "vllm" in item.path.parents, item.nodeid


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config):
    # A shell's background jobs start with Ctrl-C ignored; tests press it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--hypothesis-profile"):
        is_of_a_change = "not nightly" in config.option.markexpr
        settings.load_profile("same_examples" if is_of_a_change else "new_examples")


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_sessionfinish(session, exitstatus):
    """Keep the exit status for .ci/run: only a suite that ran to its end may run its failures again."""
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("exit", int(exitstatus))


@pytest.fixture(scope="session")
def smollm2_dir():
    """SmolLM2-135M-Instruct as a Hugging Face model directory: `make model` fetches it."""
    path = ROOT / ".cache" / "smollm2"
    if not (path / "model.safetensors").exists():
        pytest.skip("no .cache/smollm2: run `make model`")
    return path


@pytest.fixture(scope="session")
def small_smollm2(smollm2_dir, tmp_path_factory):
    """SmolLM2 with 2 of its 30 layers, as a directory: its tokens and size of vocabulary, quickly trained."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("small") / "smollm2"
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return saved_beside(smollm2_dir, model, path)


@pytest.fixture(scope="session")
def brief_smollm2(small_smollm2, tokenizer, tmp_path_factory):
    """The small SmolLM2, with frequent tokens as ends of its answers, which are short so."""
    path = tmp_path_factory.mktemp("brief") / "smollm2"
    shutil.copytree(small_smollm2, path)
    config = json.loads((path / "generation_config.json").read_text())
    words = (" and", "-", " in", " the")
    ends = tokenizer.encode(words, words)
    assert all(len(ids) == 1 for ids in ends)
    config["eos_token_id"] = [tokenizer.eos_token_id, *(ids[0] for ids in ends)]
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def narrow_smollm2(smollm2_dir, tmp_path_factory):
    """Two narrow layers of random weights with SmolLM2's tokens, for tests of what commands do."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("narrow") / "smollm2"
    config = AutoConfig.from_pretrained(
        smollm2_dir,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    torch.manual_seed(0)
    return saved_beside(smollm2_dir, AutoModelForCausalLM.from_config(config), path)


def saved_beside(model_dir, model, path):
    """Save another model with the tokenizer of a directory."""
    model.save_pretrained(path)
    for file in model_dir.iterdir():
        if not (path / file.name).exists():
            shutil.copy(file, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir):
    """SmolLM2's."""
    from rollout_io.retokenize.tokenizer import load_tokenizer

    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def model():
    """A tiny one with SmolLM2's tokens, which ends its messages."""
    from tests.helpers.generation_helpers import chatty_model

    return chatty_model()


@pytest.fixture
def engine(model, tokenizer):
    """Keeps what that model was sent and what it answered."""
    from tests.helpers.generation_helpers import SpyEngine

    return SpyEngine(model, tokenizer, policy_version=5)


@pytest.fixture(scope="session")
def start_vllm(smollm2_dir, tmp_path_factory):
    """Makes servers of a model, SmolLM2 unless said, under the name "smollm2", to be entered.

    In float32, which CPUs without bfloat16 instructions compute ten times as fast. With
    VLLM_ENABLE_V1_MULTIPROCESSING=0 the worker runs in the engine's process: one import of vLLM less.
    """
    from pipelines.generation.processes import VllmServer

    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.fail("no .venv-vllm: run `make test-vllm`")

    def make(*arguments, model=smollm2_dir, **environment):
        usual = ["--served-model-name", "smollm2", "--max-model-len", "2048"]
        usual += ["--dtype", "float32", "--enforce-eager"]
        usual += ["--num-gpu-blocks-override", "180"]  # SmolLM2's 1 GiB; of a small model, 70 MiB
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return VllmServer(
            str(model),
            python=str(python),
            log=tmp_path_factory.mktemp("vllm") / "server.log",
            arguments=[*usual, *arguments],
            environment=own | environment,
        )

    return make


@pytest.fixture(scope="session")
def vllm_server(start_vllm):
    """A real server, with tools and live weights; who changes its weights puts them back."""
    with start_vllm("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        yield server


@pytest.fixture(scope="session")
def small_server(start_vllm, small_smollm2, tmp_path_factory):
    """A real server of the small SmolLM2 that loads adapters too; who kills it starts it again.

    It records by the middleware, into `recorded_inside`, what is below /recorder.
    """
    out = tmp_path_factory.mktemp("inside") / "ds"
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    arguments += ["--middleware", "pipelines.record.middleware.RecordingMiddleware"]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "PYTHONPATH": str(ROOT)}
    environment |= {"ROLLOUTS_RECORD_OUT": str(out), "ROLLOUTS_RECORD_FLUSH_S": "0.05"}
    with start_vllm(*arguments, model=small_smollm2, **environment) as server:
        server.recorded_inside = out
        yield server


@pytest.fixture
def mortal_server(vllm_server):
    """The same server, for a test that kills it and starts it again."""
    yield vllm_server
    if not vllm_server.is_started:
        vllm_server.start()


@pytest.fixture(scope="session")
def template_server(start_vllm, small_smollm2):
    """A real server of the small SmolLM2 with a chat template of ours, which gives processed log-probabilities."""
    from rollout_io.retokenize.chat_template import KEEPS_ALL

    command = [sys.executable, "-m", "rollout_io", "formats", "--templates", KEEPS_ALL]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    arguments = ["--chat-template", printed.strip(), "--trust-request-chat-template"]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with start_vllm(*arguments, *tools, model=small_smollm2) as server:
        yield server


@pytest.fixture(scope="session")
def harness_logs():
    """Logs that public harnesses wrote, where this checkout has them beside it."""
    places = [ROOT.parents[n] / "shared" / "data" / "harness_logs" for n in (0, 1)]
    found = next((path for path in places if path.is_dir()), None)
    if found is None:
        pytest.skip(f"no {places[0]}")
    return found


@pytest.fixture(scope="session")
def shop_dataset(tmp_path_factory):
    """The rollout dataset of the real vLLM calls in examples/."""
    from rollout_io.cli.main import run

    path = tmp_path_factory.mktemp("shop") / "ds"
    calls, rewards = EXAMPLES / "shop.calls.jsonl", EXAMPLES / "shop.rewards.jsonl"
    arguments = ["--format", "calls", "--rewards", str(rewards), "--out", str(path)]
    assert run(["convert", str(calls), *arguments]) == 0
    return path


@pytest.fixture(scope="session")
def golden(harness_logs):
    return harness_logs / "harbor" / "golden" / "terminus_2"


@pytest.fixture(scope="session")
def real_trials(harness_logs):
    path = harness_logs / "harbor" / "nemo_gym_harbor_agent.example_output.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metadata"] for line in lines]


@pytest.fixture
def trial(real_trials):
    """A real TrialResult with the token lists it was asked for and did not keep."""

    def make(name="t1", *details, task="fix-git", **fields):
        record = copy.deepcopy(real_trials[0])
        record |= {"id": f"id-{name}", "trial_name": f"{task}__{name}", "task_name": task}
        record["task_checksum"] = f"sum-of-{task}"
        record["config"]["job_id"] = "job"
        record["agent_result"]["rollout_details"] = list(details) or [ELEMENT]
        return record | fields

    return make


@pytest.fixture
def no_rules(monkeypatch):
    """Redaction by patterns alone, because the scanner takes a second to start."""

    class Nothing:
        def scan(self, _):
            return []

    monkeypatch.setattr("rollout_io.redaction.scanner._scanner", Nothing)
