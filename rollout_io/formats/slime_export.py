"""Export to slime: a `.pt` file for `--load-debug-rollout-data` (training without an engine).

`slime.observability.rollout_data_utils.load_debug_rollout_data` (slime at 4c4adbbf) reads
`{"rollout_id": ..., "samples": [...]}`, in which a sample has the form of
`slime.utils.types.Sample.to_dict`; missing fields get Sample's defaults. All values are plain data
or tensors, so that `torch.load(..., weights_only=True)` can read the file too.
"""

from __future__ import annotations

import json
from itertools import accumulate, groupby
from typing import Any

import pyarrow as pa

from rollout_io.dataset.storage import PathLike
from rollout_io.formats.exporting import (
    Exported,
    Failed,
    Failures,
    Groups,
    PictureBytes,
    Uniform,
    declared_tables,
    new_export,
    rewards_of,
)
from schemas.columns import metrics_dict
from schemas.errors import InputError, count
from schemas.imports import requires_extra
from schemas.messages import sent_messages

ROUTES, SUPPORT = "rollout_expert_indices", "sampling_support"
STATUS = {"length": "truncated", "abort": "aborted"}
FIELDS = {
    *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", ROUTES),
    *("messages", "response_text", "policy_version", SUPPORT),
}
"""Columns with a corresponding field; all others go to the sample's `metadata`."""

IN_METADATA = ("policy_versions", "trainer_logprobs", "teacher_token_ids", "teacher_logprobs")
"""Columns about tokens without a field: slime does not read them where they are."""

ROLLOUT_ID = 0


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write one sample per row; all samples are held in memory, as the output is one document.

    `tokens` contains prompt + response; `response_length`, `loss_mask` and `rollout_log_probs`
    describe the response; `reward` is copied from the column. `group_index` numbers the instances,
    `index` and `rollout_id` the trajectories, from 0 by first appearance. `status` is completed,
    truncated (stop_reason length), aborted (abort) or failed; `weight_versions` contains the policy
    versions in the order of the tokens.

    Masked trajectories are kept with `remove_sample`: slime clears the loss mask of these samples.
    A failed trajectory gets status failed and reward 0.0, which slime includes in the baseline
    unless the whole group is masked. A row without tokens becomes [0, 0]: one prompt and one
    response token.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: A reward is null without an `error`; only some rows have log-probabilities or
            routing; the routing does not cover all tokens but the last; torch is missing; `out`
            exists.
    """
    with requires_extra("train", "--format slime"):
        import torch
    done, groups = Exported(), Groups()
    uniform = Uniform(dataset, ["rollout_logprobs", ROUTES, SUPPORT])
    samples: list[dict[str, Any]] = []
    num_removed, in_metadata = 0, dict[str, None]()
    with new_export(out, dataset) as path:
        failures, pictures = Failures.of(dataset, failed), PictureBytes(dataset)
        for piece in map(pictures.restored_in, declared_tables(dataset)):
            is_failed, masked = failures.failed(piece), failures.masked(piece)
            healthy = piece.filter(pa.array(~masked))
            uniform.check(healthy)
            rewards_of(dataset, piece.filter(pa.array(~is_failed)))
            numbers = zip(*groups.add(piece), strict=True)
            batches = piece.to_batches(max_chunksize=256)
            rows = (row for batch in batches for row in batch.to_pylist())
            for row, number, removed in zip(rows, numbers, masked.tolist(), strict=True):
                samples.append(_sample(row, *number, removed=removed))
            num_removed += int(masked.sum())
            in_metadata |= dict.fromkeys(name for name in IN_METADATA if name in piece.column_names)
        done.num_rows_read = done.num_rows_written = len(samples)
        done.close(dataset)
        _complete(samples, uniform, torch)
        with path.open("wb") as file:
            torch.save({"rollout_id": ROLLOUT_ID, "samples": samples}, file)
    if num_removed:
        done.remarks.append(
            f"{count(num_removed, 'sample')} excluded from training with remove_sample"
        )
    if in_metadata:
        done.remarks.append(
            f"in `metadata`, since Sample has no field for them: {', '.join(in_metadata)}"
        )
    done.remarks += groups.remarks("slime", "n_samples_per_prompt")
    return done


def _sample(row: dict[str, Any], group: int, trajectory: int, *, removed: bool) -> dict[str, Any]:
    prompt, response = row["prompt_token_ids"], row["response_ids"]
    failed = row.get("error") is not None
    return {
        "group_index": group,
        "index": trajectory,
        "rollout_id": trajectory,
        "prompt": _sent(row),
        "tokens": (prompt + response) if response else [*(prompt or [0]), 0],
        "response": row.get("response_text") or "",
        "response_length": len(response) or 1,
        "reward": 0.0 if failed else row["reward"],
        "loss_mask": [int(trains) for trains in row["loss_mask"]] or [0],
        "rollout_log_probs": row.get("rollout_logprobs"),
        "rollout_routed_experts": row.get(ROUTES),
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": row.get(SUPPORT),
        "weight_versions": _versions(row),
        "remove_sample": removed,
        "status": "failed" if failed else STATUS.get(row.get("stop_reason") or "", "completed"),
        "metadata": _plain({n: v for n, v in row.items() if n not in FIELDS}),
    }


def _versions(row: dict[str, Any]) -> list[str]:
    """Return the version of each run of tokens that were sampled with the same weights."""
    mask, version = row["loss_mask"], row.get("policy_version")
    versions = [
        v for v, is_own in zip(row.get("policy_versions") or (), mask, strict=False) if is_own
    ]
    if not versions and version is not None:
        versions = [version]
    return [str(version) for version, _ in groupby(versions)]


def _sent(row: dict[str, Any]) -> Any:
    """Return the messages that were sent; text that is not a list of messages is unchanged."""
    text = row.get("messages") or ""
    try:
        messages = sent_messages(row)
    except (ValueError, RecursionError):
        return text
    return messages if isinstance(messages, list) else text


def _plain(metadata: dict[str, Any]) -> Any:
    """Restrict values to JSON types, so that loading the file runs no code."""
    if metadata.get("metrics") is not None:
        metadata["metrics"] = metrics_dict(metadata["metrics"])
    return json.loads(json.dumps(metadata, default=str))


def _complete(samples: list[dict[str, Any]], uniform: Uniform, torch: Any) -> None:
    """Add missing fields to removed samples, because slime inspects only the first sample."""
    experts = next(filter(None, (sample["rollout_routed_experts"] for sample in samples)), None)
    shape = () if experts is None else (len(experts[0]), len(experts[0][0]))
    for sample in samples:
        num = sample["response_length"]
        logprobs = sample["rollout_log_probs"] or [0.0] * num
        sample["rollout_log_probs"] = logprobs if uniform.has_values("rollout_logprobs") else None
        if uniform.has_values(SUPPORT):
            sets = sample["rollout_top_p_token_offsets"] or [[]] * num
            sample["rollout_top_p_token_ids"] = [i for ids in sets for i in ids]
            sample["rollout_top_p_token_offsets"] = [0, *accumulate(map(len, sets))]
        routes = sample["rollout_routed_experts"]
        sample["rollout_routed_experts"] = None
        if uniform.has_values(ROUTES):
            sample["rollout_routed_experts"] = _routes(sample, routes or [], shape, torch)


def _routes(sample: dict[str, Any], routes: list[Any], shape: tuple[int, ...], torch: Any) -> Any:
    """Return the routing of a sample, [tokens - 1, layers, topk] int32."""
    wanted = len(sample["tokens"]) - 1
    if len(routes) < wanted and not sample["remove_sample"]:
        where = sample["metadata"]["trajectory_id"]
        finding = f"routing of {count(len(routes), 'token')}"
        expected, hint = f"{wanted}, all but the last token", f"drop the column {ROUTES}"
        raise InputError("routing_complete", f"trajectory {where!r}", finding, expected, hint)
    padded = torch.zeros((wanted, *shape), dtype=torch.int32)
    if routes:
        padded[: len(routes)] = torch.tensor(routes[:wanted], dtype=torch.int32)
    return padded
