"""Show a trajectory as a conversation: one lane per agent, with the messages each call added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from pipelines.turns import TURN_COLUMNS, lanes_of
from pipelines.view.dataset import Dataset
from pipelines.view.responses import shortened
from schemas.messages import RETOKENIZED


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
