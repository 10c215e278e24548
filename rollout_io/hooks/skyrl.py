"""Keep the rollouts of a SkyRL run (0.3, 0.4): `examples/hooks/skyrl_entrypoint.py`."""

from __future__ import annotations

import os
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
