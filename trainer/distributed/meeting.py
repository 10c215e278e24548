"""The processes of a run meet before they read anything, and compare what each of them has.

They meet in the store of their launcher (`torchrun`, `accelerate launch`, `--num-processes`), before
there is a process group: whatever fails in one of them, or differs, is one error in all of them. With
a single process, nothing is exchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from schemas.errors import ConfigError, InputError, RolloutError, decode, encode
from trainer.distributed.liveness import watch
from trainer.distributed.processes import STARTER, STORE, as_rollout_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
ARRIVAL = timedelta(seconds=40)
"""Maximum time between the first and the last process to arrive; a failed one may never arrive."""
PATIENCE = timedelta(hours=2)
"""Maximum time that processes wait for each other afterwards, such as for a large checkpoint."""
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_PACKAGES = ("schemas", "rollout_io", "pipelines", "trainer")
_SIOCGIFADDR = 0x8915
_READ_S = 5


def together(
    work: Callable[[], T],
    facts: Callable[[T], Mapping[str, Any]] = lambda _: {},
    *,
    patience: timedelta = PATIENCE,
) -> T:
    """Run work in every process, and compare what it found; an error or a difference ends all.

    Args:
        work: Reads and checks something, without communicating.
        facts: Returns values for JSON, by name, which must be the same in all processes that have
            them.
        patience: Maximum time for the other processes to do the work.

    Returns:
        The local result of `work`.

    Raises:
        RolloutError: `work` raised it in any process, the first by rank; `machines_differ`: a fact
            differs from the main process's; `process_lost`: a process has not arrived. If not all
            processes have the error, it names the machine.
    """
    if _num_launched() == 1:
        return work()
    return _meeting().hold(work, facts, patience)


def from_main(work: Callable[[], str]) -> str:
    """Return the text that `work` returns in the main process, in every process; see `together`."""
    if _num_launched() == 1:
        return work()
    meeting = _meeting()
    text = together(lambda: work() if meeting.rank == 0 else "")
    return meeting.sent(text)


def machines() -> list[str]:
    """Return the machine of each process, by rank, after the processes have met."""
    return _meeting().machines if _num_launched() > 1 else [_machine()]


def source_digest() -> str:
    """Hash the source code of the product, which may have been edited on one machine."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def join_group() -> None:
    """Create the process group of processes that have met, and watch over other machines."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _set_pg_timeout

    if _num_launched() == 1 or distributed.is_initialized():
        return
    meeting = _meeting()
    if len(set(meeting.machines)) > 1:
        watch(meeting.store, _address(), meeting.places, meeting.rank)
    on_gpus = torch.accelerator.is_available()
    distributed.init_process_group(
        None if on_gpus else "gloo",
        store=PrefixStore("group", meeting.store),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=ARRIVAL,  # a firewall may be in the way
    )
    _set_pg_timeout(PATIENCE)


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_strangers() -> None:
    """Check that this process, if it is one of several, can find the others.

    Raises:
        ConfigError: `launch`: each of the started processes would train a whole run, or wait.
    """
    sizes = {name: os.environ.get(name) or "1" for name in ("WORLD_SIZE", *_SIZES)}
    is_several = any(size != "1" for size in sizes.values()) or "MASTER_ADDR" in os.environ
    needed = [] if STORE in os.environ else ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in ("WORLD_SIZE", "RANK", *needed) if name not in os.environ]
    if is_several and missing:
        several = ", ".join(f"{name} is {size}" for name, size in sizes.items() if size != "1")
        text = f"{several or 'MASTER_ADDR is set'}, but {' and '.join(missing)} are not set: the"
        text += " started processes would not find each other"
        hint = "start them with torchrun, or with `accelerate launch --multi_gpu`, also on CPUs"
        raise ConfigError("launch", missing[0], "not set", hint=hint, message=text)


@cache
def _meeting() -> _Meeting:
    return _Meeting()


class _Meeting:
    """The store in which the processes meet.

    Each stage has a message of every process, and the answer of the main process.
    """

    def __init__(self) -> None:
        refuse_strangers()
        self.rank, self.size = int(os.environ["RANK"]), _num_launched()
        self.machines = [_machine()]
        self._stage = 0
        self.store = self._open()

    def _open(self) -> Store:
        from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
        from torch.distributed import DistNetworkError, DistStoreError

        if file := os.environ.get(STORE):
            if os.getppid() != int(os.environ[STARTER]):
                # The command was killed after it started this process, but before it could record
                # that this process must end with it.
                raise InputError(
                    "process_lost", "--num-processes", "the `rollouts` command was killed"
                )
            return FileStore(file, self.size)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_server = self.rank == 0 and not is_agents
        try:
            store = TCPStore(
                host, port, self.size, is_server, timeout=ARRIVAL, wait_for_workers=False
            )
        except (DistNetworkError, DistStoreError) as error:
            reason = str(error).partition("\n")[0]
            finding = f"cannot reach the main process at {host}:{port} ({reason})"
            hint = "look for its own error; MASTER_ADDR must be its address on this network"
            raise InputError("process_lost", self._here, finding, hint=hint) from error
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface(_address())):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        return PrefixStore(f"rollouts/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    @property
    def _here(self) -> str:
        return f"rank {self.rank} on {_machine()}"

    @property
    def places(self) -> list[str]:
        """Name of each process, by rank, after the first stage."""
        return [f"rank {rank} on {machine}" for rank, machine in enumerate(self.machines)]

    def hold(
        self,
        work: Callable[[], T],
        facts: Callable[[T], Mapping[str, Any]],
        patience: timedelta,
    ) -> T:
        """See `together`."""
        self._stage += 1
        bug: BaseException | None = None
        message: dict[str, Any] = {"machine": _machine()}
        try:
            result = work()
            message["facts"] = dict(facts(result))
        except (RolloutError, OSError) as error:
            message["error"] = encode(as_rollout_error(error))
        except BaseException as error:
            bug = error
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            message["error"] = encode(InputError("process_lost", self._here, reason))
        answer = self._answered(message, patience)
        if bug is not None:
            raise bug
        self.machines = answer["machines"]
        if answer["error"]:
            raise decode(answer["error"])
        return result

    def sent(self, text: str) -> str:
        """Send a text from the main process to all."""
        key = f"{self._stage}/text"
        if self.rank == 0:
            self.store.set(key, text)
            return text
        return str(self.store.get(key).decode())

    def _answered(self, message: Mapping[str, Any], patience: timedelta) -> dict[str, Any]:
        """Send this process's message to the main one, and return the main one's answer."""
        from torch.distributed import DistNetworkError, DistStoreError

        key = f"{self._stage}/answer"
        try:
            self.store.set(f"{self._stage}/{self.rank}", json.dumps(message))
            if self.rank == 0:
                self.store.set(key, json.dumps(self._answer(patience)))
            else:
                self.store.wait([key], patience + timedelta(seconds=_READ_S))
            answer: dict[str, Any] = json.loads(self.store.get(key))
            if answer["error"]:
                self._leave()
        except (DistNetworkError, DistStoreError) as error:
            finding = "the main process has ended or does not respond"
            reason = str(error).partition("\n")[0]
            hint = "look for its own error"
            raise InputError(
                "process_lost", self._here, f"{finding} ({reason})", hint=hint
            ) from error
        return answer

    def _leave(self) -> None:
        """Keep the store of the main process open until the others have read its answer."""
        from torch.distributed import DistError

        if self.rank == 0:
            keys = [f"left/{rank}" for rank in range(1, self.size)]
            try:
                self.store.wait(keys, timedelta(seconds=_READ_S))
            except DistError:
                return  # a process that never arrived
        else:
            self.store.set(f"left/{self.rank}", "")

    def _answer(self, patience: timedelta) -> dict[str, Any]:
        """Return the machines of the processes, and the first error or difference."""
        from torch.distributed import DistError

        ends_s, messages = time.monotonic() + patience.total_seconds(), list[dict[str, Any]]()
        for rank in range(self.size):
            key = f"{self._stage}/{rank}"
            try:
                left_s = max(0.001, ends_s - time.monotonic())
                self.store.wait([key], timedelta(seconds=left_s))
            except DistError:
                where = self.places[rank] if len(self.machines) > 1 else f"rank {rank}"
                finding = f"the process has not arrived within {patience.total_seconds():.0f} s"
                hint = "look for its own error, and start all processes at the same time"
                lost = encode(InputError("process_lost", where, finding, hint=hint))
                messages.append({"machine": "", "error": lost})
            else:
                messages.append(json.loads(self.store.get(key)))
        self.machines = [one["machine"] for one in messages]
        error = _failure(messages, self.places) or _difference(messages, self.places)
        return {"machines": self.machines, "error": error and encode(error)}


def _failure(messages: list[dict[str, Any]], places: list[str]) -> RolloutError | None:
    """Return the first error; it names the machine, unless all processes have the same."""
    encoded = next((one["error"] for one in messages if "error" in one), None)
    if encoded is None:
        return None
    error = decode(encoded)
    failed = [one.get("error") == encoded for one in messages]
    if not all(failed) and error.rule != "process_lost":
        error.message = f"{places[failed.index(True)]}: {error.sentence}"
    return error


def _difference(messages: list[dict[str, Any]], places: list[str]) -> InputError | None:
    """Return the first fact in which a process differs from the main one."""
    expected = messages[0]["facts"]
    for place, message in zip(places, messages, strict=True):
        facts = message["facts"]
        names = [name for name in facts if name in expected and facts[name] != expected[name]]
        if names:
            name, *others = names
            also = f" (also different: {', '.join(others)})" if others else ""
            finding, expected_value = (json.dumps(one[name]) for one in (facts, expected))
            text = f"{place}: {name} is {finding}, but {expected_value} on {places[0]}{also}"
            hint = "give all machines the same command, versions and data"
            return InputError("machines_differ", place, finding, expected_value, hint, message=text)
    return None


@cache
def _machine() -> str:
    """Return this machine's host name, with its address on the way to the main process."""
    return f"{socket.gethostname()} ({_address()})"


@cache
def _address() -> str:
    """Return this machine's address as the main process sees it."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((host, 9))  # sends nothing
        except OSError:
            return "no IPv4 address"
        return str(route.getsockname()[0])


def _interface(address: str) -> str | None:
    """Return the name of the network interface with an address: gloo would use the host name's."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
