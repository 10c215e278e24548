"""Declarations as tables of text: columns, invariants and metrics, as the documentation shows them."""

from __future__ import annotations


def table_rows(text: str) -> list[list[str]]:
    """Split a table into rows and cells. Indented lines continue the row before.

    Example:
        >>> table_rows('''
        ... loss | 1 | Minimised loss,
        ...     reduced by `loss.reduction`.
        ... seconds | s | Duration of the update.
        ... ''')
        [['loss', '1', 'Minimised loss, reduced by `loss.reduction`.'], ['seconds', 's', 'Duration of the update.']]
    """
    lines = text.strip().replace("\n    ", " ").splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]
