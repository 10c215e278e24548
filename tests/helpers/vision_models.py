"""Tiny models that see pictures, with their image processors, and rows that show pictures."""

import hashlib
import inspect
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from rollout_io.dataset.blobs import Blobs, stores_of
from tests.helpers.trainer_helpers import step, write_dataset
from trainer.batches.pictures import PictureReader
from trainer.models.pictures import num_features

VOCAB, SHOWS, BEGIN, END, SEPARATOR = 64, 60, 62, 63, 50
"""Size of the vocabulary; ids of a picture's placeholder, of what stands around it and within it."""
SIZES = {"wide": (40, 24), "tall": (16, 32), "small": (16, 16)}
"""Width and height of the pictures, by name."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_GRID = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_IDS = {"image_token_id": SHOWS, "tie_word_embeddings": False}
_GRID_IDS = _IDS | {
    "video_token_id": 61,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_GRID_PROCESSOR = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
_TILES = {
    "text_config": _TEXT | {"model_type": "llama"},
    "vision_config": _VISION
    | {"max_image_size": {"longest_edge": 16}, "size": {"longest_edge": 32}},
    "scale_factor": 2,
    "pad_token_id": 0,
    **_IDS,
}
_TILES_PROCESSOR = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
CONFIGS = {
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _ROPE, "use_sliding_window": False},
        "vision_config": _GRID | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        **_GRID_IDS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | {"rope_parameters": _ROPE | {"mrope_interleaved": True}},
        "vision_config": _GRID
        | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_GRID_IDS,
    },
    "gemma3": {
        "text_config": _TEXT
        | {
            "sliding_window": 3,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": SHOWS,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        **_IDS,
    },
    "smolvlm": _TILES,
    "idefics3": _TILES,
}
PROCESSORS = {
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", _GRID_PROCESSOR),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", _GRID_PROCESSOR),
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 16, "width": 16}}),
    "internvl": (
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 4},
    ),
    "smolvlm": ("SmolVLMImageProcessorPil", _TILES_PROCESSOR),
    "idefics3": ("Idefics3ImageProcessorPil", _TILES_PROCESSOR),
}
TILED = {"smolvlm", "idefics3"}
"""Families that put tokens of text between the tiles of a picture."""
FRAMED = {"gemma3", "internvl"}
"""Families whose spans include the tokens before and after a picture."""
Part = str | list[int]
"""The name of a picture, or tokens of text."""


def save_model(kind, folder):
    """A model whose weights make every token matter, with its image processor."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**CONFIGS[kind])
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    name, settings = PROCESSORS[kind]
    getattr(transformers, name)(**settings).save_pretrained(folder)
    return str(folder)


def plain_model(folder):
    """The whole model of Transformers, to forward rows one by one."""
    load = AutoModelForImageTextToText.from_pretrained
    return load(folder, attn_implementation="eager").eval()


@cache
def picture_file(name):
    """A PNG file of noise."""
    width, height = SIZES[name]
    random = np.random.default_rng(sum(map(ord, name)))
    return encoded(Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)))


def encoded(picture):
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def digest(name):
    return "sha256:" + hashlib.sha256(picture_file(name)).hexdigest()


def store_pictures(dataset, names=tuple(SIZES)):
    for name in names:
        Blobs.of(dataset).add(picture_file(name))


class Album:
    """The pictures as one model sees them.

    Attributes:
        reader: Reads the pictures of the dataset in `folder`.
        inputs: Prepared pictures, by name.
        num_features: Number of features of each picture, by name.
    """

    def __init__(self, kind, model, folder):
        store_pictures(folder)
        write_dataset(folder, [step("none", 0, 0, [1], [2], is_last_step=True, reward=0.0)])
        self.kind = kind
        self.reader = PictureReader(model, stores_of(folder))
        plain = plain_model(model)
        self.inputs = {name: self.reader.load([digest(name)])[0] for name in SIZES}
        self.num_features = {n: num_features(plain, one) for n, one in self.inputs.items()}

    def shown(self, parts):
        """Tokens, and the entries of `pictures`."""
        ids = []
        pictures = []
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            number = self.num_features[part]
            tokens = [SHOWS] * number
            if self.kind in TILED and number > 4:
                tokens = [SEPARATOR, *[SHOWS] * 4] * (number // 4)
            start = len(ids) + (self.kind not in FRAMED)
            ids += [BEGIN, *tokens, END]
            end = len(ids) - (self.kind not in FRAMED)
            pictures.append({"sha256": digest(part), "start": start, "length": end - start})
        return ids, pictures

    def row(self, prompt, response):
        """Columns of a row; pictures of the response are observed, its text is sampled."""
        (before, _), (ids, pictures) = self.shown(prompt), self.shown([*prompt, *response])
        sampled = [[not isinstance(part, str)] * len(self.shown([part])[0]) for part in response]
        return {
            "prompt_token_ids": before,
            "response_ids": ids[len(before) :],
            "loss_mask": [is_sampled for part in sampled for is_sampled in part],
            "pictures": pictures,
        }

    def logprobs(self, model, parts, num_response):
        """[num_response] log-probabilities by a plain forward pass of the whole model."""
        ids = torch.tensor([self.shown(parts)[0]])
        inputs = {}
        accepted = inspect.signature(model.forward).parameters
        if names := [part for part in parts if isinstance(part, str)]:
            prepared = [self.inputs[name] for name in names]
            dim = int(prepared[0]["pixel_values"].ndim == 5)
            keys = [key for key in prepared[0] if key in accepted]
            inputs = {key: torch.cat([one[key] for one in prepared], dim) for key in keys}
            types = {"token_type_ids", "mm_token_type_ids"} & accepted.keys()
            inputs |= dict.fromkeys(types, (ids == SHOWS).long())
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
        by_token = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return by_token[-num_response:]


class Seen(NamedTuple):
    """A tiny model of a family, with its pictures."""

    path: str
    album: Album
    plain: Any

    @classmethod
    def saved(cls, kind, folder):
        path = save_model(kind, folder / "model")
        return cls(path, Album(kind, path, folder / "ds"), plain_model(path))
