"""Transfer of weights to servers, seen through the requests that they receive."""

import asyncio
import logging
import threading
from contextlib import suppress

import pytest

from pipelines.generation.engines.http_pool import Limits
from schemas.errors import ConfigError, RolloutError
from tests.helpers.http_server import Server, completion
from tests.helpers.vllm_engines import SAMPLING, connected

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


def transferring(*servers, opener=None, **settings):
    return connected(*servers, senders={"nccl": opener or Opener()}, **settings)


def changes(server):
    """Return the paths of the requests, without the queries before the first transfer."""
    asked = ["/is_paused", "/server_info?config_format=json", "/weight_info"]
    assert server.paths[:3] == asked
    return server.paths[3:]


async def test_one_connection_transfers_every_version_while_calls_are_paused(weights):
    opener, server = Opener(), Vllm()
    async with transferring(server, opener=opener, api_key="secret") as engine:
        for version in (1, 2):
            await engine.load_weights(weights, policy_version=version)
            assert server.version == str(version)
            assert (await engine.sample([1], SAMPLING)).policy_version == version
    call = "/v1/completions"
    expected = ["/init_weight_transfer_engine", *TRANSFER, call, *TRANSFER, call, SHUTDOWN]
    assert changes(server) == expected
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer secret"}
    (sender,) = opener.opened
    assert sender.closed.wait(10)


@pytest.mark.parametrize("backend", [None, "ipc"])
async def test_a_server_with_no_backend_or_another_one_loads_files(backend, weights, caplog):
    caplog.set_level(logging.INFO)
    files, other = Vllm(backend), Vllm()
    async with transferring(files, other) as engine:
        await engine.load_weights(weights, policy_version=1)
    assert [path for path in files.paths if path in FILES_AFTER] == FILES
    assert [path for path in other.paths if path in TRANSFER[:4]] == TRANSFER[:4]
    assert "by transfer (nccl) to 1 server" in caplog.text
    assert f"as files{' (the backend ipc' if backend else ' to 1 server'}" in caplog.text


@pytest.mark.parametrize("route", ["/server_info?config_format=json", "/weight_info"])
async def test_a_server_that_does_not_report_its_backend_or_version_loads_files(route, weights):
    server = Vllm()
    async with transferring(server) as engine:
        server.broken = {route}
        await engine.load_weights(weights, policy_version=1)
    assert server.paths[-2:] == FILES


@pytest.mark.parametrize("broken", ["/init_weight_transfer_engine", *TRANSFER[:4]])
async def test_a_server_whose_transfer_fails_gets_no_call_until_it_has_loaded_the_files(
    broken, weights, caplog
):
    good, bad = Vllm(), Vllm()
    async with transferring(good, bad) as engine:
        bad.broken = {broken}
        await engine.load_weights(weights, policy_version=1)
        bad.broken = set()
        for session in range(8):
            await engine.sample([1], SAMPLING, session=str(session))
        await engine.load_weights(weights, policy_version=2)
    assert f"{bad.url}: weight transfer failed, loading the files instead" in caplog.text
    assert "it broke" in caplog.text
    paths = changes(bad)
    until_first_call = paths[: paths.index("/v1/completions")]
    made_good = [*EMPTY_UPDATE, SHUTDOWN, *FILES_AFTER, "/weight_info"]
    if broken == "/pause?mode=keep":  # then no update begins
        made_good = [broken, *FILES_AFTER, "/weight_info"]
    assert until_first_call[-len(made_good) :] == made_good
    assert "/collective_rpc" not in good.paths
    assert paths.count("/init_weight_transfer_engine") == 2, "opened again for the next version"
    assert good.paths.count("/init_weight_transfer_engine") == 1
    assert (good.version, bad.version) == ("2", "2")


async def test_a_server_that_reports_another_version_loads_the_files(weights, caplog):
    class Forgetful(Sender):
        def send(self, directory, policy_version):
            super().send(directory, policy_version - 1)

    server = Vllm()
    async with transferring(server, opener=Opener(Forgetful)) as engine:
        await engine.load_weights(weights, policy_version=5)
    assert "found weights of version 4; expected version 5" in caplog.text
    assert [path for path in changes(server) if path in FILES_AFTER][-4:] == FILES_AFTER
    assert server.version == "5"


async def test_a_sender_that_hangs_is_abandoned_when_a_request_fails(weights):
    class Stuck(Sender):
        def send(self, directory, policy_version):
            with suppress(RolloutError):
                super().send(directory, policy_version)
            assert self.closed.wait(60), "closed as soon as a request has failed"

    server = Vllm()
    async with transferring(server, opener=Opener(Stuck)) as engine:
        server.broken = {"/update_weights"}
        await engine.load_weights(weights, policy_version=1)
    assert server.version == "1"


async def test_running_calls_wait_for_the_transfer_even_if_they_fill_all_slots(weights):
    server = Vllm()
    async with transferring(server, limits=Limits(max_concurrent=2, timeout_s=20)) as engine:
        server.running.clear()
        calls = [asyncio.ensure_future(engine.sample([1], SAMPLING)) for _ in range(2)]
        while server.paths.count("/v1/completions") < 2:
            await asyncio.sleep(0.01)
        await engine.load_weights(weights, policy_version=1)
        assert [s.policy_version for s in await asyncio.gather(*calls)] == [0, 0]


async def test_a_cancelled_load_finishes_first_so_that_no_server_is_left_paused(weights):
    class Slow(Sender):
        def send(self, directory, policy_version):
            begun.set()
            assert goes_on.wait(60)
            super().send(directory, policy_version)

    begun, goes_on, server = threading.Event(), threading.Event(), Vllm()
    async with transferring(server, opener=Opener(Slow)) as engine:
        load = asyncio.ensure_future(engine.load_weights(weights, policy_version=1))
        await asyncio.to_thread(begun.wait)
        load.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert server.running.is_set()
    assert server.version == "1"


async def test_a_server_paused_by_an_interrupted_transfer_is_refused_at_once():
    server = Vllm()
    server.running.clear()
    with pytest.raises(RolloutError, match="is paused") as error:
        async with transferring(server):
            pass
    assert (error.value.rule, error.value.hint) == ("engine_refused", "restart the server")


async def test_a_sender_that_cannot_be_opened_here_ends_the_run_and_leaves_no_server_paused(
    weights,
):
    def unusable(*_):
        raise ConfigError("sampling", "here", "nothing")

    server = Vllm()
    with pytest.raises(ConfigError):
        async with transferring(server, opener=unusable) as engine:
            await engine.load_weights(weights, policy_version=1)
    assert changes(server) == []


async def test_an_error_is_raised_if_no_server_gets_the_weights_either_way(weights):
    server = Vllm()
    server.broken = {"/update_weights", "/collective_rpc"}
    with pytest.raises(RolloutError, match="collective_rpc") as error:
        async with transferring(server) as engine:
            await engine.load_weights(weights, policy_version=1)
    assert error.value.rule == "engine_down"
    assert not server.running.is_set()
