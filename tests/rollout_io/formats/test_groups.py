"""Runs whose records are scattered over lines and files."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.base import About, Place, Rejected, Run
from rollout_io.formats.engines.runs import gathered
from schemas.errors import InputError
from tests.helpers.examples import examples

FACT = About("models", ["m"])


def found(records):
    """What a log of (run, whether the record is sound) has, and a fact about the log."""
    for i, (name, is_sound) in enumerate(records):
        place = Place(Path("a"), f"a:{i}", i, 1, name)
        if is_sound:
            labels = {"first": str(i), f"own-{i}": "x"}
            yield Run(instance_id=name, repetition_id=None, places=[place], labels=labels)
        else:
            yield Rejected(place, InputError("record_type", place.where, "a number"))
    yield FACT


@settings(max_examples=examples(100), deadline=None)
@given(records=st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_every_record_is_in_one_run_or_rejected_and_a_damaged_record_takes_its_run_with_it(records):
    items = list(gathered(found(records), lambda place: place.part))
    runs = [item for item in items if isinstance(item, Run)]
    rejected = [item for item in items if isinstance(item, Rejected)]
    damaged = {name for name, is_sound in records if not is_sound}
    names = dict.fromkeys(name for name, _ in records if name not in damaged)
    assert [run.instance_id for run in runs] == list(names)
    places = [place for run in runs for place in run.places] + [item.place for item in rejected]
    assert sorted(place.offset for place in places) == list(range(len(records)))
    assert {item.place.part for item in rejected} == damaged
    for run in runs:
        offsets = [place.offset for place in run.places]
        assert offsets == sorted(offsets)
        own = {f"own-{i}": "x" for i in offsets}
        assert run.labels == {"first": str(offsets[0]), **own}
    assert items.count(FACT) == 1
