"""The directory of a run: absolute, written by one run at a time, on a disk or in an object store.

With an object store, the main process works in a local copy, and publishes each checkpoint. Nothing
else is shared: fresh machines resume from the store. An object store has no append and no rename of
directories, so a checkpoint is published file by file, and `checkpoints/latest`, which names it,
last. What a killed process had not published is lost, and trained again.
"""

from __future__ import annotations

import dataclasses
import errno
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from safetensors import SafetensorError

from rollout_io.dataset.locking import destination
from rollout_io.dataset.storage import Location
from schemas.errors import InputError
from trainer.distributed.meeting import from_main, together
from trainer.distributed.processes import is_main
from trainer.run.checkpoint import LATEST, PREFIX, latest_checkpoint
from trainer.run.messages import say

Result = TypeVar("Result")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def stays_in_place(run: Callable[..., Result]) -> Callable[..., Result]:
    """Make the directory of a run absolute while it runs, because user code may call `os.chdir`.

    A run in an object store runs in a local copy: see `trainer.run.directory`.

    Args:
        run: Function of a configuration with a section `[run]`, whose result has `out` and `checkpoint`.

    Returns:
        The function; its result has the paths as given.
    """

    @wraps(run)
    def with_absolute_paths(config: Any, **settings: Any) -> Result:
        given_out = config.run.out
        place: AbstractContextManager[Path] = nullcontext(Path(given_out).absolute())
        if "://" in given_out:  # an object store
            place = local_copy(given_out, resume=settings.get("resume", False))
        with place as out:
            section = dataclasses.replace(config.run, out=str(out))
            result: Any = run(dataclasses.replace(config, run=section), **settings)
        checkpoint = result.checkpoint.replace(str(out), given_out.rstrip("/"), 1)
        moved: Result = dataclasses.replace(result, out=given_out, checkpoint=checkpoint)
        return moved

    return with_absolute_paths


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other processes from writing to the same directory, if its filesystem supports locks.

    Raises:
        InputError: `run_in_use`: another process is training in the directory, or writing to it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(destination(out))
        except InputError as error:
            if error.rule != "out_is_free":
                raise
            finding = "another process is training in this directory, or writing to it"
            hint = "wait for it to end, or stop it"
            raise InputError("run_in_use", str(out), finding, hint=hint) from None
        yield


@contextmanager
def stops_when_full(out: Path) -> Iterator[None]:
    """Turn a full disk into an error that names the checkpoint to resume from.

    Raises:
        InputError: `disk_full`: a file could not be written because the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _is_full(error):
            raise
        hint = f"free some disk space, then continue with --resume {shlex.quote(str(out))}"
        if latest := latest_checkpoint(out):
            hint += f" from {latest}"
        raise InputError("disk_full", str(out), f"cannot write: {error}", hint=hint) from error


def _is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"os error {number})" in str(error) for number in FULL)


_COPIED_BYTES = 8 << 20
_NEEDED = ("config.json", "metrics.jsonl", "starts.jsonl")
_STORES: dict[Path, _RunStore] = {}


@contextmanager
def local_copy(url: str, *, resume: bool) -> Iterator[Path]:
    """Yield a local directory for a run in a store, with what resuming needs in the main process.

    Its name is the same in all processes, like that of any run.

    Raises:
        InputError: `existing_run`: the store has a run that is not to be resumed; `remote_store`: it
            does not answer.
    """
    folder = Path(from_main(lambda: tempfile.mkdtemp(prefix="rollouts-run-")))
    store = _STORES[folder] = _RunStore(url, folder)
    try:
        together(lambda: store.begin(resume=resume) if is_main() else None)
        yield folder
    finally:
        del _STORES[folder]
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)


def published(out: Path) -> str | None:
    """Return the URL under which a local copy is published; None: it is no copy."""
    return _STORES[out].url if out in _STORES else None


def publish(out: Path, keep: int | None) -> None:
    """Publish a run's directory after a checkpoint, if it is the copy of one in a store."""
    if out in _STORES:
        _STORES[out].publish(keep)


class _RunStore:
    """Files of a run that are published under a URL, with their sizes and times."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url.rstrip("/"), folder
        self._location = Location.of(self.url)
        self._state = dict[str, tuple[int, int]]()

    def begin(self, *, resume: bool) -> None:
        """Check that there is no run, or fetch the latest checkpoint with its metrics."""
        fs, latest = self._location.fs, f"checkpoints/{LATEST}"
        names = [name for name in (*_NEEDED, latest) if fs.exists(self._location.join(name).path)]
        if not resume:
            if names:
                finding = f"the directory already contains a run ({names[0]})"
                hint = f"continue it with --resume {self.url}, or choose a different --out"
                raise InputError("existing_run", self.url, finding, hint=hint)
            return
        for name in names:
            self._fetch(name)
        if latest in names:
            step = (self._folder / latest).read_text(encoding="utf-8").strip()
            folder = self._location.join(f"checkpoints/{PurePosixPath(step).name}")
            for path in fs.find(folder.path):
                self._fetch(path.strip("/").removeprefix(f"{self._location.path.strip('/')}/"))
        self._state = self._files()

    def _fetch(self, name: str) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        there = self._location.join(name).path
        with self._location.fs.open(there, "rb") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _COPIED_BYTES)

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return size and time of the local files, by name; `latest` is the last."""
        files = dict[str, tuple[int, int]]()
        for path in sorted(self._folder.rglob("*"), key=lambda path: path.name == LATEST):
            name = path.relative_to(self._folder)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                status = path.stat()
                files[name.as_posix()] = status.st_size, status.st_mtime_ns
        return files

    def publish(self, keep: int | None) -> None:
        """Write what has changed since the last time, and delete all but the `keep` newest checkpoints."""
        files = self._files()
        for name, state in files.items():
            if self._state.get(name) != state:
                here, there = self._folder / name, self._location.join(name).path
                with here.open("rb") as source, self._location.fs.open(there, "wb") as target:
                    shutil.copyfileobj(source, target, _COPIED_BYTES)
        self._state = files
        if keep:
            self._discard(keep)
        say(f"published the run in {self.url}")

    def _discard(self, keep: int) -> None:
        folder = self._location.join("checkpoints")
        paths = (path.rstrip("/") for path in folder.fs.ls(folder.path, detail=False))
        steps = {PurePosixPath(path).name.removeprefix(PREFIX): path for path in paths}
        for step in sorted(filter(str.isdecimal, steps), key=int)[:-keep]:
            folder.fs.rm(steps[step], recursive=True)
