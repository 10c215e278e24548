"""The user's choices about a conversion, and the settings derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_io import __version__
from rollout_io.configuration import out_of_bounds
from rollout_io.conversion.batch import Settings
from rollout_io.conversion.log import AUTO, Log
from rollout_io.conversion.text import about_template, retokenizer_of
from rollout_io.formats.base import Options
from rollout_io.formats.parsing.model_names import MODELS
from schemas.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The user's choices about a conversion.

    Attributes:
        format: Format of the logs; `auto` detects it from their content.
        rewards: JSONL file of outcomes, which replace those of the logs.
        group_by: Labels that identify the instance (the group), replacing the format's rule.
        options: Options for reading runs.
        tokenizer: Local directory of a tokenizer, to re-tokenise text and to check exact tokens.
            For logs with exact tokens, any other name is accepted and only recorded.
        chat_template: Name or file of the template for re-tokenisation; None: the tokenizer's own.
        layout: Store prompts as references to earlier steps (`prefix`), or in full (`full`).
        logprobs_mode: Distribution of the log-probabilities: `raw` or `processed`; None if unknown.
        on_error: Bad records stop the conversion (`fail`), or are rejected (`skip`).
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
            hint = f"pass group_by=({given!r},)"
            raise ConfigError("choices", "group_by", repr(given), "a tuple of labels", hint)
        for name, got, expected in out_of_bounds(self):
            raise ConfigError("choices", name, got, expected)


def settings_of(choices: Choices, log: Log, about: Mapping[str, Any]) -> Settings:
    """Return the settings for reading and writing the runs of a log.

    Args:
        choices: Choices of the user.
        log: The log to read.
        about: Facts about the log as a whole.

    Raises:
        ConfigError: `choices`, `tokenizer`, `chat_template`: a choice cannot be used.
    """
    refuse_misfits(choices, log)
    retokenizer, tokenizer = retokenizer_of(
        choices.tokenizer, choices.chat_template, is_needed=log.adapter.is_text
    )
    models = tuple(about.get(MODELS, ()))
    if (
        not log.adapter.is_table and "text" not in about
    ):  # "text": plain text, rendered by no template
        about = {**about, **about_template(retokenizer)}
    metadata = tokenizer.replace(logprobs_mode=choices.logprobs_mode, models=models).made(
        "convert",
        tool=tool_name(),
        format=log.format,
        inputs=[given.name for given in log.inputs],
        rewards=choices.rewards,
        **{name: value for name, value in about.items() if name != MODELS},
    )
    return Settings(
        adapter=log.adapter,
        options=choices.options,
        retokenizer=retokenizer,
        tokenizer=tokenizer.tokenizer if tokenizer.tokenizer_fingerprint else None,
        layout=choices.layout,
        metadata=metadata,
        about=about,
    )


def refuse_misfits(choices: Choices, log: Log) -> None:
    """Raise an error for choices that do not apply to the format.

    Raises:
        ConfigError: `choices`.
    """
    for name, value in (("--rewards", choices.rewards), ("--group-by", choices.group_by)):
        if value and log.adapter.is_table:
            got = f"logs in the format {log.format} already contain groups and rewards"
            raise ConfigError("choices", name, got, "", f"omit {name}")


def tool_name() -> str:
    """Return the name and version of this library."""
    return f"rollout-io {__version__}"
