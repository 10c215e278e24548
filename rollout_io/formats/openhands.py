"""The `openhands` format: OpenHands' evaluation and resolver outputs, and lists of events.

    output.jsonl         {"instance_id": ..., "history": [event, ...], "test_result": {...},
                          "metrics": {...}, "error": null}
    the resolver's       {"issue": {"owner": ..., "repo": ..., "number": 5}, "history": [...],
                          "success": true}
    a list of events     [{"id": 5, "source": "agent", "action": "run", "args": {...},
                           "tool_call_metadata": {"model_response": {...}, ...}}, ...]

Each line, and each list of events, is a run. `openhands_events` converts events to messages. The
raw responses of the model may contain the engine's tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory
from rollout_io.formats.engines.records import Records, is_object_with
from rollout_io.formats.grammar import inner
from rollout_io.formats.openhands_events import EVENT, is_reconstructed, read_calls
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import run_of_file, with_group_rule
from rollout_io.formats.parsing.model_calls import steps_of
from rollout_io.formats.parsing.naming import numbers
from schemas.errors import InputError

_SUFFIXES = (".events.json", ".json")
_LIMITS = ("reached maximum", "AgentStuckInLoopError")
_MAX_DEPTH = 3
_LEAVES = {
    "the task's data: what the agent saw of it is a message": "instance instruction issue_type "
    "base_commit",
    "the result of the run": "git_patch comment_success result_explanation",
    "settings": "metadata",
    "facts about the issue": "issue",
}


class _Issue(msgspec.Struct, gc=False):
    owner: str
    repo: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.owner}/{self.repo}#{self.number}"


class _LlmConfig(msgspec.Struct, gc=False):
    model: str | None = None


class _Metadata(msgspec.Struct, gc=False):
    llm_config: _LlmConfig | None = None


class Row(msgspec.Struct, gc=False):
    """A run."""

    history: Annotated[list[msgspec.Raw], inner(EVENT)] | None
    instance_id: str | None = None
    issue: _Issue | None = None
    metadata: _Metadata | None = None
    test_result: msgspec.Raw = NO_JSON
    report: msgspec.Raw = NO_JSON
    metrics: msgspec.Raw = NO_JSON
    resolved: bool | None = None
    success: bool | None = None
    error: str | None = None


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def run_of(row: Row, place: Place) -> Run:
    """Return the run of a row, named by `instance_id` or the issue, or of a list of events.

    The instance of a list of events is inferred from its file name.
    """
    if place.part is not None:
        return run_of_file(place, None, _SUFFIXES)
    instance = row.instance_id or (row.issue.name if row.issue else None)
    if not instance:
        hint = "keep the lines as OpenHands wrote them, because instance_id identifies the group"
        raise InputError("group", place.where, "the run has no `instance_id`", hint=hint)
    labels = {"instance_id": instance}
    config = row.metadata.llm_config if row.metadata else None
    if config is not None and config.model is not None:
        labels["model"] = config.model
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read(row: Row, run: Run, _: Options) -> Trajectory:
    """Read the calls and the evaluation of a run.

    The reward is the first of these fields that exists: `test_result.report.resolved`,
    `test_result.resolved`, `report.resolved`, `resolved`, and the resolver's `success`. It is
    unknown if the evaluation failed (`error_eval`). All numbers and booleans become metrics.
    `error` marks the run as failed, unless the agent used up its iterations or budget, or was stuck
    in a loop; the error is then only stored as `exit_status`.
    """
    (place,) = run.places
    history = row.history or []
    error = row.error if row.error and not any(mark in row.error for mark in _LIMITS) else None
    name = "history" if place.part is None else "events"
    calls = list(read_calls(history, f"{place.where}, {name}"))
    metrics = _metrics(row, place.where)
    texts = {"exit_status": row.error, "model": run.labels.get("model")}
    if calls and is_reconstructed(history):
        texts["text_source"] = "reconstructed from thoughts and actions"
    return Trajectory(
        steps=steps_of(calls, place.where, failed=run.failed or error is not None),
        reward=_reward(row, metrics),
        error=error,
        metrics=metrics,
        user_values={name: text for name, text in texts.items() if text},
    )


def _reward(row: Row, metrics: dict[str, float]) -> float | None:
    if any(metrics.get(f"{name}.error_eval") for name in ("test_result.report", "report")):
        return None
    order = ("test_result.report.resolved", "test_result.resolved", "report.resolved")
    stated = next((metrics[name] for name in order if name in metrics), None)
    for flag in (row.resolved, row.success):
        if stated is None and flag is not None:
            stated = float(flag)
    return stated


def _metrics(row: Row, where: str) -> dict[str, float]:
    """Return all numbers and booleans of the evaluation and the cost metrics."""
    metrics: dict[str, float] = {}
    for name in ("test_result", "report", "metrics"):
        metrics |= _numbers(name, getattr(row, name), where)
    for name in ("resolved", "success"):
        if (flag := getattr(row, name)) is not None:
            metrics[name] = float(flag)
    return metrics


def _numbers(name: str, raw: msgspec.Raw, where: str, depth: int = 0) -> dict[str, float]:
    """Return the numbers in an object, at any depth, by path: "test_result.report.resolved"."""
    if bytes(raw).startswith(b"{") and depth < _MAX_DEPTH:
        fields = decode_line(_OBJECT, bytes(raw), f"{where}, {name}").items()
        parts = [_numbers(f"{name}.{key}", value, where, depth + 1) for key, value in fields]
        return {key: value for part in parts for key, value in part.items()}
    return numbers({name: raw}, where) if depth else {}


_is_issue = is_object_with(["owner", "repo", "number"])


def _is_run(value: Any) -> bool:
    """True for a run with a history of events, or a list of events."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_event, value))
    history = value.get("history", "") if isinstance(value, dict) else ""
    if history is not None and not isinstance(history, list):
        return False
    if not all(isinstance(event, dict | list) for event in history or ()):
        return False
    is_evaluated = any(value.get(name) is not None for name in ("test_result", "metadata"))
    is_row = isinstance(value.get("instance_id"), str) and is_evaluated
    return is_row or _is_issue(value.get("issue"))


def _is_event(value: Any) -> bool:
    """True for an action of an agent, or an observation."""
    if not isinstance(value, dict) or not isinstance(value.get("id"), int):
        return False
    kinds = (value.get("action"), value.get("observation"))
    return isinstance(value.get("source"), str) and any(isinstance(k, str) for k in kinds)


ADAPTER = Records(
    records={"": Row},
    leaves=_LEAVES,
    bare="history",
    run=run_of,
    read=read,
    is_record=_is_run,
    is_whole=lambda start: start.head.lstrip().startswith(b"["),
    is_unique=True,
    finish=with_group_rule,
).adapter("OpenHands: evaluation and resolver outputs (JSONL), lists of events (JSON)")
