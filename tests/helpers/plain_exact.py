"""Plain readers of the formats of exact tokens: the ids, masks and log-probabilities of rows."""

import json
import math
import re
from pathlib import Path

from tests.helpers.plain_text import conversation, responses_run, texts_of
from tests.helpers.plain_values import (
    Expected,
    NotCompared,
    Plain,
    all_lines,
    document_at,
    flags,
    floats,
    ids,
    number,
    record_at,
)


def _choices(answer):
    """The choices of an OpenAI-compatible answer, whole or streamed."""
    if isinstance(answer, str):
        answer = answer.splitlines()
    if isinstance(answer, list):
        answer = _joined([_chunk(piece) for piece in answer])
    choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
    shared = answer.get("prompt_token_ids")
    return [_of_choice(choice, shared) for choice in choices]


def _chunk(piece):
    if isinstance(piece, dict):
        return piece
    data = piece.strip().removeprefix("data:").strip()
    is_data = data and data != "[DONE]" and not data.startswith((":", "event:", "id:", "retry:"))
    return json.loads(data) if is_data else {}


def _joined(chunks):
    prompt, by_index = None, {}
    for chunk in chunks:
        prompt = chunk.get("prompt_token_ids") if prompt is None else prompt
        for piece in chunk.get("choices") or ():
            whole = by_index.setdefault(piece.get("index", 0), {"index": piece.get("index", 0)})
            for name in ("prompt_token_ids", "token_ids"):
                given = piece.get(name)
                if given is not None:
                    before = [] if name == "prompt_token_ids" else whole.get(name, [])
                    whole[name] = [*before, *given]
            logprobs = piece.get("logprobs") or {}
            for name in ("content", "token_logprobs"):
                if logprobs.get(name) is not None:
                    known = whole.setdefault("logprobs", {})
                    known[name] = [*known.get(name, []), *logprobs[name]]
    return {"prompt_token_ids": prompt, "choices": list(by_index.values())}


def _of_choice(choice, shared):
    prompt = ids(choice.get("prompt_token_ids") if shared is None else shared)
    found = choice.get("token_ids")
    if found is None:
        found = choice["provider_specific_fields"]["token_ids"]
    response = ids(found)
    logprobs = choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if logprobs.get("content") is not None:
        values = [token["logprob"] for token in logprobs["content"]]
    return Plain(prompt, response, None, floats(values, len(response)))


def _calls(rows):
    name, path = rows[0]["trajectory_id"], record_at(rows[0]["source"])[1]
    records = []
    for record in all_lines(path):
        if isinstance(record, dict) and isinstance(record.get("session"), str):
            instance, slash, repetition = record["session"].rpartition("/")
            if slash and f"{instance}_{int(repetition) if repetition.isdecimal() else ''}" == name:
                records.append(record)
    times = [record.get("time") for record in records]
    if None not in times:
        if len(set(times)) < len(times):
            raise NotCompared
        records.sort(key=lambda record: record["time"])
    steps = []
    for record in records:
        own = _choices(record["response"])
        steps += [*own[:-1], own[-1]._replace(reward=number(record.get("reward")))]
    return Expected(steps, steps[-1].reward, name)


def _agent_lightning(rows):
    source = rows[0]["source"]
    if source.endswith("]"):
        records = document_at(source.rpartition("[")[0])
        first = records[int(source.rpartition("[")[2][:-1])]
    else:
        first, path = record_at(source)
        records = list(all_lines(path))
    own = [
        r
        for r in records
        if isinstance(r, dict)
        and r.get("event_type") is not None
        and all(r.get(k) == first[k] for k in ("rollout_id", "attempt_id"))
    ]
    own = list({json.dumps(event): event for event in own}.values())  # a copy is refused alone
    if any(event.get("timestamp") is None for event in own):
        raise NotCompared
    own.sort(key=lambda event: event["timestamp"])
    requests = [event["data"] for event in own if event["event_type"] == "model_request"]
    requests = [data for data in requests if not _is_refused(data)]
    steps = [step for data in requests for step in _choices(data["response"])]
    rewards = [event["data"].get("value") for event in own if event["event_type"] == "reward"]
    known = [float(v) if isinstance(v, bool) else number(v) for v in rewards if v is not None]
    return Expected(steps, known[-1] if known else None)


def _is_refused(data):
    return (data.get("http_status") or 200) >= 400 or data.get("status") not in {None, "ok"}


def _nemo_gym(rows):
    if not re.search(r"output\[\d+\]$", rows[0]["source"]):
        return responses_run(record_at(rows[0]["source"])[0])
    match = re.fullmatch(
        r"(.*?)(?::(\d+))?, (response\.|input\.|)output\[\d+\]", rows[0]["source"], re.DOTALL
    )
    content = Path(match[1]).read_bytes()
    record = json.loads(content.split(b"\n")[int(match[2]) - 1] if match[2] else content)
    response = record[match[3].rstrip(".")] if match[3] else record
    items = [item for item in response["output"] if item.get("generation_token_ids")]
    trains = True
    if record.get("mask_sample"):
        raise NotCompared
    steps = []
    for item in items:
        sampled = ids(item["generation_token_ids"])
        logprobs = floats(item["generation_log_probs"], len(sampled))
        assert logprobs is not None
        steps.append(
            Plain(ids(item["prompt_token_ids"]), sampled, [trains] * len(sampled), logprobs)
        )
    outcome = number(record.get("reward")) if match[3] != "input." else None
    return Expected(steps, outcome)


def _nemo_rl(rows):
    match = re.fullmatch(
        r"(.*), (expected_output|\[\])\[(\d+)\], message_log\[\d+\]", rows[0]["source"], re.DOTALL
    )
    runs = json.loads(Path(match[1]).read_bytes())
    run = (runs if match[2] == "[]" else runs["expected_output"])[int(match[3])]
    steps, before = [], []
    for message in run["message_log"]:
        own = ids(message["token_ids"])
        if message["role"] == "assistant":
            logprobs = floats(message.get("generation_logprobs"), len(own))
            steps.append(Plain(ids(before), own, None, logprobs))
        before += own
    result = run.get("full_result") or {}
    return Expected(steps, number(result.get("reward")))


def _verifiers(rows):
    record, _ = record_at(rows[0]["source"])
    if record.get("traces") is not None:
        return _episode(record)
    if any(call.get("tokens") for call in record.get("trajectory") or ()):
        return _tokens_of_row(record)
    messages = [*texts_of(record["prompt"], "user"), *texts_of(record["completion"], "assistant")]
    if record.get("tool_defs") or (record.get("info") or {}).get("oai_tools"):
        raise NotCompared
    return conversation(messages, number(record.get("reward")))


def _tokens_of_row(record):
    steps, calls = [], record["trajectory"]
    own = [call.get("reward") for call in calls]
    copies = all(reward == record.get("reward") for reward in own)
    for call, reward in zip(calls, own, strict=True):
        tokens = call["tokens"]
        response = ids(tokens["completion_ids"])
        mask = flags(tokens.get("completion_mask"), len(response))
        logprobs = floats(tokens.get("completion_logprobs") or None, len(response))
        reward = None if copies else number(reward)
        steps.append(Plain(ids(tokens["prompt_ids"]), response, mask, logprobs, reward))
    return Expected(steps, number(record.get("reward")))


def _episode(record):
    traces = sorted(
        record["traces"], key=lambda trace: trace.get("agent", {}).get("trainable", True)
    )
    steps, outcome = [], None
    for trace in traces:
        is_trained = trace.get("agent", {}).get("trainable", True)
        steps += _nodes(trace.get("nodes", []), is_trained)
        if is_trained:
            given = [r for r in (trace.get("rewards") or {}).values() if r is not None]
            if given:
                outcome = sum(number(r["score"]) * number(r.get("weight", 1.0)) for r in given)
    return Expected(steps, outcome)


def _nodes(nodes, is_trained):
    if any(
        link["type"] == "compaction_attempt"
        for n in nodes
        for link in n.get("semantic_parents") or ()
    ):
        raise NotCompared
    tokens, paths = [], []
    for index, node in enumerate(nodes):
        parent = node.get("parent")
        assert parent is None or 0 <= parent < index
        paths.append([*(paths[parent] if parent is not None else []), index])
        tokens.append(ids(node["token_ids"]) if node.get("token_ids") else [])
    for index, node in enumerate(nodes):
        mask = flags(node.get("mask") or [], len(tokens[index]))
        if not node.get("sampled") and not any(mask):
            continue
        if not tokens[index]:
            assert not is_trained
            continue
        trained = [i for i, flag in enumerate(mask) if flag]
        start, stop = trained[0], trained[-1] + 1
        given = floats(node.get("logprobs") or None, len(trained))
        logprobs = None
        if given is not None:
            spread = dict(zip(trained, given, strict=True))
            logprobs = [spread.get(i, 0.0) for i in range(start, stop)]
        prompt = [i for n in paths[index][:-1] for i in tokens[n]] + tokens[index][:start]
        trains = [flag and is_trained for flag in mask[start:stop]]
        yield Plain(prompt, tokens[index][start:stop], trains, logprobs)


def _harbor(rows):
    if any(row["source"].endswith("rollout_details") for row in rows):
        raise NotCompared
    if any(row["token_source"] == "retokenized" for row in rows):
        _check_no_ids(document_at(rows[0]["source"]))
        raise NotCompared  # the rows of text are the subject of test_atif_text.py
    steps = []
    for row in rows:
        document = document_at(row["source"])
        value = row["source"].partition(", $")[2]
        if ".completion_token_ids[" in value:
            where, _, turn = value.rpartition(".completion_token_ids[")
            detail, turn = _follow(document, where), int(turn[:-1])
            prompt, response = (
                ids(detail[f"{n}_token_ids"][turn]) for n in ("prompt", "completion")
            )
            logprobs = detail["logprobs"][turn] if detail.get("logprobs") else None
        else:
            metrics = _follow(document, value)["metrics"]
            prompt, response = (ids(metrics[f"{n}_token_ids"]) for n in ("prompt", "completion"))
            logprobs = metrics.get("logprobs") or None
        if row.get("rollout_logprobs") is not None or logprobs is not None:
            logprobs = logprobs or _told_elsewhere(row)
        steps.append(Plain(prompt, response, None, floats(logprobs, len(response))))
    sources = [row["source"] for row in rows]
    assert len(set(sources)) == len(sources)
    document = document_at(sources[0])
    if "agent_result" not in document:
        _check_all_there(document, sources)
        return Expected(steps, None)
    if document.get("step_results"):
        raise NotCompared
    details = (document["agent_result"] or {}).get("rollout_details") or []
    if ".rollout_details" in sources[0]:
        num = sum(len(detail.get("completion_token_ids") or ()) for detail in details)
        assert num == len(rows)
    given = (document.get("verifier_result") or {}).get("rewards") or {}
    outcome = given.get("reward", next(iter(given.values())) if len(given) == 1 else None)
    failure = document.get("exception_info")
    if failure is not None and failure["exception_type"] == "ContextLengthExceededError":
        outcome = 0.0
    return Expected(steps, number(outcome))


def _check_no_ids(document):
    """Text is tokenized again only where no step has ids."""
    steps = [step.get("metrics") or {} for step in document.get("steps", ())]
    assert not any(metrics.get("completion_token_ids") for metrics in steps)


def _told_elsewhere(_):
    raise NotCompared  # of the two records of a call, one leaves the log-probabilities out


def _check_all_there(document, sources):
    """Each call of the main agent is a row."""
    for index, step in enumerate(document["steps"]):
        is_call = step["source"] == "agent" and not step.get("is_copied_context")
        if is_call and (step.get("metrics") or {}).get("completion_token_ids"):
            assert any(source.endswith(f", $.steps[{index}]") for source in sources)


def _follow(value, path):
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[key] if key else value[int(index)]
    return value


def _rllm(rows):
    episode = document_at(rows[0]["source"])
    steps = []
    for trajectory in episode["trajectories"]:
        for step in trajectory.get("steps") or ():
            own = (step.get("prompt_ids"), step.get("response_ids"))
            output = step.get("model_output")
            output = output if isinstance(output, dict) else {}
            if not own[0] and not own[1]:
                own = (output.get("prompt_ids"), output.get("completion_ids"))
            prompt, response = map(ids, own)
            logprobs = step.get("logprobs") or output.get("logprobs") or None
            steps.append(Plain(prompt, response, None, floats(logprobs, len(response))))
    if len(episode["trajectories"]) == 1:
        given = [number(step.get("reward")) for step in episode["trajectories"][0]["steps"]]
        if any(given):
            steps = [
                step._replace(reward=reward) for step, reward in zip(steps, given, strict=True)
            ]
    return Expected(steps, number(episode["trajectories"][0].get("reward")))


def _skyrl(rows):
    output = document_at(rows[0]["source"])
    steps = []
    for row in rows:
        index = int(row["source"].rpartition("row ")[2])
        identity = output["trajectory_ids"][index]
        name = f"{identity['instance_id']}_{identity['repetition_id']}"
        assert name == row["trajectory_id"]
        response = ids(output["response_ids"][index])
        logprobs = output.get("rollout_logprobs")
        reward = output["rewards"][index]
        reward = math.fsum(map(number, reward)) if isinstance(reward, list) else number(reward)
        mask = flags(output["loss_masks"][index], len(response))
        logprobs = None if logprobs is None else floats(logprobs[index], len(response))
        steps.append(
            Plain(ids(output["prompt_token_ids"][index]), response, mask, logprobs, reward)
        )
    return Expected(steps, steps[-1].reward)


def _slime(rows):
    import torch

    path = Path(rows[0]["source"].partition(", ")[0])
    samples = torch.load(path, weights_only=True)["samples"]
    first = samples[int(rows[0]["source"].rpartition("[")[2][:-1])]
    key = _siblings(first)
    own = [first]
    if key[1] != "None":
        own = [s for s in samples if isinstance(s, dict) and _siblings(s) == key]
    steps = [_sample(sample) for sample in own]
    rewards = [_slime_reward(sample.get("reward")) for sample in own]
    if len(set(rewards)) > 1:
        steps = [step._replace(reward=reward) for step, reward in zip(steps, rewards, strict=True)]
    return Expected(steps, rewards[-1])


def _siblings(sample):
    own = sample.get("index") if sample.get("rollout_id") is None else sample["rollout_id"]
    return sample.get("group_index"), str(own)


def _sample(sample):
    tokens = sample["tokens"]
    tokens = ids(tokens if isinstance(tokens, list) else tokens.tolist())
    num = sample["response_length"]
    assert type(num) is int
    assert 0 < num < len(tokens)
    mask = flags(sample.get("loss_mask"), num)
    if sample.get("remove_sample"):
        mask = [False] * num
    logprobs = floats(sample.get("rollout_log_probs"), num)
    return Plain(tokens[:-num], tokens[-num:], mask, logprobs)


def _slime_reward(reward):
    """The outcome; a truth value is a number in a log of Python objects."""
    if isinstance(reward, dict):
        numbers = [value for value in reward.values() if isinstance(value, int | float)]
        reward = reward.get("reward", numbers[0] if len(numbers) == 1 else None)
    return float(reward) if isinstance(reward, bool) else number(reward)


READERS = {
    "agent_lightning": _agent_lightning,
    "calls": _calls,
    "harbor": _harbor,
    "nemo_gym": _nemo_gym,
    "nemo_rl": _nemo_rl,
    "rllm": _rllm,
    "skyrl": _skyrl,
    "slime": _slime,
    "verifiers": _verifiers,
}
