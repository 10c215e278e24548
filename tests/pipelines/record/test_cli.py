import asyncio
import socket

import pytest

from pipelines.record.serving import serve
from pipelines.record.settings import RecordSettings
from rollout_io.cli.main import run


def test_the_verb_says_what_is_missing_or_wrong(capsys, tmp_path):
    assert run(["record", "--out", str(tmp_path)]) == 2
    assert "--upstream" in capsys.readouterr().err
    given = ["--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "f")]
    (tmp_path / "f").write_text("")
    assert run(["record", *given]) == 1
    assert "output_file" in capsys.readouterr().err
    assert run(["record", "--upstream", "http://127.0.0.1:9", "--out", "memory://ds"]) == 1
    assert "needs a local directory" in capsys.readouterr().err
    assert run(["record", "--upstream", "127.0.0.1:9", "--out", str(tmp_path / "ds")]) == 1
    assert (
        "found '127.0.0.1:9'; expected a URL such as http://HOST:PORT/v1" in capsys.readouterr().err
    )


@pytest.mark.parametrize("host", ["256.0.0.1", "192.0.2.1"])
def test_an_address_that_cannot_be_listened_on_is_an_error(capsys, tmp_path, host):
    given = ["--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "ds"), "--host", host]
    assert run(["record", *given]) == 1
    said = capsys.readouterr().err
    assert f"{host}:8100" in said
    assert "--admin-key" in said


@pytest.mark.slow
def test_the_start_warns_of_engines_that_do_not_respond(tmp_path):
    told, urls = [], []

    async def start(upstreams):
        settings = RecordSettings(upstreams=upstreams, out=str(tmp_path / "ds"))
        ready = asyncio.Event()
        serving = serve(
            settings,
            host="127.0.0.1",
            port=0,
            announce=urls.append,
            show=lambda _: ready.set(),
            tell=told.append,
        )
        task = asyncio.create_task(serving)
        await asyncio.wait_for(ready.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with socket.socket() as engine, socket.socket() as closed:
        engine.bind(("127.0.0.1", 0))
        engine.listen()
        closed.bind(("127.0.0.1", 0))
        silent = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        asyncio.run(start((f"http://127.0.0.1:{engine.getsockname()[1]}/v1", silent)))
    assert len(urls) == 1
    reason = "connection refused; calls fail until it is up"
    assert told == [f"the engine at {silent} does not respond: {reason}"]
