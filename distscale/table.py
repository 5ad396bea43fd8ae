"""The slot table: which position of the exchanged vector belongs to which tensor, agreed once by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from distscale.checksum import digest
from distscale.errors import DesyncError, ProtocolError
from distscale.fp8.meter import Metered, join
from distscale.reducers import Reducer
from distscale.replicas import Holders, Look, count_holders

__all__ = ["HINTS", "UNKNOWN", "SlotTable", "agree", "check_equal"]

UNKNOWN = "unknown"
"""Of a value that must be equal on the ranks that know it."""


HINTS = {
    "loss_scale": ". In a pipeline, call update() once, after the steps of all optimizers",
}
"""What else to say if a value differs."""


@dataclass(frozen=True)
class SlotTable:
    """Which slot belongs to which tensor: the same on all ranks, but for ``holders``."""

    names: tuple[str, ...] = ()
    """In slot order, the union over all ranks."""
    slots: Mapping[str, int] = field(default_factory=dict)
    digest: int = 0
    """31 bits of a checksum, equal on all ranks."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """How many ranks hold each of this rank's gradients or a piece of it; replicas are weighted by it in the norm."""
    is_final: bool = True
    """False if a later look at the gradients may tell more about ``holders``. Equal on all ranks."""
    fp8: tuple[Metered, ...] = ()
    """FP8 tensors, whose slots come after those of ``names``; those that are sent first."""

    @cached_property
    def num_sent(self) -> int:
        """FP8 tensors that are sent to other ranks."""
        return sum(tensor.is_sent for tensor in self.fp8)

    @property
    def num_decisive(self) -> int:
        """Slots that must be finite: gradients, as they are stepped and as they are sent."""
        return len(self.names) + self.num_sent


def agree(
    reducer: Reducer,
    looks: Mapping[str, Look],
    settings: Mapping[str, object],
    failure: str | None,
    fp8: Sequence[Metered] = (),
) -> SlotTable:
    """Agrees on one table for all ranks, and makes sure that they follow the same rules.

    Args:
        reducer: of all ranks that share the decision.
        looks: at the tensors that this rank holds, by unique name, in its own order.
        settings: what must be equal on all ranks, by name; plain comparable values.
        failure: set if this rank could not list its tensors; every rank then raises.
        fp8: the FP8 tensors of this rank.

    Returns:
        A slot for every name: those of rank 0 first, then what later ranks add. Different tensors of one name share it.

    Raises:
        DesyncError: if a setting differs, naming it, the ranks and the values.
        ProtocolError: if a rank reports a failure, or ranks mean different FP8 tensors by one name.

    Collective: yes, two small gathers at most; names travel only if the ranks differ. Syncs host: yes.
    """
    mine = digest((list(looks.items()), fp8))
    reports: list[tuple[int, dict[str, object], str | None]] = reducer.gather((mine, dict(settings), failure))
    for rank, (_, _, problem) in enumerate(reports):
        if problem is not None:
            raise ProtocolError(f"rank {rank} failed before the exchange: {problem}")
    check_equal([entry for _, entry, _ in reports], "at the first step")
    if len({checksum for checksum, _, _ in reports}) == 1:
        are_final = reducer.world_size == 1 or all(seen.is_whole for seen in looks.values())
        holders = Holders([dict.fromkeys(looks, reducer.world_size)] * reducer.world_size, are_final)
        fp8_by_rank = [fp8]
    else:
        gathered: list[tuple[dict[str, Look], Sequence[Metered]]] = reducer.gather((dict(looks), tuple(fp8)))
        holders = count_holders([held for held, _ in gathered])
        fp8_by_rank = [metered for _, metered in gathered]
    all_fp8 = join(fp8_by_rank)
    names = tuple(dict.fromkeys(name for held in holders.by_rank for name in held))
    slots = {name: slot for slot, name in enumerate(names)}
    checksum = digest((names, holders.by_rank, all_fp8))
    return SlotTable(names, slots, checksum, holders.by_rank[reducer.rank], holders.are_final, all_fp8)


def check_equal(values_by_rank: Sequence[Mapping[str, object]], when: str) -> None:
    """Raises DesyncError for the first entry that is not equal on all that know it, with the ranks of each value."""
    for key in values_by_rank[0]:
        ranks_by_value: dict[object, list[int]] = {}
        for rank, values in enumerate(values_by_rank):
            if values[key] != UNKNOWN:
                ranks_by_value.setdefault(values[key], []).append(rank)
        if len(ranks_by_value) > 1:
            found = "; ".join(f"{value!r} on {describe_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            raise DesyncError(
                f"ranks differ in {key} {when}: {found}. It must be equal on all ranks; no rank applied the step"
                f"{HINTS.get(key, '')}"
            )


def describe_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """``rank 3``, ``ranks 0, 1, 2`` or, for many, ``ranks 0, 1, 2, ... (512 in all)``."""
    shown = ", ".join(map(str, ranks[:limit])) + (f", ... ({len(ranks)} in all)" if len(ranks) > limit else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
