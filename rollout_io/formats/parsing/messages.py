"""Conversion of logged messages of any API to OpenAI's chat format.

`read_messages` accepts the fields of these APIs:

    content            a string, or parts of type text, input_text, output_text
    reasoning          `reasoning_content`, `reasoning`, `thinking`, `thinking_blocks`, or parts
                       of type thinking or reasoning
    tool calls         {"id", "function": {"name", "arguments"}}, {"id", "function", "arguments"},
                       {"id", "name", "arguments"}, or each as a JSON string; or parts of type
                       tool_use
    tool results       `tool_call_id`, or `tool_call_ids` with one id; or parts of type tool_result,
                       each of which becomes a message before the rest of the content
    Responses objects  `output` of items (message, reasoning, tool calls); and single items that are
                       the output of a tool

A message that is not `active` was taken back, and is left out. `weight` 0 in a result is an answer that
is marked as not to be trained on (`with_marks`). Otherwise, the results have `role`, `content`, and if known `reasoning_content`, `tool_calls`, `tool_call_id`,
`name`. Tool arguments are canonical JSON text: their numbers keep all digits.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from rollout_io.formats.base import Conversation, Logged, Step, Trajectory, note
from rollout_io.formats.dialects.anthropic import BLOCKS, messages_of
from rollout_io.formats.dialects.responses import ITEMS, OUTPUTS, TEXTS, Item, read_item, reply_of
from rollout_io.formats.grammar import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Message,
    Part,
    all_text,
    bad_message,
    json_text,
    known,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.media import READS
from schemas.errors import InputError

PARTS = Contents(
    kind="type",
    default="text",
    reads=dict(BLOCKS.reads) | dict(TEXTS.reads) | READS,
    leaves=dict(BLOCKS.leaves) | dict(TEXTS.leaves),
    inner=BLOCKS.inner,
)
CALLS = Contents(
    reads={"": "id name arguments function"},
    leaves={
        "kinds, places and other names of calls": "type index call_id response_item_id",
        "shown to the user, not sent": "view",
    },
)
"""A call of `MESSAGE`."""
_CHAT = Contents(
    reads={
        "": "role reasoning_content reasoning thinking thinking_blocks tool_call_id "
        "tool_call_ids is_error name active weight loss_mask step_loss_mask loss train training"
    },
    inner={"content": PARTS, "tool_calls": CALLS},
)
MESSAGE = Contents(
    kind="type",
    default="message",
    reads={**ITEMS.reads, "message": _CHAT.reads[""] + " object"},
    leaves={
        **ITEMS.leaves,
        "the model's tokens and log-probabilities, not its text": "message/logprobs "
        "message/token_ids",
        "facts about a call": "message/finish_reason message/stop_reason message/annotations",
    },
    inner={
        **ITEMS.inner,
        "message/content": PARTS,
        "message/output": ITEMS,
        "message/tool_calls": CALLS,
    },
)
"""A message of `read_messages`."""

INACTIVE = "messages that were taken back (not `active`): left out"
MARKED = "answers that are marked as not to be trained on: part of the prompt"
WEIGHT = "weight"
MARKS = (WEIGHT, "loss_mask", "step_loss_mask", "loss", "train", "training")
_SAID = ("reasoning_content", "reasoning", "content", "tool_calls")


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON


class _ToolCall(_Function, gc=False):
    function: str | _Function | None = None
    id: str | None = None


class _Chat(msgspec.Struct, gc=False):
    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: Content = None
    thinking: Content = None
    thinking_blocks: list[Part] | None = None
    tool_calls: list[_ToolCall | str] | None = None
    tool_call_id: str | None = None
    tool_call_ids: list[str] | None = None
    is_error: bool | None = None
    name: str | None = None

    @property
    def thought(self) -> str | None:
        """Reasoning text, if it is in a field other than `content`."""
        named = (self.reasoning, self.thinking, self.thinking_blocks)
        texts = (self.reasoning_content, *map(all_text, named))
        return next((text for text in texts if text), None)


class _Items(msgspec.Struct, gc=False):
    output: list[Item]


class _Kind(msgspec.Struct, gc=False):
    type: str | None = None
    object: str | None = None
    active: bool | int | None = None
    weight: Any = None
    loss_mask: Any = None
    step_loss_mask: Any = None
    loss: Any = None
    train: Any = None
    training: Any = None

    @property
    def marks(self) -> dict[str, Any]:
        """What says whether the message is trained on, by key."""
        values = [(name, getattr(self, name)) for name in MARKS]
        return {name: value for name, value in values if value is not None}


_KIND_DECODER = msgspec.json.Decoder(_Kind)
_CHAT_DECODER = msgspec.json.Decoder(_Chat)
_CALL_DECODER = msgspec.json.Decoder(_ToolCall)
_ITEM_DECODER = msgspec.json.Decoder(Item)
_ITEMS_DECODER = msgspec.json.Decoder(_Items)


def read_messages(raws: Iterable[msgspec.Raw], where: str) -> list[Message]:
    """Convert logged messages to OpenAI's format; a message with tool results becomes several.

    Raises:
        InputError: `record_type`: a message is not an object with a role, or a field has the wrong
            type; `message`: a call has no name, or an item has an unknown type; `json_line`: a call
            is a string but not JSON.

    Example:
        >>> call = msgspec.Raw(b'{"role": "assistant", "tool_calls": [{"id": "c", "name": "ls"}]}')
        >>> read_messages([call], "a.jsonl:1")[0]["tool_calls"]
        [{'id': 'c', 'type': 'function', 'function': {'name': 'ls', 'arguments': '{}'}}]
    """
    converted: list[Message] = []
    for i, raw in enumerate(raws):
        is_active, messages = _read(raw, f"{where}[{i}]")
        note(INACTIVE, not is_active)
        converted += messages if is_active else ()
    return converted


def read_message(raw: msgspec.Raw, where: str) -> Message:
    """Convert a logged message that corresponds to exactly one in OpenAI's format, `active` or not."""
    _, converted = _read(raw, where)
    if len(converted) > 1:
        finding = "the message has several tool results, or a tool result and other content"
        raise bad_message(where, finding)
    return converted[0]


def with_marks(messages: list[Message], marks: Mapping[str, Any], where: str) -> list[Message]:
    """Return messages with `weight` 0 in answers that are marked as not to be trained on.

    The marks are `weight` (OpenAI's fine-tuning format), `loss_mask`, `step_loss_mask`, `loss` (AgentInstruct,
    ms-swift), `train` and `training` (Axolotl): false or 0 for an answer that is part of the prompt.
    """
    stated = {name: marks[name] for name in MARKS if marks.get(name) is not None}
    if not stated or all(message["role"] != "assistant" for message in messages):
        return messages
    for name, value in stated.items():
        if value not in (0, 1):
            finding = f"`{name}` of an answer is {msgspec.json.encode(value).decode()[:40]}"
            raise bad_message(where, finding, "1 (trained on) or 0 (part of the prompt)")
    if all(stated.values()):
        return messages
    return [
        message | {WEIGHT: 0} if message["role"] == "assistant" else message for message in messages
    ]


def by_marks(step: Logged) -> list[Logged]:
    """Return a conversation without the answers that are marked as not to be trained on: they are given.

    As a conversation has one prompt, it ends before such an answer, and the rest is another one.

    Args:
        step: The conversation, in which these answers have `weight` 0; any other step is returned.

    Example:
        >>> chat = [{"role": "assistant", "content": text} for text in "abc"]
        >>> chat[1]["weight"] = 0
        >>> [(len(c.messages), c.num_given) for c in by_marks(Conversation("a", chat))]
        [(1, 0), (3, 2)]
    """
    if not isinstance(step, Conversation) or all(WEIGHT not in m for m in step.messages):
        return [step]
    messages = [{key: m[key] for key in m if key != WEIGHT} for m in step.messages]
    answers = [
        i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= step.num_given
    ]
    marked = [i for i in answers if WEIGHT in step.messages[i]]
    note(MARKED, len(marked))
    starts = [step.num_given, *(i + 1 for i in marked)]
    parts = list[Logged]()
    for start, end in zip(starts, [*marked, len(messages)], strict=True):
        trained = [i for i in answers if start <= i < end]
        if trained:
            part = replace(step, messages=messages[:end], num_given=start)
            if step.logprobs is not None:
                part.logprobs = [step.logprobs[answers.index(i)] for i in trained]
            parts.append(part)
    return parts


def _read(raw: msgspec.Raw, where: str) -> tuple[bool, list[Message]]:
    """Return whether a logged message is active, and the messages that it becomes."""
    content = bytes(raw)
    kind = decode_line(_KIND_DECODER, content, where)
    is_active = kind.active is None or bool(kind.active)
    if kind.object == "response":
        return is_active, [reply_of(decode_line(_ITEMS_DECODER, content, where).output, where)]
    if kind.type in OUTPUTS:
        output = read_item(decode_line(_ITEM_DECODER, content, where), where)
        assert output is not None
        return is_active, [output]
    messages = _of_chat(decode_line(_CHAT_DECODER, content, where), where)
    return is_active, with_marks(messages, kind.marks, where)


def _of_chat(chat: _Chat, where: str) -> list[Message]:
    *before, message = messages_of(chat.role, chat.content, where)
    calls = [_tool_call(call, where) for call in chat.tool_calls or ()]
    beside = {
        "tool_calls": [*calls, *message.get("tool_calls", ())] or None,
        "tool_call_id": chat.tool_call_id or next(iter(chat.tool_call_ids or ()), None),
        "name": chat.name,
        "is_error": chat.is_error or None,
    }
    messages = [*before, message | known(beside)]
    if chat.thought is not None:
        first = next(i for i, other in enumerate(messages) if other["role"] == chat.role)
        messages[first] |= {"reasoning_content": chat.thought}
    return messages


def _tool_call(call: _ToolCall | str, where: str) -> Message:
    if isinstance(call, str):
        call = decode_line(_CALL_DECODER, call.encode(), where)
    function = call.function
    if not isinstance(function, _Function):
        function = _Function(function or call.name, call.arguments)
    if function.name is None:
        raise bad_message(where, "a tool call has no function name")
    return tool_call(call.id, function.name, json_text(function.arguments, where))


def openai_tools(tools: Any) -> list[Message] | None:
    """Return tool definitions in OpenAI's format; None if there are none."""
    if not isinstance(tools, list):
        return None
    objects = [tool for tool in tools if isinstance(tool, Mapping)]
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
        for tool in objects
    ] or None


def prompt_key(prompt: Sequence[Message] | str) -> str:
    """Return a digest of a prompt's text, or of its messages before the first answer."""
    if not isinstance(prompt, str):
        answers = (i for i, message in enumerate(prompt) if message["role"] == "assistant")
        prompt = prompt[: next(answers, len(prompt))]
    digest = hashlib.blake2b(msgspec.json.encode(prompt), digest_size=6)
    return f"prompt-{digest.hexdigest()}"


def text_of(message: Any) -> str | None:
    """Return the reasoning, content and tool calls of a message as text."""
    if isinstance(message, str):
        return message
    if not isinstance(message, Mapping):
        return None
    parts = [message[name] for name in _SAID if message.get(name)]
    texts = [p if isinstance(p, str) else msgspec.json.encode(p).decode() for p in parts]
    return "\n".join(texts) if texts else None


ROLES = frozenset(
    {
        *("system", "developer", "user", "assistant", "tool", "function"),
        *("model", "ipython", "environment", "observation", "tool_call", "tool_response"),
        *("available_tools", "tools", "document", "documents", "context", "control", "root"),
        *("latest_reminder", "thinking"),
    }
)
"""Roles of OpenAI's API, and those that chat templates of open models know."""

NO_SYSTEM = "contexts without a system prompt: the log has none"
NO_TOOLS = "contexts without tool definitions: the log has none"
ORPHANS = "tool results whose `tool_call_id` is no earlier call's (they stay in the conversation)"


def check_slips(logged: Trajectory, *, strict: bool) -> None:
    """Check the messages of a run; tool results without a call are counted.

    A run of calls is checked by its last messages, which contain the earlier ones.

    Example:
        >>> messages = [{"role": "usr", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> check_slips(
        ...     Trajectory(steps=[Conversation(source="a.jsonl:1", messages=messages)]),
        ...     strict=False,
        ... )
        InputError: a.jsonl:1, message 0: role 'usr'; expected system, developer, user, ...
    """
    for source, messages in _conversations(logged.steps):
        calls = set[str]()
        for i, message in enumerate(messages):
            _check_role(message.get("role"), source, i)
            calls |= {str(call.get("id")) for call in _listed(message.get("tool_calls"))}
            answered = message.get("tool_call_id")
            if answered and str(answered) not in calls:
                note(ORPHANS)
                if strict:
                    finding = f"tool_call_id {str(answered)!r:.60}, which no earlier call has"
                    hint = "omit --strict to convert the run, or log the message with the call"
                    raise InputError("message", f"{source}, message {i}", finding, hint=hint)


def _check_role(role: object, source: str, index: int) -> None:
    if not isinstance(role, str) or role.lower() in ROLES:
        return
    near = difflib.get_close_matches(role.lower(), sorted(ROLES), 1)
    hint = f"did you mean {near[0]!r}?" if near else "rename the role in the log"
    expected = "system, developer, user, assistant, tool or function"
    raise InputError(
        "message_role", f"{source}, message {index}", f"role {role!r:.60}", expected, hint
    )


def _conversations(steps: Sequence[Logged]) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    for step in steps:
        if isinstance(step, Conversation):
            yield step.source, _listed(step.messages)
    for step in reversed(steps):
        if isinstance(step, Step) and step.messages:
            with suppress(ValueError, RecursionError):
                yield step.source, _listed(json.loads(step.messages))
            return


def _listed(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list; none if it is not a list."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def note_lacks(logged: Trajectory) -> None:
    """Count the contexts of an agent program without what every request has (`Adapter.is_agent`)."""
    contexts = [step for step in logged.steps if isinstance(step, Conversation)]
    roles = [{message["role"] for message in step.messages[:1]} for step in contexts]
    note(NO_SYSTEM, sum(not role & {"system", "developer"} for role in roles))
    note(NO_TOOLS, sum(not step.tools for step in contexts))
