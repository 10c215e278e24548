"""The bytes of tokens: joined, they are what the tokenizer decodes, down to halves of characters."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rollout_io.retokenize.token_bytes import load_token_bytes
from schemas.errors import RolloutError

TEXTS = (
    "The answer is 42.\n",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d\t\u202e\u0627\u0644",
    "emoji \U0001f469\u200d\U0001f680 and \U0001f1e9\U0001f1ea, CJK 漢字かな",
    "\x00\x1b[31m\u00ad",
    "<|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture(scope="module")
def vocabulary(smollm2_dir):
    return load_token_bytes(str(smollm2_dir))


@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_are_the_text(vocabulary, tokenizer, text):
    (ids,) = tokenizer.encode([text], ["text"])
    tokens = np.array(ids, np.int32)
    assert vocabulary.join(tokens) == text.encode()
    assert vocabulary.text(tokens) == tokenizer.decode(ids) == text
    pieces = vocabulary.to_arrow(tokens).to_pylist()
    assert b"".join(pieces) == text.encode()
    assert vocabulary.lengths(tokens).tolist() == [len(piece) for piece in pieces]


def test_a_character_may_be_two_tokens(vocabulary, tokenizer):
    (ids,) = tokenizer.encode(["漢字"], ["text"])
    pieces = vocabulary.to_arrow(np.array(ids, np.int32)).to_pylist()
    assert any(not _is_text(piece) for piece in pieces)


def _is_text(piece):
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_every_id_has_bytes_and_an_unknown_one_has_none(vocabulary, tokenizer):
    size = len(vocabulary.offsets) - 1
    assert size == tokenizer.vocab_size
    assert vocabulary.lengths(np.arange(size, dtype=np.int32)).min() > 0
    assert vocabulary.join(np.array([-1, size, 2**31 - 1], np.int32)) == b""
    assert vocabulary.join(np.zeros(0, np.int32)) == b""


def test_sentencepiece_with_byte_fallback(tmp_path):
    names = ["<unk>", "\u2581The", "\u2581x", "<0xC3>", "<0xA9>", "\u2581\u2581", "a"]
    tokens = [(name, -float(i)) for i, name in enumerate(names)]
    backend = Tokenizer(models.Unigram(tokens, unk_id=0, byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_token_bytes(str(tmp_path / "tokenizer.json"))
    ids = [1, 2, 3, 4, 5, 6]
    assert vocabulary.join(np.array(ids, np.int32)) == " The x\u00e9  a".encode()
    assert vocabulary.text(np.array(ids, np.int32)) == backend.decode(ids)
    assert vocabulary.to_arrow(np.array([3], np.int32)).to_pylist() == [b"\xc3"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": {"a": -1}}}', "[" * 99999]
)
def test_a_damaged_file_is_an_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RolloutError) as caught:
        load_token_bytes(str(tmp_path))
    assert caught.value.rule == "tokenizer"


def test_gaps_in_the_ids_are_empty(tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 5}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    vocabulary = load_token_bytes(str(tmp_path))
    assert vocabulary.join(np.array([0, 3, 5], np.int32)) == b"ab"
