"""What text logs read as, and how damaged ones behave."""

import json

from hypothesis import strategies as st

from rollout_io.formats.base import Input, Options, Rejected, Run, Trajectory
from rollout_io.formats.engines.files import Start
from rollout_io.formats.parsing.records import close_files
from schemas.errors import RolloutError

JUNK = st.sampled_from(
    [None, True, -1, 10**400, 1e308, "", "x", [], {}, [[]], [{}], {"a": None}, "attachment://0"]
)
DEEP = b"[" * 100_000


def found_in(adapter, *paths):
    """The runs, what was rejected, and what is known of the log as a whole."""
    close_files()  # as a conversion does
    found = list(adapter.find([Input(str(path), path) for path in paths], lambda _: None))
    runs = [item for item in found if isinstance(item, Run)]
    rejected = [item for item in found if isinstance(item, Rejected)]
    return runs, rejected, dict(item for item in found if not isinstance(item, Run | Rejected))


def read_all(adapter, *paths, **options):
    """What each run of the files reads as: a trajectory, or an error."""
    return [_read(adapter, run, Options(**options)) for run in found_in(adapter, *paths)[0]]


def _read(adapter, run, options):
    try:
        return adapter.read(run, options)
    except RolloutError as error:
        return error


def read_one(adapter, path, **options):
    """The trajectory of the only run of a file; its error is raised."""
    (found,) = read_all(adapter, path, **options)
    if isinstance(found, RolloutError):
        raise found
    return found


def save(path, value):
    """A JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def roles(conversation):
    """The first letters of its roles."""
    return "".join(message["role"][0] for message in conversation.messages)


@st.composite
def mutated(draw, document):
    """The bytes of a document in which something is wrong."""
    kind = draw(st.sampled_from(["cut", "value", "value", "value", "byte", "deep", "drop"]))
    if kind in {"value", "drop"}:
        value = json.loads(document)
        _change(draw, value, kind)
        return json.dumps(value).encode()
    at = draw(st.integers(0, len(document)))
    if kind == "cut":
        return document[:at]
    return document[:at] + (b"\xff\xfe" if kind == "byte" else DEEP) + document[at:]


def _change(draw, value, kind):
    """Replace or drop something at a random depth."""
    for _ in range(draw(st.integers(0, 8))):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        inner = [key for key in keys if isinstance(value[key], dict | list) and value[key]]
        if not inner:
            break
        value = value[draw(st.sampled_from(inner))]
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys))
    if kind == "drop":
        del value[key]
    else:
        value[key] = draw(JUNK)


def check_survives(adapter, path, num_records=1):
    """A damaged log gives rows or named errors; every record is accounted for."""
    adapter.recognizes(Start(path))
    runs, rejected, _ = found_in(adapter, path)
    assert len(runs) + len(rejected) == num_records
    for item in rejected:
        assert item.error.rule
        assert item.error.where.startswith(str(path))
    for found in read_all(adapter, path):
        assert isinstance(found, Trajectory | RolloutError)
