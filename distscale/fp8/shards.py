"""Gradients that stay in FP8 between micro-batches, and up to the optimizer: a quarter of the memory of fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distscale.errors import ConfigError
from distscale.fp8.cast import cast_by_own_amax
from distscale.fp8.recipe import CurrentScaling
from distscale.shards import Fp8Shard, is_dtensor, is_partial

__all__ = ["keep_gradients_in_fp8"]

_DTYPE = torch.float8_e4m3fn
_FSDP_FLATTENED = "_fsdp_flattened"
"""What FSDP1 marks its parameters with, of which it makes others."""


def keep_gradients_in_fp8(params: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Moves each gradient into ``param.fp8_grad`` as soon as it is there, in E4M3 with a scale of its own.

    Each micro-batch is added in fp32, and the sum cast again, by its own amax on this rank. ``scaler.step`` sweeps
    gradients as they are kept, with their scale, takes them back into ``grad`` for the optimizer, and drops them if the
    step is skipped; ``scaler.unscale_`` takes them back, too. inf and NaN become NaN, and so skip the step.

    For FSDP2 after ``fully_shard``, and for parameters that are on one rank. Not for DDP and FSDP1, which reduce
    gradients after such hooks have run; the first step under DDP is an error. A DTensor gradient with a pending
    reduction (``Partial``, as of norms under sequence parallelism) stays in ``grad`` until the step reduces it; sparse
    and complex ones stay there, too. Do not clear gradients with ``zero_grad`` between ``backward`` and ``step``; it
    does not know of these. Leave out :func:`distscale.integrations.fsdp.overlap`: it holds what it has swept until the
    step, so no memory is saved.

    Returns:
        Handles that end it. Collective: no. Syncs host: no.

    Raises:
        ConfigError: if there is nothing to keep, or parameters are those of FSDP1.
    """
    kept = [param for param in params if param.requires_grad]
    if any(getattr(param, _FSDP_FLATTENED, False) for param in kept):
        raise ConfigError(
            "gradients cannot be kept in FP8 under FSDP1, which reduces them after they would be taken: use FSDP2, "
            "or leave keep_gradients_in_fp8 out"
        )
    if not kept:
        raise ConfigError(
            "there is no parameter that requires a gradient; call keep_gradients_in_fp8(model.parameters())"
        )
    return [param.register_post_accumulate_grad_hook(_keep) for param in kept]  # type: ignore[no-untyped-call]


@torch.no_grad()
def _keep(param: Tensor) -> None:
    grad = param.grad
    if grad is None or is_partial(grad) or grad.is_sparse or grad.is_complex():
        return
    values = (grad.to_local() if is_dtensor(grad) else grad).float()
    kept: Fp8Shard | None = getattr(param, "fp8_grad", None)
    if kept is not None:
        values = values + kept.dequantized()
    fp8, scale, _ = cast_by_own_amax(values, _DTYPE, CurrentScaling())
    param.fp8_grad = Fp8Shard(fp8, scale.reciprocal(), grad)  # type: ignore[attr-defined]
    param.grad = None
