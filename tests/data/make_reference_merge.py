"""Make reference_merge.json.gz: what SkyRL's own merge makes of an unmerged export of ours.

Run in an environment of its own, where `skyrl==0.3.0` is installed (see README.md here):

    rollouts export DS --format skyrl --out unmerged.json
    python make_reference_merge.py unmerged.json reference_merge.json.gz
"""

import gzip
import json
import sys
import typing
from pathlib import Path

import typing_extensions

typing.TypedDict = (
    typing_extensions.TypedDict
)  # before the import: pydantic refuses typing's on 3.11

from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.utils import merge_stepwise_output  # noqa: E402


def main() -> None:
    source, target = sys.argv[1:]
    output = json.loads(Path(source).read_text())
    output["trajectory_ids"] = [TrajectoryID(**i) for i in output["trajectory_ids"]]
    output.pop("env_metrics", None)
    merged = dict(merge_stepwise_output(output))
    merged["trajectory_ids"] = [
        {"instance_id": i.instance_id, "repetition_id": i.repetition_id}
        for i in merged["trajectory_ids"]
    ]
    merged.pop("rollout_metrics")
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write(json.dumps(merged).encode())


if __name__ == "__main__":
    main()
