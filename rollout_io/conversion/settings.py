"""Options of a conversion, and the settings derived from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from rollout_io import __version__
from rollout_io.conversion.chunk import Settings
from rollout_io.conversion.inputs import PathLike, digests_of
from rollout_io.conversion.joining import Recorded, states_of, with_recorded
from rollout_io.conversion.opened_logs import AUTO, MAPPED, Log, Opened
from rollout_io.conversion.remote import holds_copies, shown
from rollout_io.conversion.text import Retokenizer, retokenizer_of
from rollout_io.dataset.opening import digest_of
from rollout_io.formats.base import HAS_TEXT, Input, Options
from rollout_io.formats.mapped import check_paths
from rollout_io.formats.parsing.naming import MODELS
from rollout_io.retokenize.local import find_tokenizer, tokenizer_directory
from schemas.errors import ConfigError


class Keywords(TypedDict, total=False):
    """Keywords of `convert` and `read_log`; `Choices` has their meanings."""

    format: str
    rewards: PathLike | None
    reward: str | None
    group_by: str | Sequence[str]
    map: Mapping[str, str] | None
    tokenizer: PathLike | None
    chat_template: PathLike | None
    join: PathLike | None
    layout: Literal["prefix", "full"]
    logprobs_mode: Literal["raw", "processed"] | None
    on_error: Literal["fail", "skip"]
    strict: bool
    timeouts: Literal["fail", "keep"]
    overflows: Literal["zero", "fail", "keep"]
    other_fields: Literal["refuse", "keep", "drop"]
    group_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices(Options):
    """Options of a conversion, as chosen by the user: those below, and those for reading runs.

    Attributes:
        format: Format of the logs; `auto` detects it from their content.
        rewards: JSONL file of outcomes, which replace the outcomes in the logs.
        group_by: Labels that identify the instance (the group), replacing the format's rule.
        tokenizer: Tokenizer to re-tokenize text and to check exact tokens: a local directory, or
            the Hub id of a model in the local Hugging Face cache.
        chat_template: Name or file of the template for re-tokenization; None uses the tokenizer's.
        join: Dataset or log of the calls that were recorded of the runs, with exact tokens; None if
            there is none.
        layout: Store prompts as references to earlier steps (`prefix`), or in full (`full`).
        on_error: Whether invalid records stop the conversion (`fail`) or are rejected (`skip`).
        strict: If true, files inside directories that match no format are invalid records, and so
            are runs with content that is neither read nor left out on purpose; if false, the files
            are skipped, and the content is counted.
    """

    format: str = AUTO
    rewards: str | None = None
    group_by: tuple[str, ...] = ()
    tokenizer: str | None = None
    chat_template: str | None = None
    join: str | None = None
    layout: Literal["prefix", "full"] = "prefix"
    on_error: Literal["fail", "skip"] = "fail"
    strict: bool = False

    @classmethod
    def of(cls, keywords: Keywords) -> Self:
        """Return the choices in keywords, in which labels may be one text, and paths `os.PathLike`.

        Raises:
            ConfigError: `choices`: a value is out of bounds, or `map` and another format are named.
        """
        values: dict[str, Any] = {**keywords}
        for name, value in values.items():
            if isinstance(value, os.PathLike):
                values[name] = os.fspath(value)
        labels = values.get("group_by") or ()
        values["group_by"] = tuple(labels.split(",") if isinstance(labels, str) else labels)
        choices = cls(**values)
        if choices.map is not None:
            check_paths(choices.map)
            if choices.format not in {AUTO, MAPPED}:
                hint = "omit --format"
                raise ConfigError("choices", "--map", f"--format {choices.format}", "", hint)
        return choices


def settings_of(
    choices: Choices,
    logs: Sequence[Log],
    abouts: Sequence[Mapping[str, Any]],
    spool: Path,
    blobs: str | None = None,
    recorded: Recorded | None = None,
) -> list[Settings]:
    """Return the settings for reading and writing the runs of each log of a dataset.

    All settings share the metadata of the dataset. Its history names each format; the fingerprint
    of the chat template is None if it differs between formats.
    """
    refuse_misfits(choices, logs)
    pairs = [
        retokenizer_of(
            choices.tokenizer,
            choices.chat_template,
            is_needed=recorded is None and about.get(HAS_TEXT, log.adapter.is_text),
        )
        for log, about in zip(logs, abouts, strict=True)
    ]
    retokenizers, tokenizers = zip(*pairs, strict=True)
    models = {name for about in abouts for name in about.get(MODELS, ())}
    templates = {tokenizer.chat_template_fingerprint for tokenizer in tokenizers}
    metadata = tokenizers[0].replace(
        logprobs_mode=choices.logprobs_mode,
        models=tuple(sorted(models)),
        chat_template_fingerprint=templates.pop() if len(templates) == 1 else None,
    )
    if recorded is not None:
        metadata = with_recorded(metadata, recorded.path)
    join = {} if choices.join is None else {"join": shown(choices.join)}
    for log, about, retokenizer in zip(logs, abouts, retokenizers, strict=True):
        facts = {name: value for name, value in about.items() if name not in {MODELS, HAS_TEXT}}
        metadata = metadata.made(
            "convert",
            tool=tool_name(),
            format=log.format,
            inputs=[file.name for file in log.inputs],
            rewards=choices.rewards and shown(choices.rewards),
            **join,
            **facts,
            **_template_text(log, about, retokenizer),
        )
    is_verified = metadata.tokenizer_fingerprint is not None
    return [
        Settings(
            adapter=log.adapter,
            format=log.format,
            options=choices,
            retokenizer=retokenizer,
            tokenizer=find_tokenizer(metadata.tokenizer) if is_verified else None,
            layout=choices.layout,
            metadata=metadata,
            spool=spool if holds_copies(spool) else None,
            blobs=blobs,
            recorded=recorded,
            strict=choices.strict,
        )
        for log, retokenizer in zip(logs, retokenizers, strict=True)
    ]


def _template_text(
    log: Log, about: Mapping[str, Any], retokenizer: Retokenizer | None
) -> dict[str, str]:
    """Describe what a chat template adds to prompts; nothing for text without roles."""
    if retokenizer is None or log.adapter.is_table or "text" in about:
        return {}
    for system, which in ((True, "every prompt"), (False, "prompts without a system message")):
        if text := retokenizer.tokenizer.added_text(system=system):
            return {"template_text": f"the chat template adds to {which}: {text!r}"}
    return {}


def refuse_misfits(choices: Choices, logs: Iterable[Log]) -> None:
    """Check that the options apply to the formats of the logs."""
    for log in logs:
        for name, value in (("--rewards", choices.rewards), ("--group-by", choices.group_by)):
            if value and log.adapter.is_table:
                finding = f"logs in the format {log.format} already contain groups and rewards"
                raise ConfigError("choices", name, finding, "", f"omit {name}")
        if choices.group_size is not None and log.format != "skyrl":
            name, finding = "--group-size", f"logs in the format {log.format} name their groups"
            raise ConfigError("choices", name, finding, "", f"omit {name}")


def identity_of(
    opened: Opened, rewards: Input | None, choices: Choices, chunk_bytes: int
) -> dict[str, Any]:
    """Return the identity of a conversion as JSON: file contents, choices and version."""
    files = [*opened.inputs, *([rewards] if rewards else [])]
    return {
        "tool": tool_name(),
        "formats": [log.format for log in opened.logs],
        "choices": asdict(choices)
        | {"group_by": list(choices.group_by), "rewards": rewards and rewards.name},
        "chunk_bytes": chunk_bytes,
        "inputs": [[file.name, digests_of(file)] for file in files],
        "tokenizer": [digests_of(file) for file in _tokenizer_files(choices)],
        "join": None if choices.join is None else states_of(choices.join),
        "unused": [[r.place.where, digest_of(r.place.path)] for r in opened.unused],
    }


def _tokenizer_files(choices: Choices) -> list[Input]:
    """Return the tokenizer's files, without model weights, and the chat template's file."""
    tokenizer = None if choices.tokenizer is None else tokenizer_directory(choices.tokenizer)
    named = [Path(name) for name in (tokenizer, choices.chat_template) if name]
    tokenizers = [file for path in named for file in ([path] if path.is_file() else path.glob("*"))]
    weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}
    files = [file for file in sorted(tokenizers) if file.is_file()]
    return [Input(file.name, file) for file in files if file.suffix not in weights]


def tool_name() -> str:
    """Return the name and version of this library."""
    return f"rollout-io {__version__}"
