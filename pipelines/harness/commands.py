"""Command lines of harnesses: placeholders, and redaction of secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from pipelines.record.secrets import REDACTED, is_secret
from schemas.errors import ConfigError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_ASSIGNED = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
_SHELL = re.compile(r"(ba|da|z|k|fi)?sh|python[\d.]*")
_SCRIPT = re.compile(r"-[A-Za-z]*c")
_USER = re.compile(r"://([^/\s@]+)@")

OWN_FIELDS = (
    *("base_url", "api_key", "model", "task_file", "reward_file"),
    *("instance_id", "repetition_id", "prompt"),
)
"""Fields available to every command, in addition to the extras of its task."""

_NO_CODE = frozenset({"base_url", "api_key", "model", "task_file", "reward_file", "repetition_id"})
"""Fields whose values cannot be set by a task."""


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
        got = f"invalid command line: {str(error).lower()}"
        raise ConfigError("harness", "harness", got) from None
    if not words:
        got, expected = "an empty command line", "module:function or a command line"
        raise ConfigError("harness", "harness", got, expected)
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
            got = f"{{{name}}} inside a script would run the task's text as code"
            hint = f"""write "$1" in the script, and add two arguments after the script: sh {{{name}}}"""
            raise ConfigError("harness", "harness", got, hint=hint)


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
    return [_FIELD.sub(lambda found: str(values[found[1]]), word) for word in words]


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
    found, before = set[str](), ""
    for word in words_of(harness):
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and is_secret(assigned[1]):
            found.add(assigned[2])
        elif before.startswith("-") and "=" not in before and is_secret(before.lstrip("-")):
            found.add(word)
        found.update(_USER.findall(word))
        before = word
    plain = {value for value in found if not _FIELD.fullmatch(value)}
    return sorted(plain, key=lambda value: (-len(value), value))
