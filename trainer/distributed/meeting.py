"""Processes of a run meet before they read anything, compare what they have, and send what is missing.

They meet in the store of their launcher (`torchrun`, `accelerate launch`, `--num-processes`), before
there is a process group: whatever fails in one of them, or differs, is one error in all of them. With
a single process, nothing is exchanged. Later, `on_this_machine` sends files to machines that do not
have them, and `once_here` shares the tables that one process of a machine makes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from schemas.errors import ConfigError, InputError, RolloutError, decode, encode
from trainer.distributed.liveness import watch
from trainer.distributed.processes import (
    STARTER,
    STORE,
    agreed,
    as_rollout_error,
    gather_bytes,
    is_first_here,
    is_main,
    raise_in_all,
)

if TYPE_CHECKING:
    import polars as pl
    from accelerate import Accelerator
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
ARRIVAL = timedelta(seconds=40)
"""Maximum time between the first and the last process to arrive; a failed one may never arrive."""
PATIENCE = timedelta(hours=2)
"""Maximum time that processes wait for each other afterwards, such as for a large checkpoint."""
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SIOCGIFADDR = 0x8915
_READ_S = 5
_CHUNK_BYTES = 64 << 20


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
    return _meeting().hold(work, facts, patience)[0]


def from_main(work: Callable[[], str]) -> str:
    """Return the text that `work` returns in the main process, in every process; see `together`."""
    if _num_launched() == 1:
        return work()
    meeting = _meeting()
    works, tells = (work, lambda text: {"text": text}) if is_main() else (str, lambda _: {})
    return str(meeting.hold(works, tells, PATIENCE)[1]["text"])


def machines() -> list[str]:
    """Return the machine of each process, by rank, after the processes have met."""
    return _meeting().machines if _num_launched() > 1 else [_machine()]


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
    needed = [] if STORE in os.environ else ["MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"]
    needed = ["WORLD_SIZE", "RANK", *needed]
    missing = [name for name in needed if name not in os.environ]
    if is_several and missing:
        several = ", ".join(f"{name} is {size}" for name, size in sizes.items() if size != "1")
        text = (
            f"{several or 'MASTER_ADDR is set'} without {', '.join(missing)}: the processes would"
        )
        text += " not find each other"
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
        from torch import distributed
        from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
        from torch.distributed import DistNetworkError, DistStoreError
        from torch.distributed.distributed_c10d import _get_default_store

        if file := os.environ.get(STORE):
            if os.getppid() != int(os.environ[STARTER]):
                # The command was killed after it started this process, but before it could record
                # that this process must end with it.
                raise InputError(
                    "process_lost", "--num-processes", "the `rollouts` command was killed"
                )
            return FileStore(file, self.size)
        if distributed.is_initialized():  # by the user's program, or by Ray Train
            return PrefixStore("rollouts", _get_default_store())
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
        self, work: Callable[[], T], facts: Callable[[T], Mapping[str, Any]], patience: timedelta
    ) -> tuple[T, Any]:
        """Return the result of `work`, and the facts of the main process; see `together`."""
        self._stage += 1
        message: dict[str, Any] = {"machine": _machine()}
        try:
            result = work()
            message["facts"] = dict(facts(result))
        except (RolloutError, OSError) as error:
            message["error"] = encode(as_rollout_error(error))
        except BaseException as error:  # a bug, or a signal: nothing to wait for
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            message["error"] = encode(InputError("process_lost", self._here, reason))
            self._exchange(message, timedelta(milliseconds=1))
            raise
        answer = self._exchange(message, patience)
        if answer is None:
            finding, hint = "the main process has ended or does not respond", "look for its error"
            raise InputError("process_lost", self._here, finding, hint=hint)
        self.machines = answer["machines"]
        if answer["error"]:
            raise decode(answer["error"])
        return result, answer["facts"]

    def _exchange(self, message: Mapping[str, Any], patience: timedelta) -> dict[str, Any] | None:
        """Send this process's message, and return the main process's answer; None: it is lost."""
        from torch.distributed import DistError

        key, grace = f"{self._stage}/answer", timedelta(seconds=_READ_S)
        try:
            self.store.set(f"{self._stage}/{self.rank}", json.dumps(message))
            if self.rank == 0:
                self.store.set(key, json.dumps(self._answer(patience)))
            self.store.wait([key], patience + grace)
            answer: dict[str, Any] = json.loads(self.store.get(key))
        except DistError:
            return None
        if answer["error"]:
            # The store of the main process must not end before the others have read its answer.
            self.store.set(f"left/{self.rank}", "")
            with suppress(DistError):  # a process may never have arrived
                if self.rank == 0:
                    self.store.wait([f"left/{rank}" for rank in range(self.size)], grace)
        return answer

    def _answer(self, patience: timedelta) -> dict[str, Any]:
        """Return the machines of the processes, and the first error or difference."""
        from torch.distributed import DistError

        ends_s, messages = time.monotonic() + patience.total_seconds(), list[dict[str, Any]]()
        for rank in range(self.size):
            try:
                left_s = max(0.001, ends_s - time.monotonic())
                self.store.wait([f"{self._stage}/{rank}"], timedelta(seconds=left_s))
                messages.append(json.loads(self.store.get(f"{self._stage}/{rank}")))
            except DistError:
                where = self.places[rank] if len(self.machines) > 1 else f"rank {rank}"
                finding = f"the process has not arrived within {patience.total_seconds():.0f} s"
                hint = "look for its own error, and start all processes at the same time"
                lost = InputError("process_lost", where, finding, hint=hint)
                messages.append({"machine": "", "error": encode(lost)})
        self.machines = [one["machine"] for one in messages]
        error = _failure(messages, self.places) or _difference(messages, self.places)
        facts = messages[0].get("facts")
        return {"machines": self.machines, "facts": facts, "error": error and encode(error)}


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
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(address)  # sends nothing
            return str(route.getsockname()[0])
    except OSError:
        return "no address"


def _interface(address: str) -> str | None:
    """Return the name of the network interface with an address: gloo would use the host name's."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@contextmanager
def on_this_machine(accelerator: Accelerator, path: Path | None) -> Iterator[Path | None]:
    """Yield a directory of the main process, or a temporary copy where it does not exist.

    All processes call this together. Where the path exists, it must be the same directory.

    Args:
        accelerator: Connects the processes of the run.
        path: The directory, which other processes need not know; None in the main process: yield
            None.

    Raises:
        InputError: `file`: a machine cannot store the copy.
    """
    if accelerator.num_processes == 1:
        yield path
        return
    name, nonce = json.loads(
        from_main(lambda: json.dumps([str(path) if path else "", secrets.token_hex(8)]))
    )
    if not name:
        yield None
        return
    here = path or Path(name)
    is_missing = not here.exists()
    if b"1" not in gather_bytes(accelerator, b"1" if is_missing else b"0"):
        yield here
        return
    copies = _folder(nonce, accelerator.process_index)
    is_writer = is_missing and is_first_here()
    try:
        _send(accelerator, here, copies / here.name if is_writer else None)
        yield copies / here.name if is_missing else here
        agreed(accelerator, lambda: None)  # the other processes of this machine read the copy
    finally:
        if is_writer:
            shutil.rmtree(copies, ignore_errors=True)


def once_here(make: Callable[[], Sequence[pl.DataFrame]], rank: int) -> list[pl.DataFrame]:
    """Return tables that the first process of each machine makes, and the others there copy.

    All processes call this together, after they have met.

    Raises:
        RolloutError: `make` raised it in any process, or a machine cannot store the tables.
    """
    if len(machines()) == len(set(machines())):
        return list(make())
    import polars as pl

    tables = list[pl.DataFrame]()
    folder = _folder(from_main(lambda: secrets.token_hex(8)), rank)

    def write() -> None:
        if is_first_here():
            tables.extend(make())
            folder.mkdir(mode=0o700)
            for number, table in enumerate(tables):
                table.write_ipc(folder / f"{number:02}.arrow", compression="uncompressed")

    try:
        together(write)
        paths = sorted(folder.glob("*.arrow"))
        return together(lambda: tables or [pl.read_ipc(path) for path in paths])
    finally:
        if is_first_here():
            shutil.rmtree(folder, ignore_errors=True)


def _folder(nonce: str, rank: int) -> Path:
    """Return a temporary directory of a process's machine; machines may share where those are."""
    number = machines().index(machines()[rank])
    return Path(tempfile.gettempdir()) / f"rollouts-{nonce}-{number}"


def _send(accelerator: Accelerator, source: Path, copy: Path | None) -> None:
    """Send the files below `source` in the main process to each process with a `copy` to write."""
    import torch
    from torch import distributed

    def sizes() -> str:
        files = [file for file in sorted(source.rglob("*")) if file.is_file()]
        return json.dumps({str(f.relative_to(source)): f.stat().st_size for f in files})

    failures = list[OSError]()
    for name, size in json.loads(from_main(sizes)).items():
        reading = (source / name).open("rb") if accelerator.is_main_process else None
        for start in range(0, max(size, 1), _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
            if reading:
                reading.readinto(chunk.numpy())
            if len(chunk):
                distributed.broadcast(chunk, 0)
            if copy and not failures:
                try:
                    (copy / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    with (copy / name).open("ab") as writing:
                        writing.write(chunk.numpy())
                except OSError as error:  # the other processes are still receiving
                    failures.append(error)
        if reading:
            reading.close()
    raise_in_all(accelerator, *failures)
