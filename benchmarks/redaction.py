"""Measure how much later `rollouts record --redact` answers a call with a long context.

    python -m benchmarks.redaction [--tokens 20000] [--calls 25] [--rounds 3]

The engine answers at once, with the ids of a real tokenizer (.cache/smollm2). The context is the
project's code. Calls with and without `--redact` alternate by round; the output is the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rollout_io.retokenize.tokenizer import load_tokenizer
from tests.conftest import ROOT
from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import recording
from tests.helpers.token_engine import TokenEngine

MODEL = str(ROOT / ".cache" / "smollm2")


class Engine(TokenEngine):
    """Answers every prompt as one of these ids."""

    def __init__(self, tokenizer: Any, ids: list[int], num_calls: int) -> None:
        super().__init__(tokenizer, ["The answer is forty-two."] * num_calls)
        self._ids = ids

    def _rendered(self, _: Any) -> list[int]:
        return self._ids


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("tokens", 20_000), ("calls", 25), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    tokenizer = load_tokenizer(MODEL)
    code = "\n".join(path.read_text() for path in sorted(ROOT.glob("rollout_io/**/*.py")))
    ids = tokenizer.encode([code], ["code"])[0][: given.tokens]
    body = {"model": "m", "messages": [{"role": "user", "content": tokenizer.decode(ids)}]}
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(given.rounds):
        for redacts, times in found.items():
            engine = Engine(tokenizer, ids, given.calls)
            settings = {"redact": True, "tokenizer": MODEL} if redacts else {}
            with tempfile.TemporaryDirectory() as folder, running(engine) as url:
                times += asyncio.run(timed(Path(folder) / "ds", url, body, given.calls, settings))
    plain_ms, redacted_ms = (1000 * statistics.median(times) for times in found.values())
    added = f"added: {redacted_ms - plain_ms:.1f} ms"
    print(f"{len(ids):,} tokens: {plain_ms:.1f} ms, with --redact {redacted_ms:.1f} ms; {added}")


async def timed(
    out: Path, url: str, body: Any, num_calls: int, settings: dict[str, Any]
) -> list[float]:
    """Record sessions of one call; return the seconds that each call took."""
    times = []
    async with recording(out, url, **settings) as client:
        for number in range(num_calls):
            began = time.perf_counter()
            answer = await client.post(f"/s/a/{number}/v1/chat/completions", json=body)
            times.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text
            await client.post(f"/s/a/{number}/end", json={"reward": 1.0})
    return times


if __name__ == "__main__":
    main()
