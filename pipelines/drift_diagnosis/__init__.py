"""Diagnose prefix breaks: find steps that do not continue the previous step, and explain why."""

from typing import TYPE_CHECKING

from schemas.imports import exports

if TYPE_CHECKING:
    from pipelines.drift_diagnosis.breaks import HINTS
    from pipelines.drift_diagnosis.diagnosis import (
        Diagnosis,
        Report,
        diagnose,
        diagnose_dataset,
        drift,
    )
    from pipelines.drift_diagnosis.texts import TextReading

__all__ = ["HINTS", "Diagnosis", "Report", "TextReading", "diagnose", "diagnose_dataset", "drift"]

__getattr__, __dir__ = exports(__name__, __file__, __all__)
