"""Which optimizers a scaler has met, what their parameters are called, and which slots they fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distscale.replicas import Look, look
from distscale.shards import is_here, shard_of
from distscale.sweep import Part
from distscale.table import SlotTable

__all__ = ["NameSource", "Roster"]

NameSource = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass
class _Entry:
    prefix: str
    named: list[tuple[str, Tensor]] = field(default_factory=list)
    is_listed: bool = False
    """Whether the parameters are in the table that the ranks have agreed on."""


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
    def optimizers(self) -> list[Optimizer]:
        """All that are still alive, in the order in which they were first met."""
        return list(self._entries)

    def look(self, world_size: int) -> dict[str, Look]:
        """Looks at all parameters of this rank; what was seen of one at first is kept. Syncs host: yes."""
        named = {name: param for entry in self._entries.values() for name, param in entry.named}
        # Later on, replicas whose gradients are computed apart may differ in the last bit.
        return {name: self._looks.setdefault(named[name], seen) for name, seen in look(named, world_size).items()}

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
                entry.is_listed = False
            are_listed &= entry.is_listed
        return are_listed

    def mark_listed(self) -> None:
        """Notes that all names are in the table that the ranks have agreed on."""
        for entry in self._entries.values():
            entry.is_listed = True

    def parts(self, optimizers: Iterable[Optimizer], table: SlotTable, unscaled: Sequence[Optimizer]) -> list[Part]:
        """What is to be swept: every gradient that this rank holds, once, however many optimizers share it."""
        parts: dict[int, Part] = {}  # by parameter
        for optimizer in optimizers:
            is_scaled = all(optimizer is not other for other in unscaled)
            for name, param in self._entries[optimizer].named:
                if id(param) not in parts and (shard := shard_of(param)) is not None:
                    # The gradient is held by all its holders, cut into num_shards pieces: the rest is replication.
                    weight = shard.num_shards / table.holders[name]
                    parts[id(param)] = Part(shard.values, table.slots[name], weight, is_scaled)
        return list(parts.values())

    def values(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """This rank's part of every gradient of ``optimizers``, each once."""
        shards = map(shard_of, self._params(optimizers).values())
        return [shard.values for shard in shards if shard is not None]

    def values_of_others(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """This rank's part of every gradient of an optimizer that was met and is not among ``optimizers``."""
        theirs = self._params(optimizers)
        shards = (shard_of(param) for key, param in self._params(self.optimizers).items() if key not in theirs)
        return [shard.values for shard in shards if shard is not None]

    def _params(self, optimizers: Sequence[Optimizer]) -> dict[int, Tensor]:
        self.meet(optimizers)
        return {id(param): param for optimizer in optimizers for _, param in self._entries[optimizer].named}

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
