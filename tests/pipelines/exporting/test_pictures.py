"""Exported samples show the pictures of the dataset, byte for byte, and TRL's collators take them."""

import base64
import hashlib
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from PIL import Image

import rollout_io
from pipelines.exporting.export import NOT_SHOWN, PICTURES, UNPLACED
from rollout_io.dataset.blobs import Blobs
from schemas.columns import PICTURES_TYPE
from schemas.errors import InvariantError
from tests.helpers.pair_helpers import attempts, exported, write
from tests.helpers.picture_models import png, save_family

WIDE, TALL = png(0), png(1, 40, 72)
PAD = 9


def digest(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def image(content):
    return {"type": "image", "blob": digest(content), "media_type": "image/png"}


def ask(*contents, role="user", text="See: "):
    return {"role": role, "content": [{"type": "text", "text": text}, *map(image, contents)]}


def entry(content, start, length=2):
    return {"sha256": content and digest(content), "start": start, "length": length}


CALL = {"type": "function", "function": {"name": "click", "arguments": {"x": 1}}}
CLICK = {"role": "assistant", "content": "I click.", "tool_calls": [CALL]}
FIRST = [1, PAD, PAD, 2]
SECOND = [*FIRST, 3, 4, PAD, PAD, 5]


def dataset_of(folder, given, messages, pictures, texts, contents=(WIDE, TALL)):
    """A dataset of `attempts`, with a list of messages, of pictures, and a text for each step."""
    table = attempts(
        *given,
        messages=pa.array(list(map(json.dumps, messages))),
        response_text=pa.array(texts),
        pictures=pa.array(pictures, PICTURES_TYPE),
    )
    for content in contents:
        Blobs.of(folder / "ds").add(content)
    return write(folder / "ds", table)


@pytest.fixture
def clicks(tmp_path):
    """An attempt of two steps, which see a screen each, and one of text alone."""
    given = [("a", 1.0, [(FIRST, [3]), (SECOND, [6])]), ("b", 1.0, [([1, 2], [3])])]
    messages = [[ask(WIDE)], [ask(WIDE), CLICK, ask(TALL, WIDE)], [ask()]]
    shown = [entry(WIDE, 1), entry(TALL, 6, 1), entry(WIDE, 7, 1)]
    return dataset_of(tmp_path, given, messages, [shown[:1], shown, None], ["one", "two", "three"])


@pytest.fixture
def forked(tmp_path):
    """Two attempts that see the same screen, and one that sees another at the same token ids."""
    steps = [(FIRST, [3]), (FIRST, [4]), (FIRST, [5])]
    given = [("a", value, [step]) for value, step in zip((1.0, 0.5, 0.0), steps, strict=True)]
    pictures = [[entry(one, 1)] for one in (WIDE, WIDE, TALL)]
    messages = [[ask(one)] for one in (WIDE, WIDE, TALL)]
    return dataset_of(tmp_path, given, messages, pictures, ["left", "right", "up"])


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    """Idefics3's, which prepares pictures with Pillow."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        save_family(tmp_path_factory.mktemp("m") / "m", "idefics3")
    )


def loaded(dataset, name, select=None):
    out = dataset.parent / f"{name}.parquet"
    rollout_io.export(dataset, out, name, select=select)
    cache = str(dataset.parent / "cache")
    return load_dataset("parquet", data_files=str(out), split="train", cache_dir=cache)


def digests(sample):
    return [digest(one["bytes"]) for one in sample["images"]]


def opened(*contents):
    return [Image.open(io.BytesIO(content)) for content in contents]


def test_samples_have_the_parts_and_the_files_of_the_dataset_in_order(clicks):
    done, (first, second) = exported(clicks, "sft_images")
    assert done.num_samples == 2
    sent = [json.loads(message) for message in first["messages"]]
    mark = {"type": "image"}
    assert [message["content"][1:] for message in sent] == [[mark], [], [mark, mark], []]
    assert sent[1]["tool_calls"] == [CALL]
    assert sent[3]["content"] == [{"type": "text", "text": "two"}]
    assert digests(first) == [digest(one) for one in (WIDE, TALL, WIDE)]
    assert second["images"] == []
    assert (first["trajectory_id"], first["return"]) == ("a_0", 1.0)


@pytest.mark.filterwarnings("ignore")  # of TRL and Transformers
def test_trls_collator_shows_the_model_the_pictures_of_the_dataset(clicks, processor):
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    samples = loaded(clicks, "sft_images")
    batch = DataCollatorForVisionLanguageModeling(processor)([samples[0], samples[1]])
    texts = [
        "<|im_start|>user\nSee: <image><|im_end|>\n<|im_start|>assistant\nI click.<|im_end|>\n"
        "<|im_start|>user\nSee: <image><image><|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n",
        "<|im_start|>user\nSee: <|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n",
    ]
    expected = processor(
        images=[opened(WIDE, TALL, WIDE), []], text=texts, padding=True, return_tensors="pt"
    )
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])


@pytest.mark.filterwarnings("ignore")  # of TRL and Transformers
def test_pairs_and_labels_show_the_picture_that_both_sides_saw(forked, processor):
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
    from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

    (pair,) = loaded(forked, "dpo_images")
    assert (pair["chosen_trajectory_id"], pair["rejected_trajectory_id"]) == ("a_0", "a_1")
    labels = loaded(forked, "kto_images", ">=0.5")
    batches = [
        (DataCollatorForVisionPreference(processor)([pair]), [WIDE, WIDE]),
        (DataCollatorForVisionUnpairedPreference(processor)(list(labels)), [WIDE, WIDE, TALL]),
    ]
    for batch, contents in batches:
        text = [processor.image_token] * len(contents)
        images = [[one] for one in opened(*contents)]
        expected = processor(images=images, text=text, padding=True, return_tensors="pt")
        assert torch.equal(batch["pixel_values"], expected["pixel_values"])


def test_prompts_whose_pictures_are_at_unknown_tokens_are_in_no_pair(tmp_path):
    given = [("a", 1.0, [(FIRST, [3])]), ("a", 0.0, [(FIRST, [4])]), ("a", 0.5, [([1], [2])])]
    given.append(("a", 0.0, [([1], [3])]))
    pictures = [[entry(WIDE, None, None)], [entry(TALL, None, None)], None, None]
    messages = [[ask(WIDE)], [ask(TALL)], [ask()], [ask()]]
    done, samples = exported(
        dataset_of(tmp_path, given, messages, pictures, ["a"] * 4), "dpo_images"
    )
    assert len(samples) == 1
    assert samples[0]["images"] == []
    assert done.left_out == {UNPLACED: 2}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(ask(WIDE, role="tool"), id="picture of a tool"),
        pytest.param(ask() | {"content": [image(WIDE) | {"type": "document"}]}, id="document"),
        pytest.param(
            ask()
            | {"content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]},
            id="picture not stored",
        ),
    ],
)
@pytest.mark.parametrize("name", ["sft_images", "openai_sft"])
def test_parts_that_trainers_do_not_show_leave_a_sample_out(message, name, tmp_path):
    given = [("a", 1.0, [([1], [2])]), ("b", 1.0, [([1], [2])])]
    is_stored = "blob" in message["content"][-1]
    pictures = [[entry(WIDE if is_stored else None, None, None)], None]
    messages = [[ask(), message], [ask()]]
    done, samples = exported(dataset_of(tmp_path, given, messages, pictures, ["a"] * 2), name)
    assert len(samples) == 1
    assert done.left_out == {NOT_SHOWN: 1}


@pytest.mark.parametrize("name", ["sft_images", "openai_sft", "kto_images", "verl"])
def test_a_picture_that_is_missing_stops_the_export(clicks, name):
    Blobs.of(clicks).remove([digest(TALL)])
    with pytest.raises(InvariantError) as error:
        exported(clicks, name, ">=0" if name != "verl" else None)
    assert error.value.rule == "picture_reference"
    assert digest(TALL) in str(error.value)


def test_openais_data_has_the_files_in_its_messages(clicks):
    _, (first, second) = exported(clicks, "openai_sft")
    parts = [p for m in first["messages"] if isinstance(m["content"], list) for p in m["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    sent = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    assert sent == [WIDE, TALL, WIDE]
    assert second["messages"][0] == {"role": "user", "content": "See: "}


@pytest.mark.parametrize("name", ["sft", "sharegpt", "sft_tokens", "kto"])
def test_formats_without_pictures_name_those_that_have_them(clicks, name):
    done, samples = exported(clicks, name, ">=0")
    assert len(samples) == 1
    assert done.left_out == {PICTURES: 1}
    assert "sft_images" in done.text()


def test_verls_outputs_have_the_files_in_the_order_of_the_tokens(clicks):
    """verl reads `multi_modal_data["images"]` in `_compute_multi_modal_inputs`.

    https://github.com/verl-project/verl/blob/v0.9.1/verl/experimental/agent_loop/agent_loop.py
    """
    out = clicks.parent / "verl.parquet"
    rollout_io.export(clicks, out, "verl")
    rows = pq.read_table(out).to_pylist()
    found = [row["multi_modal_data"]["images"] for row in rows]
    assert [digest(one["bytes"]) for one in found[1]] == [digest(o) for o in (WIDE, TALL, WIDE)]
    assert [one and len(one) for one in found] == [1, 3, None]
    assert all(one.keys() == {"bytes", "path"} for one in found[1])
    assert sum(token == PAD for token in rows[1]["prompts"]) == 4


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of TRL and Transformers
@pytest.mark.parametrize(
    ("name", "trainer", "config"),
    [
        ("sft_images", "SFTTrainer", "SFTConfig"),
        ("dpo_images", "DPOTrainer", "DPOConfig"),
        ("kto_images", "KTOTrainer", "KTOConfig"),
    ],
)
def test_trls_trainers_make_two_steps_on_the_files_unchanged(
    name, trainer, config, forked, tmp_path
):
    import trl
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tests.helpers.served_models import save_served

    folder = save_served("idefics3", tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
    settings |= {"report_to": [], "save_strategy": "no", "max_length": None, "learning_rate": 1e-3}
    run = getattr(trl, trainer)(
        model,
        args=getattr(trl, config)(output_dir=str(tmp_path / "run"), **settings),
        train_dataset=loaded(forked, name),
        processing_class=AutoProcessor.from_pretrained(folder),
    )
    run.train()
    assert run.state.global_step == 2
    changed = {n for n, p in model.named_parameters() if not before[n].equal(p)}
    assert any("vision" in parameter for parameter in changed)
