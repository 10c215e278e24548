"""An error of many runs is one root cause with its count and the option that fixes it."""

import json

import pytest

from rollout_io import convert, read_log
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from schemas.errors import RolloutError
from tests.helpers.conversion_helpers import call, refusal, write

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
TEXTS = [{"id": f"t{i}", "messages": CHAT} for i in range(3)]


def test_sessions_of_text_are_one_error_that_counts_them_and_names_the_option(
    harness_logs, tmp_path, capsys
):
    logs = harness_logs / "claude_code"
    assert run(["convert", str(logs), "--out", str(tmp_path / "ds")]) == 1
    said = capsys.readouterr().err
    assert "Error: 4 of 5 sessions have text but no token ids (and " in said
    assert "[no_token_ids]\nHint: pass --tokenizer DIR to re-tokenize the text" in said


def test_runs_of_text_are_counted_among_all_runs_of_all_formats(tmp_path, smollm2_dir):
    text = write(tmp_path / "text.jsonl", *TEXTS)
    assert refusal(text, tmp_path / "ds").sentence == "3 of 3 runs have text but no token ids."
    calls = write(tmp_path / "calls.jsonl", call("a/0"))
    for fail in (lambda *paths: convert(paths, tmp_path / "ds"), lambda *paths: read_log(paths)):
        with pytest.raises(RolloutError) as caught:
            fail(text, calls)
        assert caught.value.sentence == "3 of 4 runs have text but no token ids."
        assert (caught.value.rule, caught.value.where) == ("no_token_ids", f"{text}:1")
    write(text, TEXTS[0])
    assert f"{text}:1: the log has text but no token ids" in refusal(text, tmp_path / "ds").sentence
    convert([text, calls], tmp_path / "ds", tokenizer=str(smollm2_dir))


def test_a_conversion_that_skips_ends_with_the_reasons_by_count_and_their_hints(tmp_path, capsys):
    text = write(tmp_path / "text.jsonl", *TEXTS)
    calls = write(tmp_path / "calls.jsonl", call("a/0"), call("b/0"), b"{", call("b/0", -5))
    out = tmp_path / "ds"
    arguments = ["convert", str(calls), str(text), "--on-error", "skip", "--out", str(out)]
    assert run(arguments) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert lines[0].startswith("  3 records rejected [no_token_ids]; first: ")
    assert "Hint: pass --tokenizer DIR to re-tokenize" in lines[0]
    assert [line.split("]")[0].split("[")[1] for line in lines[1:]].count("json_line") == 1
    assert "[incomplete_trajectory]" in lines[-1]
    assert run([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["was_done"]
    assert said["reasons"][0]["rule"] == "no_token_ids"
    assert said["reasons"][0]["hint"].startswith("pass --tokenizer")
    assert sum(reason["num_records"] for reason in said["reasons"]) == said["num_rejected"]


def test_at_most_eight_reasons_are_printed(tmp_path):
    log = write(tmp_path / "calls.jsonl", call("a/0"))
    summary = convert(log, tmp_path / "ds").summary
    reason = {"rule": "x", "num_records": 1, "first": "y.", "hint": None}
    summary.reasons = [reason] * 11
    lines = summary.text("ds").splitlines()
    assert lines.count("  1 record rejected [x]; first: y.") == 8
    assert "  3 further reasons: see `--json`" in lines


def test_where_nothing_can_be_used_the_hint_is_that_of_the_most_frequent_error(tmp_path):
    text = write(tmp_path / "text.jsonl", *TEXTS)
    error = refusal(text, tmp_path / "ds", on_error="skip")
    assert error.rule == "no_calls"
    assert "the most frequent error is [no_token_ids]: pass --tokenizer DIR" in error.hint


def test_where_nothing_can_be_used_the_reasons_are_those_of_any_conversion(tmp_path, capsys):
    damaged = b'{"session": "a/0", "request": {'
    calls = write(tmp_path / "calls.jsonl", *(call("a/0", i) for i in range(3)), damaged)
    out = tmp_path / "ds"
    assert run(["convert", str(calls), "--on-error", "skip", "--out", str(out)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "4 records read = 0 written + 4 rejected"
    assert "[json_line]" in said[1]
    assert "[incomplete_trajectory]" in said[2]
    assert said[3].startswith(
        f"Error: {out}: no record can be used (4 rejected; the first: json_line"
    )
    assert said[4].startswith(f"Hint: see {out}.rejected.jsonl; the most frequent error is [json_")


def test_the_first_of_a_reason_is_that_of_the_first_line(tmp_path):
    bad = [call("a/0", -5), b'"text"', call("b/0")]
    log = write(tmp_path / "calls.jsonl", *bad, *(call(f"c{i}/0", -5) for i in range(9)), b"3")
    reasons = convert(log, tmp_path / "ds", on_error="skip", format="calls").summary.reasons
    firsts = {reason["rule"]: reason["first"] for reason in reasons}
    assert firsts["record_type"].startswith(f"{log}:2: found a string as the entire line")
    assert firsts["token_range"].startswith(f"{log}:1: ")


def test_a_line_of_another_type_is_named_as_a_whole_and_the_hint_leads_to_its_format(tmp_path):
    log = write(tmp_path / "calls.jsonl", call("a/0"), b'"text"')
    error = refusal(log, tmp_path / "ds", format="calls")
    assert error.sentence == f"{log}:2: found a string as the entire line; expected an object."
    assert error.hint.startswith("see docs/formats/calls.md for the fields of the format; or pass")
    write(log, call("a/0"), b'{"session": 5}')
    error = refusal(log, tmp_path / "ds", format="calls")
    assert (error.where, error.got) == (f"{log}:2, $.session", "`int`")


def test_text_has_no_log_probabilities_to_ask_an_engine_for(tmp_path, smollm2_dir):
    text = write(tmp_path / "text.jsonl", *TEXTS)
    choices = Keywords(tokenizer=str(smollm2_dir))
    summary = convert(text, tmp_path / "ds", **choices).summary
    assert (summary.num_rows, summary.num_without_logprobs) == (3, 3)
    assert "log-probabilities" not in summary.text("ds")
    calls = write(tmp_path / "calls.jsonl", call("a/0"))
    summary = convert([text, calls], tmp_path / "both", **choices).summary
    assert "1 row without log-probabilities" in summary.text("both")


def test_the_error_is_the_one_that_rejects_the_most_records(tmp_path):
    lines = [b"{", call("a/0"), call("b/0", -5), call("b/0"), call("b/0", 12)]
    error = refusal(write(tmp_path / "calls.jsonl", *lines), tmp_path / "ds")
    assert error.where.startswith(f"{tmp_path / 'calls.jsonl'}:3")
    assert error.rule != "json_line"
