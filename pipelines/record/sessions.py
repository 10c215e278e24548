"""Sessions of a recorder, each written to a shard only once, and how a call names its session.

A call's session, agent and API path are in its URL, a header or its API key:

    /s/INSTANCE/REPETITION[/AGENT]/v1/...         base URL of a session
    /k/KEY/INSTANCE/REPETITION[/AGENT]/v1/...     the same, with the session's key
    X-Rollouts-Session: INSTANCE/REPETITION[/AGENT]
    Authorization: Bearer sk-rollouts-INSTANCE/REPETITION[/AGENT]
    x-api-key, x-goog-api-key: the same key, as Anthropic's and Google's clients send it

A call without a session may have one of its harness: `session_in` finds it, and `agent_in` an agent.

Each part is percent-encoded: the instance "math/12" becomes "math%2F12".
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from rollout_io.conversion.rewards import Outcome
from rollout_io.formats.base import Place
from rollout_io.formats.parsing.bodies import Response
from rollout_io.formats.parsing.records import split_session
from schemas.errors import InputError, count

UNASSIGNED = "unassigned"
ABANDONED = "session_abandoned"
MOST_SESSIONS = 100_000
NO_CALLS = "no_calls: the session ended without a recorded call"
_LOST = "calls_lost:"
_LOSSES = frozenset({"unrecorded_calls", "exact_prefix_fallbacks", "encrypted_thoughts"})

KEY_PREFIX = "sk-rollouts-"
SESSION_HEADER = "x-rollouts-session"
KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key")
_HARNESS_HEADERS = (
    "x-claude-code-session-id",
    "x-session-affinity",  # OpenCode
    *("session_id", "session-id", "conversation_id", "conversation-id"),  # Codex
)
_HARNESS_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.:-]{0,199}")
_APIS = ("v1", "v1beta", "v1beta1", "v1alpha")
"""First parts of the engines' APIs: what comes before one of them is an agent."""


class Seen(NamedTuple):
    """Tokens of a recorded call.

    Attributes:
        answer: The complete response, with chunks joined.
        prompt: [P] ids of the prompt.
        responses: For each choice, [R] ids of the response.
    """

    answer: Response
    prompt: npt.NDArray[np.int32]
    responses: list[npt.NDArray[np.int32]]


@dataclass(kw_only=True, slots=True)
class Session:
    """One run of one task, kept until it is in a shard.

    Attributes:
        name: "instance/repetition".
        folder: Number of the journal folder.
        places: Locations of its calls in the journal.
        outcome: Its outcome; None if it is still open.
        ending: Write of its outcome to the journal; None if that was an earlier recorder's.
        num_under_way: Number of running calls.
        writing: Running writes; they complete even if nothing awaits them.
        num_tokens: Tokens sampled so far.
        num_drifts: Calls that did not continue the tokens of the agent's previous call.
        num_unrecorded: Calls that were served but not recorded.
        num_lost: Number of unrecorded calls whose write failed.
        losses_kept: num_unrecorded and num_lost, as last written to the journal.
        num_fallbacks: Calls that `exact_prefix` could not continue token by token.
        refusal: Last error response to a call; None if there was none.
        num_hidden_thoughts: Largest number of thoughts in a request that only the API could read.
        ends: By agent, the ids of prompt + response for each choice of the last call.
        is_of_harness: True if the harness named the session in its own way.
        active_s: Time when the session was opened or its last call ended, on the monotonic clock.
    """

    name: str
    folder: int
    places: list[Place] = field(default_factory=list)
    outcome: Outcome | None = None
    ending: asyncio.Future[Place] | None = None
    num_under_way: int = 0
    writing: set[asyncio.Task[None]] = field(default_factory=set)
    num_tokens: int = 0
    num_drifts: int = 0
    num_unrecorded: int = 0
    num_lost: int = 0
    losses_kept: tuple[int, int] = (0, 0)
    num_fallbacks: int = 0
    refusal: str | None = None
    num_hidden_thoughts: int = 0
    ends: dict[str | None, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    is_of_harness: bool = False
    active_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Mark a call as running inside a `with` block."""
        self.num_under_way += 1
        try:
            yield
        finally:
            self.num_under_way -= 1
            self.active_s = time.monotonic()

    def count(self, agent: str | None, seen: Seen) -> bool:
        """Count a call; return true if it continues no choice of the agent's previous call."""
        before = self.ends.get(agent, [])
        drifts = bool(before) and not any(_continues(seen.prompt, end) for end in before)
        self.ends[agent] = [np.concatenate([seen.prompt, r]) for r in seen.responses]
        self.num_tokens += sum(map(len, seen.responses))
        self.num_drifts += drifts
        return drifts

    def state(self) -> dict[str, object]:
        """Return the session's state for `GET /s/...`."""
        outcome = self.outcome
        return {
            "session": self.name,
            "state": "open" if outcome is None else "ended",
            "calls": len(self.places),
            "under_way": self.num_under_way,
            "tokens": self.num_tokens,
            "drifts": self.num_drifts,
            "unrecorded_calls": self.num_unrecorded,
            "reward": outcome.reward if outcome else None,
            "error": outcome.error if outcome else None,
        }


def _continues(prompt: npt.NDArray[np.int32], end: npt.NDArray[np.int32]) -> bool:
    return len(prompt) >= len(end) and np.array_equal(prompt[: len(end)], end)


class Sessions:
    """All sessions of a recorder.

    Args:
        written: Trajectory ids that the dataset already contains.
    """

    def __init__(self, written: set[str]) -> None:
        self._written = written
        self._live: dict[str, Session] = {}
        self._next: dict[str, int] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._live.values())

    @property
    def num_open(self) -> int:
        """Number of sessions that have not ended."""
        return sum(session.outcome is None for session in self._live.values())

    @property
    def num_written(self) -> int:
        """Number of trajectories in the dataset."""
        return len(self._written)

    def find(self, name: str) -> Session | None:
        """Find a session that is not in a shard yet; None if there is none."""
        return self._live.get(name)

    def is_written(self, name: str) -> bool:
        """True if a session is in the dataset."""
        return trajectory_id(name) in self._written

    def called(self, name: str, folder: int) -> Session:
        """Return the session of a call, opening it on its first call.

        Raises:
            InputError: `session_ended`: the session has ended; `too_many_sessions`: too many
                sessions are open or waiting for a shard.
        """
        session = self._live.get(name)
        if session is None:
            return self.open(name, folder)
        if session.outcome is not None:
            raise _ended(name, session.outcome.error)
        return session

    def open(self, name: str, folder: int) -> Session:
        """Open a session.

        Raises:
            InputError: `session_ended`, `session_open`: the name is in use; `too_many_sessions`:
                too many sessions are open or waiting for a shard.
        """
        if name in self._live and self._live[name].outcome is None:
            hint = "end it first, or use a new repetition"
            raise InputError("session_open", name, "the session is already open", hint=hint)
        if name in self._live or self.is_written(name):
            raise _ended(name, None)
        if len(self._live) >= MOST_SESSIONS:
            num = f"{len(self._live):,}"
            finding = f"{num} sessions are open or waiting for a shard, which is the limit"
            hint = "end finished sessions: POST .../end"
            raise InputError("too_many_sessions", name, finding, hint=hint)
        session = self._live[name] = Session(name=name, folder=folder)
        return session

    def add(self, session: Session) -> None:
        """Add a recovered session."""
        self._live[session.name] = session

    def drop(self, session: Session) -> None:
        """Forget a session."""
        del self._live[session.name]

    def free_repetition(self, instance_id: str) -> int:
        """Return the first unused repetition of an instance."""
        number = self._next.get(instance_id, 0)
        while (name := f"{instance_id}/{number}") in self._live or self.is_written(name):
            number += 1
        self._next[instance_id] = number + 1
        return number

    def wrote(self, sessions: Sequence[Session]) -> None:
        """Forget sessions that are in a shard, except for their names."""
        for session in sessions:
            self._written.add(trajectory_id(session.name))
            del self._live[session.name]

    def idle(self, timeout_s: float) -> list[Session]:
        """List open sessions that have been inactive for `timeout_s` seconds."""
        before = time.monotonic() - timeout_s
        return [
            s for s in self if s.outcome is None and not s.num_under_way and s.active_s < before
        ]


def trajectory_id(name: str) -> str:
    """Convert a session's name to its trajectory id.

    Example:
        >>> trajectory_id("math/12/3")
        'math/12_3'
    """
    instance_id, repetition_id = split_session(name, "session")
    return f"{instance_id}_{repetition_id}"


def _ended(name: str, error: str | None) -> InputError:
    why = f" ({error})" if error else ""
    hint = "use a new repetition for the next run"
    return InputError("session_ended", name, f"the session has ended{why}", hint=hint)


def losses_of(session: Session | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcome fields that report a session's missing calls."""
    losses: dict[str, Any] = {}
    if session is not None and session.num_unrecorded:
        losses["unrecorded_calls"] = session.num_unrecorded
    if session is not None and session.num_fallbacks:
        losses["exact_prefix_fallbacks"] = session.num_fallbacks
    if session is not None and session.num_hidden_thoughts:
        losses["encrypted_thoughts"] = session.num_hidden_thoughts
    if session is not None and session.num_lost and not fields.get("error"):
        losses["error"] = f"{_LOST} {count(session.num_lost, 'call')} could not be written"
    if session is not None and not session.places and session.refusal and not fields.get("error"):
        losses["error"] = f"{NO_CALLS}; the last answer was an error: {session.refusal}"
    return losses


def check_same(name: str, reported: Outcome, stored: Outcome | None) -> None:
    """Check that an ended session ended with the outcome that a client now reports."""
    if stored is None or not _is_same(reported, stored):
        error = stored.error if stored else None
        finding = "the session has already ended with a different outcome"
        finding += f": error {error!r}" if error else ""
        raise InputError(
            "session_ended", name, finding, hint="use a new repetition for the next run"
        )


def _is_same(reported: Outcome, stored: Outcome) -> bool:
    """True if what a client said gave an outcome, to which the recorder may have added losses."""
    metrics = {k: v for k, v in stored.metrics.items() if k in reported.metrics or k not in _LOSSES}
    is_ours = reported.error is None and (stored.error or "").startswith((_LOST, NO_CALLS))
    error = None if is_ours else stored.error
    if stored.user_values not in ({}, reported.user_values):
        return False
    return (reported.reward, reported.error, reported.metrics) == (stored.reward, error, metrics)


class Target(NamedTuple):
    """Target of a request.

    Attributes:
        session: "instance/repetition"; None if the request names none.
        agent: Agent within the session.
        key: Session key in the URL.
        rest: Path without the session, such as "/v1/chat/completions", "/end" or "".
    """

    session: str | None
    agent: str | None
    key: str | None
    rest: str


def target_of(raw_path: str, headers: Mapping[str, str]) -> Target:
    """Parse a request's target.

    Args:
        raw_path: Path as received, percent-encoded, without the query.
        headers: Headers by lower-case name.

    Raises:
        InputError: `session_name`: the instance or repetition is missing or invalid.

    Example:
        >>> target_of("/s/math%2F12/3/checker/v1/models", {})
        Target(session='math/12/3', agent='checker', key=None, rest='/v1/models')
    """
    parts = raw_path.split("/")
    kind = parts[1] if len(parts) > 1 else ""
    if kind in {"s", "k"}:
        key = None
        if kind == "k":
            key, parts = (parts[2] if len(parts) > 2 else ""), [*parts[:2], *parts[3:]]
        has_agent = len(parts) > 5 and parts[5] in _APIS
        named, rest = parts[2 : 5 if has_agent else 4], parts[5 if has_agent else 4 :]
        session, agent = _names(named, raw_path)
        return Target(session, agent, key, "/".join(["", *rest]))
    named = headers.get(SESSION_HEADER, "").split("/")
    if named == [""]:
        named = api_key_of(headers).removeprefix(KEY_PREFIX).split("/")
        if not is_session_key(headers):
            return Target(None, None, None, raw_path)
    session, agent = _names(named, "the session header or API key")
    return Target(session, agent, None, raw_path)


def is_session_key(headers: Mapping[str, str]) -> bool:
    """True if the client's API key names a session instead of being a credential."""
    return api_key_of(headers).startswith(KEY_PREFIX)


def api_key_of(headers: Mapping[str, str]) -> str:
    """Return the bearer token or, if there is none, the key in another header of a key; or ""."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    return next((headers[name] for name in KEY_HEADERS[1:] if name in headers), "").strip()


def without_key(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without the client's API key."""
    return {name: value for name, value in headers.items() if name not in KEY_HEADERS}


def session_in(headers: Mapping[str, str], named: str | None = None) -> str | None:
    """Return the session for a harness that names its own; None if it names none.

    Args:
        headers: Headers by lower-case name.
        named: Name in the body of the request, or None.

    Example:
        >>> session_in({"x-session-affinity": "ses_1"}), session_in({}, "0b7c-11"), session_in({})
        ('ses_1/0', '0b7c-11/0', None)
    """
    named_by = [*(headers.get(name) for name in _HARNESS_HEADERS), named]
    name = next((name for name in named_by if name and _HARNESS_NAME.fullmatch(name)), None)
    return None if name is None else f"{name}/0"


def agent_in(headers: Mapping[str, str]) -> str | None:
    """Return the sub-agent that a harness names (Claude Code, Codex); None for its main agent.

    Example:
        >>> (
        ...     agent_in({"x-claude-code-agent-id": "a1"}),
        ...     agent_in({"session-id": "s", "thread-id": "s"}),
        ... )
        ('a1', None)
    """
    name = headers.get("x-claude-code-agent-id", "")
    thread = headers.get("thread-id", "")
    if not name and thread != headers.get("session-id", thread):
        name = thread
    return name if _HARNESS_NAME.fullmatch(name) else None


def path_of(session: str, key: str | None = None) -> str:
    """Return the URL path of a session, without "/v1"."""
    instance, repetition = split_session(session, "session")
    head = "/s" if key is None else f"/k/{key}"
    return f"{head}/{quote(instance, safe='')}/{repetition}"


def key_of(admin_key: str, session: str) -> str:
    """Derive the key of a session, which gives write access to that session only."""
    return hmac.new(admin_key.encode(), session.encode(), hashlib.sha256).hexdigest()[:32]


def _names(parts: Sequence[str], where: str) -> tuple[str, str | None]:
    try:
        plain = [unquote(part, errors="strict") for part in parts]
    except UnicodeDecodeError:
        raise InputError("session_name", where, "the session name is not UTF-8") from None
    if not 2 <= len(plain) <= 3 or not all(plain):
        hint = "use /s/INSTANCE/REPETITION[/AGENT]/v1 with percent-encoded parts"
        finding, expected = repr("/".join(plain)), "INSTANCE/REPETITION[/AGENT]"
        raise InputError("session_name", where, finding, expected, hint)
    instance, repetition = split_session(f"{plain[0]}/{plain[1]}", where)
    return f"{instance}/{repetition}", plain[2] if len(plain) == 3 else None
