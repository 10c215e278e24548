"""The one record that configures a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipelines.generation.engine import Sampling
from rollout_io.configuration import load_record
from schemas.errors import RolloutError

History = Literal["append", "one_message", "retokenize", "step_wise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Everything that decides what `rollouts generate` does.

    Raises:
        RolloutError: A value is out of its range, or two values contradict each other.

    Example:
        >>> GenerateConfig(tasks="t.jsonl", model="smollm2", out="ds", environment="gsm8k").history
        'append'
    """

    tasks: str
    """Tasks: JSON Lines or Parquet, a task a line: `prompt` (messages, or text), and where wanted
    `instance_id` and `env_class`; every other field goes to the environment as an extra."""
    model: str
    """Hugging Face model directory: tokenizer and chat template, and what `transformers` samples from."""
    out: str
    """Rollout dataset to write, or to go on with: what it holds is not generated again."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Who samples: the model in this process, or vLLM servers at `urls`."""
    urls: tuple[str, ...] = ()
    """vllm: `http://HOST:PORT` of each server; one trajectory's calls go to one of them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """transformers: of the weights."""
    policy_version: int = 0
    """Of the weights that the engine has: the column of that name; >= 0."""

    environment: str | None = None
    """Of tasks without `env_class`: a name that skyrl-gym knows, or your own `module:Class`."""
    env_config: dict[str, Any] = field(default_factory=dict)
    """Given to every environment as `env_config`."""
    agent: str | None = None
    """In place of an environment: `module:function` of an `async def agent(client, task) -> reward`."""

    history: History = "append"
    """How a conversation goes on. `append`: sampled tokens stay as they are, observations are
    appended as messages; `one_message`: as plain text in the same assistant message; `step_wise`:
    the messages are rendered anew for every turn; `retokenize`: so too, and what trains is the
    rendering of the whole conversation at its end, by the template's generation marks."""
    chat_template: str | None = None
    """Name or file of a template in place of the tokenizer's own."""
    group_size: int = 1
    """Trajectories of each task; >= 1."""
    max_turns: int = 1
    """Turns after which a trajectory ends, done or not; >= 1. Environments get it as an extra."""
    max_input_tokens: int | None = None
    """Longest prompt of any turn; >= 1. A trajectory ends before a longer one, with stop reason
    `context_length`. None: the model's context is the limit."""

    max_response_tokens: int = 1024
    """Sampled in one turn, at most; >= 1."""
    temperature: float = 1.0
    """>= 0; 0 takes the most likely token."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int | None = None
    """>= 1. None: off."""
    min_p: float = 0.0
    """In [0, 1)."""
    stop: tuple[str, ...] = ()
    """Strings after which a turn ends; they are part of its response."""
    seed: int | None = None
    """Of every call's own seed, together with its trajectory and turn. None: the engine's own random
    numbers; vLLM is quicker with these."""
    sampling_extra: dict[str, Any] = field(default_factory=dict)
    """vllm: further fields of each request."""

    zero_reward_on_non_stop: bool = False
    """All rewards of a trajectory are 0 if its last turn did not end by itself."""
    mask_overlong: bool = False
    """Nothing trains of a trajectory whose last turn ran out of tokens; its rewards stay."""

    max_concurrency: int = 64
    """Trajectories under way at once; >= 1."""
    requests_per_s: float | None = None
    """vllm: calls that begin in a second; > 0. None: any number."""
    env_timeout_s: float = 300.0
    """One call of an environment; > 0. After it the trajectory has failed."""
    agent_timeout_s: float = 3600.0
    """One run of an agent; > 0. After it the trajectory has failed."""
    groups_per_shard: int = 8
    """Complete groups that are written together; >= 1. Fewer at the end, and when a run is ended."""

    def __post_init__(self) -> None:
        for key, got, expected in _breaches(self):
            raise RolloutError("config_value", key, got, expected)
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """How every turn is sampled, its seed aside."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_response_tokens,
            stop=self.stop,
            extra=self.sampling_extra,
        )


HOW_IT_RUNS = frozenset(
    {
        *(
            "tasks",
            "out",
            "engine",
            "urls",
            "dtype",
            "policy_version",
            "group_size",
            "requests_per_s",
        ),
        *("max_concurrency", "env_timeout_s", "agent_timeout_s", "groups_per_shard"),
    }
)
"""Keys that may differ when a dataset is gone on with: the trajectories it holds stay what they are."""


def identity(config: GenerateConfig) -> dict[str, Any]:
    """What all trajectories of one dataset have in common."""
    values = dataclasses.asdict(config)
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return {k: v for k, v in plain.items() if k not in HOW_IT_RUNS}


def load_generate_config(
    toml_path: str | Path | None, overrides: Sequence[str] = ()
) -> GenerateConfig:
    """Read a configuration: `rollout_io.configuration.load_record`.

    Raises:
        RolloutError: config_file, config_key, config_value, sampling.
    """
    required = {"tasks": "a file", "model": "a model directory", "out": "a directory (--out DS)"}
    examples = {"stop": '["</answer>"]', "urls": '["http://127.0.0.1:8000"]'}
    return load_record(
        GenerateConfig, toml_path, overrides, required=required, list_examples=examples
    )


def _breaches(c: GenerateConfig) -> Iterator[tuple[str, str, str]]:
    whole = ("group_size", "max_turns", "max_input_tokens", "max_response_tokens")
    for key in (*whole, "max_concurrency", "groups_per_shard"):
        value = getattr(c, key)
        if value is not None and value < 1:
            yield key, str(value), "a whole number >= 1"
    if c.policy_version < 0:
        yield "policy_version", str(c.policy_version), "a whole number >= 0"
    for key in ("env_timeout_s", "agent_timeout_s", "requests_per_s"):
        value = getattr(c, key)
        if value is not None and not 0 < value < float("inf"):
            yield key, str(value), "a finite number > 0"
    if c.agent is not None and c.environment is not None:
        yield "agent and environment", f"{c.agent} and {c.environment}", "one of them"
    if c.agent is not None and (c.history != "append" or c.chat_template is not None):
        got = "a key that is of environments alone"
        yield "history, chat_template and agent", got, "neither: an agent has its own history"
    if (c.engine == "vllm") != bool(c.urls):
        yield "engine and urls", f"{c.engine} and {list(c.urls)}", "urls with vllm, and only there"
