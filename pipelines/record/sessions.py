"""Sessions: who is calling, since when, how far; none is written twice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_io.adapters import Place
from rollout_io.conversion.rewards import Outcome
from rollout_io.logs.completions import Response
from rollout_io.logs.naming import split_session
from schemas.errors import RolloutError

UNASSIGNED = "unassigned"
ABANDONED = "session_abandoned"


class Seen(NamedTuple):
    """The tokens of a recorded call.

    Attributes:
        answer: In one piece.
        prompt: [P] ids.
        responses: [R] ids of each choice.
    """

    answer: Response
    prompt: npt.NDArray[np.int32]
    responses: list[npt.NDArray[np.int32]]


@dataclass(kw_only=True, slots=True)
class Session:
    """One run of one task, while it is not in a shard.

    Attributes:
        name: "instance/repetition".
        folder: Of the journal.
        places: Of its calls in the journal.
        outcome: How it ended; None: it is open.
        num_under_way: Calls that are not answered yet.
        num_tokens: Sampled so far.
        num_drifts: Calls that did not continue the tokens of the agent's call before.
        num_unrecorded: Calls that were answered and not recorded.
        num_lost: Of them, those that could not be written.
        losses_kept: Both numbers as the journal has them.
        num_fallbacks: Chats that could not be continued token by token, where that is asked for.
        ends: Of each agent's last call, [prompt + response] ids of each of its choices.
        active_s: Of the last call's beginning or end, by the monotonic clock.
    """

    name: str
    folder: int
    places: list[Place] = field(default_factory=list)
    outcome: Outcome | None = None
    num_under_way: int = 0
    num_tokens: int = 0
    num_drifts: int = 0
    num_unrecorded: int = 0
    num_lost: int = 0
    losses_kept: tuple[int, int] = (0, 0)
    num_fallbacks: int = 0
    ends: dict[str | None, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    active_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """For as long as a call is under way."""
        self.num_under_way += 1
        try:
            yield
        finally:
            self.num_under_way -= 1
            self.active_s = time.monotonic()

    def count(self, agent: str | None, seen: Seen) -> bool:
        """Count a call; whether it drifts: continues none of the choices of the one before."""
        before = self.ends.get(agent, [])
        drifts = bool(before) and not any(_continues(seen.prompt, end) for end in before)
        self.ends[agent] = [np.concatenate([seen.prompt, r]) for r in seen.responses]
        self.num_tokens += sum(map(len, seen.responses))
        self.num_drifts += drifts
        return drifts

    def state(self) -> dict[str, object]:
        """For people, as JSON."""
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
    """The sessions of a recorder.

    Args:
        written: Trajectory ids that the dataset holds.
    """

    def __init__(self, written: set[str]) -> None:
        self._written = written
        self._live: dict[str, Session] = {}
        self._next: dict[str, int] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._live.values())

    @property
    def num_open(self) -> int:
        """Sessions that have not ended."""
        return sum(session.outcome is None for session in self._live.values())

    @property
    def num_written(self) -> int:
        """Trajectories in the dataset."""
        return len(self._written)

    def find(self, name: str) -> Session | None:
        """A session that is not written yet."""
        return self._live.get(name)

    def is_written(self, name: str) -> bool:
        """Whether a session is in the dataset."""
        return trajectory_id(name) in self._written

    def called(self, name: str, folder: int) -> Session:
        """The session of a call, opened by its first one.

        Raises:
            RolloutError: session_ended.
        """
        session = self._live.get(name)
        if session is None:
            return self.open(name, folder)
        if session.outcome is not None:
            raise _ended(name, session.outcome.error)
        return session

    def open(self, name: str, folder: int) -> Session:
        """A new session.

        Raises:
            RolloutError: session_ended, session_open: there is one of that name.
        """
        if name in self._live and self._live[name].outcome is None:
            raise RolloutError("session_open", name, "a session that is open already", "a new one")
        if name in self._live or self.is_written(name):
            raise _ended(name, None)
        session = self._live[name] = Session(name=name, folder=folder)
        return session

    def add(self, session: Session) -> None:
        """Take one that was recovered."""
        self._live[session.name] = session

    def drop(self, session: Session) -> None:
        """Forget one that has no call."""
        del self._live[session.name]

    def free_repetition(self, instance_id: str) -> int:
        """The first number that no session of an instance has."""
        number = self._next.get(instance_id, 0)
        while (name := f"{instance_id}/{number}") in self._live or self.is_written(name):
            number += 1
        self._next[instance_id] = number + 1
        return number

    def wrote(self, sessions: Sequence[Session]) -> None:
        """Forget sessions that are in a shard, but for their names."""
        for session in sessions:
            self._written.add(trajectory_id(session.name))
            del self._live[session.name]

    def idle(self, timeout_s: float) -> list[Session]:
        """Open sessions in which nothing happened for so long."""
        before = time.monotonic() - timeout_s
        return [
            s for s in self if s.outcome is None and not s.num_under_way and s.active_s < before
        ]


def trajectory_id(name: str) -> str:
    """The trajectory of a session.

    Example:
        >>> trajectory_id("math/12/3")
        'math/12_3'
    """
    instance_id, repetition_id = split_session(name, "session")
    return f"{instance_id}_{repetition_id}"


def _ended(name: str, error: str | None) -> RolloutError:
    why = f" ({error})" if error else ""
    hint = "give the next run another repetition"
    return RolloutError(
        "session_ended", name, f"a session that has ended{why}", "an open one", hint
    )
