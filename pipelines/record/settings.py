"""Settings of a recorder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollout_io.configuration import Count, CountOrZero, out_of_bounds
from schemas.errors import ConfigError
from schemas.metadata import LogprobsMode


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSettings:
    """Settings of a recorder.

    Raises:
        ConfigError: `config_value`: a value is out of bounds.

    Attributes:
        out: Local dataset directory; shards are appended to an existing one.
        upstreams: Root URL of each engine; all serve the same model.
        upstream_api_key: Key for the engines; None forwards the client's key, unless that key names
            a session.
        served_model_name: Model name shown to clients; None uses the name that the engines report.
        admin_key: Key required to open sessions and to set the policy version; the calls of a
            session then need the key that was returned when it was opened. None disables keys.
        allowed_hosts: Host names of the recorder besides the address it listens on.
        policy_version: Initial version of the engines' weights.
        idle_timeout_s: Time without a call, in seconds, after which a session is ended as
            abandoned; `math.inf` disables this.
        flush_s: Maximum time until an ended session is written to a shard, in seconds.
        max_request_bytes: Maximum size of a request body.
        max_answer_bytes: Maximum size of an engine's response, streamed or not; one line or event
            of a stream is limited to a quarter of it.
        max_concurrency: Maximum number of concurrent calls; further calls wait.
        on_full: How to handle a call that cannot be written: `refuse` it, or `serve` it without
            recording.
        unassigned: How to handle a call without a session: `keep` it as a new session, or `refuse`
            it.
        end_open: Whether to end open sessions on exit, with an unknown reward.
        exact_prefix: Directory of the engines' tokenizer; if given, follow-up calls of a chat are
            sent as exact token ids.
        logprobs_mode: Distribution of the engines' log-probabilities; None if unknown.
        sampling_defaults: Sampling settings to add to requests that leave them out, so that they are
            recorded: those in a model directory's `generation_config.json`, or `neutral`; None adds
            nothing, and the engines' own defaults apply, unrecorded.
        redact: Whether to replace secrets in what is recorded.
        patterns: Regular expressions of further secrets, by name.
        personal: Whether to replace personal data, too.
        tokenizer: Directory of the engines' model or tokenizer, which `redact` needs, and by whose
            image processor the tokens of pictures are found; None: `exact_prefix`.
    """

    out: str
    upstreams: tuple[str, ...]
    upstream_api_key: str | None = None
    served_model_name: str | None = None
    admin_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    policy_version: CountOrZero | None = None
    idle_timeout_s: float = 1800.0
    flush_s: float = 2.0
    max_request_bytes: Count = 64 << 20
    max_answer_bytes: Count = 64 << 20
    max_concurrency: Count = 1024
    on_full: Literal["refuse", "serve"] = "refuse"
    unassigned: Literal["keep", "refuse"] = "keep"
    end_open: bool = False
    exact_prefix: str | None = None
    logprobs_mode: LogprobsMode | None = None
    sampling_defaults: str | None = None
    redact: bool = False
    patterns: dict[str, str] = field(default_factory=dict)
    personal: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        for key, finding, expected in out_of_bounds(self):
            raise ConfigError("config_value", key, finding, expected)
