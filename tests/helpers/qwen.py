"""Qwen3's tokenizer and chat templates, from installed packages that carry them."""

import base64
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

BASE_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end"]
VISION += ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
PLAIN += ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"]
PLAIN += ["<think>", "</think>"]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def installed(package, *path):
    spec = find_spec(package)
    file = Path(spec.submodule_search_locations[0]).joinpath(*path) if spec else None
    if file is None or not file.is_file():
        pytest.skip(f"no {'/'.join(path)} of the package {package}: pip install {package}")
    return file


def chat_template_of(name):
    return installed("trl", "chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


def save_qwen3(folder, template, num_tokens=None):
    """Qwen3's tokenizer as a directory that `load_tokenizer` takes; a tenth of its tokens load at once."""
    for name, content in qwen3_files(num_tokens).items():
        (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@cache
def qwen3_files(num_tokens=None):
    """Names and contents; they take seconds to make, so each process makes them once."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url):
            lines = Path(tiktoken_url).read_bytes().split(b"\n")
            pairs = (line.split() for line in lines[:num_tokens] if line)
            return {base64.b64decode(token): int(rank) for token, rank in pairs}

    ranks = installed("dashscope", "resources", "qwen.tiktoken")
    fast = Converter(str(ranks), pattern=PATTERN, extra_special_tokens=BASE_SPECIAL).converted()
    fast.add_special_tokens([f"<|{name}|>" for name in VISION])
    fast.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
