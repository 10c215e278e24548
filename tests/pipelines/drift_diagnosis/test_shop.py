"""Real calls whose harnesses are known; see examples/shop.rewards.jsonl for the styles."""

import json
from collections import Counter

import polars as pl
import pyarrow as pa
import pytest

from pipelines.drift_diagnosis import diagnose_dataset
from rollout_io import RolloutWriter
from rollout_io.cli.main import run
from rollout_io.retokenize import load_tokenizer
from schemas.metadata import DatasetMetadata
from tests.conftest import EXAMPLES
from tests.helpers.table_helpers import STEPS


@pytest.fixture(scope="module")
def styles():
    lines = (EXAMPLES / "shop.rewards.jsonl").read_text().splitlines()
    rewards = [json.loads(line) for line in lines]
    return {f"{r['instance_id']}_{r['repetition_id']}": r["style"] for r in rewards}


def by_style(dataset, styles, tokenizer=None):
    breaks = pl.concat(found.breaks for found in diagnose_dataset(dataset, tokenizer))
    names = breaks["trajectory_id"].replace_strict(styles)
    return Counter(zip(names, breaks["cause"], breaks["continues_lineage"], strict=True))


@pytest.mark.slow
@pytest.mark.model
def test_all_41_breaks_have_the_cause_their_harness_is_known_for(shop_dataset, styles, smollm2_dir):
    found = by_style(shop_dataset, styles, load_tokenizer(smollm2_dir))
    assert found == {
        ("strip", "edited", False): 15,
        ("summary", "reset", False): 8,
        ("subagent", "new_agent", False): 7,
        ("subagent", "new_agent", True): 7,
        # The server cut its own answers into other tokens, where a harness changed nothing:
        ("append", "retokenized", False): 3,
        ("summary", "retokenized", False): 1,
    }


def test_without_a_tokenizer_only_the_tokenizers_own_breaks_stay_unknown(shop_dataset, styles):
    assert by_style(shop_dataset, styles) == {
        ("strip", "edited", False): 15,
        ("summary", "reset", False): 8,
        ("subagent", "new_agent", False): 7,
        ("subagent", "new_agent", True): 7,
        ("append", "unknown", False): 3,
        ("summary", "unknown", False): 1,
    }


def test_the_verb_counts_116_that_continue_and_41_that_do_not(shop_dataset, capfd):
    assert run(["drift", str(shop_dataset), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    wanted = {"num_steps": 205, "num_following": 157, "num_continuing": 116, "num_breaks": 41}
    assert {name: found[name] for name in wanted} == wanted
    assert (found["num_continuing_lineage"], found["num_lost_tokens"]) == (7, 2184)
    assert len(found["breaks"]) == 41
    assert [row["cause"] for row in found["causes"]] == ["reset", "edited", "unknown", "new_agent"]
    assert all(row["hint"] for row in found["causes"])
    assert {row["agent"] for row in found["agents"]} == {"main", "checker"}
    assert [row["step_index"] for row in found["turns"]] == sorted(
        row["step_index"] for row in found["turns"]
    )


def test_the_breaks_of_the_merged_dataset_are_those_of_its_steps(shop_dataset, tmp_path):
    assert run(["merge", str(shop_dataset), "--out", str(tmp_path / "ds")]) == 0
    whole, merged = (
        pl.concat(found.breaks for found in diagnose_dataset(path))
        for path in (shop_dataset, tmp_path / "ds")
    )
    assert merged.equals(whole)


@pytest.mark.slow
@pytest.mark.model
def test_the_verb_shows_the_text_on_both_sides(shop_dataset, smollm2_dir, capfd):
    arguments = ["--tokenizer", str(smollm2_dir), "--limit", "1"]
    assert run(["drift", str(shop_dataset), *arguments]) == 0
    printed = capfd.readouterr()
    assert "steps that follow another step of their trajectory: 157 (116 continue it" in printed.out
    assert "edited          15          445\n" in printed.out
    assert "Hint: edited: the harness changes messages" in printed.out
    assert "shop-2_0 step 1 (main): edited, at token 61 of step 0, 11 tokens lost" in printed.out
    assert r"The correct answer is 17. | \n\n5 + 9 = 17. -> " in printed.out
    assert "listed 1 of 41 breaks" in printed.err


@pytest.mark.slow
@pytest.mark.model
def test_a_reading_of_the_text_is_off_by_ends_and_by_other_cuts(shop_dataset, smollm2_dir, capfd):
    arguments = ["--tokenizer", str(smollm2_dir), "--retokenize", "--json"]
    assert run(["drift", str(shop_dataset), *arguments]) == 0
    found = json.loads(capfd.readouterr().out)["retokenized"]
    assert found == {
        "num_compared": 205,
        "num_not_compared": 0,
        "first_reason": None,
        "num_prompts_off": 0,
        "num_prompt_tokens_off": 0,
        "num_responses_off": 106,
        "num_response_tokens_off": 409,
        "num_ends_added": 94,
    }


@pytest.mark.slow
@pytest.mark.model
def test_another_tokenizer_than_the_datasets_is_remarked_on(tmp_path, smollm2_dir, capfd):
    metadata = DatasetMetadata(tokenizer_fingerprint="of another")
    with RolloutWriter(tmp_path / "ds", metadata=metadata) as writer:
        writer.write(pa.table(STEPS))
    assert run(["drift", str(tmp_path / "ds"), "--tokenizer", str(smollm2_dir)]) == 0
    printed = capfd.readouterr()
    assert (
        "is not the tokenizer of the dataset (name unknown): decoded text may be wrong"
        in printed.err
    )
    assert "steps that follow another step of their trajectory: 1 (1 continue it" in printed.out


def test_what_cannot_be_done_is_said_without_a_traceback(shop_dataset, tmp_path, capfd):
    assert run(["drift", str(shop_dataset), "--retokenize"]) == 1
    assert "--tokenizer DIR" in capfd.readouterr().err
    assert run(["drift", str(shop_dataset), "--tokenizer", str(tmp_path / "none")]) == 1
    assert "the tokenizer directory does not exist" in capfd.readouterr().err
    assert run(["drift", str(tmp_path / "none")]) == 1
    assert "Traceback" not in capfd.readouterr().err
