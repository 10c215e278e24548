"""Command lines of harnesses: placeholders, redaction of secrets, and running them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pipelines.generation.processes import Watch, signal_group
from pipelines.generation.user_code import encodable
from pipelines.record.secrets import REDACTED, is_secret
from schemas.errors import ConfigError, InputError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_ASSIGNED = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
_SHELL = re.compile(r"(ba|da|z|k|fi)?sh|python[\d.]*")
_SCRIPT = re.compile(r"-[A-Za-z]*c")
_USER = re.compile(r"://([^/\s@]+)@")

OWN_FIELDS = (
    *("base_url", "api_key", "model", "task_file", "reward_file"),
    *("instance_id", "task_instance_id", "repetition_id", "prompt"),
)
"""Fields available to every command, in addition to the extras of its task."""

_NO_CODE = frozenset({"base_url", "api_key", "model", "task_file", "reward_file", "repetition_id"})
"""Fields whose values cannot be set by a task."""

_STOP_S = 5.0
_TAIL_BYTES, _TAIL_CHARACTERS = 64 << 10, 300


def is_function(harness: str) -> bool:
    """True if a harness is `module:function`, not a command line.

    Example:
        >>> is_function("my.trials:solve"), is_function("mini --base-url {base_url}")
        (True, False)
    """
    return _FUNCTION.fullmatch(harness) is not None


def words_of(command: str) -> list[str]:
    """Split a command line as a shell would, without expanding anything.

    Raises:
        ConfigError: `harness`: a quote is not closed or the command line is empty.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        finding = f"invalid command line: {str(error).lower()}"
        raise ConfigError("harness", "harness", finding) from None
    if not words:
        finding, expected = "an empty command line", "module:function or a command line"
        raise ConfigError("harness", "harness", finding, expected)
    return words


def fields_in(command: str) -> set[str]:
    """Return the names of the fields in a command line.

    Example:
        >>> sorted(fields_in("solve {base_url} {prompt} --json '{1: 2}'"))
        ['base_url', 'prompt']
    """
    return set(_FIELD.findall(command))


def check_scripts(words: list[str]) -> None:
    """Reject a command line with a task field inside a script: its text would run as code.

    Raises:
        ConfigError: `harness`: the command line has such a script.
    """
    for at, (option, script) in enumerate(pairwise(words)):
        if not _SCRIPT.fullmatch(option) or not _takes_script(words[:at]):
            continue
        for name in sorted(fields_in(script) - _NO_CODE):
            finding = f"{{{name}}} inside a script would run the task's text as code"
            hint = f"""write "$1" in the script, and add two arguments after the script: sh {{{name}}}"""
            raise ConfigError("harness", "harness", finding, hint=hint)


def _takes_script(words: list[str]) -> bool:
    """True if `-c` after these words introduces a script, because their last operand is a shell."""
    pairs = pairwise(["", *words])
    operands = [word for before, word in pairs if word[:1] != "-" and before != "-o"]
    return bool(operands) and _SHELL.fullmatch(PurePath(operands[-1]).name) is not None


def filled(words: list[str], values: Mapping[str, Any]) -> list[str]:
    """Replace the fields in words; a value is never split into words.

    Example:
        >>> filled(["solve", "--task={prompt}"], {"prompt": "Say 'a b'"})
        ['solve', "--task=Say 'a b'"]
    """
    return [_FIELD.sub(lambda match: str(values[match[1]]), word) for word in words]


def shown(harness: str) -> str:
    """Return a harness in a form that is safe to store: values named like credentials are redacted.

    Example:
        >>> shown("solve --api-key sk-123 --retries 3")
        "solve --api-key '[redacted]' --retries 3"
    """
    secrets = secrets_in(harness)
    if not secrets:
        return harness
    return shlex.join([without(word, secrets) for word in words_of(harness)])


def without(text: str, secrets: Sequence[str]) -> str:
    """Redact each of the secrets in a text."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def secrets_in(harness: str) -> list[str]:
    """List values named like credentials, and user parts of URLs, longest first.

    Example:
        >>> secrets_in("env API_KEY=one solve --token two --tokens 3 http://user:four@host/")
        ['user:four', 'one', 'two']
    """
    if is_function(harness):
        return []
    secrets, before = set[str](), ""
    for word in words_of(harness):
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and is_secret(assigned[1]):
            secrets.add(assigned[2])
        elif before.startswith("-") and "=" not in before and is_secret(before.lstrip("-")):
            secrets.add(word)
        secrets.update(_USER.findall(word))
        before = word
    plain = {value for value in secrets if not _FIELD.fullmatch(value)}
    return sorted(plain, key=lambda value: (-len(value), value))


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
            finding = f"cannot start {words[0]!r}: {reason}"
            raise InputError("harness_start", where, finding, hint=hint) from None
    watch.add(process.pid)
    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        finding = f"the harness did not end within {timeout_s:g} s{_and(_output(*paths).tail)}"
        raise InputError("harness_timeout", where, finding) from None
    finally:
        await _end(process)
        watch.remove(process.pid)
    output = _output(*paths)
    if code != 0:
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        finding = f"the harness ended with {how}{_and(output.tail)}"
        raise InputError("harness_exit", where, finding)
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
    text = " ".join(_end_of(err).split()) or " ".join(" ".join(lines).split())
    return Output(lines[-1].strip() if lines else "", text[-_TAIL_CHARACTERS:])


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        return encodable(file.read().decode(errors="replace"))


def _and(tail: str) -> str:
    return f": {tail}" if tail else ""
