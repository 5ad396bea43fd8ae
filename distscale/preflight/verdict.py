"""What is wrong with a job, and with which of its ranks: a pure function of what the ranks have said."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from distscale.preflight.exchange import Exchange
from distscale.preflight.facts import Facts

__all__ = ["differences", "files_that_differ", "judge", "notes"]

MAX_CLOCK_SKEW_S = 1.0
"""Between any two ranks. Beyond it, their logs cannot be laid side by side."""
_SLOW = 0.5


def differences(facts: Sequence[Facts]) -> list[str]:
    """Sentences on what must be equal on all ranks, and is not."""
    found = []
    for name in facts[0].versions:
        # Kernels may differ among nodes.
        if name != "platform":
            found += _odd_ranks(name, [fact.versions[name] or "none" for fact in facts])
    found += _odd_ranks("device", [fact.device for fact in facts])
    found += _odd_ranks("sweep", [fact.sweep for fact in facts])
    found += _odd_ranks("distscale's files, with digest", [fact.code for fact in facts])
    for file in facts[0].files:
        found += _odd_ranks(f"{file}, with digest", [fact.files.get(file) or "unreadable" for fact in facts])
        if all(fact.files.get(file) is None for fact in facts):
            found.append(f"{file} cannot be read on any rank")
    return found


def files_that_differ(of_ranks: Sequence[Mapping[str, str | None]]) -> list[str]:
    """Sentences on the files of the package that are not the same on all ranks."""
    names = sorted(set().union(*of_ranks))
    return [
        sentence
        for name in names
        for sentence in _odd_ranks(
            f"{name}, with digest", [digests.get(name, "missing") or "unreadable" for digests in of_ranks]
        )
    ]


def judge(facts: Sequence[Facts], exchanges: Sequence[Exchange], clocks: Sequence[float]) -> list[str]:
    """Sentences on what does not work.

    Args:
        facts: by rank.
        exchanges: by rank; empty if there was none.
        clocks: seconds ahead of rank 0, by rank.
    """
    found = [f"the sweep of rank {fact.rank} is wrong: {fault}" for fact in facts for fault in fact.sweep_faults]
    by_fault: dict[str, list[int]] = {}
    for rank, exchange in enumerate(exchanges):
        for fault in exchange.faults:
            by_fault.setdefault(fault, []).append(rank)
    found += [f"the exchange is wrong, on {_ranks(ranks)}: {fault}" for fault, ranks in by_fault.items()]
    return found + _clocks_apart([fact.host for fact in facts], clocks)


def _clocks_apart(hosts: Sequence[str], clocks: Sequence[float]) -> list[str]:
    """Sentences on hosts that most others contradict, or on the two ranks furthest apart if there is no majority.

    Each host has one vote, whatever the number of its ranks, since these share a clock.
    """
    behind, ahead = clocks.index(min(clocks)), clocks.index(max(clocks))
    if clocks[ahead] - clocks[behind] <= MAX_CLOCK_SKEW_S:
        return []
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    clock_of = {host: statistics.median(clocks[rank] for rank in ranks) for host, ranks in ranks_of.items()}
    middle = statistics.median(clock_of.values())
    off = {host: clock - middle for host, clock in clock_of.items() if abs(clock - middle) > MAX_CLOCK_SKEW_S}
    if off and 2 * len(off) < len(clock_of):
        return [f"the clock of {host} ({_ranks(ranks_of[host])}) is off by {by:+.1f} s" for host, by in off.items()]
    return [
        f"the clocks of {hosts[behind]} (rank {behind}) and {hosts[ahead]} (rank {ahead}) differ by "
        f"{clocks[ahead] - clocks[behind]:.1f} s"
    ]


def notes(facts: Sequence[Facts]) -> list[str]:
    """Sentences on what may be meant so, and may not."""
    found = _odd_ranks("hardware", [fact.hardware for fact in facts])
    speeds = [fact.sweep_gb_per_s for fact in facts if fact.sweep_gb_per_s is not None]
    for fact in facts:
        if fact.sweep_gb_per_s is not None and fact.sweep_gb_per_s < _SLOW * statistics.median(speeds):
            found.append(
                f"rank {fact.rank} on {fact.host} sweeps {fact.sweep_gb_per_s:.1f} GB/s, where "
                f"{statistics.median(speeds):.1f} is the median"
            )
    return found


def _odd_ranks(what: str, values: Sequence[Any]) -> list[str]:
    """A sentence for each value that is not the most frequent one (of several, rank 0's or the next rank's)."""
    usual, _ = Counter(values).most_common(1)[0]
    odd: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            odd.setdefault(value, []).append(rank)
    return [f"{_ranks(ranks)}: {what} {value}, where others have {usual}" for value, ranks in odd.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
