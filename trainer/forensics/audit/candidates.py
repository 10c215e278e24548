"""Find and load the weights that may have sampled a dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.sampling_defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from pipelines.view.run_files import metric_lines
from schemas.error_ids import fix_of
from schemas.errors import ConfigError, InputError
from trainer.config.sections import ModelConfig
from trainer.models.directory import check_model_directory
from trainer.models.lora import CONFIG, add_adapter
from trainer.models.policy import Policy, load_policy
from trainer.run.checkpoint import checkpoint_path

_NUMBERED = re.compile(r"(version|global_step)_(\d+)")
CHUNK_TOKENS = 256
"""Number of targets whose logits are in memory at once."""
HINT = (
    "pass a run, its weights/ folder, a model directory, or VERSION=DIR; repeat --weights for more"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Weights that may have sampled the rows."""

    version: int | None  # their `policy_version`; None if unknown
    path: Path  # model directory, or directory of an adapter in peft's format
    base: Path | None = None  # model that the adapter is added to; None for a model

    @property
    def name(self) -> str:
        """The version, or the directory's name if the version is unknown."""
        return self.path.name if self.version is None else f"version {self.version}"


def find_candidates(paths: Sequence[str], base: str | None = None) -> list[Candidate]:
    """Find the candidates that `--weights` names.

    Each value is one of:

    - a run of `rollouts rl`: the directories in `weights/`, the checkpoints, and the model that the
      run started from (version 0);
    - a folder of directories named `version_N`: these versions;
    - a model directory or adapter, or VERSION=DIR. Without VERSION, the version follows from the
      name `version_N`, or from the metrics of the run that contains the checkpoint.

    Args:
        paths: Values, at least one.
        base: Model directory for adapters; None: as named in `adapter_config.json`.

    Raises:
        InputError: `model_directory`: there are no weights.
        ConfigError: `weights`: two directories have the same version.
    """
    candidates = [one for value in paths for one in _candidates_in(value, base)]
    by_version: dict[int, Candidate] = {}
    for one in candidates:
        if one.version is not None and by_version.setdefault(one.version, one) is not one:
            finding = (
                f"both {by_version[one.version].path} and {one.path} are version {one.version}"
            )
            raise ConfigError("weights", "--weights", finding, hint=fix_of("weights"))
    return sorted(candidates, key=lambda one: (one.version is None, one.version or 0))


def _candidates_in(value: str, base: str | None) -> Iterator[Candidate]:
    version, equals, named = value.partition("=")
    if equals and version.strip().isdecimal():
        yield _candidate(Path(named), int(version), base)
        return
    path = Path(value)
    if _is_model(path):
        yield _candidate(path, _number(path), base)
        return
    folders = [path, path / "weights"]
    inside = [sub for folder in folders for sub in sorted(folder.glob("*")) if _is_model(sub)]
    numbered = [sub for sub in inside if _number(sub) is not None]
    yield from (_candidate(sub, _number(sub), base) for sub in numbered or inside)
    seen = {_number(sub) for sub in numbered}
    if (path / "config.json").is_file() and (path / "metrics.jsonl").is_file():
        for version_of_run, directory in _of_run(path):
            if version_of_run not in seen and _is_model(directory):
                seen.add(version_of_run)
                inside.append(directory)
                yield _candidate(directory, version_of_run, base)
    if not inside:
        finding = "there are no weights in this directory" if path.is_dir() else "no such directory"
        raise InputError("model_directory", value, finding, hint=HINT)


def _of_run(run: Path) -> Iterator[tuple[int, Path]]:
    """Yield the version and the directory of a run's first model and of its checkpoints."""
    model = _read_object(run / "config.json").get("model")
    yield 0, Path(str(model.get("path", "")) if isinstance(model, dict) else "")
    for step, version in _versions_by_step(run).items():
        path = checkpoint_path(run, step)
        if not _is_within_iteration(path):
            yield version, path


def _is_within_iteration(checkpoint: Path) -> bool:
    """True if a checkpoint was saved in the middle of an iteration, and so has no version."""
    file = checkpoint / "state" / "run.json"
    return file.is_file() and bool(_read_object(file).get("mini_batch"))


def _versions_by_step(run: Path) -> dict[int, int]:
    """Map the last recorded update of each iteration to the version that the iteration produced."""
    updates = [line for line in metric_lines(run) if "loss" in line]
    iterations = [(line.get("iteration"), line["global_step"]) for line in updates]
    last = {number + 1: step for number, step in iterations if isinstance(number, int)}
    return {step: version for version, step in last.items()}


def _candidate(path: Path, version: int | None, base: str | None) -> Candidate:
    config = path / CONFIG
    if not config.is_file():
        check_model_directory(str(path))
        return Candidate(version=version, path=path)
    settings = _read_object(config)
    _check_adapter(settings, config)
    named = base or str(settings.get("base_model_name_or_path") or "")
    check_model_directory(named)
    return Candidate(version=version, path=path, base=Path(named))


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        finding = f"the file is damaged: {error}"
        raise InputError("model_directory", str(path), finding, hint=HINT) from None
    if not isinstance(value, dict):
        finding = f"the file contains a {type(value).__name__}"
        raise InputError("model_directory", str(path), finding, "a JSON object", HINT)
    return value


_UNSUPPORTED = (
    *("use_rslora", "use_dora", "use_qalora", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("exclude_modules", "layers_to_transform", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "lora_bias", "fan_in_fan_out"),
)
"""peft settings that change the output of an adapter, and that an audit does not support."""


def _check_adapter(settings: dict[str, Any], path: Path) -> None:
    """Check that an audit can apply an adapter with these settings."""
    hint = "merge the adapter into its model with peft, and pass the merged model"
    numbers = [settings.get(name) for name in ("r", "lora_alpha")]
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        finding = f"r is {numbers[0]!r} and lora_alpha {numbers[1]!r}"
        raise InputError("model_load", str(path), finding, "two positive numbers", hint)
    targets = settings.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        finding = f"target_modules is {str(targets)[:60]!r}"
        raise InputError("model_load", str(path), finding, "a list of names of layers", hint)
    others = [name for name in _UNSUPPORTED if settings.get(name)]
    others += ["bias"] * (settings.get("bias", "none") not in {None, "none"})
    if others:
        finding = f"the adapter uses {', '.join(others)}, which an audit cannot apply"
        raise InputError("model_load", str(path), finding, hint=hint)


def defaults_of(candidates: Sequence[Candidate]) -> SamplingDefaults:
    """Return the sampling settings of the first candidate that has a `generation_config.json`."""
    defaults = (sampling_defaults(one.base or one.path) for one in candidates)
    return next((one for one in defaults if one is not None), NEUTRAL)


def context_tokens(candidate: Candidate) -> int | None:
    """Return the number of positions that a candidate's configuration allows; None if unknown.

    It is unknown for the current weights of a run, which have no directory yet.
    """
    file = (candidate.base or candidate.path) / "config.json"
    config = _read_object(file) if file.is_file() else {}
    inner = config.get("text_config")
    limit = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _is_model(path: Path) -> bool:
    if (path / CONFIG).is_file():
        return True
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    return (path / "config.json").is_file() and has_weights


def _number(path: Path) -> int | None:
    name = _NUMBERED.fullmatch(path.resolve().name)
    if not name or (name[1] != "version" and _is_within_iteration(path)):
        return None
    number = int(name[2])
    if name[1] == "version":
        return number
    return _versions_by_step(path.resolve().parents[1]).get(number)


def load_candidate(candidate: Candidate, *, device: torch.device, trees: bool) -> Policy:
    """Load the weights of a candidate for scoring, in float32; see `load_policy`.

    Raises:
        InputError: The weights cannot be loaded, or cannot forward trees.
    """
    path = str(candidate.base or candidate.path)
    policy = load_policy(path, logprob_chunk_tokens=CHUNK_TOKENS, trees=trees)
    if candidate.base is not None:
        settings: dict[str, Any] = json.loads((candidate.path / CONFIG).read_text("utf-8"))
        adapter = ModelConfig(
            lora_rank=settings["r"],
            lora_alpha=settings["lora_alpha"],
            lora_target_modules=tuple(settings["target_modules"]),
            path=path,
        )
        add_adapter(policy, adapter, candidate.path)
    return policy.to(device)
