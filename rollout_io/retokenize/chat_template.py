"""Chat templates by name or from a file."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from schemas.errors import RolloutError

MAX_TEMPLATE_BYTES = 1_000_000

TEMPLATE_NAMES = ("qwen3_acc_thinking", "qwen3_with_thinking", "qwen3_without_thinking")
"""Templates that come with the package, for Qwen3 and other ChatML models with <think> tags.

- qwen3_acc_thinking: tools, tool calls, consecutive tool messages in one user block; assistant
  content verbatim, thinking kept in every message ("accumulated"), so that a conversation only
  ever grows at its end. `reasoning_content` is not rendered: thinking belongs in the content.
- qwen3_with_thinking: plain ChatML (system, user, assistant), content verbatim. No tools.
- qwen3_without_thinking: the same, but an assistant message that is not the conversation's last
  one loses all up to its last </think>. Re-tokenisation renders each message as the last one
  (see `encode_messages`), so there it equals qwen3_with_thinking.
"""


def find_template(name_or_path: str) -> str:
    """The text of a chat template.

    Args:
        name_or_path: One of `TEMPLATE_NAMES`, else a file (UTF-8, at most 1 MB).

    Raises:
        RolloutError: chat_template: no such name or file, not a regular file, too large, not text.
    """
    if name_or_path in TEMPLATE_NAMES:
        template = files("rollout_io.retokenize") / "templates" / f"{name_or_path}.jinja"
        return template.read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        raise _unknown(name_or_path, path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(name_or_path, str(error), "a UTF-8 file") from None
    if len(content) > MAX_TEMPLATE_BYTES:
        raise _refused(name_or_path, "a larger file", f"at most {MAX_TEMPLATE_BYTES:,} bytes")
    return text


def _unknown(name: str, path: Path) -> RolloutError:
    got = "not a regular file" if path.exists() else "no such file"
    near = difflib.get_close_matches(name, TEMPLATE_NAMES, 1)
    hint = f"did you mean {near[0]}?" if near else "names: " + ", ".join(TEMPLATE_NAMES)
    return _refused(name, got, "a template's name or file", hint)


def _refused(name: str, got: str, expected: str, hint: str | None = None) -> RolloutError:
    return RolloutError("chat_template", f"chat template {name!r}", got, expected, hint)
