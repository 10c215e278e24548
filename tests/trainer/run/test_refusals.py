"""What the command refuses before it trains or writes anything, with `--dry-run` and without."""

import json
import logging
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import rollout_io
from rollout_io.cli.main import run as main
from rollout_io.retokenize.chat_template import TEMPLATES, find_template
from rollout_io.retokenize.tokenizer import load_tokenizer, template_fingerprint
from schemas.columns import arrow_schema
from schemas.metadata import DatasetMetadata
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    VOCAB,
    group_rows,
    metrics_of,
    write_dataset,
)
from trainer.run.model_checks import check_tokenizers


def rows_of(num_groups=2, rewards=(1.0, 0.0), **values):
    return group_rows(num_groups, rewards, **values)


def train(dataset, model, out, settings="", *options):
    settings = [part for text in settings.split() for part in ("--set", text)]
    return main(["train", dataset, "--model", str(model), "--out", str(out), *settings, *options])


@pytest.fixture
def refuses(model, tmp_path, capfd):
    """Asserts that a run is refused with these words, as its dry run is, and nothing written."""

    def check(dataset, *words, settings="", model=model, resume=()):
        before = sorted(tmp_path.rglob("*"))
        for options in ([], ["--dry-run"]):
            if resume:
                assert main([*resume, *options]) == 1
            else:
                assert train(dataset, model, tmp_path / "run", settings, *options) == 1
            printed = capfd.readouterr()
            assert printed.out == ""
            assert len(re.findall("^Error: ", printed.err, re.MULTILINE)) == 1
            assert [word for word in words if word not in printed.err] == []
            assert sorted(tmp_path.rglob("*")) == before

    return check


def with_row(**changes):
    rows = rows_of()
    rows[1] |= changes
    return rows


SAMPLED = {"rollout_logprobs": [-1.0] * 4}
REFUSALS = {
    "a token beyond the vocabulary": (
        with_row(response_ids=[VOCAB] * 4),
        "",
        (
            "Error: trajectory 'g0_0', row 1: found token id 61; expected an id from 0 to",
            "60, the model's vocabulary",
            "Hint: train the model whose tokenizer produced these ids",
        ),
    ),
    "no log-probabilities for weights asked for": (
        rows_of(),
        "loss.tis_ratio_type=token",
        ("[rollout_logprobs]", "no row has rollout_logprobs", "tis_ratio_type token"),
    ),
    "raw log-probabilities at another temperature": (
        rows_of(**SAMPLED, temperature=0.7),
        "",
        (
            "Error: trajectory 'g0_0', row 0 (the first of 8): rollout_logprobs are not"
            " from the sampled distribution (logprobs_mode raw, temperature 0.7",
            "Hint: pass --set loss.tis_ratio_type=none to train without the correction",
        ),
    ),
    "partial groups": (
        rows_of()[:-2],
        "data.partial_groups=refuse",
        (
            "Error: group 'g1': found 1 trajectory; expected 2, the",
            "Hint: pass `--set data.partial_groups=mask`",
        ),
    ),
    "advantages of zero alone": (
        rows_of(rewards=(1.0, 1.0)),
        "",
        (
            "[zero_advantages]",
            "every advantage is 0",
            "(2 groups)",
            "Hint: `rollouts stats DS` shows rewards and groups: supply rewards that differ",
            "--set loss.policy_loss_type=cross_entropy imitates rows",
        ),
    ),
    "rewards of zero alone": (
        rows_of(rewards=(0.0, 0.0)),
        "",
        ("[zero_advantages]", "--set loss.policy_loss_type=cross_entropy imitates rows"),
    ),
    "partial groups of equal rewards": (
        rows_of(rewards=(1.0, 1.0))[:-2],
        "data.partial_groups=refuse",
        ("[partial_groups]", "Hint: pass `--set data.partial_groups=mask`"),
    ),
    "partial groups of equal rewards, where another term has a gradient": (
        rows_of(rewards=(1.0, 1.0))[:-2],
        "data.partial_groups=refuse loss.entropy_loss_coef=0.1",
        ("[partial_groups]", "Hint: pass `--set data.partial_groups=mask`"),
    ),
    "advantages that only a failed trajectory hides": (
        [
            row | ({"reward": None, "error": "lost"} if i in (4, 5) else {"reward": float(i == 1)})
            for i, row in enumerate(rows_of(2, (0.0, 0.0, 0.0)))
        ],
        "",
        (
            "(2 groups). [zero_advantages]",
            "if failed trajectories mask the groups that vary, --set data.failed=trajectory leaves out",
        ),
    ),
    "returns that differ by a rounding error beside a failed trajectory": (
        [
            row | ({"reward": None, "error": "lost"} if i in (4, 5) else {"reward": reward})
            for i, row in enumerate(rows_of(2, (0.0, 0.0, 0.0)))
            for reward in ([0.3, 0.1 + 0.2][i == 2 or i == 3],)
        ],
        "",
        ("within any group (2 groups). [zero_advantages]", "Hint: `rollouts stats DS`"),
    ),
    "gradients that only masked trajectories have": (
        [row | {"loss_mask": [row["reward"] is None] * 4} for row in rows_of()],
        "",
        ("[mask_trains_something]", "there are no tokens to train on"),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_dataset_that_cannot_train_is_refused_before_anything_is_written(name, refuses, tmp_path):
    rows, settings, words = REFUSALS[name]
    dataset = write_dataset(tmp_path / "ds", rows, logprobs_mode="raw")
    refuses(dataset, *words, settings=settings)


NAN, INF = float("nan"), float("inf")
INVARIANTS = [
    ("contiguous_trajectory", [rows_of()[i] for i in (0, 2, 1, 3, 4, 5, 6, 7)]),
    ("step_index_sequence", with_row(step_index=0)),
    ("unique_trajectory", with_row(instance_id="g1")),
    ("columns_and_types", with_row(response_ids=[None, 2, 3, 4])),
    ("columns_and_types", with_row(prompt_token_ids=[None])),
    ("columns_and_types", with_row(loss_mask=[True, None, True, True])),
    ("lengths_align", with_row(loss_mask=[True])),
    ("lengths_align", with_row(rollout_logprobs=[-1.0])),
    ("lengths_align", with_row(rewards=[1.0])),
    ("nonempty_prompt", with_row(prompt_token_ids=[])),
    ("token_range", with_row(response_ids=[-1, 2, 3, 4])),
    ("token_range", with_row(prompt_token_ids=[-1])),
    ("reward_finite", with_row(reward=NAN)),
    ("reward_finite", with_row(rewards=[0.0, 0.0, INF, 0.0])),
    ("logprobs_finite", with_row(rollout_logprobs=[NAN, -1.0, -1.0, -1.0])),
    ("logprobs_finite", with_row(rollout_logprobs=[-1.0, -1.0, -1.0, -INF])),
    ("columns_and_types", with_row(rollout_logprobs=[-1.0, None, -1.0, -1.0])),
    ("logprobs_nonpositive", with_row(rollout_logprobs=[-1.0, 0.5, -1.0, -1.0])),
]
"""Rows that break an invariant, and no other before it."""


@pytest.mark.parametrize(("rule", "rows"), INVARIANTS)
def test_a_dataset_that_breaks_an_invariant_is_refused_before_anything_is_written(
    rule, rows, refuses, tmp_path
):
    names = tuple({name for row in rows for name in row})
    (tmp_path / "ds").mkdir()  # the writer refuses such rows
    table = pa.Table.from_pylist(rows, schema=arrow_schema(names))
    pq.write_table(table, tmp_path / "ds" / "part-00000.parquet")
    refuses(str(tmp_path / "ds"), f"[{rule}]")


@pytest.mark.parametrize(
    ("mode", "loss"), [("raw", "regular"), (None, "rollout_is"), ("processed", "rollout_is")]
)
def test_raw_log_probabilities_of_a_distribution_that_was_changed_are_refused(
    mode, loss, refuses, model, tmp_path
):
    rows = rows_of(**SAMPLED, sampling_extra=None)
    rows[2]["sampling_extra"] = '{"repetition_penalty":1.1}'
    dataset = write_dataset(tmp_path / "ds", rows, logprobs_mode=mode)
    settings = f"loss.policy_loss_type={loss}"
    if mode == "processed":
        assert train(dataset, model, tmp_path / "run", settings) == 0
        return
    shown = f"not from the sampled distribution (logprobs_mode {mode or 'unknown'}, "
    words = ("trajectory 'g0_1', row 0: ", shown, 'repetition_penalty":1.1')
    refuses(dataset, *words, settings=settings)


def write_generated(path, rows, config, mode):
    metadata = DatasetMetadata(logprobs_mode=mode).made("generate", config=config)
    table = rollout_io.read(write_dataset(path.with_name("plain"), rows))
    with rollout_io.RolloutWriter(path, metadata=metadata) as writer:
        writer.write(table)
    return str(path)


TRUNCATED = {"min_p": 0.1}, '{"min_p":0.1}'
CHANGED = {"min_p": 0.0, "sampling_extra": {"bad_words": ["a"]}}, '{"bad_words":["a"]}'


@pytest.mark.parametrize(
    ("sampled", "mode", "settings"),
    [
        (TRUNCATED, "raw", ""),
        (TRUNCATED, "processed", "data.sampling_defaults=model"),
        (CHANGED, "raw", "data.sampling_defaults=model"),
        (CHANGED, "processed", ""),
        (CHANGED, None, ""),
    ],
)
def test_the_history_says_what_a_dataset_without_the_column_was_sampled_with(
    sampled, mode, settings, refuses, model, tmp_path
):
    config, extra = sampled
    dataset = write_generated(tmp_path / "ds", rows_of(**SAMPLED), config, mode)
    if (sampled, mode) == (CHANGED, "processed"):
        assert train(dataset, model, tmp_path / "run", settings) == 0
        return
    words = (
        "trajectory 'g0_0', row 0 (the first of 8): ",
        "cover only the tokens that truncation kept"
        if mode == "processed"
        else "not from the sampled distribution",
        f" (logprobs_mode {mode or 'unknown'}, ",
        f", {extra}",
        "pass --set loss.tis_ratio_type=none",
        "with a top_k of at most 20",
    )
    refuses(dataset, *words, settings=settings)


@pytest.mark.parametrize(
    ("column", "config"),
    [
        ({}, {"min_p": 0.0, "sampling_extra": {"ignore_eos": True, "repetition_penalty": 1.0}}),
        ({"sampling_extra": None}, {"min_p": 0.1}),
    ],
)
def test_a_history_that_changed_nothing_or_that_the_column_denies_refuses_nothing(
    column, config, model, tmp_path
):
    rows = rows_of(**SAMPLED, **column)
    dataset = write_generated(tmp_path / "ds", rows, config, "raw")
    assert train(dataset, model, tmp_path / "run", "", "--dry-run") == 0
    assert train(dataset, model, tmp_path / "run") == 0


@pytest.mark.parametrize(("nested", "settings"), [(False, ""), (True, "model.lora_rank=4")])
def test_a_quantised_model_is_refused_before_it_is_loaded(
    nested, settings, refuses, model, tmp_path
):
    quantised = Path(shutil.copytree(model, tmp_path / "quantised"))
    config = json.loads((quantised / "config.json").read_text())
    method = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    config |= {"text_config": method} if nested else method
    (quantised / "config.json").write_text(json.dumps(config))
    dataset = write_dataset(tmp_path / "ds", rows_of())
    words = ("(quantization_config, bitsandbytes)", "[model_quantised]", "model.dequantize()")
    refuses(dataset, *words, settings=settings, model=quantised)


@pytest.mark.parametrize("coefficient", ["loss.entropy_loss_coef", "loss.kl_loss_coef"])
def test_zero_advantages_train_where_another_term_has_a_gradient(coefficient, model, tmp_path):
    dataset = write_dataset(tmp_path / "ds", rows_of(rewards=(1.0, 1.0)))
    settings = f"{coefficient}=0.1"
    assert train(dataset, model, tmp_path / "run", settings, "--dry-run") == 0
    assert not (tmp_path / "run").exists()
    assert train(dataset, model, tmp_path / "run", settings) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("rows", "settings", "warning"),
    [
        (
            rows_of()[:-2],
            "data.partial_groups=train",
            "warning: the number of trajectories is not 2 in 1 group: ",
        ),
        (
            rows_of(),
            "loss.policy_loss_type=gspo batch.sequence_layout=step loss.reduction=sequence_mean",
            "work per row (policy_loss_type gspo",
        ),
        (
            rows_of(**SAMPLED),
            "loss.tis_ratio_type=sequence batch.sequence_layout=step",
            "work per row (tis_ratio_type sequence: a weight is the product over a row)",
        ),
        (rows_of(), "", "note: importance correction (tis_ratio_type) is off, because"),
    ],
)
def test_what_trains_otherwise_than_one_may_think_is_said_before_the_first_update(
    rows, settings, warning, options, model, tmp_path, capfd
):
    dataset = write_dataset(tmp_path / "ds", rows)
    assert train(dataset, model, tmp_path / "run", settings, *options) == 0
    before_updates, _, _ = capfd.readouterr().err.partition("update 1 of")
    assert before_updates.count(warning) == 1


def save_tokenizer(path, *words, chat_template=None):
    vocab = {word: number for number, word in enumerate(("user", "[UNK]", *words))}
    backend = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template).save_pretrained(
        path
    )


@pytest.fixture
def recorded(model, tmp_path):
    """A dataset that knows its tokenizer, and a copy of the model for one."""
    save_tokenizer(tmp_path / "tokenizer", "a", chat_template="{{ messages }}")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    metadata = DatasetMetadata(
        tokenizer="letters",
        tokenizer_fingerprint=tokenizer.fingerprint,
        chat_template_fingerprint=tokenizer.template_fingerprint,
    )
    table = rollout_io.read(write_dataset(tmp_path / "plain", rows_of()))
    with rollout_io.RolloutWriter(tmp_path / "ds", metadata=metadata) as writer:
        writer.write(table)
    shutil.copytree(model, tmp_path / "model")
    return str(tmp_path / "ds"), tmp_path / "model"


@pytest.mark.slow
def test_a_model_with_another_tokenizer_is_refused_unless_it_is_allowed(
    recorded, refuses, tmp_path, capfd
):
    dataset, model = recorded
    save_tokenizer(model, "b")
    words = (
        f"Error: {dataset}: its tokenizer (letters) differs",
        f"from the tokenizer of {model}",
        "Hint: train the model whose tokenizer produced the ids",
    )
    refuses(dataset, *words, model=model)
    allowed = "data.allow_other_tokenizer=true"
    assert train(dataset, model, tmp_path / "run", allowed) == 0
    assert "differs from the dataset's (letters)" in capfd.readouterr().err
    (model / "tokenizer.json").write_text("{")
    assert train(dataset, model, tmp_path / "again", allowed) == 0
    assert f"the tokenizer of {model} was not compared" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "note: the dataset records neither a tokenizer nor a model, so"),
        (
            {"models": ("org/MODEL", "b")},
            "note: the model's name matches the dataset (org/MODEL, b), but the tokenizers",
        ),
        ({"models": ("org/Model-135M",)}, "note: the model's name matches the dataset (org/Mod"),
        ({"models": ("other",)}, "warning: the dataset was sampled from other; whether "),
        ({"tokenizer": "other"}, "warning: the dataset was sampled from other; whether "),
    ],
)
def test_without_a_fingerprint_train_says_that_names_alone_were_compared(
    metadata, said, model, tmp_path, capfd
):
    table = rollout_io.read(write_dataset(tmp_path / "plain", rows_of()))
    with rollout_io.RolloutWriter(tmp_path / "ds", metadata=DatasetMetadata(**metadata)) as writer:
        writer.write(table)
    shutil.copytree(model, tmp_path / "model")
    dataset = str(tmp_path / "ds")
    assert train(dataset, tmp_path / "model", tmp_path / "run", "", "--dry-run") == 0
    printed = capfd.readouterr().err
    assert printed.count(said) == 1
    assert "fingerprints match" not in printed


def test_with_a_fingerprint_train_says_that_the_tokenizers_were_compared(recorded, tmp_path, capfd):
    dataset, model = recorded
    save_tokenizer(model, "a")
    assert train(dataset, model, tmp_path / "run", "", "--dry-run") == 0
    assert f"note: {model} has the dataset's tokenizer" in capfd.readouterr().err
    config = train_config(dataset=dataset, model=str(model), out="run")
    metadata = rollout_io.read_metadata(dataset)
    said = check_tokenizers(config, metadata, notes_match=False)
    assert not [remark for remark in said if "has the dataset's tokenizer" in remark.text]


@pytest.mark.parametrize(
    ("words", "template", "said"),
    [
        (("a",), "{{ messages }}", []),
        (
            ("a",),
            "{{ messages | length }}",
            ["warning: the chat template of the dataset's prompts"],
        ),
        (None, None, ["no tokenizer to compare"]),
    ],
)
def test_the_same_tokenizer_passes_another_template_and_none_are_told(
    words, template, said, recorded, tmp_path, capfd
):
    dataset, model = recorded
    if words:
        save_tokenizer(model, *words, chat_template=template)
    assert train(dataset, model, tmp_path / "run", "", "--dry-run") == 0
    printed = capfd.readouterr().err
    known = ("warning: the chat template of the dataset's prompts", "no tokenizer to compare")
    assert [text for text in known if text in printed] == said


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_another_template_is_named_and_the_warning_says_how_to_serve_with_it(name, recorded):
    dataset, model = recorded
    save_tokenizer(model, "a", chat_template="{{ messages }}")
    text = find_template(name) if name else "{{ messages | length }}"
    metadata = rollout_io.read_metadata(dataset)
    metadata = metadata.replace(chat_template_fingerprint=template_fingerprint(text))
    config = train_config(dataset=dataset, model=str(model), out="run")
    (*_, (said, level)) = check_tokenizers(config, metadata)
    assert level == logging.WARNING
    (chosen,) = check_tokenizers(config, metadata, notes_match=False)
    assert chosen == (f"note: {said}", logging.INFO)
    assert (f"({name})" in said) == (name is not None)
    file = f'"$(rollouts formats --templates {name})"' if name else "TEMPLATE"
    assert f"Hint: vllm serve CHECKPOINT --chat-template {file}, or cp {file} CHECKPOINT/" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["state/run.json", "state/optimizer.safetensors", "model.safetensors"]
)
def test_a_broken_checkpoint_is_refused_and_the_run_left_alone(
    file, refuses, model, tmp_path, capfd
):
    dataset, out = write_dataset(tmp_path / "ds", rows_of()), tmp_path / "run"
    broken = out / "checkpoints" / "global_step_1" / file
    assert train(dataset, model, out) == 0
    capfd.readouterr()
    broken.write_bytes(b"{")
    refuses(dataset, "[checkpoint_state]", str(out), resume=["train", "--resume", str(out)])
    assert broken.read_bytes() == b"{"


def test_a_broken_model_directory_is_refused(refuses, model, tmp_path):
    dataset = write_dataset(tmp_path / "ds", rows_of())
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuses(dataset, f"Error: {broken}: ", "cannot be loaded as a causal LM", model=broken)


@pytest.mark.slow
def test_the_plan_is_what_the_run_then_does(model, tmp_path, capfd):
    rows = rows_of(3, (1.0, 0.0, 0.5))
    rows += [row | {"error": "timeout", "reward": None} for row in rows_of(4, (1.0,))[-2:]]
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = (
        "batch.groups_per_batch=2 batch.groups_per_mini_batch=1 batch.epochs_per_batch=2 batch.tokens_per_micro_batch=20"
        " data.partial_groups=train"
    )
    given = [part for text in settings.split() for part in ("--set", text)]
    command = ["train", dataset, "--model", model, "--out", str(tmp_path / "run"), *given, "--json"]
    assert main([*command, "--dry-run"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert main(command) == 0
    lines = metrics_of(tmp_path / "run")
    merge, steps = plan["layouts"]["merge"], plan["layouts"]["step"]
    assert plan["num_mini_batches"] == len(lines) == 8
    assert plan["num_updates"] == 8
    assert (plan["num_groups"], plan["num_failed"], plan["num_masked"]) == (4, 1, 1)
    assert plan["num_partial_groups"] == 1
    assert 2 * merge["num_tokens"] == sum(line["num_forwarded_tokens"] for line in lines)
    assert 2 * plan["num_trained_tokens"] == sum(line["num_trained_tokens"] for line in lines)
    first = [*lines[:2], *lines[4:6]]
    assert merge["micro_batches"] == [line["num_micro_batches"] for line in first]
    assert (merge["num_sequences"], steps["num_sequences"]) == (9, 18)
    assert (merge["longest_tokens"], steps["longest_tokens"]) == (15, 15)
    trees = [plan["layouts"][f"tree_per_{name}"] for name in ("trajectory", "group")]
    assert all(tree["num_tokens"] <= merge["num_tokens"] for tree in trees)


def test_the_plan_is_a_table_for_people(model, tmp_path, capfd):
    dataset = write_dataset(tmp_path / "ds", rows_of())
    assert train(dataset, model, tmp_path / "run", "loss.kl_loss_coef=0.1", "--dry-run") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "groups        2"
    assert lines[1] == "trajectories  4, 0 failed, 0 masked"
    assert lines[3] == "updates       at most 1"
    assert lines[5] == "recorded      tokens of 4 groups per update"
    assert [line.split()[:4] for line in lines[8:10]] == [
        ["step", "8", "92", "100.0%"],
        ["merge", "*", "4", "60"],
    ]
    assert "reference" in [line.split()[0] for line in lines if line]
