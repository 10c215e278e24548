"""Damage to logs: what stopped writers, editors, other languages and hostile hands leave behind.

`damaged(content, rng)` is the content with one to three things wrong; equal generators, equal damage.
"""

import json

TOKENS = [
    *(b"null", b"true", b"false", b"0", b"-1", b"1.5", b"-0.0", b"1e308", b"1e999", b"-1e999"),
    *(b"NaN", b"Infinity", b"-Infinity", b"2147483648", b"9223372036854775808", b"1e-400"),
    *(b"1" + b"0" * 30, b"1" + b"0" * 400, b"-1" + b"0" * 400, b"1" * 5000, b"007", b"1."),
    *(b'""', b'"x"', b'"7"', b'" "', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"a\x00b"'),
    *(b'"\xff"', b'"\xc3\x28"', b'"\xed\xa0\x80"', b'"\\x"', b'"a\nb"', b'"\xe2\x80\xa8"'),
    *(b"[]", b"{}", b"[[]]", b"[{}]", b"[null]", b'[""]', b"[[[1]]]", b'{"": 1}', b"[1, 2, 3]"),
    *(b'{"a": 1, "a": 2}', b'{"role": null}', b'[{"type": "x"}]', b'{"content": {}}', b"[-1]"),
    *(b"[1e999]", b"[1.5]", b'["1"]', b"[true]", b"[1,]", b"[1 2]", b"{]", b"'x'", b"/* */"),
    *(b"[" * 600 + b"]" * 600, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 100_000),
    *(b'"' + b"x" * 300_000 + b'"', b'"' + b"\\u00e9" * 20_000 + b'"'),
]
LINES = [
    *(b"", b" \t", b"\x0b\x0c", b"null", b"[]", b"{}", b"1", b'"x"', b"}", b"\x00" * 9),
    *(b"# a comment", b"Traceback (most recent call last):", b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
]
PIECES = [b"\x00", b"\xff", b"\xc3", b"\n", b"\r", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":"]


def damaged(content, rng):
    """The content with one to three things wrong."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = rng.choice([*[_json_damage] * 10, *[_line_damage] * 3, _byte_damage])(
            content, rng
        )
    return content


def possible_counts(content):
    """How many records lines are: those that are not blank; or 1, where they may be one document."""
    lines = [line for line in content.split(b"\n") if line and not line.isspace()]
    first = lines[0].strip() if lines else b""
    is_document = first == b"{" or first.startswith(b"[")
    is_other = not any(map(_is_record, lines[:8]))  # such as UTF-16, or a file that was cut
    return {len(lines), 1} if is_document or is_other else {len(lines)}


def _is_record(line):
    try:  # bytes may be read as UTF-16, and NaN is no JSON
        return isinstance(json.loads(line.decode(), parse_constant=int), dict | list)
    except (ValueError, RecursionError):
        return False


def _byte_damage(content, rng):
    at = rng.randint(0, len(content))
    kind = rng.randrange(8)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[at:]
    if kind == 2:
        return content[:at] + rng.choice(PIECES) + content[at:]
    if kind == 3:
        return content[:at] + content[at + 1 :]
    if kind == 4:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if kind == 5:
        return b"\xef\xbb\xbf" + content
    if kind == 6:
        return content.decode(errors="replace").encode(rng.choice(["utf-16", "latin-1"]), "replace")
    return content[:at] + content[rng.randint(0, len(content)) :]


def _line_damage(content, rng):
    lines = content.split(b"\n")
    here, there = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(9)
    if kind == 0:
        del lines[here]
    elif kind == 1:
        lines.insert(there, lines[here])
    elif kind == 2:
        lines[here], lines[there] = lines[there], lines[here]
    elif kind == 3:
        rng.shuffle(lines)
    elif kind == 4:
        lines.insert(here, rng.choice(LINES))
    elif kind == 5:
        lines[here] = lines[here][: rng.randint(0, len(lines[here]))]
    elif kind == 6:
        lines[here : here + 2] = [b"".join(lines[here : here + 2])]
    elif kind == 7:
        return b"\r\n".join(lines)
    else:
        lines += lines
    return b"\n".join(lines)


def _json_damage(content, rng):
    """One record with another value, key or order somewhere."""
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    for text, rejoin in (
        (content, lambda new: new),
        (lines[at], lambda new: b"\n".join([*lines[:at], new, *lines[at + 1 :]])),
    ):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict | list) and value:
            indent = 1 if text is content and rng.random() < 0.1 else None
            return rejoin(_encoded(*_changed(value, rng), rng, indent))
    return _byte_damage(content, rng)


def _encoded(value, raw, rng, indent):
    """JSON in which strings that stand for other bytes are replaced by them."""
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=rng.random() < 0.5)
        found = text.encode(errors="surrogatepass")
    except RecursionError:
        return raw
    return found.replace(b'"@damage@"', raw)


def _changed(value, rng):
    """The value, changed in one place, and the bytes that "@damage@" stands for."""
    inner, key = _somewhere(value, rng)
    raw = rng.choice(TOKENS)
    if isinstance(inner, list):
        return value, _change_list(inner, key, rng, raw)
    kind = rng.randrange(8)
    if kind == 0:
        del inner[key]
    elif kind == 1:
        inner[key + "x"] = inner.pop(key)
    elif kind == 2:  # the same key, its first letter escaped
        letters = key or "a"
        inner["@damage@"] = inner.pop(key)
        raw = b'"' + f"\\u{ord(letters[0]) % 65536:04x}".encode() + letters[1:].encode() + b'"'
    elif kind == 3:  # twice; the second one wins in most parsers
        inner["@damage@"] = rng.choice([inner[key], None, 1, "x"])
        raw = json.dumps(key).encode()
    elif kind == 4:
        inner[key] = _any_value(value, rng)
    else:
        inner[key] = "@damage@"
    return value, raw


def _change_list(items, at, rng, raw):
    kind = rng.randrange(7)
    if kind == 0:
        del items[at]
    elif kind == 1:
        items.insert(at, items[at])
    elif kind == 2:
        items.reverse()
    elif kind == 3:
        del items[at:]
    elif kind == 4:
        items.append("@damage@")
    else:
        items[at] = "@damage@"
    return raw


def _any_value(value, rng):
    inner, key = _somewhere(value, rng)
    return json.loads(json.dumps(inner[key]))


def _somewhere(value, rng):
    """A list or object at a random depth, and a key in it."""
    key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    while isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
        value = value[key]
        key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    return value, key
