"""Write docs/models.md, the table of supported Transformers architectures. Takes minutes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import transformers

PAGE = Path(__file__).parent / "models.md"


def main() -> None:
    """Load a tiny model of each architecture and write the table."""
    sys.path.insert(0, str(PAGE.parents[1]))
    from tests.helpers.architectures import KINDS, verdict

    transformers.logging.set_verbosity_error()
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found = verdict(kind, Path(folder))
        text = found.text if found else "not tried | no model can be built from its default config"
        rows.append(f"| {kind} | {text} |")
    head, mark, _ = PAGE.read_text().partition("<!-- generated -->\n")
    table = "\n".join(["| architecture | layouts | why not |", "|---|---|---|", *rows])
    PAGE.write_text(f"{head}{mark}\nTransformers {transformers.__version__}:\n\n{table}\n")


if __name__ == "__main__":
    main()
