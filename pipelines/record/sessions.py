"""Sessions of a recorder, each written to a shard only once.

Which session a call belongs to is decided in `pipelines.record.targets`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_io.conversion.rewards import Outcome
from rollout_io.formats.base import Place
from rollout_io.formats.parsing.bodies import Response
from rollout_io.formats.parsing.records import split_session
from schemas.errors import InputError

UNASSIGNED = "unassigned"
ABANDONED = "session_abandoned"
MOST_SESSIONS = 100_000


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
