"""Damaged logs with exact tokens, through the whole conversion."""

import tempfile
from pathlib import Path

from rollout_io.conversion.rejections import lines
from rollout_io.formats.engines.files import Start
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with, planned


def check_converts(adapter, path, num_records=None):
    """A damaged log gives rows, or named errors: records read = written + rejected."""
    assert adapter.recognizes(Start(path)) in {True, False}
    made = planned(adapter, path)
    places = [place for run in made.runs for place in run.places]
    places += [rejected.place for rejected in made.rejected]
    assert len({place.where for place in places}) == len(places) == made.num_records
    assert num_records in {None, made.num_records}
    assert len(list(lines(made.rejected))) == len(made.rejected)
    with tempfile.TemporaryDirectory() as folder:
        try:
            conversion, table = convert_with(adapter, [path], Path(folder), on_error="skip")
        except RolloutError as error:
            is_empty = not made.num_records and not path.stat().st_size
            if error.rule != ("input_file" if is_empty else "no_calls"):
                raise
            return
        summary = conversion.summary
        assert summary.num_records == made.num_records
        assert summary.num_written + summary.num_rejected == made.num_records
        assert table.num_rows == summary.num_rows > 0
