"""SkyRL's generator interface: its input types and protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

from rollout_io.formats.skyrl_fields import GeneratorOutput, TrajectoryID

__all__ = [
    "BatchMetadata",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "TrainingPhase",
    "TrajectoryID",
]

TrainingPhase = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Purpose of a batch.

    Attributes:
        global_step: `policy_version` of the weights that sample the batch: in the RL loop, the
            number of iterations completed before it was sampled.
        training_phase: `train` or `eval`.
    """

    global_step: int
    training_phase: TrainingPhase


class GeneratorInput(TypedDict, total=False):
    """Trajectories to generate: lists with one entry per trajectory; only `prompts` is required."""

    prompts: Sequence[Sequence[Mapping[str, Any]]]
    """OpenAI-style messages; a prompt is repeated for each attempt."""
    env_classes: Sequence[str | None] | None
    """Environments of the tasks."""
    env_extras: Sequence[Mapping[str, Any]] | None
    """Other fields of the tasks."""
    sampling_params: Mapping[str, Any] | None
    """Sampling parameters with vLLM's names, for all trajectories."""
    trajectory_ids: Sequence[TrajectoryID] | None
    """Ids of the trajectories."""
    batch_metadata: BatchMetadata | None
    """Purpose of the batch."""


class GeneratorInterface(Protocol):
    """Generator of trajectories with the interface of SkyRL's `GeneratorInterface`."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Generate one trajectory per prompt.

        Returns:
            Rows of exactly these trajectories: either one row each, in order, or any number of rows
            with `trajectory_ids`.
        """
        ...
