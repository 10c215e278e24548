"""Keep the rollouts of a verl run (0.9, V1 trainers): `examples/hooks/verl_trainers.py`."""

from __future__ import annotations

from typing import Any

from rollout_io.hooks.appender import RolloutAppender
from schemas.metadata import DatasetMetadata


def recorded(trainer_class: Any) -> Any:
    """Return a V1 trainer that keeps exact rows: `trainer.rollout_data_dir` becomes a dataset.

    Each batch is appended after it trained, with the rewards that it had. An output of a session is
    a step of its trajectory; its `policy_version` is the oldest that sampled it.
    """

    class Recorded(trainer_class):  # type: ignore[misc]  # verl is not installed here
        appender: RolloutAppender | None = None

        def _log_rollout_data(self, batch: Any, timing_raw: Any, rollout_data_dir: str) -> None:
            del timing_raw
            rollout = self.config.actor_rollout_ref.rollout
            if self.appender is None:
                mode = rollout.logprobs_mode.removesuffix("_logprobs")
                self.appender = RolloutAppender(
                    rollout_data_dir, DatasetMetadata(logprobs_mode=mode)
                )
            self.appender.append(_output(batch, rollout))

    return Recorded


def _output(batch: Any, rollout: Any) -> dict[str, Any]:
    import transfer_queue

    fields = {"prompts": "prompt_token_ids", "responses": "response_ids", "rm_scores": "rewards"}
    fields |= {"response_mask": "loss_masks", "rollout_log_probs": "rollout_logprobs"}
    fields |= {"routed_experts": "rollout_expert_indices"}
    names = [(uid, int(s), int(i)) for uid, s, i in (key.rsplit("_", 2) for key in batch.keys)]
    order = sorted(range(len(names)), key=names.__getitem__)
    keys, tags = [batch.keys[i] for i in order], [batch.tags[i] for i in order]
    if not rollout.calculate_log_probs:
        del fields["rollout_log_probs"]
    if not rollout.enable_rollout_routing_replay:
        del fields["routed_experts"]
    stored = {"partition_id": batch.partition_id, "select_fields": [*fields, "multi_modal_inputs"]}
    data = transfer_queue.kv_batch_get(keys=keys, **stored)
    sessions = [f"{uid}_{session}" for uid, session, _ in (names[i] for i in order)]
    how = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
    return {
        "trajectory_ids": sessions,
        "is_last_step": [a != b for a, b in zip(sessions, [*sessions[1:], None], strict=True)],
        "policy_version": [tag["min_global_steps"] for tag in tags],
        "pixel_values": [x for x in data["multi_modal_inputs"] if x] or None,
        **{field: [row.numpy() for row in data[name].unbind()] for name, field in fields.items()},
        **{name: [value] * len(keys) for name, value in how.items()},
    }
