"""Chat templates, by name or from a file."""

from __future__ import annotations

import difflib
from pathlib import Path

from rollout_io.dataset.opening import open_input
from schemas.errors import ConfigError

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
