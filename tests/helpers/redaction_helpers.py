"""Secrets in recorded calls, and what the files of a recorder say."""

import json

import pyarrow.parquet as pq

import rollout_io
from tests.helpers.fake_engine import event
from tests.helpers.token_engine import TokenEngine

PATTERN = {"key": r"KEY-\w{12}", "word": r"password: (\w{10})"}
ASKED, CALLED, RESULT = "KEY-asked000cafe", "KEY-called00cafe", "KEY-result00cafe"
SAID, LATE = "KEY-said0000cafe", "hunter2w0rd"[:10]
SECRETS = (ASKED, CALLED, RESULT, SAID)


class Streamer(TokenEngine):
    """Sends one token a chunk, so that a chunk has only a part of a secret."""

    async def _chunks(self, made, send):
        (choice,) = made["choices"]
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        is_chat = "message" in choice
        ids, reason = choice["token_ids"], choice["finish_reason"]
        message = choice.get("message") or {}
        said = [message.get("reasoning"), message.get("content"), *message.get("tool_calls", ())]
        if is_chat:
            deltas = [{"reasoning": c} for c in said[0] or ""]
            deltas += [{"content": c} for c in said[1] or ""]
            deltas += [{"tool_calls": [call | {"index": i}]} for i, call in enumerate(said[2:])]
        else:
            deltas = list(choice["text"])
        body = b""
        for i in range(max(len(ids), len(deltas))):
            part = {"index": 0, "token_ids": ids[i : i + 1], "finish_reason": None}
            part["logprobs"] = self._logprobs(choice["logprobs"], i, is_chat)
            delta = deltas[i] if i < len(deltas) else ({} if is_chat else "")
            part["delta" if is_chat else "text"] = delta
            top = {"prompt_token_ids": made.get("prompt_token_ids")} if i == 0 else {}
            if not is_chat and i == 0:
                part["prompt_token_ids"] = choice["prompt_token_ids"]
            body += event({"id": "x", "model": made["model"], "choices": [part], **top})
        end = {
            "index": 0,
            "finish_reason": reason,
            ("delta" if is_chat else "text"): {} if is_chat else "",
        }
        body += event({"id": "x", "model": made["model"], "choices": [end]})
        body += event({"choices": [], "usage": made["usage"]}) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": body})

    def _logprobs(self, logprobs, i, is_chat):
        if is_chat:
            return {"content": logprobs["content"][i : i + 1]}
        return {name: values[i : i + 1] for name, values in logprobs.items()}


def on_disk(out, tokenizer):
    """All bytes below a directory, with the texts of Parquet files and their decoded ids."""
    texts = []
    for path in sorted(out.parent.rglob("*")):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            texts += [str(pq.read_metadata(path).metadata), json.dumps(table.to_pylist())]
            for row in rollout_io.read(path).to_pylist():
                texts.append(tokenizer.decode(row["prompt_token_ids"] + row["response_ids"]))
        elif path.is_file():
            texts.append(path.read_bytes().decode("utf-8", "replace"))
            if path.suffix != ".jsonl":
                continue
            for line in texts[-1].splitlines():
                response = json.loads(line).get("response", {})
                chunks = response if isinstance(response, list) else [response]
                choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
                for holder in (*chunks, *choices):
                    ids = [holder.get("prompt_token_ids") or [], holder.get("token_ids") or []]
                    texts.append(tokenizer.decode(ids[0] + ids[1]))
    return str(out) + "\n".join(texts).replace("\\", "")
