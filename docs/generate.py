"""Write the pages of docs/ that derive from the code: `make docs`. A test compares them."""

from __future__ import annotations

from pathlib import Path

from schemas import RULES, documentation_table
from schemas.columns import PREFIX_FIELDS

DOCS = Path(__file__).parent


def table_page() -> str:
    """The rollout table: columns, physical columns, named invariants."""
    physical = "\n".join(f"| {f.name} | {f.type} |" for f in PREFIX_FIELDS)
    rules = "\n".join(
        f"| {r.name} | {r.severity} | {r.meaning} | {r.hint} |" for r in RULES.values()
    )
    return f"""# The rollout table

One row per sequence; freshly converted data has one row per step. Extra columns of yours are kept.
Nullable columns may be absent.

{documentation_table()}
In the `prefix` layout (the default on disk) these columns stand in for `prompt_token_ids`:

| column | type |
|---|---|
{physical}

## Named invariants

| rule | severity | what holds | hint |
|---|---|---|---|
{rules}
"""


PAGES = {"table.md": table_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
