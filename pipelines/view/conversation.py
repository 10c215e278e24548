"""Show a trajectory as a conversation: one lane per agent, with the messages each call added."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipelines.view.dataset import Dataset
from pipelines.view.responses import shortened
from pipelines.view.turns import TURN_COLUMNS, lanes_of
from schemas.messages import RETOKENIZED


def conversation(dataset: Dataset, trajectory_id: str) -> dict[str, Any]:
    """Return the turns of a trajectory by agent (see `lanes_of`), its error and its return."""
    number = dataset.index.number(trajectory_id)
    names = dataset.present(*TURN_COLUMNS)
    if "segments" in names:
        names = [n for n in dataset.reader.schema.names if n != "rollout_expert_indices"]
    table = dataset.trajectory(number, names)
    lanes = lanes_of(table, dataset.token_bytes, dataset.chat_tokenizer)
    errors = table.column("error").drop_null() if "error" in table.column_names else []
    error = errors[0].as_py() if len(errors) else None
    return {
        "lanes": [{"agent": name, "turns": turns} for name, turns in lanes.items()],
        "error": None if error is None else shortened(error),
        "return": dataset.index.trajectories["return"][number],
        "is_approximate": _is_retokenized(table),
    }


def _is_retokenized(table: pa.Table) -> bool:
    """True if the tokens of a row come from re-tokenized text."""
    rows = zip(table.column("response_ids"), table.column("token_source"), strict=True)
    return any(len(ids) and source.as_py() == RETOKENIZED for ids, source in rows)
