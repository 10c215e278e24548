import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pipelines.generation.processes import VllmServer
from schemas.errors import RolloutError
from tests.conftest import ROOT

SERVES = """
import http.server, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({pids!r}).write_text(f"{{__import__('os').getpid()}} {{child.pid}}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
ENDS = "print('starting', flush=True); raise SystemExit('no such model')"
HOLDS = """
import sys, pathlib, time
from pipelines.generation.processes import VllmServer
log, path = pathlib.Path(sys.argv[1]), sys.argv[2]
with VllmServer("m", python=sys.executable, log=log, environment={"PYTHONPATH": path}):
    print("up", flush=True)
    time.sleep(600)
"""


def stand_in(tmp_path, program):
    """A program in the place of vLLM's server."""
    module = tmp_path / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    (module / "api_server.py").write_text(program.format(pids=str(tmp_path / "pids")))


def server_of(tmp_path):
    environment = {"PYTHONPATH": str(tmp_path)}
    log = tmp_path / "log"
    return VllmServer("m", python=sys.executable, log=log, environment=environment)


def is_gone(pid):
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(tmp_path, timeout_s=10):
    pids = (tmp_path / "pids").read_text().split()
    deadline = time.monotonic() + timeout_s
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(pids) == 2 and all(map(is_gone, pids))


@pytest.mark.parametrize("kill", [False, True])
def test_a_server_ends_with_all_its_processes_and_starts_again(tmp_path, kill):
    stand_in(tmp_path, SERVES)
    with server_of(tmp_path) as server:
        server.stop(kill=kill)
        assert all_gone(tmp_path)
        server.start()
        assert not any(map(is_gone, (tmp_path / "pids").read_text().split()))
    assert all_gone(tmp_path)


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path):
    stand_in(tmp_path, ENDS)
    with pytest.raises(RolloutError, match="exit status 1") as error, server_of(tmp_path):
        pass
    assert error.value.hint == "read the end of its log: starting | no such model"


def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path):
    stand_in(tmp_path, SERVES)
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "log"), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"up\n"
        os.kill(holder.pid, signal.SIGKILL)
    assert all_gone(tmp_path)
