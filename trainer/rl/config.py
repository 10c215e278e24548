"""Configuration of the RL loop: keys, and tables for generation, training and evaluation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from pipelines.generation.config import GenerateConfig, plain_values
from rollout_io.configuration import (
    Count,
    CountOrZero,
    check_required,
    checked_values,
    given_options,
    out_of_bounds,
    read_toml,
)
from schemas.errors import ConfigError, RolloutError
from trainer.config.function_keys import suggesting_loss_keys
from trainer.config.train_config import TrainConfig, default_dtype

Table = TypeVar("Table")
MOST_ITERATIONS = 100_000
ROLLOUTS, DROPPED, UNFINISHED = "rollouts", "dropped", "unfinished"
EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig(GenerateConfig):
    """The table `[evaluate]` or `[evaluate.NAME]`: interval, and changes to `[generate]`."""

    every_iterations: Count = 10
    """Iterations between evaluations; >= 1. Evaluations also run before the first update and at the
    end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RlConfig:
    """All settings of the RL loop. Saved as `OUT/config.json`.

    Raises:
        ConfigError: A value is out of range, two values contradict each other, or a table has a key
            that the loop sets itself.

    Example:
        >>> own = {"model": "smollm2", "tasks": "t.jsonl", "out": "run", "num_iterations": 10}
        >>> config = RlConfig(**own, generate={"environment": "gsm8k", "group_size": 4})
        >>> config.training.group_size, config.training.dataset
        (4, 'run/rollouts/*')
    """

    model: str
    """Hugging Face model directory to start from: weights, tokenizer and chat template."""
    tasks: str
    """Tasks to sample: JSON Lines or Parquet, as for `rollouts generate`."""
    out: str
    """Local directory of the run; must not contain a run, unless that run is resumed."""
    num_iterations: Annotated[int, Meta(ge=1, le=MOST_ITERATIONS)]
    """Number of batches to sample and train on; from 1 to 100000."""

    max_staleness: CountOrZero = 0
    """Maximum number of iterations between the weights that sampled a row and the weights trained
    on it; >= 0. With 0, the groups of an iteration start when the previous iteration is complete;
    otherwise sampling continues during training."""
    weight_sync: Literal["wait", "now"] = "wait"
    """How to treat running calls when the engine gets new weights. `wait`: let them finish, and
    hold new calls until then; `now`: continue them with the new weights, if the engine can."""
    seed: int = 0
    """Seed of the order of tasks in each pass, of the trainer, and of the embedded engine unless
    `[generate]` sets `seed`."""
    save_every_iterations: Count | None = None
    """Iterations between checkpoints; >= 1. The first and the last iteration always save a
    checkpoint. None: no other checkpoints."""
    keep_weights: Count = 2
    """Number of newest versions to keep in `OUT/weights/`; >= 1."""
    audit_rows: CountOrZero = 4
    """Number of rows per iteration, from different trajectories, to audit before training. The
    audit checks that the rows were sampled with the weights and settings in their labels. 0: no
    audit."""
    on_mismatch: Literal["warn", "stop"] = "warn"
    """What to do if audited rows were not sampled as labelled: `warn`, or `stop` the run if there
    are at least two such rows."""

    generate: dict[str, Any] = field(default_factory=dict)
    """Table: keys of `rollouts generate`."""
    train: dict[str, Any] = field(default_factory=dict)
    """Table: keys of `rollouts train`; `groups_per_batch` is the number of groups per iteration."""
    evaluate: dict[str, Any] | None = None
    """Table: `tasks`, `every_iterations` (default: 10), and keys that override keys of
    `[generate]`. `group_size` is 1 and `temperature` 0 unless set here. The first and the last
    weights are always evaluated. Each table `[evaluate.NAME]` is an evaluation set whose keys
    override the keys in `[evaluate]`. None: no evaluation."""

    def __post_init__(self) -> None:
        for key, got, expected in _breaches(self):
            raise ConfigError("config_value", key, got, expected)
        shared, sets = evaluation_sets(self.evaluate or {})
        for name in TABLES:
            table = shared if name == "evaluate" else getattr(self, name)
            _refuse_own_keys(name, table)
            _refuse_unknown_keys(name, table)
        for name, own in sets.items():
            _refuse_own_keys(f"evaluate.{name}", own)
            _refuse_unknown_keys(f"evaluate.{name}", own)
        generation, training, _ = self.generation, self.training, self.evaluations(0)
        if generation.group_size == 1 and training.compares_groups:
            estimator = training.advantage_estimator
            expected = f"at least 2, because {estimator} compares the trajectories of a group"
            hint = (
                "pass --set generate.group_size=8, or --set train.advantage_estimator=reinforce++"
            )
            raise ConfigError("config_value", "[generate] group_size", "1", expected, hint)

    @property
    def generation(self) -> GenerateConfig:
        """Configuration for sampling rollouts; its `out` is not used."""
        is_embedded = self.generate.get("engine", "transformers") == "transformers"
        settings = {"seed": self.seed} if is_embedded else {}
        paths = {"tasks": self.tasks, "model": self.model, "out": f"{self.out}/{ROLLOUTS}"}
        return _record("generate", GenerateConfig, settings | self.generate | paths)

    @property
    def training(self) -> TrainConfig:
        """Configuration for training on the growing dataset, or for replay by `rollouts train`."""
        settings = self.train | {
            "dataset": f"{self.out}/{ROLLOUTS}/*",
            "model": self.model,
            "out": self.out,
            "seed": self.seed,
            "group_size": self.generation.group_size,
            "outcome": self.train.get("outcome") or self.generation.outcome,
        }
        return _record("train", TrainConfig, settings)

    def evaluations(self, version: int) -> dict[str, EvaluateConfig]:
        """Return the evaluation sets for a version of the weights, by name ("" for a single set)."""
        if self.evaluate is None:
            return {}
        shared, sets = evaluation_sets(self.evaluate)
        usual = dataclasses.asdict(self.generation)
        usual |= {"group_size": 1, "temperature": 0.0, "policy_version": version}
        found = {}
        for name, own in (sets or {"": {}}).items():
            table = f"evaluate.{name}".rstrip(".")
            check_required(shared | own, {"tasks": f"a file, in [{table}]"})
            folder = f"{self.out}/{EVALUATIONS}/{name}".rstrip("/")
            out = {"out": f"{folder}/iteration_{version:05d}"}
            one = _record(table, EvaluateConfig, usual | shared | own | out)
            by_engine = one.agent is not None or one.harness is not None
            if by_engine and one.chat_template != usual["chat_template"]:
                where, expected = f"[{table}] chat_template", str(usual["chat_template"])
                got, expected = str(one.chat_template), f"{expected}, as in [generate]"
                raise ConfigError("config_value", where, got, expected, _ENGINE)
            found[name] = one
        return found

    def evaluates(self, version: int) -> bool:
        """True if the weights of a version are evaluated."""
        planned = self.evaluations(version).values()
        is_last = version == self.num_iterations
        return any(is_last or version % one.every_iterations == 0 for one in planned)

    def resolved(self) -> dict[str, Any]:
        """Return all keys and values to save, including the tables."""
        training = dataclasses.asdict(self.training)
        training["dtype"] = self.training.dtype or default_dtype()
        sets = {name: plain_values(one) for name, one in self.evaluations(0).items()}
        return dataclasses.asdict(self) | {
            "generate": plain_values(self.generation),
            "train": training,
            "evaluate": sets.get("", sets) or None,
        }


TABLES: dict[str, type[Any]] = {
    "generate": GenerateConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
}
_TOP = "set it at the top of the file, before the tables"
_MODEL, _OUT = {"model": _TOP}, {"out": _TOP}
_ENGINE = "set it in [generate], whose engine also runs the evaluations"
OWN_KEYS: dict[str, dict[str, str]] = {
    "generate": _MODEL
    | _OUT
    | {
        "tasks": _TOP,
        "policy_version": "leave it out: the loop sets it to the iteration's number",
        "groups_per_shard": "leave it out: each group is a shard",
    },
    "train": _MODEL
    | _OUT
    | {
        "dataset": f"leave it out: the loop trains on OUT/{ROLLOUTS}",
        "seed": _TOP,
        "group_size": "set it in [generate]",
        "num_epochs": "set num_iterations at the top of the file",
        "max_updates": "set num_iterations at the top of the file",
        "save_every_updates": "set save_every_iterations at the top of the file",
    },
    "evaluate": _MODEL
    | _OUT
    | {
        "engine": _ENGINE,
        "urls": _ENGINE,
        "dtype": _ENGINE,
        "policy_version": "leave it out: the loop sets it to the iteration's number",
    },
}
"""Keys that the loop sets itself, by table, with a hint for each."""

_SET_NAME = re.compile(r"[\w-]+")


def evaluation_sets(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split `[evaluate]` into the keys that all sets share, and the keys of each `[evaluate.NAME]`.

    Example:
        >>> evaluation_sets({"group_size": 4, "sums": {"tasks": "t.jsonl"}})
        ({'group_size': 4}, {'sums': {'tasks': 't.jsonl'}})
    """
    known = EvaluateConfig.__dataclass_fields__
    sets = {k: v for k, v in table.items() if isinstance(v, dict) and k not in known}
    return {k: v for k, v in table.items() if k not in sets}, sets


def load_rl_config(
    toml_path: str | Path | None, overrides: Sequence[str] = (), *, out: str | None = None
) -> RlConfig:
    """Read a configuration: TOML with tables, then `out`, then `key=value` or `table.key=value`.

    Raises:
        InputError: `input_file`: the file cannot be read; `config_file`: the file is not valid
            TOML.
        ConfigError: `config_key`: a key is unknown or missing; `config_value`, `sampling`: a value
            is invalid. The error names the table of the key.
    """
    given, where = read_toml(toml_path) | given_options({"out": out}), str(toml_path)
    plain, nested = _by_table(overrides, TABLES.__contains__)
    tables = {name: given.pop(name) for name in TABLES if name in given}
    for key in given:
        _suggest_table(key, f"{where}, key {key}")
    for override in plain:
        key, equals, _ = override.partition("=")
        if equals:
            _suggest_table(key.strip(), f"--set {override}")
    values = checked_values(RlConfig, given, plain, where)
    for name in (name for name in TABLES if name in tables or name in nested):
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError("config_value", f"{where}, key {name}", repr(table), "a table")
        over = nested.get(name, [])
        if name == "evaluate":
            values[name] = _evaluate_values(table, over, where)
        else:
            values[name] = _table_values(name, table, over, where)
    required = {"model": "a model directory", "tasks": "a file", "out": "a directory (--out RUN)"}
    check_required(values, required)
    if "num_iterations" not in values:
        text, hint = "Missing key: num_iterations", "set it to the number of iterations to train"
        raise ConfigError("config_key", "configuration", "no key", hint=hint, message=text)
    return RlConfig(**values)


def _suggest_table(key: str, where: str) -> None:
    """Reject a top-level key that only exists in `[generate]` or `[train]`, and name the table."""
    first = key.partition(".")[0]
    if first in RlConfig.__dataclass_fields__:
        return
    names = ("generate", "train")
    tables = [t for t in names if first in TABLES[t].__dataclass_fields__.keys() - OWN_KEYS[t]]
    if tables:
        near = " or ".join(f"`{table}.{key}`" for table in tables)
        named = " or ".join(f"[{table}]" for table in tables)
        hint = f"did you mean {near}? It belongs in {named}"
        raise ConfigError("config_key", where, f"unknown key `{key}`", "", hint)


def _evaluate_values(
    table: Mapping[str, Any], overrides: Sequence[str], where: str
) -> dict[str, Any]:
    """Parse the values of `[evaluate]` and its sets, including sets named only by overrides."""
    shared, sets = evaluation_sets(table)
    known = EvaluateConfig.__dataclass_fields__
    plain, nested = _by_table(overrides, lambda name: name not in known)
    values = _table_values("evaluate", shared, plain, where)
    for name in sets | nested:
        own = sets.get(name, {})
        values[name] = _table_values(f"evaluate.{name}", own, nested.get(name, []), where)
    return values


def _table_values(
    table: str, given: Mapping[str, Any], overrides: Sequence[str], where: str
) -> dict[str, Any]:
    _refuse_own_keys(table, given)
    kind = TABLES[table.partition(".")[0]]
    with suggesting_loss_keys(given, overrides, kind.__dataclass_fields__, f"{table}."):
        return checked_values(kind, given, overrides, where, table=f"{table}.")


def _by_table(
    overrides: Sequence[str], is_table: Callable[[str], bool]
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate overrides of top-level keys from overrides of keys in tables, grouped by table."""
    plain: list[str] = []
    nested: dict[str, list[str]] = {}
    for override in overrides:
        table, dot, rest = override.strip().partition(".")
        if dot and "=" not in table and is_table(table):
            nested.setdefault(table, []).append(rest)
        else:
            plain.append(override)
    return plain, nested


def _refuse_own_keys(table: str, values: Mapping[str, Any]) -> None:
    kind, _, name = table.partition(".")
    own = OWN_KEYS[kind]
    if name:
        hint = "set it in [evaluate], because all sets are evaluated together"
        own = own | {"every_iterations": hint}
        if not _SET_NAME.fullmatch(name):
            expected = "a name of letters, digits, _ and -"
            raise ConfigError("config_key", f"[{table}]", repr(name), expected)
    for key in values:
        if key in own:
            got = f"`{key}` is set by rollouts rl"
            raise ConfigError("config_key", f"[{table}]", got, hint=own[key])


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


def _breaches(c: RlConfig) -> Iterator[tuple[str, str, str]]:
    yield from out_of_bounds(c)
    every = (c.evaluate or {}).get("every_iterations", 1)
    if every < 1:
        yield "[evaluate] every_iterations", str(every), "a whole number >= 1"
