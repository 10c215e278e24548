"""The one record that configures the loop: its own keys, and tables of those it consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipelines.generation.config import GenerateConfig
from rollout_io.configuration import check_required, checked_values, read_toml
from schemas.errors import RolloutError
from trainer.config import TrainConfig

Table = TypeVar("Table")
MOST_ITERATIONS = 100_000
ROLLOUTS, DROPPED, UNFINISHED = "rollouts", "dropped", "unfinished"
EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig(GenerateConfig):
    """The table `[evaluate]`: when, and whatever is other than in `[generate]`."""

    every_iterations: int = 10
    """Iterations between evaluations; >= 1. There is one before the first update and one at the end
    too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RlConfig:
    """Everything that decides what a run of the loop does. It is saved as `OUT/config.json`.

    Raises:
        RolloutError: A value is out of its range, two values contradict each other, or a table has
            a key that the loop sets itself.

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
    """Local directory of the run; must not hold a run yet, unless that one is resumed."""
    num_iterations: int
    """Batches that are sampled and trained; from 1 to 100000."""

    max_staleness: int = 0
    """Iterations that a row's weights may be behind those it trains; >= 0. 0: groups of an iteration
    begin when the one before has trained; else sampling goes on while the trainer trains."""
    weight_sync: Literal["wait", "now"] = "wait"
    """What becomes of calls under way when the engine gets new weights. `wait`: they end first, and no
    other begins; `now`: they go on with the new ones, if the engine can."""
    seed: int = 0
    """Of the order of the tasks in each pass over them, of the trainer, and of the embedded engine
    unless `[generate]` has a `seed`."""
    save_every_iterations: int | None = None
    """Iterations between checkpoints; >= 1. None: only at the end, where one is always saved."""

    generate: dict[str, Any] = field(default_factory=dict)
    """Table: keys of `rollouts generate`."""
    train: dict[str, Any] = field(default_factory=dict)
    """Table: keys of `rollouts train`; `groups_per_batch` is what an iteration takes."""
    evaluate: dict[str, Any] | None = None
    """Table: `tasks`, `every_iterations` (10), and keys of `rollouts generate` that are other than in
    `[generate]`; `group_size` is 1 unless it is here. There is an evaluation before the first update
    and at the end too. None: no evaluation."""

    def __post_init__(self) -> None:
        for key, got, expected in _breaches(self):
            raise RolloutError("config_value", key, got, expected)
        for name in TABLES:
            _refuse_own_keys(name, getattr(self, name) or {})
        _ = self.generation, self.training, self.evaluation(0)

    @property
    def generation(self) -> GenerateConfig:
        """What samples the rollouts; its `out` is not used."""
        settings = {"seed": self.seed} if self._is_embedded else {}
        paths = {"tasks": self.tasks, "model": self.model, "out": f"{self.out}/{ROLLOUTS}"}
        return _record("generate", GenerateConfig, settings | self.generate | paths)

    @property
    def training(self) -> TrainConfig:
        """The training run whose dataset grows; `rollouts train` with it replays the loop."""
        settings = self.train | {
            "dataset": f"{self.out}/{ROLLOUTS}/*",
            "model": self.model,
            "out": self.out,
            "seed": self.seed,
            "group_size": self.generation.group_size,
        }
        return _record("train", TrainConfig, settings)

    def evaluation(self, version: int) -> EvaluateConfig | None:
        """What evaluates the weights of a version, if anything does."""
        if self.evaluate is None:
            return None
        check_required(self.evaluate, {"tasks": "a file, in [evaluate]"})
        usual = dataclasses.asdict(self.generation) | {"group_size": 1, "policy_version": version}
        out = {"out": f"{self.out}/{EVALUATIONS}/iteration_{version:05d}"}
        return _record("evaluate", EvaluateConfig, usual | self.evaluate | out)

    def evaluates(self, version: int) -> bool:
        """Whether the weights of a version are evaluated."""
        planned = self.evaluation(version)
        due = planned and version % planned.every_iterations == 0
        return bool(planned and (due or version == self.num_iterations))

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, those of the tables too, as it is saved."""
        evaluation = self.evaluation(0)
        return dataclasses.asdict(self) | {
            "generate": dataclasses.asdict(self.generation),
            "train": dataclasses.asdict(self.training),
            "evaluate": evaluation and dataclasses.asdict(evaluation),
        }

    @property
    def _is_embedded(self) -> bool:
        return bool(self.generate.get("engine", "transformers") == "transformers")


TABLES: dict[str, type[Any]] = {
    "generate": GenerateConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
}
_TOP = "write it at the top of the file, before the tables"
_MODEL, _OUT = {"model": _TOP}, {"out": _TOP}
_ENGINE = "write it in [generate]: there is one engine"
OWN_KEYS: dict[str, dict[str, str]] = {
    "generate": _MODEL
    | _OUT
    | {
        "tasks": _TOP,
        "policy_version": "leave it out: iterations are counted",
        "groups_per_shard": "leave it out: a shard is a group",
    },
    "train": _MODEL
    | _OUT
    | {
        "dataset": f"leave it out: it is OUT/{ROLLOUTS}",
        "seed": _TOP,
        "group_size": "write it in [generate]",
        "num_epochs": "write num_iterations at the top of the file",
        "max_updates": "write num_iterations at the top of the file",
        "save_every_updates": "write save_every_iterations at the top of the file",
    },
    "evaluate": _MODEL
    | _OUT
    | {
        "engine": _ENGINE,
        "urls": _ENGINE,
        "dtype": _ENGINE,
        "policy_version": "leave it out: iterations are counted",
    },
}
"""Keys of the tables that the loop sets itself, and what to do instead."""


def load_rl_config(toml_path: str | Path | None, overrides: Sequence[str] = ()) -> RlConfig:
    """Read a configuration: TOML with tables, then `key=value` or `table.key=value`.

    Raises:
        RolloutError: config_file, config_key, config_value, sampling: as
            `rollout_io.configuration.load_record`, with the table in the key.
    """
    given, where = read_toml(toml_path), str(toml_path)
    plain, nested = _by_table(overrides)
    tables = {name: given.pop(name) for name in TABLES if name in given}
    values = checked_values(RlConfig, given, plain, where)
    for name in (name for name in TABLES if name in tables or name in nested):
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise RolloutError("config_value", f"{where}, key {name}", repr(table), "a table")
        _refuse_own_keys(name, table)
        kind, over = TABLES[name], nested.get(name, [])
        values[name] = checked_values(kind, table, over, where, table=f"{name}.")
    required = {"model": "a model directory", "tasks": "a file", "out": "a directory (--out RUN)"}
    check_required(values, required)
    if "num_iterations" not in values:
        raise RolloutError("config_key", "configuration", "no `num_iterations`", "a whole number")
    return RlConfig(**values)


def _by_table(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    plain: list[str] = []
    nested: dict[str, list[str]] = {}
    for override in overrides:
        table, dot, rest = override.strip().partition(".")
        if dot and table in TABLES:
            nested.setdefault(table, []).append(rest)
        else:
            plain.append(override)
    return plain, nested


def _refuse_own_keys(table: str, values: Mapping[str, Any]) -> None:
    own = OWN_KEYS[table]
    for key in values:
        if key in own:
            where, expected = f"[{table}]", "a key that the loop does not set itself"
            raise RolloutError("config_key", where, f"`{key}`", expected, own[key])
    unknown = next((k for k in values if k not in TABLES[table].__dataclass_fields__), None)
    if unknown is not None:
        checked_values(TABLES[table], {unknown: values[unknown]}, (), f"[{table}]")


def _record(table: str, kind: type[Table], values: Mapping[str, Any]) -> Table:
    """A record of a table; what is wrong with it is said with the table's name."""
    try:
        return kind(**values)
    except RolloutError as error:
        where = f"[{table}] {error.where}"
        raise RolloutError(error.rule, where, error.got, error.expected, error.hint) from None


def _breaches(c: RlConfig) -> Iterator[tuple[str, str, str]]:
    if not 1 <= c.num_iterations <= MOST_ITERATIONS:
        yield "num_iterations", str(c.num_iterations), f"a whole number from 1 to {MOST_ITERATIONS}"
    if c.max_staleness < 0:
        yield "max_staleness", str(c.max_staleness), "a whole number >= 0"
    if c.save_every_iterations is not None and c.save_every_iterations < 1:
        yield "save_every_iterations", str(c.save_every_iterations), "a whole number >= 1"
    if c.evaluate is not None and c.evaluate.get("every_iterations", 1) < 1:
        yield "[evaluate] every_iterations", str(c.evaluate["every_iterations"]), ">= 1"
