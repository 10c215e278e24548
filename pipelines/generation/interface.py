"""SkyRL's generator interface: `async generate(GeneratorInput) -> GeneratorOutput`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engine import Engine
from pipelines.generation.generator import Generator
from pipelines.generation.tasks import Task, conversation
from pipelines.merging import merge_table
from pipelines.metrics import dataset_metrics
from pipelines.rewards import place_rewards_table
from rollout_io.conversion.rows import table_of
from rollout_io.generator_input import trajectory_identity
from rollout_io.generator_output import Failed, to_generator_output
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import RolloutError

_CONFIG_KEYS = {
    "max_tokens": "max_response_tokens",
    "max_generate_length": "max_response_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "seed")},
}
_IMPLIED = frozenset(
    {"logprobs", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids"}
)


class GymGenerator:
    """The generator behind the seeds' `GeneratorInterface`.

    Args:
        engine: Entered already.
        tokenizer: The engine's, with the chat template of the configuration.
        config: How. Of every call, `sampling_params` win over it.
        failed: What becomes placeholder rows where a trajectory fails: its whole `group`, as in the
            reference, or the `trajectory` alone.

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

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """One trajectory for each prompt, in their order.

        Args:
            input_batch: `prompts`, conversations, each one repeated for every attempt at it, and
                optionally `env_classes`, `env_extras`, `sampling_params` (as vLLM calls them) and
                `trajectory_ids` (by default `(index, 0)`).

        Returns:
            A GeneratorOutput with a reward per token: one row a trajectory; of `history =
            step_wise`, one a step.

        Raises:
            RolloutError: The batch is not usable; one_sequence: a trajectory that is no single
                sequence, for its environment replaced an action; and as `Generator.run`.
        """
        tasks = tasks_of(input_batch)
        config = with_sampling_params(self.config, input_batch.get("sampling_params") or {})
        generator = Generator(self.engine, self.tokenizer, config)
        generator.check(tasks)
        finished = await generator.collect(tasks)
        rows = table_of([f.settled for f in finished])
        table = rows if config.history == "step_wise" else _one_row_each(rows)
        output = to_generator_output(place_rewards_table(table), self.failed)
        return output | {"rollout_metrics": _metrics(rows)}


def tasks_of(batch: Mapping[str, Any]) -> list[Task]:
    """The tasks of a GeneratorInput.

    Raises:
        RolloutError: generator_input: no prompts, lists of other lengths, an id twice; tasks and
            message, of a prompt.
    """
    prompts: Sequence[Any] = batch.get("prompts") or []
    if not prompts:
        raise _bad("prompts", "none", "at least one")
    given = {}
    for name in ("env_classes", "env_extras", "trajectory_ids"):
        values = batch.get(name)
        given[name] = list(values) if values is not None else [None] * len(prompts)
        if len(given[name]) != len(prompts):
            raise _bad(name, f"{len(given[name])} entries", f"{len(prompts)}, as prompts")
    tasks = []
    for index, prompt in enumerate(prompts):
        own = given["trajectory_ids"][index]
        name, repetition = (str(index), 0) if own is None else trajectory_identity(own, index)
        task = Task(
            instance_id=name,
            repetition_id=repetition,
            prompt=conversation(prompt, f"prompts[{index}]"),
            env_class=given["env_classes"][index],
            extras=given["env_extras"][index] or {},
            source=f"prompts[{index}]",
        )
        tasks.append(task)
    ids = [task.trajectory_id for task in tasks]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise _bad("trajectory_ids", f"{twice!r} twice", "each once")
    return tasks


def with_sampling_params(config: GenerateConfig, params: Mapping[str, Any]) -> GenerateConfig:
    """A configuration with the sampling of a GeneratorInput, named as vLLM names it.

    Raises:
        RolloutError: generator_input: several samples for one prompt; config_value, sampling.

    Example:
        >>> changed = with_sampling_params(
        ...     config, {"max_tokens": 8, "top_k": -1, "bad_words": ["a"]}
        ... )
        >>> changed.max_response_tokens, changed.top_k, changed.sampling_extra
        (8, None, {'bad_words': ['a']})
    """
    if params.get("n", 1) != 1:
        expected = "1: repeat the prompt, each with its repetition_id"
        raise _bad("sampling_params", f"n = {params['n']}", expected)
    changes: dict[str, Any] = {}
    extra = dict(config.sampling_extra)
    for name, value in params.items():
        if name in _CONFIG_KEYS:
            changes[_CONFIG_KEYS[name]] = value
        elif name not in _IMPLIED | {"n"} and (name, value) != ("min_tokens", 1):
            extra[name] = value
    top_k = changes.get("top_k")
    if top_k is not None and top_k < 1:
        changes["top_k"] = None
    if "stop" in changes:
        stop = changes["stop"] or ()
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return dataclasses.replace(config, **changes, sampling_extra=extra)


def _one_row_each(rows: pa.Table) -> pa.Table:
    merged = merge_table(rows)
    last = merged.column("is_last_step").to_pylist()
    if not all(last):
        where = f"trajectory {merged.column('trajectory_id')[last.index(False)].as_py()!r}"
        got, hint = "several sequences: its environment replaced an action", "history = step_wise"
        raise RolloutError("one_sequence", where, got, "one", hint)
    return merged


def _metrics(rows: pa.Table) -> dict[str, float]:
    found = dataset_metrics(rows).collect()
    pairs = zip(found["metric"].to_list(), found["value"].to_list(), strict=True)
    return {name: value for name, value in pairs if value is not None}


def _bad(name: str, got: str, expected: str) -> RolloutError:
    return RolloutError("generator_input", f"GeneratorInput, {name}", got, expected)
