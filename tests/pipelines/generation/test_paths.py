import json
from itertools import pairwise

import polars as pl
import pytest
import torch

from pipelines.drift_diagnosis import diagnose
from pipelines.generation.histories import final_rendering
from pipelines.merging.merge import merge_table
from pipelines.rewards import place_rewards_table, trajectory_returns
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.checker import validate
from schemas.errors import RolloutError
from tests.helpers.generation_helpers import (
    EOS,
    HERE,
    SpyEngine,
    chatty_model,
    tasks_of,
    trajectories,
)
from tests.helpers.trainer_helpers import plain_logprobs

OBSERVED = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def encode(tokenizer, text):
    return tokenizer.encode([text], ["test"])[0]


def by_trajectory(table):
    frame = pl.from_arrow(table)
    return [part.rows(named=True) for part in frame.partition_by("trajectory_id")]


def closed(response):
    return response if response[-1] == EOS else [*response, EOS]


def differences(model, rows):
    """Of recorded log-probabilities from those of a plain forward, where tokens train."""
    plain = [(r["prompt_token_ids"], r["response_ids"], r["loss_mask"]) for r in rows]
    with torch.no_grad():
        expected = plain_logprobs(model, plain)
    got = torch.tensor([x for r in rows for x in r["rollout_logprobs"]])
    trains = torch.tensor([x for r in rows for x in r["loss_mask"]])
    return (got - expected).abs()[trains].max()


def test_append_sends_the_earlier_ids_then_the_sampled_ones_then_the_observations(
    engine, tokenizer
):
    _, table = trajectories(engine, tokenizer, tasks_of())
    validate(table)
    observed = encode(tokenizer, OBSERVED)
    for steps in by_trajectory(table):
        assert len(steps) == 3
        for before, after in pairwise(steps):
            sent = before["prompt_token_ids"] + closed(before["response_ids"]) + observed
            assert after["prompt_token_ids"] == sent
        sent_to_engine = [c for c in engine.calls if c[0] == steps[0]["trajectory_id"]]
        assert [s["prompt_token_ids"] for s in steps] == [ids for _, ids, _, _ in sent_to_engine]
        assert [s["response_ids"] for s in steps] == [a.response_ids for *_, a in sent_to_engine]
        assert [s["reward"] for s in steps] == [0.25, 0.5, 0.75]
        assert {s["policy_version"] for s in steps} == {5}
    ends = {r[-1] == EOS for r in table["response_ids"].to_pylist()}
    assert ends == {True, False}


def test_append_merges_to_one_sequence_a_trajectory_that_the_model_rates_as_the_engine_did(
    engine, tokenizer, model
):
    _, table = trajectories(engine, tokenizer, tasks_of())
    merged = place_rewards_table(merge_table(table))
    validate(merged)
    rows = pl.from_arrow(merged).rows(named=True)
    assert [r["trajectory_id"] for r in rows] == ["t0_0", "t0_1", "t1_0", "t1_1"]
    assert differences(model, rows) < 2e-5
    for row, steps in zip(rows, by_trajectory(table), strict=True):
        assert sum(row["loss_mask"]) == sum(len(s["response_ids"]) for s in steps)
        earned = [x for x in row["rewards"] if x]
        assert earned == [0.25, 0.5, 0.75]
        assert row["rewards"][-1] == 0.75
        assert all(m for m, x in zip(row["loss_mask"], row["rewards"], strict=True) if x)


def test_a_stop_string_ends_a_turn_and_its_message_is_closed_by_a_token_that_never_trains(
    engine, tokenizer, model
):
    _, table = trajectories(engine, tokenizer, tasks_of(), stop=("e",), max_response_tokens=64)
    stopped = 0
    for steps in by_trajectory(table):
        for before, after in pairwise(steps):
            if before["response_ids"][-1] != EOS and before["stop_reason"] == "stop":
                assert before["response_text"].endswith("e")
                rest = after["prompt_token_ids"][len(before["prompt_token_ids"]) :]
                assert rest[len(before["response_ids"])] == EOS
                stopped += 1
    assert stopped >= 4
    merged = pl.from_arrow(merge_table(table)).rows(named=True)
    assert len(merged) == 4
    sampled = sum(len(r) for r in table["response_ids"].to_pylist())
    assert sum(sum(row["loss_mask"]) for row in merged) == sampled
    assert differences(model, merged) < 2e-5


def test_one_message_holds_all_turns_and_observations_in_it(engine, tokenizer, model):
    _, table = trajectories(engine, tokenizer, tasks_of(say="<obs>1</obs>"), history="one_message")
    validate(table)
    observed = encode(tokenizer, "<obs>1</obs>")
    for steps in by_trajectory(table):
        for before, after in pairwise(steps):
            assert before["response_ids"] == [EOS] or EOS not in before["response_ids"]
            said = before["prompt_token_ids"] + before["response_ids"]
            assert after["prompt_token_ids"] == said + observed
    merged = merge_table(table)
    assert merged.num_rows == 4
    assert differences(model, pl.from_arrow(merged).rows(named=True)) < 2e-5


@pytest.mark.slow
def test_every_break_of_a_step_wise_conversation_is_found_by_drift(tokenizer):
    engine = SpyEngine(chatty_model(eos_bias=7.0), tokenizer)
    settings = {"history": "step_wise", "max_response_tokens": 40}
    _, table = trajectories(engine, tokenizer, tasks_of(), **settings)
    validate(table)
    broken = 0
    for steps in by_trajectory(table):
        for before, after in pairwise(steps):
            so_far = before["prompt_token_ids"] + before["response_ids"]
            broken += after["prompt_token_ids"][: len(so_far)] != so_far
        assert differences(engine.model, steps) < 2e-5
    assert broken >= 3
    found = diagnose(table, tokenizer)
    assert len(found.breaks) == broken
    assert merge_table(table).num_rows == 4 + broken


@pytest.mark.slow
def test_retokenize_trains_what_the_template_marks_of_the_final_conversation(engine, smollm2_dir):
    tokenizer = load_tokenizer(smollm2_dir, "qwen3_without_thinking")
    _, table = trajectories(engine, tokenizer, tasks_of(), history="retokenize")
    validate(table)
    assert set(table["token_source"].to_pylist()) == {"retokenized"}
    assert "rollout_logprobs" not in table.column_names
    merged = merge_table(table)
    assert merged.num_rows == 4
    for row, steps in zip(
        pl.from_arrow(merged).rows(named=True), by_trajectory(table), strict=True
    ):
        text = tokenizer.decode(row["prompt_token_ids"] + row["response_ids"])
        turns = [s["response_text"] + "<|im_end|>" for s in steps]
        asked = "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n"
        assert text == asked + OBSERVED.join(turns)
        for step, turn in zip(steps, turns, strict=True):
            assert tokenizer.decode(step["response_ids"]).removeprefix("\n") == turn
        assert [s["reward"] for s in steps] == [0.25, 0.5, 0.75]
        assert row["messages"] == steps[-1]["messages"]
        for num, step in enumerate(steps, 1):
            chat = json.loads(step["messages"])
            assert [m["role"] for m in chat] == ["user", "assistant"] * num
            assert chat[-1]["content"] == step["response_text"]
    returns = trajectory_returns(pl.from_arrow(merged).lazy()).collect()
    assert returns["return"].to_list() == [0.75] * 4


def test_the_final_rendering_strips_the_thinking_of_all_turns_but_the_last(smollm2_dir):
    tokenizer = load_tokenizer(smollm2_dir, "qwen3_without_thinking")
    talk = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\n6"},
    ]
    ids, spans = final_rendering(talk, 2, tokenizer, "test")
    parts = [tokenizer.decode(ids[a:b]) for a, b in spans]
    assert parts == ["4<|im_end|>", "<think>\nwell\n</think>\n\n6<|im_end|>"]
    _, last = final_rendering(talk, 1, tokenizer, "test")
    assert last == spans[1:]


def test_retokenize_wants_a_template_with_generation_marks(tokenizer):
    with pytest.raises(RolloutError, match="assistant_masks"):
        final_rendering([{"role": "user", "content": "a"}], 0, tokenizer, "test")


def test_a_replaced_action_is_what_the_conversation_goes_on_with_and_the_row_what_was_sampled(
    engine, tokenizer
):
    settings = {"environment": f"{HERE}:Cutting", "max_turns": 2}
    _, table = trajectories(engine, tokenizer, tasks_of(1, 1), **settings)
    first, second = pl.from_arrow(table).rows(named=True)
    assert first["response_ids"] == engine.calls[0][3].response_ids
    replaced = encode(tokenizer, "Yes.<|im_end|>" + OBSERVED)
    assert second["prompt_token_ids"] == first["prompt_token_ids"] + replaced
    assert merge_table(table).num_rows == 2
