"""`make demo`: from real vLLM logs to a policy update, each stage a command you can run yourself.

The logs are 205 calls of four kinds of agent harness to a vLLM server with SmolLM2-135M-Instruct,
which adds up prices in a shop (examples/shop.calls.jsonl), and one reward per trajectory.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = Path("runs/demo")
STEPS, MERGED, CHOSEN, TRAINED = (RUN / name for name in ("steps", "merged", "chosen", "train"))
MODEL = Path(".cache/smollm2")

STAGES = (
    (
        "Convert the harness's logs",
        "One row per LLM call, with the ids the engine saw and sampled, compared with the logged text.",
        f"rollouts convert examples/shop.calls.jsonl --format calls "
        f"--rewards examples/shop.rewards.jsonl --tokenizer {MODEL} --out {STEPS}",
    ),
    (
        "Validate",
        "Check every named invariant, every token and every page checksum.",
        f"rollouts validate {STEPS}",
    ),
    ("Look at the numbers", "Counts, lengths and rewards.", f"rollouts stats {STEPS}"),
    (
        "Look at a trajectory",
        "The prompt of each step, its sampled tokens, and the tokens to train on.",
        f'rollouts inspect {STEPS} --where "return > 0 and num_turns = 2" --limit 1',
    ),
    (
        "Merge",
        "Steps that continue each other token for token become one sequence; no token is lost.",
        f"rollouts merge {STEPS} --out {MERGED}",
    ),
    (
        "Choose what to train on",
        "One group whose attempts have different rewards, to keep this short.",
        f"rollouts filter {MERGED} --where \"instance_id = 'shop-5'\" --out {CHOSEN}",
    ),
    (
        "Train one update on the CPU",
        "GRPO on the four attempts of the group (examples/demo.toml).",
        f"rollouts train {CHOSEN} --model {MODEL} --out {TRAINED} --config examples/demo.toml",
    ),
    (
        "Compare the two policies with plain Transformers",
        "Did rewarded responses become more likely?",
        f"python examples/compare_policies.py {CHOSEN} {MODEL} {TRAINED}",
    ),
    (
        "Draw the dataset",
        "Lengths, rewards and drift by turn, as a picture.",
        f"rollouts plot {STEPS} --out {RUN}/shop.png",
    ),
)


def main() -> None:
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    begin = time.monotonic()
    for number, (title, meaning, command) in enumerate(STAGES, start=1):
        print(f"\n=== {number}/{len(STAGES)} {title}\n    {meaning}\n    $ {command}\n", flush=True)
        start = time.monotonic()
        run(command)
        print(f"    ({time.monotonic() - start:.1f} s)", flush=True)
    print(f"\nDone in {time.monotonic() - begin:.0f} s.")
    print(f"The picture: {RUN}/shop.png; the trained model: {TRAINED}/checkpoints/")


def run(command: str) -> None:
    """Run one stage in the environment of this interpreter; exit the demo if the stage fails."""
    name, *arguments = shlex.split(command)
    program = Path(sys.executable) if name == "python" else Path(sys.executable).with_name(name)
    code = subprocess.run([program, *arguments], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"This stage failed with exit code {code}.")


if __name__ == "__main__":
    main()
