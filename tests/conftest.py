"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

# A busy machine is no failure, so no deadlines. The same examples are drawn every time, but in a soak
# (DISTSCALE_EXAMPLES=20 pytest tests/property), which is to find new ones.
settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("soak", deadline=None, print_blob=True)
settings.load_profile("soak" if "DISTSCALE_EXAMPLES" in os.environ else "same")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A group that a test forgot would be the default group of the next one."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group behind; call dist.destroy_process_group()")
