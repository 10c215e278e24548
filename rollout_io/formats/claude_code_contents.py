"""What the lines of a Claude Code session contain: what is read, and what is left out and why."""

from __future__ import annotations

from rollout_io.formats.contents import Contents
from rollout_io.formats.dialects.anthropic import BLOCKS, MESSAGE

CONTENTS = Contents(
    kind="type",
    subkind="subtype",
    reads={
        "*": "uuid parentUuid sessionId agentId timestamp isSidechain requestId",
        "user": "isCompactSummary supersedesUuids retractedMessageUuids isVirtual",
        "assistant": "isApiErrorMessage apiBlockIndex supersedesUuids retractedMessageUuids",
        "system": "retractedMessageUuids",
        "system:compact_boundary": "compactMetadata content",
        "system:microcompact_boundary": "",
        "system:local_command": "content",
        "attachment": "attachment.prompt attachment.source_uuid rendered.content renderedRole",
        "queue-operation": "operation content reason",
        "fork-context-ref": "parentSessionId parentLastUuid contextLength",
        "content-replacement": "replacements",
        "api-request-shape": "shape.system shape.tools",
    },
    leaves={
        "facts about the line, the process and its settings": "*/session_id */requestSessionId "
        "*/cwd */version */gitBranch */userType */entrypoint */slug */sessionKind */forkedFrom "
        "*/logicalParentUuid */permissionMode */promptId */promptSource */origin */mcpMeta */effort "
        "*/attributionAgent */attributionSkill */attributionPlugin */isMeta */teamName */agentName",
        "repeats the result of a tool, for display": "user/toolUseResult user/toolDenialKind "
        "user/toolEndsTurn user/sourceToolAssistantUUID user/sourceToolUseID user/imagePasteIds "
        "user/interruptedMessageId user/turnCompanion user/todos user/thinkingMetadata "
        "user/classifierMetaLines user/isVisibleInTranscriptOnly",
        "failed calls: the model did not write them": "assistant/error assistant/errorDetails "
        "assistant/isAbortedMidStream",
        "shown to the user, not sent": "system summary ai-title custom-title agent-name last-prompt "
        "progress result started tag",
        "what it sends is in `rendered`; without that, it is counted": "attachment/attachment",
        "for undoing edits": "file-history-snapshot",
        "state of the harness": "mode permission-mode pr-link bridge-session frame-link "
        "relocated worktree-state atis-latch marble-origami-commit marble-origami-snapshot",
    },
    inner={
        "user/message": MESSAGE,
        "assistant/message": MESSAGE,
        "attachment/rendered.content": BLOCKS,
    },
)
