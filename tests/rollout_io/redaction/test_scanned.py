"""A text that continues another is scanned from there, and nothing is missed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.redaction.redact import Findings
from rollout_io.redaction.scanner import BLOCK_BYTES, CONTEXT_BYTES, MOST_BLOCKS, Rules, Scanned

RULES = Rules()
PIECES = st.lists(st.tuples(st.integers(0, 6000), st.booleans()), min_size=1, max_size=6)


def key_of(seed):
    rng = random.Random(seed)
    return "ghp_" + "".join(
        rng.choices("abcdefghjkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789", k=36)
    )


@pytest.mark.usefixtures("no_rules")
@settings(deadline=None, max_examples=30)
@given(pieces=PIECES, tail=st.integers(0, 60))
def test_a_growing_text_gives_the_secrets_of_the_whole_one(pieces, tail):
    """Pieces of words, some with a secret at their end, of which `tail` bytes come with the next."""
    findings, scanned, whole = Findings(), Scanned(), b""
    rest = b""
    for number, (size, has_secret) in enumerate(pieces):
        piece = b"some words \\n \xc3\xa9 " * (size // 15)
        piece += f"PASSWORD={key_of(number)} ".encode() if has_secret else b""
        whole += rest + piece[: len(piece) - tail]
        rest = piece[len(piece) - tail :] if tail < len(piece) else piece
        fresh, num_known = scanned.fresh(whole)
        findings.scan(fresh, RULES, num_known)
        scanned.add(whole)
    whole += rest
    fresh, num_known = scanned.fresh(whole)
    findings.scan(fresh, RULES, num_known)
    expected = Findings()
    expected.scan(whole, RULES)
    assert set(expected.literals) <= set(findings.literals)


def test_only_what_is_new_and_its_context_is_scanned_by_content():
    scanned, text = Scanned(), random.Random(0).randbytes(100_000)
    scanned.add(text)
    fresh, _ = scanned.fresh(text + b"and more")
    assert len(fresh) < CONTEXT_BYTES + BLOCK_BYTES + 8
    other = text[:50_000] + b"!" + text[50_001:]
    fresh, _ = scanned.fresh(other)
    assert 50_000 < len(fresh) < 50_000 + CONTEXT_BYTES + BLOCK_BYTES
    assert scanned.fresh(b"!" + text) == (b"!" + text, 0)


def test_the_memory_is_bounded_and_forgets_the_oldest():
    scanned, size = Scanned(), BLOCK_BYTES * (MOST_BLOCKS // 4)
    texts = [bytes([number]) * size for number in range(5)]
    for text in texts:
        scanned.add(text)
    assert len(scanned.fresh(texts[0])[0]) == size
    assert all(len(scanned.fresh(text)[0]) == CONTEXT_BYTES for text in texts[1:])
