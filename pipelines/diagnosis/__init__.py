"""Why prefixes broke: which steps continue no earlier one, where, and for what cause."""

from typing import TYPE_CHECKING

from schemas.lazy import exports

if TYPE_CHECKING:
    from pipelines.diagnosis.causes import HINTS
    from pipelines.diagnosis.report import Report
    from pipelines.diagnosis.retokenized import TextReading
    from pipelines.diagnosis.table import Diagnosis, diagnose, diagnose_dataset, drift

__all__ = [
    "HINTS",
    "Diagnosis",
    "Report",
    "TextReading",
    "diagnose",
    "diagnose_dataset",
    "drift",
]

_MODULES = {
    "pipelines.diagnosis.causes": ("HINTS",),
    "pipelines.diagnosis.report": ("Report",),
    "pipelines.diagnosis.retokenized": ("TextReading",),
    "pipelines.diagnosis.table": ("Diagnosis", "diagnose", "diagnose_dataset", "drift"),
}
__getattr__ = exports(__name__, _MODULES)
