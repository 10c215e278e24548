"""Near duplicates against Jaccard similarities computed from sets, and overlap with evaluations."""

import json

import numpy as np
import polars as pl
import pytest

from pipelines import judge, merge
from pipelines.similarity import near_duplicates, overlapping, overlaps
from rollout_io import RolloutWriter, read_metadata, scan
from rollout_io.cli.main import run
from rollout_io.retokenize.local import fingerprint_of
from rollout_io.retokenize.token_bytes import load_token_bytes
from schemas.errors import ConfigError, InputError
from tests.helpers.filter_helpers import table

PROMPT = list(range(1, 21))


def attempts(*responses, instance="a", prompt=PROMPT):
    return [
        (
            instance,
            n,
            [{"prompt_token_ids": prompt, "response_ids": r, "loss_mask": [True] * len(r)}],
        )
        for n, r in enumerate(responses)
    ]


def similarity(a, b):
    """The Jaccard similarity of the sets of 5 adjacent tokens, computed directly."""
    found = []
    for response in (a, b):
        whole = PROMPT + response
        found.append({tuple(whole[i : i + 5]) for i in range(len(whole) - 4)})
    return len(found[0] & found[1]) / len(found[0] | found[1])


def dropped(rule, *trajectories):
    verdicts = judge(table(*trajectories), [rule])
    return verdicts.filter(pl.col("reason").is_not_null())["trajectory_id"].to_list()


def pairs(rng, num, share_changed):
    """Pairs of an answer and a copy in which some tokens are others; each a group of its own."""
    for number in range(num):
        first = rng.integers(100, 40_000, 400)
        second = np.where(rng.random(400) < share_changed, rng.integers(100, 40_000, 400), first)
        yield f"{share_changed}-{number}", first.tolist(), second.tolist()


def test_95_percent_of_pairs_at_least_as_similar_are_found_and_few_that_are_not():
    rng = np.random.default_rng(0)
    near, found, far, wrong = 0, 0, 0, 0
    made = [*pairs(rng, 150, 0.02), *pairs(rng, 100, 0.08)]
    rows = [one for name, a, b in made for one in attempts(a, b, instance=name)]
    gone = set(dropped(near_duplicates(0.8), *rows))
    for name, a, b in made:
        exact = similarity(a, b)
        near += exact >= 0.8
        found += exact >= 0.8 and f"{name}_1" in gone
        far += exact < 0.7
        wrong += exact < 0.7 and f"{name}_1" in gone
    assert near > 50
    assert found / near >= 0.95
    assert far > 50
    assert wrong / far <= 0.05


def test_only_later_copies_of_a_kept_trajectory_are_dropped_and_failed_ones_are_not_compared():
    answer = list(range(100, 200))
    copy = [*answer[:-1], 7]
    rows = [*attempts(answer, copy, answer), *attempts(copy, instance="b")]
    assert dropped(near_duplicates(0.9), *rows) == ["a_1", "a_2"]
    assert dropped(near_duplicates(0.9, "dataset"), *rows) == ["a_1", "a_2", "b_0"]
    failed = [(*rows[0], "timeout"), rows[1], rows[2]]
    assert dropped(near_duplicates(0.9), *failed) == ["a_2"]


def test_the_same_short_answer_to_other_questions_is_no_duplicate():
    questions = [[*range(1, 40), *range(n, n + 20)] for n in (50, 80)]
    rows = [
        one for n, q in enumerate(questions) for one in attempts([9], instance=f"q{n}", prompt=q)
    ]
    assert dropped(near_duplicates(0.8, "dataset"), *rows) == []
    same = [one for n in range(2) for one in attempts([9], instance=f"q{n}", prompt=questions[0])]
    assert dropped(near_duplicates(0.8, "dataset"), *same) == ["q1_0"]


def test_sequences_shorter_than_the_compared_ones_are_equal_only_to_themselves():
    assert dropped(near_duplicates(0.8), *attempts([2], [2], [3], prompt=[1])) == ["a_1"]


def test_merging_changes_no_verdict(shop_dataset):
    steps = scan(shop_dataset)
    rules = [near_duplicates(0.51, "dataset")]
    verdicts = judge(steps, rules)
    assert verdicts["reason"].null_count() < len(verdicts)
    assert judge(merge(steps), rules).equals(verdicts)


@pytest.mark.parametrize("wrong", [0.5, 1.01, float("nan")])
def test_similarities_that_hashes_cannot_tell_are_refused(wrong):
    with pytest.raises(ConfigError) as caught:
        near_duplicates(wrong)
    assert caught.value.rule == "choices"


@pytest.fixture(scope="session")
def asked(smollm2_dir):
    """Trajectories whose prompts and answers are texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))

    def ask(*texts):
        return [
            one
            for n, (question, answer) in enumerate(texts)
            for one in attempts(
                tokenizer.encode(answer).ids,
                instance=f"q{n}",
                prompt=tokenizer.encode(question).ids,
            )
        ]

    return ask


QUESTION = "A farmer has 17 sheep and all but 9 of them run away in the night. How many are left?"


def test_a_trajectory_overlaps_if_it_has_half_of_the_word_sequences_of_one_text(
    asked, smollm2_dir, tmp_path
):
    file = tmp_path / "eval.jsonl"
    lines = [{"question": "Name the five largest lakes of Africa by area, please."}]
    lines.append({"messages": [{"role": "user", "content": QUESTION}], "answer": "9"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(QUESTION.split()) == 20  # 13 sequences of 8 words
    half = " ".join(QUESTION.split()[:14]) + " and then all of the others slept until the morning."
    rows = asked(
        ("system: be brief. " + QUESTION.upper() + " assistant:", "nine"),
        ("Tell me a story.", half),
        ("Tell me a story.", " ".join(QUESTION.split()[:9]) + " were seen."),
        ("What is 9?", "9"),
    )
    found = overlaps(table(*rows), file, load_token_bytes(str(smollm2_dir)))
    assert found.select("trajectory_id", "line").rows() == [("q0_0", 2), ("q1_0", 2)]
    assert found["share"].to_list() == [1.0, pytest.approx(7 / 13)]
    assert dropped(overlapping(found, file), *rows) == ["q0_0", "q1_0"]


def test_exactly_half_of_the_sequences_is_an_overlap(asked, smollm2_dir, tmp_path):
    file = tmp_path / "eval.jsonl"
    words = QUESTION.split()[:17]  # 10 sequences
    file.write_text(json.dumps({"question": " ".join(words)}))
    rows = asked(("Story.", " ".join(words[:12]) + " x."), ("Story.", " ".join(words[:11]) + " x."))
    found = overlaps(table(*rows), file, load_token_bytes(str(smollm2_dir)))
    assert found.rows() == [("q0_0", 1, 0.5)]


def test_an_evaluation_set_without_texts_is_refused(asked, smollm2_dir, tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text('{"id": "gsm8k-1", "answer": "42"}\n')
    with pytest.raises(InputError) as caught:
        overlaps(table(*asked(("a", "b"))), file, load_token_bytes(str(smollm2_dir)))
    assert caught.value.rule == "evaluation_set"


def test_the_command_names_the_overlapping_trajectories(
    shop_dataset, smollm2_dir, tmp_path, capsys
):
    dataset = tmp_path / "ds"
    fingerprint = fingerprint_of(smollm2_dir / "tokenizer.json")
    named = {"tokenizer": str(smollm2_dir), "tokenizer_fingerprint": fingerprint}
    metadata = read_metadata(shop_dataset).replace(**named)
    with RolloutWriter(dataset, metadata=metadata) as writer:
        writer.write(scan(shop_dataset).collect())
    text = load_token_bytes(str(smollm2_dir)).text(
        np.array(scan(dataset).first().collect()["prompt_token_ids"][0], np.int32)
    )
    file = tmp_path / "eval.jsonl"
    file.write_text(json.dumps({"prompt": text}) + "\n")
    arguments = ["filter", str(dataset), "--overlap", str(file), "--dry-run"]
    assert run(arguments) == 0
    assert "shop-0_0 contains 100% of a text of line 1" in capsys.readouterr().out
    assert run([*arguments, "--json", "--dedup", "group", "--dedup-similarity", "0.9"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["datasets"]
    assert report["overlaps"][0] == {"trajectory_id": "shop-0_0", "line": 1, "share": 1.0}
    names = [one["filter"] for one in report["filters"]]
    assert names == ["duplicate in group", "at least 0.9 similar in group", f"overlap with {file}"]


def test_a_missing_evaluation_set_is_named_before_an_unknown_tokenizer(
    shop_dataset, tmp_path, capsys
):
    missing = tmp_path / "none.jsonl"
    assert run(["filter", str(shop_dataset), "--overlap", str(missing), "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert str(missing) in said
    assert "tokenizer" not in said
