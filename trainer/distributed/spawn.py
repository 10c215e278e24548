"""Start the processes of `--num-processes` on this machine, and end them together.

Does not import torch: the process that starts the others only waits for them. torch.distributed.run
would take 2.3 s of CPU time and 140 MB more to start, needs a port, and passes a signal to all
processes, not to the main one alone, which saves the work of all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pipelines.generation.processes import Watch, signal_group
from schemas.errors import InputError
from trainer.distributed.processes import STARTER, STORE, handling

LOST = 3
"""Exit status of a process that ends because another one has ended."""
INTERVAL_S = 0.05
NOTICE_S = 5.0
"""Time that the main process has to notice that another process has ended, before it gets SIGTERM.
It notices at once, except while it samples."""
STOP_S = 60.0
"""Time that the main process has to save finished work after SIGTERM."""
END_S = 10.0
"""Time that the other processes have to end after the main process has ended."""
INTERRUPTED_S = 2.0
"""The same after a signal, for which the main process has already saved everything."""


def start_processes(num_processes: int, arguments: Sequence[str], hint: str) -> int:
    """Run a command of `rollouts` in several processes on this machine, and wait for them.

    The processes connect through a file, so that no port is needed. Signals to this process are
    passed to the main one. All processes end if one of them ends, or if this process is killed.

    Args:
        num_processes: Number of processes, at least 2.
        arguments: Arguments of `rollouts`.
        hint: How to continue the run after a process was lost.

    Returns:
        Exit status of the main process.

    Raises:
        InputError: `process_lost`: a process was killed, or one other than the main one failed.
    """
    with (
        Watch(tempfile.mkdtemp(prefix="rollouts-")) as watch,
        _Processes(num_processes, arguments, watch) as processes,
        # The main process responds to them.
        handling(lambda number, _: processes.pass_on(number), (signal.SIGINT, signal.SIGTERM)),
    ):
        processes.wait()
    return processes.status(hint)


class _Processes:
    """The processes, by rank. They are killed at the end of the `with` block."""

    def __init__(self, num_processes: int, arguments: Sequence[str], watch: Watch) -> None:
        self._size, self._arguments, self._watch = num_processes, arguments, watch
        self._popens: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}  # by rank, in the order in which the processes ended
        self._killed = set[int]()
        self._signal: int | None = None

    def __enter__(self) -> Self:
        assert self._watch.folder is not None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        shared = {
            STORE: str(Path(self._watch.folder) / "store"),
            STARTER: str(os.getpid()),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
        }
        usual = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // self._size))}
        if sys.platform == "linux":
            usual["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in range(self._size):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollout_io", *self._arguments],
                stdin=subprocess.DEVNULL,
                env=usual | os.environ | shared | ranks,
                start_new_session=True,
            )
            self._watch.add(process.pid)
            self._popens.append(process)
        if self._signal is not None:
            self._popens[0].send_signal(self._signal)
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self._popens):
            self._kill(rank)
            process.wait()
            self._watch.remove(process.pid)

    def pass_on(self, number: int) -> None:
        """Send a signal to the main process."""
        self._signal = number
        if self._popens:
            self._popens[0].send_signal(number)

    def wait(self) -> None:
        """Wait until all processes have ended; once one has ended, the others get limited time."""
        ends_s: float | None = None
        told_s: float | None = None
        while len(self._codes) < self._size:
            for rank, process in enumerate(self._popens):
                code = process.poll()
                if code is not None and rank not in self._codes:
                    self._codes[rank] = code
            now = time.monotonic()
            if self._codes and ends_s is None:
                ends_s, told_s = now + NOTICE_S + STOP_S, now + NOTICE_S
            if 0 in self._codes and ends_s is not None:
                left_s = END_S if self._signal is None else INTERRUPTED_S
                ends_s, told_s = min(ends_s, now + left_s), None
            if told_s is not None and now > told_s:
                told_s = None
                self._popens[0].send_signal(signal.SIGTERM)
            if ends_s is not None and now > ends_s:
                for rank in range(self._size):
                    self._kill(rank)
            time.sleep(INTERVAL_S)

    def status(self, hint: str) -> int:
        """Return the main process's exit status, or raise `process_lost`: see `start_processes`."""
        main = self._codes[0]
        if main == 0 or self._signal is not None:
            return 128 - main if main < 0 else main
        causes = {
            r: c for r, c in self._codes.items() if c not in (0, LOST) and r not in self._killed
        }
        cause = 0 if 0 in causes else next(iter(causes), 0)  # an error may occur in all processes
        rank = next((r for r, code in causes.items() if code < 0), cause)
        code = self._codes[rank]
        if rank == 0 and code not in (LOST, *range(-64, 0)):
            return code  # the main process has printed its error
        finding = f"the process ended with exit status {code}; the others were stopped"
        if code < 0:
            name = signal.Signals(-code).name
            finding = f"the process was killed by {name}; the others were stopped"
            if name == "SIGKILL":
                hint = f"check the free memory, then {hint}"
        where = f"rank {rank} (of {self._size} processes)"
        raise InputError("process_lost", where, finding, hint=hint)

    def _kill(self, rank: int) -> None:
        process = self._popens[rank]
        if process.poll() is None:
            self._killed.add(rank)
            signal_group(process.pid, signal.SIGKILL)
