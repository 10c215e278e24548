"""Pictures of a batch: their tokens are put back, and features are at the tokens of their picture."""

from types import SimpleNamespace

import numpy as np
import polars as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.configs import train_config
from tests.helpers.examples import examples
from trainer.batch import cut_batch, to_batch
from trainer.batches.pictures import FACTS, picture_facts

SHOWS = 9
NAMES = [f"sha256:{digit * 64}" for digit in "ab"]
TOKENS = {NAMES[0]: [SHOWS, 3, SHOWS], NAMES[1]: [SHOWS, SHOWS]}
"""Tokens of each picture; one has text inside."""

Part = str | list[int]


@st.composite
def rows(draw):
    """Prompts and responses of text and pictures, which often begin alike."""
    text = st.lists(st.integers(0, 2), min_size=1, max_size=2)
    part = st.one_of(text, st.sampled_from(NAMES))
    listed = []
    for _ in range(draw(st.integers(1, 5))):
        before = draw(st.sampled_from([[], *(prompt for prompt, _ in listed)]))
        prompt = [*before, *draw(st.lists(part, max_size=3))]
        prompt = prompt if any(isinstance(one, list) for one in prompt) else [[0], *prompt]
        response = [*draw(st.lists(part, max_size=2)), draw(text)]
        listed.append((prompt, response))
    return listed


def seen(parts):
    """Tokens, entries of `pictures`, and the picture and feature that each token shows."""
    ids = []
    pictures, features = [], list[tuple[str, int] | None]()
    for part in parts:
        tokens = TOKENS[part] if isinstance(part, str) else part
        if isinstance(part, str):
            pictures.append({"sha256": part, "start": len(ids), "length": len(tokens)})
        count = 0
        for token in tokens:
            shows = isinstance(part, str) and token == SHOWS
            features.append((str(part), count) if shows else None)
            count += shows
        ids += tokens
    return ids, pictures, features


def table_of(listed):
    n = len(listed)
    columns = {
        "name": [f"row {i}" for i in range(n)],
        "instance_id": ["g"] * n,
        "trajectory_id": [f"g_{i}" for i in range(n)],
        "prompt_token_ids": [seen(prompt)[0] for prompt, _ in listed],
        "response_ids": [seen(response)[0] for _, response in listed],
        "loss_mask": [
            [not isinstance(part, str) for part in response for _ in seen([part])[0]]
            for _, response in listed
        ],
        "rollout_logprobs": [None] * n,
        "temperature": [None] * n,
        "trains": [True] * n,
        "reward": [0.0] * n,
        "advantage": [1.0] * n,
        "mini_batch": [0] * n,
        "pictures": [seen([*prompt, *response])[1] for prompt, response in listed],
    }
    entry = pl.Struct({"sha256": pl.String, "start": pl.Int32, "length": pl.Int32})
    ids = pl.List(pl.Int32)
    kinds = {
        "prompt_token_ids": ids,
        "response_ids": ids,
        "loss_mask": pl.List(pl.Boolean),
        "rollout_logprobs": pl.List(pl.Float32),
        "temperature": pl.Float32,
        "pictures": pl.List(entry),
    }
    return pl.DataFrame(columns, schema_overrides=kinds)


def shown_at(forest):
    """The picture and the feature that each node shows."""
    if forest.pictures is None:
        return {}
    names = forest.pictures.load()
    assert len(set(names)) == len(names) == len(forest.pictures.ends) - 1
    ends, feature = forest.pictures.ends, forest.pictures.feature
    picture = torch.searchsorted(ends, feature, right=True) - 1
    entries = zip(picture.tolist(), (feature - ends[picture]).tolist(), strict=True)
    values = [(str(names[number]), offset) for number, offset in entries]
    return dict(zip(forest.pictures.node.tolist(), values, strict=True))


@settings(max_examples=examples(60), deadline=None)
@given(rows(), st.sampled_from(["step", "tree"]), st.sampled_from([1, 12, 1000]))
def test_each_token_before_a_target_shows_what_its_row_shows(listed, layout, budget):
    reader = SimpleNamespace(placeholder=SHOWS, load=list)
    batch = to_batch(table_of(listed), pictures=reader)
    config = train_config(sequence_layout=layout, tokens_per_micro_batch=budget).batch
    (mini_batch,) = cut_batch(batch, config)
    num_targets = 0
    for forest in mini_batch.forests:
        assert forest.token_ids.min() >= 0
        at, number = shown_at(forest), torch.arange(forest.num_tokens)
        targets = zip(forest.target_parent.tolist(), forest.target_slot.tolist(), strict=True)
        for parent, slot in targets:
            row = int(batch.responses.row_of(np.array([slot]))[0])
            prompt, response = listed[row]
            ids, _, features = seen([*prompt, *response])
            path = ((number <= parent) & (forest.subtree_end > parent)).nonzero()[:, 0].tolist()
            assert forest.token_ids[path].tolist() == ids[: len(path)]
            assert [at.get(node) for node in path] == features[: len(path)]
            num_targets += 1
    assert num_targets == batch.trains.sum()


@settings(max_examples=examples(60), deadline=None)
@given(rows(), st.data())
def test_facts_name_pictures_and_count_placeholders_outside_of_them(listed, data):
    table = table_of(listed)
    entries = table["pictures"].to_list()
    kept = [[data.draw(st.sampled_from(["is", "lost", "null"])) for _ in row] for row in entries]
    changed = [
        [
            entry if fate == "is" else entry | {"start": None, "length": None}
            for entry, fate in zip(row, fates, strict=True)
            if fate != "lost"
        ]
        for row, fates in zip(entries, kept, strict=True)
    ]
    column = pl.Series("pictures", changed, dtype=table["pictures"].dtype)
    names = ("prompt_token_ids", "response_ids", "loss_mask", "pictures")
    facts = picture_facts(table.with_columns(column).select(names).to_struct("row"), SHOWS)
    assert facts.dtype == FACTS
    counts = {name: tokens.count(SHOWS) for name, tokens in TOKENS.items()}
    for row, fates, fact in zip(entries, kept, facts.to_list(), strict=True):
        pairs = list(zip(row, fates, strict=True))
        known = [entry["sha256"] for entry, fate in pairs if fate == "is"]
        assert fact["has_pictures"] == any(fate != "lost" for fate in fates)
        assert fact["has_unknown"] == ("null" in fates)
        assert fact["num_outside"] == sum(
            counts[entry["sha256"]] for entry, fate in pairs if fate != "is"
        )
        expected = [{"sha256": name, "num_features": counts[name]} for name in known]
        assert (fact["shown"] or []) == expected
        assert not fact["trains_picture"]
