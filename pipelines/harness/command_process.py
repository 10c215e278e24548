"""Run a command with its output in files, and stop all its processes at the end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipelines.generation.process_groups import Watch, signal_group
from pipelines.generation.texts import encodable
from schemas.errors import InputError

_STOP_S = 5.0
_TAIL_BYTES, _TAIL_CHARACTERS = 64 << 10, 300


class Output(NamedTuple):
    """Output of a command.

    Attributes:
        last_line: Last line of standard output that is not blank, or "".
        tail: End of standard error on one line, or of standard output if standard error is empty.
    """

    last_line: str
    tail: str


async def run_command(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    folder: Path,
    timeout_s: float,
    watch: Watch,
    where: str,
) -> Output:
    """Run a command to completion, without a shell, in the current directory.

    Its processes form a group. All of them have ended when this function returns or raises, and
    they are killed when this process ends for any reason. A process that leaves the group
    (`setsid`, a daemon) is not stopped.

    Args:
        words: Program and arguments.
        environment: Environment variables in addition to this process's.
        folder: Folder for its output.
        timeout_s: Time limit in seconds; when it expires, SIGTERM is sent, then SIGKILL after a
            grace period.
        watch: Kills the command's processes if this process is killed.
        where: Location shown in error messages.

    Raises:
        InputError: `harness_start`: the program cannot be started; `harness_timeout`: the time
            limit expires; `harness_exit`: the exit status is not 0.
    """
    paths = [folder / "stdout", folder / "stderr"]
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or error).lower()
            is_long = getattr(error, "errno", None) == errno.E2BIG
            hint = "pass long prompts with {task_file}" if is_long else "check that it is on PATH"
            got = f"cannot start {words[0]!r}: {reason}"
            raise InputError("harness_start", where, got, hint=hint) from None
    watch.add(process.pid)
    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        got = f"the harness did not end within {timeout_s:g} s{_and(_output(*paths).tail)}"
        raise InputError("harness_timeout", where, got) from None
    finally:
        await _end(process)
        watch.remove(process.pid)
    output = _output(*paths)
    if code != 0:
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        got = f"the harness ended with {how}{_and(output.tail)}"
        raise InputError("harness_exit", where, got)
    return output


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop every process of the group: SIGTERM if its leader still runs, then SIGKILL."""
    try:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_S)
    finally:
        signal_group(process.pid, signal.SIGKILL)
        await process.wait()


def _output(out: Path, err: Path) -> Output:
    lines = [line for line in _end_of(out).splitlines() if line.strip()]
    said = " ".join(_end_of(err).split()) or " ".join(" ".join(lines).split())
    return Output(lines[-1].strip() if lines else "", said[-_TAIL_CHARACTERS:])


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        return encodable(file.read().decode(errors="replace"))


def _and(tail: str) -> str:
    return f": {tail}" if tail else ""
