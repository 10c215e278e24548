"""A dataset of exact ids knows its tokenizer, and a log that contradicts one is refused."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

import rollout_io
from rollout_io import convert, read_log
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from rollout_io.conversion.text import has_words_of
from rollout_io.dataset.checking import check, checked_tables
from rollout_io.dataset.parallel import Workers
from rollout_io.retokenize import load_tokenizer
from schemas.checker import ValidationError
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from tests.conftest import ROOT

SHOP = ROOT / "examples" / "shop.calls.jsonl"
WIRE = ROOT / "tests" / "data" / "peers" / "vllm"
CHAT = WIRE / "chat.calls.jsonl"

pytestmark = pytest.mark.model


def edited(smollm2_dir, folder, edit):
    """A copy of the tokenizer whose `tokenizer.json` was edited."""
    shutil.copytree(smollm2_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    edit(content)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def swap(*pairs):
    def edit(content):
        vocab = content["model"]["vocab"]
        for a, b in pairs:
            vocab[a], vocab[b] = vocab[b], vocab[a]

    return edit


def permute(content):
    plain = [t for t, i in content["model"]["vocab"].items() if i > 100]
    ids = [content["model"]["vocab"][t] for t in plain]
    mixed = np.random.default_rng(0).permutation(ids).tolist()
    content["model"]["vocab"].update(zip(plain, mixed, strict=True))


def choices(tokenizer, **more):
    return Keywords(format="calls", tokenizer=str(tokenizer), **more)


@pytest.mark.slow
def test_a_dataset_of_exact_ids_stores_its_tokenizer(smollm2_dir, tmp_path):
    convert([SHOP], tmp_path / "ds", **choices(smollm2_dir))
    metadata = rollout_io.read_metadata(tmp_path / "ds")
    tokenizer = load_tokenizer(smollm2_dir)
    assert metadata.tokenizer == str(smollm2_dir)
    assert metadata.tokenizer_fingerprint == tokenizer.fingerprint
    assert metadata.vocab_size == tokenizer.vocab_size == 49_152
    assert metadata.chat_template_fingerprint is None  # who rendered the prompts is not known
    assert metadata.models == ("SmolLM2-135M-Instruct",)


def test_without_a_tokenizer_the_models_that_the_log_names_are_stored(tmp_path):
    records = [json.loads(line) for line in CHAT.read_text().splitlines()]
    for record in records[::2]:
        record["request"]["model"] = "policy \u00e9-2"
    records[1]["request"]["tools"] = [{"properties": {"model": {"type": "string"}}}]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    convert([log], tmp_path / "ds", format="calls")
    metadata = rollout_io.read_metadata(tmp_path / "ds")
    assert metadata.models == ("policy \u00e9-2", "smollm2")
    assert (metadata.tokenizer, metadata.tokenizer_fingerprint) == (None, None)


def test_every_real_log_passes_with_its_own_tokenizer(smollm2_dir):
    for name in ("chat", "completions", "tools"):
        assert read_log([WIRE / f"{name}.calls.jsonl"], **choices(smollm2_dir)).num_rows


@pytest.mark.slow
@pytest.mark.parametrize("edit", [permute, swap(("\u0120to", "\u0120the"))])
def test_a_tokenizer_of_other_ids_is_refused_by_name(edit, smollm2_dir, tmp_path):
    other = edited(smollm2_dir, tmp_path / "other", edit)
    with pytest.raises(RolloutError, match="other_tokenizer") as caught:
        convert([SHOP], tmp_path / "ds", **choices(other))
    assert caught.value.where.startswith(str(SHOP))
    assert not (tmp_path / "ds").exists()


@pytest.mark.slow
def test_a_response_is_decoded_where_no_token_has_text(smollm2_dir, tmp_path):
    records = [json.loads(line) for line in CHAT.read_text().splitlines()]
    for record in records:
        for part in (
            [record["response"]] if isinstance(record["response"], dict) else record["response"]
        ):
            for choice in part["choices"]:
                choice["logprobs"] = None
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_log([log], **choices(smollm2_dir)).num_rows == 8
    other = edited(smollm2_dir, tmp_path / "other", permute)
    with pytest.raises(RolloutError, match="other_tokenizer"):
        read_log([log], **choices(other))


def test_an_id_beyond_the_vocabulary_is_refused(smollm2_dir, tmp_path):
    record = json.loads(CHAT.read_text().splitlines()[0])
    record["response"]["prompt_token_ids"][3] = 49_152
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(record) + "\n")
    assert read_log([log], format="calls").num_rows == 1
    with pytest.raises(RolloutError, match="token_range"):
        read_log([log], **choices(smollm2_dir))


@pytest.fixture
def beyond(tmp_path):
    """A dataset of two shards with an id beyond the vocabulary that its files state."""
    convert([SHOP], tmp_path / "plain", format="calls")
    table = rollout_io.read(tmp_path / "plain")
    top = max(max(row) for row in table["response_ids"].to_pylist())
    known = DatasetMetadata(vocab_size=top)
    for name in ("a", "b"):
        rows = table.filter(pa.compute.equal(table["instance_id"], f"shop-{1 + (name == 'b')}"))
        rows = rows if name == "b" else table
        with rollout_io.RolloutWriter(
            tmp_path / "ds", metadata=known, append=True, checked=True
        ) as writer:
            writer.write(rows if name == "a" else table.slice(0, 0))
    return tmp_path / "ds"


@pytest.mark.slow
def test_whatever_checks_a_dataset_knows_its_vocabulary(beyond, tmp_path, capsys):
    for workers in (None, Workers(2)):
        found = check(beyond, workers)["rule"].to_list()
        assert "token_range" in found
    with pytest.raises(ValidationError, match="token_range"):
        list(checked_tables(beyond))
    for verb, options in {"merge": [], "filter": ["--min-steps", "1"]}.items():
        assert run([verb, str(beyond), *options, "--out", str(tmp_path / verb)]) == 1
        assert "token_range" in capsys.readouterr().err
        assert not (tmp_path / verb).exists()
    table = rollout_io.read(beyond)
    with (
        pytest.raises(ValidationError, match="token_range"),
        rollout_io.RolloutWriter(tmp_path / "again") as writer,
    ):
        writer.write(table)


@pytest.mark.slow
def test_the_fingerprint_is_of_the_ids_and_of_nothing_else(smollm2_dir, tmp_path):
    own = load_tokenizer(smollm2_dir).fingerprint

    def reorder(content):
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = dict(sorted(vocab.items(), reverse=True))
        content["padding"] = {
            "strategy": "BatchLongest",
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }
        content["post_processor"] = None
        content["normalizer"] = {"type": "NFC"}

    def add(content):
        content["added_tokens"].append(
            content["added_tokens"][0] | {"id": 49_152, "content": "<|x|>"}
        )

    same = edited(smollm2_dir, tmp_path / "same", reorder)
    assert load_tokenizer(same).fingerprint == own
    for number, edit in enumerate((swap(("You", "we")), add)):
        other = load_tokenizer(edited(smollm2_dir, tmp_path / str(number), edit))
        assert other.fingerprint != own
    assert other.vocab_size == 49_153


@pytest.mark.slow
def test_words_tell_tokenizers_apart_where_a_harness_keeps_no_verbatim_text(smollm2_dir, tmp_path):
    logs = [ROOT / "examples" / "verifiers" / "traces.jsonl"]
    given = Keywords(tokenizer=str(smollm2_dir))
    assert read_log(logs, **given).num_rows
    other = edited(smollm2_dir, tmp_path / "other", permute)
    with pytest.raises(RolloutError, match="other_tokenizer"):
        read_log(logs, tokenizer=str(other))


def test_words_after_escapes_are_those_of_the_response():
    """Harbor keeps tool calls as JSON; a model may write their arguments with line breaks."""
    lines = ["alpha", "bravo", "charlie", "delta", "echoes", "foxtrot", "golfing", "hotels"]
    text = json.dumps([{"arguments": {"text": "".join(f"\n{line}" for line in lines)}}])
    assert has_words_of("\n".join(lines), text)
    assert not has_words_of("unrelated words of another tokenizer", text)
    assert has_words_of(r"\alpha + \bravo = \charlie", r"\alpha + \bravo = \charlie")


def test_ids_that_no_model_sampled_are_refused(smollm2_dir, golden):
    """The ids of Harbor's golden trajectories count up from 1000."""
    log = golden / "hello-world-context-summarization.trajectory.json"
    assert read_log([log]).num_rows
    with pytest.raises(RolloutError, match="other_tokenizer"):
        read_log([log], tokenizer=str(smollm2_dir))


@pytest.mark.parametrize("sampled", ['{"city": "Oslo"}}\n</tool_call>', "get_weather"])
def test_tool_calls_are_compared_with_the_ids_where_tokens_have_no_text(
    sampled, smollm2_dir, tmp_path
):
    tokenizer = load_tokenizer(smollm2_dir)
    whole = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    def log(name, text):
        (ids,) = tokenizer.encode([text], ["t"])
        function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        message = {"content": None, "tool_calls": [{"id": "c", "function": function}]}
        response = {"prompt_token_ids": [1], "choices": [{"token_ids": ids, "message": message}]}
        record = {"session": "w/0", "request": {"messages": []}, "response": response}
        path = tmp_path / name
        path.write_text(json.dumps(record), encoding="utf-8")
        return str(path)

    done = convert([log("whole.jsonl", whole)], tmp_path / "ds", **choices(smollm2_dir))
    assert (done.summary.num_exact, done.summary.num_compared) == (1, 1)
    with pytest.raises(RolloutError) as caught:
        read_log([log("lost.jsonl", sampled)], **choices(smollm2_dir))
    assert caught.value.rule == "other_tokenizer"
    assert "a tool call with" in str(caught.value)
