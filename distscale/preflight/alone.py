"""What ``distscale check`` finds out in one process, which has no others to compare itself with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from distscale.diagnose import Finding, diagnose
from distscale.machine import commit, versions
from distscale.preflight.facts import digests
from distscale.sweep.choice import SETTING

__all__ = ["OwnReport", "check_alone"]


@dataclass(frozen=True)
class OwnReport:
    """What is in use in this process, and whether it works."""

    versions: dict[str, str | None]
    """Of distscale, torch and so on."""
    commit: str | None
    """That distscale is checked out at."""
    setting: str | None
    """Of the environment, on which sweep to use."""
    threads: int
    torch_cpu_capability: str
    files: dict[str, str | None]
    """Digests of the files that were named; None if it cannot be read."""
    devices: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return None not in self.files.values() and not any(finding.faults for finding in self.devices)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"passed": self.passed}


def check_alone(files: Sequence[str]) -> OwnReport:
    """Reads the files, and tests the sweep of each device. Collective: no. Syncs host: yes.

    Raises:
        ConfigError: if ``DISTSCALE_SWEEP`` cannot be used.
    """
    return OwnReport(
        versions=versions(),
        commit=commit(),
        setting=os.environ.get(SETTING),
        threads=torch.get_num_threads(),
        torch_cpu_capability=torch.backends.cpu.get_cpu_capability(),
        files=digests(files),
        devices=tuple(diagnose()),
    )
