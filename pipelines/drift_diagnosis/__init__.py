"""Diagnose prefix breaks: find steps that do not continue the previous step, and explain why."""

from typing import TYPE_CHECKING

from schemas.imports import exports

if TYPE_CHECKING:
    from pipelines.drift_diagnosis.causes import HINTS
    from pipelines.drift_diagnosis.report import Report
    from pipelines.drift_diagnosis.retokenized import TextReading
    from pipelines.drift_diagnosis.table import Diagnosis, diagnose, diagnose_dataset, drift

__all__ = ["HINTS", "Diagnosis", "Report", "TextReading", "diagnose", "diagnose_dataset", "drift"]

__getattr__, __dir__ = exports(__name__, __file__, __all__)
