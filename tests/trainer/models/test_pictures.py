"""Models that see pictures: in every layout what a plain forward pass of each row gives."""

from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForImageTextToText

from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import gradients, relative_difference, tiny_policy
from tests.helpers.vision_models import CONFIGS, SHOWS, Album, Seen
from trainer.batch import cut_batch, to_batch
from trainer.models import pictures
from trainer.models.layers import compile_layers, layer_classes
from trainer.models.lora import add_adapter
from trainer.models.pictures import grid_positions, num_features, without_encoder
from trainer.models.policy import load_policy
from trainer.models.self_check import check_pictures
from trainer.run.checkpoint import write_model

START = [[1, 2, 3], "wide", [4, 5, 6, 7]]
STEPS = [
    (START, [8, 9]),
    ([*START, [8, 9], "tall", [10]], [11, 12, 13]),
    ([*START, [8, 9], "small", [10]], [11, 12, 13]),
    ([*START, [8, 9], "wide", [10]], [14]),
    ([[1, 2, 3], "tall", [4, 5, 6, 7]], [8, 9]),
    ([[20, 21, 22], [23]], [24, 25]),
    (["small"], [26]),
]
"""Prompt and response of each step: shared screens, forks before and after them, and text alone."""
MERGED = [
    (START, [[8, 9], "tall", [10, 11, 12, 13]]),
    (START, [[8, 9], "small", [10, 11, 12, 13]]),
    (START, [[8, 9], "wide", [10, 14]]),
]
"""Rows of two steps: an answer, a screen, and an answer."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return cache(lambda kind: Seen.saved(kind, tmp_path_factory.mktemp(kind)))


def batch_of(album, rows):
    """Rows of one group, each of a trajectory of its own."""
    n = len(rows)
    table = [album.row(*row) for row in rows]
    common = {
        "name": [f"row {i}" for i in range(n)],
        "instance_id": ["g"] * n,
        "trajectory_id": [f"g_{i}" for i in range(n)],
        "rollout_logprobs": [None] * n,
        "temperature": [None] * n,
        "trains": [True] * n,
        "reward": [0.0] * n,
        "advantage": [1.0] * n,
        "mini_batch": [0] * n,
    }
    picture = pl.Struct({"sha256": pl.String, "start": pl.Int32, "length": pl.Int32})
    schema = {
        "prompt_token_ids": pl.List(pl.Int32),
        "response_ids": pl.List(pl.Int32),
        "rollout_logprobs": pl.List(pl.Float32),
        "temperature": pl.Float32,
        "pictures": pl.List(picture),
    }
    columns = {name: [row[name] for row in table] for name in table[0]}
    frame = pl.DataFrame(columns | common, schema_overrides=schema)
    return to_batch(frame, pictures=album.reader)


def forests_of(batch, layout, budget):
    config = train_config(sequence_layout=layout, tokens_per_micro_batch=budget).batch
    (mini_batch,) = cut_batch(batch, config)
    return mini_batch.forests


def outputs(policy, batch, forests):
    """Log-probabilities of all targets, in the order of the batch."""
    by_slot = torch.zeros(len(batch.trains))
    for forest in forests:
        logprobs, _ = policy(forest, torch.ones(forest.num_targets))
        by_slot = by_slot.index_put((forest.target_slot,), logprobs)
    return by_slot[torch.from_numpy(batch.trains)]


def same_gradients(policy, plain, logprobs, exact):
    weights = torch.linspace(-1, 1, len(exact))
    for model, values in ((policy, logprobs), (plain, exact)):
        model.zero_grad()
        (values * weights).sum().backward()
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    expected = [p.grad.flatten() for n, p in plain.named_parameters() if n in trained]
    assert relative_difference(gradients(policy), torch.cat(expected)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "budget"), [("step", 1), ("step", 4096), ("tree", 4096)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_steps_with_pictures_have_the_logprobs_and_gradients_of_plain_forwards(
    kind, layout, budget, seen
):
    path, album, plain = seen(kind)
    policy = load_policy(path, logprob_chunk_tokens=64, trees=layout == "tree")
    batch = batch_of(album, [(prompt, [response]) for prompt, response in STEPS])
    forests = forests_of(batch, layout, budget)
    exact = torch.cat([album.logprobs(plain, [*p, r], len(r)) for p, r in STEPS])
    found = outputs(policy, batch, forests)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    same_gradients(policy, plain, found, exact)
    if layout == "tree":
        whole = sum(f.num_tokens for f in forests_of(batch, "step", 4096))
        assert sum(f.num_tokens for f in forests) < whole


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 4096])
@pytest.mark.parametrize("kind", CONFIGS)
def test_merged_rows_with_pictures_have_the_logprobs_and_gradients_of_plain_forwards(
    kind, budget, seen
):
    path, album, plain = seen(kind)
    policy = load_policy(path, logprob_chunk_tokens=64)
    batch = batch_of(album, MERGED)
    parts = []
    for prompt, (first, *rest) in MERGED:
        assert isinstance(first, list)
        parts.append(album.logprobs(plain, [*prompt, first], len(first)))
        (last,) = rest[1:]
        parts.append(album.logprobs(plain, [*prompt, first, *rest], len(last)))
    exact = torch.cat(parts)
    found = outputs(policy, batch, forests_of(batch, "merge", budget))
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    same_gradients(policy, plain, found, exact)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_compiled_layers_see_the_same_pictures(kind, *, recomputes, seen, monkeypatch):
    usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: usual(f, **how, backend="aot_eager"))
    torch._dynamo.reset()
    path, album, plain = seen(kind)
    policy = load_policy(path, logprob_chunk_tokens=64)
    compile_layers(policy.model, recomputes=recomputes)
    batch = batch_of(album, [(prompt, [response]) for prompt, response in STEPS])
    exact = torch.cat([album.logprobs(plain, [*p, r], len(r)) for p, r in STEPS])
    found = outputs(policy, batch, forests_of(batch, "tree", 4096))
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    same_gradients(policy, plain, found, exact)
    torch._dynamo.reset()


@pytest.mark.parametrize(("layout", "budget"), [("step", 1), ("step", 4096), ("tree", 4096)])
def test_each_distinct_picture_of_a_micro_batch_is_encoded_once(layout, budget, seen):
    path, album, _ = seen("gemma3")
    policy = load_policy(path, logprob_chunk_tokens=64)
    batch = batch_of(album, [(prompt, [response]) for prompt, response in STEPS])
    encoded = list[int]()
    tower = policy.model.base_model.vision_tower
    tower.register_forward_hook(
        lambda _, __, kwargs, ___: encoded.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    forests = forests_of(batch, layout, budget)
    distinct = [0 if f.pictures is None else len(f.pictures.ends) - 1 for f in forests]
    outputs(policy, batch, forests)
    assert encoded == [number for number in distinct if number]
    # Alone, each step forwards one or two different pictures, except the one of text.
    assert sorted(distinct) == ([3] if budget > 1 else [0, 1, 1, 1, 1, 2, 2])


def test_a_batch_without_pictures_is_forwarded_as_text(seen):
    _, album, _ = seen("gemma3")
    batch = batch_of(album, [([[1, 2, 3]], [[4, 5]])])
    assert batch.pictures is None
    assert [forest.pictures for forest in forests_of(batch, "tree", 4096)] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_only_the_text_part_trains_and_gets_adapters(kind, seen):
    path, album, _ = seen(kind)
    text = load_policy(path, logprob_chunk_tokens=64)
    adapted = load_policy(path, logprob_chunk_tokens=64)
    add_adapter(adapted, train_config(lora_rank=2, model=path).model)
    batch = batch_of(album, [(START, [[8, 9]])])
    for policy in (text, adapted):
        outputs(policy, batch, forests_of(batch, "step", 4096)).sum().backward()
        trained = [name for name, p in policy.model.named_parameters() if p.grad is not None]
        assert trained
        inside = ("language_model.", "text_model.", "lm_head")
        assert all(any(part in name for part in inside) for name in trained)
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_encoder_is_all_that_pictures_pass_before_the_text_part(kind, seen):
    _, album, model = seen(kind)
    before = [name for name, _ in model.named_parameters()]
    with without_encoder(model) as parts:
        left = [name for name, _ in model.named_parameters()]
        (layer,) = layer_classes(model)
        with pytest.raises((TypeError, AttributeError)):
            num_features(model, album.inputs["small"])
    inside = ("model.language_model.", "model.text_model.", "lm_head.")
    assert left == [name for name in before if name.startswith(inside)] != before
    assert layer.endswith("DecoderLayer")
    assert sum(len(list(part.parameters())) for part in parts) == len(before) - len(left)
    assert [name for name, _ in model.named_parameters()] == before


def test_a_model_of_text_has_no_encoder_to_take_out():
    model = tiny_policy().model
    with without_encoder(model) as parts:
        assert parts == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_policy_loads_as_a_model_that_sees_the_same(kind, seen, tmp_path):
    path, album, _ = seen(kind)
    policy = load_policy(path, logprob_chunk_tokens=64)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    write_model(tmp_path / "saved", policy.model, Path(path))
    batch = batch_of(album, [(START, [[8, 9]])])
    found = outputs(policy, batch, forests_of(batch, "step", 4096))
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    exact = album.logprobs(saved.eval(), [*START, [8, 9]], 2)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    assert (tmp_path / "saved" / "preprocessor_config.json").is_file()
    assert Album(kind, str(tmp_path / "saved"), tmp_path / "ds").num_features == album.num_features


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_see_pictures_pass_the_check_with_a_picture(kind, seen):
    path, album, _ = seen(kind)
    policy = load_policy(path, logprob_chunk_tokens=64, trees=True)
    check_pictures(policy, path, album.inputs["wide"], trees=True)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("gemma3", "MUTUAL", set()),
        ("internvl", "MUTUAL", {"internvl"}),
        ("qwen3_vl", "grid_positions", lambda forest, *_: forest.position_ids.repeat(4, 1)),
        ("smolvlm", "_gathered", lambda outputs, pictures: (pictures_flipped(outputs, pictures),)),
    ],
)
def test_the_check_with_a_picture_detects_wrong_attention_positions_and_features(
    kind, name, value, seen, monkeypatch
):
    path, album, _ = seen(kind)
    policy = load_policy(path, logprob_chunk_tokens=64)
    monkeypatch.setattr(pictures, name, value)
    with pytest.raises(RolloutError, match=r"with a picture differ .*\[model_layers\]"):
        check_pictures(policy, path, album.inputs["wide"])


def pictures_flipped(outputs, shown):
    features = pictures._flat(outputs)[shown.feature]
    return features.flip(0)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_each_row_are_those_of_the_model(kind, seen):
    _, album, plain = seen(kind)
    batch = batch_of(album, [(prompt, [response]) for prompt, response in STEPS[:5]])
    (forest,) = forests_of(batch, "tree", 4096)
    assert forest.pictures is not None
    grids = torch.cat([one["image_grid_thw"] for one in forest.pictures.load()])
    found = grid_positions(forest, forest.pictures, grids // torch.tensor([1, 2, 2]))
    ends = forest.target_parent[torch.argsort(forest.target_slot)].tolist()
    slots = np.cumsum([len(response) for _, response in STEPS[:5]]) - 1
    for (prompt, response), slot in zip(STEPS[:5], slots, strict=True):
        path = (
            (torch.arange(forest.num_tokens) <= ends[slot]) & (forest.subtree_end > ends[slot])
        ).nonzero()[:, 0]
        ids = torch.tensor([album.shown([*prompt, response])[0][:-1]])
        names = [part for part in prompt if isinstance(part, str)]
        grid = torch.cat([album.inputs[name]["image_grid_thw"] for name in names])
        shows = (ids == SHOWS).int()
        expected, _ = plain.model.get_rope_index(ids, shows, image_grid_thw=grid)
        assert torch.equal(found[1:, path], expected[:, 0])
        assert torch.equal(found[0, path], torch.arange(len(path)))
