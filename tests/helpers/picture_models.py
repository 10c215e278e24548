"""Directories of tiny models that see: a byte-level tokenizer and a real image processor each."""

import io
import json

import numpy as np

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}PLACEHOLDER{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

CHAT = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
IDEFICS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *TILES]
GEMMA = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
INTERN = ["<img>", "<IMG_CONTEXT>", "</img>", "<video>"]
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


def png(seed=0, width=90, height=60, form="PNG"):
    """The bytes of a picture of random blocks."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, form)
    return file.getvalue()


def _qwen(kind):
    from transformers import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    return images, QWEN, "<|vision_start|><|image_pad|><|vision_end|>", kind, {}, {}


def _tiles(kind, images):
    more = {"image_token": "<image>", "fake_image_token": IDEFICS[0]}
    more |= {"global_image_token": "<global-img>", "end_of_utterance_token": IDEFICS[3]}
    return images, IDEFICS, "<image>", kind, {"image_seq_len": 4}, more


def _idefics3():
    from transformers import Idefics3ImageProcessorPil

    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    return _tiles("Idefics3Processor", Idefics3ImageProcessorPil(**sizes))


def _smolvlm():
    from transformers import SmolVLMImageProcessorPil

    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    return _tiles("SmolVLMProcessor", SmolVLMImageProcessorPil(**sizes))


def _gemma3():
    from transformers import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    more = {"boi_token": GEMMA[0], "image_token": GEMMA[1], "eoi_token": GEMMA[2]}
    return images, GEMMA, GEMMA[0], "Gemma3Processor", {"image_seq_length": 6}, more


def _internvl():
    from transformers import GotOcr2ImageProcessorPil

    images = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    more = {"start_image_token": INTERN[0], "end_image_token": INTERN[2]}
    more |= {"context_image_token": INTERN[1], "video_token": INTERN[3]}
    return images, INTERN, INTERN[1], "InternVLProcessor", {"image_seq_length": 3}, more


def _pixtral():
    from transformers import PixtralImageProcessorPil

    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=16)
    return images, PIXTRAL, "[IMG]", "PixtralProcessor", {"patch_size": 16}, {}


FAMILIES = {
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen("Qwen3VLProcessor"),
    "gemma3": _gemma3,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
}


def save_family(folder, name="qwen2_5_vl"):
    """Save a directory of one of `FAMILIES`: tokenizer, chat template and image processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    images, tokens, placeholder, kind, settings, named = FAMILIES[name]()
    bytes_ = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(bytes_, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([*CHAT, *tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", placeholder))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **settings}))
    return folder
