"""Types of SkyRL's GeneratorOutput, as this package accepts and returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryID:
    """Ids of a GeneratorOutput row's trajectory; equal to any object with the same ids, as in SkyRL.

    Attributes:
        instance_id: The task; its trajectories form a group.
        repetition_id: Index of the attempt, from 0.

    Example:
        >>> TrajectoryID("shop-1", 0).to_string()
        'shop-1_0'
    """

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return `{instance_id}_{repetition_id}`."""
        return f"{self.instance_id}_{self.repetition_id}"

    def __eq__(self, other: object) -> bool:
        own = self.instance_id, self.repetition_id
        return own == tuple(getattr(other, f.name, None) for f in fields(self))

    def __hash__(self) -> int:
        return hash((self.instance_id, self.repetition_id))


class GeneratorOutput(TypedDict, total=False):
    """Output of a SkyRL generator: lists with one entry per row of P prompt and R response tokens.

    The first four fields are required. A row is a trajectory or, with `is_last_step`, one of its
    steps.
    """

    prompt_token_ids: Sequence[Sequence[int]]
    """[N][P] ids."""
    response_ids: Sequence[Sequence[int]]
    """[N][R] ids."""
    rewards: Sequence[float] | Sequence[Sequence[float]]
    """[N] one per row, or [N][R] one per response token; never mixed."""
    loss_masks: Sequence[Sequence[int]]
    """[N][R] 1 where the token is trained on, else 0."""
    stop_reasons: Sequence[str | None] | None
    """[N] reasons why generation ended."""
    rollout_metrics: Mapping[str, Any] | None
    """Metrics of the entire output."""
    rollout_logprobs: Sequence[Sequence[float]] | None
    """[N][R] nats, 0 at tokens that were not sampled."""
    trajectory_ids: Sequence[TrajectoryID] | None
    """[N] objects or mappings with `instance_id` and `repetition_id`."""
    trajectory_generation_times: Sequence[float | None] | None
    """[N] times in seconds."""
    rollout_expert_indices: Sequence[Any] | None
    """[N] arrays [tokens, layers, topk] of the experts of the leading tokens of prompt and response."""
    is_last_step: Sequence[bool] | None
    """[N] true for the last step of a trajectory; only in step-wise outputs."""
    env_metrics: Sequence[Mapping[str, float] | None] | None
    """[N] metrics of the environment by name."""
    trajectory_time_splits: Mapping[str, Sequence[float | None]] | None
    """{name: [N]} parts of the generation times in seconds; since SkyRL 0.4."""
    rollout_sample_support: Sequence[Any] | None
    """[N] arrays [R, k] of token ids that the sampler could draw, padded with -1; since SkyRL 0.4."""
    token_source: Sequence[str] | None
    """[N] `engine` (exact ids) or `retokenized` (from text); SkyRL ignores it. Missing: `engine`."""
