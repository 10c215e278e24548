"""Find a call's session, agent and API path in its URL, a header or its API key.

    /s/INSTANCE/REPETITION[/AGENT]/v1/...         base URL of a session
    /k/KEY/INSTANCE/REPETITION[/AGENT]/v1/...     the same, with the session's key
    X-Rollouts-Session: INSTANCE/REPETITION[/AGENT]
    Authorization: Bearer sk-rollouts-INSTANCE/REPETITION[/AGENT]
    x-api-key, x-goog-api-key: the same key, as Anthropic's and Google's clients send it

A call without a session may have one of its harness: `session_in` finds it, and `agent_in` an agent.

Each part is percent-encoded: the instance "math/12" becomes "math%2F12".
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from rollout_io.formats.parsing.records import split_session
from schemas.errors import InputError

KEY_PREFIX = "sk-rollouts-"
SESSION_HEADER = "x-rollouts-session"
KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key")
_HARNESS_HEADERS = (
    "x-claude-code-session-id",
    "x-session-affinity",  # OpenCode
    *("session_id", "session-id", "conversation_id", "conversation-id"),  # Codex
)
_HARNESS_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.:-]{0,199}")
_APIS = ("v1", "v1beta", "v1beta1", "v1alpha")
"""First parts of the engines' APIs: what comes before one of them is an agent."""


class Target(NamedTuple):
    """Target of a request.

    Attributes:
        session: "instance/repetition"; None if the request names none.
        agent: Agent within the session.
        key: Session key in the URL.
        rest: Path without the session, such as "/v1/chat/completions", "/end" or "".
    """

    session: str | None
    agent: str | None
    key: str | None
    rest: str


def target_of(raw_path: str, headers: Mapping[str, str]) -> Target:
    """Parse a request's target.

    Args:
        raw_path: Path as received, percent-encoded, without the query.
        headers: Headers by lower-case name.

    Raises:
        InputError: `session_name`: the instance or repetition is missing or invalid.

    Example:
        >>> target_of("/s/math%2F12/3/checker/v1/models", {})
        Target(session='math/12/3', agent='checker', key=None, rest='/v1/models')
    """
    parts = raw_path.split("/")
    kind = parts[1] if len(parts) > 1 else ""
    if kind in {"s", "k"}:
        key = None
        if kind == "k":
            key, parts = (parts[2] if len(parts) > 2 else ""), [*parts[:2], *parts[3:]]
        has_agent = len(parts) > 5 and parts[5] in _APIS
        named, rest = parts[2 : 5 if has_agent else 4], parts[5 if has_agent else 4 :]
        session, agent = _names(named, raw_path)
        return Target(session, agent, key, "/".join(["", *rest]))
    named = headers.get(SESSION_HEADER, "").split("/")
    if named == [""]:
        named = api_key_of(headers).removeprefix(KEY_PREFIX).split("/")
        if not is_session_key(headers):
            return Target(None, None, None, raw_path)
    session, agent = _names(named, "the session header or API key")
    return Target(session, agent, None, raw_path)


def is_session_key(headers: Mapping[str, str]) -> bool:
    """True if the client's API key names a session instead of being a credential."""
    return api_key_of(headers).startswith(KEY_PREFIX)


def api_key_of(headers: Mapping[str, str]) -> str:
    """Return the bearer token or, if there is none, the key in another header of a key; or ""."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    return next((headers[name] for name in KEY_HEADERS[1:] if name in headers), "").strip()


def without_key(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without the client's API key."""
    return {name: value for name, value in headers.items() if name not in KEY_HEADERS}


def session_in(headers: Mapping[str, str], named: str | None = None) -> str | None:
    """Return the session for a harness that names its own; None if it names none.

    Args:
        headers: Headers by lower-case name.
        named: Name in the body of the request, or None.

    Example:
        >>> session_in({"x-session-affinity": "ses_1"}), session_in({}, "0b7c-11"), session_in({})
        ('ses_1/0', '0b7c-11/0', None)
    """
    named_by = [*(headers.get(name) for name in _HARNESS_HEADERS), named]
    name = next((name for name in named_by if name and _HARNESS_NAME.fullmatch(name)), None)
    return None if name is None else f"{name}/0"


def agent_in(headers: Mapping[str, str]) -> str | None:
    """Return the sub-agent that a harness names (Claude Code, Codex); None for its main agent.

    Example:
        >>> (
        ...     agent_in({"x-claude-code-agent-id": "a1"}),
        ...     agent_in({"session-id": "s", "thread-id": "s"}),
        ... )
        ('a1', None)
    """
    name = headers.get("x-claude-code-agent-id", "")
    thread = headers.get("thread-id", "")
    if not name and thread != headers.get("session-id", thread):
        name = thread
    return name if _HARNESS_NAME.fullmatch(name) else None


def path_of(session: str, key: str | None = None) -> str:
    """Return the URL path of a session, without "/v1"."""
    instance, repetition = split_session(session, "session")
    head = "/s" if key is None else f"/k/{key}"
    return f"{head}/{quote(instance, safe='')}/{repetition}"


def key_of(admin_key: str, session: str) -> str:
    """Derive the key of a session, which gives write access to that session only."""
    return hmac.new(admin_key.encode(), session.encode(), hashlib.sha256).hexdigest()[:32]


def _names(parts: Sequence[str], where: str) -> tuple[str, str | None]:
    try:
        plain = [unquote(part, errors="strict") for part in parts]
    except UnicodeDecodeError:
        raise InputError("session_name", where, "the session name is not UTF-8") from None
    if not 2 <= len(plain) <= 3 or not all(plain):
        hint = "use /s/INSTANCE/REPETITION[/AGENT]/v1 with percent-encoded parts"
        finding, expected = repr("/".join(plain)), "INSTANCE/REPETITION[/AGENT]"
        raise InputError("session_name", where, finding, expected, hint)
    instance, repetition = split_session(f"{plain[0]}/{plain[1]}", where)
    return f"{instance}/{repetition}", plain[2] if len(plain) == 3 else None
