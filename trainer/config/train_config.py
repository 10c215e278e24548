"""Configuration of a training run: read from TOML, overridden by `key=value`, checked and shown.

Does not import torch, and neither does the check of a model's directory.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollout_io.configuration import check_required, load_record, read_values
from rollout_io.dataset.filesystems import replace_text
from rollout_io.dataset.opening import read_input
from schemas.errors import InputError, RolloutError
from trainer.checks import check_settings
from trainer.config.functions import ADVANTAGE_ESTIMATOR, KINDS, Function, bind, own_parameters
from trainer.config.sections import (
    AdvantageConfig,
    BatchConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)

RL, IMITATION, LORA_FACTOR = 1e-6, 2e-5, 10
REQUIRED = {"data.dataset": "a path", "model.path": "a directory", "run.out": "a directory"}
LIST_EXAMPLES = {
    "optimizer.betas": "[0.9, 0.999]",
    "run.trackers": '["tensorboard"]',
    "model.lora_target_modules": '["q_proj", "v_proj"]',
}
MOVED = {
    "lr": "optimizer.learning_rate",
    "batch_size": "batch.groups_per_batch",
    "train_batch_size": "batch.groups_per_batch",
    "mini_batch_size": "batch.groups_per_mini_batch",
    "micro_batch_size": "batch.tokens_per_micro_batch",
    "epochs": "batch.num_epochs",
    "max_steps": "batch.max_updates",
    "lora_r": "model.lora_rank",
    "save_steps": "run.save_every_updates",
    "output_dir": "run.out",
    "model": "model.path",
    "optimizer": "optimizer.algorithm",
    "advantage_estimator": "advantage.estimator",
    "advantage_batch_normalize": "advantage.batch_normalize",
    "loss_reduction": "loss.reduction",
}
"""Keys for names that other tools or earlier versions use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """The sections of the configuration that `rollouts train` and `rollouts rl` share.

    Each part of the trainer takes its section. The keys and their defaults are documented in the
    classes of the sections.
    """

    data: DataConfig = field(default_factory=DataConfig)
    """Dataset, and which of its trajectories train. `rollouts rl` sets `dataset` and `group_size`."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Sizes of batches and updates, and how rows are forwarded. In `rollouts rl`, `groups_per_batch` is
    the number of groups per iteration."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How advantages are estimated."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Policy loss, reduction, corrections, KL and entropy."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy, its adapters, and the critic's start. In `rollouts rl`, `path` also has the tokenizer
    and the chat template."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizers and learning rates."""
    run: RunConfig = field(default_factory=RunConfig)
    """Directory, seed, checkpoints and records of the run. In `rollouts rl`, `seed` is also the seed of
    the order of tasks in each pass, and of the embedded engine unless `[generate]` sets `seed`."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the policy."""
        rate = self.optimizer.learning_rate
        return self.usual_learning_rate if rate is None else rate

    @property
    def usual_learning_rate(self) -> float:
        """Usual peak learning rate of the method, which depends on the loss and on LoRA.

        Sources: the defaults of TRL's GRPOTrainer (1e-6) and SFTTrainer (2e-5), documented at
        huggingface.co/docs/trl; ten times the rate with LoRA, for supervised training and RL alike:
        Schulman et al. (2025), "LoRA Without Regret".
        """
        rate = IMITATION if self.loss.is_supervised else RL
        return rate if self.model.lora_rank is None else float(f"{rate * LORA_FACTOR:g}")

    @property
    def compares_groups(self) -> bool:
        """True if advantages depend on the returns of a trajectory's group."""
        return not self.loss.is_supervised and "group_index" in self.advantage.inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Sections):
    """All settings of a training run, by section; saved in `OUT/config.json` with defaults resolved.

    Raises:
        ConfigError: A value is out of range, two values contradict each other, or a path is missing.

    Example:
        >>> paths = {"data": DataConfig(dataset="ds"), "model": ModelConfig(path="smollm2")}
        >>> TrainConfig(**paths, run=RunConfig(out="run")).batch.sequence_layout
        'merge'
    """

    def __post_init__(self) -> None:
        check_required(dataclasses.asdict(self), REQUIRED)
        check_settings(self)


AnySections = TypeVar("AnySections", bound=Sections)


PATHS = ("data.dataset", "model.path", "loss.reference_model", "model.critic_model")
"""Keys whose values may differ between machines, or change when a run resumes: digests are compared."""
MOST_CONFIG_BYTES = 64 << 20


def load_config(
    toml_path: str | Path | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Read a configuration with `rollout_io.configuration.load_record`.

    Args:
        toml_path: TOML file with a table for each section, or the `config.json` of a run; or None.
        overrides: `section.key=value` strings, which override file and options.
        options: Values by `section.key`, which override the file. A value of None is ignored.

    Raises:
        InputError: The file is unreadable.
        ConfigError: A key is unknown (the hint suggests the nearest name), a value has the wrong type or
            is out of range, or `data.dataset`, `model.path` or `run.out` is missing.

    Example:
        >>> paths = {"data.dataset": "ds", "model.path": "m", "run.out": "o"}
        >>> load_config(None, ["loss.tis_ratio_type=none"], paths).loss.tis_ratio_type
    """
    return _load(TrainConfig, toml_path, overrides, options)


def load_sections(
    toml_path: str | Path | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Sections:
    """Read a configuration as `load_config` does, but without requiring any key."""
    config = _load(Sections, toml_path, overrides, options)
    check_settings(config)
    return config


def _load(
    kind: type[AnySections],
    toml_path: str | Path | None,
    overrides: Sequence[str],
    options: Mapping[str, Any] | None,
) -> AnySections:
    return load_record(
        kind,
        toml_path,
        overrides,
        options,
        list_examples=LIST_EXAMPLES,
        moved=MOVED,
        more=own_parameters(read_values(toml_path), overrides),
    )


def uses(config: TrainConfig) -> dict[str, Function]:
    """Return the policy loss, advantage estimator and reduction that a run uses, by their keys.

    There is no estimator if the loss takes no advantages.
    """
    is_used = {
        kind: kind is not ADVANTAGE_ESTIMATOR or not config.loss.is_supervised for kind in KINDS
    }
    return {kind.path: bind(kind, getattr(config, kind.section)) for kind in KINDS if is_used[kind]}


def default_dtype() -> Literal["float32", "bfloat16"]:
    """Return the precision of a run that asks for none: bfloat16 on a CUDA device, else float32."""
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def check_model_directory(path: str) -> None:
    """Check that a directory has a `config.json` with a JSON object.

    Raises:
        InputError: `model_directory`: the directory or its `config.json` does not exist, or it is
            no JSON object, or nested too deeply.
    """
    file = Path(path) / "config.json"
    if file.is_file():
        try:
            is_object = isinstance(json.loads(read_input(file, MOST_CONFIG_BYTES)), dict)
            finding = "config.json is not a JSON object"
        except ValueError as error:
            if isinstance(error, RolloutError):
                raise
            is_object, finding = False, f"config.json is not JSON: {error}"
        except RecursionError:
            is_object, finding = False, "config.json is nested too deeply"
        if is_object:
            return
        raise InputError("model_directory", path, finding, hint="download config.json again")
    hint: str | None = None
    finding = "config.json is missing from this model directory"
    if not Path(path).is_dir():
        finding = "the model directory does not exist"
        name = path if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) else "ORG/NAME"
        hint = f"download the model: `hf download {name} --local-dir DIR`, then pass DIR"
    raise InputError("model_directory", path, finding, hint=hint)


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as JSON."""
    replace_text(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def resolved(config: AnySections) -> AnySections:
    """Resolve keys that are None.

    `outcome` and `merge_rule` follow from the dataset, if there is one, `dtype` from the device,
    `batch_normalize` from the estimator, and `learning_rate` from the method.

    Raises:
        RolloutError: The dataset cannot be read.
    """
    from rollout_io.dataset.trajectory_facts import dataset_outcome

    data, batch, model, advantage = config.data, config.batch, config.model, config.advantage
    rule = batch.merge_rule
    if data.dataset and batch.sequence_layout == "merge" and rule is None:
        rule = "keep" if _was_merged(data.dataset) else "lineage"
    outcome = dataset_outcome(data.dataset, data.outcome) if data.dataset else data.outcome
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, outcome=outcome),
        batch=dataclasses.replace(batch, merge_rule=rule),
        advantage=dataclasses.replace(advantage, batch_normalize=advantage.normalizes_batch),
        model=dataclasses.replace(model, dtype=model.dtype or default_dtype()),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=config.learning_rate),
    )


def _was_merged(dataset: str) -> bool:
    """Return True if the last merge or unmerge in the dataset's history is a merge.

    If the history has neither, return True if any row was merged from several steps.
    """
    import rollout_io
    from rollout_io.dataset.trajectory_facts import joined

    history = rollout_io.read_metadata(dataset).made_by
    verbs = [entry["verb"] for entry in history if entry.get("verb") in {"merge", "unmerge"}]
    if verbs:
        return bool(verbs[-1] == "merge")
    rows = rollout_io.scan(dataset)
    return bool(rows.select(joined(rows).any()).collect().item())


def to_toml(values: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> str:
    """Write a configuration as TOML that `rollout_io.configuration.load_record` reads back.

    None is written as "none". `notes` are comments, by `section.key`.

    Example:
        >>> print(to_toml({"rate": 0.5, "limit": None, "loss": {"eps": 1, "names": ("a",)}}))
        rate = 0.5
        limit = "none"
        <BLANKLINE>
        [loss]
        eps = 1
        names = ["a"]
    """
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in values.items() if key not in tables}
    parts = ["\n".join(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())]
    for name, table in tables.items():
        lines = [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in table.items()]
        for index, key in enumerate(table):
            if note := (notes or {}).get(f"{name}.{key}"):
                lines[index] += f"  # {note}"
        parts.append("\n".join([f"[{_toml_key(name)}]", *lines]))
    return "\n\n".join(part for part in parts if part)


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else _toml_text(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(k)} = {_toml_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str | None):
        return _toml_text("none" if value is None else value)
    return json.dumps(value)


def _toml_text(text: str) -> str:
    """Quote text for TOML, which has no surrogate pairs and, unlike JSON, escapes DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


COMMON = (
    *("data.dataset", "model.path", "run.out", "optimizer.learning_rate"),
    *("batch.groups_per_batch", "batch.groups_per_mini_batch", "batch.num_epochs"),
    *("batch.max_updates", "batch.tokens_per_micro_batch", "advantage.estimator"),
    *("loss.policy_loss_type", "model.lora_rank", "run.save_every_updates"),
)
"""Keys that people set most, in this order."""


def shown(config: Sections) -> str:
    """Return a configuration as TOML; each key is followed by the first sentence of its meaning.

    Sections and keys in `COMMON` come first.
    """
    values = dataclasses.asdict(config)
    types = typing.get_type_hints(type(config))
    rank = {key: number for number, key in enumerate(COMMON)}
    firsts = dict.fromkeys(key.partition(".")[0] for key in COMMON)
    ordered = {
        section: dict(
            sorted(
                values[section].items(), key=lambda kv: rank.get(f"{section}.{kv[0]}", len(rank))
            )
        )
        for section in [*firsts, *(values.keys() - firsts.keys())]
    }
    notes = {f"{s}.{key}": text for s in ordered for key, text in meanings(types[s]).items()}
    return to_toml(ordered, notes)


def meanings(kind: type[Any]) -> dict[str, str]:
    """Return the first sentence of the docstring below each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, doc in pairwise(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(doc, ast.Expr):
            text = " ".join(str(ast.literal_eval(doc.value)).split())
            required = "Required. " if text.startswith("Required. ") else ""
            sentence = text.removeprefix("Required. ").partition(". ")[0]
            texts[ast.unparse(node.target)] = f"{required}{sentence.removesuffix('.')}."
    return texts
