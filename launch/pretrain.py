"""Pretrains a small GPT with one loss scale and one skip decision on all ranks.

    torchrun --standalone --nproc-per-node 2 launch/pretrain.py configs/fsdp2_fp16.toml [--resume] [--compare]
    deepspeed --num_gpus 2 launch/pretrain.py configs/deepspeed.toml --deepspeed configs/deepspeed_zero2.json
    mpirun -n 2 python launch/pretrain.py configs/fsdp2_fp16.toml
    srun -n 2 python launch/pretrain.py configs/fsdp2_fp16.toml

Writes config.toml, steps.jsonl, checkpoints and summary.json to runs/<name>. SIGINT, SIGTERM, SIGUSR2, or a file at
the path in DISTSCALE_STOP_FILE make it save and end, on any one rank. Exit code: 0 passed or stopped, 1 failed, 2 wrong
call. Started again by torchrun (--max-restarts) or by SLURM, it goes on from the newest checkpoint by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from stop import STOP_FILE_VARIABLE, StopRequest

USAGE_ERROR = 2
STOP = StopRequest(os.environ.get(STOP_FILE_VARIABLE, ""))
# Before torch is imported, which takes seconds. A check has nothing to save.
if __name__ == "__main__" and "--check" not in sys.argv:
    STOP.install()

try:
    # Needed later, but missed now, before torchrun starts.
    import rich  # noqa: F401

    from cluster import Cluster, default_num_ranks, leave_last_words
    from data import Text, load_text
    from distscale import ConfigError, DistScaleError, ProtocolError
    from distscale.config import Config, load_config
    from distscale.env import Environment, read_environment
    from distscale.faults import Fault, check_faults, planned_faults
    from engine_config import engine_config
    from lock import RunLock
    from resume import ResumePoint, resume_point
except ModuleNotFoundError as missing:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # distscale.config says it by itself.
        known = f"launch/pretrain.py needs {missing.name}, which is not installed: pip install 'distscale[train]'"
        print(f"error: {known if missing.name else missing}", file=sys.stderr)
    sys.exit(USAGE_ERROR)

# How torch's backends word it when a rank is gone; they raise plain RuntimeErrors.
LOST_PEER_WORDS = (
    "closed by peer",
    "reset by peer",
    "timed out",
    "timeout",
    "broken pipe",
    "connection refused",
    "nccl",
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; ends the process with exit code 2 if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="a TOML file, such as configs/fsdp2_fp16.toml")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, bit by bit")
    parser.add_argument("--compare", action="store_true", help="train in FP32, and without scales, too")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the config")
    parser.add_argument("--deepspeed", metavar="JSON", help="train in a DeepSpeed engine with this config of its own")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher says it in this way
    parser.add_argument("--check", action="store_true", help="only check the call, and print how many ranks to start")
    return parser.parse_args(arguments)


def check(
    options: argparse.Namespace, environment: Environment
) -> tuple[Config, dict[str, Any] | None, Text, ResumePoint | None, tuple[Fault, ...]]:
    """Finds every mistake that can be found without the other ranks.

    Raises:
        ConfigError: with a sentence for the user.
    """
    config = load_config(options.config, options.set)
    engine = None
    world_size = None if options.check else environment.world_size
    faults = planned_faults(config.faults.inject, os.environ)
    check_faults(faults, config.run.steps, config.saves_at, world_size)
    if options.deepspeed:
        if options.compare:
            raise ConfigError("--compare changes the precision, which with --deepspeed the JSON says; leave it out")
        engine = engine_config(options.deepspeed, config, world_size)
        if faults:
            raise ConfigError("no faults are injected into a DeepSpeed engine; unset DISTSCALE_FAULTS")
    text = load_text(config)
    # A run that was started again may lack nothing but its verdict.
    has_more = options.compare or environment.restart_count > 0
    resumed = resume_point(config, text, has_more, engine) if options.resume else None
    return config, engine, text, resumed, faults


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code if nothing was started; ends the process by itself otherwise."""
    options = parse(arguments)
    environment = Environment()
    try:
        if not options.check:
            environment = read_environment(os.environ)
        config, engine, text, resumed, faults = check(options, environment)
        # Tried before torchrun starts, so that the mistake is told once, and held by rank 0 to the end.
        lock = RunLock(config.folder, is_shared=options.check) if options.check or environment.rank == 0 else None
    except ConfigError as error:
        # The first rank of a machine says it for all.
        if environment.local_rank == 0:
            print(f"error: {error}", file=sys.stderr)
            leave_last_words(f"error: {error}")
        return USAGE_ERROR
    if options.check:
        if lock:
            lock.release()
        print(default_num_ranks())
        return 0
    # Takes seconds, and a mistaken call need not wait for it.
    from session import Session

    cluster = Cluster.from_environment(environment)
    session = Session(options, config, engine, text, resumed, cluster, STOP, faults)
    try:
        code = session.run()
        cluster.disconnect()
    except (DistScaleError, RuntimeError, OSError) as error:
        is_known = isinstance(error, DistScaleError | OSError)
        is_lost = isinstance(error, ProtocolError) or any(word in str(error).lower() for word in LOST_PEER_WORDS)
        if not (is_known or is_lost):
            raise
        what = "" if is_known else "a peer died or did not answer in time. The backend said: "
        if isinstance(error, OSError) and error.errno and not error.filename:
            what = f"in {config.folder}: "
        sentence = f"error: rank {cluster.rank} at step {session.step}: {what}{error}"
        # In one piece, or it is mixed up with that of another rank.
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
        leave_last_words(sentence)
        # Without ending the process group, which would wait for the ranks that are gone.
        code = 1
    # Everything is written. Taking the interpreter down while torch's threads live aborts one run in twenty.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
