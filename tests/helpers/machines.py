"""Machines that share nothing but a network: each has namespaces of its own, and private directories.

A machine sees the host's files, except that its private directories are empty and its own. Nothing
is left when the machines are closed. `unavailable` says why a host does not allow this.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.conftest import ROOT
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset

SUBNET = "10.77.0"
PORT = "29555"
SETTINGS = [
    "--lr=3e-4",
    "--set=loss.tis_ratio_type=none",
    "--set=batch.groups_per_batch=2",
    "--set=batch.groups_per_mini_batch=1",
]
_HOLD = ["sh", "-c", "echo ready; exec sleep infinity"]


def _held(*command: str) -> subprocess.Popen[str]:
    """Start a process that holds namespaces open, and wait until it has them."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, *_HOLD], text=True, **pipes)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        assert process.stderr is not None
        raise OSError(process.stderr.read().strip() or f"{command} ended")
    return process


def _inside(pid: int, *command: str) -> list[str]:
    spaces = ["--user", "--net", "--mount", "--uts", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *spaces, f"--wd={Path.cwd()}", *command]


def _call(pid: int, *command: str) -> None:
    done = subprocess.run(_inside(pid, *command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Started:
    """A command with its processes, and what it prints to stdout and stderr."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `__exit__` closes it
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=self._file,
            start_new_session=True,
        )

    def output(self) -> str:
        return Path(f"/proc/self/fd/{self._file.fileno()}").read_text()

    def wait(self, timeout_s: float = 300) -> int:
        return self.process.wait(timeout_s)

    def processes(self) -> list[psutil.Process]:
        """The command's process and all that it started."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._file.close()


class Machine:
    """One machine; `name` is its host name, `address` its address."""

    def __init__(self, number: int, switch: int, private: Sequence[Path]) -> None:
        self.name, self.address = f"machine{number}", f"{SUBNET}.{number + 1}"
        self._switch, self._port = switch, f"port{number}"
        self._holder = _held(*_inside(switch, "unshare", "--net", "--mount", "--uts"))
        self.pid = self._holder.pid
        self.started: list[Started] = []
        _call(
            switch,
            "ip",
            "link",
            "add",
            self._port,
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            f"{self.pid}",
        )
        _call(switch, "ip", "link", "set", self._port, "master", "bridge", "up")
        _call(self.pid, "ip", "link", "set", "lo", "up")
        _call(self.pid, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        _call(self.pid, "ip", "link", "set", "eth0", "up")
        _call(self.pid, "hostname", self.name)
        for directory in private:
            directory.mkdir(parents=True, exist_ok=True)
            _call(self.pid, "mount", "-t", "tmpfs", "tmpfs", str(directory))

    def command(self, *words: str) -> list[str]:
        """The command by which this process runs another one on the machine."""
        return _inside(self.pid, *words)

    def path(self, path: Path) -> Path:
        """Where this process finds a file of the machine."""
        return Path(f"/proc/{self.pid}/root{path}")

    def start(self, *command: str, **environment: str) -> "Started":
        """Start a command on the machine."""
        usual = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.started.append(Started(_inside(self.pid, *command), usual | environment))
        return self.started[-1]

    def call(self, *command: str, **environment: str) -> str:
        """Run a command, and return its output."""
        started = self.start(*command, **environment)
        assert started.wait() == 0, started.output()
        return started.output()

    def cut(self) -> None:
        """Take the machine off the network, silently."""
        _call(self._switch, "ip", "link", "set", self._port, "down")

    def join(self) -> None:
        """Put the machine back on the network."""
        _call(self._switch, "ip", "link", "set", self._port, "up")

    def close(self) -> None:
        for started in self.started:
            started.__exit__()
        self._holder.kill()
        self._holder.communicate()


class Lab:
    """Machines, with what runs need on each, and a private directory each."""

    def __init__(self, folder: Path, opened: list[Machine]) -> None:
        self.folder, self.machines = folder, opened
        self.private = folder / "private"
        rows = group_rows(8, (1.0, 0.0, 0.5))
        self.dataset = write_dataset(folder / "ds", rows)
        self.model = save_tiny_model(folder / "model")

    def arguments(self, name: str) -> list[str]:
        """A run in the private directory of each machine."""
        return [self.dataset, f"--model={self.model}", f"--out={self.private / name}", *SETTINGS]

    def start(
        self,
        rank: int,
        *arguments: str,
        size: int = 2,
        each: int = 1,
        module: str = "rollout_io",
        **more: str,
    ) -> Started:
        """Start one of `size` processes, of which each machine has `each`, as a launcher does."""
        ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % each}
        numbers = {name: str(number) for name, number in (ranks | {"MASTER_PORT": PORT}).items()}
        numbers |= {"MASTER_ADDR": self.machines[0].address, "LOCAL_WORLD_SIZE": str(each)}
        command = [sys.executable, "-P", "-m", module, *arguments]
        return self.machines[rank // each].start(*command, **numbers | more)

    def train(self, *sides: list[str]) -> list[Started]:
        """Train to the end, with the arguments of each machine."""
        started = [self.start(rank, "train", *side) for rank, side in enumerate(sides)]
        for process in started:
            assert process.wait() == 0, process.output()
        return started

    def files(self, rank: int, name: str = "") -> list[str]:
        """Names of the files in a machine's private directory."""
        there = self.machines[rank].path(self.private / name)
        return sorted(str(path.relative_to(there)) for path in there.rglob("*"))


@contextmanager
def machines(number: int, *private: Path) -> Iterator[list[Machine]]:
    """Start machines on one network, whose directories `private` are empty and their own."""
    switch = _held("unshare", "--map-root-user", "--net", "--mount", "--uts")
    opened: list[Machine] = []
    try:
        _call(switch.pid, "ip", "link", "add", "bridge", "type", "bridge")
        _call(switch.pid, "ip", "link", "set", "bridge", "up")
        for i in range(number):
            opened.append(Machine(i, switch.pid, private))  # noqa: PERF401  # one may fail
        yield opened
    finally:
        for machine in opened:
            machine.close()
        switch.kill()
        switch.communicate()


@cache
def unavailable() -> str | None:
    """Why this host has no such machines; None: it has."""
    try:
        with machines(1, Path("/tmp")):
            return None
    except OSError as error:
        return f"namespaces are not allowed here: {error}"


@contextmanager
def laboratory(folder: Path, number: int) -> Iterator[Lab]:
    """Machines with what runs need on each; skip the test, saying so, where they are not allowed."""
    if reason := unavailable():
        pytest.skip(reason)
    with machines(number, folder / "private") as opened:
        yield Lab(folder, opened)
