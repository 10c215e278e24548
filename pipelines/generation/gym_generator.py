"""Implement SkyRL's generator interface: `async generate(GeneratorInput) -> GeneratorOutput`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa

from pipelines.generation.aggregation import ENVIRONMENT, environment_metrics
from pipelines.generation.config import GenerateConfig, with_sampling_params
from pipelines.generation.dataset import rows_of
from pipelines.generation.engines.base import Engine
from pipelines.generation.environments import environment_of
from pipelines.generation.generator import Generator
from pipelines.generation.tasks import Task, conversation
from pipelines.generation.user_generator import GeneratorInput
from pipelines.merging.merge import merge_table
from pipelines.rewards import place_rewards_table
from pipelines.statistics.metrics import rollout_metrics
from rollout_io.formats.skyrl_fields import GeneratorOutput, TrajectoryID
from rollout_io.formats.skyrl_generator_output import Failed, to_generator_output
from rollout_io.formats.skyrl_output_columns import trajectory_identity
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import InputError
from schemas.rules import fix_of


class GymGenerator:
    """SkyRL's `GeneratorInterface`, implemented with environments or an agent.

    Args:
        engine: An engine whose context has been entered.
        tokenizer: Tokenizer of the engine, with the configured chat template.
        config: Settings; `sampling_params` of a call override them.
        failed: Rows to replace with placeholders if a trajectory fails: its entire `group`, as in
            SkyRL, or only the `trajectory`.

    Example:
        >>> output = await GymGenerator(engine, tokenizer, config).generate(
        ...     {
        ...         "prompts": [[{"role": "user", "content": "2+2?"}]],
        ...         "env_classes": ["gsm8k"],
        ...         "env_extras": [{"reward_spec": {"ground_truth": "4"}}],
        ...     }
        ... )
        >>> output["response_ids"], output["rewards"], output["loss_masks"]
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        config: GenerateConfig,
        *,
        failed: Failed = "group",
    ) -> None:
        self.engine, self.tokenizer, self.config, self.failed = engine, tokenizer, config, failed

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Generate one trajectory per prompt, in order.

        Args:
            input_batch: `prompts` (conversations, each repeated once per attempt) and optionally
                `env_classes`, `env_extras`, `sampling_params` (with vLLM's names) and
                `trajectory_ids` (default `(index, 0)`).

        Returns:
            A GeneratorOutput with one row per trajectory and a reward per token. With an agent or
            `history = step_wise`, it has one row per step (SkyRL's `step_wise_trajectories`), and
            each trajectory's last row has its return, where SkyRL's trainer expects it.

        Raises:
            InputError: The batch is invalid; `one_sequence`: a trajectory is not a single sequence
                because its environment replaced an action; or any error of `Generator.run`.
        """
        tasks = tasks_of(input_batch)
        own = dataclasses.replace(self.config, generator=None)
        config = with_sampling_params(own, input_batch.get("sampling_params") or {})
        generator = Generator(self.engine, self.tokenizer, config)
        generator.check(tasks)
        finished = await generator.collect(tasks)
        rows = rows_of(finished)
        is_step_wise = config.agent is not None or config.history == "step_wise"
        table = rows if is_step_wise else _one_row_each(rows)
        output = to_generator_output(place_rewards_table(table), self.failed, config.outcome)
        per: Literal["step", "trajectory"] = "step" if is_step_wise else "trajectory"
        metrics = rollout_metrics(rows, per=per, outcome=config.outcome)
        has = config.uses_environments
        names = {t.instance_id: environment_of(t, config) for t in tasks if has}
        aggregated, problems = await environment_metrics(rows, names, config.env_timeout_s)
        for text in problems:
            warnings.warn(text, stacklevel=2)
        if aggregated:
            metrics = {k: v for k, v in metrics.items() if not k.startswith(ENVIRONMENT)}
        output["rollout_metrics"] = metrics | aggregated
        return output


def tasks_of(batch: GeneratorInput) -> list[Task]:
    """Convert a GeneratorInput to tasks.

    Raises:
        InputError: `generator_input`: there are no prompts, lists differ in length, or an id occurs
            twice; `tasks`, `message`: a prompt is invalid.
    """
    prompts: Sequence[Any] = batch.get("prompts") or []
    if not prompts:
        raise _bad("prompts", "an empty list", "at least one prompt")
    optional: dict[str, Sequence[Any] | None] = {
        "env_classes": batch.get("env_classes"),
        "env_extras": batch.get("env_extras"),
        "trajectory_ids": batch.get("trajectory_ids"),
    }
    given: dict[str, list[Any]] = {}
    for name, values in optional.items():
        given[name] = list(values) if values is not None else [None] * len(prompts)
        if len(given[name]) != len(prompts):
            raise _bad(name, f"{len(given[name])} entries", f"{len(prompts)}, one per prompt")
    tasks = []
    for index, prompt in enumerate(prompts):
        own = given["trajectory_ids"][index]
        whose = TrajectoryID(str(index), 0) if own is None else trajectory_identity(own, index)
        task = Task(
            instance_id=whose.instance_id,
            repetition_id=whose.repetition_id,
            prompt=conversation(prompt, f"prompts[{index}]"),
            env_class=given["env_classes"][index],
            extras=given["env_extras"][index] or {},
            source=f"prompts[{index}]",
        )
        tasks.append(task)
    ids = [task.trajectory_id for task in tasks]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise _bad("trajectory_ids", f"{twice!r} twice", "unique ids")
    return tasks


def _one_row_each(rows: pa.Table) -> pa.Table:
    merged = merge_table(rows)
    last = merged.column("is_last_step").to_pylist()
    if not all(last):
        where = f"trajectory {merged.column('trajectory_id')[last.index(False)].as_py()!r}"
        finding = "the steps form several sequences because the environment replaced an action"
        raise InputError("one_sequence", where, finding, hint=fix_of("one_sequence"))
    return merged


def _bad(name: str, got: str, expected: str) -> InputError:
    return InputError("generator_input", f"GeneratorInput, {name}", got, expected)
