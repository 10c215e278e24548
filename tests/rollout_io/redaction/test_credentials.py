"""Credentials are found by shape and by place, in every form in which they are known."""

import base64
import json

import pytest

from rollout_io.redaction.credentials import credentials
from rollout_io.redaction.literals import Literals
from rollout_io.redaction.redact import Findings
from rollout_io.redaction.scanner import Rules
from tests.helpers.credential_kinds import KINDS, LATER, NOT_FOUND, TRAPS, drawn

RULES = Rules()
KEY = "ghp_Kx7mQ2rT9vLzW4cYbN8dFj3Hs6Pa1GuE5oRi"


def redacted(text, *seen):
    """A text without the credentials that are found in it and in other texts."""
    findings = Findings()
    for each in (text, *seen):
        findings.scan(each.encode(), RULES)
    made, at = b"", 0
    for start, end, _ in findings.known.spans([text.encode()])[0]:
        made, at = made + text.encode()[at:start] + b"#", end
    return (made + text.encode()[at:]).decode()


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("kind", [kind for kind in KINDS | LATER if kind not in NOT_FOUND])
def test_a_credential_is_found_by_its_place_or_shape(kind):
    for seed in range(5):
        text, secrets = drawn((KINDS | LATER)[kind], seed)
        for shown in (text, json.dumps({"content": text})):
            left = redacted(shown)
            assert [s for s in secrets if json.dumps(s)[1:-1] in left] == []


@pytest.mark.parametrize("text", TRAPS)
def test_what_only_looks_like_a_place_is_kept(text):
    for shown in (text, json.dumps({"content": text})):
        assert [shown.encode()[a:b] for _, a, b in credentials(shown.encode())] == []


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("kind", NOT_FOUND)
def test_the_page_lists_what_is_not_found(kind):
    text, secrets = drawn((KINDS | LATER | NOT_FOUND)[kind])
    assert secrets[0] in redacted(text)


FORMS = {
    "upper case": KEY.upper(),
    "hexadecimal": KEY.encode().hex(),
    "hexadecimal, grouped": KEY.encode().hex(" ", 2),
    "spaced": " ".join(KEY),
    "zero width": KEY[:12] + "\u200b" + KEY[12:],
    "wrapped": KEY[:20] + "\n    " + KEY[20:],
    "start": KEY[:16],
    "end": KEY[-10:],
    "middle": KEY[8:22],
    "base64": base64.b64encode(KEY.encode()).decode().rstrip("="),
    "base64 after a byte": base64.b64encode(b"x" + KEY.encode() + b"yz").decode()[2:54],
    "base64 after two bytes": base64.b64encode(b"xy" + KEY.encode() + b"z").decode()[3:56],
    "escapes": "".join(f"\\u{ord(c):04x}" for c in KEY),
    "mixed escapes": "ghp%5Fk".replace("k", "%5Cu004b") + KEY[5:],
    "hexadecimal escapes": "".join(f"\\x{ord(c):02x}" for c in KEY),
    "homoglyph": "\u0261" + KEY[1:],
    "concatenated": f"'{KEY[:20]}' + '{KEY[20:]}'",
}


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("form", FORMS)
def test_a_known_secret_is_removed_in_other_forms(form):
    left = redacted(f"it says {FORMS[form]} there", f"token {KEY}")
    run = FORMS[form].lower().replace("ghp_", "").replace("\u0261hp_", "")
    assert all(run[i : i + 10] not in left.lower() for i in range(len(run) - 10))
    assert left.startswith("it says ")
    assert left.endswith(" there")


@pytest.mark.usefixtures("no_rules")
def test_halves_of_a_known_secret_in_two_texts_are_removed():
    assert redacted(f"first: {KEY[:20]}", KEY) == "first: #"
    assert redacted(f"second: {KEY[20:]}", KEY) == "second: #"


def test_a_known_secret_with_spaces_is_found_in_a_query():
    (spans,) = Literals((b"many words are here",)).spans([b"?q=many+words+are+here&x=1"])
    assert spans == [(3, 22, 0)]


@pytest.mark.usefixtures("no_rules")
def test_the_name_of_what_issued_a_token_is_no_secret():
    text = "Keys begin with sk-ant-api03- or ghp_, see github_pat_."
    long = "sk-ant-api03-" + KEY[4:] * 2 + "AA"
    assert redacted(text, long, f"x {KEY}") == text


@pytest.mark.usefixtures("no_rules")
def test_a_secret_in_two_parts_of_a_message_is_removed_from_both():
    parts = [{"type": "text", "text": f"my key: {KEY[:13]}"}, {"type": "text", "text": KEY[13:]}]
    text = json.dumps([{"role": "user", "content": parts}])
    left = redacted(text)
    assert KEY[4:13] not in left
    assert KEY[13:] not in left
    assert [p["type"] for p in json.loads(left)[0]["content"]] == ["text", "text"]


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        (
            r"user=([\w-]+)|customer=([\w-]+)",
            "user=ann-1234 customer=bob-5678",
            "user=# customer=#",
        ),
        (r"user=(\w*)", "user= and user=ann_1234", "user= and user=#"),
        (r"(?:no )?(\d{8})?-pin-\d{8}", "is 12345678-pin-87654321", "is #-pin-87654321"),
        (r"card=(\d{8})|ssn-\d{8}", "card=12345678 ssn-87654321", "card=# #"),
    ],
)
def test_an_empty_or_unmatched_group_is_no_secret(pattern, text, left):
    findings = Findings()
    findings.scan(text.encode(), Rules.of({"own": pattern}))
    made, at = "", 0
    for start, end, _ in findings.known.spans([text.encode()])[0]:
        made, at = made + text[at:start] + "#", end
    assert made + text[at:] == left


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("pattern", [r"([\w-]+)|customer=([\w-]+)", r"\w", "[a-z]+ "])
def test_a_pattern_that_matches_any_text_is_refused(pattern):
    with pytest.raises(Exception, match="matches any text") as caught:
        Rules.of({"user": pattern})
    assert caught.value.rule == "choices"
