"""The command with FSDP2 on CPUs, where Accelerate has none: `python -m tests.helpers.sharded_rollouts`."""

import trainer.distributed.accelerator
import trainer.run.open_run
from rollout_io.cli.main import main
from tests.helpers.process_server import fsdp2, prepared

if __name__ == "__main__":
    trainer.distributed.accelerator.Accelerator = fsdp2  # type: ignore[attr-defined,assignment]
    trainer.run.open_run.wrap = prepared
    main()
