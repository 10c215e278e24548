"""Definition of a rollout table: columns, named invariants, metadata."""

from typing import TYPE_CHECKING

from schemas.imports import exports

if TYPE_CHECKING:
    from schemas.checker import ValidationError, check, validate
    from schemas.columns import COLUMNS, Column, arrow_schema, documentation_table
    from schemas.metadata import SCHEMA_VERSION, DatasetMetadata, upgrade
    from schemas.records import TOKEN_RECORD_COLUMNS, UPDATE_SHARE_COLUMNS, VERDICT_COLUMNS
    from schemas.rules import RULES, Rule

__all__ = [
    "COLUMNS",
    "RULES",
    "SCHEMA_VERSION",
    "TOKEN_RECORD_COLUMNS",
    "UPDATE_SHARE_COLUMNS",
    "VERDICT_COLUMNS",
    "Column",
    "DatasetMetadata",
    "Rule",
    "ValidationError",
    "arrow_schema",
    "check",
    "documentation_table",
    "upgrade",
    "validate",
]

__getattr__, __dir__ = exports(__name__, __file__, __all__)
