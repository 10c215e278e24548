"""Tiny models that see pictures, whole: weights, tokenizer, chat template and image processor."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.helpers.picture_models import save_family
from tests.helpers.vision_models import CONFIGS, PROCESSORS

WIDTH, HEADS, HEAD = 64, 2, 32
"""Sizes of the text model; vLLM has no kernel for heads that are narrower."""
TOKENS = {
    "image_token_id": "<image>",
    "image_token_index": "<image_soft_token>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
PADS = {"qwen2_5_vl": "<|image_pad|>", "qwen3_vl": "<|image_pad|>", "internvl": "<IMG_CONTEXT>"}
"""Placeholders of the families whose `image_token_id` is another token than `TOKENS` has."""
NUM_FEATURES = {"gemma3": 4, "internvl": 4}
"""Families whose processor is told how many features a picture (or a tile of it) has."""


def save_served(kind, folder):
    """Save a model that an engine can serve: its answers are noise, which depends on the pictures."""
    save_family(folder, kind)
    name, settings = PROCESSORS[kind]
    getattr(transformers, name)(**settings).save_pretrained(folder)
    if kind == "gemma3":
        _save_newlines(folder)
    if kind in NUM_FEATURES:
        file = folder / "processor_config.json"
        stored = json.loads(file.read_text()) | {"image_seq_length": NUM_FEATURES[kind]}
        file.write_text(json.dumps(stored))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = CONFIG_MAPPING[kind](**_settings(kind, tokenizer))
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
        _answers_in_letters(model, tokenizer)
    model.save_pretrained(folder)
    if kind == "gemma3":
        _rename_as_in_gemmas_files(folder / "model.safetensors")
    return folder


def _rename_as_in_gemmas_files(file):
    """vLLM reads the names of Gemma's own files; new models of Transformers are saved with others."""
    named = load_file(file).items()
    new = {n.replace("vision_tower.", "vision_tower.vision_model."): value for n, value in named}
    save_file(new, file, {"format": "pt"})


def _save_newlines(folder):
    """Save Gemma's kind of tokenizer: characters, and up to four newlines as one token, which vLLM wants."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = ["\n" * number for number in range(1, 5)]
    characters = [*lines, *map(chr, range(32, 127))]
    fast = Tokenizer(
        models.BPE(
            {text: number for number, text in enumerate(characters)},
            [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")],
        )
    )
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([*tokenizer.get_added_vocab()])
    named = {
        name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
    }
    PreTrainedTokenizerFast(tokenizer_object=fast, **named).save_pretrained(folder)


def _answers_in_letters(model, tokenizer):
    """Let a model sample letters, spaces and the end, whose text has the same tokens in the next turn.

    One value of all embeddings of text is far from 0, and the head counts it against other tokens.
    """
    ids = tokenizer.get_vocab()
    letters = [text for text in ids if len(text) == 1 and text in "abcdefghijklmnopqrstuvwxyzĠ "]
    wanted = [*map(ids.get, letters), tokenizer.eos_token_id]
    model.get_input_embeddings().weight[:, 0] = 4
    head = model.get_output_embeddings().weight
    head[:, 0] = -40
    head[wanted, 0] = 0


def _settings(kind, tokenizer):
    """The configuration of `CONFIGS` with the ids of a tokenizer, and heads that vLLM has."""
    ids, end = tokenizer.get_vocab(), tokenizer.eos_token_id
    names = TOKENS | ({"image_token_id": PADS[kind]} if kind in PADS else {})
    settings = CONFIGS[kind] | {k: ids[t] for k, t in names.items() if k in CONFIGS[kind]}
    text = settings["text_config"] | {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "head_dim": HEAD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if "mrope_section" in (rope := text.get("rope_parameters") or {}):
        text["rope_parameters"] = rope | {"mrope_section": [4, 6, 6]}
    vision = settings["vision_config"]
    if "out_hidden_size" in vision:
        vision = vision | {"out_hidden_size": WIDTH}
    pad = {"pad_token_id": tokenizer.pad_token_id} if "pad_token_id" in settings else {}
    return settings | {"text_config": text, "vision_config": vision} | pad
