"""Where the ranks of a job meet: a store that they share, and a roll call in it that names who is missing.

torch alone says of a rank that never comes which key of a store it has waited for, and takes whatever it finds in a
store for its own: what a rank of another job has written there, or one of an earlier life of this job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distscale.env import Environment
from distscale.errors import ConfigError, DistScaleError, ProtocolError

__all__ = ["first_line", "meet"]

_GRACE_S = 5.0
"""For what is to be said once the time is up."""
_NUM_NAMED = 8
_COMPLETE = "complete"
_ABSENT = "there is no sign of"


def meet(environment: Environment, timeout_s: float, *, is_lent: bool = False) -> Any:
    """Returns the store that all ranks share, a ``torch.distributed.Store``, once every one of them is there.

    Rank 0 keeps it at the address and port of ``environment``, unless torchrun has lent its own there. Of the lent one
    the ranks use a part that is of this life of the job alone (pytorch#135712). On several nodes the agents' counts of
    restarts differ, so that nothing tells lives apart, and a rank that finds its place taken raises.

    Collective: yes. Syncs host: yes.

    Raises:
        ConfigError: if the port is in use, or the store is another job's, or two processes are the same rank; it names
            both.
        ProtocolError: if a rank did not come within ``timeout_s``; it names those ranks.
    """
    until = time.monotonic() + timeout_s
    is_host = environment.rank == 0 and not is_lent
    try:
        store = _open(environment, timeout_s, is_host)
        if is_lent and environment.num_nodes == 1:
            # Documented, and in no __all__.
            store = dist.PrefixStore(f"life_{environment.restart_count}", store)  # type: ignore[attr-defined]
        if is_host:
            store.set("job", _job(environment))
        elif is_lent:
            store.compare_set("job", "", _job(environment))
        _check_job(store, environment, until)
        verdict = _call_the_roll(store, environment, until, is_host)
    except DistScaleError:
        raise
    except (RuntimeError, OSError) as error:
        raise _explained(error, environment, timeout_s) from error
    if verdict != _COMPLETE:
        kind = ProtocolError if verdict.startswith(_ABSENT) else ConfigError
        raise kind(f"{_not_met(environment, timeout_s)}: {verdict}")
    return store


def first_line(error: Exception) -> str:
    """Returns what it says, without the stack that torch's errors have below."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _job(environment: Environment) -> str:
    name = f"job {environment.meeting_id}" if environment.meeting_id else "a job without a name"
    return f"{name}, {environment.world_size} ranks"


def _open(environment: Environment, timeout_s: float, is_host: bool) -> Any:
    """Returns the store as it is. In a thread, since torch waits longer than told, and for ever if it gets no answer.

    Raises:
        RuntimeError: torch's, if it cannot be opened.
        ProtocolError: if that is not done in time.
    """
    address, port = environment.head_address, environment.port
    assert address is not None and port is not None
    outcome: list[Any] = []

    def run() -> None:
        try:
            # Documented, and in no __all__.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                environment.world_size,
                is_host,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=is_host,
            )
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(store)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise ProtocolError(f"{_not_met(environment, timeout_s)}: {_no_host(environment)}")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _check_job(store: Any, environment: Environment, until: float) -> None:
    """Raises ConfigError if the store is another job's, and RuntimeError if nobody says whose it is."""
    store.wait(["job"], _left(until))
    job = store.get("job").decode()
    if job != _job(environment):
        raise ConfigError(
            f"rank {environment.rank} of {environment.world_size} came to {_where(environment)} for "
            f"{_job(environment)}, but found {job}; give each job a MASTER_PORT of its own, the same on all its ranks"
        )


def _call_the_roll(store: Any, environment: Environment, until: float, is_host: bool) -> str:
    """Returns what all ranks agree on: that they are complete, or in a sentence why not."""
    rank, world_size = environment.rank, environment.world_size
    me = f"{uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"
    there = store.compare_set(f"rank_{rank}", "", me).decode()
    if there != me:
        both = f"{there.split(' ', 1)[1]} and {me.split(' ', 1)[1]} are both rank {rank} of {_job(environment)}; "
        hint = "start each rank once, and give each job a MASTER_PORT of its own"
        if environment.launcher == "torchrun":
            hint = "with restarts on several nodes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"
        store.compare_set("verdict", "", both + hint)
        return both + hint
    if store.add("num_there", 1) == world_size:
        store.compare_set("verdict", "", _COMPLETE)
    try:
        store.wait(["verdict"], _left(until))
    except dist.DistStoreError:
        # One looks who is missing, since in a large job it takes a while.
        if store.add("num_judges", 1) == 1:
            absent = [peer for peer in range(world_size) if not store.check([f"rank_{peer}"])]
            if absent:
                sentence = f"{_ABSENT} {_ranks(absent)}; look for the first error there, or whether they were started"
                store.compare_set("verdict", "", sentence)
        store.wait(["verdict"], timedelta(seconds=_GRACE_S))
    verdict: str = store.get("verdict").decode()
    if verdict != _COMPLETE:
        _tell_all(store, is_host)
    return verdict


def _tell_all(store: Any, is_host: bool) -> None:
    """Lets the others read the verdict before the store ends with its host."""
    if store.add("num_told", 1) >= store.add("num_there", 0):
        store.set("told", "")
    if is_host:
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["told"], timedelta(seconds=_GRACE_S))


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(0.0, until - time.monotonic()))


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_NUM_NAMED]))
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {named}{more}"


def _where(environment: Environment) -> str:
    return f"{environment.head_address}:{environment.port}"


def _not_met(environment: Environment, timeout_s: float) -> str:
    return (
        f"rank {environment.rank} of {environment.world_size} did not meet all others at {_where(environment)} within "
        f"{timeout_s:g} s"
    )


def _no_host(environment: Environment) -> str:
    return (
        f"rank 0 of {_job(environment)}, or torchrun for it, is to listen there, and has not come, does not answer or "
        "has ended; look for the first error among the ranks, and whether that host can be reached"
    )


def _explained(error: Exception, environment: Environment, timeout_s: float) -> ConfigError | ProtocolError:
    """Returns what torch's error means, for whoever started the job."""
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return ConfigError(
            f"rank {environment.rank} cannot listen at {_where(environment)}, since the port is in use by another "
            "program; set MASTER_PORT to a free one, the same on all ranks"
        )
    return ProtocolError(
        f"{_not_met(environment, timeout_s)}: {_no_host(environment)}. The store said: {first_line(error)}"
    )
