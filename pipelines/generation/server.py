"""A vLLM server of one's own, on a free port of this machine, for as long as it is needed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from schemas.errors import RolloutError

_STOP_S = 30.0

_WATCH = """
import os, signal, sys
if not sys.stdin.buffer.read(1):
    try:
        os.killpg(int(sys.argv[1]), signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
"""Ends a group of processes once nobody holds the other end of its standard input any more."""


class VllmServer:
    """Starts vLLM, waits until it answers, and ends it with all of its processes.

    It ends too when this process does, however that ends.

    Args:
        model: A Hugging Face model directory.
        python: Interpreter of the environment that vLLM is installed in.
        log: File that takes the server's output.
        arguments: Further ones of the command line.
        environment: Variables on top of this process's own.
        start_timeout_s: Until it must answer.

    Example:
        with VllmServer(model_dir, python=".venv-vllm/bin/python", log=Path("vllm.log")) as server:
            engine = VllmEngine(server.url)
    """

    def __init__(
        self,
        model: str,
        *,
        python: str,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        module = "vllm.entrypoints.openai.api_server"
        self.command = [python, "-m", module, "--model", model, "--host", "127.0.0.1"]
        self.command += ["--port", str(self.port), *arguments]
        here = str(Path(python).absolute().parent)
        path = os.pathsep.join([here, os.environ.get("PATH", "")])
        own = {"PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._environment = {**os.environ, **own, **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RolloutError: engine_start: it ended, or did not answer in time; its last words.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._watch = subprocess.Popen(
            [sys.executable, "-c", _WATCH, str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        deadline = time.monotonic() + self._start_timeout_s
        while not self._answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                late = f"no answer within {self._start_timeout_s:g} s"
                got = late if code is None else f"exit status {code}"
                hint = "its last words: " + " | ".join(self._last_lines(5))
                raise RolloutError(
                    "engine_start", str(self.log), got, "a server that answers", hint
                )
            time.sleep(0.2)

    def stop(self, *, kill: bool = False) -> None:
        """End it and every process that it started; `kill`: at once, as if it had crashed."""
        if self._process is None:
            return
        _signal_group(self._process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._watch is not None:
            self._watch.communicate(b"x")
        self._process = self._watch = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _last_lines(self, num_lines: int) -> list[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return [line for line in text.splitlines() if line.strip()][-num_lines:]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
