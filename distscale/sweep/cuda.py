"""The sweep of tensors on an NVIDIA GPU: one launch of ``sweep.cu`` for all of them.

A call copies a record of 64 bytes a tensor to the GPU, from pinned memory and without waiting, zeroes its results, and
launches. How tensors are cut into chunks depends on their sizes alone; that table stays on the GPU. All of it happens
on torch's current stream of the device, in torch's memory, so that a CUDA graph can capture it once the table is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distscale.errors import ProtocolError
from distscale.sweep import nvrtc
from distscale.sweep.choice import Unavailable
from distscale.sweep.parts import Count, Part, Request, Swept
from distscale.sweep.plan import DTYPE_CODES, are_native, describe, describe_tensors

__all__ = ["BLOCK_SIZE", "Gpu", "load", "open_gpu", "scale_", "sweep", "takes"]

BLOCK_SIZE = 256
"""Threads of a block; ``sweep.cu`` says the same."""

# A block reads 16 KiB at once. A chunk is larger where there is enough to read for all blocks, so that the answer is
# formed from few partial sums: never more than 16 a block, and one for what is left of each tensor.
_LEAST_CHUNK = 1 << 14
_USUAL_CHUNK = 1 << 16
_CHUNK_STEP = 1 << 12
_MOST_WAVES = 16
_ITEM_SIZES = np.array([dtype.itemsize for dtype in DTYPE_CODES])
_PARTIAL_WORDS = 4  # of 32 bits, in the kernel's struct Partial
_COUNT_WORDS = 2 * len(Count)


class Gpu(Protocol):
    """What the sweep needs of a device; the tests put a host's in its place."""

    @property
    def description(self) -> str:
        """Of the code that it runs, for people."""

    def __hash__(self) -> int:
        """Of the device itself: its tables are kept by it."""

    def num_blocks(self, kernel: str) -> int:
        """Blocks of a kernel that run at the same time."""

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""

    def send(self, array: NDArray[Any], *, wait: bool = False) -> Tensor:
        """The bytes of an array on the device, copied in the order of the stream. Syncs host: if asked to ``wait``."""

    def launch(self, kernel: str, num_blocks: int, *arguments: int | float) -> None:
        """Runs a kernel on the current stream; every argument is a pointer, an int64 or a float64."""


@lru_cache(maxsize=64)
def load(device: torch.device) -> Gpu:
    """Loads the kernels for ``device``, compiled now or at another time.

    Raises:
        Unavailable: if they cannot be compiled, or the driver does not take them.
    """
    return open_gpu(device, nvrtc.SWEEP)


def open_gpu(device: torch.device, program: nvrtc.Program) -> Gpu:
    """Loads the kernels of any program for ``device``; likewise."""
    return _Gpu(device, program)


def takes(parts: Sequence[Part]) -> bool:
    """Whether all are of a native dtype and dense in memory."""
    return are_native(parts)


def sweep(parts: Sequence[Part], request: Request) -> Swept:
    """Checks and measures parts of one GPU; see :func:`distscale.sweep.reference.sweep`.

    Raises:
        ProtocolError: if a CUDA graph is being captured, and tensors of these sizes were not swept before.

    Collective: no. Syncs host: only where tensors of these sizes are new; the first sweep of all may compile.
    """
    device = parts[0].values.device
    gpu = load(device)
    records, numels = describe(parts, request)
    writes = request.limits is not None or any(part.out is not None for part in parts)
    kernel = "sweep_and_write" if writes else "sweep"
    table = _table_for(gpu, kernel, numels, records)

    # One buffer, zeroed at once, and the wide numbers first. The kernel's own cells are a small part of it.
    sizes = [_COUNT_WORDS * request.num_slots, 2 * request.num_groups, request.num_slots, len(parts) + 1]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    counts, sums, slots, amax = torch.split_with_sizes(zeros, sizes)
    partials = None
    if request.want_norm:
        partials = torch.empty(_PARTIAL_WORDS * max(table.num_chunks, 1), dtype=torch.int32, device=device)
    sent = gpu.send(records)
    inv_scale = request.inv_scale.to(device, non_blocking=True)
    gpu.launch(
        kernel,
        table.num_blocks,
        sent.data_ptr(),
        len(parts),
        table.chunks.data_ptr(),
        table.num_chunks,
        table.chunk_bytes,
        inv_scale.data_ptr(),
        amax.data_ptr(),
        0 if partials is None else partials.data_ptr(),
        slots.data_ptr(),
        sums.data_ptr(),
        request.num_groups,
        counts.data_ptr(),
        *(() if not writes else (0.0, 0.0) if request.limits is None else map(float, request.limits)),
    )
    return Swept(
        slots,
        sums.view(torch.float64) if request.want_norm else None,
        counts.view(torch.int64).view(request.num_slots, len(Count)),
    )


def scale_(tensors: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None) -> None:
    """Multiplies tensors of one GPU in place; see :func:`distscale.sweep.reference.scale_`.

    Raises:
        ProtocolError: as for :func:`sweep`.

    Collective: no. Syncs host: as :func:`sweep`, if the numbers are on the GPU.
    """
    device = tensors[0].device
    gpu = load(device)
    records, numels = describe_tensors(tensors)
    table = _table_for(gpu, "scale", numels, records)
    sent = gpu.send(records)
    factor = factor.to(device, non_blocking=True)
    found_inf = None if found_inf is None else found_inf.to(device, non_blocking=True)
    gpu.launch(
        "scale",
        table.num_blocks,
        sent.data_ptr(),
        table.chunks.data_ptr(),
        table.num_chunks,
        table.chunk_bytes,
        factor.data_ptr(),
        0 if found_inf is None else found_inf.data_ptr(),
    )


class _Table(NamedTuple):
    """How tensors of certain sizes are cut into chunks."""

    chunks: Tensor
    """On the device: pairs of int32, the tensor and the chunk's index in it."""
    num_chunks: int
    chunk_bytes: int
    num_blocks: int


_in_graphs: list[_Table] = []
"""Tables that captured graphs read again, whatever is swept until then."""


def _table_for(gpu: Gpu, kernel: str, numels: tuple[int, ...], records: NDArray[np.void]) -> _Table:
    table = _table(gpu, kernel, numels, records["dtype"].tobytes())
    if gpu.is_capturing():
        _in_graphs.append(table)
    return table


@lru_cache(maxsize=256)
def _table(gpu: Gpu, kernel: str, numels: tuple[int, ...], dtypes: bytes) -> _Table:
    if gpu.is_capturing():
        raise ProtocolError(
            "a CUDA graph is being captured, and tensors of these sizes were not swept before:"
            " run the step once before the capture, as torch.cuda.graph asks for anyway"
        )
    num_bytes = np.array(numels, np.int64) * _ITEM_SIZES[np.frombuffer(dtypes, np.int32)]
    total, num_blocks = int(num_bytes.sum()), gpu.num_blocks(kernel)
    waves = min(total // (num_blocks * _USUAL_CHUNK) + 1, _MOST_WAVES)
    even = -(-total // (num_blocks * waves))
    chunk_bytes = max(-(-even // _CHUNK_STEP) * _CHUNK_STEP, _LEAST_CHUNK)
    chunks_of = -(-num_bytes // chunk_bytes)
    firsts = np.cumsum(chunks_of) - chunks_of
    num_chunks = int(chunks_of.sum())
    chunks = np.empty((num_chunks, 2), np.int32)
    chunks[:, 0] = np.repeat(np.arange(len(numels)), chunks_of)
    chunks[:, 1] = np.arange(num_chunks) - np.repeat(firsts, chunks_of)
    # Later sweeps may be on other streams, which do not wait for this one.
    return _Table(gpu.send(chunks, wait=True), num_chunks, chunk_bytes, max(min(num_blocks, num_chunks), 1))


class _Gpu:
    """The kernels of a program on a real device."""

    def __init__(self, device: torch.device, program: nvrtc.Program) -> None:
        self._device = device
        built = nvrtc.build(program, torch.cuda.get_device_capability(device))
        self._arch = built.arch
        self.description = f"CUDA kernel for {built.arch}, NVRTC {built.nvrtc}, {built.origin}"
        from cuda.core import LaunchConfig, ObjectCode, launch

        self._launch, self._config = launch, LaunchConfig
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        try:
            with torch.cuda.device(device):
                is_ptx = built.arch.startswith("compute_")
                code = (ObjectCode.from_ptx if is_ptx else ObjectCode.from_cubin)(built.code, name=program.name)
                self._kernels = {name: code.get_kernel(name) for name in program.kernels}
                self._num_blocks: dict[str, int] = {
                    name: num_multiprocessors * kernel.occupancy.max_active_blocks_per_multiprocessor(BLOCK_SIZE, 0)
                    for name, kernel in self._kernels.items()
                }
        except Exception as error:  # cuda.core's errors have no public class in common
            raise Unavailable(f"the driver does not take the kernel for {built.arch} on {device}: {error}") from error

    def num_blocks(self, kernel: str) -> int:
        return self._num_blocks[kernel]

    def is_capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def send(self, array: NDArray[Any], *, wait: bool = False) -> Tensor:
        # Torch gives pinned memory to another only when the copy from it is over, and what a graph copies from to none.
        staging = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=True)
        staging.numpy()[:] = array.reshape(-1).view(np.uint8)
        return staging.to(self._device, non_blocking=not wait)

    def launch(self, kernel: str, num_blocks: int, *arguments: int | float) -> None:
        config = self._config(grid=num_blocks, block=BLOCK_SIZE)
        try:
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream(self._device)
                self._launch(stream, config, self._kernels[kernel], *arguments)
        except Exception as error:  # as above
            where = f"kernel {kernel} ({self._arch}, {num_blocks} blocks of {BLOCK_SIZE}) on {self._device}"
            raise RuntimeError(f"{where} could not be launched: {error}") from error
