"""Configuration of the RL loop: the sections of `rollouts train`, and three tables of its own.

The sections `[data]`, `[batch]`, `[advantage]`, `[loss]`, `[model]`, `[optimizer]` and `[run]` are
those of `rollouts train`; `[loop]`, `[generate]` and `[evaluate]` are the loop's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from pipelines.generation.config import SYNONYMS, GenerateConfig, plain_values
from pipelines.record.secrets import REDACTED
from rollout_io.configuration import (
    Count,
    CountOrZero,
    build,
    check_required,
    checked_values,
    read_values,
    with_options,
)
from rollout_io.configuration_keys import Keys, all_unknown_keys
from rollout_io.dataset.storage import RUN_ROLLOUTS
from schemas.errors import ConfigError, RolloutError
from trainer.checks import check_settings
from trainer.config.functions import own_parameters
from trainer.config.train_config import LIST_EXAMPLES, MOVED, Sections, TrainConfig, default_dtype

Table = TypeVar("Table")
MOST_ITERATIONS = 100_000
ROLLOUTS, DROPPED, UNFINISHED = RUN_ROLLOUTS, "dropped", "unfinished"
EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig(GenerateConfig):
    """The table `[evaluate]` or `[evaluate.NAME]`: interval, and changes to `[generate]`."""

    every_iterations: Count = 10
    """Iterations between evaluations; >= 1. Evaluations also run before the first update and at the
    end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """The section `[loop]`: tasks, number of iterations, staleness, and the audit of the samples."""

    tasks: str = ""
    """Required. Tasks to sample: JSON Lines or Parquet, as for `rollouts generate`."""
    task_order: Literal["shuffled", "listed"] = "shuffled"
    """Order of the tasks: `shuffled` differently in each pass, or as `listed` in the file, for a
    curriculum."""
    num_iterations: Annotated[int, Meta(ge=1, le=MOST_ITERATIONS)] | None = None
    """Required. Number of batches to sample and train on; from 1 to 100000."""
    max_staleness: CountOrZero = 0
    """Maximum number of iterations between the weights that sampled a row (the oldest, if several
    did) and the weights trained on it; >= 0. With 0, the groups of an iteration start when the
    previous iteration is complete; otherwise sampling continues during training."""
    weight_sync: Literal["wait", "now"] = "wait"
    """How to treat running calls when the engine gets new weights. `wait`: let them finish, and
    hold new calls until then; `now`: continue them with the new weights, if the engine can."""
    save_every_iterations: Count | None = 10
    """Iterations between checkpoints; >= 1. The first and the last iteration always save a
    checkpoint, and so does a run that SIGINT (Ctrl-C) or SIGTERM stops. None: no other
    checkpoints."""
    keep_weights: Count = 2
    """Number of newest versions to keep in `OUT/weights/`; >= 1."""
    audit_rows: CountOrZero = 4
    """Number of rows per iteration, from different trajectories, to audit before training. The
    audit checks that the rows were sampled with the weights and settings in their labels. 0: no
    audit."""
    on_mismatch: Literal["warn", "stop"] = "warn"
    """What to do if audited rows were not sampled as labelled: `warn`, or `stop` the run if there
    are at least two such rows."""

    def __post_init__(self) -> None:
        check_settings(self, "loop")


@dataclass(frozen=True, kw_only=True, slots=True)
class RlConfig(Sections):
    """All settings of the RL loop. Saved as `OUT/config.json`.

    Raises:
        ConfigError: A value is out of range, two values contradict each other, or a table has a key
            that the loop sets itself.

    Example:
        >>> paths = {"model": ModelConfig(path="smollm2"), "run": RunConfig(out="run")}
        >>> loop = LoopConfig(tasks="t.jsonl", num_iterations=10)
        >>> config = RlConfig(
        ...     **paths, loop=loop, generate={"environment": "gsm8k", "group_size": 4}
        ... )
        >>> config.training.data.group_size, config.training.data.dataset
        (4, 'run/rollouts/*')
    """

    loop: LoopConfig
    """Tasks, number of iterations, staleness, and the audit of the samples."""
    generate: dict[str, Any] = field(default_factory=dict)
    """Table: keys of `rollouts generate`."""
    evaluate: dict[str, Any] | None = None
    """Table: `tasks`, `every_iterations` (default: 10), and keys that override keys of
    `[generate]`. `group_size` is 1 and `temperature` 0 unless set here. The first and the last
    weights are always evaluated. Each table `[evaluate.NAME]` is an evaluation set whose keys
    override the keys in `[evaluate]`. None: no evaluation."""

    def __post_init__(self) -> None:
        check_required(dataclasses.asdict(self), REQUIRED)
        check_settings(self)
        if "://" in self.run.out:
            expected = "a local directory, where engines read the weights"
            raise ConfigError("config_value", "run.out", self.run.out, expected)
        shared, sets = evaluation_sets(self.evaluate or {})
        every = shared.get("every_iterations", 1)
        if every < 1:
            key, expected = "[evaluate] every_iterations", "a whole number >= 1"
            raise ConfigError("config_value", key, str(every), expected)
        for name in ("data", "batch", "run"):
            section = getattr(self, name)
            usual = type(section)()
            _refuse_own_keys(
                name, [k for k in OWN_KEYS[name] if getattr(section, k) != getattr(usual, k)]
            )
        tables = {"generate": self.generate, "evaluate": shared}
        for name, table in (tables | {f"evaluate.{n}": keys for n, keys in sets.items()}).items():
            _refuse_own_keys(name, table)
            _refuse_unknown_keys(name, table)
        generation, training, _ = self.generation, self.training, self.evaluations(0)
        if generation.is_colocated and self.loop.max_staleness:
            expected = "0, because vLLM in the trainer's processes does not sample during updates"
            finding, hint = str(self.loop.max_staleness), "use servers: set urls in [generate]"
            raise ConfigError("config_value", "[loop] max_staleness", finding, expected, hint)
        if generation.group_size == 1 and training.compares_groups:
            estimator = training.advantage.estimator
            expected = f"at least 2, because {estimator} compares the trajectories of a group"
            hint = "pass --set generate.group_size=8, or --set advantage.estimator=reinforce++"
            raise ConfigError("config_value", "[generate] group_size", "1", expected, hint)

    @property
    def num_iterations(self) -> int:
        """Number of batches to sample and train on."""
        assert self.loop.num_iterations is not None  # required
        return self.loop.num_iterations

    @property
    def generation(self) -> GenerateConfig:
        """Configuration for sampling rollouts; its `out` is not used."""
        generate, seed = dict(self.generate), {"seed": self.run.seed}
        if generate.get("engine", "transformers") == "transformers":
            generate = seed | generate
        elif not generate.get("urls"):
            generate["engine_args"] = seed | generate.get("engine_args", {})
        paths = {"tasks": self.loop.tasks, "model": self.model.path}
        paths["out"] = f"{self.run.out}/{ROLLOUTS}"
        return _record("generate", GenerateConfig, generate | paths)

    @property
    def training(self) -> TrainConfig:
        """Configuration for training on the growing dataset, or for replay by `rollouts train`."""
        generation = self.generation
        data = dataclasses.replace(
            self.data,
            dataset=f"{self.run.out}/{ROLLOUTS}/*",
            group_size=generation.group_size,
            outcome=self.data.outcome or generation.outcome,
        )
        shared = {one.name: getattr(self, one.name) for one in dataclasses.fields(Sections)}
        optimizer = dataclasses.replace(self.optimizer, learning_rate=self.learning_rate)
        return TrainConfig(**shared | {"data": data, "optimizer": optimizer})

    def evaluations(self, version: int) -> dict[str, EvaluateConfig]:
        """Return the evaluation sets for a version of the weights, by name ("" for a single set)."""
        if self.evaluate is None:
            return {}
        shared, sets = evaluation_sets(self.evaluate)
        usual = dataclasses.asdict(self.generation)
        usual |= {"group_size": 1, "temperature": 0.0, "policy_version": version}
        evaluations = {}
        for name, set_keys in (sets or {"": {}}).items():
            table = f"evaluate.{name}".rstrip(".")
            check_required(shared | set_keys, {"tasks": f"a file, in [{table}]"})
            folder = f"{self.run.out}/{EVALUATIONS}/{name}".rstrip("/")
            out = {"out": f"{folder}/iteration_{version:05d}"}
            one = _record(table, EvaluateConfig, usual | shared | set_keys | out)
            by_engine = one.agent is not None or one.harness is not None
            if by_engine and one.chat_template != usual["chat_template"]:
                where, expected = f"[{table}] chat_template", str(usual["chat_template"])
                finding, expected = str(one.chat_template), f"{expected}, as in [generate]"
                raise ConfigError("config_value", where, finding, expected, _ENGINE)
            evaluations[name] = one
        return evaluations

    def is_evaluation_due(self, version: int) -> bool:
        """True if the weights of a version are evaluated."""
        planned = self.evaluations(version).values()
        is_last = version == self.num_iterations
        return any(is_last or version % one.every_iterations == 0 for one in planned)

    def resolved(self) -> dict[str, Any]:
        """Return all keys and values to save, including the tables."""
        training = dataclasses.asdict(self.training)
        training["model"]["dtype"] = self.model.dtype or default_dtype()
        sets = {name: plain_values(one) for name, one in self.evaluations(0).items()}
        return {
            "loop": dataclasses.asdict(self.loop),
            "generate": plain_values(self.generation),
            "evaluate": sets.get("", sets) or None,
            **training,
        }


REQUIRED = {
    "model.path": "a model directory",
    "loop.tasks": "a file",
    "run.out": "a directory (--out RUN)",
    "loop.num_iterations": "the number of iterations to train",
}
TABLES: dict[str, type[Any]] = {"generate": GenerateConfig, "evaluate": EvaluateConfig}
_MODEL, _OUT = {"model": "set model.path"}, {"out": "set run.out"}
_ENGINE = "set it in [generate], whose engine also runs the evaluations"
_VERSION = {"policy_version": "leave it out: the loop sets it to the iteration's number"}
_ITERATIONS = "set loop.num_iterations"
OWN_KEYS: dict[str, dict[str, str]] = {
    "generate": _MODEL
    | _OUT
    | _VERSION
    | {"tasks": "set loop.tasks", "groups_per_shard": "leave it out: each group is a shard"},
    "data": {
        "dataset": f"leave it out: the loop trains on OUT/{ROLLOUTS}",
        "group_size": "set generate.group_size",
    },
    "batch": {"num_epochs": _ITERATIONS, "max_updates": _ITERATIONS},
    "run": {"save_every_updates": "set loop.save_every_iterations"},
    "evaluate": _MODEL
    | _OUT
    | _VERSION
    | dict.fromkeys(("engine", "urls", "dtype", "engine_args"), _ENGINE),
}
"""Keys that the loop sets itself, by table, with a hint for each."""

_SET_NAME = re.compile(r"[\w-]+")


def evaluation_sets(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split `[evaluate]` into the keys that all sets share, and the keys of each `[evaluate.NAME]`.

    Example:
        >>> evaluation_sets({"group_size": 4, "sums": {"tasks": "t.jsonl"}})
        ({'group_size': 4}, {'sums': {'tasks': 't.jsonl'}})
    """
    fields = EvaluateConfig.__dataclass_fields__
    sets = {k: v for k, v in table.items() if isinstance(v, dict) and k not in fields}
    return {k: v for k, v in table.items() if k not in sets}, sets


def load_rl_config(
    toml_path: str | Path | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> RlConfig:
    """Read a configuration: TOML with tables, then `options` and `overrides`, as `load_config` does.

    The file may also be the `config.json` of a run.

    Raises:
        InputError: `input_file`: the file cannot be read; `config_file`: the file is not valid
            TOML.
        ConfigError: `config_key`: a key is unknown or missing; `config_value`, `sampling`: a value
            is invalid. The error names the table of the key.
    """
    file, where = read_values(toml_path), str(toml_path)
    if Path(where).suffix == ".json":
        file = as_given(file)
    settings = with_options(file, options)
    plain, nested = _by_table(overrides, TABLES)
    tables = {name: settings.pop(name) for name in TABLES if name in settings}
    generate = [k for k in GenerateConfig.__dataclass_fields__ if k not in OWN_KEYS["generate"]]
    more = [*own_parameters(file, overrides), *(f"generate.{key}" for key in generate)]
    keys = Keys(RlConfig, LIST_EXAMPLES, MOVED | _MOVED, more)
    values: dict[str, Any] = {}
    with all_unknown_keys() as unknown:
        with unknown.collected():
            values = checked_values(RlConfig, settings, plain, where, keys=keys)
        for name in (name for name in TABLES if name in tables or name in nested):
            table = tables.get(name, {})
            if not isinstance(table, dict):
                raise ConfigError("config_value", f"{where}, key {name}", repr(table), "a table")
            read = _evaluate_values if name == "evaluate" else partial(_table_values, name)
            with unknown.collected():
                values[name] = read(table, nested.get(name, []), where)
    if REDACTED in str(values.get("generate", {}).get("harness")):
        key, hint = "[generate] harness", "pass --set generate.harness='COMMAND'"
        raise ConfigError("resume_config", key, "the command without its credentials", hint=hint)
    return build(RlConfig, values)


def as_given(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the keys that the loop sets itself from a configuration that a run has saved.

    Args:
        saved: Result of `RlConfig.resolved`.
    """

    def without_own(table: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if k not in OWN_KEYS.get(table, {})}

    values = {name: without_own(name, table) for name, table in saved.items()}
    if not values.get("evaluate"):
        return {k: v for k, v in values.items() if k != "evaluate"}
    shared, sets = evaluation_sets(values["evaluate"])
    for name, set_keys in sets.items():
        shared[name] = without_own("evaluate", set_keys)
        shared["every_iterations"] = shared[name].pop("every_iterations", 1)
    return values | {"evaluate": shared}


_MOVED = {
    **{key: f"loop.{key}" for key in LoopConfig.__dataclass_fields__},
    **{key: f"generate.{place}" for key, place in SYNONYMS.items()},
    "epochs": "loop.num_iterations",
    "max_steps": "loop.num_iterations",
    "save_steps": "loop.save_every_iterations",
    "out": "run.out",
    "seed": "run.seed",
    "group_size": "generate.group_size",
}
"""Keys that had another place before there were sections, that other tools call by another name, or
that belong in `[generate]`."""


def _evaluate_values(
    table: Mapping[str, Any], overrides: Sequence[str], where: str
) -> dict[str, Any]:
    """Parse the values of `[evaluate]` and its sets, including sets named only by overrides."""
    shared, sets = evaluation_sets(table)
    fields = EvaluateConfig.__dataclass_fields__
    names = (override.strip().partition(".")[0] for override in overrides)
    plain, nested = _by_table(overrides, {name for name in names if name not in fields})
    values = _table_values("evaluate", shared, plain, where)
    for name in sets | nested:
        set_keys = sets.get(name, {})
        values[name] = _table_values(f"evaluate.{name}", set_keys, nested.get(name, []), where)
    return values


def _table_values(
    table: str, values: Mapping[str, Any], overrides: Sequence[str], where: str
) -> dict[str, Any]:
    _refuse_own_keys(table, values)
    kind = TABLES[table.partition(".")[0]]
    keys = Keys(kind, moved={key: f"{table}.{place}" for key, place in SYNONYMS.items()})
    return checked_values(kind, values, overrides, where, table=f"{table}.", keys=keys)


def _by_table(
    overrides: Sequence[str], tables: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the overrides of keys in `tables`, grouped by table, from all others."""
    plain: list[str] = []
    nested: dict[str, list[str]] = {}
    for override in overrides:
        table, dot, rest = override.strip().partition(".")
        if dot and "=" not in table and table in tables:
            nested.setdefault(table, []).append(rest)
        else:
            plain.append(override)
    return plain, nested


def _refuse_own_keys(table: str, keys: Iterable[str]) -> None:
    kind, _, name = table.partition(".")
    hints = OWN_KEYS[kind]
    if name:
        hint = "set it in [evaluate], because all sets are evaluated together"
        hints = hints | {"every_iterations": hint}
        if not _SET_NAME.fullmatch(name):
            expected = "a name of letters, digits, _ and -"
            raise ConfigError("config_key", f"[{table}]", repr(name), expected)
    for key in keys:
        if key in hints:
            finding = f"`{key}` is set by rollouts rl"
            raise ConfigError("config_key", f"[{table}]", finding, hint=hints[key])


def _refuse_unknown_keys(table: str, values: Mapping[str, Any]) -> None:
    kind = TABLES[table.partition(".")[0]]
    unknown = {k: v for k, v in values.items() if k not in kind.__dataclass_fields__}
    checked_values(kind, unknown, (), f"[{table}]")


def _record(table: str, kind: type[Table], values: Mapping[str, Any]) -> Table:
    """Build the configuration of a table; errors name the table."""
    try:
        return kind(**values)
    except RolloutError as error:
        raise error.at(f"[{table}] {error.where}") from None
