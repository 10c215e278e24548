"""The `claude_code` format: sessions of Claude Code, as JSONL or as a web export (one document).

A session is a run, even if its lines are spread over several files; lines without a `sessionId`
(titles, snapshots) belong to the first session of their file, and all lines of a file in
`SESSION/subagents/` to SESSION. Recent versions log the requests, from which the prompts are taken;
the others are put together from the lines (`claude_code_contexts`). The column `prompts` tells
which: `requests`, `messages`, or both. The log has no reward and no token ids.

A fork of a session begins with copies of its lines. Their answers are trained on in the session
with the fewest answers; in the others, they are part of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from rollout_io.formats.base import Logged, Options, Run, Trajectory
from rollout_io.formats.claude_code_contexts import LINES, MAIN, read
from rollout_io.formats.claude_code_lines import SPOKEN, Answer, Boundary, names_in, session_above
from rollout_io.formats.engines.sessions import File, Sessions
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.records import natural_key

_LEAVES = {
    "facts about the line, the process and its settings": "*/session_id */userType */entrypoint "
    "*/slug */sessionKind */logicalParentUuid */permissionMode */promptId */promptSource */origin "
    "*/mcpMeta */effort */attributionAgent */attributionSkill */attributionPlugin "
    "*/attributionMcpServer */attributionMcpTool */teamName */agentName */requestId",
    "repeats the result of a tool, for display": "user/toolUseResult user/toolDenialKind "
    "user/toolEndsTurn user/sourceToolAssistantUUID user/sourceToolUseID user/imagePasteIds "
    "user/interruptedMessageId user/turnCompanion user/todos user/thinkingMetadata "
    "user/classifierMetaLines",
    "where the program shows a message, which is sent all the same": "*/isMeta "
    "user/isVisibleInTranscriptOnly",
    "parameters that are not part of the prompt": "api-request/params api-request/querySource "
    "api-request/cacheControl api-request/requestDigest",
    "facts about a call": "assistant/requestedModel assistant/promptCacheRequested "
    "assistant/thinkingDisplay assistant/madeBy assistant/perTurnEffort user/mcpCallNotReadOnly",
    "facts about a message": "*/rowSource */turnOrigin */permissionDecision */renderedBesideToolResult "
    "*/queueSkipAttachments */turnPosition attachment/renderedRole",
    "failed calls: the model did not write them": "assistant/error assistant/errorDetails "
    "assistant/apiErrorType assistant/isAbortedMidStream",
    "shown to the user, not sent": "system summary ai-title custom-title agent-name last-prompt "
    "progress result started tag system:local_command/commandRun system:local_command/level "
    "system:compact_boundary/content system:compact_boundary/level",
    "what it sends is in `rendered`; without that, it is counted": "attachment/attachment",
    "other forms of `rendered`, for a turn of the user": "attachment/renderedInHumanTurn",
    "facts about a compaction": "system:compact_boundary/trigger "
    "system:compact_boundary/compactMetadata.trigger system:compact_boundary/originalModel "
    "system:compact_boundary/compactMetadata.preCompactDiscoveredTools "
    "system:compact_boundary/fallbackModel",
    "how much a forked sub-agent inherits; the last line tells it": "fork-context-ref/contextLength",
    "for undoing edits": "file-history-snapshot",
    "state of the harness": "mode permission-mode pr-link bridge-session frame-link "
    "relocated worktree-state atis-latch cost-state tools-used marble-origami-commit marble-origami-snapshot",
}


class _Shape(msgspec.Struct, gc=False):
    """A line with the fields that are specific to this format."""

    type: str
    message: dict[str, Any]
    session_id: str = msgspec.field(name="sessionId")
    uuid: str


class _Typed(msgspec.Struct, gc=False):
    type: str


_TYPED = msgspec.json.Decoder(_Typed)
_ANSWER = msgspec.json.Decoder(Answer)
_BOUNDARY = msgspec.json.Decoder(Boundary)


class _Log(Sessions):
    """Sessions whose lines have a type, and in which a compaction may log again what it keeps."""

    def split(self, content: bytes, where: str, decode: Callable[..., Any]) -> tuple[str, bytes]:
        """Return the type of a line, and the line; only an export has none."""
        if b'"loglines"' not in content:
            decode(_TYPED, content, where)
        return super().split(content, where, decode)

    def names_of(self, kind: str, fields: bytes, file: File) -> Sequence[str]:
        """Return an answer's content with its uuid, and with that of the line it was copied from."""
        try:
            if kind == "system:compact_boundary" and (segment := _BOUNDARY.decode(fields).kept):
                file.kept |= {*(segment.uuids or ())}
            line = _ANSWER.decode(fields) if kind == "assistant" else None
            names = () if line is None or line.uuid in file.kept else line.names
        except msgspec.MsgspecError:
            return ()  # the reader reports the damage
        return names

    def read_run(self, run: Run, options: Options) -> Trajectory:
        """Read a session: its conversations in the order of the log, the main agent's last one last."""
        trajectory = super().read_run(run, options)
        places = {place.where: i for i, place in enumerate(run.places)}

        def order(step: Logged) -> Any:
            is_side = session_above(step.source) is not None
            return is_side, places.get(step.source, 0), natural_key(step.source)

        steps = sorted(trajectory.steps, key=order)
        last = next((step for step in reversed(steps) if step.agent == MAIN), None)
        trajectory.steps = sorted(steps, key=lambda step: step is last)
        return trajectory


_IDS = {"uuid": str, "sessionId": str}
ADAPTER = replace(
    _Log(
        kind=LINES.kind,
        subkind=LINES.subkind,
        default=LINES.default,
        records=LINES.records,
        leaves=_LEAVES,
        names_in=names_in,
        read=read,
        is_record=like(
            {"loglines": [{"type": str}]},
            {"type": SPOKEN, "message": {"role": object, "parts": None}, **_IDS},
        ),
    ).adapter("sessions of Claude Code: JSONL, or the web export; text only"),
    line=_Shape,
)
