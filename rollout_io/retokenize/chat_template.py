"""What chat templates render: logged chat messages, in the form that templates expect, and templates by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_io.dataset.opening import open_input
from schemas.errors import ConfigError, InputError

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def normalize(message: object, where: str) -> dict[str, Any]:
    """Return a copy of a message in the form that chat templates expect.

    - `content`: None or absent becomes ""; text parts are joined by newlines, as vLLM does for
      templates that expect strings.
    - `tool_calls`: arguments in a JSON string (OpenAI's format) become an object, as Transformers
      requires and vLLM does; missing arguments become {}.
    - Reasoning under any common name (`reasoning_content`, `reasoning`, `thinking`) becomes
      `reasoning_content`.

    Raises:
        InputError: `message`: the message is not an object with a role, its content is not text
            (the error identifies an image part), or a tool call is invalid; `tool_arguments`: the
            arguments are not a JSON object.

    Example:
        >>> call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
        >>> normalize({"role": "assistant", "content": None, "tool_calls": [call]}, "message 0")
        {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 1}}}]}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        finding = f"a value of type {type(message).__name__} without a role"
        raise _bad(where, finding, "an object with a role")
    result = {k: v for k, v in message.items() if v is not None and k not in REASONING_FIELDS}
    result["content"] = _text(message.get("content"), where)
    reasoning = next((v for k in REASONING_FIELDS if (v := message.get(k)) is not None), None)
    if text := _text(reasoning, where):
        result["reasoning_content"] = text
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], where)
    return result


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_part(part, where) for part in content)
    raise _bad(where, f"content of type {type(content).__name__}", "text, or a list of text parts")


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in TEXT_PARTS and isinstance(text, str):
        return text
    raise _bad(where, f"a content part of type {kind!r}", "text")


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise _bad(where, f"tool_calls of type {type(calls).__name__}", "a list of objects")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a tool call whose name and arguments are in `function`, or in the call itself."""
    nested = call.get("function")
    function = nested if isinstance(nested, Mapping) else call
    if not isinstance(function.get("name"), str):
        raise _bad(where, "a tool call without a name", "a function with a name")
    named = {**function, "arguments": _arguments(function.get("arguments"), where)}
    return named if function is call else {**call, "function": named}


def _arguments(arguments: object, where: str) -> object:
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, Mapping):
        hint = "if the call could not be parsed, move it to the message's content as text"
        finding = f"arguments of type {type(arguments).__name__}"
        if isinstance(arguments, str):
            finding = f"arguments {arguments!r:.80}"
        raise InputError("tool_arguments", where, finding, "a JSON object", hint)
    return parsed


def _bad(where: str, got: str, expected: str) -> InputError:
    return InputError("message", where, got, expected)


MAX_TEMPLATE_BYTES = 1_000_000

KEEPS_ALL = "chatml_tools_thinking"
TEMPLATES = {
    KEEPS_ALL: "everything in a conversation: all roles, tools, tool calls, thinking",
    "qwen3_acc_thinking": "tools and tool calls; keeps the thinking in every message's content",
    "qwen3_with_thinking": "system, user and assistant; content unchanged",
    "qwen3_without_thinking": "like qwen3_with_thinking, but removes thinking from earlier answers",
}
"""Templates in the package, for ChatML tokenizers (`<|im_start|>`, `<|im_end|>`), with summaries.

- chatml_tools_thinking: everything in a conversation: all roles, tools, tool calls, reasoning in
  <think> tags before the content, consecutive tool messages in one user block. The template adds no
  text besides these markers and the tool definitions. New messages never change earlier text.
- qwen3_acc_thinking: tools, tool calls, consecutive tool messages in one user block; assistant
  content verbatim, thinking kept in every message ("accumulated"), so that new messages never
  change earlier text. `reasoning_content` is not rendered: put thinking into the content.
- qwen3_with_thinking: plain ChatML (system, user, assistant), content verbatim. No tools.
- qwen3_without_thinking: like qwen3_with_thinking, but everything up to the last </think> is
  removed from each assistant message except the conversation's last. Re-tokenization renders each
  message as the last one (see `encode_messages`), so both templates give the same result.
"""


def template_path(name: str) -> Path:
    """Return the file of a template in the package.

    Raises:
        ConfigError: `chat_template`: there is no template of this name.

    Example:
        >>> template_path("chatml_tools_thinking").name
        'chatml_tools_thinking.jinja'
    """
    if name not in TEMPLATES:
        raise _refused(name, "no template has this name", _names_near(name))
    return Path(__file__).with_name("templates") / f"{name}.jinja"


def find_template(name_or_path: str) -> str:
    """Return the text of a chat template.

    Args:
        name_or_path: A key of `TEMPLATES`, or a file (UTF-8, at most 1 MB).

    Raises:
        ConfigError: `chat_template`: no template or file has this name, or the file is not a
            regular file, too large, unreadable or not UTF-8.
    """
    if name_or_path in TEMPLATES:
        return template_path(name_or_path).read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        finding = "the path is not a regular file"
        finding = finding if path.exists() else "no template or file has this name"
        raise _refused(name_or_path, finding, _names_near(name_or_path))
    try:
        with open_input(path) as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) > MAX_TEMPLATE_BYTES:
            raise _refused(name_or_path, f"the file is larger than {MAX_TEMPLATE_BYTES:,} bytes")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(name_or_path, f"the file is not UTF-8: {error}") from None
    except OSError as error:
        raise _refused(name_or_path, f"the file cannot be read: {error}") from None


def _names_near(name: str) -> str:
    near = [template for template in TEMPLATES if template.startswith(name)]
    near = near or difflib.get_close_matches(name, TEMPLATES, 1)
    return f"did you mean {near[0]}?" if near else "use a file, or one of " + ", ".join(TEMPLATES)


def _refused(name: str, got: str, hint: str | None = None) -> ConfigError:
    return ConfigError("chat_template", f"chat template {name!r}", got, "", hint)
