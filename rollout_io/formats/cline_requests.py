"""What Cline and Roo Code send of a task, of which they keep all messages.

The source: Roo Code, `src/core/task/Task.ts` (`attemptApiRequest`), `src/core/condense/index.ts`
(`getEffectiveApiHistory`), `src/core/context-management/index.ts` (`truncateConversation`) and
`src/core/task/mergeConsecutiveApiMessages.ts`; Cline, `ContextManager.ts` (`ensureToolResultsFollowToolUse`)
until version 3, `sdk/packages/core/src/session/services/message-builder.ts` since.

- A summary replaces all before it. Until 2026 it was an answer, sent behind the first message of the
  task, and stood before the last three messages, which were sent behind it.
- The mark of a truncation stands before the first message that it leaves; half of the messages are
  hidden, by pairs, so that as many are left as it hides, or two more.
- Messages of the user behind each other are one, but for marks.
- Results whose calls a summary replaced are not sent; results that are missing are added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.requests import Sends

UNCLEAR = (
    "answers near a summary or a truncation, whose context is not in the log: part of the prompt"
)
WRITTEN = "answers that the program wrote or broke off: part of the prompt"
ORPHANS = "results whose calls a summary replaced: left out, as they are not sent"
_NUM_KEPT = 3
"""Messages before a summary that is an answer which are sent behind it."""
_NUM_UNCLEAR = 2
"""A truncation hides half of the messages, rounded down to pairs: two more may have been there."""
_WRITTEN = re.compile(
    r"\[Response interrupted by [^\]]*\]\s*\Z|\AFailure: I did not provide a response\.\Z"
)
SENDS = Sends({"user": "\n"}, missing="result missing")


class _Facts(msgspec.Struct, gc=False, rename="camel"):
    display_only: bool | None = None
    compaction: str | None = None


class Marks(msgspec.Struct, gc=False, rename="camel"):
    """What Roo says about a message that it no longer sends, or that takes the place of others."""

    role: str | None = None
    type: str | None = None
    is_summary: bool | None = None
    is_truncation_marker: bool | None = None
    truncation_id: str | None = None
    truncation_parent: str | None = None
    model_info: dict[str, Any] | None = None
    metadata: _Facts | None = None
    ts: Any = None

    @property
    def is_shown_only(self) -> bool:
        """True for a message that the program only shows, such as an error in place of an answer."""
        return self.metadata is not None and bool(self.metadata.display_only)

    @property
    def is_kept(self) -> bool:
        """True for a message that Cline's compaction kept, behind a summary of what was before it."""
        return self.metadata is not None and self.metadata.compaction is not None

    @property
    def is_reasoning(self) -> bool:
        """True for an item of reasoning of version 2, which precedes its answer."""
        return self.role is None and self.type == "reasoning"

    @property
    def is_mark(self) -> bool:
        """True for a message that takes the place of others."""
        return bool(self.is_summary or self.is_truncation_marker)


@dataclass
class Task:
    """Says the messages of a task in the contexts that Cline and Roo make of them.

    A summary, or the mark of a truncation, may stand before messages that were said before it was
    written: it takes effect behind the last of these.

    Attributes:
        log: Contexts of the task.
        marks: What Roo says about each message.
        numbers: Number of each message, by its location.
        changes: Numbers of the marks that take effect behind a message, by its number.
        unclear: Numbers of the messages whose context is not known.
        held: Messages of the marks that have not taken effect, and their locations.
    """

    log: Contexts
    marks: Sequence[Marks]
    numbers: dict[str, int] = field(default_factory=dict)
    changes: dict[int, list[int]] = field(default_factory=dict)
    unclear: set[int] = field(default_factory=set)
    held: dict[int, tuple[list[Message], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unclear |= {number for number, mark in enumerate(self.marks) if mark.is_kept}
        for number, mark in enumerate(self.marks):
            last, num_unclear = number, 0
            if mark.is_summary and mark.role == "assistant":
                if number > 1:
                    last = self._behind(number, _NUM_KEPT)
                else:  # it replaces messages that are not in the log
                    num_unclear = _NUM_KEPT
            elif mark.is_truncation_marker:
                hidden = self._hidden(number)
                last = self._behind(max([number, *hidden]), len(hidden))
                num_unclear = _NUM_UNCLEAR if hidden else 0
            if mark.is_mark:
                self.changes.setdefault(last, []).append(number)
                self.unclear |= {*range(last + 1, self._behind(last, num_unclear) + 1)}

    def _hidden(self, number: int) -> set[int]:
        """Return the numbers of the messages that a truncation removes."""
        name = self.marks[number].truncation_id
        return {i for i, other in enumerate(self.marks) if name and other.truncation_parent == name}

    def _behind(self, number: int, count: int) -> int:
        """Return the number of the message that is so many behind another; marks do not count."""
        behind = [i for i in range(number + 1, len(self.marks)) if not self.marks[i].is_mark]
        return [number, *behind[:count]][-1]

    def say(self, number: int, pieces: list[Message], where: str) -> None:
        """Say a message, or keep a mark until it takes effect, and let those due take it."""
        self.numbers[where] = number
        if self.marks[number].is_mark:
            self.held[number] = pieces, where
        elif pieces:
            given: bool | str = UNCLEAR if number in self.unclear else False
            given = given or (WRITTEN if _is_written(pieces[-1]) else False)
            self.log.say(pieces, where, given=given)
        for at in self.changes.get(number, ()):
            self._begin(at)

    def _begin(self, at: int) -> None:
        """Begin the context with a summary, or with the mark of a truncation."""
        mark = self.marks[at]
        path = [(self.numbers.get(node.where, -1), node) for node in self.log.path()]
        if mark.is_summary:
            note(SUMMARIES)
            self.log.sends = self.log.sends._replace(orphans=ORPHANS)
            # Only a summary that is an answer follows the first message.
            is_first = mark.role == "assistant" and path[:1] and path[0][1].role == "user"
            before = [node for _, node in path[:1] if is_first]
            behind = [node for number, node in path if number > at]
        else:
            hidden = self._hidden(at)
            before = [node for number, node in path if number not in hidden and number < at]
            behind = [node for number, node in path if number not in hidden and number > at]
        self.log.replace(before)
        pieces, where = self.held.pop(at)
        # Further messages of the user continue a summary, but not the mark of a truncation.
        self.log.say(pieces, where, given=True, is_alone=not mark.is_summary)
        self.log.keep(behind)


def _is_written(message: Message) -> bool:
    content = message.get("content")
    return message["role"] == "assistant" and _WRITTEN.search(str(content)) is not None
