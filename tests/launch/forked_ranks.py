"""A launcher of ``launch/pretrain.py`` that imports torch once for all ranks and all lives of a job, by forking.

    python forked_ranks.py '[[0, 1, 3], [0, 1, 2, 3]]' 4 CONFIG ...

The JSON has the ranks of each life that are to end by themselves; when they have, the others are killed. Restarts are
counted as torchrun counts them, and each rank writes to a file of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["output_of"]


def output_of(folder: Path, life: int, rank: int) -> str:
    """What a rank has printed, errors included."""
    return _log(folder, life, rank).read_text()


def _log(folder: Path, life: int, rank: int) -> Path:
    return folder / f"life-{life}-rank-{rank}.log"


def _live(life: int, ending: Collection[int], world_size: int, arguments: Sequence[str]) -> bool:
    """Starts the ranks and waits for their end. Returns whether all ended well."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": f"run-{os.getpid()}", "TORCHELASTIC_RESTART_COUNT": str(life)}
    processes = []
    for rank in range(world_size):
        if not (process := os.fork()):
            _be_rank(life, rank, world_size, arguments)
        processes.append(process)
    codes = [os.waitpid(processes[rank], 0)[1] for rank in ending]
    for rank in set(range(world_size)) - set(ending):
        os.kill(processes[rank], signal.SIGKILL)
        codes.append(os.waitpid(processes[rank], 0)[1])
    return not any(codes)


def _be_rank(life: int, rank: int, world_size: int, arguments: Sequence[str]) -> None:
    code = 1
    try:
        log = os.open(_log(Path(), life, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in place.items()}
        code = pretrain.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
    # The last and the first are what each rank would import after the fork.
    import torch._dynamo  # noqa: F401

    import pretrain
    import session  # noqa: F401

    for life, ending in enumerate(json.loads(sys.argv[1])):
        is_good = _live(life, ending, int(sys.argv[2]), sys.argv[3:])
    sys.exit(not is_good)
