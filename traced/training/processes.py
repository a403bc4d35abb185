"""The processes of a training on several GPUs: the job's process is the first, and starts the others.

The first process samples the rollouts, decides and publishes; the others compute the gradients of their share of the
trajectories. They find each other as torch and accelerate expect it, by the variables RANK, WORLD_SIZE and MASTER_PORT.
``accelerate launch`` would do the same, but as a parent of all of them: the first process would lose the descriptor on
which it reports, and the end of the service would not reach the others.

Invariants: the others end with the first; if one of them dies, the first ends too, with the last lines of its log.
Not covered: several machines.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from traced.processes.child_process import Child, start
from traced.training.errors import TrainerDied
from traced.training.job import TrainingJob

# Seconds in which the first process notices a lost one by itself, with a better message, and in which the others end.
GRACE_S = 30.0
REAP_S = 1.0
LAST_LINES = 12


@contextlib.contextmanager
def other_processes(job: TrainingJob) -> Iterator[None]:
    """Run the other processes of the job while the block runs as the first.

    Raises:
        TrainerDied: One of them ended early.
    """
    if job.processes == 1:
        yield
        return
    port = _free_port()
    os.environ.update(_variables(job, 0, port))
    file = job.out / "processes.job.json"
    file.write_text(job.to_json(), encoding="utf-8")
    children = [_start(job, file, rank, port) for rank in range(1, job.processes)]
    is_over = threading.Event()
    for child in children:
        threading.Thread(target=_end_with, args=(child, is_over), daemon=True).start()
    try:
        yield
    except Exception as error:
        # A process that has just died may take a moment until it can be waited for.
        if dead := next((child for child in children if child.wait(REAP_S)), None):
            raise _died(dead) from error
        raise
    else:
        for child in children:
            child.wait(GRACE_S)
    finally:
        is_over.set()
        leave_group()
        for child in children:
            child.kill()


def _variables(job: TrainingJob, rank: int, port: int) -> dict[str, str]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(job.processes)}
    variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(job.processes)}
    return variables


def _start(job: TrainingJob, file: Path, rank: int, port: int) -> Child:
    variables = {**_variables(job, rank, port), "OMP_NUM_THREADS": str(job.threads)}
    log = job.out / f"train.process{rank}.log"
    return start(["-m", "traced.training.process", str(file)], log=log, variables=variables)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _end_with(child: Child, is_over: threading.Event) -> None:
    """End this process when ``child`` ends before the training: a collective operation would wait for it for ever."""
    child.wait()
    if not is_over.wait(GRACE_S):
        print(_died(child), file=sys.stderr, flush=True)
        os._exit(1)


def _died(child: Child) -> TrainerDied:
    last = "\n".join(child.log.last_lines(LAST_LINES))
    return TrainerDied(
        f"a process of the training ended early; {child.log.path} ends with:\n{last}",
        hint="run the same command again: it continues from the last checkpoint",
    )


def leave_group() -> None:
    """Leave the process group, if there is one; every process does so at its end."""
    # Imported here because torch takes seconds to import.
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
