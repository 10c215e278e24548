"""Convert SkyRL's dumped batches in SkyRL's environment: python skyrl_dumps.py dumped_data DATASET.

Pickles can run code: convert only your own.
"""

import pickle
import sys
from pathlib import Path

from rollout_io.hooks.appender import RolloutAppender
from rollout_io.hooks.skyrl import output_of

folder, dataset = sys.argv[1:]
TEMPERATURE = 1.0  # as in your generator.sampling_params; the dump does not record it
appender = RolloutAppender(dataset)
for path in sorted(Path(folder).glob("*_training_input.pkl"), key=lambda p: p.stat().st_mtime):
    with path.open("rb") as file:
        output = output_of(pickle.load(file))  # noqa: S301
    appender.append(output | {"temperature": [TEMPERATURE] * len(output["response_ids"])})
print(f"{appender.num_rows} rows appended, {appender.num_refused} refused")
sys.exit(appender.num_refused > 0)
