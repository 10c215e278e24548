"""What `rollouts inspect` prints: trajectories with their tokens, and where `--find` finds a text or ids.

A trajectory shows each step's prompt, sampled tokens and trained tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from rollout_io.cli.output import emit, emit_json, note
from rollout_io.dataset.finding import FOUND_COLUMNS, TEXT_COLUMNS, Match, find, find_in_texts
from rollout_io.dataset.prefix_layout import common_prefix
from rollout_io.dataset.reader import iter_tables, read_metadata, scan
from rollout_io.retokenize.local import remembered_tokenizer
from rollout_io.retokenize.token_bytes import TokenBytes, load_token_bytes
from rollout_io.terminal import printable
from schemas.columns import PICTURES
from schemas.errors import ConfigError, count
from schemas.messages import sent_messages
from schemas.numpy_arrays import to_arrow
from schemas.pictures import identities
from schemas.types import as_table

if TYPE_CHECKING:
    from rollout_io.dataset.prefix_layout import Tokens


Decode = Callable[[Sequence[int]], str]
Kind = Literal["trained", "masked", "observed"]

COLUMNS = (
    *("trajectory_id", "step_index", "prompt_token_ids", "response_ids", "loss_mask", "segments"),
    *("reward", "stop_reason", "agent", "error", "messages", "response_text", "token_source"),
    PICTURES,
)
"""Columns that a view uses; nullable columns may be absent."""

_COMPARED: dict[str, Any] = {
    "prompt_token_ids": pl.List(pl.Int32),
    "response_ids": pl.List(pl.Int32),
    PICTURES: pl.List(pl.Struct({"sha256": pl.String, "start": pl.Int32, "length": pl.Int32})),
}

MARKS: dict[Kind, tuple[str, str]] = {
    "trained": ("[+ ", " +]"),
    "masked": ("[- ", " -]"),
    "observed": ("[. ", " .]"),
}
STYLES: dict[Kind, str] = {"trained": "32", "masked": "33", "observed": "2"}
LEGEND: dict[Kind, str] = {
    "trained": "trained on",
    "masked": "sampled, not trained on",
    "observed": "not sampled",
}

SHOWN_CHARS = 400  # maximum number of characters of a prompt
SHOWN_IDS = 24  # maximum number of token ids of a span without text


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Adjacent response tokens of one kind.

    Attributes:
        kind: `trained`; `masked` (sampled, loss_mask false); `observed` (in no segment).
        num_tokens: Number of tokens.
        text: Decoded text, or the ids if there is neither a tokenizer nor recorded text.
    """

    kind: Kind
    num_tokens: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """One row of a trajectory. Attributes named like a column contain the row's value.

    Attributes:
        num_shared_tokens: Number of leading prompt tokens shared with the previous row.
        num_new_tokens: Number of the remaining prompt tokens.
        prompt: Text of the new part, or of the last message sent; None if unknown.
        num_steps: Number of steps in the row; more than one if it is merged.
    """

    step_index: int
    num_steps: int
    agent: str | None
    stop_reason: str | None
    reward: float | None
    num_shared_tokens: int
    num_new_tokens: int
    prompt: str | None
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryView:
    """One trajectory; `reward` is the reward of its last row."""

    trajectory_id: str
    reward: float | None
    error: str | None
    steps: tuple[StepView, ...]


def view_trajectory(rows: Sequence[dict[str, Any]], decode: Decode | None = None) -> TrajectoryView:
    """Build the view of one trajectory.

    Args:
        rows: The rows in order, each a dict of the columns `COLUMNS`.
        decode: Converts ids to text. If None, each step shows its `response_text`, or its ids.

    Example:
        >>> row = {"trajectory_id": "a_0", "step_index": 0, "prompt_token_ids": [1, 2]}
        >>> row |= {"response_ids": [3, 4], "loss_mask": [True, False]}
        >>> [(s.kind, s.text) for s in view_trajectory([row]).steps[0].spans]
        [('trained', '3'), ('masked', '4')]
    """
    columns = {name: [row.get(name) for row in rows] for name in _COMPARED}
    prompts, responses = identities(as_table(pl.DataFrame(columns, _COMPARED)))
    before = prompts.values[:0]
    steps = []
    for index, row in enumerate(rows):
        shared = common_prefix(before, prompts.row(index))
        steps.append(_step(row, shared, decode))
        before = np.concatenate([prompts.row(index), responses.row(index)])
    errors = (row.get("error") for row in rows)
    return TrajectoryView(
        trajectory_id=rows[0]["trajectory_id"],
        reward=rows[-1].get("reward"),
        error=next((error for error in errors if error is not None), None),
        steps=tuple(steps),
    )


def _step(row: dict[str, Any], shared: int, decode: Decode | None) -> StepView:
    num_prompt = len(row["prompt_token_ids"])
    return StepView(
        step_index=row["step_index"],
        num_steps=_num_steps(row),
        agent=row.get("agent"),
        stop_reason=row.get("stop_reason"),
        reward=row.get("reward"),
        num_shared_tokens=shared,
        num_new_tokens=num_prompt - shared,
        prompt=_last_message(row) if decode is None else _text(row, shared, num_prompt, decode),
        spans=_spans(row, decode),
    )


def _spans(row: dict[str, Any], decode: Decode | None) -> tuple[Span, ...]:
    ids, kinds, texts = row["response_ids"], _kinds(row), _texts(row)
    num_prompt = len(row["prompt_token_ids"])
    starts = {start for start, _ in texts}
    cuts = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1] or i in starts]
    bounds = [0, *cuts, len(kinds)] if kinds else []
    spans = []
    for a, b in itertools.pairwise(bounds):
        if decode is None:
            text = texts.get((a, b - a))
        else:
            text = _text(row, num_prompt + a, num_prompt + b, decode)
        shown = _ids_text(ids[a:b]) if text is None else text
        spans.append(Span(kind=kinds[a], num_tokens=b - a, text=shown))
    return tuple(spans)


def _text(row: dict[str, Any], start: int, end: int, decode: Decode) -> str:
    """Decode tokens of prompt + response; a picture is named in place of its placeholders."""
    ids, texts = [*row["prompt_token_ids"], *row["response_ids"]], list[str]()
    for picture in row.get(PICTURES) or ():
        begin, length = picture["start"], picture["length"]
        if begin is not None and start <= begin < end:
            texts.append(decode(ids[start:begin]))
            texts.append(f"[picture {picture['sha256'][:15]}: {count(length, 'token')}]")
            start = begin + length
    return "".join([*texts, decode(ids[start:end])])


def _texts(row: dict[str, Any]) -> dict[tuple[int, int], str | None]:
    """Return the recorded text of each step in the row, by (start, length)."""
    segments = row.get("segments")
    if segments is None:
        return {(0, len(row["response_ids"])): row.get("response_text")}
    return {(s["start"], s["length"]): s.get("response_text") for s in segments}


def _kinds(row: dict[str, Any]) -> list[Kind]:
    """Return the kind of each response token, [R]."""
    segments = row.get("segments")
    sampled = [segments is None] * len(row["response_ids"])
    for segment in segments or ():
        start, length = segment["start"], segment["length"]
        sampled[start : start + length] = [True] * length
    return [
        "trained" if trains else "masked" if was_sampled else "observed"
        for trains, was_sampled in zip(row["loss_mask"], sampled, strict=True)
    ]


def _ids_text(ids: Sequence[int]) -> str:
    more = f" ... {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return " ".join(str(i) for i in ids[:SHOWN_IDS]) + more


def _num_steps(row: dict[str, Any]) -> int:
    return len({segment["step_index"] for segment in row.get("segments") or ()}) or 1


def _last_message(row: dict[str, Any]) -> str | None:
    """Return the last message sent to the model in a row's first step."""
    first = (row.get("segments") or [{}])[0].get("messages")
    if first is not None:
        row = {"messages": first, "token_source": row.get("token_source")}
    try:
        last = sent_messages(row)[-1]
        return f"{last['role']}: {last['content']}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def render(view: TrajectoryView, *, color: bool) -> str:
    """Render the view as text, with colours or with brackets (see `legend`)."""
    outcome = f"reward {_number(view.reward)}" if view.error is None else f"error: {view.error}"
    num_rows, num_steps = len(view.steps), sum(step.num_steps for step in view.steps)
    count = _count(num_steps, "step")
    count += f" merged into {_count(num_rows, 'row')}" if num_steps > num_rows else ""
    header = printable(f"{view.trajectory_id}  {count}  {outcome}")
    lines = [_styled(header, "1", color=color)]
    for step in view.steps:
        lines += ["  " + line for line in _render_step(step, color=color)]
    return "\n".join(lines)


def legend(*, color: bool) -> str:
    """Return a line that explains the colours or brackets."""
    return "   ".join(_marked(text, kind, color=color) for kind, text in LEGEND.items())


def _render_step(step: StepView, *, color: bool) -> list[str]:
    num_prompt = step.num_shared_tokens + step.num_new_tokens
    num_trained = sum(span.num_tokens for span in step.spans if span.kind == "trained")
    facts = [
        f"step {step.step_index}" if step.num_steps == 1 else f"{step.num_steps} steps",
        *([step.agent] if step.agent is not None else []),
        f"prompt {num_prompt} = {step.num_shared_tokens} shared + {step.num_new_tokens} new",
        f"response {sum(s.num_tokens for s in step.spans)}, {num_trained} trained on",
        *([step.stop_reason] if step.stop_reason is not None else []),
        *([f"reward {_number(step.reward)}"] if step.reward is not None else []),
    ]
    body = "".join(_marked(printable(s.text), s.kind, color=color) for s in step.spans)
    lines = [printable("  ".join(facts))]
    if step.prompt:
        prompt = printable(_shortened(step.prompt))
        lines += [_styled("  > " + line, "2", color=color) for line in prompt.split("\n")]
    return [*lines, *("    " + line for line in body.split("\n") if body)]


def _marked(text: str, kind: Kind, *, color: bool) -> str:
    if color:
        return "\n".join(_styled(line, STYLES[kind], color=True) for line in text.split("\n"))
    left, right = MARKS[kind]
    return f"{left}{text}{right}"


def _styled(text: str, code: str, *, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color and text else text


def _shortened(text: str) -> str:
    more = len(text) - SHOWN_CHARS
    return text if more <= 0 else f"{text[:SHOWN_CHARS]}... {more} more characters"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


_IDS = re.compile(r"\d{1,9}([\s,]+\d{1,9})*")


def print_matches(
    dataset: str,
    sought: str | Tokens,
    tokenizer: str | None,
    trajectory_ids: list[str] | None,
    limit: int,
    *,
    as_json: bool,
) -> None:
    """Search a dataset, print the first matches, and count all of them.

    Args:
        dataset: Path of the dataset.
        sought: A text, or [K] adjacent token ids.
        tokenizer: Its tokens are searched for a text. None: the dataset's; without it, the logged
            texts are searched.
        trajectory_ids: Ids of the trajectories to search; None: all.
        limit: Maximum number of matches to print.
        as_json: Print them as JSON.
    """
    named = tokenizer or remembered_tokenizer(read_metadata(dataset))
    vocabulary = None if named is None else load_token_bytes(named)
    matches = _matches(dataset, sought, vocabulary, trajectory_ids)
    shown = list(islice(matches, limit))
    num_matches, trajectories = len(shown), {match.trajectory_id for match in shown}
    for match in matches:
        num_matches += 1
        trajectories.add(match.trajectory_id)
    if as_json:
        emit_json([dataclasses.asdict(match) for match in shown])
    else:
        for match in shown:
            emit(_line(match))
    if isinstance(sought, str) and vocabulary is None:
        note(
            "only logged messages and responses were searched; pass --tokenizer DIR for all tokens"
        )
    total = f"{count(num_matches, 'match', 'es')} in {count(len(trajectories), 'trajectory')}"
    note(f"{total}; the first {len(shown)} shown" if len(shown) < num_matches else total)


def ids_of(text: str) -> Tokens:
    """Parse token ids separated by commas or spaces.

    Raises:
        ConfigError: `choices`: the text has other characters.

    Example:
        >>> ids_of("12,13").tolist()
        [12, 13]
    """
    import numpy as np

    if not _IDS.fullmatch(text.strip()):
        expected = "whole numbers below 10^9, separated by commas or spaces"
        raise ConfigError("choices", "--find-ids", repr(text[:40]), expected)
    return np.array(re.findall(r"\d+", text), np.int32)


def _matches(
    dataset: str,
    sought: str | Tokens,
    vocabulary: TokenBytes | None,
    trajectory_ids: list[str] | None,
) -> Iterator[Match]:
    names: tuple[str, ...] = FOUND_COLUMNS
    if isinstance(sought, str) and vocabulary is None:
        present = scan(dataset).collect_schema().names()
        names = tuple(name for name in TEXT_COLUMNS if name in present)
    chosen = None if trajectory_ids is None else pl.Series(trajectory_ids, dtype=pl.String)
    for table in iter_tables(dataset, names, decode=False):
        searched = table if chosen is None else _only(table, chosen)
        if isinstance(sought, str) and vocabulary is None:
            yield from find_in_texts(searched, sought)
        else:
            yield from find(searched, sought, vocabulary)


def _only(table: pa.Table, trajectory_ids: pl.Series) -> pa.Table:
    ids = pl.Series(table.column("trajectory_id"))
    return table.filter(to_arrow(ids.is_in(trajectory_ids.implode()).to_numpy()))


def _line(match: Match) -> str:
    where = f"{match.trajectory_id}  step {match.step_index}"
    if match.position is not None:
        where += f", token {match.position}"
    shown = " ".join(f"{match.before}[{match.found}]{match.after}".split())
    return f"{printable(where)}: {printable(shown)}"
