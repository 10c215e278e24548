"""What a user chooses about a conversion, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from rollout_io.adapters import Options
from rollout_io.conversion.batch import Settings
from rollout_io.conversion.log import AUTO, Log
from rollout_io.conversion.text import retokenizer_of
from schemas.errors import RolloutError

_KNOWN = {
    "layout": ("prefix", "full"),
    "logprobs_mode": (None, "raw", "processed"),
    "on_error": ("fail", "skip"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a user chooses about a conversion.

    Attributes:
        format: Of the logs; `auto`: by their content.
        rewards: JSONL of outcomes, which win over those of the logs.
        group_by: Labels that name the instance (the group) instead of the format's own rule.
        options: About the reading of runs.
        tokenizer: Local directory of a tokenizer, with which text alone is re-tokenised; for exact
            tokens its name is noted.
        chat_template: Name or file of the template to re-tokenise with; None: the tokenizer's own.
        layout: Prompts as references to earlier steps (`prefix`), or in full.
        logprobs_mode: What the log-probabilities are of.
        on_error: A bad record stops the conversion (`fail`), or is put aside (`skip`).
    """

    format: str = AUTO
    rewards: str | None = None
    group_by: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    tokenizer: str | None = None
    chat_template: str | None = None
    layout: Literal["prefix", "full"] = "prefix"
    logprobs_mode: Literal["raw", "processed"] | None = None
    on_error: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        given: object = self.group_by
        if isinstance(given, str):
            hint = f"group_by=({given!r},)"
            raise RolloutError("choices", "group_by", repr(given), "a tuple of labels", hint)
        for name, known in _KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                expected = "one of " + ", ".join(map(repr, known))
                raise RolloutError("choices", name, repr(value), expected)


def settings_of(choices: Choices, log: Log, about: Mapping[str, Any]) -> Settings:
    """How the runs of a log are read and written.

    Args:
        choices: The user's.
        log: What is read.
        about: What is known of it as a whole.

    Raises:
        RolloutError: `choices`, `tokenizer`, `chat_template`: a choice that cannot be followed.
    """
    refuse_misfits(choices, log)
    retokenizer, tokenizer = retokenizer_of(
        choices.tokenizer, choices.chat_template, is_needed=log.adapter.is_text
    )
    metadata = tokenizer.replace(logprobs_mode=choices.logprobs_mode).made(
        "convert",
        tool=tool_name(),
        format=log.format,
        inputs=[given.name for given in log.inputs],
        rewards=choices.rewards,
        **about,
    )
    return Settings(
        adapter=log.adapter,
        options=choices.options,
        retokenizer=retokenizer,
        layout=choices.layout,
        metadata=metadata,
    )


def refuse_misfits(choices: Choices, log: Log) -> None:
    """Refuse choices that do not fit the format.

    Raises:
        RolloutError: `choices`.
    """
    for name, value in (("--rewards", choices.rewards), ("--group-by", choices.group_by)):
        if value and log.adapter.is_table:
            got = f"{name} for rows that are named and rewarded already ({log.format})"
            raise RolloutError("choices", name, got, "a format of runs", f"leave {name} out")


def tool_name() -> str:
    """Name and version of this library."""
    return f"rollout-io {version('rollout-io')}"
