"""Whether the ranks of a job fit together, found out in seconds: ``distscale check``, started on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distscale.connect import device_of_rank, init_distributed
from distscale.env import Environment
from distscale.preflight.exchange import Exchange, clock_offset, try_exchange
from distscale.preflight.facts import Facts, facts_of, package_digests
from distscale.preflight.verdict import differences, files_that_differ, judge, notes
from distscale.reducers import ProcessGroupReducer

__all__ = ["Exchange", "Facts", "Report", "preflight"]


@dataclass(frozen=True)
class Report:
    """What the ranks have found, the same on all of them."""

    environment: Environment
    """Of this rank: the one thing that is its own."""
    facts: tuple[Facts, ...]
    """By rank."""
    exchanges: tuple[Exchange, ...]
    """By rank; empty if the ranks differ too much to try."""
    clocks: tuple[float, ...]
    """Seconds by which the clock is ahead of rank 0's, by rank."""
    problems: tuple[str, ...]
    """What must be mended; each names the ranks that it is about."""
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        ranks = [
            {
                **asdict(fact),
                "exchange": asdict(self.exchanges[rank]) if self.exchanges else None,
                "clock_ahead_s": self.clocks[rank],
            }
            for rank, fact in enumerate(self.facts)
        ]
        about = {"launcher": self.environment.launcher, "world_size": self.environment.world_size}
        return about | {"ranks": ranks, "problems": self.problems, "notes": self.notes, "passed": self.passed}


def preflight(environment: Environment, files: Sequence[str], timeout_s: float) -> Report:
    """Makes the process group, and tests it. Collective: yes, of all ranks of the job. Syncs host: yes.

    Args:
        environment: of this process.
        files: that must be equal on all ranks, such as a config; the names must be.
        timeout_s: after which a rank that does not come or answer is an error.

    Raises:
        ConfigError: if the ranks cannot meet.
        ProtocolError: if one of them does not come, or dies.
    """
    # mpirun gives no address to meet at when there are several nodes.
    by_mpi = environment.launcher in ("openmpi", "mpich") and environment.head_address is None
    environment = init_distributed(timeout_s=timeout_s, ask_mpi=by_mpi)
    if by_mpi:
        from mpi4py import MPI

        # mpirun takes a process that ends without this for one that has crashed.
        MPI.Finalize()
    device = device_of_rank(environment)
    reducer = ProcessGroupReducer()
    facts = reducer.gather(facts_of(environment, device, files))
    found = differences(facts)
    is_same_code = len({(fact.code, fact.versions["torch"]) for fact in facts}) == 1
    if len({fact.code for fact in facts}) > 1:
        found += files_that_differ(reducer.gather(package_digests()))
    # Other code may speak another language in the exchange.
    exchanges = reducer.gather(try_exchange(reducer, device)) if is_same_code else []
    clocks = reducer.gather(clock_offset(reducer))
    found += judge(facts, exchanges, clocks)
    return Report(environment, tuple(facts), tuple(exchanges), tuple(clocks), tuple(found), tuple(notes(facts)))
