"""A faster start for processes that build Arrow arrays from Python lists."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


def keep_pandas_out_of_arrow() -> None:
    """Stop `pa.array` from importing pandas on its first call, which takes as long as all our imports.

    pyarrow imports pandas once, if it is installed, to recognise pandas objects. We pass none, so
    the import is blocked during a first call; afterwards pandas can be imported as usual. Only the
    command line and worker processes may call this: a library must not block imports of the program
    that uses it.
    """
    if "pandas" in sys.modules:
        return
    without_pandas = _WithoutPandas()
    sys.meta_path.insert(0, without_pandas)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(without_pandas)


class _WithoutPandas(MetaPathFinder):
    """Import hook that reports pandas as not installed."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
