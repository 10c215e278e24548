import asyncio
import json
import os
import subprocess

import openai
import pytest

from pipelines.drift_diagnosis import diagnose_dataset
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.dialect_helpers import SpokenEngine
from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import recorder_process, recording, rows

pytestmark = pytest.mark.vllm

CLIENTS = ROOT / ".venv-clients" / "bin"
COLUMNS = ("trajectory_id", "prompt_token_ids", "response_ids", "rollout_logprobs", "token_source")
DIGIT = {"type": "integer", "enum": [1, 2, 3]}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": DIGIT, "b": DIGIT},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
LITELLM = """
import litellm
messages = [{"role": "user", "content": "Name a colour."}]
for turn in range(3):
    asked = {"model": "openai/smollm2", "messages": messages, "max_tokens": 16, "seed": turn}
    if turn == 1:
        parts = list(litellm.completion(**asked, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
    else:
        text = litellm.completion(**asked).choices[0].message.content
    assert text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Another?"}]
both = litellm.completion(model="openai/smollm2", messages=messages, max_tokens=8, n=2)
assert len(both.choices) == 2
"""


@pytest.fixture(scope="module")
def clients():
    """An environment in which LiteLLM and mini-swe-agent are installed."""
    if not (CLIENTS / "mini").exists():
        pytest.skip("no .venv-clients: run `make test-vllm`")
    return CLIENTS


def recorded(out, url, use, **settings):
    """Use a recorded session; its rows."""

    async def main():
        async with recording(out, url, **settings) as client:
            await use(f"{client.root}/s/task/0/v1")
            state = (await client.get("/s/task/0")).json()
            assert (await client.post("/s/task/0/end", json={"reward": 1.0})).status_code == 200
            return state

    state = asyncio.run(main())
    assert state["unrecorded_calls"] == 0
    assert run(["validate", str(out)]) == 0
    found = rows(out, *COLUMNS)
    assert {row["token_source"] for row in found} == {"engine"}
    assert all(len(row["response_ids"]) == len(row["rollout_logprobs"]) > 0 for row in found)
    return found


async def other_program(*command, base_url, home):
    """Run a client of another environment; only its base URL says where the model is."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_API_KEY": "none",
        "OPENAI_API_BASE": base_url,
        "OPENAI_BASE_URL": base_url,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env=environment,
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


def test_the_openai_package_streams_calls_tools_and_asks_for_two(vllm_server, tmp_path):
    async def use(base_url):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as api:
            assert [model.id async for model in await api.models.list()] == ["smollm2"]
            messages = [{"role": "user", "content": "What is 2 + 3?"}]
            asked = {"model": "smollm2", "messages": messages, "max_tokens": 40, "seed": 0}
            forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
            called = await api.chat.completions.create(**asked | forced, temperature=0)
            assert called.choices[0].message.tool_calls
            for call in called.choices[0].message.tool_calls:
                assert call.function.name == "add"
                assert json.loads(call.function.arguments)
            messages.append(called.choices[0].message.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "5"}
                for call in called.choices[0].message.tool_calls
            ]
            # A whole answer: the helper refuses one that the limit cut.
            whole = {"extra_body": {"structured_outputs": {"regex": "The sum is [0-9]\\."}}}
            async with api.chat.completions.stream(**asked, **whole) as stream:
                events = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert events.count("content.delta") > 2
            assert final.choices[0].message.content.startswith("The sum is ")
            assert final.choices[0].finish_reason == "stop"
            both = await api.chat.completions.create(**asked | {"n": 2, "logprobs": True})
            assert [len(choice.logprobs.content) > 0 for choice in both.choices] == [True, True]
            plain = await api.completions.create(model="smollm2", prompt="One, two,", max_tokens=4)
            assert plain.choices[0].logprobs is None
            with pytest.raises(openai.BadRequestError):
                await api.chat.completions.create(**asked | {"temperature": -1})

    found = recorded(tmp_path / "ds", vllm_server.url, use)
    assert len(found) == 1 + 1 + 2 + 1


@pytest.mark.nightly  # tests/vllm/test_record_docs.py records LiteLLM on every change
def test_litellm_with_only_its_base_url_changed(small_server, tmp_path, clients):
    async def use(base_url):
        await other_program(clients / "python", "-c", LITELLM, base_url=base_url, home=tmp_path)

    assert len(recorded(tmp_path / "ds", small_server.url, use)) == 3 + 2


# tests/vllm/test_record_docs.py records it without exact prefixes on every change.
@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_mini_swe_agent_with_only_its_base_url_changed(
    small_server, small_smollm2, tmp_path, clients, exact
):
    async def use(base_url):
        await other_program(
            *(clients / "mini", "--model-class", "litellm_textbased", "-m", "openai/smollm2"),
            *("-c", "mini_textbased.yaml", "-c", ROOT / "tests" / "data" / "mini_small_model.yaml"),
            *("-t", "Say hello.", "-y", "--exit-immediately", "-o", tmp_path / "run.traj.json"),
            base_url=base_url,
            home=tmp_path,
        )

    settings = {"exact_prefix": str(small_smollm2)} if exact else {}
    found = recorded(tmp_path / "ds", small_server.url, use, **settings)
    assert len(found) == 3
    prompts = [row["prompt_token_ids"] for row in found]
    assert len(prompts[0]) < len(prompts[1]) < len(prompts[2])
    breaks = sum(len(part.breaks) for part in diagnose_dataset(tmp_path / "ds"))
    if exact:
        assert breaks == 0
        assert not any(row.get("metrics") for row in rows(tmp_path / "ds", "metrics"))


def test_generated_requests_of_every_api_get_what_the_description_says(tmp_path):
    engine = SpokenEngine()
    engine.said = {"reasoning": "Warm?", "content": "It is."}
    checks = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
    checks += ("response_schema_conformance", "unsupported_method")
    with (
        running(engine) as url,
        recorder_process(tmp_path / "ds", "--upstream", url) as (recorder, root),
    ):
        command = [str(CLIENTS / "schemathesis"), "run", f"{root}/openapi.json", "--seed", "1"]
        command += ["--checks", ",".join(checks), "--max-examples", "10", "--no-color"]
        command += ["--phases", "coverage,fuzzing", "--generation-database", "none"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert recorder.poll() is None
    assert "25 selected / 25 total" in done.stdout
