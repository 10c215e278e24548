"""One Harbor trial: steps and outcome from its `result.json` (TrialResult).

Exact tokens are in `agent_result.rollout_details`, which lists the main agent, then its sub-agents,
each with one inner list per call. If the tokens are missing there, the calls of
`agent/trajectory.json` (ATIF) may have them; if both have tokens, they must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout_io.formats.atif import (
    MAIN,
    NO_TOKENS,
    LoggedRun,
    conversations,
    has_tokens,
    is_file,
    read_run,
    tokenless,
)
from rollout_io.formats.atif_document import read_trajectory, temperature_of
from rollout_io.formats.base import Conversation, Options, Run, Step, Trajectory
from rollout_io.formats.parsing.content import filled
from rollout_io.formats.parsing.jsonl import NESTED, read_document
from rollout_io.formats.parsing.tokens import logprob_array, route_array, token_ids
from schemas.errors import InputError, RolloutError, count

CONTEXT_OVERFLOW = "ContextLengthExceededError"
TIMEOUT = "AgentTimeoutError"

_VALID_AFTER = frozenset(
    {
        *(TIMEOUT, CONTEXT_OVERFLOW, "ContextWindowExceededError", "OutputTokenExceededError"),
        *("OutputLengthExceededError", "AgentSafetyRefusalError", "ContentPolicyViolationError"),
    }
)
_ROUTES = "routed_experts"


class _Detail(msgspec.Struct, gc=False):
    prompt_token_ids: list[list[int]] | None = None
    completion_token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    extra: dict[str, list[msgspec.Raw] | None] | None = None


class _AgentResult(msgspec.Struct, gc=False):
    rollout_details: list[_Detail] | None = None


class _VerifierResult(msgspec.Struct, gc=False):
    rewards: dict[str, float] | None = None


class _Exception(msgspec.Struct, gc=False):
    exception_type: str
    exception_message: str = ""


class _Part(msgspec.Struct, gc=False):
    agent_result: _AgentResult | None = None
    verifier_result: _VerifierResult | None = None
    exception_info: _Exception | None = None
    step_name: str | None = None

    @property
    def rewards(self) -> dict[str, float]:
        return (self.verifier_result and self.verifier_result.rewards) or {}


class _AgentConfig(msgspec.Struct, gc=False):
    model_name: str | None = None
    kwargs: dict[str, Any] | None = None


class _Config(msgspec.Struct, gc=False):
    agent: _AgentConfig = msgspec.field(default_factory=_AgentConfig)


class _Trial(_Part, gc=False):
    """The relevant fields of a TrialResult; a multi-step trial has one part per step."""

    trial_name: str = ""
    config: _Config = msgspec.field(default_factory=_Config)
    step_results: list[_Part] | None = None

    @property
    def failure(self) -> _Exception | None:
        """The exception of the trial, or of its first failed step."""
        exceptions = [part.exception_info for part in (self, *(self.step_results or ()))]
        return next((e for e in exceptions if e is not None), None)

    @property
    def is_overflow(self) -> bool:
        """True if the agent exceeded the model's context."""
        return self.failure is not None and self.failure.exception_type == CONTEXT_OVERFLOW


_TRIAL_DECODER = msgspec.json.Decoder(_Trial)


def read_trial(run: Run, options: Options) -> Trajectory:
    """Read the calls of a trial or a trajectory file, as conversations if they have no token ids.

    A failed trial is kept with its `error`; if its tokens are missing, it has no steps and the
    reason is added to the error. All keys of the verifier's rewards become metrics.

    Raises:
        RolloutError: The run cannot be used (`no_token_ids`, `tokens_disagree`, `reward_key`, ...).
    """
    path = run.places[0].path
    try:
        if run.places[0].offset is None or "trial_name" in run.labels:
            directory = path.parent if run.places[0].offset is None else None
            return _read_trial(run, path, directory, options)
        logged = read_run(path, read_trajectory(path))
        why = logged.tokenless
        steps = logged.steps if why is None else conversations(logged, why)
    except RecursionError:
        raise InputError("json_document", str(path), NESTED) from None
    if not steps:
        raise InputError("no_calls", str(path), "the trajectory has no model calls")
    return Trajectory(steps=steps)


def _read_trial(run: Run, path: Path, directory: Path | None, options: Options) -> Trajectory:
    trial, _ = read_document(_TRIAL_DECODER, path)
    logged = _outcome_of(trial, str(path), options, is_needed=not run.rewarded)
    is_failed = run.failed or logged.error is not None or trial.is_overflow
    try:
        steps = _read_steps(trial, path, directory)
    except RolloutError as error:
        if error.rule != NO_TOKENS or not is_failed:
            raise
        return _without_steps(logged, error)
    why = next((s.tokenless for s in steps if isinstance(s, Conversation)), None)
    return _without_steps(logged, why) if why and is_failed else replace(logged, steps=steps)


def _without_steps(logged: Trajectory, why: RolloutError) -> Trajectory:
    error = f"{logged.error or CONTEXT_OVERFLOW}; no tokens: {why.got}"
    return replace(logged, steps=[], reward=None, error=error)


def keeps_text(result: Path) -> bool:
    """True if a trial without token ids is read as text: it succeeded or timed out."""
    failure = read_document(_TRIAL_DECODER, result)[0].failure
    return failure is None or failure.exception_type == TIMEOUT


def _user_values(trial: _Trial) -> dict[str, str]:
    """Return a trial's name, model and exception, and Harbor's verdict on its reward, as strings.

    `reward_valid` follows Harbor 0.25: a reward is valid if there was no exception, or if the agent
    exhausted its budget or refused the task.
    """
    exception = trial.failure
    valid = exception is None or exception.exception_type in _VALID_AFTER
    return filled(
        trial_name=trial.trial_name,
        model_name=trial.config.agent.model_name,
        exception_type=exception.exception_type if exception else None,
        reward_valid="true" if valid and _last_rewards(trial) else "false",
    )


def _outcome_of(
    trial: _Trial, where: str, options: Options, *, is_needed: bool = True
) -> Trajectory:
    """Return the outcome of a trial, without steps; the defaults follow SkyRL's Harbor generator.

    Without an exception, the reward is the verifier's `reward`, or its only number; null if there
    is none. After `ContextLengthExceededError` it is 0.0, regardless of the verifier
    (`overflows`: zero, fail, keep). After `AgentTimeoutError` (`timeouts`: fail, keep) and after
    any other exception, the trial has failed. `keep` uses the verifier's number.

    Raises:
        InputError: `reward_key`: the verifier reported several numbers, none named `reward`.
    """
    rewards, exception = _last_rewards(trial), trial.failure
    reward: float | None = None
    error: str | None = None
    policy = "fail"
    if trial.is_overflow:
        policy = options.overflows
    elif exception is not None and exception.exception_type == TIMEOUT:
        policy = options.timeouts
    if exception is None or policy == "keep":
        reward = _reward(rewards, where, options.reward) if is_needed else rewards.get("reward")
    elif policy == "zero":
        reward = 0.0
    else:
        error = f"{exception.exception_type}: {exception.exception_message}".rstrip(": \n")
    metrics: dict[str, float] = {}
    for i, part in enumerate(trial.step_results or ()):
        metrics |= {f"{part.step_name or i}.{key}": n for key, n in part.rewards.items()}
    metrics |= rewards
    return Trajectory(
        steps=[], reward=reward, error=error, metrics=metrics, user_values=_user_values(trial)
    )


def _last_rewards(trial: _Trial) -> dict[str, float]:
    if trial.verifier_result is None and trial.step_results:
        return trial.step_results[-1].rewards
    return trial.rewards


def _reward(rewards: dict[str, float], where: str, key: str | None = None) -> float | None:
    if key is not None:
        return rewards.get(key)
    if "reward" in rewards or not rewards:
        return rewards.get("reward")
    if len(rewards) > 1:
        finding = f"none of the rewards {', '.join(map(repr, sorted(rewards)))} is named 'reward'"
        hint = "choose one with --reward KEY; all of them become metrics"
        raise InputError("reward_key", where, finding, hint=hint)
    return next(iter(rewards.values()))


def _read_steps(
    trial: _Trial, result: Path, directory: Path | None
) -> Sequence[Step | Conversation]:
    """Return all calls of a trial, in order, with each step's reward in a multi-step trial.

    If neither `result.json` nor the trajectory has token ids, return conversations. Without a
    directory, only the `result` is read.
    """
    steps: list[Step | Conversation] = []
    if not trial.step_results:
        steps += _part_steps(trial, trial, result, "$", directory)
    else:
        for index, part in enumerate(trial.step_results):
            if part.agent_result is None and trial.failure is not None:
                continue
            inner = directory / "steps" / (part.step_name or str(index)) if directory else None
            place = f"$.step_results[{index}]"
            part_steps = _part_steps(trial, part, result, place, inner)
            if not part_steps:
                continue
            part_steps[-1].reward = _reward(part.rewards, f"{result}, {place}.verifier_result")
            part_steps[-1].metrics = part.rewards or None
            steps += part_steps
    if not steps:
        raise tokenless(str(result), "the agent made no calls")
    why = next((step.tokenless for step in steps if isinstance(step, Conversation)), None)
    if why is not None and any(isinstance(step, Step) for step in steps):
        raise why
    temperature = temperature_of(trial.config.agent.kwargs)
    for step in steps:
        step.stop_reason = _stop_reason(trial)
        step.temperature = step.temperature if temperature is None else temperature
    return steps


def _stop_reason(trial: _Trial) -> str:
    if trial.failure is None:
        return "complete"
    if trial.is_overflow:
        return "context_length"
    return "agent_timeout" if trial.failure.exception_type == TIMEOUT else "error"


def _part_steps(
    trial: _Trial, part: _Part, result: Path, json: str, directory: Path | None
) -> Sequence[Step | Conversation]:
    details = (part.agent_result and part.agent_result.rollout_details) or []
    place = f"{result}, {json}.agent_result.rollout_details"
    elements = [_element(detail, i, f"{place}[{i}]") for i, detail in enumerate(details)]
    if not any(elements):
        elements = []
    elif not all(elements):
        index = next(i for i, element in enumerate(elements) if not element)
        raise tokenless(f"{place}[{index}]", "this agent has no calls, but another agent has some")
    path = directory / "agent" / "trajectory.json" if directory else None
    document = read_trajectory(path) if path is not None and is_file(path) else None
    if document is None or path is None or (elements and not has_tokens(document)):
        if not elements:
            raise tokenless(place, _reason(trial, part))
        main, *others = elements
        return [*main[:-1], *(step for element in others for step in element), main[-1]]
    try:
        run = read_run(path, document)
    except RolloutError as error:
        if error.rule == NO_TOKENS and not elements:
            finding = f"{_reason(trial, part)}; {path}: {error.got}"
            raise tokenless(place, finding) from None
        raise
    if elements:
        return _agreed(elements, run, place)
    if run.tokenless is None:
        return run.steps
    finding = f"{_reason(trial, part)}; {path}: {run.tokenless.got}"
    return conversations(run, tokenless(place, finding))


def _element(detail: _Detail, index: int, place: str) -> list[Step]:
    """Read the calls of one agent: the main agent at index 0, sub-agents after it."""
    prompts, responses = detail.prompt_token_ids or [], detail.completion_token_ids or []
    logprobs, routes = detail.logprobs or [], (detail.extra or {}).get(_ROUTES) or []
    lengths_of = {"prompt_token_ids": len(prompts), "completion_token_ids": len(responses)}
    optional = {"logprobs": len(logprobs), f"extra.{_ROUTES}": len(routes)}
    lengths_of |= {name: length for name, length in optional.items() if length}
    if len({*lengths_of.values()}) > 1:
        lengths = ", ".join(f"{length} {name}" for name, length in lengths_of.items())
        raise tokenless(place, f"the lists have unequal lengths ({lengths})")
    steps = []
    for turn, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        where = f"{place}.completion_token_ids[{turn}]"
        step = Step(
            source=where,
            prompt_token_ids=token_ids(prompt, "prompt", where),
            response_ids=token_ids(response, "response", where),
            agent=f"subagent-{index}" if index else MAIN,
        )
        if logprobs:
            step.rollout_logprobs = logprob_array(logprobs[turn], len(response), where)
        if routes:
            num_tokens = len(prompt) + len(response)
            step.rollout_expert_indices = route_array(routes[turn], num_tokens, where)
        steps.append(step)
    return steps


def _agreed(elements: Sequence[Sequence[Step]], run: LoggedRun, place: str) -> list[Step]:
    """Merge calls: tokens from `result.json` (`elements`), order and text from the trajectory."""
    logged = [*zip(run.steps, run.lineages, strict=True)]
    names = sorted({*run.lineages})
    lineages = [[step for step, lineage in logged if lineage == name] for name in names]
    for index, (ours, theirs) in enumerate(zip_longest(elements, lineages, fillvalue=())):
        if len(ours) != len(theirs):
            where = theirs[0].source.partition(",")[0] if theirs else "the trajectory"
            finding = f"{count(len(ours), 'call')} here, but {len(theirs)} in {where}"
            raise _disagree(f"{place}[{index}]", finding)
        for call, other in zip(ours, theirs, strict=True):
            for name in ("prompt_token_ids", "response_ids", "rollout_logprobs"):
                a, b = getattr(call, name), getattr(other, name)
                if a is not None and b is not None and not np.array_equal(a, b):
                    raise _disagree(call.source, f"{name} differ from those in {other.source}")
    calls = {name: iter(element) for name, element in zip(names, elements, strict=True)}
    return [_joined(next(calls[lineage]), step) for step, lineage in logged]


def _joined(tokens: Step, details: Step) -> Step:
    logprobs, others = tokens.rollout_logprobs, details.rollout_logprobs
    return msgspec.structs.replace(
        tokens,
        rollout_logprobs=others if logprobs is None else logprobs,
        agent=details.agent,
        temperature=details.temperature,
        response_text=details.response_text,
        num_counted=details.num_counted,
    )


def _disagree(where: str, got: str) -> InputError:
    hint = "convert only result.json to ignore the trajectory files"
    return InputError("tokens_disagree", where, got, hint=hint)


def _reason(trial: _Trial, part: _Part) -> str:
    """Explain why a trial, or a step of it, has no rollout details."""
    if part.agent_result is None:
        return "there is no agent result"
    was_requested = (trial.config.agent.kwargs or {}).get("collect_rollout_details") is True
    details = part.agent_result.rollout_details
    empty = "contains only empty elements" if details else "is an empty list"
    state = "is null" if details is None else empty
    why = "although collect_rollout_details" if was_requested else "since collect_rollout_details"
    return f"the value {state} {why} is {'' if was_requested else 'not '}true"
