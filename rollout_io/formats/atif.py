"""ATIF, the agent trajectory interchange format (1.0 to 1.8), which Harbor's agents write.

An agent step is one model call: its `metrics` have `prompt_token_ids` (since 1.4),
`completion_token_ids` (since 1.3) and `logprobs`. A run may span several documents: sub-agents in
their own files (`trajectory_path`) or embedded (`trajectory_id`), and continuations after a
compaction (`continued_trajectory_ref`). Steps marked `is_copied_context` are recorded elsewhere and
skipped here. If no call of a run has ids, its text is read instead (`atif_text`). ATIF does not
contain rewards or outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from rollout_io.formats.atif_document import (
    VERSIONS,
    Document,
    Metrics,
    Ref,
    StepRecord,
    read_trajectory,
    tell,
    temperature_of,
)
from rollout_io.formats.base import Conversation, Step
from rollout_io.formats.contexts import Contexts, Said
from rollout_io.formats.parsing.messages import openai_tools
from rollout_io.formats.parsing.tokens import logprob_array, token_ids
from schemas.errors import InputError, RolloutError

NO_TOKENS = "no_token_ids"
MAIN = "main"

_IDS_SINCE = 4  # minor version that introduced prompt_token_ids
_ASK = "set collect_rollout_details: true for the agent (terminus-2 with vLLM)"


@dataclass(kw_only=True, slots=True)
class _Scope:
    """A document of the run, with its location, agent, lineage, enclosing document, and last message."""

    document: Document
    path: Path
    json: str = "$"
    agent: str
    lineage: int
    outer: _Scope | None = None
    tip: Said | None = None

    @property
    def where(self) -> str:
        return str(self.path) if self.json == "$" else f"{self.path}, {self.json}"

    def place(self, index: int) -> str:
        return f"{self.path}, {self.json}.steps[{index}]"

    @property
    def embedded(self) -> list[Document]:
        return self.document.subagent_trajectories or []

    @property
    def calls(self) -> list[StepRecord]:
        return [step for step in self.document.steps if step.is_call]

    @property
    def has_ids(self) -> bool:
        return any(map(_has_ids, self.document.steps))


@dataclass(slots=True)
class LoggedRun:
    """The calls of one run, and the documents that have them.

    Attributes:
        steps: Steps in order; a sub-agent's steps follow the step that refers to it.
        texts: Contexts of a run without token ids; the main agent's last one comes last.
        lineages: Lineage of each step: 0 for the main agent, n for the nth sub-agent.
        tokenless: Error that explains why the run has no ids; None if it has ids, or no calls.
        num_subagents: Number of sub-agents.
        scopes: Documents of the run.
        walked: Steps of all documents, in order, by document and index.
        unnamed: Errors for references to sub-agents that are neither embedded nor in a named file.
        entered: Resolved file of each document, and its place there.
    """

    steps: list[Step] = field(default_factory=list)
    texts: list[Conversation] = field(default_factory=list)
    lineages: list[int] = field(default_factory=list)
    tokenless: InputError | None = None
    num_subagents: int = 0
    scopes: list[_Scope] = field(default_factory=list)
    walked: list[tuple[_Scope, int]] = field(default_factory=list)
    unnamed: list[InputError] = field(default_factory=list)
    entered: set[tuple[Path, str]] = field(default_factory=set)


def has_tokens(document: Document) -> bool:
    """True if a document has ids and none of its steps combines several calls."""
    calls = [step for step in document.steps if step.is_call]
    return any(map(_has_ids, calls)) and all((step.llm_call_count or 1) == 1 for step in calls)


def _has_ids(step: StepRecord) -> bool:
    is_own = step.source == "agent" and not step.is_copied_context
    return is_own and bool(step.metrics and step.metrics.completion_token_ids)


def read_run(path: Path, document: Document) -> LoggedRun:
    """Read all calls of the run that begins in an ATIF file, with sub-agents and continuations.

    If no call in any of its documents has ids, the run is read as text.

    Raises:
        RolloutError: `no_token_ids`: only some calls have ids, or a step combines several calls
            (the error names the missing field); `dangling_reference`: the target of a reference
            does not exist. Also any error of `read_trajectory`, and the errors for invalid tokens.
    """
    is_subagent = "parent_session_id" in (document.agent.extra or {})
    agent = document.agent.name if is_subagent else MAIN
    main, run = _Scope(document=document, path=path, agent=agent, lineage=0), LoggedRun()
    _enter(run, main)
    called = [scope for scope in run.scopes if scope.calls]
    is_single = not main.embedded and document.continued_trajectory_ref is None
    if not called and is_single:
        raise _without_ids(main)
    if called and not any(scope.has_ids for scope in run.scopes):
        run.tokenless = _without_ids(main if main.calls else called[0])
        run.texts = _texts(run)
        return run
    if run.unnamed:
        raise run.unnamed[0]
    for scope, index in run.walked:
        step = scope.document.steps[index]
        if step.source == "agent" and not step.is_copied_context:
            steps = _calls(step, scope, scope.place(index))
            run.steps += steps
            run.lineages += [scope.lineage] * len(steps)
    return run


def _texts(run: LoggedRun) -> list[Conversation]:
    main = Contexts(name=run.scopes[0].agent, has_prompts=True)
    lineages = dict[str, int]()
    for scope, index in run.walked:
        step, where = scope.document.steps[index], scope.place(index)
        if step.is_call:
            _refuse_sum(step, where)
        log = main.agent(scope.agent) if scope.lineage else main
        log.has_prompts, log.tip = True, scope.tip
        agent = scope.document.agent
        tools = openai_tools(agent.tool_definitions)
        tell(log, step, where, {"tools": tools, "temperature": temperature_of(agent.extra)})
        scope.tip = log.tip
        lineages[where] = scope.lineage
    order = {where: i for i, where in enumerate(lineages)}
    texts = {order[s.source]: s for s in main.steps() if isinstance(s, Conversation)}
    last = max((i for i, s in texts.items() if not lineages[s.source]), default=None)
    return [texts[i] for i in sorted(texts, key=lambda i: (i == last, i))]


def conversations(run: LoggedRun, why: InputError) -> list[Conversation]:
    """Return the contexts of a run without token ids, and why it has none.

    Raises:
        InputError: `no_calls`: there are none.
    """
    if not run.texts:
        raise InputError("no_calls", why.where, "no model call has an answer that says something")
    return [replace(step, tokenless=why) for step in run.texts]


def _without_ids(scope: _Scope) -> InputError:
    """Explain why a document has no token ids."""
    calls = scope.calls
    finding = f"none of the {len(calls)} calls has token ids" if calls else "there are no calls"
    if len(calls) == 1:
        finding = "the only call has no token ids"
    if calls:
        finding += f" (the first has {_missing(calls[0].metrics)})"
    version = scope.document.schema_version
    if version in VERSIONS[:_IDS_SINCE]:
        finding += f"; {version} has no field for prompt ids"
    return tokenless(scope.where, finding)


def _missing(metrics: Metrics | None) -> str:
    if metrics is None:
        return "no metrics"
    for name in ("completion_token_ids", "prompt_token_ids"):
        ids = getattr(metrics, name)
        if not ids:
            return f"metrics without {name}" if ids is None else f"an empty list of {name}"
    return "all ids"


def tokenless(where: str, got: str) -> InputError:
    """Return the error for a run or a call without token ids."""
    return InputError(NO_TOKENS, where, got, hint=_ASK)


def _enter(run: LoggedRun, scope: _Scope) -> None:
    """Walk a document with all that it refers to, unless it has already been walked."""
    key = scope.path.resolve(), scope.json
    if key in run.entered:
        return
    run.entered.add(key)
    run.num_subagents = max(run.num_subagents, scope.lineage)
    run.scopes.append(scope)
    referred = set(_referred(scope.document))
    for index, child in enumerate(scope.embedded):
        if scope.outer is None and child.trajectory_id not in referred:
            _enter(run, _embedded(run, scope, index))
    for index, step in enumerate(scope.document.steps):
        run.walked.append((scope, index))
        for ref in step.refs if not step.is_copied_context else ():
            _refer(run, scope, ref, scope.place(index))
    name = scope.document.continued_trajectory_ref
    if name is not None:
        path = _resolve(name, scope.path)
        if path is None:
            raise _dangling(name, f"{scope.path}, {scope.json}.continued_trajectory_ref")
        _enter_file(run, path, scope)


def referred_files(path: Path) -> set[Path]:
    """Return the resolved paths of a file and of all existing files it refers to, at any depth.

    Unlike `read_run`, it skips missing and unreadable files.
    """
    files: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file.resolve() in files:
            continue
        files.add(file.resolve())
        try:
            document = read_trajectory(file)
        except (RolloutError, RecursionError):
            continue
        waiting += filter(None, (_resolve(name, file) for name in _named_files(document)))
    return files


def _named_files(document: Document) -> Iterator[str]:
    for step in document.steps:
        refs = () if step.is_copied_context else step.refs
        yield from (ref.trajectory_path for ref in refs if ref.trajectory_path)
    if document.continued_trajectory_ref is not None:
        yield document.continued_trajectory_ref
    for child in document.subagent_trajectories or ():
        yield from _named_files(child)


def _referred(document: Document) -> Iterator[str | None]:
    for step in document.steps:
        yield from (ref.trajectory_id for ref in step.refs)
    for child in document.subagent_trajectories or ():
        yield from _referred(child)


def _refer(run: LoggedRun, scope: _Scope, ref: Ref, where: str) -> None:
    """Walk a sub-agent's document: embedded in this or an outer document, or a separate file."""
    holder: _Scope | None = scope
    while holder is not None and ref.trajectory_id is not None:
        for index, child in enumerate(holder.embedded):
            if child.trajectory_id == ref.trajectory_id:
                _enter(run, _embedded(run, holder, index))
                return
        holder = holder.outer
    path = _resolve(ref.trajectory_path, scope.path) if ref.trajectory_path else None
    if path is not None:
        _enter_file(run, path, None)
    elif ref.trajectory_path:
        raise _dangling(ref.trajectory_path, where)
    else:  # not an error for text: the referring agent's text is complete without the sub-agent
        name = ref.trajectory_id or f"session {ref.session_id}"
        run.unnamed.append(_dangling(name, where))


def _embedded(run: LoggedRun, holder: _Scope, index: int) -> _Scope:
    return _Scope(
        document=holder.embedded[index],
        path=holder.path,
        json=f"{holder.json}.subagent_trajectories[{index}]",
        agent=holder.embedded[index].agent.name,
        lineage=run.num_subagents + 1,
        outer=holder,
    )


def _enter_file(run: LoggedRun, path: Path, continued: _Scope | None) -> None:
    """Walk the file of a continuation or a sub-agent, unless it has already been walked."""
    if (path.resolve(), "$") in run.entered:
        return
    document = read_trajectory(path)
    agent, lineage = document.agent.name, run.num_subagents + 1
    if continued is not None:
        agent, lineage = continued.agent, continued.lineage
    _enter(run, _Scope(document=document, path=path, agent=agent, lineage=lineage))


def _resolve(reference: str, base: Path) -> Path | None:
    """Resolve a reference relative to the directory of `base`.

    If the files of a run were renamed with a common prefix before `trajectory`, the name with the
    prefix of `base` is tried as well.
    """
    prefix = base.name[: max(base.name.rfind("trajectory"), 0)]
    names = [reference, *([prefix + Path(reference).name] if prefix else ())]
    return next((base.parent / name for name in names if is_file(base.parent / name)), None)


def is_file(path: Path) -> bool:
    """True if the file exists; false if the file system does not allow its name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _dangling(name: str, where: str) -> InputError:
    finding = f"the referenced trajectory {name!r} does not exist"
    hint = "copy the complete agent directory, or convert only result.json if it has the tokens"
    return InputError("dangling_reference", where, finding, hint=hint)


def _calls(step: StepRecord, scope: _Scope, where: str) -> list[Step]:
    """Return a list with the call of an agent step; empty if the step made no call."""
    metrics = step.metrics or Metrics()
    if step.llm_call_count == 0:
        if metrics.completion_token_ids:
            finding = "the step has token ids although it made no call (llm_call_count 0)"
            hint = "correct the step at its source"
            raise InputError("atif_call_count", where, finding, hint=hint)
        return []
    _refuse_sum(step, where)
    if not scope.has_ids:
        finding = "this document has no token ids, but other documents of the run do"
        raise tokenless(where, f"{finding}: {_without_ids(scope).got}")
    if not metrics.completion_token_ids or not metrics.prompt_token_ids:
        finding = f"the call has {_missing(step.metrics)}"
        raise tokenless(where, f"{finding}; a call cut off at max_tokens may lack them")
    response = token_ids(metrics.completion_token_ids, "response", where)
    logprobs = metrics.logprobs
    parts = (step.reasoning_content, _plain(step.message), _plain(step.tool_calls))
    texts = [part for part in parts if part is not None]
    return [
        Step(
            source=where,
            prompt_token_ids=token_ids(metrics.prompt_token_ids, "prompt", where),
            response_ids=response,
            rollout_logprobs=logprob_array(logprobs, len(response), where) if logprobs else None,
            temperature=temperature_of(scope.document.agent.extra),
            agent=scope.agent,
            response_text="\n".join(texts) if texts else None,
            num_counted=(metrics.prompt_tokens or None, metrics.completion_tokens or None),
        )
    ]


def _refuse_sum(step: StepRecord, where: str) -> None:
    if step.llm_call_count is not None and step.llm_call_count > 1:
        finding = f"the metrics are summed over {step.llm_call_count} calls (llm_call_count)"
        raise tokenless(where, finding)


def _plain(raw: msgspec.Raw) -> str | None:
    """Return a string unchanged, any other JSON as text, and null as None."""
    value = msgspec.json.decode(raw)
    return value if value is None or isinstance(value, str) else bytes(raw).decode()
