"""A trajectory as a conversation, one lane per agent; and the attempts at a task: where they part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from pipelines.statistics.attempts import Sampled, parting, sampled_ranges
from pipelines.turns import TURN_COLUMNS, lanes_of
from pipelines.view.dataset import Dataset
from pipelines.view.index_columns import first_steps
from pipelines.view.responses import shortened
from pipelines.view.runs import Run
from rollout_io.dataset.checking import digest_of
from rollout_io.dataset.trajectory_facts import task_text
from schemas.columns import PICTURES
from schemas.messages import RETOKENIZED
from schemas.pictures import identities
from schemas.ragged import Ragged

MAX_TASKS = 10_000
_BEFORE_CHARS, _AFTER_CHARS = 120, 160


def conversation(dataset: Dataset, trajectory_id: str) -> dict[str, Any]:
    """Return the turns of a trajectory by agent (see `lanes_of`), its error and its return."""
    number = dataset.index.number(trajectory_id)
    names = dataset.present(*TURN_COLUMNS)
    if "segments" in names:
        names = [n for n in dataset.reader.schema.names if n != "rollout_expert_indices"]
    table = dataset.trajectory(number, names)
    lanes = lanes_of(table, dataset.token_bytes, dataset.chat_tokenizer)
    findings = dataset.findings.of(dataset, trajectory_id)
    for one in findings:
        if (turn := _turn_of(one, lanes.values())) is not None:
            turn.setdefault("findings", []).append(one)
    errors = table.column("error").drop_null() if "error" in table.column_names else []
    error = errors[0].as_py() if len(errors) else None
    return {
        "lanes": [
            {"agent": name, "turns": list(map(_shown, turns))} for name, turns in lanes.items()
        ],
        "findings": [one for one in findings if one["row"] is None],
        "error": None if error is None else shortened(error),
        "return": dataset.index.trajectories["return"][number],
        "is_approximate": _is_retokenized(table),
    }


PLACES = frozenset({"image", "file"})
"""Types of parts whose text is where the file is."""


def _turn_of(
    finding: Mapping[str, Any], lanes: Iterable[list[dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return the turn that a finding is about, or else the last turn of its row."""
    turns = [turn for turns in lanes for turn in turns if turn["row"] == finding["row"]]
    for turn in turns:
        start, length = turn["span"] or (0, 0)
        if start <= finding["at"] < start + length:
            return turn
    return turns[-1] if turns and finding["row"] is not None else None


def _shown(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn for the page: long parts are cut; `num_chars` counts them whole."""
    parts, span = turn["parts"], turn["span"]
    return {
        **{name: turn[name] for name in ("role", "is_new", "trained", "from", "stop_reason")},
        "step_index": turn["row"],
        "findings": turn.get("findings", []),
        "num_tokens": None if span is None else span[1],
        "num_chars": sum(len(part["text"]) for part in parts if part["type"] not in PLACES),
        "parts": [{**part, "text": shortened(part["text"])} for part in parts],
    }


def _is_retokenized(table: pa.Table) -> bool:
    """True if the tokens of a row come from re-tokenized text."""
    rows = zip(table.column("response_ids"), table.column("token_source"), strict=True)
    return any(len(ids) and source.as_py() == RETOKENIZED for ids, source in rows)


def group(
    dataset: Dataset, instance_id: str, run: Run | None, update: int | None
) -> dict[str, Any]:
    """Return the attempts at a task, each compared with the first."""
    numbers = dataset.index.group(instance_id).tolist()
    lines = dataset.index.trajectories[numbers].to_dicts()
    advantages = _mean_advantages(dataset, run, update)
    parts_at_of = parted(dataset, numbers[0])
    attempts = []
    for number, line in zip(numbers, lines, strict=True):
        parts_at = None if number == numbers[0] else parts_at_of(dataset, number)
        names = ("trajectory_id", "repetition_id", "return", "num_rows")
        more = ("response_tokens", "trained_tokens", "stop_reason", "error")
        attempts.append(
            {name: line[name] for name in names}
            | {"advantage": advantages.get(line["trajectory_id"])}
            | {name: line[name] for name in more}
            | {"parts_at": parts_at}
        )
    texts = [line["task_text"] for line in lines]
    is_mixed = has_mixed_prompts(dataset, numbers, texts)
    return {"attempts": attempts, "task_text": texts[0], "has_mixed_prompts": is_mixed}


def has_mixed_prompts(
    dataset: Dataset, numbers: Sequence[int], texts: Sequence[str | None]
) -> bool:
    """True if the attempts at a task begin with different prompts; attempts without one are ignored.

    Args:
        dataset: The dataset, or a log, in which the first user messages are compared.
        numbers: Numbers of the attempts in its index.
        texts: Their `task_text`.
    """
    if dataset.is_log:
        return len({*texts} - {None}) > 1
    return len({_first_prompt(dataset, number) for number in numbers} - {None}) > 1


def _first_prompt(dataset: Dataset, number: int) -> bytes | None:
    """Return a digest of the prompt of a trajectory's step 0; None if it is empty or merged."""
    begin, _ = dataset.index.bounds(number)
    steps = dataset.trajectory(number, ["step_index"]).column(0).to_pylist()
    if 0 not in steps:
        return None
    row = begin + steps.index(0)
    names = ["prompt_token_ids", "response_ids", *dataset.present(PICTURES)]
    prompts, _ = identities(dataset.reader.rows(row, row + 1, names))
    return digest_of(prompts.row(0))


def text(dataset: Dataset, instance_id: str) -> dict[str, str | None]:
    """Return the complete text of a task: the first user message of its first step."""
    first, end = dataset.index.bounds(int(dataset.index.group(instance_id)[0]))
    if not dataset.has("messages"):
        return {"text": None}
    names = [name for name in ("step_index", "segments") if dataset.has(name)]
    steps = first_steps(dataset.reader.rows(first, end, names)).to_pylist()
    first += steps.index(min(steps))
    messages = dataset.reader.rows(first, first + 1, ["messages"]).column("messages")[0].as_py()
    found = task_text(messages)
    return {"text": None if found is None else shortened(found)}


def parted(a: Dataset, number: int) -> Callable[[Dataset, int], dict[str, Any] | None]:
    """Return a function that finds where a trajectory differs from a trajectory of `a`.

    Datasets are compared by sampled tokens (`parting`); logs, whose text may have no tokens, by the
    text of the answers (`_text_parting`).
    """
    if a.is_log:
        said = answers_of(a, number)
        return lambda b, other: _text_parting(said, answers_of(b, other))
    first = sampled_tokens(a, number)
    return lambda b, other: (
        _text_parting(answers_of(a, number), answers_of(b, other))
        if b.is_log
        else parting(first, sampled_tokens(b, other))
    )


def answers_of(dataset: Dataset, number: int) -> list[tuple[int, str]]:
    """Return the answers of a trajectory as text, each with the index of its row."""
    lanes = conversation(dataset, dataset.index.trajectories["trajectory_id"][number])["lanes"]
    turns = [turn for lane in lanes for turn in lane["turns"] if turn["is_new"]]
    return [
        (
            turn["step_index"],
            "\n".join(" ".join(filter(None, (p["name"], p["text"]))) for p in turn["parts"]),
        )
        for turn in turns
        if turn["role"] == "assistant"
    ]


def _text_parting(
    first: Sequence[tuple[int, str]], other: Sequence[tuple[int, str]]
) -> dict[str, Any] | None:
    """Find the first character at which the answers of `other` differ from those of `first`.

    Returns:
        `row` in `other`; null for the tokens of `parting`; `answer`: index of the answer; `said`: for both, the text
        before the difference, and the text from there on. None if all answers of `other` begin
        `first`.

    Example:
        >>> _text_parting([(0, "abc")], [(0, "abd")])["said"]
        [['ab', 'c'], ['ab', 'd']]
    """
    for answer, (row, text) in enumerate(other):
        wanted = first[answer][1] if answer < len(first) else ""
        if text == wanted:
            continue
        pairs = enumerate(zip(wanted, text, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(text)))
        start = max(at - _BEFORE_CHARS, 0)
        said = [[one[start:at], one[at : at + _AFTER_CHARS]] for one in (wanted, text)]
        return {
            "row": row,
            "token": None,
            "first_row": None,
            "first_token": None,
            "answer": answer,
            "said": said,
        }
    return None


def tasks(trajectories: pl.DataFrame, limit: int) -> dict[str, Any]:
    """List tasks by the spread of their returns, smallest first.

    Args:
        trajectories: Lines of the index, all attempts of each task.
        limit: Maximum number of tasks to list, at most `MAX_TASKS`.

    Returns:
        `tasks`: instance_id, task_text, attempts (number of attempts), num_returns (number of known returns),
        and mean and spread of these returns. The spread is the largest minus the smallest return,
        or None if fewer than two are known; such tasks come last. `total`: the number of tasks.
    """
    known = pl.col("return").fill_nan(None)
    num = known.count()
    found = (
        trajectories.group_by("instance_id", maintain_order=True)
        .agg(
            pl.col("task_text").first(),
            attempts=pl.len(),
            num_returns=num,
            mean=known.mean(),
            spread=pl.when(num > 1).then(known.max() - known.min()),
        )
        .sort("spread", nulls_last=True, maintain_order=True)
    )
    return {"tasks": found.head(min(limit, MAX_TASKS)).to_dicts(), "total": len(found)}


def _mean_advantages(dataset: Dataset, run: Run | None, update: int | None) -> dict[str, float]:
    """Return the mean advantage of each trajectory in an update; empty without an update."""
    if run is None or update is None:
        return {}
    tokens = run.records(update, dataset, ["trajectory_id", "advantages"])
    values = tokens.explode("advantages", empty_as_null=True, keep_nulls=True)
    means = values.group_by("trajectory_id").agg(
        pl.col("advantages").cast(pl.Float64).fill_nan(None).mean()
    )
    return {name: mean for name, mean in means.rows() if mean is not None}


def sampled_tokens(dataset: Dataset, number: int) -> Sampled:
    """Read the sampled tokens of a trajectory."""
    names = dataset.present("response_ids", "segments")
    table = dataset.trajectory(number, names)
    responses = Ragged.from_arrow(table.column("response_ids"))
    spans = table.column("segments").to_pylist() if "segments" in names else [None] * len(table)
    begin, end = dataset.index.bounds(number)
    prompts = dataset.index.rows["num tokens: prompt"][begin:end].to_list()
    lines = ((prompt, responses.row(i), spans[i]) for i, prompt in enumerate(prompts))
    return sampled_ranges(lines)
