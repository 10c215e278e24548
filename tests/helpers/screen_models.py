"""Tiny models that see pictures and read text, and environments that return pictures."""

import base64
import json

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer

from examples import screens
from tests.helpers.picture_models import png, save_family
from tests.helpers.vision_models import CONFIGS, PROCESSORS

HERE = "tests.helpers.screen_models"
CONTEXT = 1024
_TOKENS = {
    "image_token_id": ("<|image_pad|>", "<IMG_CONTEXT>", "<image>"),
    "image_token_index": ("<image_soft_token>",),
    "boi_token_index": ("<start_of_image>",),
    "eoi_token_index": ("<end_of_image>",),
    "video_token_id": ("<|video_pad|>",),
    "vision_start_token_id": ("<|vision_start|>",),
    "vision_end_token_id": ("<|vision_end|>",),
}


def save_seeing(folder, kind="qwen2_5_vl", seed=0):
    """A directory with weights, a byte-level tokenizer, a chat template and an image processor."""
    save_family(folder, kind)
    name, settings = PROCESSORS[kind]
    getattr(transformers, name)(**settings).save_pretrained(folder)
    file = folder / "processor_config.json"
    processor = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            processor | {"image_seq_length": 4} if "image_seq_length" in processor else processor
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab = tokenizer.get_vocab()
    config = dict(CONFIGS[kind])
    for key in _TOKENS.keys() & config.keys():
        config[key] = next(vocab[token] for token in _TOKENS[key] if token in vocab)
    text = {"vocab_size": len(vocab), "max_position_embeddings": CONTEXT}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config["text_config"] = config["text_config"] | text
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return str(folder)


def part_of(content):
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def screen(seed, text="Now?"):
    """A message that shows a picture of noise, and asks."""
    parts = [part_of(png(seed, 24, 16)), {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


class Screens:
    """Shows a screen at the start and after each answer; the reward is in what was said."""

    num_turns = 3

    def __init__(self, env_config=None, extras=None):
        self.env_config, self.extras, self.turn = env_config, extras or {}, 0

    def init(self, prompt):
        return [*prompt, screen(0)], {}

    def step(self, action):
        self.turn += 1
        return {
            "observations": [screen(self.turn % 2)],
            "reward": len(action) % 5 / 4,
            "done": self.turn >= self.num_turns,
        }


class Late(Screens):
    """Shows the first screen after the first answer, where the task says so."""

    def init(self, prompt):
        return (prompt, {}) if self.extras.get("late", True) else super().init(prompt)


class Odd(Screens):
    """Shows what `shows` says after the first answer."""

    def step(self, action):
        result = super().step(action)
        parts = {
            "text": [part_of(b"no picture")],
            "line": [part_of(png(0, 1, 300))],
            "http": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}],
            "file": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}],
            "base64": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}],
            "empty": [{"type": "image_url", "image_url": {}}],
            "sound": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
            "bytes": [png(0, 24, 16)],
            "literal": [part_of(png(0, 24, 16)), {"type": "text", "text": "<|image_pad|>"}],
        }[self.extras["shows"]]
        return result | {"observations": [{"role": "user", "content": parts}]}


class Scored(screens.Screens):
    """The screens of the example; the reward is in how long the answer is."""

    def step(self, action):
        return super().step(action) | {"reward": len(action) % 5 / 4}
