"""SkyRL's generator interface: call a custom generator and check its output, and `GymGenerator`.

A custom generator is called group by group; `GymGenerator` implements the interface with environments
or an agent.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.generation.config import GenerateConfig, sampling_params, with_sampling_params
from pipelines.generation.engines.base import Engine, Watched
from pipelines.generation.environments import ENVIRONMENT, environment_metrics, environment_of
from pipelines.generation.generator import Generator
from pipelines.generation.tasks import Finished, Task, conversation, finished_of, rows_of
from pipelines.generation.user_code import in_time, without_exit
from pipelines.merging.merge import merge_table
from pipelines.rewards import place_rewards_table
from pipelines.statistics.metrics import rollout_metrics
from rollout_io.formats.exporting import Failed
from rollout_io.formats.parsing.bodies import sampling_extra
from rollout_io.formats.skyrl_fields import ROLLOUT_METRICS, GeneratorOutput, TrajectoryID, to_json
from rollout_io.formats.skyrl_generator_output import to_generator_output
from rollout_io.formats.skyrl_output_columns import table_of, trajectory_identity
from rollout_io.plugins import resolve
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.checker import validate
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import ConfigError, InputError, RolloutError
from schemas.rules import fix_of

if TYPE_CHECKING:
    from pipelines.harness.launchers import Endpoint

TrainingPhase = Literal["train", "eval"]

_RULE = "generator"


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


class OwnGenerator:
    """The generator named by `config.generator`, whose output is converted to rows.

    Args:
        engine: Passed to the generator; its context must be entered before the first call.
        tokenizer: Passed to the generator.
        config: Passed to the generator, which is constructed on the first call.
        phase: Purpose of the generator's batches.
        endpoint: OpenAI-compatible endpoint of the engine, which the generator reads as
            `engine.endpoint` (`base_url`, `model`, `api_key`); None: it has none.

    Raises:
        ConfigError: `generator`: the class does not exist or has no `async def generate`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        config: GenerateConfig,
        phase: TrainingPhase,
        endpoint: Endpoint | None = None,
    ) -> None:
        assert config.generator is not None
        self._engine, self._tokenizer, self._config = Watched(engine), tokenizer, config
        self._engine.endpoint = endpoint
        self._phase: TrainingPhase = phase
        self._make = resolve(config.generator, _RULE)
        self._made: GeneratorInterface | None = None
        if inspect.isclass(self._make):
            _check_interface(self._make, config.generator)

    async def finish(self, tasks: Sequence[Task]) -> list[Finished]:
        """Generate a group's trajectories; all fail if the call fails or its output is invalid.

        Raises:
            ConfigError: `generator`: the generator cannot be constructed.
            EngineError: `engine_down`, `engine_answer`: the engine fails.
        """
        made = self._generator()
        where = f"generator {self._config.generator}, group {tasks[0].instance_id!r}"
        version = self._engine.policy_version
        call = without_exit(made.generate(self._input(tasks, version)))
        try:
            output = await in_time(call, self._config.agent_timeout_s, _RULE, where)
            finished = self._checked(output, tasks, version, where)
        except RolloutError as error:
            finished = [finished_of(task, [], error) for task in tasks]
        is_whole = all(one.error is None for one in finished)
        if self._engine.failure is not None and not is_whole:
            raise self._engine.failure
        return finished

    def _generator(self) -> GeneratorInterface:
        if self._made is None:
            name = str(self._config.generator)
            try:
                made = self._make(self._engine, self._tokenizer, self._config)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                finding = f"cannot construct it from (engine, tokenizer, config): {reason}"
                raise ConfigError(_RULE, name, finding) from error
            _check_interface(made, name)
            self._made = made
        return self._made

    def _input(self, tasks: Sequence[Task], version: int) -> GeneratorInput:
        return {
            "prompts": [copy.deepcopy(list(task.prompt)) for task in tasks],
            "env_classes": [task.env_class or self._config.environment for task in tasks],
            "env_extras": [copy.deepcopy(dict(task.extras)) for task in tasks],
            "sampling_params": sampling_params(self._config),
            "trajectory_ids": [TrajectoryID(t.instance_id, t.repetition_id) for t in tasks],
            "batch_metadata": BatchMetadata(version, self._phase),
        }

    def _checked(
        self, output: Any, tasks: Sequence[Task], version: int, where: str
    ) -> list[Finished]:
        """Check the output and split its rows by task, in order."""
        try:
            given = _with_ids(output, tasks)
            table, warnings = table_of(given, None, "drop")
            table = table.replace_schema_metadata(None)
            validate(table, vocab_size=self._tokenizer.vocab_size)
            found = table.column("trajectory_id").unique().to_pylist()
            _check_trajectories(found, [task.trajectory_id for task in tasks])
        except RolloutError as error:
            raise error.at(f"{where}, {error.where}") from error
        except Exception as error:  # user-defined classes may raise anything
            finding = f"invalid GeneratorOutput: {type(error).__name__}: {error}"
            raise InputError("generator_output", where, finding) from error
        rows = _with_sampling(table, self._config, version)
        rows, others = _with_metrics(rows, output)
        if others:
            named = ", ".join(others)
            warnings.append(f"rollout_metrics that are not finite numbers were dropped: {named}")
        names = rows.column("trajectory_id")
        remarks = [f"generator {self._config.generator}: {warning}" for warning in warnings]
        return [
            Finished(
                task=task,
                rows=rows.filter(pc.equal(names, task.trajectory_id)),
                warnings=remarks,
            )
            for task in tasks
        ]


def _with_sampling(table: pa.Table, config: GenerateConfig, policy_version: int) -> pa.Table:
    """Add sampling settings and the policy version to rows that did not fail, where they are missing."""
    error = "error" in table.column_names
    is_alive = pc.is_null(table.column("error")) if error else pa.array([True] * table.num_rows)
    values = {
        "policy_version": policy_version,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or 0,
        "sampling_extra": sampling_extra({**config.sampling_extra, "min_p": config.min_p}),
    }
    for name, value in values.items():
        if value is not None and name not in table.column_names:
            kind = COLUMN_BY_NAME[name].type
            column = pc.if_else(is_alive, pa.scalar(value, kind), pa.scalar(None, kind))
            table = table.append_column(pa.field(name, kind), column)
    return table


def _with_metrics(rows: pa.Table, output: Mapping[str, Any]) -> tuple[pa.Table, list[str]]:
    """Store the group's `rollout_metrics` in one row; return also the names of other values.

    The row belongs to a trajectory that did not fail, if there is one, because retries replace
    failed ones.
    """
    text, others = to_json(output.get(ROLLOUT_METRICS))
    if text is None:
        return rows, others
    error = "error" in rows.column_names
    alive = np.asarray(pc.is_null(rows.column("error"))) if error else np.ones(len(rows), np.bool_)
    row = int(np.argmax(alive))
    values = [text if index == row else None for index in range(len(rows))]
    return rows.append_column(ROLLOUT_METRICS, pa.array(values, pa.string())), others


def _check_interface(made: Any, name: str) -> None:
    if not inspect.iscoroutinefunction(getattr(made, "generate", None)):
        finding = "the generator has no `async def generate(self, input_batch)`"
        raise ConfigError(_RULE, name, finding)


def _with_ids(output: Any, tasks: Sequence[Task]) -> Mapping[str, Any]:
    """Add trajectory ids to an output that lacks them; it must have one row per task, in order."""
    if not isinstance(output, Mapping):
        finding, expected = type(output).__name__, "a GeneratorOutput: a dict of lists"
        raise InputError("generator_output", "output", finding, expected)
    given = dict(output)
    if given.get("trajectory_ids") is not None or given.get("is_last_step") is not None:
        return given
    responses = given.get("response_ids")
    if isinstance(responses, Sequence) and len(responses) != len(tasks):
        finding = f"{len(responses)} rows without trajectory_ids"
        expected = f"{len(tasks)}, one for each prompt"
        raise InputError("trajectories", "response_ids", finding, expected)
    given["trajectory_ids"] = [TrajectoryID(t.instance_id, t.repetition_id) for t in tasks]
    return given


def _check_trajectories(found: Sequence[str], asked: Sequence[str]) -> None:
    """Raise if trajectories are missing, or were not requested."""
    lost = [name for name in asked if name not in set(found)]
    unknown = [name for name in found if name not in set(asked)]
    if lost or unknown:
        parts = [f"{len(found) - len(unknown)} of {len(asked)} trajectories"]
        parts += [f"missing {', '.join(lost)}"] if lost else []
        parts += [f"plus unknown {', '.join(unknown)}"] if unknown else []
        expected = "exactly the requested trajectories"
        hint = 'return a failed trajectory as a placeholder row: prompt [0], response [0], reward 0, stop reason "error"'
        raise InputError("trajectories", "trajectory_ids", ", ".join(parts), expected, hint)


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
