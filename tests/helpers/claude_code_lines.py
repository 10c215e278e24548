"""Lines of Claude Code's sessions."""


def line(uuid, parent=None, **fields):
    return {"uuid": uuid, "parentUuid": parent, "sessionId": "s", "isSidechain": False} | fields


def user(uuid, content, parent=None, **fields):
    return line(uuid, parent, type="user", message={"role": "user", "content": content}, **fields)


def reply(uuid, content, parent=None, id=None, stop=None, model="m", **fields):
    """A piece of an answer: a text, a block or several; of an answer of its own unless `id` says."""
    blocks = [text(content)] if isinstance(content, str) else content
    message = {"role": "assistant", "content": [blocks] if isinstance(blocks, dict) else blocks}
    message |= {"id": id or f"m{uuid}", "model": model, "stop_reason": stop}
    return line(uuid, parent, type="assistant", message=message, **fields)


def thread(parent=None, fields=(), **contents):
    """Lines of which each follows the one before; an answer's name begins with `a`."""
    records = []
    for uuid, content in contents.items():
        make = reply if uuid.startswith("a") else user
        records.append(make(uuid, content, parent, **dict(fields)))
        parent = uuid
    return records


def text(value):
    return {"type": "text", "text": value}


def thinking(value):
    return {"type": "thinking", "thinking": value}


def call(id, **arguments):
    return {"type": "tool_use", "id": id, "name": "Bash", "input": arguments}


def result(id, value):
    return {"type": "tool_result", "tool_use_id": id, "content": value}


def system(uuid, parent, subtype, **fields):
    return line(uuid, parent, type="system", subtype=subtype, **fields)


def boundary(uuid, **metadata):
    fields = {"content": "Compacted", "logicalParentUuid": "before"}
    metadata |= {"trigger": "auto"}
    return system(uuid, None, "compact_boundary", compactMetadata=metadata, **fields)


def attached(uuid, parent, attachment, **fields):
    return line(uuid, parent, type="attachment", attachment=attachment, **fields)
