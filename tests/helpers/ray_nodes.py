"""Converts and merges on two Ray nodes whose workers are killed: `python -m tests.helpers.ray_nodes LOG OUT BYTES`."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from pipelines.merging.merge import merge_table
from rollout_io import convert, read_metadata
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.rewriting import rewrite

ON_RAY = Workers(2, "ray")
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


def kill_who_writes(out, killed, num):
    """Kill, `num` times, the workers of Ray's tasks while or after one of them writes a chunk."""
    ends = time.monotonic() + 300
    while time.monotonic() < ends and len(killed) < num:
        if list(Path(out).glob(".converting/chunk-*/*")):
            for process in psutil.Process().children(recursive=True):
                try:
                    title = " ".join(process.cmdline())
                    if title.startswith("ray::") and "_ray_task" in title:
                        process.kill()
                        killed.append(title)
                except psutil.Error:
                    continue
        time.sleep(0.02)


def main():
    log, out, chunk_bytes = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(log_to_driver=False, logging_level="ERROR")
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    told = {"num_nodes": len(nodes)}
    killed = []
    threading.Thread(
        target=kill_who_writes, args=(f"{out}/converted", killed, 2), daemon=True
    ).start()
    convert(log, f"{out}/converted", workers=ON_RAY, chunk_bytes=int(chunk_bytes))
    told["killed"] = killed
    metadata = read_metadata(f"{out}/converted").made("merge", parents=["ds"], rule="lineage")
    rewrite(
        f"{out}/converted", f"{out}/merged", merge_table, metadata, decode=False, workers=ON_RAY
    )
    Path(f"{out}.json").write_text(json.dumps(told))  # Ray prints too
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
