"""torch.compile of a model with FP8 linears: one graph, and the same amax bits as without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distscale.fp8 import CurrentScaling, DelayedScaling, Recipe, convert_to_fp8

pytestmark = [  # both by torch's own compiler
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def two_steps(recipe: Recipe, num_tokens: Sequence[int], **how: Any) -> tuple[Tensor, list[Tensor]]:
    """Amax bits of both steps, and what the last micro-batch gave; compiled if ``how`` says how."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 8))
    scales = convert_to_fp8(model, recipe)
    call = torch.compile(model, fullgraph=True, **how) if how else model
    seen = []
    cpu, loss_scale = torch.device("cpu"), torch.tensor(4.0)
    scales.agree([scales.tensors], cpu)
    for _ in range(2):
        for size in num_tokens:
            input = torch.randn(size, 16, requires_grad=True)
            output = call(input)
            model.zero_grad()
            (output.sum() * loss_scale).backward()
        seen.append(scales.collect(cpu).bits)
        scales.commit(seen[-1], torch.tensor(0.0), loss_scale)
        scales.clear()
        scales.hand_out(loss_scale)
    with torch.no_grad():
        call(torch.full((num_tokens[-1], 16), 1e6))
    assert not scales.collect(cpu).bits.any()
    gradients = [input.grad, *(param.grad for param in model.parameters())]
    return torch.stack(seen), [output, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "num_tokens", "how"),
    [
        # The first use of the compiler for a CPU takes a minute: as few kernels as will do.
        (DelayedScaling(fp8_format="E4M3"), (8, 8), {"backend": "inductor"}),
        (DelayedScaling(), (6, 24, 11), {"backend": "aot_eager"}),
        (CurrentScaling(), (6, 24), {"backend": "aot_eager", "dynamic": True}),
    ],
)
def test_compiled_and_not_see_the_same(recipe: Recipe, num_tokens: tuple[int, ...], how: dict[str, Any]) -> None:
    bits, values = two_steps(recipe, num_tokens)
    compiled_bits, compiled_values = two_steps(recipe, num_tokens, **how)
    assert bits.all() and torch.equal(compiled_bits, bits)
    assert len(values) == 6
    for value, compiled_value in zip(values, compiled_values, strict=True):
        torch.testing.assert_close(compiled_value, value)
