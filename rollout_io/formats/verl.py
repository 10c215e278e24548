r"""The `verl` format: verl's rollout and validation dumps, {step}.jsonl.

    {"input": "user\nWhat is 1 + 5?\nassistant\n", "output": "6", "gts": "6", "score": 1.0, "step": 1}

A line is a run. `input` and `output` were decoded without special tokens. The separators of
messages are therefore lost, and neither roles nor exact tokens can be recovered; the history of the
dataset records that. The whole `output` trains, also the tool results in it; runs with these are
counted. `rollout_io.hooks.verl` keeps exact tokens and masks instead. Lines of one file and step with the same `input` form a group, as the file
does not record verl's groups; `task_instance_id` names the input across steps, for `rollouts diff`. The outcome is `score`; all other numbers (`reward_extra_info`) are
metrics.

Export to verl: agent-loop outputs, unpadded, in Parquet.

`verl.experimental.agent_loop.agent_loop.AgentLoopOutput.as_dict` (verl 0.9.1) defines these fields,
and `verl.trainer.ppo.v1.agent_loop_tq` adds `uid`, `session_id` and the index of an output in its
session:

- `prompts`, `responses`, `response_mask` (1 where the token is trained on), `rollout_log_probs`;
- `rm_scores`: a reward per response token, the trainer's `token_level_scores`;
- `routed_experts`: for all tokens of prompt + response; zeros where the engine recorded none;
- `min_global_steps`: version of the weights that sampled the response;
- `multi_modal_data`: `images`, the pictures of prompt + response, in order, as {bytes, path}. verl holds
  decoded pictures there, and makes `multi_modal_inputs` of them (`process_image` in
  https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/dataset/vision_utils.py takes both).

`verl.utils.tensordict_utils.list_of_dict_to_tensordict` accepts rows once these fields are
converted to tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.storage import PathLike
from rollout_io.formats.base import (
    About,
    Completion,
    Found,
    Options,
    Place,
    Run,
    Trajectory,
    note_run,
)
from rollout_io.formats.engines.records import Open, Records
from rollout_io.formats.exporting import (
    Exported,
    Failed,
    Failures,
    ParquetFile,
    PictureBytes,
    Uniform,
    declared_tables,
    new_export,
    renamed,
    rewards_of,
)
from rollout_io.formats.parsing.content import NO_JSON, filled
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.records import label, numbers, with_files_apart
from schemas.columns import PICTURES
from schemas.ragged import Ragged, list_lengths, offsets_of, ranges

_GROUPS = "inferred: lines of one file and step with the same input"
_TEXT = "decoded without special tokens: the ids are approximate"
NO_IDS = (
    "runs without token ids, log-probabilities and loss mask, which verl's dumps lack"
    " (a hook in verl keeps them: docs/guides/keep_rollouts.md)"
)
TOOL_RESULTS = (
    "runs with what looks like tool results, which train as if the model had sampled them"
)
_LATER_TURN = re.compile(
    r"<tool_response>|^(?:user|tool|ipython|observation)$|(?:user|tool|ipython)\n\n.*assistant\n\n",
    re.MULTILINE | re.DOTALL,
)
"""Remains of a header between two turns, whose special tokens are not in the text."""
_NO_METRICS = frozenset({"step", "gts", "request_id"})


class Sample(Open):
    """A run; its other fields are numbers of the reward."""

    input: str
    output: str
    score: float
    step: int
    gts: msgspec.Raw = NO_JSON
    request_id: msgspec.Raw = NO_JSON


def run_of(sample: Sample, place: Place) -> Run:
    """Return the run of a line."""
    key = prompt_key(sample.input)
    labels = {"step": str(sample.step), "prompt": key}
    instance = f"step-{sample.step}/{key}"
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read(sample: Sample, run: Run, _: Options) -> Trajectory:
    """Read the text of a line; all numbers of the line become metrics."""
    (place,) = run.places
    note_run(NO_IDS)
    if _LATER_TURN.search(sample.output):
        note_run(TOOL_RESULTS)
    step = Completion(
        source=place.where,
        prompt=sample.input,
        response=sample.output,
        has_special=(False, False),
    )
    fields = {name: raw for name, raw in sample.fields.items() if name not in _NO_METRICS}
    return Trajectory(
        steps=[step],
        reward=sample.score,
        metrics=numbers(fields, place.where),
        user_values=filled(
            step=str(sample.step),
            task_instance_id=prompt_key(sample.input),  # the same in the dumps of other steps
            gts=label(sample.gts, place.where),
            request_id=label(sample.request_id, place.where),
        ),
    )


def _finished(items: Iterator[Found]) -> Iterator[Found]:
    yield About("text", _TEXT)
    yield from with_files_apart(items)


ADAPTER = Records(
    records={"": Sample}, run=run_of, read=read, groups=_GROUPS, finish=_finished
).adapter("verl's dumps ({step}.jsonl): decoded text without roles")


NAMES = {
    "instance_id": "uid",
    "repetition_id": "session_id",
    "step_index": "index",
    "prompt_token_ids": "prompts",
    "response_ids": "responses",
    "loss_mask": "response_mask",
    "rollout_logprobs": "rollout_log_probs",
    "reward": "reward_score",
    "policy_version": "min_global_steps",
}
ROUTES = "rollout_expert_indices"


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset, one row group at a time; the output has one row per sequence.

    `rm_scores` (list<float32>) contains the `rewards` or, without these, zeros and the `reward` at
    the last token; `reward_score` (float64) is the reward. Columns without a verl field keep their
    names. verl drops the group of a failed session, so masked trajectories are left out.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: A reward is null; only some rows have log-probabilities or routing; `out`
            exists; a user column has a name that the export uses.

    Example:
        A row with response ids [7, 8, 9], reward 0.5 and no `rewards` has rm_scores [0, 0, 0.5].
    """
    uniform, done = Uniform(dataset, ["rollout_logprobs", ROUTES]), Exported()
    with new_export(out, dataset) as path, ParquetFile(path) as file:
        failures, pictures = Failures.of(dataset, failed), PictureBytes(dataset)
        for piece in declared_tables(dataset):
            healthy = failures.leave_out(piece, done)
            table = pictures.restored_in(healthy)
            uniform.check(table)
            added = {"rm_scores": _scores(table, rewards_of(dataset, table))}
            if PICTURES in healthy.column_names:
                images = pictures.images_in(healthy)
                added["multi_modal_data"] = pa.StructArray.from_arrays([images], ["images"])
            if ROUTES in table.column_names:
                added["routed_experts"] = _routes(table)
            table = table.drop_columns([n for n in ("rewards", ROUTES) if n in table.column_names])
            file.write(renamed(table, NAMES, added))
        done.close(dataset)
    return done


def _scores(table: pa.Table, rewards: list[float]) -> pa.Array:
    """Return the scores of each row, [tokens]: `rewards`, or zeros and `reward` at the end."""
    responses = Ragged.from_arrow(table.column("response_ids"))
    scores = np.zeros(responses.offsets[-1])
    scores[responses.offsets[1:] - 1] = rewards
    if "rewards" in table.column_names:
        placed = Ragged.from_arrow(table.column("rewards"))
        scores[ranges(responses.offsets[:-1], placed.lengths)] = placed.values
    return Ragged(scores.astype(np.float32), responses.offsets, responses.valid).to_arrow(
        pa.float32()
    )


def _routes(table: pa.Table) -> pa.Array:
    """Return the routing of each row, [prompt + response, layers, topk], padded with zeros."""
    column = table.column(ROUTES)
    kind = column.type
    lengths = list_lengths(column)
    shape = (kind.value_type.list_size, kind.value_type.value_type.list_size)
    flat = pc.list_flatten(pc.list_flatten(pc.list_flatten(column)))
    prompts, responses = (
        Ragged.from_arrow(table.column(n)) for n in ("prompt_token_ids", "response_ids")
    )
    offsets = offsets_of(prompts.lengths + responses.lengths)
    routes = np.zeros((int(offsets[-1]), *shape), np.int16)
    routes[ranges(offsets[:-1], lengths)] = np.asarray(flat).reshape(-1, *shape)
    values = pa.array(routes.reshape(-1))
    for size in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)
