"""Serve a corpus with BM25, over the HTTP interface of Search-R1's retriever.

    python examples/retriever.py corpus.jsonl --port 8642

The corpus is JSON Lines of {"contents": TEXT}. POST /retrieve takes {"query": TEXT, "topk": NUMBER}
and returns {"result": [[{"document": {"contents": TEXT}, "score": NUMBER}, ...]]}, best match first. The
result is empty if nothing matches.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

K1, B = 1.5, 0.75
MAX_REQUEST_BYTES = 1 << 20


class BM25:
    """Okapi BM25 over documents in memory."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = documents
        self.counts = [Counter(words(document)) for document in documents]
        self.mean_length = sum(map(Counter.total, self.counts)) / len(documents)
        num_with = Counter(word for counts in self.counts for word in counts)
        self.idf = {
            w: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for w, n in num_with.items()
        }

    def search(self, query: str, topk: int) -> list[tuple[str, float]]:
        """Return up to `topk` documents that share a word with the query, with scores, best first."""
        scores = [self._score(words(query), counts) for counts in self.counts]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:topk]
        return [(self.documents[i], scores[i]) for i in best if scores[i] > 0]

    def _score(self, query: Sequence[str], counts: Counter[str]) -> float:
        damping = K1 * (1 - B + B * counts.total() / self.mean_length)
        found = (word for word in query if word in counts)
        return sum(self.idf[w] * counts[w] * (K1 + 1) / (counts[w] + damping) for w in found)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class _Handler(BaseHTTPRequestHandler):
    """Handles one request per connection."""

    timeout = 10
    """Seconds to wait for a client."""

    def __init__(self, index: BM25, *arguments: Any) -> None:
        self.index = index
        super().__init__(*arguments)

    def do_POST(self) -> None:
        if self.path != "/retrieve":
            return self._answer(404, {"error": f"Unknown path: {self.path}."})
        try:
            query, topk = self._request()
        except (TypeError, ValueError, KeyError) as error:
            expected = '{"query": text, "topk": number >= 1}'
            return self._answer(400, {"error": f"Expected {expected}: {error}."})
        hits = self.index.search(query, topk)
        found = [{"document": {"contents": text}, "score": score} for text, score in hits]
        return self._answer(200, {"result": [found] if found else []})

    def _request(self) -> tuple[str, int]:
        length = int(self.headers["Content-Length"])
        if not 0 <= length <= MAX_REQUEST_BYTES:
            raise ValueError(f"the body has {length} bytes")
        body = json.loads(self.rfile.read(length))
        query, topk = body["query"], body["topk"]
        if not isinstance(query, str) or type(topk) is not int or topk < 1:
            raise ValueError(f"query {query!r:.60}, topk {topk!r:.60}")
        return query, topk

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Do not log requests."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128


@contextmanager
def serving(documents: Sequence[str], port: int) -> Iterator[str]:
    """Serve documents on 127.0.0.1 until the block ends, then close all threads and sockets.

    Args:
        documents: Documents to serve; at least one.
        port: Port; 0 picks a free one.

    Yields:
        The URL to post to.

    Raises:
        SystemExit: The port is in use.
    """
    try:
        server = _Server(("127.0.0.1", port), partial(_Handler, BM25(documents)))
    except OSError as error:
        sys.exit(f"Cannot listen on port {port}: {error.strerror}. --port 0 picks a free one.")
    with server:
        thread = threading.Thread(target=server.serve_forever, args=[0.1])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
        finally:
            server.shutdown()
            thread.join()


def read_corpus(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["contents"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a corpus to search environments.")
    parser.add_argument("corpus", type=Path, help='JSON Lines of {"contents": text}.')
    parser.add_argument("--port", type=int, default=8642, help="Port; 0 picks a free one.")
    arguments = parser.parse_args()
    documents = read_corpus(arguments.corpus)
    with serving(documents, arguments.port) as url, suppress(KeyboardInterrupt):
        print(f"{len(documents)} documents at {url}; press Ctrl-C to stop", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
