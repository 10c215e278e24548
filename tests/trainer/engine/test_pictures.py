"""The embedded engine shows pictures as the trainer does."""

import asyncio
import dataclasses
import inspect
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from PIL import Image

from pipelines.generation.engines.base import Picture, Sampling
from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import save_tiny_model
from tests.helpers.vision_models import CONFIGS, SHOWS, Part, Seen, encoded, picture_file
from trainer.engine.batching import next_positions, preprocessor_of, shown_inputs
from trainer.engine.embedded import TransformersEngine
from trainer.models.policy import load_policy

PROMPTS = [
    [[1, 2, 3], "wide", [4, 5, 6, 7]],
    [[1, 2, 3, 4, 5]],
    [[9], "tall", [4, 5], "wide", [6, 7, 8, 9, 10, 11], "wide", [3]],
    [[7], "small"],
]
"""Ragged prompts with one, no and three pictures, and one that ends with a picture."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return cache(lambda kind: Seen.saved(kind, tmp_path_factory.mktemp(kind)))


def engine_of(path, **settings):
    tokenizer = SimpleNamespace(
        name=path,
        eos_token_id=0,
        special_tokens={},
        backend=SimpleNamespace(decode=lambda ids, **_: str(ids)),
    )
    return TransformersEngine(
        load_policy(path, logprob_chunk_tokens=64).model, tokenizer, **settings
    )


def shown(album, parts):
    ids, entries = album.shown(parts)
    names = [part for part in parts if isinstance(part, str)]
    return ids, [
        Picture(content=picture_file(name), **entry)
        for name, entry in zip(names, entries, strict=True)
    ]


def sample(engine, calls, **settings):
    """Answers to calls; the engine starts when all are waiting."""

    async def run():
        async with engine:
            await engine._weights.acquire()
            tasks = [
                asyncio.create_task(
                    engine.sample(
                        ids,
                        Sampling(seed=seed, **settings),
                        **({"pictures": pictures} if pictures else {}),
                    )
                )
                for seed, (ids, pictures) in enumerate(calls)
            ]
            while len(engine._waiting) + sum(task.done() for task in tasks) < len(tasks):
                await asyncio.sleep(0)
            engine._waiting.sort(key=lambda waiting: waiting[0].generator.initial_seed())
            engine._weights.release()
            return await asyncio.gather(*tasks)

    found = asyncio.run(run())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_sampled_logprobs_are_those_of_a_plain_forward_pass_of_each_row(kind, seen):
    path, album, plain = seen(kind)
    calls = [shown(album, parts) for parts in PROMPTS]
    together = sample(engine_of(path), calls, max_tokens=6)
    alone = sample(engine_of(path, max_batch_size=1), calls, max_tokens=6)
    assert [one.response_ids for one in together] == [one.response_ids for one in alone]
    num_compared = 0
    for parts, one in zip(PROMPTS, together, strict=True):
        response = one.response_ids[: [*one.response_ids, SHOWS].index(SHOWS)]
        if response:
            exact = album.logprobs(plain, [*parts, response], len(response)).detach()
            found = torch.tensor(one.rollout_logprobs[: len(response)])
            torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)
            num_compared += 1
    assert num_compared >= 3


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_each_distinct_picture_of_a_batch_is_encoded_once(kind, seen):
    path, album, _ = seen(kind)
    engine, encoded_pictures = engine_of(path), list[int]()
    features = engine.model.base_model.get_image_features

    def counting(pixel_values, **inputs):
        grids = inputs.get("image_grid_thw")
        encoded_pictures.append(len(pixel_values if grids is None else grids))
        return features(pixel_values, **inputs)

    counting.__signature__ = inspect.signature(features)  # type: ignore[attr-defined]
    engine.model.base_model.get_image_features = counting
    sample(engine, [shown(album, parts) for parts in PROMPTS], max_tokens=3)
    assert sum(encoded_pictures) == 3


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_tokens_after_a_picture_at_the_end_of_a_prompt_have_the_positions_of_the_model(kind, seen):
    path, album, plain = seen(kind)
    prompts = [shown(album, [[1, 2], "wide"]), shown(album, [[1], "small", [3], "tall"])]
    for ids, pictures in prompts:
        ids.pop()  # the token after the picture
        row = torch.tensor([ids])
        requests = [SimpleNamespace(pictures=pictures)]
        inputs = shown_inputs(plain, requests, row, torch.ones_like(row), preprocessor_of(path))
        longer = torch.tensor([[*ids, 5]])
        prepared = [preprocessor_of(path)(one.content)["image_grid_thw"] for one in pictures]
        shows = (longer == SHOWS).int()
        expected, _ = plain.model.get_rope_index(longer, shows, image_grid_thw=torch.cat(prepared))
        assert torch.equal(inputs["position_ids"][1:], expected[..., :-1])
        assert torch.equal(next_positions(inputs["position_ids"])[1:], expected[..., -1:])


class Bad(NamedTuple):
    rule: str
    parts: list[Part]
    content: bytes | None = None
    has_pictures: bool = True


BAD = {
    "stray": Bad("picture_tokens", [[1, 2], "wide", [SHOWS, 3]]),
    "unknown": Bad("picture_tokens", [[1, 2], "wide", [3]], has_pictures=False),
    "no picture": Bad("picture_file", [[1], "wide", [3]], content=b"no picture"),
    "a line": Bad("picture_file", [[1], "wide"], content=encoded(Image.new("RGB", (1, 300)))),
}


@pytest.mark.parametrize("name", BAD)
def test_a_prompt_that_cannot_be_shown_fails_its_own_call_only(name, seen):
    path, album, _ = seen("qwen2_5_vl")
    bad, engine = BAD[name], engine_of(path)
    ids, pictures = shown(album, bad.parts)
    if bad.content is not None:
        pictures = [dataclasses.replace(pictures[0], content=bad.content)]
    good_ids, good = shown(album, PROMPTS[0])

    async def run():
        async with engine:
            return await asyncio.gather(
                engine.sample(ids, Sampling(), pictures=pictures if bad.has_pictures else ()),
                engine.sample(good_ids, Sampling(max_tokens=2), pictures=good),
                return_exceptions=True,
            )

    error, sampled = asyncio.run(run())
    assert isinstance(error, RolloutError)
    assert error.rule == bad.rule
    assert len(sampled.response_ids) == 2


def test_a_model_without_an_encoder_refuses_pictures(seen, tmp_path):
    _, album, _ = seen("gemma3")
    engine = engine_of(save_tiny_model(tmp_path, vocab_size=64))
    with pytest.raises(RolloutError) as error:
        sample(engine, [shown(album, PROMPTS[0])])
    assert error.value.rule == "engine_pictures"
