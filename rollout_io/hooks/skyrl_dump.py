"""Read the batches that SkyRL dumps (`dumped_data/`): `examples/hooks/skyrl_dumps.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

_FIELDS = {"rewards": "rewards", "loss_mask": "loss_masks", "rollout_logprobs": "rollout_logprobs"}
_UNREAD = ("rollout_expert_indices", "rollout_sample_support", "pixel_values", "image_grid_thw")


def output_of(batch: Any) -> dict[str, Any]:
    """Return the GeneratorOutput of a `TrainingInputBatch`: a batch as SkyRL trained on it.

    A dump does not record how rows were sampled: add `temperature` and `policy_version` if known.
    Experts, sampling support and pictures are not read; a batch that has them is refused.

    Args:
        batch: Load pickles in SkyRL's environment, and only your own, because they can run code.

    Example:
        >>> with open("dumped_data/global_step_1_training_input.pkl", "rb") as file:
        ...     appender.append(output_of(pickle.load(file)))
    """
    num_rows = len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
    last = list(batch.metadata.get("is_last_step") or [True] * num_rows)[:num_rows]
    fields = {name: field for name, field in _FIELDS.items() if batch.get(name) is not None}
    names = "trajectory_ids", "prompt_token_ids", "response_ids", *fields.values()
    output: dict[str, Any] = {"is_last_step": last} | {name: [] for name in names}
    ended = Counter[Any]()
    for row, is_last in enumerate(last):
        uid = batch.metadata["uids"][row]
        output["trajectory_ids"].append({"instance_id": uid, "repetition_id": ended[uid]})
        ended[uid] += bool(is_last)
        # Prompts and responses are padded on the left.
        ids = batch["sequences"][row][batch["attention_mask"][row].bool()].tolist()
        size = int(batch["response_mask"][row].sum())
        output["prompt_token_ids"].append(ids[: len(ids) - size])
        output["response_ids"].append(ids[len(ids) - size :])
        for name, field in fields.items():
            values = batch[name][row].tolist()
            output[field].append(values[len(values) - size :])
    return output | {name: batch[name] for name in _UNREAD if batch.get(name) is not None}
