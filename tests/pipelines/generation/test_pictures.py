"""Environments that return pictures, with the embedded engine."""

import asyncio
import base64
import dataclasses
import itertools
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers

import rollout_io
from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.generation.generator import Generator
from pipelines.generation.run import generate
from pipelines.generation.skyrl import GymGenerator
from pipelines.generation.tasks import Task
from pipelines.generation.trajectory import GymTrajectory
from rollout_io.dataset.blobs import Blobs
from rollout_io.retokenize.processor import spans_in
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError
from tests.helpers.generation_helpers import ASK
from tests.helpers.http_server import Server, serving
from tests.helpers.picture_models import png, save_family
from tests.helpers.screen_models import HERE, Screens, save_seeing, screen
from tests.helpers.trainer_helpers import tiny_llama
from tests.helpers.vision_models import CONFIGS
from trainer.engine.embedded import TransformersEngine
from trainer.models.policy import load_policy

HISTORIES = ("append", "one_message", "step_wise")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cache(lambda kind: save_seeing(tmp_path_factory.mktemp("model") / kind, kind))


def config_of(tmp_path, path, environment="Screens", task=None, **settings):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "Look.", **(task or {})}) + "\n")
    usual = {"group_size": 2, "max_response_tokens": 5, "seed": 1, "max_turns": 3}
    usual |= {"environment": f"{HERE}:{environment}", "tasks": str(tasks), "model": path}
    return GenerateConfig(**usual | {"out": str(tmp_path / "ds")} | settings)


def run(config, engine=None):
    return asyncio.run(generate(config, lambda _: engine or TransformersEngine.load(config.model)))


def rows_of(config):
    return rollout_io.scan(config.out).collect().to_dicts()


@pytest.mark.parametrize(
    ("kind", "history"),
    [
        pytest.param(kind, history, marks=[pytest.mark.slow] * (history != usual))
        for kind, usual in zip(CONFIGS, itertools.cycle(HISTORIES), strict=False)
        for history in HISTORIES
    ],
)
def test_each_prompt_has_the_tokens_of_its_pictures_and_the_dataset_their_files(
    kind, history, model, tmp_path
):
    config = config_of(tmp_path, model(kind), history=history, seed=3)
    result = run(config)
    assert result.num_failed == 0, result.first_error
    rollout_io.validate(config.out)
    processor, store = load_tokenizer(config.model).processor, Blobs.of(config.out)
    contents = [png(0, 24, 16), png(1, 24, 16)]
    assert sorted(store.files) == sorted({store.add(content) for content in contents})
    for row in rows_of(config):
        shown = [contents[0], contents[1], contents[0]][: row["step_index"] + 1]
        assert [store.read(one["sha256"]) for one in row["pictures"]] == shown
        expansions = [processor.expansion(content, "") for content in shown]
        ids = np.array(row["prompt_token_ids"], np.int32)
        spans = [(one["start"], one["length"]) for one in row["pictures"]]
        assert spans == spans_in(ids, expansions, processor.pads, "")
        parts = [
            m["content"][0] for m in json.loads(row["messages"]) if isinstance(m["content"], list)
        ]
        assert [part["blob"] for part in parts] == [one["sha256"] for one in row["pictures"]]


def test_attempts_may_show_their_first_picture_late_or_never(model, tmp_path):
    config = config_of(tmp_path, model("qwen3_vl"), "Late", group_size=1, seed=3)
    tasks = [{"prompt": "Look.", "late": late} for late in (True, False)]
    Path(config.tasks).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    assert run(config).num_failed == 0
    shown = [[one["sha256"] for one in row["pictures"] or []] for row in rows_of(config)]
    first, second = shown[3][0], shown[4][1]
    assert shown == [
        [],
        [second],
        [second, first],
        *([first, second, first][: n + 1] for n in range(3)),
    ]
    once = dataclasses.replace(config, out=str(tmp_path / "once"), max_turns=1)
    Path(config.tasks).write_text(json.dumps(tasks[0]) + "\n")
    run(once)
    assert "pictures" not in rows_of(once)[0]
    assert not Blobs.of(once.out).files


def test_the_final_rendering_of_a_conversation_has_the_tokens_of_its_pictures(model, tmp_path):
    path = tmp_path / "template.jinja"
    marked = "{% generation %}{{ message.content }}{% endgeneration %}"
    template = (Path(model("qwen2_5_vl")) / "chat_template.jinja").read_text()
    plain = "{% if message.content is string %}{{ message.content }}"
    assert plain in template
    path.write_text(
        "{{ 'x' * (messages | length) }}"  # prompts are not a beginning of the final rendering
        + template.replace(
            plain,
            f"{{% if message.role == 'assistant' %}}{marked}{{% elif message.content is string %}}"
            "{{ message.content }}",
        )
    )
    config = config_of(
        tmp_path, model("qwen2_5_vl"), history="retokenize", seed=3, chat_template=str(path)
    )
    assert run(config).num_failed == 0
    processor = load_tokenizer(config.model).processor
    for row in rows_of(config):
        assert row["token_source"] == "retokenized"
        shown = [png(0, 24, 16), png(1, 24, 16), png(0, 24, 16)][: row["step_index"] + 1]
        ids = np.array(row["prompt_token_ids"], np.int32)
        expansions = [processor.expansion(content, "") for content in shown]
        spans = [(one["start"], one["length"]) for one in row["pictures"]]
        assert spans == spans_in(ids, expansions, processor.pads, "")


class Odd(NamedTuple):
    """What an environment shows after its first answer, and how that fails."""

    rule: str
    finding: str
    expected: str = ""


URL = "a data URL with base64, such as data:image/png;base64,iVBORw0K"
ODD = {
    "text": Odd("picture_file", "cannot be decoded"),
    "line": Odd("picture_file", "refuses a picture of 1 x 300 pixels"),
    "http": Odd("env_output", "a picture at 'http://127.0.0.1:9/a.png', which is not fetched", URL),
    "file": Odd("env_output", "a picture at 'file:///etc/hostname', which is not fetched", URL),
    "base64": Odd("env_output", "a picture with invalid base64", URL),
    "empty": Odd("env_output", "a picture without its content, in a part of type 'image_url'", URL),
    "sound": Odd("env_output", "a content part of type 'input_audio'", "text"),
    "bytes": Odd("env_output", "a content part of type 'bytes'", "text"),
    "literal": Odd("picture_tokens", "1 token of pictures"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shows", ODD)
def test_a_picture_that_cannot_be_shown_fails_its_trajectory_and_keeps_its_rows(
    shows, model, tmp_path
):
    config = config_of(tmp_path, model("qwen2_5_vl"), "Odd", {"shows": shows}, seed=3)
    result = run(config)
    assert result.errors == {ODD[shows].rule: 2}
    rollout_io.validate(config.out)
    for row in rows_of(config):
        assert ODD[shows].finding in row["error"]
        assert ODD[shows].expected in row["error"]
        assert row["reward"] is None
        assert len(row["pictures"]) == 1
        assert row["response_ids"]


def test_a_placeholder_that_was_sampled_fails_its_trajectory(model, tmp_path):
    path = model("qwen2_5_vl")
    config = config_of(tmp_path, path, max_response_tokens=60, group_size=4)
    engine = TransformersEngine.load(path)
    pad = engine.model.config.image_token_id
    with torch.no_grad():
        engine.model.lm_head.weight[pad] = engine.model.lm_head.weight[20] * 1.01
        engine.model.lm_head.weight[:256] *= 0.5
    result = run(config, engine)
    rows = [row for row in rows_of(config) if pad in row["response_ids"]]
    assert rows
    assert result.errors["picture_tokens"] == result.num_failed > 0
    for row in rows:
        assert f"token {pad}" in row["error"]
        assert row["reward"] is None


class Deaf(TransformersEngine):
    """An engine of a user, which knows nothing of pictures."""

    async def sample(self, prompt_token_ids, sampling, *, session=None):
        return await super().sample(prompt_token_ids, sampling, session=session)


def deaf(path, _):
    return Deaf(load_policy(path, logprob_chunk_tokens=64).model, load_tokenizer(path))


def served(_, tmp_path):
    del tmp_path
    return VllmEngine("http://127.0.0.1:9", model="m", logprobs_mode="raw")


def texts_only(_, tmp_path):
    """The engine of a model without an encoder of pictures."""
    model = tiny_llama(vocab_size=300, max_position_embeddings=1024)
    return TransformersEngine(model, load_tokenizer(save_family(tmp_path / "family")))


REFUSED = {
    deaf: ("the engine does not show them", "set engine = transformers"),
    served: ("with history append", "set history = step_wise, or engine = transformers"),
    texts_only: ("has no encoder of pictures", None),
}


@pytest.mark.parametrize("make", [pytest.param(one, id=one.__name__) for one in REFUSED])
async def test_an_engine_that_shows_no_pictures_fails_a_trajectory_before_it_samples(
    make, model, tmp_path
):
    path = model("qwen2_5_vl")
    config, engine = config_of(tmp_path, path), make(path, tmp_path)
    task = Task(instance_id="t", repetition_id=0, prompt=ASK)

    trajectory = GymTrajectory(
        task, lambda: Screens(), engine, load_tokenizer(path), config, Blobs.of(config.out)
    )
    with pytest.raises(RolloutError) as error:
        await trajectory.run()
    finding, hint = REFUSED[make]
    assert (error.value.rule, error.value.hint) == ("engine_pictures", hint)
    assert finding in error.value.got
    assert trajectory.steps == []


async def test_a_model_without_an_image_processor_refuses_pictures(tokenizer, tmp_path):
    engine = TransformersEngine(tiny_llama(vocab_size=49152), tokenizer)
    config = config_of(tmp_path, tokenizer.name)

    made = Generator(engine, tokenizer, config, store=Blobs.of(config.out))
    (finished,) = await made.collect([Task(instance_id="t", repetition_id=0, prompt=ASK)])
    assert finished.rule == "engine_pictures"
    assert "has no image processor" in finished.error


def test_a_chat_template_without_pictures_refuses_them(model, tmp_path):
    config = config_of(tmp_path, model("qwen2_5_vl"), chat_template="qwen3_acc_thinking")
    assert run(config).errors == {"chat_template": 2}
    assert "no placeholder" in rows_of(config)[0]["error"]


def test_the_generator_interface_of_skyrl_refuses_pictures(model, tmp_path):
    path = model("qwen2_5_vl")
    generator = GymGenerator(
        TransformersEngine.load(path), load_tokenizer(path), config_of(tmp_path, path)
    )
    batch = {"prompts": [ASK], "env_classes": [f"{HERE}:Screens"]}
    output = asyncio.run(generator.generate(batch))
    assert output["stop_reasons"] == ["error"]
    assert output["loss_masks"] == [[0]]
    assert not Blobs.of(generator.config.out).files


def test_prompts_of_tasks_have_no_pictures(model, tmp_path):
    prompt = [screen(0)]
    config = config_of(tmp_path, model("qwen2_5_vl"), task={"prompt": prompt})
    with pytest.raises(RolloutError) as error:
        run(config)
    assert (error.value.rule, error.value.got) == ("message", "a content part of type 'image_url'")


def test_an_interrupted_generation_goes_on_with_the_same_pictures(model, tmp_path):
    path = model("gemma3")
    config = config_of(tmp_path, path, seed=3)
    run(config)
    rows = rows_of(config)
    half = dataclasses.replace(config, out=str(tmp_path / "half"), group_size=1)
    run(half)
    whole = dataclasses.replace(half, group_size=2)
    assert run(whole).num_held == 1
    names = ["repetition_id", "step_index", "prompt_token_ids", "response_ids", "pictures"]
    both = [sorted([row[n] for n in names] for row in made) for made in (rows, rows_of(whole))]
    assert both[0] == both[1]
    rollout_io.validate(whole.out)


def rendering_server(path, **parsed):
    """A server that renders messages with pictures as vLLM does, and says one word."""
    tokenizer = load_tokenizer(path)

    def answer(body):
        contents = []

        def plain(part):
            if part["type"] == "text":
                return part
            contents.append(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
            return {"type": "image"}

        messages = [
            message
            | {
                "content": message["content"]
                if isinstance(message["content"], str)
                else [*map(plain, message["content"])]
            }
            for message in body["messages"]
        ]
        text = tokenizer.render(messages, generation_prompt=True)
        for content in contents:
            expansion = tokenizer.processor.expansion(content, "").text
            text = text.replace(tokenizer.processor.token, expansion.replace("<", "\0"), 1)
        (prompt,) = tokenizer.encode([text.replace("\0", "<")], [""])
        (ids,) = tokenizer.encode(["yes"], [""])
        logprobs = [{"token": token, "logprob": -0.5} for token in "yes"]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "yes"} | parsed,
            "token_ids": ids,
            "logprobs": {"content": logprobs},
            "finish_reason": "stop",
        }
        return 200, {"choices": [choice], "prompt_token_ids": prompt}

    return Server(answer=answer)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
def test_a_server_renders_each_turn_from_messages_with_pictures(kind, model, tmp_path):
    path = model(kind)
    config = config_of(tmp_path, path, history="step_wise", engine="vllm", urls=["http://x"])
    with serving(rendering_server(path)) as server:
        engine = VllmEngine(server.url, model="m", logprobs_mode="raw")
        result = run(config, engine)
    assert result.num_failed == 0, result.first_error
    assert {path for path, *_ in server.requests} == {"/v1/chat/completions"}
    rows = rows_of(config)
    assert [len(row["pictures"]) for row in rows] == [1, 2, 3] * 2
    local = config_of(tmp_path, path, out=str(tmp_path / "local"), seed=3)
    run(local)
    first = [row for row in rows_of(local) if row["step_index"] == 0]
    for row, own in zip([row for row in rows if row["step_index"] == 0], first, strict=True):
        assert row["prompt_token_ids"] == own["prompt_token_ids"]
        assert row["pictures"] == own["pictures"]
    rollout_io.validate(config.out)


def test_an_environment_gets_the_whole_text_where_a_server_has_parsed_it(model, tmp_path):
    path = model("qwen2_5_vl")
    config = config_of(tmp_path, path, history="step_wise")
    with serving(rendering_server(path, content="s", reasoning="ye")) as server:
        result = run(config, VllmEngine(server.url, model="m", logprobs_mode="raw"))
    assert result.num_failed == 0, result.first_error
    rows = rows_of(config)
    assert {row["response_text"] for row in rows} == {"yes"}
    assert {row["reward"] for row in rows} == {len("yes") % 5 / 4}


def test_a_server_that_resizes_pictures_in_another_way_fails_its_trajectories(model, tmp_path):
    config = config_of(tmp_path, model("qwen2_5_vl"), history="step_wise")
    with serving(rendering_server(save_seeing(tmp_path / "other", "qwen2_5_vl"))) as server:
        settings = {"patch_size": 4, "merge_size": 1, "temporal_patch_size": 2}
        transformers.Qwen2VLImageProcessorPil(**settings).save_pretrained(tmp_path / "other")
        engine = VllmEngine(server.url, model="m", logprobs_mode="raw")
        result = run(config, engine)
    assert result.errors == {"picture_tokens": 2}
