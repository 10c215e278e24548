"""Configuration of `rollouts generate`, and its `sampling_params` as in vLLM and SkyRL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipelines.generation.engines.base import Sampling
from pipelines.harness.commands import shown
from pipelines.origin_guard import is_host_name, is_loopback
from rollout_io.configuration import Count, CountOrZero, Positive, load_record, out_of_bounds
from schemas.errors import ConfigError, InputError
from schemas.metadata import Outcome

History = Literal["append", "one_message", "retokenize", "step_wise"]

HOW_IT_RUNS = frozenset(
    {
        *("tasks", "out", "engine", "urls", "dtype", "engine_args", "policy_version"),
        *("group_size", "groups_per_shard", "requests_per_s", "max_concurrency"),
        *("trajectories_per_s", "host", "port", "served_model_name"),
        *("max_retries", "env_timeout_s", "agent_timeout_s"),
    }
)
"""Keys that may change when a dataset is resumed: existing trajectories do not depend on them."""
SYNONYMS = {
    "env": "environment",
    "env_name": "environment",
    "max_tokens": "max_response_tokens",
    "max_new_tokens": "max_response_tokens",
    "num_generations": "group_size",
    "n_samples_per_prompt": "group_size",
    "concurrency": "max_concurrency",
}
"""Keys for names that other tools use."""
_CONFIG_KEYS = {
    "max_tokens": "max_response_tokens",
    "max_generate_length": "max_response_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "seed")},
}
_ALWAYS = {"skip_special_tokens": True, "include_stop_str_in_output": True, "logprobs": 1}
_IMPLIED = frozenset({*_ALWAYS, "return_token_ids"})


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """All settings of `rollouts generate`.

    Raises:
        ConfigError: A value is out of range, or two values contradict each other.

    Example:
        >>> GenerateConfig(tasks="t.jsonl", model="smollm2", out="ds", environment="gsm8k").history
        'append'
    """

    tasks: str
    """Task file, JSON Lines or Parquet, one task per line or row: `prompt` (messages or text) and
    optionally `instance_id` and `env_class`; all other fields are passed to the environment as
    extras. Or a directory of Harbor's task directories: `instruction.md` is the prompt, and the
    extra `path` the task directory."""
    model: str
    """Hugging Face model directory: tokenizer, chat template, and the model for `transformers`."""
    out: str
    """Rollout dataset to write or to resume; existing trajectories are not generated again."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples: the model in this process with Transformers, or vLLM: servers at `urls`, or,
    without `urls`, vLLM in this process."""
    urls: tuple[str, ...] = ()
    """vllm: `http://HOST:PORT` of each server; all calls of a trajectory go to the same server."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the weights of an engine in this process. None: bfloat16 on a CUDA device, float32
    on a CPU."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """vllm without `urls`: arguments of vLLM's `EngineArgs`. `gpu_memory_utilization` is 0.5 unless set
    here."""
    policy_version: CountOrZero = 0
    """Version of the engine's weights, for the column `policy_version`; >= 0."""

    environment: str | None = None
    """Environment of tasks without `env_class`: a skyrl-gym name, or `module:Class`."""
    env_config: dict[str, Any] = field(default_factory=dict)
    """Passed to every environment as `env_config`."""
    env_configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys that extend or override `env_config`, by environment name."""
    agent: str | None = None
    """Instead of an environment: an `async def agent(client, task) -> reward`, as
    `module:function`."""
    harness: str | None = None
    """Instead of an environment: a function `harness(endpoint, task) -> reward`, as
    `module:function`, or a command line; each trajectory calls the model at its own base URL."""
    generator: str | None = None
    """Instead of an environment, agent or harness: a class with SkyRL's `async def
    generate(GeneratorInput) -> GeneratorOutput`, as `module:Class`; constructed as `Class(engine,
    tokenizer, config)` and called once per group."""
    generator_config: dict[str, Any] = field(default_factory=dict)
    """Settings that a custom generator reads from `config.generator_config`."""

    host: str = "127.0.0.1"
    """harness, generator: address on which the model is served. On any other than loopback, each
    trajectory has a token, which its harness gets as `api_key` and in OPENAI_API_KEY, and requests
    without it are rejected."""
    port: CountOrZero = 0
    """harness: port of the base URLs; 0 picks a free one. generator: if the port or
    `served_model_name` is set, the engine is served there too, at `engine.endpoint.base_url`."""
    served_model_name: str | None = None
    """harness, generator: name of the model; requests for any other model get status 404. None: the
    engine's, and requests may use any name."""

    history: History = "append"
    """How the prompt of the next turn is built. `append`: sampled tokens are kept, and observations
    are appended as messages; `one_message`: observations are appended as plain text in the same
    assistant message; `step_wise`: the chat template renders all messages again for every turn;
    `retokenize`: like `step_wise`, but the model is trained on the final rendering of the entire
    conversation, using the template's generation marks."""
    chat_template: str | None = None
    """Name or file of a chat template that replaces the tokenizer's. With agents and harnesses on
    vLLM, specify the template that the servers were started with."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking = false`."""
    group_size: Count = 1
    """Trajectories per task; >= 1."""
    max_turns: Count = 100
    """Maximum number of turns of a trajectory; >= 1. A trajectory that its environment has not ended by
    then has the stop reason `max_turns`. Environments receive it as an extra."""
    max_input_tokens: Count | None = None
    """Maximum length of a prompt, in tokens; >= 1. A trajectory ends before a turn that would exceed
    it, with stop reason `context_length`. None: the model's context is the limit."""

    max_response_tokens: Count = 1024
    """Maximum number of tokens sampled per turn; >= 1."""
    temperature: float = 1.0
    """Sampling temperature, >= 0; 0 takes the most likely token."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities sum to at least this, in (0, 1]; 1: all."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens; >= 1. None: all."""
    min_p: float = 0.0
    """Minimum probability of a token relative to the most likely one, in [0, 1); 0: all tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; they are included in its response."""
    seed: int | None = None
    """Base seed: each call's seed is derived from it, the trajectory and the turn. None: calls have
    no seed, which is faster on vLLM."""
    sampling_extra: dict[str, Any] = field(default_factory=dict)
    """vllm: additional fields of every request."""

    zero_reward_on_non_stop: bool = False
    """Set all rewards of a trajectory to 0 if its last turn was cut off."""
    mask_overlong: bool = False
    """Do not train on trajectories whose last turn ran out of tokens; rewards are kept."""

    max_concurrency: Count = 64
    """Maximum number of concurrent trajectories; >= 1."""
    requests_per_s: Positive | None = None
    """Maximum number of calls to the servers at `urls` per second; > 0. None: unlimited."""
    trajectories_per_s: Positive | None = None
    """Maximum number of trajectories started per second; > 0. None: unlimited."""
    max_retries: CountOrZero = 0
    """Retries of a failed trajectory; >= 0. Only the last attempt is written."""
    env_timeout_s: Positive = 300.0
    """Time limit for one environment call, in seconds; > 0. The trajectory fails when it expires."""
    agent_timeout_s: Positive = 3600.0
    """Time limit for one run of an agent or harness, or one call of a generator, in seconds; > 0.
    Trajectories fail when it expires."""
    groups_per_shard: Count = 8
    """Number of complete groups per shard; >= 1. The last shard may have fewer."""

    def __post_init__(self) -> None:
        for key, finding, expected in _breaches(self):
            raise ConfigError("config_value", key, finding, expected)
        _ = self.sampling

    @property
    def outcome(self) -> Outcome:
        """How returns are computed: `sum` for environments, which reward each turn; else `last`."""
        return "sum" if self.uses_environments else "last"

    @property
    def uses_environments(self) -> bool:
        """True if tasks run in environments."""
        return self.agent is None and self.harness is None and self.generator is None

    @property
    def is_colocated(self) -> bool:
        """True if vLLM samples in this process."""
        return self.engine == "vllm" and not self.urls

    @property
    def sampling(self) -> Sampling:
        """Sampling settings for every turn, without the seed."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_response_tokens,
            stop=self.stop,
            extra=self.sampling_extra,
        )


def identity(config: GenerateConfig) -> dict[str, Any]:
    """Return the settings that all trajectories of a dataset share."""
    values = plain_values(config)
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return {k: v for k, v in plain.items() if k not in HOW_IT_RUNS}


def plain_values(config: GenerateConfig) -> dict[str, Any]:
    """Return the configuration as plain values, without credentials, so that it can be saved."""
    values = dataclasses.asdict(config)
    if config.harness is not None:
        values["harness"] = shown(config.harness)
    return values


def load_generate_config(
    toml_path: str | Path | None, overrides: Sequence[str] = (), *, out: str | None = None
) -> GenerateConfig:
    """Read a configuration with `rollout_io.configuration.load_record`; `out` overrides the file.

    Raises:
        ConfigError: `config_file`: the file is unreadable; `config_key`: a key is unknown;
            `config_value`, `sampling`: a value is invalid.
    """
    required = {"tasks": "a file", "model": "a model directory", "out": "a directory (--out DS)"}
    examples = {"stop": '["</answer>"]', "urls": '["http://127.0.0.1:8000"]'}
    return load_record(
        GenerateConfig,
        toml_path,
        overrides,
        {"out": out},
        required=required,
        list_examples=examples,
        moved=SYNONYMS,
    )


def _breaches(c: GenerateConfig) -> Iterator[tuple[str, str, str]]:
    yield from out_of_bounds(c)
    runs = {"agent": c.agent, "environment": c.environment, "harness": c.harness and "a harness"}
    given = {name: value for name, value in runs.items() if value is not None}
    if len(given) > 1:
        yield " and ".join(given), " and ".join(given.values()), "only one of them"
    for name in given.keys() & {"agent", "harness"}:
        if c.history != "append":
            yield f"history and {name}", c.history, "append, as only environments use history"
    if c.harness is not None and c.requests_per_s is not None:
        expected = "no requests_per_s with a harness; set trajectories_per_s"
        yield "requests_per_s and harness", str(c.requests_per_s), expected
    if not is_host_name(c.host):
        yield "host", repr(c.host), "an address or host name, such as 0.0.0.0"
    if c.port >= 2**16:
        yield "port", str(c.port), "at most 65535"
    for key, usual in (("host", "127.0.0.1"), ("port", 0), ("served_model_name", None)):
        if getattr(c, key) != usual and c.harness is None and c.generator is None:
            yield key, repr(getattr(c, key)), "a harness or a generator, which alone use it"
    if c.generator is not None and not is_loopback(c.host):
        yield "host", repr(c.host), "loopback, because a generator's endpoint has no key"
    if c.served_model_name == "":
        yield "served_model_name", "''", "a name"
    if c.generator is not None and given.keys() & {"agent", "harness"}:
        expected = f"no {' or '.join(given)} with a generator"
        yield f"{' and '.join(given)} and generator", str(c.generator), expected
    for key in ("zero_reward_on_non_stop", "mask_overlong"):
        if c.generator is not None and getattr(c, key):
            yield f"{key} and generator", "true", "false, as the generator sets rewards and masks"
    if c.urls and c.engine != "vllm":
        yield "engine and urls", f"{c.engine} and {list(c.urls)}", "urls only if engine = vllm"
    if c.engine_args and not c.is_colocated:
        expected = "engine = vllm without urls, because servers have their own arguments"
        yield "engine_args", str(c.engine_args), expected
    if c.requests_per_s is not None and not c.urls:
        yield "requests_per_s", str(c.requests_per_s), "urls, because it limits calls of servers"


def sampling_params(config: GenerateConfig) -> dict[str, Any]:
    """Convert a configuration to vLLM's `sampling_params`, without the seed, which differs per call.

    Example:
        >>> config = GenerateConfig(tasks="t", model="m", out="o", temperature=0.5)
        >>> params = sampling_params(config)
        >>> params["max_tokens"], params["temperature"], params["top_k"], params["stop"]
        (1024, 0.5, -1, None)
    """
    return {
        **_ALWAYS,
        "max_tokens": config.max_response_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": -1 if config.top_k is None else config.top_k,
        "min_p": config.min_p,
        "stop": list(config.stop) or None,
        **config.sampling_extra,
    }


def with_sampling_params(config: GenerateConfig, params: Mapping[str, Any]) -> GenerateConfig:
    """Apply a GeneratorInput's `sampling_params`, which are named as in vLLM, to a configuration.

    Raises:
        InputError: `generator_input`: `n` requests several samples per prompt.
        ConfigError: `config_value`, `sampling`: a value is invalid.

    Example:
        >>> changed = with_sampling_params(
        ...     config, {"max_tokens": 8, "top_k": -1, "bad_words": ["a"]}
        ... )
        >>> changed.max_response_tokens, changed.top_k, changed.sampling_extra
        (8, None, {'bad_words': ['a']})
    """
    if params.get("n", 1) != 1:
        hint = "repeat the prompt instead, each time with a different repetition_id"
        where, finding = "GeneratorInput, sampling_params", f"n = {params['n']}"
        raise InputError("generator_input", where, finding, "n = 1", hint)
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
