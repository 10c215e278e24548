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
        "assistant": "requestRef isApiErrorMessage apiBlockIndex supersedesUuids retractedMessageUuids",
        "system": "retractedMessageUuids",
        "system:compact_boundary": "compactMetadata content level",
        "system:microcompact_boundary": "",
        "system:local_command": "content",
        "attachment": "attachment.prompt attachment.source_uuid rendered.content renderedRole",
        "queue-operation": "operation content reason",
        "fork-context-ref": "parentSessionId parentLastUuid contextLength",
        "content-replacement": "replacements",
        "api-request-shape": "shapeHash shape.system shape.tools",
        "api-request-blob": "hash message.role",
        "api-request": "id shapeHash base tail thread.type params.temperature params.top_p",
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
        "parameters that are not part of the prompt": "api-request/params api-request/querySource "
        "api-request/cacheControl api-request/requestDigest api-request/version",
        "facts about a call": "assistant/requestedModel assistant/promptCacheRequested "
        "assistant/thinkingDisplay assistant/madeBy assistant/perTurnEffort",
        "facts about a message": "*/rowSource */turnOrigin */permissionDecision */renderedBesideToolResult "
        "*/queueSkipAttachments */turnPosition",
        "failed calls: the model did not write them": "assistant/error assistant/errorDetails "
        "assistant/isAbortedMidStream",
        "shown to the user, not sent": "system summary ai-title custom-title agent-name last-prompt "
        "progress result started tag",
        "what it sends is in `rendered`; without that, it is counted": "attachment/attachment",
        "other forms of `rendered`, for a turn of the user": "attachment/renderedInHumanTurn",
        "facts about a compaction": "system:compact_boundary/trigger "
        "system:compact_boundary/originalModel system:compact_boundary/fallbackModel",
        "for undoing edits": "file-history-snapshot",
        "state of the harness": "mode permission-mode pr-link bridge-session frame-link "
        "relocated worktree-state atis-latch cost-state tools-used marble-origami-commit marble-origami-snapshot",
    },
    inner={
        "user/message": MESSAGE,
        "assistant/message": MESSAGE,
        "attachment/rendered.content": BLOCKS,
        "api-request-blob/message.content": BLOCKS,
    },
)
