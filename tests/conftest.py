"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

# A busy machine is no failure, so no deadlines. CI draws the same examples every time.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A group that a test forgot would be the default group of the next one."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group behind; call dist.destroy_process_group()")
