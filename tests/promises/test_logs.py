"""Logs: what an engine sampled is what a row has, and nothing is dropped unsaid.

The page: docs/formats/common.md.
"""

import json

import pytest

import rollout_io
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from tests.conftest import ROOT

SHOP = ROOT / "examples" / "shop.calls.jsonl"
REWARDS = ROOT / "examples" / "shop.rewards.jsonl"
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def calls():
    return [json.loads(line) for line in SHOP.read_bytes().splitlines()]


def saved(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_ids_and_logprobs_of_a_row_are_those_that_the_engine_returned(shop_dataset):
    rows = rollout_io.read(shop_dataset).to_pylist()
    answers = {
        (tuple(call["response"]["prompt_token_ids"]), tuple(choice["token_ids"])): choice
        for call in calls()
        for choice in call["response"]["choices"]
    }
    assert len(rows) == len(calls())
    for row in rows:
        key = tuple(row["prompt_token_ids"]), tuple(row["response_ids"])
        logged = [token["logprob"] for token in answers[key]["logprobs"]["content"]]
        assert row["rollout_logprobs"] == pytest.approx(logged, rel=1e-6)


def test_every_call_is_a_row_or_a_rejected_record(tmp_path):
    records = calls()
    records[3]["response"]["choices"][0]["token_ids"] = ["no id"]
    log = saved(tmp_path / "a.jsonl", records)
    choices = Keywords(on_error="skip", rewards=str(REWARDS))
    rollout_io.convert(log, tmp_path / "ds", **choices)
    rejected = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    assert rollout_io.read(tmp_path / "ds").num_rows + len(rejected) == len(records)


def test_ids_that_contradict_the_logged_text_are_refused(tmp_path):
    records = calls()
    first, second = (record["response"]["choices"][0] for record in records[:2])
    first["logprobs"] = second["logprobs"]  # as a log does that is off by one call
    log = saved(tmp_path / "a.jsonl", records[:1])
    assert run(["convert", str(log), "--out", str(tmp_path / "ds")]) == 1
    assert not [*tmp_path.glob("ds/*.parquet")]


def test_a_second_conversion_gives_the_same_rows(tmp_path):
    tables = []
    for name in ("one", "two"):
        rollout_io.convert(SHOP, tmp_path / name, rewards=str(REWARDS))
        tables.append(rollout_io.read(tmp_path / name))
    assert tables[0].equals(tables[1])


def test_several_workers_write_what_one_writes(tmp_path):
    log = saved(tmp_path / "a.jsonl", calls())
    for workers in (1, 2):
        rollout_io.convert(log, tmp_path / f"{workers}", workers=workers, chunk_bytes=1)
    one, two = (rollout_io.read(tmp_path / name).to_pylist() for name in ("1", "2"))
    assert one == two


def test_what_the_log_holds_beside_what_is_read_is_named(tmp_path, smollm2_dir):
    records = [{"messages": CHAT, "reward": 1.0}, {"messages": CHAT, "footnote": "Be kind."}]
    log = saved(tmp_path / "a.jsonl", records)
    choices = Keywords(tokenizer=str(smollm2_dir), strict=True, on_error="skip")
    rollout_io.convert(log, tmp_path / "ds", **choices)
    (rejected,) = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    assert "footnote" in rejected


def test_text_that_was_tokenized_again_says_so(tmp_path, smollm2_dir):
    log = saved(tmp_path / "a.jsonl", [{"messages": CHAT, "reward": 1.0}])
    rollout_io.convert(log, tmp_path / "ds", tokenizer=str(smollm2_dir))
    assert {*rollout_io.read(tmp_path / "ds")["token_source"].to_pylist()} == {"retokenized"}


def test_a_pickle_is_never_loaded(tmp_path, capsys):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x04\x95cos\nsystem\n(S'touch hacked'\ntR.")
    assert run(["convert", str(path), "--out", str(tmp_path / "ds")]) == 1
    assert "never loaded" in capsys.readouterr().err


def test_an_error_says_where_and_how_to_mend_it(tmp_path, capsys):
    records = calls()
    del records[0]["response"]["choices"][0]["token_ids"]
    log = saved(tmp_path / "a.jsonl", records[:1])
    run(["convert", str(log), "--out", str(tmp_path / "ds")])
    message = capsys.readouterr().err
    assert "a.jsonl:1" in message
    assert "[no_token_ids]" in message
    assert "Hint: " in message
