"""What a reward function gets, one recorded trajectory, and the findings that it may return."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.merging.merge import unmerge_table
from pipelines.turns import lanes_of_steps
from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.versions import FINDING, LEFT_OUT, is_name
from rollout_io.retokenize.token_bytes import TokenBytes
from rollout_io.terminal import whole_characters
from schemas.errors import InputError
from schemas.ragged import list_lengths

MAX_TEXT = 2000
"""Maximum number of characters of a finding's text."""

_FIELDS = FINDING.keys()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a function found in an attempt, and where.

    Attributes:
        label: What it is: letters, digits, _ and -.
        text: What was found, for people to read; at most `MAX_TEXT` characters.
        step: Number of the step, from 0; None: the whole attempt.
        start, length: Tokens in the step's prompt + response; None: no tokens in particular.
        text_start, text_length: Characters in the step's `response_text`; None: none in particular.

    Example:
        >>> Finding(label="secret", text="a key", step=2, text_start=10, text_length=32)
    """

    label: str
    text: str = ""
    step: int | None = None
    start: int | None = None
    length: int | None = None
    text_start: int | None = None
    text_length: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A recorded trajectory.

    Attributes:
        trajectory_id: Its id.
        instance_id: Id of its task.
        rows: Its steps in order, merged or not, as dicts: all columns of the dataset, also the user's
            own, except prompts, log-probabilities and other numbers per token. `response_text` is the
            logged text, or else the decoded response.
        num_prompt_tokens: Number of prompt tokens of each step.

    Example:
        >>> def exact(attempt: Attempt) -> float:
        ...     return float(attempt.response.strip() == attempt.rows[0]["truth"])
    """

    trajectory_id: str
    instance_id: str
    rows: list[dict[str, Any]]
    num_prompt_tokens: list[int] = field(default_factory=list)

    @property
    def response(self) -> str:
        """Text of the last response; empty if it is unknown."""
        return self.rows[-1].get("response_text") or ""

    @property
    def reward(self) -> float | None:
        """The recorded reward of the last row."""
        reward: float | None = self.rows[-1].get("reward")
        return reward

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The logged messages of the last row; empty if the log has none."""
        messages: list[dict[str, Any]] = json.loads(self.rows[-1].get("messages") or "[]")
        return messages

    @cached_property
    def turns(self) -> dict[str | None, list[dict[str, Any]]]:
        """What each agent said and was told: see `pipelines.turns.lanes_of`.

        Raises:
            InputError: `no_turns`: the log has the conversation as one text, without roles.
        """
        if any((row.get("messages") or "").startswith('"') for row in self.rows):
            finding = "the log has the conversation as text without roles"
            raise InputError("no_turns", self.trajectory_id, finding, "messages with roles")
        numbers = zip(self.rows, self.num_prompt_tokens, strict=True)
        steps = [
            {
                **row,
                "row": place,
                "num_prompt_tokens": num,
                "messages": row.get("messages") or "[]",
                "response_text": row.get("response_text") or "",
            }
            for place, (row, num) in enumerate(numbers)
        ]
        return lanes_of_steps(steps)

    def findings(self, value: Any) -> list[dict[str, Any]]:
        """Return findings about this attempt as dicts.

        Args:
            value: Iterable of `Finding`s, or of mappings with their fields, such as a judge's JSON.

        Raises:
            InputError: `finding`: it is not one, or a finding is about a step, tokens or text that the
                attempt does not have.
        """
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise self._refused(f"{value!r:.60} is not a list", "a list of findings")
        return [self._checked(one) for one in value]

    def _checked(self, value: Any) -> dict[str, Any]:
        fields = asdict(value) if isinstance(value, Finding) else value
        if not isinstance(fields, Mapping) or not fields.keys() <= _FIELDS:
            raise self._refused(
                f"{value!r:.60} is not a finding", "a Finding, or a dict of its fields"
            )
        finding: dict[str, Any] = dict.fromkeys(_FIELDS) | {"text": ""} | dict(fields)
        label, text, step = finding["label"], finding["text"], finding["step"]
        if not isinstance(label, str) or not is_name(label):
            raise self._refused(f"label {label!r:.60}", "letters, digits, _ and -")
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise self._refused(f"text {text!r:.60}", f"up to {MAX_TEXT} characters")
        finding["text"] = whole_characters(text)
        for name in _FIELDS - {"label", "text"}:
            number = finding[name]
            if number is not None and (type(number) is not int or number < 0):
                raise self._refused(f"{name} {number!r:.60}", "a whole number from 0")
        if step is not None and step >= len(self.rows):
            raise self._refused(f"step {step}", f"steps 0 to {len(self.rows) - 1}")
        row = {"response_ids": ()} if step is None else self.rows[step]
        prompt = 0 if step is None else self.num_prompt_tokens[step]
        sizes = {"": prompt + len(row["response_ids"])}
        sizes["text_"] = len(row.get("response_text") or "")
        for prefix, size in sizes.items():
            start, length = finding[f"{prefix}start"], finding[f"{prefix}length"]
            if (start is None) != (length is None) or (start or 0) + (length or 0) > size:
                got = f"{prefix}start {start} and {prefix}length {length} in step {step}"
                raise self._refused(got, f"both, within {size}, or neither")
        return finding

    def _refused(self, got: str, expected: str) -> InputError:
        return InputError("finding", self.trajectory_id, got, expected)


def attempts(dataset: PathLike, vocabulary: TokenBytes | None) -> Iterator[Attempt]:
    """Yield the trajectories that did not fail, in order, reading a part of the dataset at a time.

    Args:
        dataset: Path of a valid dataset.
        vocabulary: Bytes of each token, for responses without a logged text; None: they are null.
    """
    present = scan(dataset).collect_schema().names()
    names = [name for name in present if name not in LEFT_OUT - {"prompt_token_ids"}]
    for merged in iter_tables(dataset, names):
        table = unmerge_table(merged)
        starts = [*trajectory_starts(table).tolist(), table.num_rows]
        for begin, end in pairwise(starts):
            rows = table.slice(begin, end - begin)
            if "error" not in names or rows.column("error").null_count == rows.num_rows:
                yield _attempt(rows, vocabulary)


def _attempt(table: pa.Table, vocabulary: TokenBytes | None) -> Attempt:
    lengths = list_lengths(table.column("prompt_token_ids")).tolist()
    rows = table.drop_columns("prompt_token_ids").to_pylist()
    for row in rows:
        if row.get("response_text") is None and vocabulary is not None:
            row["response_text"] = vocabulary.text(np.array(row["response_ids"], np.int32))
    return Attempt(rows[0]["trajectory_id"], rows[0]["instance_id"], rows, lengths)
