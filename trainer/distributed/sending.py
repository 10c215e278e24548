"""Send files to machines that do not have them, and tables to the processes of a machine."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import torch
from accelerate import Accelerator
from torch import distributed

from trainer.distributed.meeting import from_main, machines, together
from trainer.distributed.processes import agreed, gather_bytes, is_first_here

_CHUNK_BYTES = 64 << 20


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

    def sizes() -> str:
        files = [file for file in sorted(source.rglob("*")) if file.is_file()]
        return json.dumps({str(f.relative_to(source)): f.stat().st_size for f in files})

    failure: OSError | None = None
    for name, size in json.loads(from_main(sizes)).items():
        reading = (source / name).open("rb") if accelerator.is_main_process else None
        for start in range(0, max(size, 1), _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
            if reading:
                reading.readinto(chunk.numpy())
            if len(chunk):
                distributed.broadcast(chunk, 0)
            if copy and not failure:
                try:
                    (copy / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    with (copy / name).open("ab") as writing:
                        writing.write(chunk.numpy())
                except OSError as error:  # the other processes are still receiving
                    failure = error
        if reading:
            reading.close()
    agreed(accelerator, lambda: _raise(failure))


def _raise(failure: OSError | None) -> None:
    if failure:
        raise failure
