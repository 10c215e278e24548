"""Find the weights that may have sampled a dataset, load them, and forward rows under them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.sampling_defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from pipelines.view.run_files import metric_lines
from schemas.errors import ConfigError, InputError, count
from schemas.ragged import BoolArray, IntArray
from schemas.rules import fix_of
from trainer.batches.forest import chain_forests, chain_lengths
from trainer.batches.tree import Trie, make_trie, tree_forests
from trainer.config.sections import ModelConfig
from trainer.config.train_config import check_model_directory
from trainer.forensics.audit.rows import KEYS, AuditRows
from trainer.forensics.audit.scores import TokenScores, concatenate, score_tokens
from trainer.models.lora import CONFIG, add_adapter
from trainer.models.policy import Policy, hidden_before_targets, load_policy
from trainer.models.router_replay import replayed
from trainer.run.checkpoint import checkpoints
from trainer.run.memory import available_bytes

_NUMBERED = re.compile(r"(version|global_step)_(\d+)")
CACHED_SHARE = 0.4
"""Fraction of the free memory that loaded candidates may take in total."""
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
    by_version, candidates = dict[int, Path](), list[Candidate]()
    for version, path in (one for value in paths for one in _directories_in(value)):
        if version is not None and by_version.setdefault(version, path) is not path:
            finding = f"both {by_version[version]} and {path} are version {version}"
            raise ConfigError("weights", "--weights", finding, hint=fix_of("weights"))
        candidates.append(_candidate(path, version, base))
    return sorted(candidates, key=lambda one: (one.version is None, one.version or 0))


def _directories_in(value: str) -> list[tuple[int | None, Path]]:
    """Return the directories of weights that a value of `--weights` names, and their versions."""
    version, equals, directory = value.partition("=")
    if equals and version.strip().isdecimal():
        return [(int(version), Path(directory))]
    path = Path(value)
    if _is_model(path):
        return [(_number(path), path)]
    inside = [sub for folder in (path, path / "weights") for sub in sorted(folder.glob("*"))]
    named = [(_number(sub), sub) for sub in inside if _is_model(sub)]
    numbered = [one for one in named if one[0] is not None]
    of_run = list[tuple[int | None, Path]]()
    if (path / "config.json").is_file() and (path / "metrics.jsonl").is_file():
        model = _read_object(path / "config.json").get("model")
        start = Path(str(model.get("path", "")) if isinstance(model, dict) else "")
        saved = [(_number(sub), sub) for sub in checkpoints(path).values()]
        others = {None, *(number for number, _ in numbered)}
        of_run = [one for one in [(0, start), *saved] if one[0] not in others and _is_model(one[1])]
    if not named and not of_run:
        finding = "there are no weights in this directory" if path.is_dir() else "no such directory"
        raise InputError("model_directory", value, finding, hint=HINT)
    return [*(numbered or named), *of_run]


def _is_model(path: Path) -> bool:
    if (path / CONFIG).is_file():
        return True
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    return (path / "config.json").is_file() and has_weights


def _number(path: Path) -> int | None:
    """Return the version of a directory: from its name, or from the metrics of its run.

    The last update of an iteration makes the next version; a checkpoint within one has none.
    """
    path = path.resolve()
    name = _NUMBERED.fullmatch(path.name)
    if name is None or name[1] == "version":
        return name and int(name[2])
    file = path / "state" / "run.json"
    if file.is_file() and _read_object(file).get("mini_batch"):
        return None
    updates = [line for line in metric_lines(path.parents[1]) if "loss" in line]
    last = {line["iteration"]: line["global_step"] for line in updates if "iteration" in line}
    return {step: iteration + 1 for iteration, step in last.items()}.get(int(name[2]))


def _candidate(path: Path, version: int | None, base: str | None) -> Candidate:
    config = path / CONFIG
    if not config.is_file():
        check_model_directory(str(path))
        return Candidate(version=version, path=path)
    settings = _read_object(config)
    rank, alpha, targets = (settings.get(name) for name in ("r", "lora_alpha", "target_modules"))
    others = [name for name in _UNSUPPORTED if settings.get(name)]
    others += ["bias"] * (settings.get("bias", "none") not in {None, "none"})
    finding = expected = ""
    if not all(isinstance(one, int | float) and one > 0 for one in (rank, alpha)):
        finding, expected = f"r is {rank!r} and lora_alpha {alpha!r}", "two positive numbers"
    elif not (isinstance(targets, list) and all(isinstance(name, str) for name in targets)):
        finding, expected = f"target_modules is {str(targets)[:60]!r}", "a list of names of layers"
    elif others:
        finding = f"the adapter uses {', '.join(others)}, which an audit cannot apply"
    if finding:
        hint = "merge the adapter into its model with peft, and pass the merged model"
        raise InputError("model_load", str(config), finding, expected, hint)
    base = base or str(settings.get("base_model_name_or_path") or "")
    check_model_directory(base)
    return Candidate(version=version, path=path, base=Path(base))


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


def load_candidate(candidate: Candidate, *, device: torch.device, trees: bool) -> Policy:
    """Load the weights of a candidate for scoring, in float32; see `load_policy`.

    Raises:
        InputError: The weights cannot be loaded, or cannot forward trees.
    """
    path = str(candidate.base or candidate.path)
    policy = load_policy(path, logprob_chunk_tokens=CHUNK_TOKENS, trees=trees)
    if candidate.base is not None:
        settings = _read_object(candidate.path / CONFIG)
        adapter = ModelConfig(
            lora_rank=settings["r"],
            lora_alpha=settings["lora_alpha"],
            lora_target_modules=tuple(settings["target_modules"]),
            path=path,
        )
        add_adapter(policy, adapter, candidate.path)
    return policy.to(device)


class Weights:
    """Forwards rows under candidates, of which as many as fit are kept in memory.

    Args:
        candidates: The candidates.
        device: None: a GPU if there is one.
        loaded: Policies that are already in memory, by index of the candidate.
        trees: Forward rows as trees, with shared prefixes once, instead of separately.
        budget: Maximum number of tokens per forward pass, except for longer rows.

    `num_tokens` have been forwarded so far, in `seconds`, which do not count the loading of weights;
    `on_tokens` is called after each micro-batch with its number of tokens.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        device: torch.device | None = None,
        loaded: dict[int, Policy] | None = None,
        trees: bool = True,
        budget: int = 2048,
    ) -> None:
        self.candidates = candidates
        self.num_tokens, self.seconds = 0, 0.0
        self.on_tokens: Callable[[int], None] = lambda _: None
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded, self._trees, self._budget = loaded or {}, trees, budget
        self._cache: dict[int, Policy] = {}

    def policy(self, number: int) -> Policy:
        """Return the policy of a candidate, loading it if necessary."""
        if number in self._loaded:
            return self._loaded[number]
        if number not in self._cache:
            for other in list(self._cache.values())[:1]:
                size = sum(p.numel() * p.element_size() for p in other.parameters())
                free = available_bytes(self._device)
                if free is None or size > CACHED_SHARE * free:
                    self._cache.clear()
            one = self.candidates[number]
            self._cache[number] = load_candidate(one, device=self._device, trees=self._trees)
        return self._cache[number]

    @torch.no_grad()
    def score(
        self, number: int, rows: AuditRows, wanted: IntArray, policy: Policy | None = None
    ) -> dict[int, TokenScores]:
        """Forward the rows `wanted` under a candidate; return the scores of their spans by index.

        `policy` replaces the policy of the candidate, for example by one with rounded weights.

        Raises:
            InputError: `audit_rows`: the candidate has no embedding for a token.
        """
        is_target = rows.targets(wanted)
        if not is_target.any():
            return {}
        policy = policy or self.policy(number)
        self._check_tokens(number, rows, wanted, policy)
        tokens, routes = (rows.prompts, rows.responses), rows.routes
        if self._trees:
            trie = _trie_of(rows, is_target)
            forests = tree_forests(trie, *tokens, is_target, self._budget, routes=routes)
        else:
            forests = chain_forests(*tokens, is_target, wanted, self._budget, routes=routes)
        device, size = next(policy.parameters()).device, policy.logprob_chunk_tokens
        head, parts, slots = policy.model.get_output_embeddings(), [], list[IntArray]()
        for forest in forests:
            began = time.perf_counter()
            slots.append(forest.target_slot.numpy())
            settings = torch.from_numpy(rows.settings[rows.responses.row_of(slots[-1])]).to(device)
            micro_batch = forest.to(device)
            with replayed(policy.model, micro_batch.routes):
                hidden: Tensor = hidden_before_targets(policy.model, micro_batch)
            inputs = hidden, micro_batch.target_token, settings
            parts += [
                score_tokens(head(h), *more, scale=policy.logit_scale, softcap=policy.softcap)
                for h, *more in zip(*(torch.split(one, size) for one in inputs), strict=True)
            ]
            self.seconds += time.perf_counter() - began
            self.num_tokens += forest.num_tokens
            self.on_tokens(forest.num_tokens)
        scores = concatenate(parts).part(np.argsort(np.concatenate(slots)))
        place, chosen = np.cumsum(is_target) - 1, set(wanted.tolist())
        return {
            span: scores.part(place[start : start + length])
            for span, (row, start, length) in enumerate(rows.spans.tolist())
            if row in chosen
        }

    def _check_tokens(self, number: int, rows: AuditRows, wanted: IntArray, policy: Policy) -> None:
        size = policy.model.get_input_embeddings().weight.shape[0]
        for row in wanted.tolist():
            largest = np.append(rows.prompts.row(row), rows.responses.row(row)).max()
            if largest >= size:
                _, trajectory, step = rows.table.select(KEYS).row(row)
                where, one = f"trajectory '{trajectory}', row {step}", self.candidates[number]
                size_of_one = f"{one.name} ({one.path}) has {count(size, 'token')}"
                finding = f"token {largest}, but {size_of_one}"
                hint = "leave out candidates that have another tokenizer than the dataset"
                raise InputError("audit_rows", where, finding, hint=hint)


def _trie_of(rows: AuditRows, is_target: BoolArray) -> Trie:
    lengths = chain_lengths(rows.prompts, rows.responses, is_target)
    every = np.arange(rows.num_rows)
    return make_trie(rows.prompts, rows.responses, lengths, rows.group, every, rows.routes)


def num_distinct_tokens(rows: AuditRows) -> int:
    """Count the tokens to forward to score all rows that can be audited under one candidate."""
    is_target = rows.targets(rows.auditable)
    return _trie_of(rows, is_target).num_tokens if is_target.any() else 0
