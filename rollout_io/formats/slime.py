"""The `slime` format: debug rollout data, written by `--save-debug-rollout-data` with torch.save.

A sample is a sequence: its response may contain several turns, and `loss_mask` is 0 between them.
Samples with the same `rollout_id` (or `index`, if that is null) form one run. The file is a pickle;
`torch.load(weights_only=True)` reads it without running code from it.

The export to slime keeps columns in a sample's `metadata`, which are read back of exported samples only:
slime and its users put anything into it.

    {"trajectory_id": "a_0", "token_source": "engine", "temperature": 1.0, "trainer_logprobs": [...], ...}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.dataset.opening import Version, open_input
from rollout_io.formats.base import (
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Step,
    Trajectory,
)
from rollout_io.formats.engines.files import Start
from rollout_io.formats.engines.runs import gathered
from rollout_io.formats.parsing.bodies import Int32
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.jsonl import refuse_lfs_pointer
from rollout_io.formats.parsing.records import index_of, with_group_rule
from rollout_io.formats.parsing.tokens import (
    IDS,
    INT32_MAX,
    LOGPROBS,
    MASK,
    ROUTES,
    BrokenArray,
    Numbers,
    broken,
    logprob_array,
    names_of,
    num_ids,
    oldest,
    versions_of_calls,
)
from rollout_io.formats.verifiers_traces import runs
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError, InvariantError, RolloutError, count
from schemas.imports import requires_extra
from schemas.rules import RULES

_ALONE = "inferred: a run whose samples do not name a group is a separate group"
_FIELDS = (b"rollout_id", b"samples")
_SAMPLE_FIELDS = (b"response_length", b"group_index")
_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_LFS_BYTES = 1024

_Index = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]


class _Named(msgspec.Struct, gc=False):
    group_index: _Index | None = None
    index: _Index | None = None
    rollout_id: _Index | None = None


class _Sample(_Named, kw_only=True, gc=False):
    tokens: Any
    response_length: Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
    prompt: Any = None
    response: str | None = None
    label: Any = None
    reward: Any = None
    loss_mask: Any = None
    rollout_log_probs: Any = None
    rollout_routed_experts: Any = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    weight_versions: list[Any] | None = None
    remove_sample: bool = False
    status: str | None = None
    metadata: dict[Any, Any] | None = None
    session_id: str | None = None


def recognizes(start: Start) -> bool:
    """True if a file is a torch.save archive whose pickle contains the fields of slime's samples."""
    return all(field in start.torch_pickle for field in (*_FIELDS, *_SAMPLE_FIELDS))


def _all(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield runs, file by file, in the order of their first samples.

    The instance is `FILE/GROUP`: the file name without its extension (the entire path, if two files
    share a name), and `group_index`.
    """
    names = [Path(log.name).name.split(".")[0] or log.name for log in inputs]
    for log, name in zip(inputs, names, strict=True):
        num_bytes = log.path.stat().st_size
        progress(num_bytes)
        try:
            samples = _load(log.path, Version.of(log.path), log.name)
        except RolloutError as error:
            yield Rejected(Place(log.path, log.name, None, num_bytes), error)
            continue
        file = name if names.count(name) == 1 else log.name
        yield from _find(log, file, samples, num_bytes // len(samples))


def _find(log: Input, file: str, samples: Sequence[Any], num_bytes: int) -> Iterator[Found]:
    keys = [_key(sample, number) for number, sample in enumerate(samples)]

    def found() -> Iterator[Found]:
        for number, sample in enumerate(samples):
            place = Place(log.path, f"{log.name}, samples[{number}]", None, num_bytes, number)
            try:
                yield _run_of(_sample(sample, place.where), file, keys[number][1], place)
            except RolloutError as error:
                yield Rejected(place, error)

    return gathered(found(), lambda place: keys[index_of(place)])


def _key(sample: Any, number: int) -> tuple[int | None, str]:
    """Return the group of a sample that may be damaged, and what it shares with its run."""
    try:
        named = msgspec.convert(sample, _Named, strict=True)
    except (msgspec.ValidationError, RecursionError):
        named = _Named()
    shared = named.index if named.rollout_id is None else named.rollout_id
    return named.group_index, f"sample-{number}" if shared is None else str(shared)


def _run_of(sample: _Sample, file: str, shared: str, place: Place) -> Run:
    group = None if sample.group_index is None else str(sample.group_index)
    labels = filled(
        group_index=group,
        index=None if sample.index is None else str(sample.index),
        rollout_id=None if sample.rollout_id is None else str(sample.rollout_id),
        session=sample.session_id,
        file=file,
        label=sample.label if isinstance(sample.label, str) else None,
    )
    instance = f"{file}/{shared if group is None else group}"
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read_samples(run: Run, _options: Options) -> Trajectory:
    """Read the sequences of a run, in order.

    The outcome is the reward of the last sequence; slime gives all sequences of a run the same
    reward. If the reward is an object, its `reward` or only number is the outcome, and all its
    numbers are metrics. The run has failed if a sequence has the status `failed`, or if there is no
    reward and a sequence has a status other than `completed` and `truncated`.
    """
    path = run.places[0].path
    samples = _load(path, Version.of(path), str(path))
    siblings = [
        (_sample(samples[index_of(place)], place.where), place.where) for place in run.places
    ]
    rewards = [_reward(sample, where) for sample, where in siblings]
    outcome, metrics = rewards[-1]
    statuses = [sample.status for sample, _ in siblings]
    odd = [one for one in statuses if one not in {None, "completed", "truncated"}]
    has_failed = "failed" in statuses or (bool(odd) and outcome is None)
    error = f"status: {'failed' if 'failed' in statuses else odd[0]}" if has_failed else None
    failed = run.failed or error is not None
    steps = [_step(sample, where, failed=failed) for sample, where in siblings]
    values = [reward for reward, _ in rewards]
    if len(set(values)) > 1:
        for step, reward in zip(steps, values, strict=True):
            step.reward = reward
    last = siblings[-1][0]
    for (sample, where), step in zip(siblings, steps, strict=True):
        others = sample.metadata or {}
        others = others if failed else _read_back(step, others, where)
        metrics = {**_numbers(others, f"{where}, metadata"), **metrics}
    versions = [name for sample, _ in siblings for name in names_of(sample.weight_versions)]
    is_unknown = bool(versions) and oldest(versions) is None
    return Trajectory(
        steps=[step for step in steps if not failed or len(step.prompt_token_ids)],
        reward=outcome,
        error=error,
        metrics=metrics,
        user_values=filled(
            label=run.labels.get("label"),
            status=last.status,
            weight_versions=",".join(dict.fromkeys(versions)) if is_unknown else None,
        ),
    )


def _sample(value: Any, where: str) -> _Sample:
    try:
        return msgspec.convert(value, _Sample, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        finding, hint = f"invalid sample: {error}", "write the file with --save-debug-rollout-data"
        raise InputError("record_type", where, finding, hint=hint) from None


def _step(sample: _Sample, where: str, *, failed: bool) -> Step:
    tokens = _array(IDS, sample.tokens, f"{where}, tokens")
    num = sample.response_length
    if num > len(tokens):
        finding = f"response_length is {num}, but there are only {count(len(tokens), 'token')}"
        raise broken("lengths_align", where, finding)
    if not failed and not 0 < num < len(tokens):
        part = "response" if num == 0 else "prompt"
        raise broken(f"nonempty_{part}", where, f"the {part} has no tokens")
    mask, logprobs, routes = _mask(sample, where), None, None
    if sample.rollout_log_probs is not None:
        values = _array(LOGPROBS, sample.rollout_log_probs, f"{where}, rollout_log_probs")
        logprobs = logprob_array(values.tolist(), num, where)
    if sample.rollout_routed_experts is not None:
        place = f"{where}, rollout_routed_experts"
        routes = _array(ROUTES, sample.rollout_routed_experts, place)
        if len(routes) > len(tokens):
            expected = f"at most {len(tokens)} tokens"
            raise broken("routing_shape", place, f"shape {routes.shape}", expected)
    sent = sample.prompt if isinstance(sample.prompt, (str, list)) and sample.prompt else None
    return Step(
        source=where,
        prompt_token_ids=tokens[: len(tokens) - num],
        response_ids=tokens[len(tokens) - num :],
        rollout_logprobs=logprobs,
        rollout_expert_indices=routes,
        sampling_support=_support(sample, where),
        loss_mask=mask,
        trains=not sample.remove_sample,
        spans=runs(mask) if mask is not None and mask.any() else None,
        stop_reason=_REASONS.get(sample.status or "", sample.status),
        policy_version=oldest(names_of(sample.weight_versions)),
        policy_versions=versions_of_calls(sample.weight_versions, len(tokens) - num, num, where),
        messages=None if sent is None else _json(sent),
        response_text=sample.response or None,
        texts=(sample.response,) if sample.response else (),
    )


def _mask(sample: _Sample, where: str) -> npt.NDArray[np.bool_] | None:
    if sample.loss_mask is None:
        return None
    mask = _array(MASK, sample.loss_mask, f"{where}, loss_mask")
    if len(mask) != sample.response_length:
        finding = f"a loss_mask of length {len(mask)}"
        expected = f"{sample.response_length}, one per response token"
        raise broken("lengths_align", where, finding, expected)
    return None if mask.all() else mask


def _support(sample: _Sample, where: str) -> list[list[int]] | None:
    """Return the ids that top-p kept at each response token; empty at tokens not sampled."""
    if sample.rollout_top_p_token_offsets is None:
        return None
    place = f"{where}, rollout_top_p_token_ids"
    ids = _array(IDS, sample.rollout_top_p_token_ids, place).tolist()
    ends = _array(IDS, sample.rollout_top_p_token_offsets, f"{where}, rollout_top_p_token_offsets")
    is_whole = len(ends) == sample.response_length + 1 and (np.diff(ends) >= 0).all()
    if not is_whole or ends[0] != 0 or ends[-1] != len(ids):
        expected = f"{sample.response_length + 1} ascending offsets, from 0 to {len(ids)}"
        raise broken("lengths_align", place, f"{len(ends)} offsets", expected)
    return [ids[start:end] for start, end in pairwise(ends.tolist())]


def _array(numbers: Numbers, value: Any, where: str) -> npt.NDArray[Any]:
    try:
        return numbers.read(value)
    except BrokenArray as error:
        kind = InvariantError if error.broken_rule in RULES else InputError
        hint = RULES[error.broken_rule].hint if error.broken_rule in RULES else None
        raise kind(error.broken_rule, where, error.got, error.expected, hint) from None


def _reward(sample: _Sample, where: str) -> tuple[float | None, dict[str, float]]:
    """Return the outcome, and all rewards by name."""
    rewards = sample.reward if isinstance(sample.reward, Mapping) else {"reward": sample.reward}
    numbers = _numbers(rewards, f"{where}, reward")
    if "reward" in rewards:
        if rewards["reward"] is not None and "reward" not in numbers:
            finding = f"a reward of type {type(rewards['reward']).__name__}"
            raise InputError("record_type", where, finding, "a number, or an object of numbers")
        return numbers.get("reward"), numbers
    alone = next(iter(numbers.values())) if len(numbers) == 1 else None
    return alone, numbers


def _numbers(values: Mapping[Any, Any], where: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        plain = value.item() if hasattr(value, "item") and getattr(value, "size", 2) == 1 else value
        if isinstance(name, str) and isinstance(plain, (int, float)):
            try:
                numbers[name] = float(plain)
            except OverflowError:
                finding = "the number is too large for a 64-bit float"
                raise InputError("record_type", f"{where}, {name}", finding) from None
    return numbers


def _json(value: Any) -> str | None:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return None


@lru_cache(maxsize=2)
def _load(path: Path, _: Version, where: str) -> list[Any]:
    """Load the samples of a file; two files are cached, because runs are read one by one."""
    with open_input(path) as file:
        refuse_lfs_pointer(file.read(_LFS_BYTES), where)
    if not Start(path).torch_pickle:
        finding = "the file was not written by torch.save, or it is cut off"
        raise InputError("torch_file", where, finding, hint="save the rollout again")
    document = _load_plain(path, where)
    samples = document.get("samples") if isinstance(document, dict) else None
    if not isinstance(samples, list) or not samples:
        finding, hint = "the file has no samples", "save the rollout again"
        raise InputError("no_calls", where, finding, hint=hint)
    return samples


def _load_plain(path: Path, where: str) -> Any:
    with requires_extra("train", where):
        import torch
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged or hostile file can make the loader raise anything
        finding = " ".join(f"cannot load the file: {str(error) or type(error).__name__}".split())
        hint = "save only plain data, numbers and tensors: other classes could run code"
        raise InputError("torch_file", where, finding[:300], hint=hint) from None


def _numpy_globals() -> list[Any]:
    """Return the globals that rebuild NumPy arrays and scalars, as NumPy 1 and 2 name them."""
    core = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    kinds = "?bhilqBHILQefd"
    named = [(core, f"numpy.{c}.multiarray._reconstruct") for c in ("core", "_core")]
    named += [(scalar, f"numpy.{c}.multiarray.scalar") for c in ("core", "_core")]
    return [*named, np.ndarray, np.dtype, *dict.fromkeys(type(np.dtype(k)) for k in kinds)]


ADAPTER = Adapter(
    summary="slime: debug rollout data (.pt), loaded without running code",
    recognizes=recognizes,
    find=lambda inputs, progress: with_group_rule(_all(inputs, progress), _ALONE, "group_index"),
    read=read_samples,
)


_Id = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
_MADE = {"label", "status", "weight_versions"}  # columns that every sample gives


class _Exported(msgspec.Struct, gc=False):
    """The columns of a row; `trajectory_id` and `token_source` tell that it was exported."""

    trajectory_id: str
    token_source: str
    policy_versions: list[Int32] | None = None
    trainer_logprobs: list[float] | None = None
    teacher_token_ids: list[list[_Id]] | None = None
    teacher_logprobs: list[list[float]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    sampling_extra: str | None = None
    agent: str | None = None
    stop_reason: str | None = None
    metrics: dict[str, float] | None = None


_BY_TOKEN = ("policy_versions", "trainer_logprobs", "teacher_token_ids", "teacher_logprobs")


def _read_back(step: Step, metadata: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Set the columns of a step, and strings in user columns; return what else the metadata holds."""
    if not {"trajectory_id", "token_source"} <= metadata.keys():
        return dict(metadata)
    try:
        columns = msgspec.convert(metadata, _Exported, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError("record_type", f"{where}, metadata", str(error)) from None
    num_tokens = num_ids(step.response_ids)
    for name in _BY_TOKEN:
        values = getattr(columns, name)
        if values is not None and len(values) != num_tokens:
            finding = f"metadata.{name}: {count(len(values), 'value')}"
            raise broken("lengths_align", where, finding, f"{num_tokens}, one per response token")
    for name in _Exported.__struct_fields__:
        value = getattr(columns, name)
        if value is not None and name != "trajectory_id":
            setattr(step, name, value)
    if columns.policy_versions is not None:
        step.policy_versions = np.array(columns.policy_versions, np.int32)
    if columns.trainer_logprobs is not None:
        step.trainer_logprobs = logprob_array(columns.trainer_logprobs, num_tokens, where)
    others = {name: v for name, v in metadata.items() if name not in COLUMN_BY_NAME}
    step.columns = {
        name: pa.scalar(value, pa.string())
        for name, value in others.items()
        if isinstance(name, str) and isinstance(value, str) and name not in _MADE
    }
    return others
