"""`find` against a search of every row's whole sequence, and the command on top of it."""

import json

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.cli.main import run
from rollout_io.dataset.finding import find, find_in_texts
from rollout_io.dataset.prefix_layout import encode_prefixes
from rollout_io.dataset.reader import read
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.ragged import offsets_of
from tests.rollout_io.dataset.test_prefix import literal_parents, trajectories

PIECES = [b"a", b"b", b"ab", b"aba", "\u00e9".encode()[:1], "\u00e9".encode()[1:]]
VOCABULARY = TokenBytes(
    "test", np.frombuffer(b"".join(PIECES), np.uint8), offsets_of(np.array([*map(len, PIECES)]))
)


def table_of(*several):
    rows = [
        {"trajectory_id": f"t_{i}", "step_index": step, "prompt_token_ids": p, "response_ids": r}
        for i, steps in enumerate(several)
        for step, (p, r) in enumerate(steps)
    ]
    ids = pa.list_(pa.int32())
    fields = [("trajectory_id", pa.string()), ("step_index", pa.int32())]
    schema = pa.schema([*fields, ("prompt_token_ids", ids), ("response_ids", ids)])
    return pa.Table.from_pylist(rows, schema)


def places(table, sought, vocabulary=None):
    return [(m.trajectory_id, m.step_index, m.position) for m in find(table, sought, vocabulary)]


def literally(several, matches):
    """All matches that do not lie within the tokens that a row shares with its parent."""
    found = []
    for i, steps in enumerate(several):
        for step, (p, r) in enumerate(steps):
            shared = list(literal_parents(steps))[step][1]
            found += [(f"t_{i}", step, a) for a, b in matches(p + r) if b > shared]
    return found


@given(
    st.lists(trajectories(), max_size=3), st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6)
)
def test_ids_are_found_where_each_sequence_first_has_them_in_both_layouts(several, ids):
    def matches(whole):
        ends = [(at, at + len(ids)) for at in range(len(whole))]
        return [(a, b) for a, b in ends if whole[a:b] == ids]

    table, expected = table_of(*several), literally(several, matches)
    assert places(table, np.array(ids, np.int32)) == expected
    assert places(encode_prefixes(table), np.array(ids, np.int32)) == expected


@given(st.data())
def test_a_text_is_found_wherever_tokens_begin_and_end(data):
    pieces = dict(zip([0, 1, 2**31 - 1], data.draw(st.permutations(range(6))), strict=False))
    drawn = data.draw(st.lists(trajectories(), max_size=2))
    several = [[([pieces[i] for i in p], [pieces[i] for i in r]) for p, r in one] for one in drawn]
    text = data.draw(st.text("ab\u00e9", min_size=1, max_size=5))
    needle = text.encode()

    def matches(whole):
        owner = [i for i, token in enumerate(whole) for _ in PIECES[token]]
        content = b"".join(PIECES[token] for token in whole)
        for at in range(len(content) - len(needle) + 1):
            if content[at : at + len(needle)] == needle:
                yield owner[at], owner[at + len(needle) - 1] + 1

    assert places(table_of(*several), text, VOCABULARY) == literally(several, matches)


def test_a_match_comes_with_the_tokens_around_it():
    table = table_of([([1, 2], [3]), ([1, 2, 3, 9], [4])])
    (match,) = find(table, np.array([3, 9], np.int32))
    assert (match.position, match.before, match.found, match.after) == (2, "1 2", "3 9", "4")
    (match,) = find(table_of([([0, 2], [1])]), "bb", VOCABULARY)
    assert (match.before, match.found) == ("a", "abb")


def test_logged_texts_are_found_where_they_first_occur():
    said = json.dumps([{"role": "user", "content": 'say "hi"'}])
    rows = [
        {"trajectory_id": "t_0", "step_index": 0, "messages": said, "response_text": "hi"},
        {"trajectory_id": "t_0", "step_index": 1, "messages": said, "response_text": "oh hi"},
        {"trajectory_id": "t_1", "step_index": 0, "messages": None, "response_text": None},
    ]
    found = list(find_in_texts(pa.Table.from_pylist(rows), "hi"))
    assert [(m.step_index, m.position, m.before, m.after) for m in found] == [
        (0, None, 'say "', '"'),
        (0, None, "", ""),
        (1, None, "oh ", ""),
    ]


def test_inspect_lists_the_matches_and_counts_those_it_does_not_show(
    shop_dataset, smollm2_dir, capsys
):
    row = read(shop_dataset).slice(0, 1).to_pylist()[0]
    ids = row["prompt_token_ids"][:3]
    sought = ["inspect", str(shop_dataset), "--find-ids", ",".join(map(str, ids))]
    assert run([*sought, "--json", "--limit", "10000"]) == 0
    out = capsys.readouterr()
    first = json.loads(out.out)[0]
    assert (first["trajectory_id"], first["step_index"]) == (row["trajectory_id"], 0)
    assert first["position"] == 0
    number = len(json.loads(out.out))
    assert number > 1
    assert run([*sought, "--limit", "1", "--tokenizer", str(smollm2_dir)]) == 0
    out = capsys.readouterr()
    assert len(out.out.splitlines()) == 1
    assert f"{number:,} matches in" in out.err


def test_inspect_searches_only_the_trajectories_that_match_a_condition(
    shop_dataset, smollm2_dir, capsys
):
    sought = [
        "inspect",
        str(shop_dataset),
        "--find",
        "Answer",
        "--tokenizer",
        str(smollm2_dir),
        "--json",
    ]
    assert run([*sought, "--limit", "10000", "--where", "instance_id = 'shop-2'"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {match["trajectory_id"] for match in found} == {f"shop-2_{i}" for i in range(4)}
    assert all("Answer" in match["found"] for match in found)


def test_ids_that_are_no_numbers_are_refused(shop_dataset, capsys):
    assert run(["inspect", str(shop_dataset), "--find-ids", "1;2"]) == 1
    assert "[choices]" in capsys.readouterr().err


def test_nothing_to_look_for_is_a_wrong_use(shop_dataset, capsys):
    assert run(["inspect", str(shop_dataset), "--find", ""]) == 2
    assert "need something to look for" in capsys.readouterr().err
