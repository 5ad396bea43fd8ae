"""Which optimizers a scaler has met, what their parameters are called, and which slots they fill."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distscale.replicas import Look, look
from distscale.shards import Shard, is_here, shard_of
from distscale.sweep import Part
from distscale.table import SlotTable

__all__ = ["Held", "NameSource", "Roster"]

NameSource = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Held(NamedTuple):
    """A gradient that this rank holds a part of."""

    name: str
    shard: Shard


@dataclass
class _Entry:
    prefix: str
    named: list[tuple[str, Tensor]] = field(default_factory=list)
    is_listed: bool = False
    """Whether the parameters are in the table that the ranks have agreed on."""
    ids: frozenset[int] = frozenset()
    """Of the parameters."""


class Roster:
    """The optimizers met so far and the named parameters of each.

    A parameter is called, in order of preference, by its name in ``source``, by the name that its optimizer was given
    (``AdamW(model.named_parameters())``), or by its place, as in ``AdamW0.group1.param3``. Names are unique on a rank,
    and equal across ranks that build their optimizers alike.

    Args:
        source: a module (read when first needed, so that it may still be sharded), a mapping, or (name, tensor) pairs.
    """

    def __init__(self, source: NameSource | None = None) -> None:
        self._source = source if isinstance(source, nn.Module | Mapping | None) else list(source)
        self._entries: MutableMapping[Optimizer, _Entry] = WeakIdKeyDictionary()
        self._num_met = 0
        self._looks: MutableMapping[Tensor, Look] = WeakIdKeyDictionary()
        self._owner_of_name: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    @property
    def source(self) -> NameSource | None:
        """Where names come from."""
        return self._source

    @property
    def optimizers(self) -> list[Optimizer]:
        """All that are still alive, in the order in which they were first met."""
        return list(self._entries)

    @property
    def all_names(self) -> list[str]:
        """Of the parameters of all optimizers."""
        return list(self._named())

    def look(self, world_size: int, unscaled: Collection[int], scale: float) -> dict[str, Look]:
        """Looks at all parameters of this rank, but for those of which a look was kept. Syncs host: yes.

        Args:
            world_size: number of ranks that share the decision.
            unscaled: parameters, by id, whose gradients do not carry the scale any more.
            scale: that the others carry.
        """
        named = self._named()
        new = {name: param for name, param in named.items() if param not in self._looks}
        fresh = look(new, world_size, frozenset(unscaled), scale)
        return {name: fresh[name] if name in fresh else self._looks[param] for name, param in named.items()}

    def keep_looks(self, looks: Mapping[str, Look]) -> None:
        """Takes what was seen for good: other steps have other gradients, which say nothing beside these."""
        for name, param in self._named().items():
            self._looks[param] = looks[name]

    def forget_looks(self) -> None:
        """There may be other ranks now."""
        self._looks.clear()

    def meet(self, optimizers: Iterable[Optimizer]) -> bool:
        """Lists the parameters of new or changed optimizers. Returns whether all are in the agreed table."""
        are_listed = True
        for optimizer in optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"] if is_here(param)]
            entry = self._entries.get(optimizer)
            if entry is None:
                entry = self._entries[optimizer] = _Entry(f"{type(optimizer).__name__}{self._num_met}")
                self._num_met += 1
            if len(entry.named) != len(params) or any(
                a is not b for (_, a), b in zip(entry.named, params, strict=True)
            ):
                entry.named = self._name(optimizer, entry.prefix)
                entry.ids = frozenset(id(param) for _, param in entry.named)
                entry.is_listed = False
            are_listed &= entry.is_listed
        return are_listed

    def mark_listed(self) -> None:
        """Notes that all names are in the table that the ranks have agreed on."""
        for entry in self._entries.values():
            entry.is_listed = True

    def parts(self, optimizers: Iterable[Optimizer], table: SlotTable, unscaled: Collection[int]) -> list[Part]:
        """What is to be swept: every gradient that this rank holds, once, however many optimizers share it.

        Args:
            unscaled: parameters, by id, whose gradients do not carry the scale any more.
        """
        # The gradient is held by all its holders, cut into num_shards pieces: the rest is replication.
        return [
            Part(
                shard.values,
                table.slots[name],
                shard.num_shards / table.holders[name],
                is_scaled=key not in unscaled,
                scale_inv=shard.scale_inv,
            )
            for key, (name, shard) in self.held(optimizers).items()
        ]

    def held(self, optimizers: Iterable[Optimizer]) -> dict[int, Held]:
        """This rank's part of every gradient of ``optimizers``, each once, by id of its parameter."""
        held: dict[int, Held] = {}
        for optimizer in optimizers:
            for name, param in self._entries[optimizer].named:
                if id(param) not in held and (shard := shard_of(param)) is not None:
                    held[id(param)] = Held(name, shard)
        return held

    def names(self, optimizer: Optimizer) -> list[str]:
        """Of the parameters of ``optimizer``, which was met."""
        return [name for name, _ in self._entries[optimizer].named]

    def ids(self, optimizers: Iterable[Optimizer]) -> set[int]:
        """Of the parameters of those of ``optimizers`` that were met."""
        entries = (self._entries.get(optimizer) for optimizer in optimizers)
        return set().union(*(entry.ids for entry in entries if entry is not None))

    def shares(self, optimizer: Optimizer) -> bool:
        """Whether a parameter of ``optimizer`` is also one of another optimizer; of those that were met and live."""
        mine = self.ids([optimizer])
        return any(other is not optimizer and not entry.ids.isdisjoint(mine) for other, entry in self._entries.items())

    def values_of_others(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """What to multiply to rescale every gradient of an optimizer that was met and is not among ``optimizers``."""
        self.meet(self.optimizers)
        theirs = self.ids(optimizers)
        return [held.shard.to_rescale for key, held in self.held(self.optimizers).items() if key not in theirs]

    def _named(self) -> dict[str, Tensor]:
        return {name: param for entry in self._entries.values() for name, param in entry.named}

    def _name(self, optimizer: Optimizer, prefix: str) -> list[tuple[str, Tensor]]:
        given = {id(tensor): name for name, tensor in self._named_tensors()}
        named: list[tuple[str, Tensor]] = []
        for index, group in enumerate(optimizer.param_groups):
            own_names: Sequence[str] | None = group.get("param_names")
            for position, param in enumerate(group["params"]):
                if not is_here(param):
                    continue
                place = f"group{index}.param{position}"
                name = given.get(id(param)) or (own_names[position] if own_names else f"{prefix}.{place}")
                if self._owner_of_name.setdefault(name, param) is not param:
                    name = f"{prefix}.{name}"
                    self._owner_of_name[name] = param
                named.append((name, param))
        return named

    def _named_tensors(self) -> Iterable[tuple[str, Any]]:
        if isinstance(self._source, nn.Module):
            return self._source.named_parameters()
        if isinstance(self._source, Mapping):
            return self._source.items()
        return self._source or ()
