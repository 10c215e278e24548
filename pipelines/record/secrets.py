"""Redact credentials in a request's body: they are sent to the engine but never written to disk.

Text that the model reads is kept unchanged and is not searched. Elsewhere, at any depth, a field is
redacted if it contains headers or parameters of other servers, or if it is named like a credential.
The user and query of URLs are removed.
"""

from __future__ import annotations

import re
from itertools import pairwise
from urllib.parse import urlsplit

import msgspec

REDACTED = "[redacted]"
_REDACTED = msgspec.Raw(msgspec.json.encode(REDACTED))

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ALONE = frozenset(
    {
        *("apikey", "auth", "authentication", "authorization", "bearer", "cookie", "cookies"),
        *("credential", "credentials", "header", "headers", "jwt", "oauth", "passphrase", "passwd"),
        *("password", "passwords", "pwd", "salt", "secret", "secrets", "signature"),
    }
)
"""Words that mark the name of a credential, or of a field that contains credentials."""
_NOT_TOKENS = frozenset({"bos", "eos", "mask", "pad", "sep", "stop", "unk", "as", "per"})
_KEYS = frozenset(
    {
        *("access", "account", "admin", "api", "app", "application", "auth", "client"),
        *("encryption", "license", "master", "private", "secret", "service", "session"),
        *("signing", "ssh", "storage", "subscription", "virtual"),
    }
)
"""Words that, followed by "key", name a credential."""
_CARRIERS = frozenset(
    {"extrabody", "extraquery", "defaultquery", "litellmparams", "env", "environment"}
)
_RUN_TOGETHER = re.compile(
    r"(access|api|auth|private|secret)keys?$|(access|auth|bearer|csrf|id|refresh|session|xsrf)token$|passw"
)
_NAMES = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Fields of a JSON schema whose keys are property names, not keywords."""
_KEYWORDS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "description"})
_OF_MODEL = frozenset({"arguments"})
"""Fields that the model wrote or reads, which are not searched."""
_URLS = frozenset({"url", "urls", "uri", "endpoint", "base"})
# Fast path: a value that does not match is not parsed.
_SUSPECT = re.compile(
    rb"auth|bearer|cookie|credential|env|extra|header|jwt|key|litellm|oauth|pass|pwd|query|salt"
    rb"|secret|signature|token|://|\\",
    re.IGNORECASE,
)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


def is_secret(name: str) -> bool:
    """True if a field with this name is, or contains, a credential.

    Example:
        >>> names = ("X-Api-Key", "apiKey", "extra_headers", "max_tokens", "eos_token")
        >>> [is_secret(name) for name in names]
        [True, True, True, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    joined = "".join(words)
    if joined in _CARRIERS or _RUN_TOGETHER.search(joined):
        return True
    if words[-1:] == ["token"]:
        return len(words) == 1 or words[-2] not in _NOT_TOKENS
    return not _ALONE.isdisjoint(words) or any(
        word in {"key", "keys"} and before in _KEYS for before, word in pairwise(words)
    )


def without_secrets(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Redact the credentials in a body's fields; everything else is unchanged byte for byte."""
    return {name: _field(name, value) for name, value in fields.items()}


def _field(name: str, value: msgspec.Raw) -> msgspec.Raw:
    if name in _OF_MODEL:
        return value
    if is_secret(name) and bytes(value) != b"null":
        return _REDACTED
    words = _WORD.findall(name)
    is_url = bool(words) and words[-1].lower() in _URLS
    return _without(value, are_names=name in _NAMES, are_urls=is_url)


def _without(value: msgspec.Raw, *, are_names: bool = False, are_urls: bool = False) -> msgspec.Raw:
    content = bytes(value)
    if _SUSPECT.search(content) is None:
        return value
    try:
        if content[:1] == b"{":
            fields = _OBJECT.decode(content)
            clean = {
                k: _without(v) if are_names and _is_schema(v) else _field(k, v)
                for k, v in fields.items()
            }
            return value if clean == fields else msgspec.Raw(msgspec.json.encode(clean))
        if content[:1] == b"[":
            items = _LIST.decode(content)
            clean_items = [_without(item, are_urls=are_urls) for item in items]
            return value if clean_items == items else msgspec.Raw(msgspec.json.encode(clean_items))
        return _without_query(value) if are_urls and content[:1] == b'"' else value
    except (msgspec.MsgspecError, RecursionError, ValueError):  # not searchable: redact all
        return _REDACTED


def _is_schema(value: msgspec.Raw) -> bool:
    """True if a value is the JSON schema of a property, not a property's value."""
    content = bytes(value)
    if content[:1] != b"{":
        return content in {b"true", b"false"}
    fields = _OBJECT.decode(content)
    return not fields or not _KEYWORDS.isdisjoint(fields)


def _without_query(value: msgspec.Raw) -> msgspec.Raw:
    """Remove the user and the query from a URL; leave other texts unchanged."""
    text = _TEXT.decode(bytes(value))
    if "://" not in text:
        return value
    parts = urlsplit(text)
    host, query = parts.netloc.rpartition("@")[2], REDACTED if parts.query else ""
    clean = parts._replace(netloc=host, query=query, fragment="").geturl()
    return value if clean == text else msgspec.Raw(msgspec.json.encode(clean))
