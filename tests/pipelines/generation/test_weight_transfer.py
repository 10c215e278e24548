"""Transfer of weights to servers, seen through the requests that they receive."""

import asyncio
import logging
import threading
from contextlib import suppress

import pytest

from pipelines.generation import Sampling
from pipelines.generation.engines.http_pool import Limits
from pipelines.generation.engines.vllm import VllmEngine
from schemas.errors import ConfigError, RolloutError
from tests.helpers.http_server import Server, completion, serving

FAST = Limits(backoff_s=0.01, max_backoff_s=0.04, max_attempts=6, timeout_s=5)
SAMPLING = Sampling(max_tokens=3)
TRANSFER = [
    "/pause?mode=keep",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_info",
    "/reset_prefix_cache",
    "/resume",
]
EMPTY_UPDATE = ["/pause?mode=keep", "/start_weight_update", "/finish_weight_update"]
SHUTDOWN = "/shutdown_weight_transfer_engine"
FILES = ["/collective_rpc", "/reset_prefix_cache"]
FILES_AFTER = [*FILES, "/update_weight_version", "/resume"]


class Vllm(Server):
    """Answers like vLLM: can be paused and resumed, and reports the version of its weights.

    Attributes:
        broken: Paths that are answered with status 500.
        version: Version that `/weight_info` reports.
    """

    def __init__(self, backend="nccl"):
        super().__init__()
        self.backend, self.broken, self.version = backend, set(), "default"
        self.running = asyncio.Event()
        self.running.set()

    @property
    def paths(self):
        return [path for path, _, _ in self.requests]

    async def _answer(self, _, request, reader, writer):
        path, body, _ = request
        if path == "/v1/completions":
            await self.running.wait()
        return await super()._answer(lambda _: self.reply(path, body), request, reader, writer)

    def reply(self, path, body):
        if path in self.broken:
            return 500, {"error": {"message": "it broke"}}
        match path.partition("?")[0]:
            case "/v1/completions":
                return completion(body)
            case "/server_info":
                chosen = {"backend": self.backend} if self.backend else None
                return 200, {"vllm_config": {"weight_transfer_config": chosen}}
            case "/is_paused":
                return 200, {"is_paused": not self.running.is_set()}
            case "/pause":
                self.running.clear()
            case "/resume":
                self.running.set()
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/finish_weight_update" if body:
                self.version = body["weight_version"]
            case "/update_weight_version":
                self.version = body["new_version"]
        return 200, {}


class Sender:
    """Makes the requests of a transfer, without sending any data."""

    def __init__(self, post):
        self.post, self.closed = post, threading.Event()
        post("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, directory, policy_version):
        assert list(directory.glob("*.safetensors"))
        self.post("/start_weight_update", {})
        self.post("/update_weights", {"update_info": {}})
        self.post("/finish_weight_update", {"weight_version": str(policy_version)})

    def close(self):
        self.closed.set()


class Opener:
    """Opens senders of a class, and keeps them."""

    def __init__(self, kind=Sender):
        self.kind, self.opened = kind, []

    def __call__(self, _, post):
        self.opened.append(self.kind(post))
        return self.opened[-1]


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def with_engine(servers, use, opener=None, **settings):
    """Run `use` with an engine for the servers."""

    async def run():
        urls = [server.url for server in servers]
        usual = {"model": "m", "limits": FAST, "logprobs_mode": "raw"}
        senders = {"nccl": opener or Opener()}
        async with VllmEngine(urls, senders=senders, **usual | settings) as engine:
            await use(engine)

    asyncio.run(run())


def changes(server):
    """Return the paths of the requests, without the queries before the first transfer."""
    asked = ["/is_paused", "/server_info?config_format=json", "/weight_info"]
    assert server.paths[:3] == asked
    return server.paths[3:]


def test_one_connection_transfers_every_version_while_calls_are_paused(weights):
    async def use(engine):
        for version in (1, 2):
            await engine.load_weights(weights, policy_version=version)
            assert server.version == str(version)
            assert (await engine.sample([1], SAMPLING)).policy_version == version

    opener = Opener()
    with serving(Vllm()) as server:
        with_engine([server], use, opener, api_key="secret")
    call = "/v1/completions"
    expected = ["/init_weight_transfer_engine", *TRANSFER, call, *TRANSFER, call, SHUTDOWN]
    assert changes(server) == expected
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer secret"}
    (sender,) = opener.opened
    assert sender.closed.wait(10)


@pytest.mark.parametrize("backend", [None, "ipc"])
def test_a_server_with_no_backend_or_another_one_loads_files(backend, weights, caplog):
    async def use(engine):
        await engine.load_weights(weights, policy_version=1)

    caplog.set_level(logging.INFO)
    with serving(Vllm(backend)) as files, serving(Vllm()) as other:
        with_engine([files, other], use)
    assert [path for path in files.paths if path in FILES_AFTER] == FILES
    assert [path for path in other.paths if path in TRANSFER[:4]] == TRANSFER[:4]
    assert "by transfer (nccl) to 1 server" in caplog.text
    assert f"as files{' (the backend ipc' if backend else ' to 1 server'}" in caplog.text


@pytest.mark.parametrize("route", ["/server_info?config_format=json", "/weight_info"])
def test_a_server_that_does_not_report_its_backend_or_version_loads_files(route, weights):
    async def use(engine):
        server.broken = {route}
        await engine.load_weights(weights, policy_version=1)

    with serving(Vllm()) as server:
        with_engine([server], use)
    assert server.paths[-2:] == FILES


@pytest.mark.parametrize("broken", ["/init_weight_transfer_engine", *TRANSFER[:4]])
def test_a_server_whose_transfer_fails_gets_no_call_until_it_has_loaded_the_files(
    broken, weights, caplog
):
    async def use(engine):
        bad.broken = {broken}
        await engine.load_weights(weights, policy_version=1)
        bad.broken = set()
        for session in range(8):
            await engine.sample([1], SAMPLING, session=str(session))
        await engine.load_weights(weights, policy_version=2)

    opener = Opener()
    with serving(Vllm()) as good, serving(Vllm()) as bad:
        with_engine([good, bad], use, opener)
    assert f"{bad.url}: weight transfer failed, loading the files instead" in caplog.text
    assert "it broke" in caplog.text
    found = changes(bad)
    until_first_call = found[: found.index("/v1/completions")]
    made_good = [*EMPTY_UPDATE, SHUTDOWN, *FILES_AFTER, "/weight_info"]
    if broken == "/pause?mode=keep":  # then no update begins
        made_good = [broken, *FILES_AFTER, "/weight_info"]
    assert until_first_call[-len(made_good) :] == made_good
    assert "/collective_rpc" not in good.paths
    assert found.count("/init_weight_transfer_engine") == 2, "opened again for the next version"
    assert good.paths.count("/init_weight_transfer_engine") == 1
    assert (good.version, bad.version) == ("2", "2")


def test_a_server_that_reports_another_version_loads_the_files(weights, caplog):
    class Forgetful(Sender):
        def send(self, directory, policy_version):
            super().send(directory, policy_version - 1)

    async def use(engine):
        await engine.load_weights(weights, policy_version=5)

    with serving(Vllm()) as server:
        with_engine([server], use, Opener(Forgetful))
    assert "found weights of version 4; expected version 5" in caplog.text
    assert [path for path in changes(server) if path in FILES_AFTER][-4:] == FILES_AFTER
    assert server.version == "5"


def test_a_sender_that_hangs_is_abandoned_when_a_request_fails(weights):
    class Stuck(Sender):
        def send(self, directory, policy_version):
            with suppress(RolloutError):
                super().send(directory, policy_version)
            assert self.closed.wait(60), "closed as soon as a request has failed"

    async def use(engine):
        server.broken = {"/update_weights"}
        await engine.load_weights(weights, policy_version=1)

    with serving(Vllm()) as server:
        with_engine([server], use, Opener(Stuck))
    assert server.version == "1"


def test_running_calls_wait_for_the_transfer_even_if_they_fill_all_slots(weights):
    async def use(engine):
        server.running.clear()
        calls = [asyncio.ensure_future(engine.sample([1], SAMPLING)) for _ in range(2)]
        while server.paths.count("/v1/completions") < 2:
            await asyncio.sleep(0.01)
        await engine.load_weights(weights, policy_version=1)
        assert [s.policy_version for s in await asyncio.gather(*calls)] == [0, 0]

    with serving(Vllm()) as server:
        with_engine([server], use, limits=Limits(max_concurrent=2, timeout_s=20))


def test_a_cancelled_load_finishes_first_so_that_no_server_is_left_paused(weights):
    class Slow(Sender):
        def send(self, directory, policy_version):
            begun.set()
            assert goes_on.wait(60)
            super().send(directory, policy_version)

    begun, goes_on = threading.Event(), threading.Event()

    async def use(engine):
        load = asyncio.ensure_future(engine.load_weights(weights, policy_version=1))
        await asyncio.to_thread(begun.wait)
        load.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert server.running.is_set()

    with serving(Vllm()) as server:
        with_engine([server], use, Opener(Slow))
    assert server.version == "1"


def test_a_server_paused_by_an_interrupted_transfer_is_refused_at_once():
    with serving(Vllm()) as server:
        server.running.clear()
        with pytest.raises(RolloutError, match="is paused") as error:
            with_engine([server], None)
    assert (error.value.rule, error.value.hint) == ("engine_refused", "restart the server")


def test_a_sender_that_cannot_be_opened_here_ends_the_run_and_leaves_no_server_paused(weights):
    def unusable(*_):
        raise ConfigError("sampling", "here", "nothing")

    async def use(engine):
        await engine.load_weights(weights, policy_version=1)

    with serving(Vllm()) as server, pytest.raises(ConfigError):
        with_engine([server], use, unusable)
    assert changes(server) == []


def test_an_error_is_raised_if_no_server_gets_the_weights_either_way(weights):
    async def use(engine):
        server.broken = {"/update_weights", "/collective_rpc"}
        await engine.load_weights(weights, policy_version=1)

    with serving(Vllm()) as server, pytest.raises(RolloutError, match="collective_rpc") as error:
        with_engine([server], use)
    assert error.value.rule == "engine_down"
    assert not server.running.is_set()
