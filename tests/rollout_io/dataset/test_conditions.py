import ctypes
import os
import struct
import subprocess
import sys

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.filters import where
from rollout_io.cli.main import run
from rollout_io.dataset.conditions import condition_of
from rollout_io.dataset.sql_expressions import MOST_OPERATORS
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import write_example

IN_OPEN = 0x20

FILES = [
    "reward IN (SELECT x FROM {0}('{1}'))",
    "reward in (from {0}('{1}'))",
    "reward in (from {0}('{1}') select x)",
    "EXISTS (SELECT * FROM {0}('{1}'))",
    "reward > (SELECT max(x) FROM {0}('{1}'))",
    "reward = ANY(SELECT x FROM {0}('{1}'))",
    "reward IN (WITH t AS (SELECT * FROM {0}('{1}')) SELECT x FROM t)",
    "reward IN (SELECT 1 UNION SELECT x FROM {0}('{1}'))",
    "reward > 0 UNION SELECT * FROM {0}('{1}')",
    "reward > 0; SELECT * FROM {0}('{1}')",
    "reward IN/**/(SeLeCt x FROM/**/{0}('{1}'))",
    "reward IN /* ' */ (SELECT x FROM {0}('{1}')) -- '",
    "reward IN -- '\n (SELECT x FROM {0}('{1}')) -- '",
    "/* /* */ reward IN (SELECT x FROM {0}('{1}')) -- */",
    "agent = '\\' OR reward IN (SELECT x FROM {0}('{1}')) OR agent = '\\'",
    "agent = E'\\'' OR reward IN (SELECT x FROM {0}('{1}')) OR agent = ''",
    "agent = $$'$$ OR reward IN (SELECT x FROM {0}('{1}')) OR agent = $$'$$",
    "agent = $a$'$a$ OR reward IN (SELECT x FROM {0}('{1}')) OR agent = ''",
    "agent = `'` OR reward IN (SELECT x FROM {0}('{1}')) OR agent = ''",
    "agent = \"'\" OR reward IN (SELECT x FROM \"{0}\"('{1}')) OR agent = ''",
    "reward IS DISTINCT FROM (FROM {0}('{1}'))",
    "0xSELECT x FROM {0}('{1}')",
    "{0}('{1}')",
    "\"{0}\"('{1}') > 0",
    "columns('{1}') > 0",
    "reward IN (TABLE {0}('{1}'))",
    "reward IN (VALUES (1))",
]


class Watched:
    """A file, and whether anybody has opened it: by the kernel's word, for Rust asks nobody else."""

    def __init__(self, path):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handle = self._libc.inotify_init1(os.O_NONBLOCK)
        assert self._libc.inotify_add_watch(self._handle, os.fsencode(path), IN_OPEN) > 0

    def was_opened(self):
        try:
            event = os.read(self._handle, 4096)
        except BlockingIOError:
            return False
        return bool(struct.unpack_from("iI", event)[1] & IN_OPEN)

    def close(self):
        os.close(self._handle)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.csv"
    path.write_text("x\n1\n")
    watched = Watched(path)
    yield path, watched
    watched.close()


@pytest.mark.parametrize("function", ["read_csv", "read_parquet", "read_ipc", "read_json"])
def test_no_condition_opens_a_file(secret, function):
    path, watched = secret
    for template in FILES:
        text = template.format(function, path)
        with pytest.raises(RolloutError, match="condition") as info:
            condition_of(text)
        assert not watched.was_opened(), text
        assert "\n" not in info.value.got
    path.read_text()
    assert watched.was_opened()


@pytest.mark.parametrize(
    "verb",
    [
        ["inspect", "DS", "--where"],
        ["filter", "DS", "--dry-run", "--where"],
        ["filter", "DS", "--dry-run", "--keep-rows"],
    ],
)
def test_every_verb_refuses_a_condition_that_names_a_file(tmp_path, secret, verb, capsys):
    path, watched = secret
    arguments = [str(write_example(tmp_path)) if part == "DS" else part for part in verb]
    assert run([*arguments, f"reward IN (SELECT x FROM read_csv('{path}'))"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "[condition]" in said.err
    assert "SELECT" in said.err
    assert not watched.was_opened()


@pytest.mark.parametrize(
    ("condition", "what"),
    [
        ("columns('^re.*$') > 0", "a pattern of column names"),
        ("unnest(response_ids) > 3", "an exploded list"),
        ("max(reward) OVER () = 1", "an aggregate"),
        ("rank() OVER (ORDER BY reward) = 1", "over the entire dataset"),
        ("row_number() OVER () = 1", "row number"),
        ("lag(reward) OVER (ORDER BY step_index) > 0", "a shift"),
        ("count(*) > 1", "an aggregate"),
        ("(SELECT 1) = 1", "SELECT"),
        ("reward > 0 -- 1", "a comment"),
        ("reward > 0; reward", "'; reward'"),
        ("'open", "Missing '"),
        ("$$ = 'a' OR b = '$$ OR agent = $$'", "$$"),
        ("agent = 'a\\'", "a\\"),
        ("", ""),
    ],
)
def test_what_is_more_than_a_condition_on_a_row_is_refused_by_name(condition, what):
    with pytest.raises(RolloutError, match="condition") as info:
        condition_of(condition)
    assert what in info.value.got


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("reward > 0 AND agent = 'main'", [0]),
        ("agent = 'select x from y; --' OR agent = 'it''s'", [1, 2]),
        ('"from" = 3', [2]),
        ("reward IS DISTINCT FROM 1.5e0", [1, 2]),
        ("agent LIKE 'sel%' OR reward IN (1.5, 7)", [0, 1]),
        ("reward BETWEEN -1 AND 0", [1]),
        ("CASE WHEN reward > 0 THEN true ELSE false END", [0]),
        ("reward = max(reward) OVER (PARTITION BY task)", [0, 1]),
        ("row_number() OVER (PARTITION BY task ORDER BY reward) = 1", [0, 1]),
        ("agent = 'Len' OR agent ~ '^\\w+$'", [0]),
        ("made.Shift = 2", [1]),
        ("array_contains(ids, 3)", [2]),
        ("CAST(reward AS int) = 0 OR reward::int = 0", [1]),
        ("strpos(agent, 'x') > 0 OR length(agent) = 4", [0, 1, 2]),
    ],
)
def test_a_condition_on_a_row_is_taken(condition, expected):
    frame = pl.DataFrame(
        {
            "i": [0, 1, 2],
            "task": ["a", "b", "b"],
            "reward": [1.5, -0.5, None],
            "agent": ["main", "select x from y; --", "it's"],
            "from": [1, 2, 3],
            "made": [{"Shift": 1}, {"Shift": 2}, {"Shift": 3}],
            "ids": [[1], [2], [3]],
        }
    )
    assert frame.filter(condition_of(condition))["i"].to_list() == expected


@pytest.mark.slow
def test_a_long_list_of_values_is_taken_and_a_long_chain_of_operators_refused():
    listed = ", ".join(f"'a_{i}'" for i in range(10_000))
    assert condition_of(f"trajectory_id IN ({listed})").meta.root_names() == ["trajectory_id"]
    for chain in ("1" + " + 1" * 100_000, "(" * 9000 + "1" + ")" * 9000, "NOT " * 9000 + "true"):
        with pytest.raises(RolloutError, match=f"at most {MOST_OPERATORS}"):
            condition_of(chain)


@pytest.mark.slow
def test_no_chain_that_is_taken_ends_the_process():
    program = (
        "from rollout_io.dataset.conditions import *\n"
        "for text in ('1' + ' + 1' * N, '(' * N + '1' + ')' * N, 'NOT ' * N + 'true',\n"
        "             'reward' + '.a' * N, 'abs(' * N + '1' + ')' * N, '- ' * N + '1'):\n"
        "    for n in (1, 2, 4):\n"
        "        try: condition_of(text[: len(text) // n])\n"
        "        except ConfigError: pass\n"
    ).replace("N", str(MOST_OPERATORS))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


WORDS = [
    *("reward", "agent", "select", "from", "(", ")", "'", '"', ",", "=", ">", "1", ".", "--", "/*"),
    *("read_csv", "in", "not", "null", "is", "distinct", "over", "partition by", "\\", "$$", "e'"),
    *(
        "\n",
        " ",
        "case",
        "when",
        "then",
        "end",
        "and",
        "max",
        "[",
        "]",
        ":",
        "::",
        "int",
        "*",
        "as",
    ),
]


@pytest.mark.slow
@given(st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join) | st.text(max_size=12))
def test_whatever_a_condition_says_it_is_an_expression_or_an_error(text):
    try:
        condition = condition_of(text)
    except RolloutError:
        return
    assert isinstance(condition, pl.Expr)


def test_expressions_of_polars_are_held_to_the_same_rule():
    with refused("condition", got="an aggregate"):
        where(pl.col("reward").max() > 0)
    with pytest.raises(RolloutError, match="a shift"):
        where(pl.col("reward").shift(1) > 0)
    assert where(pl.col("response_ids").list.eval(pl.element().rank()).list.len() > 0)


GROWING = [
    "lpad(agent, 2000000000, 'x') = 'x'",
    "rpad(agent, 2000000000, 'x') = 'x'",
    "length(RPAD(agent, step_index * 100000000, 'x')) > 0",
    "replace(agent, '', agent) = 'x'",
    "replace(replace(agent, 'a', 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb'), 'b',"
    " 'ccccccccccccccccccccccccccccccccccccccccccccccccccccc') = 'x'",
    "replace(" * 20 + "agent" + ", '', 'y')" * 20 + " = 'x'",
    "array_to_string(string_to_array(agent, ''), agent) = 'x'",
    "array_length(generate_series(1, 10000000000)) > 0",
    "agent = 'main' AND NOT (reward > 0 OR lpad(agent, 99999999, ' ') = 'x')",
    "repeat(agent, 1000000000) = 'x'",
]


@pytest.mark.parametrize("text", GROWING)
def test_a_condition_that_could_make_gigabytes_of_a_row_is_refused_by_name(text):
    with pytest.raises(RolloutError) as caught:
        condition_of(text)
    assert caught.value.rule == "condition"
    names = ("pad", "replace", "array_to_string", "generate_series", "repeat")
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "expression",
    [
        pl.col("agent").str.zfill(10**9) == "x",
        pl.col("step_index").repeat_by(10**9).list.len() > 1,
        pl.col("step_index").repeat_by("step_index").list.len() > 1,
        pl.col("agent").str.pad_start(10**9) == "x",
    ],
    ids=str,
)
def test_so_is_such_an_expression(expression):
    with pytest.raises(RolloutError, match="at most 10,000"):
        condition_of(expression)


@pytest.mark.parametrize(
    "text",
    [
        "lpad(agent, 8, '0') = '0000main'",
        "rpad(agent, 10000, ' ') <> agent",
        "replace(agent, 'a', 'bb') = 'mbbin'",
        "regexp_replace(agent, 'a+', '') = 'min'",
        "array_to_string(string_to_array(agent, '.'), '/') = 'a/b'",
        "concat(agent, '-', agent) = 'a-a'",
    ],
)
def test_texts_of_bounded_length_stay_conditions(text):
    assert condition_of(text) is not None
