"""Which code sweeps the tensors of a device: native code where there is some, else the reference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distscale.errors import ConfigError
from distscale.sweep import reference
from distscale.sweep.parts import Part, Request, Swept

__all__ = ["SETTING", "Backend", "Choice", "Unavailable", "backend_for", "choose"]

SETTING = "DISTSCALE_SWEEP"
"""Environment variable: ``native`` or ``reference``; unset: native where it is available."""


class Unavailable(Exception):
    """Native code cannot be used here; the message says why, and what to do about it."""


class Backend(Protocol):
    """A module that sweeps the tensors of one device; see :mod:`distscale.sweep.reference`."""

    def takes(self, parts: Sequence[Part]) -> bool:
        """Whether it can sweep all of these, by dtype and strides."""

    def sweep(self, parts: Sequence[Part], request: Request) -> Swept:
        """Checks and measures parts of one device, at least one."""

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None) -> None:
        """Multiplies tensors of one device in place, unless ``found_inf`` is set."""


class Choice(NamedTuple):
    """What sweeps a kind of device, and why."""

    backend: Backend
    name: str
    """``native`` or ``reference``."""
    why: str
    """A sentence for people, without a full stop."""


def choose(device: torch.device) -> Choice:
    """What sweeps tensors of ``device`` in this process.

    Raises:
        ConfigError: if the setting is neither of its values, or demands native code that cannot be had.
    """
    return _choose(device, os.environ.get(SETTING))


def backend_for(device: torch.device) -> Backend:
    """The code that sweeps tensors of ``device``; :func:`choose` without the reason."""
    return choose(device).backend


@lru_cache(maxsize=64)
def _choose(device: torch.device, setting: str | None) -> Choice:
    if setting not in (None, "", "native", "reference"):
        raise ConfigError(f"{SETTING}={setting!r} cannot be used: set it to native or reference, or unset it")
    if setting == "reference":
        return Choice(reference, "reference", f"{SETTING}=reference is set")
    if device.type not in ("cpu", "cuda"):
        return Choice(reference, "reference", f"there is no native code for {device.type} devices")
    try:
        backend, description = _load(device)
    except Unavailable as error:
        if setting == "native":
            raise ConfigError(f"{SETTING}=native is set, but {error}") from error
        warnings.warn(f"gradients on {device.type} are swept by the slower reference: {error}", stacklevel=5)
        return Choice(reference, "reference", str(error))
    return Choice(backend, "native", description)


def _load(device: torch.device) -> tuple[Backend, str]:
    if device.type == "cpu":
        from distscale.sweep import cpu

        return cpu, cpu.load().description
    from distscale.sweep import cuda

    return cuda, cuda.load(device).description
