"""Keep the rollouts of a SkyRL run (0.3, 0.4): in its process, or from the batches that it dumps.

`examples/hooks/skyrl_entrypoint.py` and, for `dumped_data/`, `examples/hooks/skyrl_dumps.py` show both.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_io.formats.parsing.bodies import sampling_extra
from rollout_io.hooks.appender import RolloutAppender
from schemas.metadata import DatasetMetadata


class RecordedGenerator:
    """A SkyRL generator whose training rollouts are appended to a dataset; evaluations are not.

    Args:
        generator: The generator; all other attributes are its own.
        dataset: Directory or URL of the dataset.
        metadata: Metadata of the dataset, such as `logprobs_mode`.
    """

    def __init__(
        self,
        generator: Any,
        dataset: str | os.PathLike[str],
        metadata: DatasetMetadata | None = None,
    ) -> None:
        self._generator, self.appender = generator, RolloutAppender(dataset, metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, input_batch: Mapping[str, Any], **settings: Any) -> Any:
        """Generate as the generator does, and append the output."""
        client = getattr(self._generator, "inference_engine_client", None)
        version = getattr(client, "weight_version", None)
        output = await self._generator.generate(input_batch, **settings)
        about = input_batch.get("batch_metadata")
        if about is None or about.training_phase == "train":
            rows = len(output["response_ids"])
            params = input_batch.get("sampling_params") or {}
            ids = output.get("trajectory_ids") or input_batch["trajectory_ids"]
            columns = {"trajectory_ids": ids, "policy_version": [version] * rows}
            values = {name: params.get(name) for name in ("temperature", "top_p", "top_k")}
            values["sampling_extra"] = sampling_extra({**params, "top_k": None})
            columns |= {name: [value] * rows for name, value in values.items()}
            self.appender.append({**output, **columns})
        return output


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
