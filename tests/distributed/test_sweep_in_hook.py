"""A sweep of FSDP2's flat reduced buffer, inside the hook that runs while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import local, results_by_case, tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from distscale.sweep import INF_BITS, Part, sweep

WORLD_SIZE = 2
CPU = torch.device("cpu")
INV_SCALE = torch.tensor(0.25, dtype=torch.float64)
Found = tuple[list[int], float]
"""Amax bits by slot, and the sum of squares."""


def found_in(tensors: Sequence[Tensor]) -> Found:
    parts = [Part(tensor, slot, 1.0, True) for slot, tensor in enumerate(tensors)]
    swept = sweep(parts, len(parts), INV_SCALE, True, CPU)
    assert swept.sums is not None
    return swept.slots.tolist(), swept.sums.item()


def run(poison: Callable[[nn.Sequential], None] | None = None, **policy: Any) -> dict[str, Any]:
    """One backward pass of a model whose layers are sharded one by one: 7, 2 and 1 rows, so with padding."""
    model = tiny_model()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    seen: dict[int, Tensor] = {}
    flat: dict[int, Found] = {}
    views: dict[int, Found] = {}

    def look(index: int) -> Callable[[Tensor], None]:
        def hook(reduced: Tensor) -> None:
            seen[index] = reduced
            flat[index] = found_in([reduced])
            views[index] = found_in(views_of(reduced, list(layers[index].parameters())))

        return hook

    for index, layer in enumerate(layers):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
        assert isinstance(layer, FSDPModule)
        layer.set_all_reduce_hook(look(index))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    if poison is not None:
        poison(model)
    torch.manual_seed(dist.get_rank())
    (4.0 * model(torch.randn(5, 4))).square().sum().backward()
    after = {index: found_in([local(param.grad) for param in layer.parameters()]) for index, layer in enumerate(layers)}
    padding = [
        seen[index].numel() - sum(local(param.grad).numel() for param in layer.parameters())
        for index, layer in enumerate(layers)
    ]
    both = torch.tensor([flat[index][0][0] for index in range(len(layers))], dtype=torch.int32)
    here = (both >= INF_BITS).tolist()
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return {
        "flat": flat,
        "views": views,
        "after": after,
        "padding": padding,
        "dtypes": {str(buffer.dtype) for buffer in seen.values()},
        "bad here": here,
        "bad anywhere": (both >= INF_BITS).tolist(),
    }


def views_of(reduced: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """This rank's rows of every parameter. Each rank has room for as many rows as any."""
    views = []
    offset = 0
    for param in params:
        rows = -(-param.shape[0] // WORLD_SIZE)
        row = param[:1].numel() if param.ndim > 1 else 1
        views.append(reduced[offset : offset + local(param).numel()])
        offset += rows * row
    assert offset == reduced.numel()
    return views


def fp32(rank: int) -> dict[str, Any]:
    return run()


def fp16(rank: int) -> dict[str, Any]:
    return run(param_dtype=torch.float16, reduce_dtype=torch.float16)


def bf16_reduced_in_fp32(rank: int) -> dict[str, Any]:
    return run(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def inf_in_one_row(rank: int) -> dict[str, Any]:
    """Rank 1 adds an inf to a row that rank 0 keeps, in the layer that the backward pass comes to last."""

    def set_inf(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0, 0] = float("inf")
        return grad

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(set_inf)

    def poison(model: nn.Sequential) -> None:
        if rank == 1:
            model[0].register_forward_hook(hook)

    return run(poison)


def inf_in_an_input(rank: int) -> dict[str, Any]:
    """Rank 1 alone has a bad sample; it reaches every row of every layer."""

    def poison(model: nn.Sequential) -> None:
        if rank == 1:
            model.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * float("inf"),))

    return run(poison)


CASES = (fp32, fp16, bf16_reduced_in_fp32, inf_in_one_row, inf_in_an_input)


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


@pytest.mark.parametrize("case", ["fp32", "fp16", "bf16_reduced_in_fp32"])
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_the_buffer_holds_what_the_gradients_are(results: dict[str, list[Any]], case: str, rank: int) -> None:
    seen = results[case][rank]
    assert seen["after"].keys() == {0, 1, 2}
    for index, (slots, squares) in seen["after"].items():
        assert seen["views"][index] == (slots, pytest.approx(squares, rel=1e-6))
        assert seen["flat"][index] == ([max(slots)], pytest.approx(squares, rel=1e-6))
    assert not any(seen["bad anywhere"])
    assert all(squares > 0 for _, squares in seen["after"].values()) or rank == 1


def test_the_buffers_were_what_they_should_be(results: dict[str, list[Any]]) -> None:
    """Half precision where it was asked for, and padding, which must not count."""
    assert [results[case][0]["dtypes"] for case in ("fp32", "fp16", "bf16_reduced_in_fp32")] == [
        {"torch.float32"}, {"torch.float16"}, {"torch.float32"}
    ]  # fmt: skip
    assert [seen["padding"] for seen in results["fp32"]] == [[0, 0, 0], [5, 0, 3]]


def test_an_inf_is_seen_where_it_lies_and_then_by_all(results: dict[str, list[Any]]) -> None:
    by_rank = results["inf_in_one_row"]
    assert [seen["bad here"] for seen in by_rank] == [[True, False, False], [False, False, False]]
    assert [seen["bad anywhere"] for seen in by_rank] == [[True, False, False]] * 2
    for seen in by_rank:
        assert {index: found[0] for index, found in seen["views"].items()} == {
            index: found[0] for index, found in seen["after"].items()
        }


def test_a_bad_sample_of_one_rank_is_seen_on_both(results: dict[str, list[Any]]) -> None:
    for seen in results["inf_in_an_input"]:
        assert seen["bad anywhere"] == [True, True, True]
        assert seen["bad here"][0]
