"""Declaration of the columns of the rollout table.

`COLUMNS` is the only place that declares a column's name, Arrow type, nullability, length rule and
meaning. The Arrow schema, the documentation table, the Hypothesis strategies and the checks are
derived from it. One row is one sequence: one step of a trajectory, or several merged steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from schemas.tables import table_rows

LOGPROB_SENTINEL = -9999.0
"""vLLM clamps log-probabilities of -inf to this value before it serialises them as JSON."""


class Length(Enum):
    """Length rule of a list column, the same for every row."""

    FREE = "free"
    RESPONSE = "response"  # one element per token of `response_ids`


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of one column.

    Attributes:
        name: Column name.
        type: Arrow type that the writer casts to; None if it depends on the data (routing: the
            number of layers and top-k depend on the model).
        meaning: One-line description for the documentation.
        nullable: True if the column may contain nulls or be absent from the table.
        length: Length rule of a list column.
    """

    name: str
    type: pa.DataType | None
    meaning: str
    nullable: bool = False
    length: Length = Length.FREE


METRICS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())]))
"""Type of `metrics`. Not a map, because `datasets`, Daft and other readers do not support maps."""

SEGMENT_FIELDS: tuple[pa.Field, ...] = (
    pa.field("start", pa.int32()),
    pa.field("length", pa.int32()),
    pa.field("step_index", pa.int32()),
)
"""Fields of every segment. Per-step values (reward, stop_reason, user columns) follow them."""

PICTURES = "pictures"
PICTURES_TYPE = pa.list_(
    pa.struct([("sha256", pa.string()), ("start", pa.int32()), ("length", pa.int32())])
)
"""Type of `pictures`."""

JOINED = "joined"
"""Field of `segments`: true for a segment that a merge created from one step. All other segments
only mark the sampled ranges of a row; `unmerge` does not split them."""

NUM_ROUTED = "num_routed_tokens"
"""Field of `segments`: number of leading tokens of the step (prompt + response) with routing."""

TASK = "task_instance_id"
ROUTING = "list<fixed list<fixed list<int16>>>"

_TYPES: dict[str, pa.DataType | None] = {
    "string": pa.string(),
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "list<struct>": pa.list_(pa.struct(list(SEGMENT_FIELDS))),
    "list<struct<key, value>>": METRICS_TYPE,
    "list<struct<sha256, start, length>>": PICTURES_TYPE,
    ROUTING: None,
}
"""Names of types; `list<T>` is a list of one of them."""


def _type_of(name: str) -> pa.DataType | None:
    return _TYPES[name] if name in _TYPES else pa.list_(_type_of(name[len("list<") : -1]))


def _name_of(kind: Any) -> str:
    names = {kind: name for name, kind in _TYPES.items()}
    return names[kind] if kind in names else f"list<{_name_of(kind.value_type)}>"


def columns_of(table: str) -> tuple[Column, ...]:
    """Return the columns of a table of names, types, whether a column is required, and meanings.

    An `optional` column may contain nulls or be absent. A list `per token` has one element per
    response token.
    """
    return tuple(
        Column(
            name,
            _type_of(kind),
            meaning,
            nullable=need.startswith("optional"),
            length=Length.RESPONSE if need.endswith("per token") else Length.FREE,
        )
        for name, kind, need, meaning in table_rows(table)
    )


COLUMNS = columns_of("""
instance_id | string | required | the task or prompt; identifies the group
repetition_id | int32 | required | index of the attempt, from 0
trajectory_id | string | required | `{instance_id}_{repetition_id}`, unique
task_instance_id | string | optional | the task, where several groups attempt the same one (`rollouts rl` visits each
    task once in every pass); null: the task is `instance_id`
step_index | int32 | required | index of the row in its trajectory, from 0; rows are ordered by their last step
is_last_step | bool | required | true only on the trajectory's final row, which contains its last step
prompt_token_ids | list<int32> | required | the exact ids of the prompt that the engine received
response_ids | list<int32> | required | the exact ids that the engine sampled; in a merged row, also the tokens
    between its steps
loss_mask | list<bool> | required per token | true for response tokens that are trained on
redacted | list<bool> | optional per token | true for sampled tokens whose ids redaction replaced, which are never
    trained on; null: the row was not redacted
rollout_logprobs | list<float> | optional per token | the sampler's log-probabilities, nats; 0.0 at tokens that were
    not sampled
sampling_support | list<list<int32>> | optional per token | the ids that could have been drawn at each token (after
    top-k, top-p and min-p), over which `rollout_logprobs` are then normalised; empty at tokens that were not sampled;
    null: unknown
trainer_logprobs | list<float> | optional per token | log-probabilities under the trainer's policy, as recorded by the
    trainer, nats; 0.0 at tokens without one
teacher_token_ids | list<list<int32>> | optional per token | a teacher's most likely ids at each token, in place of
    it; empty where unknown
teacher_logprobs | list<list<float>> | optional per token | log-probabilities of `teacher_token_ids` under the
    teacher, nats
reward | double | optional | the row's scalar reward (for a merged row, the sum); null means unknown, never 0
rewards | list<double> | optional per token | one reward per response token; sums to `reward`
segments | list<struct> | optional | the ranges of `response_ids` that were sampled, in order, with the original step
    index; in a merged row, each segment with `joined` is one original step and stores the values of that step; null:
    the entire response is one step
stop_reason | string | optional | why sampling ended, as the engine or harness reported it
policy_version | int32 | optional | version of the weights that sampled the row; if there are several, the oldest
policy_versions | list<int32> | optional per token | version of the weights that sampled each token, where it may
    change during a response; 0 at tokens that were not sampled; null: `policy_version` sampled them all
temperature | float | optional | sampling temperature
top_p | float | optional | nucleus truncation; 1 is off
top_k | int32 | optional | top-k truncation; 0 or less is off
sampling_extra | string | optional | JSON of any other setting that changed the sampled distribution (`min_p`,
    penalties, `logit_bias`, a grammar, ...); null: unknown
rollout_expert_indices | list<fixed list<fixed list<int16>>> | optional | list<fixed list<fixed list<int16, topk>,
    layers>>: experts chosen for each token of prompt + response, or for only the first n (n >= 1)
agent | string | optional | which agent made the call, if the harness records it (`main`, `checker`)
token_source | string | required | `engine` (exact ids) or `retokenized` (from text)
error | string | optional | why the trajectory failed; null if it did not fail
messages | string | optional | JSON of the messages that were sent, for people to read; for a re-tokenized row, the
    entire conversation with the model's answers
pictures | list<struct<sha256, start, length>> | optional | the pictures, documents and recordings in `messages`, in
    order. `sha256`: `sha256:` and the digest of the file in `DS.blobs` (null: the log has only a URL, or it was
    redacted). `start` and `length`: the tokens of prompt + response that stand for the picture (null: unknown, or
    there are none; `length` alone is null in datasets of schema version 1)
response_text | string | optional | text of the response, for people to read
metrics | list<struct<key, value>> | optional | environment metrics
source | string | optional | file and position the row was converted from
""")

TOKEN_SOURCES = ("engine", "retokenized")

COLUMN_BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}
REQUIRED_COLUMNS: tuple[str, ...] = tuple(c.name for c in COLUMNS if not c.nullable)

PREFIX_FIELDS: tuple[pa.Field, ...] = (
    pa.field("parent_step_index", pa.int32(), nullable=True),
    pa.field("prefix_length", pa.int32(), nullable=False),
    pa.field("prompt_suffix_ids", pa.list_(pa.int32()), nullable=False),
)
"""Physical columns of the `prefix` layout; they replace `prompt_token_ids` on disk."""


DECLARED: dict[str, Column] = COLUMN_BY_NAME | {
    f.name: Column(f.name, f.type, "", nullable=f.nullable) for f in PREFIX_FIELDS
}
"""Columns of both layouts by name."""


def routing_type(num_layers: int, topk: int) -> pa.DataType:
    """Return the Arrow type of `rollout_expert_indices` for a model with `num_layers` layers."""
    return pa.list_(pa.list_(pa.list_(pa.int16(), topk), num_layers))


def arrow_schema(optional: tuple[str, ...] | None = None) -> pa.Schema:
    """Return the Arrow schema of the declared columns.

    Args:
        optional: Nullable columns to include; None includes all of them except routing, whose type
            depends on the model.
    """
    return pa.schema(
        [
            pa.field(c.name, c.type, nullable=c.nullable)
            for c in COLUMNS
            if c.type is not None and (not c.nullable or optional is None or c.name in optional)
        ]
    )


def metrics_dict(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, float] | None:
    """Return the metrics of one row as a dictionary.

    Example:
        >>> metrics_dict([{"key": "turns", "value": 3.0}])
        {'turns': 3.0}
    """
    return None if entries is None else {entry["key"]: entry["value"] for entry in entries}


def documentation_table(columns: Iterable[Column] = COLUMNS) -> str:
    """Format declared columns as a Markdown table (for docs/table.md and docs/training.md)."""
    lines = ["| column | type | null | length | meaning |", "|---|---|---|---|---|"]
    for c in columns:
        null, length = ("yes" if c.nullable else "no"), c.length.value.replace("free", "")
        lines.append(f"| {c.name} | {_name_of(c.type)} | {null} | {length} | {c.meaning} |")
    return "\n".join(lines) + "\n"
