"""Measure how much later `rollouts record --redact` answers the calls of a long conversation.

    python -m benchmarks.redaction [--tokens 20000] [--calls 15] [--rounds 5]

The engine answers at once, with the ids of a real tokenizer (.cache/smollm2). The context is the
project's code, and grows by 200 tokens a call. Conversations with and without `--redact` alternate;
the output is the medians of first calls, and of the others.
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

GROWTH = 200
"""Tokens by which the context grows from call to call."""
MODEL = str(ROOT / ".cache" / "smollm2")


class Engine(TokenEngine):
    """Answers prompts as the first ones of these ids, 200 more in each call."""

    def __init__(self, tokenizer: Any, ids: list[int], num_calls: int) -> None:
        super().__init__(tokenizer, ["The answer is forty-two."] * num_calls)
        self._ids, self._num = ids, len(ids) - GROWTH * num_calls

    def _rendered(self, _: Any) -> list[int]:
        self._num += GROWTH
        return self._ids[: self._num]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("tokens", 20_000), ("calls", 15), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    tokenizer = load_tokenizer(MODEL)
    code = "\n".join(path.read_text() for path in sorted(ROOT.glob("rollout_io/**/*.py")))
    ids = tokenizer.encode([code], ["code"])[0][: given.tokens + GROWTH * given.calls]
    texts = [tokenizer.decode(ids[: len(ids) - GROWTH * n]) for n in range(given.calls)][::-1]
    bodies = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in texts]
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(given.rounds):
        for redacts, times in found.items():
            engine = Engine(tokenizer, ids, given.calls)
            settings = {"redact": True, "tokenizer": MODEL} if redacts else {}
            with tempfile.TemporaryDirectory() as folder, running(engine) as url:
                times.append(asyncio.run(timed(Path(folder) / "ds", url, bodies, settings)))
    for name, calls in (("first call", slice(1)), ("next calls", slice(1, None))):
        plain_ms, redacted_ms = (
            1000 * statistics.median(time for times in rounds for time in times[calls])
            for rounds in found.values()
        )
        added = f"added: {redacted_ms - plain_ms:.1f} ms"
        print(f"{name}: {plain_ms:.1f} ms, with --redact {redacted_ms:.1f} ms; {added}")


async def timed(out: Path, url: str, bodies: list[Any], settings: dict[str, Any]) -> list[float]:
    """Record a conversation; return the seconds that each call took."""
    times = []
    async with recording(out, url, **settings) as client:
        for body in bodies:
            began = time.perf_counter()
            answer = await client.post("/s/a/0/v1/chat/completions", json=body)
            times.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text
        await client.post("/s/a/0/end", json={"reward": 1.0})
    return times


if __name__ == "__main__":
    main()
