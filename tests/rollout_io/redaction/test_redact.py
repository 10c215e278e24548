import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rollout_io
from pipelines.merging.lineage import continued_rows
from pipelines.merging.merge import merge_table, unmerge_table
from rollout_io.cli.main import run
from rollout_io.dataset.versions import (
    FINDING,
    FINDINGS,
    count_findings,
    digests,
    version_names,
    version_path,
    write_version,
)
from rollout_io.redaction import scanner
from rollout_io.redaction.literals import Literals, readable, widened
from rollout_io.redaction.redact import Findings, redact
from rollout_io.redaction.scanner import Rules, scan
from rollout_io.redaction.tables import Redactor
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.checker import Checker
from schemas.errors import ConfigError, InputError, MissingExtra
from schemas.metadata import DatasetMetadata
from schemas.ragged import offsets_of
from schemas.strategies import VOCAB_SIZE, rollout_tables
from tests.helpers.examples import examples
from tests.helpers.table_helpers import STEPS

FILL = VOCAB_SIZE  # an id that no table has
NEUTRAL = {
    **dict.fromkeys(("rollout_logprobs", "trainer_logprobs"), 0.0),
    **{name: [] for name in ("sampling_support", "teacher_token_ids", "teacher_logprobs")},
}
PIECES = [b"p", b"k", b"ey", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b'"', b"z", b"n", b"/a"]
SECRET = b"s3cr3t/key-0123"
TEXTS = st.text(st.sampled_from('ab"\\/\n\u00e9\u20ac%'), max_size=8)


def vocabulary_of(pieces):
    values = np.frombuffer(b"".join(pieces), np.uint8)
    return TokenBytes("made", values, offsets_of(np.array([len(p) for p in pieces])))


VOCABULARY = vocabulary_of(
    [*(PIECES[i] if i < len(PIECES) else b"%x" % i for i in range(VOCAB_SIZE)), b"*"]
)


def redactor_of(*secrets, vocabulary=VOCABULARY):
    return Redactor(Literals(secrets), vocabulary)


def without(literals, text):
    made, at = b"", 0
    for start, end, number in literals.spans([text])[0]:
        made, at = made + text[at:start] + b"<%d>" % number, end
    return made + text[at:]


@given(TEXTS, TEXTS, st.integers(0, 3), st.booleans())
def test_a_secret_is_found_at_any_depth_of_json_and_json_remains(before, after, depth, ascii_only):
    value = before + "s3cr\u00e9t\n/key-0123" + after
    text = value
    for _ in range(depth):
        text = json.dumps({"a": [text]}, ensure_ascii=ascii_only)
    literals = Literals(("s3cr\u00e9t\n/key-0123".encode(),))
    made = without(literals, text.encode()).decode()
    for _ in range(depth):
        made = json.loads(made)["a"][0]
    assert made == before + "<0>" + after


def test_a_secret_of_an_url_is_found_where_it_is_quoted():
    assert without(Literals((SECRET,)), b"u?k=s3cr3t%2Fkey-0123&b") == b"u?k=<0>&b"


def test_lines_of_a_key_are_found_between_line_numbers():
    lines = [b"A1b2C3d4E5f6G7h8I9j0", b"B1b2C3d4E5f6G7h8I9j0"]
    key = b"\n".join(lines)
    literals = Literals((key,))
    assert lines[1] not in without(literals, b"  1\t" + lines[0] + b"\n  2\t" + lines[1])


def test_a_short_secret_is_removed_with_what_surrounds_it_and_not_elsewhere():
    text = b"the pin is 4711."
    literals = Literals((widened(text, 11, 15),))
    assert b"4711" not in without(literals, text)
    assert without(literals, b"4711 rows") == b"4711 rows"


@settings(max_examples=examples(24), deadline=None)
@given(rollout_tables(min_trajectories=1, max_trajectories=2), st.data())
def test_any_tokens_can_be_removed_from_any_table(table, data):
    before = table.to_pylist()
    ids = data.draw(st.sampled_from([[*r["prompt_token_ids"], *r["response_ids"]] for r in before]))
    begin = data.draw(st.integers(0, max(0, len(ids) - 3)))
    secret = VOCABULARY.join(np.array(ids[begin : begin + 6], np.int32))
    assume(len(secret) >= 3 and b"*" not in secret and readable(secret).encode() == secret)
    redactor = redactor_of(secret)
    made = redactor.table(table)
    assert not Checker().check(made).filter(pl.col("severity") == "error").height
    for old, new in zip(before, made.to_pylist(), strict=True):
        whole = [*new["prompt_token_ids"], *new["response_ids"]]
        assert secret not in VOCABULARY.join(np.array(whole, np.int32))
        for at, gone in enumerate(new["redacted"]):
            ranges = old.get("segments")
            is_sampled = ranges is None or any(
                0 <= at - each["start"] < each["length"] for each in ranges
            )
            if not is_sampled:
                assert (
                    not new["loss_mask"][at] or old["response_ids"][at] == new["response_ids"][at]
                )
                continue
            was_gone = bool(old.get("redacted")) and old["redacted"][at]
            assert gone or old["response_ids"][at] == new["response_ids"][at]
            assert was_gone or not gone or new["response_ids"][at] == FILL
            assert not (gone and new["loss_mask"][at])
            for name, value in NEUTRAL.items():
                assert was_gone or not gone or not new.get(name) or new[name][at] in (value, [])
    merged = merge_table(made)
    names = [name for name in made.column_names if name != "segments"]
    assert unmerge_table(merged).select(names).to_pylist() == made.select(names).to_pylist()
    # Steps with other secrets at the same place may become steps that continue each other.
    assume(continued_rows(made).tolist() == continued_rows(table).tolist())
    names = ["prompt_token_ids", "response_ids", "loss_mask", "redacted"]
    assert (
        redactor.table(merge_table(table)).select(names).to_pylist()
        == merged.select(names).to_pylist()
    )


def test_a_secret_across_tokens_steps_and_the_prompt_is_replaced_in_all_of_them():
    vocabulary = vocabulary_of([b"*", b"to ", b"<s3c", b"r3t/k", b"ey-01", b"23> ", b"ok"])
    table = pa.table(
        STEPS
        | {
            "prompt_token_ids": pa.array([[1, 2], [1, 2, 3, 4]], pa.list_(pa.int32())),
            "response_ids": pa.array([[3], [5, 6]], pa.list_(pa.int32())),
            "loss_mask": [[True], [True, True]],
        }
    )
    made = redactor_of(SECRET, vocabulary=vocabulary).table(table)
    assert made["prompt_token_ids"].to_pylist() == [[1, 0], [1, 0, 0, 0]]
    assert made["response_ids"].to_pylist() == [[0], [0, 6]]
    assert made["loss_mask"].to_pylist() == [[False], [False, True]]
    assert made["redacted"].to_pylist() == [[True], [True, False]]


def test_routes_of_replaced_tokens_are_the_first_experts():
    routes = [[[[5, 7]], [[3, 2]], [[4, 6]]], [[[5, 7]]]]
    kind = pa.list_(pa.list_(pa.list_(pa.int16(), 2), 1))
    vocabulary = vocabulary_of([b"*", b"a", SECRET, b"b", b"c", b"d", b"e", b"f", b"g", b"h"])
    table = pa.table(STEPS).append_column("rollout_expert_indices", pa.array(routes, kind))
    made = redactor_of(SECRET, vocabulary=vocabulary).table(table)
    assert made["rollout_expert_indices"].to_pylist() == [
        [[[5, 7]], [[0, 1]], [[4, 6]]],
        [[[5, 7]]],
    ]


SECRET_TEXT = SECRET.decode()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (SECRET_TEXT, pa.string()),
        (SECRET_TEXT, pa.large_string()),
        (SECRET, pa.binary()),
        (SECRET_TEXT, pa.dictionary(pa.int32(), pa.string())),
        ([SECRET_TEXT, None], pa.list_(pa.string())),
        ([[SECRET_TEXT], []], pa.large_list(pa.list_(pa.string()))),
        ([SECRET_TEXT, "b"], pa.list_(pa.string(), 2)),
        ({"a": SECRET_TEXT, "b": 1}, pa.struct([("a", pa.string()), ("b", pa.int8())])),
        ([("k", SECRET_TEXT)], pa.map_(pa.string(), pa.string())),
        ([{"a": [SECRET_TEXT]}], pa.list_(pa.struct([("a", pa.list_(pa.string()))]))),
        (SECRET, pa.binary(len(SECRET))),
        ([SECRET], pa.list_(pa.binary(len(SECRET)))),
        ([5, 1, 2, 3], pa.list_(pa.int64())),
        ([5, 1, 2, 3], pa.list_(pa.uint64())),
        ([5, 1, 2, 3, None], pa.list_(pa.int32())),
        ([5, 1, 2, 3, -100, 1 << 40], pa.list_(pa.int64())),
        ([5, 1, 2, 3], pa.list_(pa.int16(), 4)),
    ],
)
def test_secrets_are_removed_from_columns_of_any_type(value, kind):
    vocabulary = vocabulary_of([b"*", b"s3cr3t", b"/key", b"-0123", b"x", b"y"])
    column = pa.array([None, value, value], kind)
    made = redactor_of(SECRET, vocabulary=vocabulary).replacer.column(
        pa.chunked_array([column[1:]])
    )
    again = redactor_of(SECRET, vocabulary=vocabulary).replacer.column(column)
    assert made.type == again.type == kind
    assert again.to_pylist() == [None, *made.to_pylist()]
    said = str(made.to_pylist())
    assert SECRET_TEXT not in said
    assert (
        "[REDACTED_0]" in said
        or "*" * len(SECRET) in said
        or made.to_pylist()[0] == [5, 0, 0, 0, *value[4:]]
    )


def test_values_of_a_dictionary_that_no_row_has_are_not_kept():
    given = pa.DictionaryArray.from_arrays(pa.array([2, None, 2]), ["s3cr3t", "a", "b"])
    made = redactor_of(SECRET).replacer.column(given)
    assert made.to_pylist() == ["b", None, "b"]
    assert made.dictionary.to_pylist() == ["b"]


def test_notes_of_fields_are_not_kept():
    table = pa.table(STEPS)
    fields = [field.with_metadata({"note": SECRET}) for field in table.schema]
    vocabulary = vocabulary_of([b"%x" % i for i in range(16)])
    made = redactor_of(vocabulary=vocabulary).table(table.cast(pa.schema(fields)))
    assert all(field.metadata is None for field in made.schema)


def test_a_secret_that_ends_within_a_character_is_removed():
    secret, findings = "Name: José".encode()[:-1], Findings()
    findings.literals[widened(secret, 0, len(secret))] = None
    assert without(Literals(tuple(findings.literals)), b"to " + secret) == b"to <0>"


def test_escapes_of_an_url_are_undone_at_any_depth():
    assert without(Literals((b"key/with-signs",)), b"?a=key%25252Fwith%2Dsigns&b") == b"?a=<0>&b"


def test_json_remains_json_if_a_secret_has_its_syntax():
    text = json.dumps({"a": 'x"}, {"b', "c": 1}).encode()
    secret = b'"c": 1}'
    (made,) = redactor_of(secret).replacer.texts([text])
    assert json.loads(made) == {"a": 'x"}, {"b', "c": 1}


@pytest.fixture
def dataset(tmp_path):
    steps = STEPS | {
        "instance_id": ["for bob@example.org", "for bob@example.org"],
        "trajectory_id": ["for bob@example.org_0"] * 2,
        "response_text": ["card CC-12345678", "CC-12345678 and bob@example.org"],
    }
    metadata = DatasetMetadata(models=("CC-12345678-ft",))
    with rollout_io.RolloutWriter(tmp_path / "ds", metadata=metadata) as writer:
        writer.write(pa.table(steps))
    return tmp_path / "ds"


PATTERNS = {"mail": r"[\w.]+@[\w.]+\w", "card": r"card (CC-\d{8})"}


@pytest.mark.usefixtures("no_rules")
@pytest.mark.model
def test_patterns_are_removed_from_texts_ids_of_rows_and_metadata(dataset, smollm2_dir, tmp_path):
    rules = Rules.of(PATTERNS)
    report = redact(str(dataset), str(tmp_path / "out"), rules, tokenizer=str(smollm2_dir))
    rows = rollout_io.read(tmp_path / "out").to_pylist()
    said = str(rows) + str(rollout_io.read_metadata(tmp_path / "out"))
    assert "12345678" not in said
    assert "bob@" not in said
    assert rows[0]["trajectory_id"] == rows[0]["instance_id"] + "_0"
    assert report.kinds["card"] == {"num_secrets": 1, "num_rows": 1}
    assert report.num_secrets == 2
    assert "1234" not in str(report)
    assert run(["validate", str(tmp_path / "out")]) == 0


@pytest.mark.usefixtures("no_rules")
def test_both_parts_of_a_secret_that_an_answer_completes_are_found():
    vocabulary = vocabulary_of([b"to ", b"CC-12345678", b"901234567 ok", b"."])
    ids = {"prompt_token_ids": [[0, 1], [0, 3]], "response_ids": [[2], [3]]}
    columns = {name: pa.array(values, pa.list_(pa.int32())) for name, values in ids.items()}
    texts = ["901234567 ok", "CC-12345678, 12345678 and 01234567"]
    table = pa.table(STEPS | columns | {"loss_mask": [[True], [True]], "response_text": texts})
    findings = Findings()
    findings.scan_table(table, Rules.of({"card": r"CC-\d{17}"}), vocabulary)
    made = Redactor(Literals(tuple(findings.literals)), vocabulary).table(table)
    gone = "[REDACTED_2] ok", "[REDACTED_1], 12345678 and 01234567"
    assert tuple(made["response_text"].to_pylist()) == gone


@pytest.mark.usefixtures("no_rules")
def test_both_parts_of_a_secret_that_a_later_answer_of_a_merged_row_completes_are_found():
    vocabulary = vocabulary_of([b"to ", b"ok ", b"CC-abcdefgh", b"ijklmnopq", b".", b"*"])
    rows = pa.list_(pa.int32())
    steps = STEPS | {
        "prompt_token_ids": pa.array([[0], [0, 1, 2]], rows),
        "response_ids": pa.array([[1], [3, 4]], rows),
        "loss_mask": [[True], [True, True]],
        "response_text": ["ok ", "ijklmnopq."],
    }
    for table in (pa.table(steps), merge_table(pa.table(steps))):
        findings = Findings()
        findings.scan_table(table, Rules.of({"card": "CC-[a-z]{17}"}), vocabulary)
        made = Redactor(findings.known, vocabulary).table(table)
        assert "ijklmnopq" not in str(made.to_pylist())
    assert table.num_rows == 1


@pytest.mark.usefixtures("no_rules")
@pytest.mark.model
def test_a_redacted_dataset_has_no_findings_and_refuses_those_of_the_original(
    dataset, smollm2_dir, tmp_path
):
    source, out = str(dataset), str(tmp_path / "out")
    finding = dict.fromkeys(FINDING) | {"label": "card", "text": "card CC-12345678"}
    values = digests(rollout_io.scan(source)).with_columns(
        findings=pl.lit([finding], FINDINGS.type), error=pl.lit(None, pl.String)
    )
    write_version(
        version_path(source, "cards", FINDINGS), values.select(*FINDINGS.schema), {}, FINDINGS
    )
    assert count_findings(source, "cards")[1].sum() == len(values)
    redact(source, out, Rules.of(PATTERNS), tokenizer=str(smollm2_dir))
    assert version_names(out, FINDINGS) == []
    shutil.copytree(f"{source}.findings", f"{out}.findings")
    with pytest.raises(InputError, match="changed since") as caught:
        count_findings(out, "cards")
    assert caught.value.rule == "reward_version"


@pytest.mark.usefixtures("no_rules")
@pytest.mark.model
def test_a_second_redaction_uses_new_marks(dataset, smollm2_dir, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for source, out, name in ((dataset, first, "card"), (first, second, "mail")):
        redact(str(source), str(out), Rules.of({name: PATTERNS[name]}), tokenizer=str(smollm2_dir))
    texts = rollout_io.read(second)["response_text"].to_pylist()
    assert texts[1] == "[REDACTED_0] and [REDACTED_1]"
    assert rollout_io.read(second)["instance_id"][0].as_py() == "for [REDACTED_1]"


def test_a_lone_surrogate_beside_a_secret_stays_readable():
    text = rb'{"a": "\ud800 x\", 1", "b": 1}'
    (made,) = redactor_of(rb'x\", 1", "b": 1').replacer.texts([text])
    assert json.loads(made)["a"].startswith("\ud800")
    column = pa.array([text.decode()])
    assert json.loads(redactor_of(b'"b": 1').replacer.column(column)[0].as_py())


@pytest.mark.usefixtures("no_rules")
@pytest.mark.model
def test_redacting_again_changes_nothing(dataset, smollm2_dir, tmp_path):
    rules, first, second = Rules.of(PATTERNS), tmp_path / "a", tmp_path / "b"
    redact(str(dataset), str(first), rules, tokenizer=str(smollm2_dir))
    report = redact(str(first), str(second), rules, tokenizer=str(smollm2_dir))
    assert rollout_io.read(second).equals(rollout_io.read(first))
    assert report.num_secrets == 0


@pytest.mark.usefixtures("no_rules")
def test_a_dataset_without_its_tokenizer_is_refused(dataset, tmp_path):
    with pytest.raises(InputError, match=r"its tokenizer \(name unknown\) is not on this machine"):
        redact(str(dataset), str(tmp_path / "out"), Rules())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_rules")
@pytest.mark.model
def test_another_tokenizer_and_ids_outside_of_it_are_refused(dataset, smollm2_dir, tmp_path):
    other = rollout_io.read_metadata(dataset).replace(tokenizer_fingerprint="0" * 64)
    table = rollout_io.read(dataset)
    with rollout_io.RolloutWriter(tmp_path / "other", metadata=other) as writer:
        writer.write(table)
    with pytest.raises(InputError, match="is not the tokenizer of the dataset"):
        redact(str(tmp_path / "other"), str(tmp_path / "a"), Rules(), tokenizer=str(smollm2_dir))
    with pytest.raises(InputError, match="token id 9 is not in the vocabulary of 3 tokens"):
        redactor_of(SECRET, vocabulary=vocabulary_of([b"*", b"a", b"b"])).table(table)


@pytest.mark.parametrize("pattern", ["(", "x*", "a|"])
def test_an_invalid_pattern_is_refused(pattern):
    with pytest.raises(ConfigError, match="pattern own"):
        Rules.of({"own": pattern})


def test_a_missing_scanner_is_named_with_its_extra(monkeypatch):
    scanner._scanner.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "kingfisher_sdk", None)
    with pytest.raises(MissingExtra) as caught:
        Rules.of({})
    assert 'pip install "rollout-io[redact]"' in caught.value.hint


@pytest.mark.usefixtures("no_rules")
def test_personal_data_needs_presidio_and_finds_numbers_with_it(monkeypatch):
    scanner._recognizers.cache_clear()
    with monkeypatch.context() as without:
        without.setitem(__import__("sys").modules, "presidio_analyzer", None)
        with pytest.raises(MissingExtra) as caught:
            Rules.of({}, personal=True)
    assert caught.value.hint == "pip install presidio-analyzer"

    class Phones:
        def analyze(self, text, _, __):
            at = [match.span() for match in re.finditer(r"[+\d]{9,}", text)]
            return [SimpleNamespace(score=0.4, start=a, end=b) for a, b in at]

    monkeypatch.setattr(scanner, "_recognizers", lambda: ((Phones(), "PHONE_NUMBER"),))
    text = "\u00e9 +14155552671 at 1781792591 or ann@example.org"
    found = [
        (f.kind, text.encode()[f.start : f.end]) for f in scan(text.encode(), Rules(personal=True))
    ]
    assert found == [("phone_number", b"+14155552671"), ("email_address", b"ann@example.org")]


@pytest.mark.usefixtures("no_rules")
@pytest.mark.model
def test_shards_of_an_interrupted_run_with_another_expression_are_not_taken(
    dataset, smollm2_dir, tmp_path, monkeypatch
):
    out = str(tmp_path / "out")

    def made(pattern):
        return redact(str(dataset), out, Rules.of({"own": pattern}), tokenizer=str(smollm2_dir))

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as until:
        until.setattr("rollout_io.conversion.staging.Staging.publish", killed)
        with pytest.raises(Killed):
            made(r"(CC-\d{8})")
    made(r"[\w.]+@[\w.]+\w")
    said = str(rollout_io.read(out).to_pylist())
    assert "bob@" not in said
    assert "CC-12345678" in said


def test_writers_drop_metadata_inside_types(tmp_path):
    note = {"note": SECRET_TEXT}
    inner = pa.struct([pa.field("x", pa.string(), metadata=note)])
    kinds = [inner, pa.list_(pa.field("item", pa.string(), metadata=note)), pa.list_(inner, 1)]
    table = pa.table(STEPS)
    for number, kind in enumerate(kinds):
        values = [{"x": "a"}, ["a"], [{"x": "a"}]][number]
        column = pa.array([values] * table.num_rows, kind)
        table = table.append_column(pa.field(f"own{number}", kind), column)
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    (file,) = (tmp_path / "ds").glob("*.parquet")
    schema = pq.read_schema(file)
    assert SECRET_TEXT not in schema.to_string(show_field_metadata=True)
    assert rollout_io.read(tmp_path / "ds")["own0"].to_pylist() == [{"x": "a"}] * table.num_rows
