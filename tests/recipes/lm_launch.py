"""``python lm_launch.py PROCESSES train ...``: torchrun's launcher, whose processes are forked of one that has imported
what takes seconds. The process of rank 1 dies amid the step after $DIE_AT, behind the first of its micro-batches, or
fails at the end of step $FAIL_AT."""

import multiprocessing
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def process(*arguments: str) -> None:
    import lm_runs

    sys.exit(lm_runs.command_line(arguments))


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["lm_runs"])
    rendezvous = {"run_id": "test", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0}
    config = LaunchConfig(1, 1, int(sys.argv[1]), **rendezvous, start_method="forkserver")
    elastic_launch(config, process)(*sys.argv[2:])
