import asyncio
import base64
import io
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipelines.generation import Sampling
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.completions import sampling_fields
from pipelines.generation.engines.http_pool import Failed, Limits, Servers
from pipelines.harness.engine_api import usual_fields
from schemas.errors import RolloutError
from tests.helpers.http_server import CUT, HANG, RESET, Server, completion, serving
from tests.helpers.vllm_engines import FAST, SAMPLING, connected
from trainer.engine import open_engine


def status(code, message="no", **headers):
    return lambda _: (code, ({"error": {"message": message}}, headers))


def changed(**fields):
    return lambda body: completion(body, **fields)


def ask(*servers, prompts=([1, 2],), limits=FAST, sessions=None, sampling=SAMPLING):
    """Sample all prompts at once from the servers."""

    async def run():
        async with connected(*servers, limits=limits) as engine:
            pairs = zip(prompts, sessions or [None] * len(prompts), strict=True)
            return await asyncio.gather(*(engine.sample(p, sampling, session=s) for p, s in pairs))

    return asyncio.run(run())


def refusal_of(server, message, **asked):
    """The error of the only call to a server."""
    with pytest.raises(RolloutError, match=message) as error:
        ask(server, **asked)
    return error.value


def paths_of(server):
    return [path.rpartition("/")[2] for path, _, _ in server.requests]


def test_the_request_says_everything_and_the_answer_comes_back_as_it_is():
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("x",), seed=3)
    server = Server()
    (sampled,) = ask(server, prompts=[[4, 5]], sampling=sampling, sessions=["a/0"])
    ((path, body, headers),) = server.requests
    assert path == "/v1/completions"
    assert headers["x-session-id"] == "a/0"
    assert body == {
        "model": "m",
        "prompt": [4, 5],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "max_tokens": 1024,
        "stop": ["x"],
        "include_stop_str_in_output": True,
        "seed": 3,
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": "policy_version=0",
    }
    assert (sampled.prompt_token_ids, sampled.response_ids) == ([4, 5], [10, 11, 12])
    assert sampled.rollout_logprobs == [-0.5] * 3
    assert (sampled.text, sampled.stop_reason, sampled.policy_version) == ("abc", "length", 0)


@pytest.mark.parametrize("arguments", [None, {"enable_thinking": False}])
async def test_arguments_of_the_chat_template_are_fields_of_a_chats_request(arguments):
    message = {"role": "assistant", "content": "abc"}
    content = [{"token": letter, "logprob": -0.5} for letter in "abc"]

    def answer(body):
        code, whole = completion(body, message=message, logprobs={"content": content})
        return code, whole | {"prompt_token_ids": [1, 2]}

    server = Server(answer=answer)
    async with connected(server) as engine:
        messages = [{"role": "user", "content": "Hi."}]
        chat = await engine.chat(messages, SAMPLING, chat_template_kwargs=arguments)
    assert chat.message == message
    ((path, body, _),) = server.requests
    assert path == "/v1/chat/completions"
    assert body.get("chat_template_kwargs") == arguments


@pytest.mark.parametrize(
    "trouble", [RESET, CUT, status(500), status(503), status(429), status(408)]
)
def test_what_may_pass_is_asked_again_and_answered_once(trouble):
    server = Server([trouble] * 3)
    (sampled,) = ask(server)
    assert sampled.response_ids == [10, 11, 12]
    assert len(server.requests) == 4
    assert len({str(body) for _, body, _ in server.requests}) == 1


def test_of_many_calls_to_a_server_in_trouble_none_is_lost_or_asked_too_often():
    prompts = [[i + 1] for i in range(30)]
    limits = Limits(backoff_s=0.01, max_backoff_s=0.04, max_attempts=25, max_concurrent=7)
    server = Server([RESET, status(500), CUT, status(429), RESET] * 4, delay_s=0.03)
    sampled = ask(server, prompts=prompts, limits=limits)
    assert [s.prompt_token_ids for s in sampled] == prompts
    assert len(server.requests) == 30 + 20
    assert 1 < server.most_at_once <= 7


@pytest.mark.parametrize("ids", [[], [10]])
def test_a_response_that_the_engine_aborted_is_not_taken_for_a_whole_one(ids):
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    aborted = changed(finish_reason="abort", token_ids=ids, logprobs=logprobs)
    server, always = Server([aborted] * 2), Server([aborted] * 99)
    (sampled,) = ask(server)
    assert (sampled.response_ids, sampled.stop_reason) == ([10, 11, 12], "length")
    assert len(server.requests) == 3
    assert refusal_of(always, "no answer|abort").rule == "engine_down"
    assert len(always.requests) == 6


@pytest.mark.slow
def test_a_slow_answer_is_given_up_and_asked_again():
    server = Server([HANG])
    (sampled,) = ask(server, limits=Limits(backoff_s=0.01, timeout_s=1.5))
    assert sampled.response_ids == [10, 11, 12]
    assert (len(server.requests), server.num_left) == (2, 1)


def test_an_engine_that_stays_away_is_an_error_after_bounded_attempts():
    server = Server([status(500, "engine dead")] * 99)
    assert refusal_of(server, "dead").rule == "engine_down"
    assert len(server.requests) == 6
    assert refusal_of(server, "ClientConnectorError").rule == "engine_down"


def test_a_prompt_of_megabytes_is_sent_whole_again_after_an_error():
    prompt, server = list(range(100_000, 300_000)), Server([status(503)])
    (sampled,) = ask(server, prompts=[prompt])
    assert [body["prompt"] for _, body, _ in server.requests] == [prompt] * 2
    assert sampled.prompt_token_ids == prompt


def test_waits_double_up_to_their_bound_and_heed_the_server():
    limits = Limits(backoff_s=1, max_backoff_s=10)
    for attempt, usual_s in enumerate([1, 2, 4, 8, 10, 10, 10], 1):
        for _ in range(50):
            assert 0.5 * usual_s <= limits.wait_s(attempt) <= 1.5 * usual_s
    assert limits.wait_s(1, asked_s=5) >= 2.5
    assert limits.wait_s(1, asked_s=1e9) <= 15
    assert limits.wait_s(10**6) <= 15


def test_the_server_says_how_long_to_wait():
    server = Server([status(429, **{"Retry-After": "0.4"})])
    ask(server, limits=Limits(backoff_s=0.001, max_backoff_s=1))
    assert server.times_s[1] - server.times_s[0] >= 0.2


TOO_LONG = "This model's maximum context length is 2048 tokens. However, your prompt"


@pytest.mark.parametrize(
    ("code", "message", "shown", "rule"),
    [
        *(
            (n, "bad field", f"status {n}: bad field", "engine_refused")
            for n in (400, 401, 404, 422)
        ),
        (400, TOO_LONG, "2048", "context_length"),
    ],
)
def test_a_request_at_fault_is_not_asked_again(code, message, shown, rule):
    server = Server([status(code, message)])
    assert refusal_of(server, shown).rule == rule
    assert len(server.requests) == 1


def two_choices(body):
    (choice,) = completion(body)[1]["choices"]
    return [choice, choice | {"index": 1}]


def counted(body, **usage):
    return completion(body)[1] | {"usage": usage}


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (changed(token_ids=None), "the call has no response token ids"),
        (changed(prompt_token_ids=None), "the call has no prompt token ids"),
        (changed(prompt_token_ids=[9, 9]), "differ from the 2 that were sent"),
        (changed(token_ids=[]), "the response has no tokens"),
        (changed(token_ids=[10, 11]), "3 logprobs; expected 2, one per"),
        (changed(token_ids=[10, 11, -4]), "id -4"),
        (changed(token_ids=[10, 11, "x"]), "`str`"),
        (changed(logprobs=None), "no log-probabilities"),
        (changed(logprobs={"token_logprobs": [-0.5, -0.5, -9999.0]}), "-9999"),
        (changed(logprobs={"token_logprobs": [-0.5, -0.5, 0.5]}), "logprob 0.5"),
        (changed(finish_reason=None), "no finish_reason"),
        (changed(routed_experts="AAAA"), "(not a NumPy file)"),
        (lambda _: (200, {"choices": []}), "the response has no choices"),
        (lambda body: (200, {"choices": two_choices(body)}), "2 choices"),
        (lambda body: (200, counted(body, completion_tokens=4)), "4 response tokens"),
        (lambda body: (200, counted(body, prompt_tokens=1)), "1 prompt token,"),
        (lambda _: (200, ["no object"]), "`array`"),
    ],
)
def test_an_answer_that_lacks_something_is_refused_with_what_it_lacks(answer, got):
    server = Server([answer])
    error = refusal_of(server, re.escape(got))
    assert error.rule == "engine_answer"
    assert ("return_token_ids" in (error.hint or "")) == got.startswith("the call has no")
    assert len(server.requests) == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_routed_experts_come_as_vllm_packs_them(dtype):
    routes, file = np.arange(4 * 2 * 3).reshape(4, 2, 3).astype(dtype), io.BytesIO()
    np.save(file, routes)
    (sampled,) = ask(Server([changed(routed_experts=base64.b64encode(file.getvalue()).decode())]))
    assert sampled.rollout_expert_indices.dtype == np.int16
    np.testing.assert_array_equal(sampled.rollout_expert_indices, routes)


async def test_a_cancelled_call_hangs_up_and_frees_its_slot():
    server = Server([HANG])
    async with connected(server, limits=Limits(max_concurrent=1)) as engine:
        call = asyncio.create_task(engine.sample([1], SAMPLING))
        while not server.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await engine.sample([2], SAMPLING)).prompt_token_ids == [2]
    assert server.num_left == 1


def test_no_more_calls_begin_in_a_second_than_the_rate_says():
    server = Server()
    ask(server, prompts=[[1]] * 9, limits=Limits(requests_per_s=20))
    assert server.times_s[-1] - server.times_s[0] >= 8 / 20 - 0.05


def test_a_session_stays_on_its_server_and_others_spread():
    sessions = [f"task-{i // 4}/{i % 4}" for i in range(40)]
    servers = [Server() for _ in range(3)]
    ask(*servers, prompts=[[1]] * 120, sessions=sessions * 3)
    seen = [{h["x-session-id"] for _, _, h in server.requests} for server in servers]
    assert sum(map(len, seen)) == 40
    assert min(map(len, seen)) >= 5


def test_a_server_that_dies_hands_its_sessions_to_the_others():
    with serving(Server()) as dead:
        pass
    prompts = [[i + 1] for i in range(20)]
    sampled = ask(Server(), dead, prompts=prompts, sessions=[str(i) for i in range(20)])
    assert [s.prompt_token_ids for s in sampled] == prompts


def model_list(_):
    return 200, {"data": [{"id": "served"}]}


def answers(mode):
    """Like a model whose likeliest token has log-probability -1 at temperature 1."""

    def answer(body):
        sharp = mode == "processed" and body["temperature"] < 1
        top = [{"a": -0.2 if sharp else -1.0}]
        return completion(body, logprobs={"token_logprobs": [-1.0] * 3, "top_logprobs": top})

    return answer


@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_the_engine_finds_out_what_its_log_probabilities_are_of(mode):
    server = Server([model_list], answer=answers(mode))
    settings = {"model": None, "logprobs_mode": None, "policy_version": 7}
    async with connected(server, **settings) as engine:
        assert engine.logprobs_mode == mode
        assert (await engine.sample([1], SAMPLING)).policy_version == 7
    assert server.requests[-1][1]["model"] == "served"


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


async def test_new_weights_go_to_every_server_and_older_keys_are_not_found_again(weights):
    one, two = Server(), Server()
    async with connected(one, two) as engine:
        await engine.load_weights(weights, policy_version=3)
        assert (await engine.sample([1], SAMPLING)).policy_version == 3
    reload = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
    for server in (one, two):
        calls = [request[:2] for request in server.requests[:2]]
        assert calls == [("/collective_rpc", reload), ("/reset_prefix_cache", {})]
    assert (one.requests + two.requests[2:])[-1][1]["cache_salt"] == "policy_version=3"


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_sharded(path, names):
    """A model of two files with an index; returns its tensors."""
    path.mkdir()
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(5, 3)).astype(np.float32) for name in names}
    shards = {name: f"model-{number}.safetensors" for number, name in enumerate(names)}
    for name, file in shards.items():
        save_file({name: tensors[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (path / "config.json").write_text("{}")
    return tensors


def load_on(device, *paths):
    """Load models on a server; return the directories it was sent, and the tensors in them."""
    seen = []

    def info(_):
        return 200, {"vllm_config": f"model='m', device_config={device}, seed=0"}

    def reload(body):
        folder = Path(body["kwargs"]["weights_path"])
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {folder / file for file in index["weight_map"].values()}
        seen.append((folder, {n: t for file in files for n, t in load_file(file).items()}))
        assert (folder / "config.json").read_text() == "{}"
        return 200, {}

    server = Server([info, *[reload, completion] * len(paths)])

    async def run():
        async with connected(server) as engine:
            for version, path in enumerate(paths):
                await engine.load_weights(str(path), policy_version=version)

    asyncio.run(run())
    assert paths_of(server)[:2] == ["server_info", "collective_rpc"]
    return seen


def test_on_a_cpu_tied_embeddings_are_also_loaded_as_the_output_layer(tmp_path):
    names = [EMBEDDING, "model.norm.weight"]
    paths = [tmp_path / "one", tmp_path / "two"]
    saved = [save_sharded(path, names) for path in paths]
    before = sorted(tmp_path.rglob("*"))
    for (folder, tensors), model in zip(load_on("cpu", *paths), saved, strict=True):
        assert tensors.keys() == {*names, HEAD}
        np.testing.assert_array_equal(tensors[HEAD], model[EMBEDDING])
        np.testing.assert_array_equal(tensors["model.norm.weight"], model["model.norm.weight"])
        assert not folder.exists()
    assert sorted(tmp_path.rglob("*")) == before


def test_elsewhere_a_model_is_loaded_from_its_own_directory(tmp_path):
    save_sharded(tmp_path / "m", [EMBEDDING])
    assert [folder for folder, _ in load_on("cuda", tmp_path / "m")] == [tmp_path / "m"]


async def test_an_output_layer_of_its_own_needs_no_copy(tmp_path):
    save_sharded(tmp_path / "m", [EMBEDDING, HEAD])
    server = Server()
    async with connected(server) as engine:
        await engine.load_weights(str(tmp_path / "m"), policy_version=1)
    assert server.requests[0][1]["kwargs"] == {"weights_path": str(tmp_path / "m")}


def test_on_a_cpu_embeddings_of_an_unknown_name_are_refused(tmp_path):
    save_sharded(tmp_path / "m", ["transformer.wte.weight"])
    with pytest.raises(RolloutError, match="on a CPU, vLLM needs") as error:
        load_on("cpu", tmp_path / "m")
    assert error.value.rule == "engine_refused"


async def test_a_server_that_does_not_name_its_device_is_reported(tmp_path, caplog):
    save_sharded(tmp_path / "m", [EMBEDDING])
    server = Server([status(404, "Not Found")])
    async with connected(server) as engine:
        await engine.load_weights(str(tmp_path / "m"), policy_version=1)
    assert server.requests[1][1]["kwargs"] == {"weights_path": str(tmp_path / "m")}
    assert "cannot tell whether vLLM computes on a CPU" in caplog.text


async def test_a_call_that_is_repeated_is_named_after_the_weights_that_answered():
    server = Server()
    async with connected(server) as engine:

        def fails_while_weights_change(_):
            engine.policy_version += 1
            return 500, {}

        server.script += [fails_while_weights_change] * 2
        assert (await engine.sample([1], SAMPLING)).policy_version == 2
    salts = [body["cache_salt"] for _, body, _ in server.requests]
    assert salts == ["policy_version=0", "policy_version=1", "policy_version=2"]


@pytest.mark.parametrize(
    ("kind", "answer", "rule", "hint", "num_requests"),
    [
        ("model", status(500, "Worker failed"), "engine_refused", "", 3),
        ("model", status(404, "Not Found"), "engine_refused", "VLLM_SERVER_DEV_MODE=1", 1),
        ("none", status(500), "model_directory", "", 0),
        ("adapter", status(500, "LoRA is not enabled"), "engine_refused", "--enable-lora", 3),
    ],
)
async def test_weights_that_cannot_be_loaded_are_refused_soon(
    tmp_path, adapter, weights, kind, answer, rule, hint, num_requests
):
    server = Server([answer] * 9)
    (tmp_path / "empty").mkdir()
    path = {"model": weights, "none": str(tmp_path / "empty")}.get(kind) or adapter(1)
    with pytest.raises(RolloutError) as error:
        async with connected(server) as engine:
            await engine.load_weights(path, policy_version=3)
    assert error.value.rule == rule
    assert hint in (error.value.hint or "")
    assert len(server.requests) == num_requests


def test_a_further_field_cannot_change_what_is_set():
    server = Server()
    refusal_of(server, "logprobs", sampling=Sampling(extra={"logprobs": 5}))
    assert server.requests == []
    ask(server := Server(), sampling=Sampling(extra={"min_tokens": 2}))
    assert [body["min_tokens"] for _, body, _ in server.requests] == [2]


@pytest.mark.parametrize("kind", ["adapter", "model"])
async def test_new_weights_wait_for_a_server_that_restarts(adapter, weights, kind, caplog):
    """As calls do; every attempt of the first two rounds of three breaks."""
    path, server = adapter(1) if kind == "adapter" else weights, Server([RESET] * 6)
    async with connected(server) as engine:
        await engine.load_weights(path, policy_version=1)
        assert (await engine.sample([1], SAMPLING)).policy_version == 1
    assert "waiting for the server" in caplog.text
    last = ["load_lora_adapter"] if kind == "adapter" else ["collective_rpc", "reset_prefix_cache"]
    assert paths_of(server)[-1 - len(last) :] == [*last, "completions"]


async def test_an_engine_waits_for_a_server_that_starts_after_it(caplog):
    """The first two rounds of three attempts break."""

    def models(_):
        return 200, {"data": [{"id": "m", "max_model_len": 64}]}

    server = Server([*[RESET] * 6, models])
    async with connected(server, model=None) as engine:
        assert engine.context_tokens == 64
    assert caplog.text.count("waiting for the server") == 1
    assert {path for path, _, _ in server.requests} == {"/v1/models"}


async def test_new_weights_of_a_server_that_stays_away_are_an_error_that_names_where_to_look(
    weights,
):
    with serving(Server()) as server:
        pass
    with pytest.raises(RolloutError) as error:
        async with connected(server) as engine:
            await engine.load_weights(weights, policy_version=1)
    assert error.value.rule == "engine_down"
    assert f"{server.url}/health" in error.value.hint


async def test_a_server_that_was_lost_gets_the_weights_again_before_it_is_asked(weights):
    server = Server([completion, completion, RESET, RESET, status(503)])
    async with connected(server) as engine:
        await engine.load_weights(weights, policy_version=3)
        await asyncio.gather(*(engine.sample([1], SAMPLING) for _ in range(2)))
    load = ["collective_rpc", "reset_prefix_cache"]
    ask_it = ["completions"] * 2
    assert paths_of(server) == [*load, *ask_it, "collective_rpc", *load, *ask_it]
    assert server.requests[4][1] == server.requests[0][1]


@pytest.mark.parametrize(("lengths", "expected"), [((512, 256), 256), ((None, None), None)])
async def test_the_context_is_that_of_the_smallest_server(lengths, expected):
    def listing(length):
        return lambda _: (200, {"data": [{"id": "m", "max_model_len": length}]})

    servers = (Server(answer=listing(length)) for length in lengths)
    async with connected(*servers, model=None) as engine:
        assert engine.context_tokens == expected


@pytest.fixture
def adapter(tmp_path):
    """Makes adapters whose contents are the number given."""

    def make(number):
        path = tmp_path / f"version_{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(bytes([number]))
        return str(path)

    return make


def loads_of(server):
    return [body["lora_name"] for path, body, _ in server.requests if "load_lora" in path]


async def test_an_adapter_is_loaded_by_name_and_the_one_before_the_last_is_freed(adapter):
    server, names = Server(), []
    async with connected(server) as engine:
        for version in (1, 2, 3):
            await engine.load_weights(adapter(version), policy_version=version)
            assert (await engine.sample([1], SAMPLING)).policy_version == version
            names.append(engine.adapter)
    first, second, third = names
    assert first.startswith("policy_version_1_")
    asked = [body.get("lora_name", body.get("model")) for _, body, _ in server.requests]
    assert list(zip(paths_of(server), asked, strict=True)) == [
        ("load_lora_adapter", first),
        ("completions", first),
        ("load_lora_adapter", second),
        ("completions", second),
        ("load_lora_adapter", third),
        ("unload_lora_adapter", first),
        ("completions", third),
    ]


async def test_a_new_model_ends_the_adapters(adapter, weights):
    server = Server()
    async with connected(server) as engine:
        await engine.load_weights(adapter(1), policy_version=1)
        await engine.load_weights(weights, policy_version=2)
        await engine.sample([1], SAMPLING)
    assert server.requests[-1][1]["model"] == "m"


async def test_other_contents_have_another_name_so_that_no_prefix_of_another_run_is_found(adapter):
    server, path = Server(), adapter(1)
    async with connected(server) as engine:
        await engine.load_weights(path, policy_version=1)
        (Path(path) / "adapter_model.safetensors").write_bytes(b"other")
        await engine.load_weights(path, policy_version=1)
    assert len(set(loads_of(server))) == 2


async def test_a_server_that_comes_back_loads_the_model_and_both_adapters_first(adapter, weights):
    server = Server()
    async with connected(server) as engine:
        await engine.load_weights(weights, policy_version=0)
        for version in (1, 2):
            await engine.load_weights(adapter(version), policy_version=version)
        server.script = [RESET]
        await engine.sample([1], SAMPLING)
    model, load = ["collective_rpc", "reset_prefix_cache"], ["load_lora_adapter"] * 2
    assert paths_of(server) == [*model, *load, "completions", *model, *load, "completions"]
    assert loads_of(server)[:2] == loads_of(server)[2:]


@pytest.mark.parametrize("kind", ["adapter", "model"])
async def test_a_server_that_did_not_change_gets_no_calls_until_it_has(
    adapter, weights, kind, caplog
):
    stale = Server([status(500)] * 100)

    async def sample_20(engine):
        for session in range(20):
            await engine.sample([1], SAMPLING, session=str(session))

    async with connected(Server(), stale) as engine:
        path = adapter(1) if kind == "adapter" else weights
        await engine.load_weights(path, policy_version=1)
        before, start = len(stale.requests), time.monotonic()
        await sample_20(engine)
        later, seconds = stale.requests[before:], time.monotonic() - start
        stale.script = []
        await asyncio.sleep(2 * FAST.max_backoff_s)
        await sample_20(engine)
    assert f"{stale.url} did not load new weights" in caplog.text
    assert not [path for path, _, _ in later if "completions" in path]
    assert len(later) <= 1 + seconds / FAST.max_backoff_s, "tried again at most once a while"
    assert stale.requests[-1][0] == "/v1/completions"


@pytest.mark.parametrize(
    ("listed", "expected"), [([True, True], True), ([True, False], False), ([None], False)]
)
async def test_servers_take_adapters_if_all_list_the_call_that_loads_them(listed, expected):
    def api(is_listed):
        if is_listed is None:
            return status(404)
        return lambda _: (200, {"paths": {"/v1/load_lora_adapter": {}} if is_listed else {}})

    async with connected(*(Server([api(is_listed)]) for is_listed in listed)) as engine:
        assert await engine.takes_adapters() is expected


@pytest.mark.parametrize(
    ("stop", "sent"), [(("<|eot|>",), False), (("a<|eot|>",), False), (("a",), None), ((), None)]
)
def test_special_tokens_stay_in_the_text_where_a_stop_string_contains_one(stop, sent):
    fields = sampling_fields(Sampling(stop=stop), ["<|eot|>"])
    assert fields.get("skip_special_tokens") is sent
    config = GenerateConfig(tasks="t", model="m", out="o", stop=stop)
    usual = usual_fields(config, None, 0, ["<|eot|>"])
    assert usual.get("skip_special_tokens") is sent


def test_special_tokens_that_end_a_response_anyway_do_not_change_requests(smollm2_dir):
    config = GenerateConfig(
        tasks="t", model=str(smollm2_dir), out="o", engine="vllm", urls=("http://127.0.0.1:9",)
    )
    special = open_engine(config).special_tokens
    assert "<filename>" in special
    assert "<|im_end|>" not in special


@pytest.mark.parametrize("num_servers", [1, 3])
async def test_each_server_is_tried_before_a_wait_and_waits_are_those_of_one_server(
    num_servers, monkeypatch
):
    tried, waits = [], []

    async def once(root):
        tried.append(root)
        return Failed("down")

    async def sleep(seconds):
        waits.append(seconds)

    urls = [f"http://{number}" for number in range(num_servers)]
    client = Servers(urls, Limits(max_attempts=3, backoff_s=1.0))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await client.repeat(lambda: urls, 3 + num_servers - 1, once)
    assert [wait > 0 for wait in waits] == [False] * (num_servers - 1) + [True] * 2
    assert 0.5 <= waits[-2] <= 1.5
    assert 1 <= waits[-1] <= 3
    assert len(tried) == num_servers + 2
