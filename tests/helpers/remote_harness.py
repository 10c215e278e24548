"""A harness on another machine: its server plays a task against the policy's endpoint.

`python -m tests.helpers.remote_harness PORT` starts it; `solve` is the harness of the loop, which asks it.
"""

import json
import os
import socket
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def posted(url, body, **headers):
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def solve(endpoint, task):
    """Have the machine at REMOTE_HARNESS play the task; longer answers earn more."""
    access = {"base_url": endpoint.base_url, "model": endpoint.model, "key": endpoint.api_key}
    return posted(os.environ["REMOTE_HARNESS"], access | {"prompt": task.prompt})


class Player(BaseHTTPRequestHandler):
    def do_POST(self):
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = {"model": task["model"], "messages": task["prompt"]}
        key = {"Authorization": f"Bearer {task['key']}"}
        answer = posted(f"{task['base_url']}/chat/completions", body, **key)
        text = answer["choices"][0]["message"]["content"] or ""
        here = {"played_on": float(socket.gethostname().removeprefix("machine"))}
        sent = json.dumps({"reward": len(text) / 100, "metrics": here}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Player).serve_forever()
