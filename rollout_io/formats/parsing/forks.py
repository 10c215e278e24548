"""Answers that several sessions of a log have, because a session was forked.

Each is trained on in one session. In the others, it is part of the prompt (`Run.copied`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from rollout_io.formats.base import Found, Place, Rejected, Run
from rollout_io.formats.parsing.lines import DUPLICATE
from schemas.errors import InputError

COPIED = "answers that are part of the prompt here, because another session has them too (forks)"
"""Note about these answers."""

Answers = Mapping[int, Sequence[bytes]]
"""Digests of each answer of a session, by the index of its place."""


def digest(*parts: str) -> bytes:
    """Return a digest by which copies of an answer are found."""
    text = "\0".join(parts).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


Name = TypeVar("Name", bound=Hashable)


def copied_answers(sessions: Mapping[Name, Answers]) -> dict[Name, dict[int, Name]]:
    """Return the copied answers of each session by index, each with the session that keeps it.

    The first session that has an answer keeps it: originals come before forks, or sessions with fewer
    answers first, or a fork could leave its original without answers.
    """
    keepers: dict[bytes, Name] = {}
    copied: dict[Name, dict[int, Name]] = {}
    for name, session in sessions.items():
        answers = session.items()
        keepers_of = {
            i: next((keepers[d] for d in digests if d in keepers), name) for i, digests in answers
        }
        copied[name] = {i: keeper for i, keeper in keepers_of.items() if keeper != name}
        for _, digests in answers:
            for one in digests:
                keepers.setdefault(one, name)
    return copied


def run_of(
    name: str,
    places: Sequence[Place],
    labels: Mapping[str, str],
    answers: Answers,
    copied: Mapping[int, str],
) -> Iterator[Found]:
    """Yield the run of a session; one without an answer of its own is rejected as a copy."""
    if not copied or len(copied) < len(answers):
        yield Run(
            instance_id=name,
            repetition_id=0,
            places=places,
            labels=labels,
            copied=frozenset(copied),
        )
        return
    others = Counter(copied.values()).most_common(1)
    finding = (
        f"the session has no answer of its own: session {others[0][0]!r} has all {len(copied)}"
    )
    hint = "delete the copy, or convert it to a separate dataset"
    for place in places:
        yield Rejected(place, InputError(DUPLICATE, place.where, finding, hint=hint))
