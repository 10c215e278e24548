"""What a recorder is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.metadata import LogprobsMode


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSettings:
    """How calls are recorded.

    Attributes:
        out: Dataset directory, local; shards are added to one that is there.
        upstreams: Roots of the engines, all with the same model.
        upstream_api_key: Sent to them; None: the client's own, unless that names a session.
        served_model_name: Name of the model for clients; None: the engines' own.
        admin_key: Who has it may open sessions and set the policy version; then every session needs
            the key it was opened with. None: whoever can connect may.
        policy_version: Of the engines' weights, until they are said to have others.
        idle_timeout_s: A session without a call for so long is abandoned.
        flush_s: An ended session is in a shard after so long.
        max_request_bytes: Of a body.
        max_concurrency: Calls under way at once; others wait.
        on_full: What to do when a call cannot be written: `refuse` it, or `serve` it unrecorded.
        unassigned: Calls outside of any session: a session each (`keep`), or `refuse`.
        end_open: Whether sessions that are open at the end are ended, without an outcome.
        exact_prefix: Directory of the engines' tokenizer: growing chats are continued by token.
        logprobs_mode: What the engines' log-probabilities are of; None: unknown.
    """

    out: str
    upstreams: tuple[str, ...]
    upstream_api_key: str | None = None
    served_model_name: str | None = None
    admin_key: str | None = None
    policy_version: int | None = None
    idle_timeout_s: float = 1800.0
    flush_s: float = 2.0
    max_request_bytes: int = 64 << 20
    max_concurrency: int = 1024
    on_full: Literal["refuse", "serve"] = "refuse"
    unassigned: Literal["keep", "refuse"] = "keep"
    end_open: bool = False
    exact_prefix: str | None = None
    logprobs_mode: LogprobsMode | None = None
