"""Pictures through a real vLLM: recorded with their tokens, and trained with the engine's log-probabilities."""

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import sys

import polars as pl
import pytest

import rollout_io
from examples import screens
from rollout_io.cli.main import run
from rollout_io.retokenize import load_tokenizer
from schemas.records import token_record_path
from tests.conftest import ROOT
from tests.helpers.picture_models import png
from tests.helpers.recorder_helpers import recording
from tests.helpers.served_models import save_served

pytestmark = pytest.mark.vllm
SCREENS = {"wide": png(0), "tall": png(1, 40, 72)}
DATA = {name: base64.b64encode(content).decode() for name, content in SCREENS.items()}
TALKS = [["wide", "tall"], ["wide", None, "wide"], ["tall", "wide", "tall"], ["tall", "tall"]]
"""What the user shows in each turn of a conversation; two conversations are a group."""
TORCHVISION = [
    ROOT / "tests" / "helpers" / "torchvision_without_kernels",
    ROOT / ".venv-vllm" / "torchvision",
]
PREPARED_BY = {
    "idefics3": [],
    **dict.fromkeys(["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl"], TORCHVISION),
}
"""What engine and trainer prepare the pictures of a family with: Pillow alone, or torchvision.

vLLM serves the others with torchvision alone. The two round differently: one of 255 steps of colour.
"""
NIGHTLY = {"qwen3_vl", "gemma3", "internvl"}
FAMILIES = [
    pytest.param(kind, marks=[pytest.mark.nightly] if kind in NIGHTLY else [])
    for kind in PREPARED_BY
]
SAMPLED = {"model": "smollm2", "temperature": 1.0}


def chat_part(name):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA[name]}"}}


def responses_part(name):
    return {"type": "input_image", "image_url": f"data:image/png;base64,{DATA[name]}"}


def messages_part(name):
    source = {"type": "base64", "media_type": "image/png", "data": DATA[name]}
    return {"type": "image", "source": source}


APIS = {
    "chat": ("chat/completions", "messages", "text", chat_part, {"max_tokens": 12}),
    "responses": ("responses", "input", "input_text", responses_part, {"max_output_tokens": 12}),
    "messages": ("messages", "messages", "text", messages_part, {"max_tokens": 12}),
}
"""Path, key of the conversation, type of a text, function that makes a picture, and settings."""


def answer_in(api, answered):
    if api == "chat":
        return answered["choices"][0]["message"]["content"]
    listed = answered["output"] if api == "responses" else [answered]
    return "".join(part.get("text", "") for item in listed for part in item.get("content") or ())


async def talk(client, session, api, shown):
    path, key, text, part_of, settings = APIS[api]
    messages = []
    for number, name in enumerate(shown):
        content = [{"type": text, "text": f"Turn {number}: "}]
        content += [part_of(name)] if name else []
        messages.append({"role": "user", "content": content})
        body = {**SAMPLED, **settings, key: messages}
        answered = await client.post(f"/s/{session}/v1/{path}", json=body, timeout=120)
        assert answered.status_code == 200, answered.text
        messages.append({"role": "assistant", "content": answer_in(api, answered.json()) or "-"})
    await client.post(f"/s/{session}/end", json={"reward": float(len(shown) % 2)})


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request, start_vllm, tmp_path_factory):
    """A model, and a dataset of recorded conversations in which it was shown pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_served(request.param, folder / "model")
    environment = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *PREPARED_BY[request.param]]))}

    async def talk_all(url):
        async with recording(
            folder / "ds", url, tokenizer=str(model), logprobs_mode="raw"
        ) as client:
            for api in APIS:
                for number, shown in enumerate(TALKS):
                    await talk(client, f"{api}-{number // 2}/{number % 2}", api, shown)

    limit = ["--limit-mm-per-prompt", '{"image": 4}']
    with start_vllm(*limit, model=model, **environment) as server:
        asyncio.run(talk_all(server.url))
        play(server.url, folder / "played", model)
    return request.param, model, folder / "ds", environment


def play(url, out, model):
    """Generate trajectories of the game of screens, two attempts at each of two tasks."""
    tasks, config = out.with_suffix(".jsonl"), out.with_suffix(".toml")
    screens.main(tasks)
    tasks.write_text("".join(tasks.read_text().splitlines(keepends=True)[:2]))
    settings = {
        "tasks": str(tasks),
        "model": str(model),
        "environment": "examples.screens:Screens",
        "engine": "vllm",
        "urls": [url],
        "history": "step_wise",
        "max_turns": 3,
        "group_size": 2,
        "max_response_tokens": 12,
    }
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    assert run(["generate", str(config), "--out", str(out)]) == 0


def test_recorded_pictures_are_at_the_tokens_that_the_engine_put_there(seen):
    _, model, dataset, _ = seen
    assert run(["validate", str(dataset)]) == 0
    tokenizer = load_tokenizer(model)
    rows = rollout_io.read(dataset).to_pylist()
    assert len(rows) == len(APIS) * sum(map(len, TALKS))
    names = {f"sha256:{hashlib.sha256(c).hexdigest()}": n for n, c in SCREENS.items()}
    for row in rows:
        assert row.get("error") is None
        number = 2 * int(row["instance_id"][-1]) + row["repetition_id"]
        shown = TALKS[number][: row["step_index"] + 1]
        assert [names[entry["sha256"]] for entry in row["pictures"]] == [n for n in shown if n]
        ids, covered = row["prompt_token_ids"], set()
        for entry in row["pictures"]:
            content = SCREENS[names[entry["sha256"]]]
            span = range(entry["start"], entry["start"] + entry["length"])
            expected = tokenizer.processor.expansion(content, "a picture").ids.tolist()
            assert ids[span.start : span.stop] == expected
            covered |= {*span}
        assert {at for at, token in enumerate(ids) if token in tokenizer.processor.pads} <= covered


def test_an_environment_shows_a_picture_a_turn_and_each_prompt_has_all_of_them(seen):
    _, _, dataset, _ = seen
    played = dataset.with_name("played")
    assert run(["validate", str(played)]) == 0
    rows = rollout_io.read(played).to_pylist()
    assert [row.get("error") for row in rows] == [None] * 12
    assert [len(row["pictures"]) for row in rows] == [1, 2, 3] * 4
    for row in rows:
        colours = row["instance_id"].split("-")
        assert colours == ["red", "red", colours[2]]
        assert len({entry["sha256"] for entry in row["pictures"]}) == len(row["pictures"])


@pytest.mark.parametrize("name", ["ds", "played"])
def test_training_recomputes_what_the_engine_sampled_at_every_token(name, seen, tmp_path):
    kind, model, dataset, environment = seen
    dataset, out = dataset.with_name(name), tmp_path / "run"
    command = [sys.executable, "-m", "rollout_io", "train", dataset, "--model", model, "--out", out]
    num_groups = 6 if name == "ds" else 2
    settings = dict.fromkeys(["batch.groups_per_batch", "batch.groups_per_mini_batch"], num_groups)
    settings |= {"batch.max_updates": 1, "run.record_tokens": "all"}
    if name == "played":  # a random model names no colour, so all returns are 0
        settings["loss.policy_loss_type"] = "cross_entropy"
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    subprocess.run([*map(str, command), "-q"], env=os.environ | environment, check=True)
    keys = ["trajectory_id", "step_index"]
    rows = pl.from_arrow(rollout_io.read(dataset, [*keys, "rollout_logprobs"]))
    trained = pl.read_parquet(token_record_path(out, 1)).join(rows, on=keys)
    assert len(trained) == len(rows)
    tokens = trained.select("loss_mask", "logprobs", "rollout_logprobs")
    tokens = tokens.explode(pl.all()).filter("loss_mask")
    differences = (tokens["logprobs"] - tokens["rollout_logprobs"]).abs()
    assert differences.null_count() == 0
    # In vLLM on a CPU, the tokens of a picture do not see the later ones, as Gemma's should.
    assert (differences.max() < 1e-4) == (kind != "gemma3")
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert line["num_trained_tokens"] == len(tokens) > 50
