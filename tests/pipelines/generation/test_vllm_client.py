import asyncio
import base64
import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipelines.generation import Sampling
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.http_pool import Failed, Limits, Servers
from pipelines.generation.engines.request_fields import sampling_fields
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.harness.engine_api import usual_fields
from schemas.errors import RolloutError
from tests.helpers.http_server import CUT, HANG, RESET, Server, completion, serving
from trainer.engine.open_engine import open_engine

FAST = Limits(backoff_s=0.01, max_backoff_s=0.04, max_attempts=6, timeout_s=5)
SAMPLING = Sampling(max_tokens=3)


def status(code, message="no", **headers):
    return lambda _: (code, ({"error": {"message": message}}, headers))


def changed(**fields):
    return lambda body: completion(body, **fields)


def ask(servers, prompts=([1, 2],), limits=FAST, sessions=None, sampling=SAMPLING):
    """Sample all prompts at once from the servers."""
    servers = servers if isinstance(servers, list) else [servers]
    sessions = sessions or [None] * len(prompts)

    async def run():
        urls = [server.url for server in servers]
        async with VllmEngine(urls, model="m", limits=limits, logprobs_mode="raw") as engine:
            pairs = zip(prompts, sessions, strict=True)
            return await asyncio.gather(*(engine.sample(p, sampling, session=s) for p, s in pairs))

    return asyncio.run(run())


def test_the_request_says_everything_and_the_answer_comes_back_as_it_is():
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("x",), seed=3)
    with serving(Server()) as server:
        (sampled,) = ask(server, [[4, 5]], sampling=sampling, sessions=["a/0"])
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
def test_arguments_of_the_chat_template_are_fields_of_a_chats_request(arguments):
    messages = [{"role": "user", "content": "Hi."}]
    said = {"role": "assistant", "content": "abc"}
    content = [{"token": letter, "logprob": -0.5} for letter in "abc"]

    def answer(body):
        code, made = completion(body, message=said, logprobs={"content": content})
        return code, made | {"prompt_token_ids": [1, 2]}

    async def run(url):
        async with VllmEngine(url, model="m", limits=FAST, logprobs_mode="raw") as engine:
            return await engine.chat(messages, SAMPLING, chat_template_kwargs=arguments)

    with serving(Server(answer=answer)) as server:
        assert asyncio.run(run(server.url)).message == said
    ((path, body, _),) = server.requests
    assert path == "/v1/chat/completions"
    assert body.get("chat_template_kwargs") == arguments


@pytest.mark.parametrize(
    "trouble", [RESET, CUT, status(500), status(503), status(429), status(408)]
)
def test_what_may_pass_is_asked_again_and_answered_once(trouble):
    with serving(Server([trouble] * 3)) as server:
        (sampled,) = ask(server)
    assert sampled.response_ids == [10, 11, 12]
    assert len(server.requests) == 4
    assert len({str(body) for _, body, _ in server.requests}) == 1


def test_of_many_calls_to_a_server_in_trouble_none_is_lost_or_asked_too_often():
    troubles = [RESET, status(500), CUT, status(429), RESET] * 4
    prompts = [[i + 1] for i in range(30)]
    limits = Limits(backoff_s=0.01, max_backoff_s=0.04, max_attempts=25, max_concurrent=7)
    with serving(Server(troubles, delay_s=0.03)) as server:
        sampled = ask(server, prompts, limits)
    assert [s.prompt_token_ids for s in sampled] == prompts
    assert len(server.requests) == 30 + 20
    assert 1 < server.most_at_once <= 7


@pytest.mark.parametrize("ids", [[], [10]])
def test_a_response_that_the_engine_aborted_is_not_taken_for_a_whole_one(ids):
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    aborted = changed(finish_reason="abort", token_ids=ids, logprobs=logprobs)
    with serving(Server([aborted] * 2)) as server:
        (sampled,) = ask(server)
    assert (sampled.response_ids, sampled.stop_reason) == ([10, 11, 12], "length")
    assert len(server.requests) == 3
    with serving(Server([aborted] * 99)) as server, pytest.raises(RolloutError) as error:
        ask(server)
    assert error.value.rule == "engine_down"
    assert len(server.requests) == 6


@pytest.mark.slow
def test_a_slow_answer_is_given_up_and_asked_again():
    limits = Limits(backoff_s=0.01, timeout_s=1.5)
    with serving(Server([HANG])) as server:
        (sampled,) = ask(server, limits=limits)
    assert sampled.response_ids == [10, 11, 12]
    assert (len(server.requests), server.num_left) == (2, 1)


def test_an_engine_that_stays_away_is_an_error_after_bounded_attempts():
    script = [status(500, "engine dead")] * 99
    with serving(Server(script)) as server, pytest.raises(RolloutError, match="dead") as error:
        ask(server)
    assert error.value.rule == "engine_down"
    assert len(server.requests) == 6
    with pytest.raises(RolloutError, match="ClientConnectorError") as error:
        ask(server)
    assert error.value.rule == "engine_down"


def test_a_prompt_of_megabytes_is_sent_whole_again_after_an_error():
    prompt = list(range(100_000, 300_000))
    with serving(Server([status(503)])) as server:
        (sampled,) = ask(server, [prompt])
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
    asks = status(429, **{"Retry-After": "0.4"})
    with serving(Server([asks])) as server:
        ask(server, limits=Limits(backoff_s=0.001, max_backoff_s=1))
    assert server.times_s[1] - server.times_s[0] >= 0.2


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_request_at_fault_is_not_asked_again(code):
    with (
        serving(Server([status(code, "bad field")])) as server,
        pytest.raises(RolloutError, match=f"status {code}: bad field") as error,
    ):
        ask(server)
    assert error.value.rule == "engine_refused"
    assert len(server.requests) == 1


def test_a_prompt_beyond_the_context_has_a_rule_of_its_own():
    message = "This model's maximum context length is 2048 tokens. However, your prompt"
    with (
        serving(Server([status(400, message)])) as server,
        pytest.raises(RolloutError, match="2048") as error,
    ):
        ask(server)
    assert error.value.rule == "context_length"


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
    with serving(Server([answer])) as server, pytest.raises(RolloutError, match=got) as error:
        ask(server)
    assert error.value.rule == "engine_answer"
    assert len(server.requests) == 1


def test_missing_ids_are_hinted_at():
    with serving(Server([changed(token_ids=None)])) as server, pytest.raises(RolloutError) as error:
        ask(server)
    assert "return_token_ids" in error.value.hint


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_routed_experts_come_as_vllm_packs_them(dtype):
    routes, file = np.arange(4 * 2 * 3).reshape(4, 2, 3).astype(dtype), io.BytesIO()
    np.save(file, routes)
    packed = base64.b64encode(file.getvalue()).decode()
    with serving(Server([changed(routed_experts=packed)])) as server:
        (sampled,) = ask(server)
    assert sampled.rollout_expert_indices.dtype == np.int16
    np.testing.assert_array_equal(sampled.rollout_expert_indices, routes)


def test_a_cancelled_call_hangs_up_and_frees_its_slot():
    async def run(url):
        limits = Limits(max_concurrent=1)
        async with VllmEngine(url, model="m", limits=limits, logprobs_mode="raw") as engine:
            call = asyncio.create_task(engine.sample([1], SAMPLING))
            while not server.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return (await engine.sample([2], SAMPLING)).prompt_token_ids

    with serving(Server([HANG])) as server:
        assert asyncio.run(run(server.url)) == [2]
    assert server.num_left == 1


def test_no_more_calls_begin_in_a_second_than_the_rate_says():
    with serving(Server()) as server:
        ask(server, [[1]] * 9, Limits(requests_per_s=20))
    assert server.times_s[-1] - server.times_s[0] >= 8 / 20 - 0.05


def test_a_session_stays_on_its_server_and_others_spread():
    sessions = [f"task-{i // 4}/{i % 4}" for i in range(40)]
    with serving(Server()) as one, serving(Server()) as two, serving(Server()) as three:
        servers = [one, two, three]
        ask(servers, [[1]] * 120, sessions=sessions * 3)
        seen = [{h["x-session-id"] for _, _, h in server.requests} for server in servers]
    assert sum(map(len, seen)) == 40
    assert min(map(len, seen)) >= 5


def test_a_server_that_dies_hands_its_sessions_to_the_others():
    sessions = [str(i) for i in range(20)]
    with serving(Server()) as one:
        with serving(Server()) as two:
            pass
        sampled = ask([one, two], [[i + 1] for i in range(20)], sessions=sessions)
    assert [s.prompt_token_ids for s in sampled] == [[i + 1] for i in range(20)]


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
def test_the_engine_finds_out_what_its_log_probabilities_are_of(mode):
    async def run(url):
        async with VllmEngine(url, policy_version=7) as engine:
            return engine.logprobs_mode, (await engine.sample([1], SAMPLING)).policy_version

    with serving(Server([model_list], answer=answers(mode))) as server:
        assert asyncio.run(run(server.url)) == (mode, 7)
    assert server.requests[-1][1]["model"] == "served"


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def test_new_weights_go_to_every_server_and_older_keys_are_not_found_again(weights):
    async def run(urls):
        async with VllmEngine(urls, model="m", logprobs_mode="raw") as engine:
            await engine.load_weights(weights, policy_version=3)
            return await engine.sample([1], SAMPLING)

    with serving(Server()) as one, serving(Server()) as two:
        sampled = asyncio.run(run([one.url, two.url]))
    assert sampled.policy_version == 3
    reload = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
    for server in (one, two):
        assert [r[:2] for r in server.requests[:2]] == [
            ("/collective_rpc", reload),
            ("/reset_prefix_cache", {}),
        ]
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


def load_on(device, paths):
    """Load models on a server; return the directories it was given, and the tensors in them."""
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

    async def run(url):
        async with VllmEngine(url, model="m", limits=FAST, logprobs_mode="raw") as engine:
            for version, path in enumerate(paths):
                await engine.load_weights(str(path), policy_version=version)

    script = [reload, completion] * len(paths)
    with serving(Server([info, *script])) as server:
        asyncio.run(run(server.url))
    assert [path for path, _, _ in server.requests][:2] == ["/server_info", "/collective_rpc"]
    return seen


def test_on_a_cpu_tied_embeddings_are_also_loaded_as_the_output_layer(tmp_path):
    names = [EMBEDDING, "model.norm.weight"]
    paths = [tmp_path / "one", tmp_path / "two"]
    saved = [save_sharded(path, names) for path in paths]
    before = sorted(tmp_path.rglob("*"))
    found = load_on("cpu", paths)
    for (folder, tensors), model in zip(found, saved, strict=True):
        assert tensors.keys() == {*names, HEAD}
        np.testing.assert_array_equal(tensors[HEAD], model[EMBEDDING])
        np.testing.assert_array_equal(tensors["model.norm.weight"], model["model.norm.weight"])
        assert not folder.exists()
    assert sorted(tmp_path.rglob("*")) == before


def test_elsewhere_a_model_is_loaded_from_its_own_directory(tmp_path):
    save_sharded(tmp_path / "m", [EMBEDDING])
    assert [folder for folder, _ in load_on("cuda", [tmp_path / "m"])] == [tmp_path / "m"]


def test_an_output_layer_of_its_own_needs_no_copy(tmp_path):
    save_sharded(tmp_path / "m", [EMBEDDING, HEAD])

    async def run(url):
        async with VllmEngine(url, model="m", logprobs_mode="raw") as engine:
            await engine.load_weights(str(tmp_path / "m"), policy_version=1)

    with serving(Server()) as server:
        asyncio.run(run(server.url))
    assert server.requests[0][1]["kwargs"] == {"weights_path": str(tmp_path / "m")}


def test_on_a_cpu_embeddings_of_an_unknown_name_are_refused(tmp_path):
    save_sharded(tmp_path / "m", ["transformer.wte.weight"])
    with pytest.raises(
        RolloutError, match=r"m: on a CPU, vLLM needs .*; expected lm_head"
    ) as error:
        load_on("cpu", [tmp_path / "m"])
    assert error.value.rule == "engine_refused"


def test_a_server_that_does_not_name_its_device_is_reported(tmp_path, caplog):
    save_sharded(tmp_path / "m", [EMBEDDING])

    async def run(url):
        async with VllmEngine(url, model="m", logprobs_mode="raw") as engine:
            await engine.load_weights(str(tmp_path / "m"), policy_version=1)

    with serving(Server([status(404, "Not Found")])) as server:
        asyncio.run(run(server.url))
    assert server.requests[1][1]["kwargs"] == {"weights_path": str(tmp_path / "m")}
    assert "cannot tell whether vLLM computes on a CPU" in caplog.text


def test_a_call_that_is_repeated_is_named_after_the_weights_that_answered():
    async def run(url):
        async with VllmEngine(url, model="m", limits=FAST, logprobs_mode="raw") as engine:

            def fails_while_weights_change(_):
                engine.policy_version += 1
                return 500, {}

            server.script += [fails_while_weights_change] * 2
            return await engine.sample([1], SAMPLING)

    with serving(Server()) as server:
        assert asyncio.run(run(server.url)).policy_version == 2
    salts = [body["cache_salt"] for _, body, _ in server.requests]
    assert salts == ["policy_version=0", "policy_version=1", "policy_version=2"]


def test_weights_that_the_server_cannot_load_are_refused_soon(weights):
    async def run(url):
        async with VllmEngine(url, model="m", limits=FAST, logprobs_mode="raw") as engine:
            await engine.load_weights(weights, policy_version=3)

    script = [status(500, "Worker failed")] * 9
    with serving(Server(script)) as server, pytest.raises(RolloutError, match="Worker") as error:
        asyncio.run(run(server.url))
    assert error.value.rule == "engine_refused"
    assert len(server.requests) == 3


def test_what_is_no_model_directory_never_reaches_a_server(tmp_path):
    async def run(url):
        async with VllmEngine(url, model="m", logprobs_mode="raw") as engine:
            await engine.load_weights(str(tmp_path), policy_version=3)

    with serving(Server()) as server, pytest.raises(RolloutError) as error:
        asyncio.run(run(server.url))
    assert error.value.rule == "model_directory"
    assert server.requests == []


def test_a_server_without_reload_is_named_with_its_variable(weights):
    async def run(url):
        async with VllmEngine(url, model="m", logprobs_mode="raw") as engine:
            await engine.load_weights(weights, policy_version=3)

    with (
        serving(Server([status(404, "Not Found")])) as server,
        pytest.raises(RolloutError) as error,
    ):
        asyncio.run(run(server.url))
    assert "VLLM_SERVER_DEV_MODE=1" in error.value.hint


def test_a_further_field_cannot_change_what_is_set():
    with serving(Server()) as server:
        with pytest.raises(RolloutError, match="logprobs"):
            ask(server, sampling=Sampling(extra={"logprobs": 5}))
        ask(server, sampling=Sampling(extra={"min_tokens": 2}))
    assert [body["min_tokens"] for _, body, _ in server.requests] == [2]


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_new_weights_wait_for_a_server_that_restarts(adapter, weights, kind, caplog):
    """As calls do; every attempt of the first two rounds of three breaks."""
    path = adapter(1) if kind == "adapter" else weights

    async def use(engine):
        await engine.load_weights(path, policy_version=1)
        return await engine.sample([1], SAMPLING)

    with serving(Server([RESET] * 6)) as server:
        assert with_adapters([server], use).policy_version == 1
    assert "waiting for the server" in caplog.text
    paths = [path.rpartition("/")[2] for path, _, _ in server.requests]
    last = ["load_lora_adapter"] if kind == "adapter" else ["collective_rpc", "reset_prefix_cache"]
    assert paths[-1 - len(last) :] == [*last, "completions"]


def test_an_engine_waits_for_a_server_that_starts_after_it(caplog):
    """The first two rounds of three attempts break."""

    async def run(url):
        async with VllmEngine(url, limits=FAST, logprobs_mode="raw") as engine:
            return engine.context_tokens

    def models(_):
        return 200, {"data": [{"id": "m", "max_model_len": 64}]}

    with serving(Server([*[RESET] * 6, models])) as server:
        assert asyncio.run(run(server.url)) == 64
    assert caplog.text.count("waiting for the server") == 1
    assert {path for path, _, _ in server.requests} == {"/v1/models"}


def test_new_weights_of_a_server_that_stays_away_are_an_error_that_names_where_to_look(weights):
    async def use(engine):
        await engine.load_weights(weights, policy_version=1)

    with serving(Server()) as server:
        pass
    with pytest.raises(RolloutError) as error:
        with_adapters([server], use)
    assert error.value.rule == "engine_down"
    assert f"{server.url}/health" in error.value.hint


def test_a_server_that_was_lost_gets_the_weights_again_before_it_is_asked(tmp_path):
    (tmp_path / "model.safetensors").touch()
    broken = [completion, completion, RESET, RESET, status(503)]

    async def run(server):
        async with VllmEngine(server.url, model="m", limits=FAST, logprobs_mode="raw") as engine:
            await engine.load_weights(str(tmp_path), policy_version=3)
            await asyncio.gather(*(engine.sample([1], SAMPLING) for _ in range(2)))

    with serving(Server(broken)) as server:
        asyncio.run(run(server))
    paths = [path for path, _, _ in server.requests]
    load = ["/collective_rpc", "/reset_prefix_cache"]
    ask_it = ["/v1/completions"] * 2
    assert paths == [*load, *ask_it, "/collective_rpc", *load, *ask_it]
    assert server.requests[4][1] == server.requests[0][1]


@pytest.mark.parametrize(("lengths", "expected"), [((512, 256), 256), ((None, None), None)])
def test_the_context_is_that_of_the_smallest_server(lengths, expected):
    def listing(length):
        return lambda _: (200, {"data": [{"id": "m", "max_model_len": length}]})

    async def run(urls):
        async with VllmEngine(urls, limits=FAST, logprobs_mode="raw") as engine:
            return engine.context_tokens

    first, second = (Server(answer=listing(length)) for length in lengths)
    with serving(first), serving(second):
        assert asyncio.run(run([first.url, second.url])) == expected


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


def with_adapters(servers, use, **settings):
    async def run():
        urls = [server.url for server in servers]
        usual = {"model": "m", "limits": FAST, "logprobs_mode": "raw"}
        async with VllmEngine(urls, **usual | settings) as engine:
            return await use(engine)

    return asyncio.run(run())


def loads_of(server):
    return [body["lora_name"] for path, body, _ in server.requests if "load_lora" in path]


def test_an_adapter_is_loaded_by_name_and_the_one_before_the_last_is_freed(adapter):
    async def use(engine):
        models = []
        for version in (1, 2, 3):
            await engine.load_weights(adapter(version), policy_version=version)
            assert (await engine.sample([1], SAMPLING)).policy_version == version
            models.append(engine.adapter)
        return models

    with serving(Server()) as server:
        first, second, third = with_adapters([server], use)
    assert first.startswith("policy_version_1_")
    bodies = [
        (path.rpartition("/")[2], body.get("lora_name", body.get("model")))
        for path, body, _ in server.requests
    ]
    assert bodies == [
        ("load_lora_adapter", first),
        ("completions", first),
        ("load_lora_adapter", second),
        ("completions", second),
        ("load_lora_adapter", third),
        ("unload_lora_adapter", first),
        ("completions", third),
    ]


def test_a_new_model_ends_the_adapters(adapter, weights):
    async def use(engine):
        await engine.load_weights(adapter(1), policy_version=1)
        await engine.load_weights(weights, policy_version=2)
        await engine.sample([1], SAMPLING)

    with serving(Server()) as server:
        with_adapters([server], use)
    assert server.requests[-1][1]["model"] == "m"


def test_other_contents_have_another_name_so_that_no_prefix_of_another_run_is_found(
    tmp_path, adapter
):
    async def use(engine):
        await engine.load_weights(adapter(1), policy_version=1)
        (tmp_path / "version_1" / "adapter_model.safetensors").write_bytes(b"other")
        await engine.load_weights(str(tmp_path / "version_1"), policy_version=1)

    with serving(Server()) as server:
        with_adapters([server], use)
    assert len(set(loads_of(server))) == 2


def test_a_server_that_comes_back_loads_the_model_and_both_adapters_first(adapter, weights):
    async def use(engine):
        await engine.load_weights(weights, policy_version=0)
        for version in (1, 2):
            await engine.load_weights(adapter(version), policy_version=version)
        server.script = [RESET]
        await engine.sample([1], SAMPLING)

    with serving(Server()) as server:
        with_adapters([server], use)
    paths = [path.rpartition("/")[2] for path, _, _ in server.requests]
    model, load, ask_it = (
        ["collective_rpc", "reset_prefix_cache"],
        "load_lora_adapter",
        "completions",
    )
    assert paths == [*model, load, load, ask_it, *model, load, load, ask_it]
    assert loads_of(server)[:2] == loads_of(server)[2:]


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_a_server_that_did_not_change_gets_no_calls_until_it_has(adapter, weights, kind, caplog):
    path = adapter(1) if kind == "adapter" else weights

    async def use(engine):
        await engine.load_weights(path, policy_version=1)
        before, start = len(stale.requests), time.monotonic()
        for session in range(20):
            await engine.sample([1], SAMPLING, session=str(session))
        return stale.requests[before:], time.monotonic() - start

    with serving(Server()) as good, serving(Server([status(500)] * 100)) as stale:
        later, seconds = with_adapters([good, stale], use)
    assert f"{stale.url} did not load new weights" in caplog.text
    assert not [path for path, _, _ in later if "completions" in path]
    assert len(later) <= 1 + seconds / FAST.max_backoff_s, "tried again at most once a while"

    async def returns(engine):
        await use(engine)
        stale.script = []
        await asyncio.sleep(2 * FAST.max_backoff_s)
        for session in range(20):
            await engine.sample([1], SAMPLING, session=str(session))

    with serving(Server()) as good, serving(Server([status(500)] * 100)) as stale:
        with_adapters([good, stale], returns)
    assert stale.requests[-1][0] == "/v1/completions"


def test_an_adapter_that_no_server_can_load_is_refused_with_the_options_to_start_with(adapter):
    async def use(engine):
        await engine.load_weights(adapter(1), policy_version=1)

    with (
        serving(Server([status(500, "LoRA is not enabled")] * 3)) as server,
        pytest.raises(RolloutError, match="LoRA is not enabled") as error,
    ):
        with_adapters([server], use)
    assert error.value.rule == "engine_refused"
    assert "--enable-lora" in error.value.hint


@pytest.mark.parametrize(("listed", "expected"), [(["/v1/load_lora_adapter"], True), ([], False)])
def test_servers_take_adapters_if_all_list_the_call_that_loads_them(listed, expected):
    def api(paths):
        return lambda _: (200, {"paths": {key: {} for key in paths}})

    async def use(engine):
        return await engine.takes_adapters()

    with (
        serving(Server([api(["/v1/load_lora_adapter"])])) as one,
        serving(Server([api(listed)])) as two,
    ):
        assert with_adapters([one, two], use) is expected
    with serving(Server([status(404)])) as hidden:
        assert with_adapters([hidden], use) is False


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
def test_each_server_is_tried_before_a_wait_and_waits_are_those_of_one_server(
    num_servers, monkeypatch
):
    tried, waits = [], []

    async def once(root):
        tried.append(root)
        return Failed("down")

    async def sleep(seconds):
        waits.append(seconds)

    async def main():
        urls = [f"http://{number}" for number in range(num_servers)]
        client = Servers(urls, Limits(max_attempts=3, backoff_s=1.0))
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await client.repeat(lambda: urls, 3 + num_servers - 1, once)

    asyncio.run(main())
    assert [wait > 0 for wait in waits] == [False] * (num_servers - 1) + [True] * 2
    assert 0.5 <= waits[-2] <= 1.5
    assert 1 <= waits[-1] <= 3
    assert len(tried) == num_servers + 2
