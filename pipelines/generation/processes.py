"""Processes that end with this one, for whatever reason: groups of them, and a private vLLM server."""

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


_WATCH = """
import os, shutil, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
for folder in sys.argv[1:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


class Watch:
    """A small process that kills process groups once this process has ended.

    After SIGKILL, this process cannot stop its children itself; but whenever it ends, the operating
    system closes the pipe that the watch reads.

    Args:
        folder: A folder to remove when the groups are killed.

    Attributes:
        folder: The folder to remove.

    Example:
        with Watch() as watch:
            process = subprocess.Popen(command, start_new_session=True)
            watch.add(process.pid)
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        folders = [] if folder is None else [folder]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WATCH, *folders],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, group: int) -> None:
        """Register a process group to be killed when this process ends."""
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group that has ended."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Kill all remaining groups, remove the folder, and end the watch."""
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group; does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
