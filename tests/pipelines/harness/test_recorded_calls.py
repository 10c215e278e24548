"""The recorder in the loop: whose calls are answered, how, and what becomes of them."""

import asyncio
import socket
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import msgspec
import pytest

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENGINE_DOWN
from pipelines.generation.generator import Generator, Pace, open_calls
from pipelines.generation.processes import Watch
from pipelines.generation.tasks import Task
from pipelines.generation.trajectory import seed_of
from pipelines.harness.engine_api import EngineApp, completed
from pipelines.harness.launchers import CommandHarness, Endpoint, outcome_of
from pipelines.record.serving import answering_at
from schemas.errors import RolloutError
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.generation_helpers import ASK, chatty_model
from tests.helpers.harness_helpers import HERE, Scripted
from tests.helpers.recorder_helpers import recording, rows
from trainer.engine.embedded import TransformersEngine
from trainer.rl.weight_sync import WeightSwapEngine

TASK = Task(instance_id="a/b", repetition_id=3, prompt=ASK, source="tasks.jsonl:1")
CHAT = {"model": "gpt-5", "messages": ASK}
SHOWN = ("prompt_token_ids", "response_ids", "rollout_logprobs", "temperature", "top_p", "agent")
SHOWN += (
    "sampling_support",
    "stop_reason",
    "messages",
    "response_text",
    "policy_version",
    "token_source",
    "reward",
)


def config_of(**settings):
    own = {"tasks": "t.jsonl", "model": "m", "out": "ds", "harness": f"{HERE}:two_turns"}
    return GenerateConfig(**own | settings)


@asynccontextmanager
async def calling(engine, tokenizer, turn=None, /, **settings):
    """Calls, and one open trajectory with its client."""
    config = config_of(**settings)
    given = () if turn is None else (turn,)
    async with (
        open_calls(config, engine, tokenizer, *given) as calls,
        httpx2.AsyncClient(timeout=30) as client,
        calls.trajectory(TASK, config) as (opened, endpoint),
    ):
        client.base_url = endpoint.base_url.removesuffix("v1")
        yield calls, opened, endpoint, client


async def test_only_the_calls_of_a_trajectory_that_is_open_are_answered(tokenizer):
    async with calling(Scripted(tokenizer, "one"), tokenizer) as (calls, _, endpoint, client):
        url = f"{endpoint.base_url}/chat/completions"
        token = endpoint.base_url.split("/")[-3]
        others = [url.replace(token, "0" * 16), f"{calls.url}/v1/chat/completions"]
        found = [(await client.post(u, json=CHAT)).status_code for u in (url, *others)]
        for path in ("end", "../../../sessions", "../../../policy_version"):
            target = f"{endpoint.base_url.removesuffix('v1')}{path}"
            found.append((await client.post(target, json={"reward": 9.0})).status_code)
        task = Task(instance_id="x", repetition_id=0, prompt=ASK)
        async with calls.trajectory(task, config_of()) as (_, ended):
            pass
        late = await client.post(f"{ended.base_url}/chat/completions", json=CHAT)
        assert [*found, late.status_code] == [200, 403, 403, 404, 403, 403, 403]


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_only_loopback_serves_requests_without_the_token_of_their_trajectory(tokenizer, host):
    engine = Scripted(tokenizer, "one")
    async with calling(engine, tokenizer, host=host) as (calls, _, endpoint, client):
        task = Task(instance_id="x", repetition_id=0, prompt=ASK)
        async with calls.trajectory(task, config_of()) as (_, other):
            found = []
            for key in (endpoint.api_key, None, "wrong", "none", other.api_key):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                for path in ("chat/completions", "models"):
                    url, body = (f"{endpoint.base_url}/{path}", CHAT if path != "models" else None)
                    how = "GET" if body is None else "POST"
                    asked = await client.request(how, url, json=body, headers=headers)
                    found.append(asked.status_code)
            lost = endpoint.base_url.replace(endpoint.base_url.split("/")[-3], "0" * 16)
            found.append((await client.get(f"{lost}/models")).status_code)
        key = endpoint.api_key
    if host == "127.0.0.1":
        assert found == [200] * 10 + [403]
        assert key == "none"
    else:
        assert found == [200, 200] + [401] * 9
        assert len(key) >= 32
    assert len(engine.asked) == (1 if host != "127.0.0.1" else 5)


async def test_the_endpoint_has_the_port_and_the_model_of_the_configuration(tokenizer):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"port": port, "served_model_name": "policy"}

    engine = Scripted(tokenizer, "one")
    async with calling(engine, tokenizer, **settings) as (_, _, endpoint, client):
        models = (await client.get(f"{endpoint.base_url}/models")).json()
        url, statuses = f"{endpoint.base_url}/chat/completions", []
        for model in ("policy", "gpt-5"):
            answer = await client.post(url, json=CHAT | {"model": model})
            statuses.append(answer.status_code)
        assert statuses == [200, 404]
        names = [model["id"] for model in models["data"]]
    assert endpoint.base_url.startswith(f"http://127.0.0.1:{port}/s/")
    assert names == [endpoint.model] == ["policy"]


def test_a_command_gets_the_token_of_its_base_url(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "judge's key")
    endpoint = Endpoint(base_url="http://10.0.0.1/v1", model="m", api_key="t0k3n")
    for words, key in (("", "t0k3n"), ("{base_url}", "t0k3n"), ("{api_key}", "judge's key")):
        harness = CommandHarness(f"sh -c 'echo $OPENAI_API_KEY >&2; exit 3' sh {words}")
        task = Task(instance_id="x", repetition_id=0, prompt=ASK)
        with Watch(tempfile.mkdtemp()) as watch, pytest.raises(RolloutError) as caught:
            asyncio.run(harness.run(endpoint, task, 30, watch))
        shown = "[redacted]" if key == "t0k3n" else key
        assert shown in str(caught.value)
        assert "t0k3n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"host": ""}, {"host": "a b"}, {"port": 70000}, {"served_model_name": ""}]
)
def test_an_address_that_is_none_is_refused_by_name(settings):
    with pytest.raises(RolloutError, match=next(iter(settings))):
        config_of(**settings)


@pytest.mark.parametrize(
    "settings", [{"host": "0.0.0.0"}, {"port": 8000}, {"served_model_name": "p"}]
)
def test_an_address_that_nothing_uses_is_refused(settings):
    with pytest.raises(RolloutError, match="a harness or a generator") as caught:
        config_of(harness=None, environment="m:C", **settings)
    assert next(iter(settings)) in str(caught.value)


class CallsTheEndpoint:
    def __init__(self, engine, _tokenizer, _config):
        self.endpoint = engine.endpoint

    async def generate(self, input_batch):
        url = f"{self.endpoint.base_url}/chat/completions"
        output = {"trajectory_ids": input_batch["trajectory_ids"], "rewards": []}
        async with httpx2.AsyncClient(timeout=30) as client:
            other = await client.post(url, json=CHAT)
            made = []
            for prompt in input_batch["prompts"]:
                body = {"model": self.endpoint.model, "messages": prompt}
                made.append((await client.post(url, json=body)).json())
        assert other.status_code == 404
        output["prompt_token_ids"] = [m["prompt_token_ids"] for m in made]
        output["response_ids"] = [m["choices"][0]["token_ids"] for m in made]
        output["rewards"] = [1.0] * len(made)
        output["loss_masks"] = [[1] * len(ids) for ids in output["response_ids"]]
        return output


async def test_a_generator_gets_the_url_of_the_engine(tokenizer):
    settings = {"harness": None, "generator": f"{__name__}:CallsTheEndpoint"}
    config = config_of(**settings, served_model_name="policy")

    engine = Scripted(tokenizer, "one")
    async with open_calls(config, engine, tokenizer) as endpoint:
        (finished,) = await Generator(engine, tokenizer, config, endpoint).collect([TASK])
    assert finished.error is None
    assert finished.rows["reward"].to_pylist() == [1.0]


async def test_what_a_request_leaves_out_is_as_the_configuration_has_it(tokenizer):
    engine = Scripted(tokenizer, "one")
    settings = {"temperature": 0.5, "top_k": 9, "seed": 4, "max_response_tokens": 20}

    async with calling(engine, tokenizer, **settings) as (calls, opened, _, client):
        for fields in ({}, {"temperature": 0.9, "max_tokens": 99}, {"max_completion_tokens": 5}):
            answer = await client.post("v1/chat/completions", json=CHAT | fields)
            assert answer.json()["model"] == "m"
            assert answer.json()["choices"][0]["logprobs"] is None
        steps, fault = await calls.steps(opened, outcome_of(1.0, "t"))
    assert fault is None
    assert [round(step.temperature, 3) for step in steps] == [0.5, 0.9, 0.5]
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert {step.source for step in steps} == {"tasks.jsonl:1"}
    asked = [sampling for _, sampling in engine.asked]
    assert [sampling.temperature for sampling in asked] == [0.5, 0.9, 0.5]
    assert [sampling.max_tokens for sampling in asked] == [20, 20, 5]
    assert [sampling.top_k for sampling in asked] == [9] * 3
    assert [sampling.seed for sampling in asked] == [seed_of(4, "a/b_3", i) for i in range(3)]


@pytest.mark.slow
def test_steps_are_those_that_the_recorder_writes_of_the_same_calls(tokenizer, tmp_path):
    engine = TransformersEngine(chatty_model(), tokenizer, policy_version=2)
    asked = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 6}
    bodies = [CHAT | asked | {"seed": seed, "stream": seed == 1} for seed in range(3)]

    async def recorded():
        app = EngineApp(engine, tokenizer, "m")
        async with answering_at(app) as url, recording(tmp_path / "ds", url) as client:
            for seed, body in enumerate(bodies):
                agent = "/helper" if seed == 2 else ""
                await client.post(f"/s/x/0{agent}/v1/chat/completions", json=body | {"model": "m"})
            await client.post("/s/x/0/end", json={"reward": 0.25})

    async def in_the_loop():
        async with calling(engine, tokenizer) as (calls, opened, _, client):
            for seed, body in enumerate(bodies):
                agent = "helper/" if seed == 2 else ""
                await client.post(f"{agent}v1/chat/completions", json=body)
            return (await calls.steps(opened, outcome_of(0.25, "t")))[0]

    asyncio.run(recorded())
    written, steps = rows(tmp_path / "ds", *SHOWN), asyncio.run(in_the_loop())
    assert len(written) == len(steps) == 3
    assert min(len(kept) for row in written for kept in row["sampling_support"]) > 0
    for row, step in zip(written, steps, strict=True):
        assert row.keys() == set(SHOWN)
        found = {name: getattr(step, name) for name in SHOWN}
        for name in ("prompt_token_ids", "response_ids"):
            ids = found[name]
            found[name] = (
                [int(i) for i in ids.decode()[1:-1].split(",")]
                if isinstance(ids, bytes)
                else list(ids)
            )
        assert found["rollout_logprobs"].tolist() == pytest.approx(row.pop("rollout_logprobs"))
        for name in ("temperature", "top_p"):
            assert found[name] == pytest.approx(row.pop(name))
        assert {name: found[name] for name in row} == row


async def test_a_row_has_the_version_of_the_weights_that_answered(tokenizer):
    class Queued(Scripted):
        """Gets new weights while a call waits."""

        async def sample(self, *given, **named):
            self.policy_version += 1
            return await super().sample(*given, **named)

    async with calling(Queued(tokenizer, "one"), tokenizer) as (calls, opened, _, client):
        for _ in range(2):
            await client.post("v1/chat/completions", json=CHAT)
        steps, _ = await calls.steps(opened, outcome_of(1.0, "t"))
    assert [step.policy_version for step in steps] == [2, 3]


@pytest.mark.slow
async def test_new_weights_wait_for_the_calls_under_way_and_the_others_for_them(tokenizer):
    events = []

    class Slow(Scripted):
        async def sample(self, *given, **named):
            events.append("call")
            await asyncio.sleep(0.2)
            events.append("answer")
            return await super().sample(*given, **named)

        async def load_weights(self, path, *, policy_version):
            events.append(path)
            self.policy_version = policy_version

    gate = WeightSwapEngine(Slow(tokenizer, "one"), waits=True)
    async with calling(gate.engine, tokenizer, gate.turn) as (calls, opened, _, client):
        first = asyncio.create_task(client.post("v1/chat/completions", json=CHAT))
        while not events:
            await asyncio.sleep(0.01)
        loading = asyncio.create_task(gate.load_weights("weights", policy_version=2))
        await asyncio.sleep(0.05)
        await client.post("v1/chat/completions", json=CHAT)
        await asyncio.gather(first, loading)
        steps, _ = await calls.steps(opened, outcome_of(1.0, "t"))
    assert [step.policy_version for step in steps] == [1, 2]
    assert events == ["call", "answer", "weights", "call", "answer"]


async def test_calls_under_way_end_with_their_trajectory_and_nothing_of_it_stays(tokenizer):
    class Hanging(Scripted):
        async def sample(self, *_, **__):
            await asyncio.sleep(60)

    async with calling(Hanging(tokenizer, "one"), tokenizer) as (calls, opened, _, client):
        call = asyncio.create_task(client.post("v1/chat/completions", json=CHAT))
        while not opened.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await opened.end_calls()
        answer = await call
        assert not opened.session.places
    assert list(calls._recorder.sessions) == []
    assert not Path(calls.watch.folder).exists()
    assert answer.status_code == 500


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [RolloutError(ENGINE_DOWN, "engine", "no answer"), ValueError("no answer")]
)
def test_an_engine_that_has_gone_ends_the_run_whatever_its_harness_makes_of_it(error, tokenizer):
    class Gone(Scripted):
        async def sample(self, *_, **__):
            raise error

    async def main():
        engine, config = Gone(tokenizer, ""), config_of()
        async with open_calls(config, engine, tokenizer) as calls:
            return await Generator(engine, tokenizer, config, calls).collect([TASK])

    with pytest.raises(RolloutError, match="no answer") as raised:
        asyncio.run(main())
    assert raised.value.rule == ENGINE_DOWN


def test_a_generator_without_a_server_for_calls_says_so(tokenizer):
    generator = Generator(Scripted(tokenizer, ""), tokenizer, config_of())
    with pytest.raises(RolloutError, match="open_calls"):
        asyncio.run(generator.collect([TASK]))


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_stream_that_is_cut_off_when_its_harness_ends_is_a_step(tokenizer, leaves_first):
    """Its client leaves and its trajectory ends at the same time: each of them ends the call."""

    async def cut_off(opened, client):
        endings = []
        async with client.stream(
            "POST", "v1/chat/completions", json=CHAT | {"stream": True}
        ) as got:
            await anext(got.aiter_bytes())
            if not leaves_first:
                endings.append(asyncio.create_task(opened.end_calls()))
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        await asyncio.gather(opened.end_calls(), *endings)

    async with answering_at(FakeEngine(num_tokens=600, gap_s=0.01)) as url:
        engine, own = Scripted(tokenizer, "one"), {"engine": "vllm", "urls": (url,)}
        async with calling(engine, tokenizer, **own) as (calls, opened, _, client):
            journal = calls._recorder.journal
            write = journal._write_all
            journal._write_all = lambda lines: (time.sleep(0.2), write(lines))[1]  # a slow disk
            await cut_off(opened, client)
            steps, fault = await calls.steps(opened, outcome_of(1.0, "t"))
    assert fault is None
    assert [(step.stop_reason, step.reward) for step in steps] == [("abort", 1.0)]


async def test_a_call_that_waited_for_new_weights_is_salted_with_their_version(tokenizer):
    class Loading(Scripted):
        async def load_weights(self, _, *, policy_version):
            await asyncio.sleep(0.3)
            self.policy_version = policy_version

    app = FakeEngine()
    async with answering_at(app) as url:
        gate = WeightSwapEngine(Loading(tokenizer, "one"), waits=True)
        own = {"engine": "vllm", "urls": (url,)}
        async with calling(gate.engine, tokenizer, gate.turn, **own) as (_, _, _, client):
            loading = asyncio.create_task(gate.load_weights("weights", policy_version=2))
            await asyncio.sleep(0.05)
            await client.post("v1/chat/completions", json=CHAT)
            await loading
    assert [request["cache_salt"] for request in app.requests] == ["policy_version=2"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "Hi"}], "user": NaN}',  # vLLM takes it
        b'{"messages": [{"role": "user", "content": "Hi"}], "use_beam_search": true}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "echo": true}',
    ],
)
async def test_a_call_that_could_not_be_recorded_is_not_answered(body, tokenizer):
    app = FakeEngine()
    async with answering_at(app) as url:
        own = {"engine": "vllm", "urls": (url,)}
        async with calling(Scripted(tokenizer, "one"), tokenizer, **own) as (*_, client):
            answer = await client.post("v1/chat/completions", content=body)
    assert app.requests == []
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "engine_request")


@pytest.mark.parametrize(("asked", "sent"), [("99999", 16), ("9", "9"), (9, 9), (99999.0, 16)])
def test_a_length_that_is_written_as_text_is_bounded_too(asked, sent):
    """vLLM reads it as a number."""
    fields = {"max_tokens": msgspec.Raw(msgspec.json.encode(asked))}
    made = completed(fields, {}, max_response_tokens=16)
    assert msgspec.json.decode(msgspec.json.encode(made)) == {"max_tokens": sent}


def test_trajectories_of_a_harness_start_at_the_rate_of_the_configuration(tokenizer, monkeypatch):
    delays = []

    async def sleep(delay_s, *_):
        delays.append(delay_s)

    async def main():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: 100.0)
        monkeypatch.setattr("pipelines.generation.generator.asyncio.sleep", sleep)
        pace = Pace(2.0)
        for num in (1, 3, 1):
            await pace.wait(num)
        monkeypatch.undo()

    asyncio.run(main())
    assert delays == [0.0, 0.5, 2.0]
    waited = []

    async def wait(self, num):
        waited.append((self, num))

    monkeypatch.setattr(Pace, "wait", wait)

    async def run():
        config, engine = config_of(trajectories_per_s=4.0), Scripted(tokenizer, "one")
        async with open_calls(config, engine, tokenizer) as calls:
            tasks = [replace(TASK, repetition_id=number) for number in range(3)]
            return await Generator(engine, tokenizer, config, calls).collect(tasks)

    assert [one.error for one in asyncio.run(run())] == [None] * 3
    assert [num for _, num in waited] == [1] * 3
    assert len({id(pace) for pace, _ in waited}) == 1


MESSAGES = {"model": "m", "max_tokens": 8, "messages": ASK}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": ASK[0]["content"]}]}]}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("v1/messages", MESSAGES, lambda made: made["content"][0]["text"]),
        (
            "v1/responses",
            {"model": "m", "input": ASK},
            lambda made: made["output"][0]["content"][0]["text"],
        ),
        (
            "v1beta/models/m:generateContent",
            CONTENTS,
            lambda made: made["candidates"][0]["content"]["parts"][0]["text"],
        ),
    ],
)
async def test_calls_in_the_dialects_of_harnesses_are_steps_of_the_trajectory(
    tokenizer, path, body, text
):
    engine = Scripted(tokenizer, "one")
    async with calling(engine, tokenizer) as (calls, opened, _, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200
        said, (step,) = text(answer.json()), (await calls.steps(opened, outcome_of(0.5, "t")))[0]
    assert said == "one"
    assert len(msgspec.json.decode(step.response_ids)) == len(step.rollout_logprobs) > 0
    assert msgspec.json.decode(step.messages)[: len(ASK)] == ASK
