"""Whole runs on rows that show pictures."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import trainer
from rollout_io.cli.main import run as main
from rollout_io.dataset.blobs import Blobs
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.process_client import Server
from tests.helpers.trainer_helpers import metrics_of, save_tiny_model, write_dataset
from tests.helpers.vision_models import (
    SHOWS,
    Album,
    digest,
    encoded,
    plain_model,
    save_model,
    store_pictures,
)
from trainer.models.policy import load_policy


def screens(album, num_groups=2):
    """Trajectories of three steps: each shows what was seen before, and two of them a new screen."""
    rows = []
    for group in range(num_groups):
        for repetition, reward in enumerate((1.0, 0.0, 1.0)):
            prompt = [[1, 2 + group, 3], "wide", [4, 5, 6 + repetition]]
            answers = [
                ([8, 9 + repetition], ["tall", [15]]),
                ([10, 11, 12], ["small", [15]]),
                ([13 + group], []),
            ]
            for index, (answer, observed) in enumerate(answers):
                is_last = index == len(answers) - 1
                row = album.row(prompt, [answer])
                rows.append(
                    row
                    | {
                        "instance_id": f"g{group}",
                        "repetition_id": repetition,
                        "trajectory_id": f"g{group}_{repetition}",
                        "step_index": index,
                        "is_last_step": is_last,
                        "token_source": "engine",
                        "reward": reward * is_last,
                        "rollout_logprobs": [-3.0] * len(answer),
                        "temperature": 1.0,
                    }
                )
                prompt = [*prompt, answer, *observed]
    return rows


class Screens:
    """A model, and a dataset of screens."""

    def __init__(self, kind, folder):
        self.model, self.dataset = save_model(kind, folder / "model"), folder / "ds"
        self.rows = screens(Album(kind, self.model, folder / "album"))

    def write(self, rows=None):
        store_pictures(self.dataset)
        return write_dataset(self.dataset, self.rows if rows is None else rows)


def train(screens, out, **settings):
    paths = {"dataset": str(screens.dataset), "model": screens.model, "out": str(out)}
    sizes = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "learning_rate": 1e-3}
    trainer.train(train_config(**paths | sizes | settings))
    return metrics_of(out)


def test_the_verb_names_the_class_that_loads_a_model_that_sees_and_suggests_no_audit(
    tmp_path, capsys
):
    game, out = Screens("qwen3_vl", tmp_path), tmp_path / "run"
    game.write()
    sizes = ["batch.groups_per_batch=2", "batch.groups_per_mini_batch=2", "batch.max_updates=1"]
    arguments = ["train", str(game.dataset), "--model", game.model, "--out", str(out)]
    assert main([*arguments, *(word for size in sizes for word in ("--set", size))]) == 0
    *_, last = capsys.readouterr().err.splitlines()
    checkpoint = f"{out}/checkpoints/global_step_1"
    assert last == f"next: transformers.AutoModelForImageTextToText.from_pretrained({checkpoint!r})"
    assert main(["validate", str(game.dataset)]) == 0
    assert "audit" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_ten_updates_of_grpo_on_screens_agree_in_every_layout(kind, tmp_path):
    game = Screens(kind, tmp_path)
    game.write()
    firsts = []
    for layout in ("step", "merge", "tree"):
        settings = {"num_epochs": 5, "sequence_layout": layout, "record_tokens": "none"}
        updates = train(game, tmp_path / layout, **settings)
        assert len(updates) == 10
        assert not any(update["skipped"] for update in updates)
        firsts.append(updates[0])
    for name in ("loss", "grad_norm", "policy_entropy"):
        values = torch.tensor([first[name] for first in firsts])
        torch.testing.assert_close(values, values[:1].expand(3), rtol=1e-4, atol=1e-6)
    tokens = [first["num_forwarded_tokens"] for first in firsts]
    assert tokens[0] > tokens[1] > tokens[2]


def texts(album, group):
    """A group of rows that show nothing."""
    return [
        album.row([[20 + n, 21, 22, 23]], [[24, 25 + n]])
        | {
            "instance_id": group,
            "repetition_id": n,
            "trajectory_id": f"{group}_{n}",
            "step_index": 0,
            "is_last_step": True,
            "token_source": "engine",
            "reward": float(n == 1),
            "rollout_logprobs": [-3.0] * 2,
            "temperature": 1.0,
        }
        for n in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_sharded_parameters_train_on_pictures_as_one_process_does(kind, tmp_path):
    """Three micro-batches show pictures and one does not: one process encodes while another does not."""
    game = Screens(kind, tmp_path)
    album = Album(kind, game.model, tmp_path / "texts")
    rows = [*screens(album, num_groups=1), *texts(album, "a"), *texts(album, "b")]
    dataset = game.write(rows)
    settings = {"groups_per_batch": 3, "groups_per_mini_batch": 3}
    settings |= {"tokens_per_micro_batch": 48, "num_epochs": 4, "save_every_updates": 2}
    settings |= {"kl_loss_coef": 0.1, "record_tokens": "none"}
    one = train(game, tmp_path / "one", **settings)
    config = {"dataset": dataset, "model": game.model, "learning_rate": 1e-3, **settings}
    config |= {"out": str(tmp_path / "two")}
    server = Server(tmp_path)
    with server.process:
        server.train(config | {"max_updates": 2}, sharded="by Accelerate")
        server.train(config, sharded="by Accelerate", resume=True)
    two = metrics_of(tmp_path / "two")
    assert [line["num_micro_batches"] for line in two] == [4] * 4
    for name in ("loss", "grad_norm", "policy_entropy", "policy_kl"):
        values = [[line[name] for line in run] for run in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-4, abs=1e-6), name
    weights = [
        plain_model(str(folder)).state_dict()
        for folder in (
            Path(game.model),
            *(tmp_path / run / "checkpoints" / "global_step_4" for run in ("one", "two")),
        )
    ]
    torch.testing.assert_close(weights[2], weights[1], rtol=1e-4, atol=1e-5)
    trained = {
        name for name, first in weights[0].items() if not torch.equal(first, weights[2][name])
    }
    assert trained
    assert all("language_model" in name or "lm_head" in name for name in trained)


@pytest.mark.slow
def test_a_run_with_adapters_resumes_on_pictures_bit_for_bit(tmp_path):
    game = Screens("qwen2_5_vl", tmp_path)
    game.write()
    settings = {"num_epochs": 2, "lora_rank": 2, "save_every_updates": 1, "record_tokens": "none"}
    whole = train(game, tmp_path / "whole", **settings)
    first = train(game, tmp_path / "half", max_updates=2, **settings)
    config = train_config(
        dataset=str(game.dataset),
        model=game.model,
        out=str(tmp_path / "half"),
        groups_per_batch=2,
        groups_per_mini_batch=1,
        learning_rate=1e-3,
        **settings,
    )
    trainer.train(config, resume=True)
    both = metrics_of(tmp_path / "half")
    assert len(first) == 2
    assert [line["loss"] for line in both] == [line["loss"] for line in whole]
    saved = [
        folder / "checkpoints" / "global_step_4"
        for folder in (tmp_path / "whole", tmp_path / "half")
    ]
    weights = [load_policy(str(path), logprob_chunk_tokens=64).state_dict() for path in saved]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert (saved[0] / "preprocessor_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_dry_run_counts_shared_screens_once(kind, tmp_path, capsys, *, has_weights):
    game = Screens(kind, tmp_path)
    dataset = game.write()
    if not has_weights:
        (Path(game.model) / "model.safetensors").unlink()
    given = ["train", dataset, "--model", game.model, "--out", str(tmp_path / "out")]
    assert main([*given, "--dry-run", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    tokens = [layouts[name]["num_tokens"] for name in ("step", "merge", "tree_per_group")]
    assert tokens[0] > tokens[1] > tokens[2]


def without_last_placeholder(rows, _):
    for row in rows:
        for name in ("prompt_token_ids",):
            row[name] = row[name][:4] + row[name][5:]
        for picture in row["pictures"]:
            picture["start"] -= picture["start"] > 4
        row["pictures"][0]["length"] -= 1


def unknown(rows, _):
    rows[1]["pictures"][0] |= {"start": None, "length": None}


def not_stored(rows, _):
    rows[1]["pictures"][0]["sha256"] = None


def stray(rows, _):
    rows[2]["response_ids"] = [SHOWS]


def other_placeholder(rows, _):
    for row in rows:
        row["prompt_token_ids"] = [59 if t == SHOWS else t for t in row["prompt_token_ids"]]


def trained(rows, _):
    row = rows[0]
    row["response_ids"] = row["prompt_token_ids"][-12:] + row["response_ids"]
    row["prompt_token_ids"] = row["prompt_token_ids"][:-12]
    row["loss_mask"] = [True] * len(row["response_ids"])
    row["rollout_logprobs"] = [-1.0] * len(row["response_ids"])


def missing(_, game):
    store = Blobs.of(game.dataset)
    store.remove([digest("tall")])


def changed(_, game):
    file = Path(Blobs.of(game.dataset).files[digest("tall")])
    file.write_bytes(file.read_bytes() + b"0")


def shows(content, rows, game):
    name = Blobs.of(game.dataset).add(content)
    for row in rows:
        row["pictures"][0]["sha256"] = name


def shows_text(rows, game):
    shows(b"no picture", rows, game)


def shows_a_line(rows, game):
    shows(encoded(Image.new("RGB", (1, 300))), rows, game)


def without_processor(_, game):
    (Path(game.model) / "preprocessor_config.json").unlink()


def text_model(_, game):
    game.model = save_tiny_model(game.dataset.parent / "text", vocab_size=64)


BAD = {
    without_last_placeholder: "picture_tokens",
    unknown: "picture_unknown",
    not_stored: "picture_unknown",
    stray: "picture_tokens",
    other_placeholder: "picture_tokens",
    trained: "picture_tokens",
    missing: "picture_reference",
    changed: "picture_reference",
    shows_text: "picture_file",
    shows_a_line: "picture_file",
    without_processor: "processor",
    text_model: "picture_model",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [pytest.param(one, id=one.__name__) for one in BAD])
def test_a_picture_that_cannot_be_shown_as_it_was_stops_a_run_before_it_writes(change, tmp_path):
    game = Screens("qwen2_5_vl", tmp_path)
    store_pictures(game.dataset)
    change(game.rows, game)
    write_dataset(game.dataset, game.rows)
    with pytest.raises(RolloutError) as error:
        train(game, tmp_path / "out")
    assert error.value.rule == BAD[change]
    assert not (tmp_path / "out").exists()


def test_the_tokens_alone_train_if_the_user_says_so(tmp_path):
    game = Screens("gemma3", tmp_path)
    unknown(game.rows, game)
    game.write()
    assert len(train(game, tmp_path / "out", pictures="text", record_tokens="none")) == 2
