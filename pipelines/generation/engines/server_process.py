"""Run a private vLLM server on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pipelines.generation.process_groups import Watch, signal_group
from schemas.errors import EngineError

_STOP_S = 30.0


class VllmServer:
    """A private vLLM server; stopping it ends all its processes.

    The server is also stopped when this process ends for any reason.

    Args:
        model: A Hugging Face model directory.
        python: Interpreter of the environment in which vLLM is installed.
        log: File for the server's output.
        arguments: Further command-line arguments.
        environment: Environment variables in addition to this process's.
        start_timeout_s: Time limit for starting, in seconds.

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
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def is_started(self) -> bool:
        """True between `start` and `stop`."""
        return self._process is not None

    def start(self) -> None:
        """Start the server and wait until it responds.

        Raises:
            EngineError: `engine_start`: the server exits or does not respond in time; the hint
                includes the end of its log.
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
        self._watch = Watch()
        self._watch.add(self._process.pid)
        deadline = time.monotonic() + self._start_timeout_s
        while not self._answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                finding = f"vLLM did not start within {self._start_timeout_s:g} s"
                if code is not None:
                    finding = f"vLLM ended with exit status {code}"
                hint = "read the end of its log: " + " | ".join(self._last_lines(5))
                raise EngineError("engine_start", str(self.log), finding, hint=hint)
            time.sleep(0.2)

    def stop(self, *, kill: bool = False) -> None:
        """Stop the server and all its processes; `kill` simulates a crash with SIGKILL."""
        if self._process is None:
            return
        signal_group(self._process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._watch is not None:
            self._watch.remove(self._process.pid)
            self._watch.close()
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
