"""Definition of a rollout table: columns, named invariants, metadata."""

from typing import TYPE_CHECKING

from schemas.lazy import exports

if TYPE_CHECKING:
    from schemas.checker import Checker, ValidationError, check, raise_errors, validate
    from schemas.columns import COLUMNS, Column, arrow_schema, documentation_table
    from schemas.errors import RolloutError
    from schemas.metadata import SCHEMA_VERSION, DatasetMetadata, upgrade
    from schemas.rules import RULES, Rule
    from schemas.token_records import TOKEN_RECORD_COLUMNS
    from schemas.update_shares import UPDATE_SHARE_COLUMNS
    from schemas.verdicts import VERDICT_COLUMNS

__all__ = [
    "COLUMNS",
    "RULES",
    "SCHEMA_VERSION",
    "TOKEN_RECORD_COLUMNS",
    "UPDATE_SHARE_COLUMNS",
    "VERDICT_COLUMNS",
    "Checker",
    "Column",
    "DatasetMetadata",
    "RolloutError",
    "Rule",
    "ValidationError",
    "arrow_schema",
    "check",
    "documentation_table",
    "raise_errors",
    "upgrade",
    "validate",
]

_MODULES = {
    "schemas.checker": ("Checker", "ValidationError", "check", "raise_errors", "validate"),
    "schemas.columns": ("COLUMNS", "Column", "arrow_schema", "documentation_table"),
    "schemas.errors": ("RolloutError",),
    "schemas.metadata": ("SCHEMA_VERSION", "DatasetMetadata", "upgrade"),
    "schemas.rules": ("RULES", "Rule"),
    "schemas.token_records": ("TOKEN_RECORD_COLUMNS",),
    "schemas.update_shares": ("UPDATE_SHARE_COLUMNS",),
    "schemas.verdicts": ("VERDICT_COLUMNS",),
}
__getattr__ = exports(__name__, _MODULES)
