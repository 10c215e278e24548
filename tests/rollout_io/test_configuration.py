import pytest

from pipelines.generation.config import GenerateConfig
from pipelines.record.settings import RecordSettings
from rollout_io.conversion.plan import Choices
from schemas.errors import ConfigError
from trainer.config.sections import AdvantageConfig, DataConfig

GENERATE = {"tasks": "tasks.jsonl", "model": "smollm2", "out": "shop/"}
RECORD = {"out": "shop/", "upstreams": ("http://127.0.0.1:8000",)}


@pytest.mark.parametrize(
    ("record", "values", "said"),
    [
        (DataConfig, {"failed": "row"}, "found 'row'; expected one of group, trajectory"),
        (AdvantageConfig, {"gamma": 1.5}, "found 1.5; expected a number in [0, 1]"),
        (GenerateConfig, GENERATE | {"engine": "tgi"}, "found 'tgi'; expected one of"),
        (Choices, {"layout": "wide"}, "found 'wide'; expected one of prefix, full"),
        (Choices, {"logprobs_mode": "both"}, "found 'both'; expected one of raw, processed"),
        (RecordSettings, RECORD | {"max_concurrency": 0}, "found 0; expected"),
        (RecordSettings, RECORD | {"on_full": "drop"}, "found 'drop'"),
    ],
)
def test_records_built_in_python_hold_to_their_annotations(record, values, said):
    with pytest.raises(ConfigError) as caught:
        record(**values)
    assert said in str(caught.value)
