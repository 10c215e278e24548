"""Notice that another machine of a run has ended, or does not respond any more.

A process that waits for another one cannot tell whether that one is busy, for example with a large
checkpoint. So every process keeps a connection to the main one, on which nothing is sent: the
operating systems check it, also while the processes themselves are busy.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rollout_io.cli.output import show_error
from schemas.errors import InputError, decode, encode

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SILENCE_S = 30
"""Time after which a machine that does not respond counts as lost."""
_CHECK_S = 5
NOTICE_S = 5.0
"""Time that the main thread has to end the process with an error of its own."""
_BEGUN, _DONE = b"begun\n", b"done\n"
_watch: _Watch | None = None


@contextmanager
def watched() -> Iterator[None]:
    """End this process if, during the `with` block, a process on another machine is lost."""
    if _watch:
        _watch.enter()
    try:
        yield
    except BaseException:
        if _watch:
            _watch.is_over = True
        raise
    if _watch:
        _watch.leave()


def lost_error(wait_s: float = 2.0) -> InputError | None:
    """Return the error that names a lost process, if it becomes known within `wait_s`."""
    if _watch is None or not _watch.has_lost.wait(wait_s):
        return None
    return _watch.error


def watch(store: Store, address: str, places: list[str], rank: int) -> None:
    """Connect to the other machines of a run; all processes must call this together.

    Args:
        store: The store in which the processes meet.
        address: This machine's address.
        places: Name of each process, by rank.
        rank: Number of this process.
    """
    global _watch
    _watch = _Watch(places, rank)
    if rank:
        host, port, token = json.loads(store.get("liveness"))
        connection = socket.create_connection((host, port), SILENCE_S)
        connection.sendall(f"{rank} {token}\n".encode())
        _watch.follow(connection, 0)
    else:
        # Whoever can read the store is of this run; others on the network cannot pretend to be a process.
        token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family, backlog=len(places))
        store.set("liveness", json.dumps([address, server.getsockname()[1], token]))
        threading.Thread(target=_watch.accept, args=(server, token), daemon=True).start()


class _Watch:
    """The connections of this process, each with a thread that waits for its end."""

    def __init__(self, places: list[str], rank: int) -> None:
        self._places, self._rank = places, rank
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self.is_over = False
        self.has_lost = threading.Event()
        self.error: InputError | None = None

    def accept(self, server: socket.socket, token: str) -> None:
        """Accept the connections of all other processes, in the main one."""
        with server:
            while len(self._connections) < len(self._places) - 1:
                connection = server.accept()[0]
                connection.settimeout(SILENCE_S)
                with suppress(OSError, ValueError):
                    rank, proof = connection.makefile().readline().split()
                    if secrets.compare_digest(proof, token):
                        self.follow(connection, int(rank))
                        continue
                connection.close()

    def follow(self, connection: socket.socket, rank: int) -> None:
        """Wait for the end of the connection to a process, in a thread."""
        # Between the beginning and the end of a run nothing is sent. The kernel asks after 5 s of silence,
        # and closes the connection if the other machine does not answer for 30 s.
        connection.settimeout(None)
        options = {"TCP_KEEPIDLE": _CHECK_S, "TCP_KEEPINTVL": _CHECK_S}
        options |= {"TCP_KEEPCNT": SILENCE_S // _CHECK_S - 1, "TCP_USER_TIMEOUT": SILENCE_S * 1000}
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connections.append(connection)
        threading.Thread(target=self._wait, args=(connection, rank), daemon=True).start()

    def _wait(self, connection: socket.socket, rank: int) -> None:
        """Wait until a process is done or lost; the main one tells the others which is lost."""
        finding, line, is_done = "the process has ended", b"", False
        try:
            with connection.makefile("rb") as lines:
                while (line := lines.readline()) in (_BEGUN, _DONE):
                    is_done = line == _DONE
        except OSError as silence:
            finding = f"the machine does not respond ({silence.strerror or silence})"
        if is_done or self.is_over:
            return
        hint = "look for its own error, and for the machine; continue with --resume RUN"
        error = InputError("process_lost", self._places[rank], finding, hint=hint)
        if line:
            sent = decode(json.loads(line))
            assert isinstance(sent, InputError)
            error = sent
        self._end(error)

    def _end(self, error: InputError) -> None:
        """End this process, which may wait for the lost one, unless it ends by itself."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self.has_lost.set()
        if self._rank == 0:
            self._send(json.dumps(encode(error)).encode() + b"\n")
        # The main thread may be in a collective that notices by itself, and then has the better error.
        time.sleep(NOTICE_S)
        if not self.is_over:
            show_error(error)
            # A collective that waits for the lost process cannot be interrupted by an exception.
            os._exit(1)

    def enter(self) -> None:
        """Tell the other processes that this one has begun another run."""
        self.is_over = False
        self._send(_BEGUN)

    def leave(self) -> None:
        """Tell the other processes that this one has done its part of the run."""
        self.is_over = True
        self._send(_DONE)

    def _send(self, line: bytes) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send(line)
