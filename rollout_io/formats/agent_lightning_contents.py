"""What the events and rollouts of Agent Lightning contain, and how they form groups."""

from __future__ import annotations

from rollout_io.formats.contents import Contents

ROLLOUTS = (
    "inferred: events do not name a task, so each rollout is a separate group (--group-by prompt "
    "groups rollouts with the same first prompt)"
)
INPUTS = "inferred: rollouts with the same `data_id` or, without it, with equal inputs"
_CALL_KEYS = (
    "request response model_version server.version routed_experts prompt_token_ids "
    "response_token_ids response_log_probs usage http_status status"
)
CONTENTS = Contents(
    kind="event_type",
    default="rollout",
    reads={
        "*": "rollout_id attempt_id timestamp",
        "model_request": " ".join(f"data.{name}" for name in _CALL_KEYS.split()),
        "reward": "data.value data.source data.reason",
        "rollout": "input status.state status.last_attempt_id status.error_message",
    },
    leaves={
        "facts about a call": "model_request/data.finish_reason model_request/data.latency_ms "
        "model_request/data.model model_request/data.retry_count model_request/data.server",
        "facts about a rollout": "rollout/config rollout/is_train rollout/metadata rollout/status",
        "notes of the program, not sent": "note",
    },
)
