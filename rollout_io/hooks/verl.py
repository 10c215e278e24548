"""Keep the rollouts of a verl run (0.9, V1 trainers): `examples/hooks/verl_trainers.py`."""

from __future__ import annotations

import os
from typing import Any

from rollout_io.hooks.appender import RolloutAppender
from schemas.metadata import DatasetMetadata

_FIELDS = {"prompts": "prompt_token_ids", "responses": "response_ids", "rm_scores": "rewards"}
_FIELDS |= {"response_mask": "loss_masks"}


def recorded(trainer_class: Any) -> Any:
    """Return a V1 trainer whose `trainer.rollout_data_dir` is a dataset instead of decoded text.

    Each trained batch is appended after its update, with the reward that trained. An output of a
    session is a step of its trajectory; `policy_version` is the oldest that sampled it.
    """

    class Recorded(trainer_class):
        appender: RolloutAppender | None = None

        def _log_rollout_data(
            self, batch: Any, timing_raw: Any, rollout_data_dir: str | os.PathLike[str]
        ) -> None:
            del timing_raw
            rollout = self.config.actor_rollout_ref.rollout
            mode = rollout.logprobs_mode.removesuffix("_logprobs")
            if self.appender is None:
                metadata = DatasetMetadata(logprobs_mode=mode, outcome="last")
                self.appender = RolloutAppender(rollout_data_dir, metadata)
            self.appender.append(output_of(batch, rollout))

    return Recorded


def output_of(batch: Any, rollout: Any) -> dict[str, Any]:
    """Return the GeneratorOutput of a trained `KVBatchMeta`; `rollout` is verl's configuration."""
    import transfer_queue

    fields = {**_FIELDS, "multi_modal_inputs": "pixel_values"}
    fields |= {"rollout_log_probs": "rollout_logprobs"} if rollout.calculate_log_probs else {}
    fields |= {"routed_experts": "rollout_expert_indices"} if rollout.enable_rollout_routing_replay else {}
    data = transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=[*fields]
    )
    names = [(uid, int(session), int(index)) for uid, session, index in (k.rsplit("_", 2) for k in batch.keys)]
    order = sorted(range(len(names)), key=names.__getitem__)
    ...
