"""What one rank can say of itself: its place, its versions, its files, and how its sweep does."""

from __future__ import annotations

import hashlib
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import distscale
from distscale.diagnose import choose_quietly, faults
from distscale.env import Environment
from distscale.machine import device_name, versions
from distscale.sweep.choice import Backend
from distscale.sweep.parts import Part, Request

__all__ = ["Facts", "combined", "digests", "facts_of", "package_digests"]

_CODE = frozenset({".py", ".cu", ".cuh", ".h", ".cpp", ".so"})
_NUMEL, _ROUNDS = 1 << 22, 5


@dataclass(frozen=True)
class Facts:
    """What is true of one rank."""

    rank: int
    host: str
    device: str
    """Its kind: ``cpu`` or ``cuda``."""
    hardware: str
    """The model of the device."""
    versions: dict[str, str | None]
    """Of distscale, torch and so on."""
    code: str
    """Digest of the files of the package, its native library included."""
    files: dict[str, str | None]
    """Digests of the files that were named; None if it cannot be read."""
    sweep: str
    """``native`` or ``reference``."""
    sweep_gb_per_s: float | None
    """What a read-only sweep of 16 MiB in fp32 takes in, the median of 5; None if it fails."""
    sweep_faults: tuple[str, ...]
    """What the self-test found; empty: it passed."""


def facts_of(environment: Environment, device: torch.device, files: Sequence[str]) -> Facts:
    """Gathers the facts and tests the sweep. Collective: no. Syncs host: yes.

    Never raises for what is wrong with the sweep, since the other ranks wait to hear of it.
    """
    sweep, speed = "none", None
    found: list[str] = []
    try:
        choice = choose_quietly(device)
        sweep = choice.name
        found += faults(choice.backend, device)
        speed = _speed(choice.backend, device)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return Facts(
        rank=environment.rank,
        host=socket.gethostname(),
        device=device.type,
        hardware=device_name(device),
        versions=versions(),
        code=combined(package_digests()),
        files=digests(files),
        sweep=sweep,
        sweep_gb_per_s=speed,
        sweep_faults=tuple(found),
    )


def package_digests() -> dict[str, str | None]:
    """Digests of the sources and the native library of distscale as they lie on this machine. Collective: no.

    By name, in order. None for a file that cannot be read.
    """
    found = {}
    # An editable installation has two folders: that of what was built, which counts first, and that of the sources.
    for folder in reversed(distscale.__path__):
        for path in Path(folder).rglob("*"):
            if path.suffix in _CODE:
                found[f"distscale/{path.relative_to(folder)}"] = _digest_of_file(path)
    return dict(sorted(found.items()))


def digests(files: Sequence[str]) -> dict[str, str | None]:
    """Digests of files, by name; None for one that cannot be read."""
    return {file: _digest_of_file(Path(file)) for file in files}


def combined(of_files: Mapping[str, str | None]) -> str:
    """One digest of several."""
    return _digest("".join(f"{name} {digest}\n" for name, digest in of_files.items()).encode())


def _digest_of_file(file: Path) -> str | None:
    try:
        return _digest(file.read_bytes())
    except OSError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _speed(backend: Backend, device: torch.device) -> float:
    values = torch.ones(_NUMEL, device=device)
    part = Part(values, 0, 1.0, False)
    request = Request(1, torch.ones((), dtype=torch.float64, device=device), True)
    seconds = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        backend.sweep([part], request).slots.cpu()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return values.nbytes / statistics.median(seconds[1:]) / 1e9  # the first may compile
