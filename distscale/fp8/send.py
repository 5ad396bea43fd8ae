"""send_gradients_in_fp8: makes FSDP2, FSDP1 or DDP reduce the gradients of a model in FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from distscale.errors import ConfigError
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.sender import Sender, Traffic, WireOptions

__all__ = ["SentGradients", "send_gradients_in_fp8"]


class SentGradients:
    """What :func:`send_gradients_in_fp8` returns."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """What this rank has sent, counted."""
        self.senders: list[Sender] = []
        """One for each FSDP unit."""


def send_gradients_in_fp8(
    model: nn.Module,
    scales: Fp8Scales,
    *,
    granularity: Literal["tensor", "block"] = "tensor",
    exempt: Callable[[str, nn.Parameter], bool] | None = None,
    min_numel: int = 4096,
    stochastic_rounding: bool = False,
    seed: int = 0,
    prefix: str = "",
) -> SentGradients:
    """Makes the gradients of a model travel in FP8 when they are reduced; before the first step, on all ranks alike.

    Each rank casts what it has with a scale that was agreed on in the step before, the bytes go by all-to-all to where
    they are to be reduced, and are summed there in fp32: no sum is ever formed in FP8. The amax of what was sent, and
    the number of values beyond the scale, travel in the exchange of the step, so such a scale is lower at the next
    step; inf and NaN on any rank make all of them skip this one::

        fully_shard(model)
        scales = Fp8Scales(DelayedScaling())          # or what convert_to_fp8 returned
        send_gradients_in_fp8(model, scales)
        scaler = DistributedGradScaler(names=model, fp8=scales)

    FSDP2: every unit's reduce-scatter, in E4M3 unless the recipe says E5M2. Under HSDP that is the one between shards;
    the all-reduce between replicas stays in its dtype. A unit on one shard has no reduce-scatter, and stays as it is.

    Args:
        model: with FSDP2 units.
        scales: given to the scaler, too; the same recipe on all ranks.
        granularity: "tensor", or "block": a power of two for every 128 values instead of an agreed scale, for one more
            byte for every 128. Nothing saturates then.
        exempt: given the name of a parameter and the parameter; those for which it is true travel in bf16. By default
            those are norms, biases and everything else of one dimension, embeddings, and tensors with fewer than
            ``min_numel`` elements.
        stochastic_rounding: round up or down at random, so that the mean is right: more noise and no bias.
        seed: of stochastic rounding.
        prefix: of the names in ``scales``, where several models share them.

    Raises:
        ConfigError: if the model is not one of these, or its gradients are sent in FP8 already.
    """
    if granularity not in ("tensor", "block"):
        raise ConfigError(f"granularity={granularity!r} is not allowed: tensor, block")
    # Importing FSDP takes most of a second, and its user has done so.
    from torch.distributed.fsdp import FSDPModule

    from distscale.fp8.reduce_scatter import hook_fsdp2

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} has no FSDP2 unit: call fully_shard() on it before")
    options = WireOptions(granularity == "block", stochastic_rounding, seed, prefix)
    sent = SentGradients()
    is_exempt = exempt or _exempt_by_default(model, min_numel)

    def make(params: Mapping[str, nn.Parameter]) -> Sender:
        in_fp8 = [name for name, param in params.items() if param.requires_grad and not is_exempt(name, param)]
        sent.senders.append(Sender(in_fp8, scales, options, sent.traffic))
        return sent.senders[-1]

    hook_fsdp2(model, {param: name for name, param in model.named_parameters()}, make)
    return sent


def _exempt_by_default(model: nn.Module, min_numel: int) -> Callable[[str, nn.Parameter], bool]:
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    embedded = {module.weight for module in model.modules() if isinstance(module, embeddings)}
    return lambda _, param: param.ndim < 2 or param.numel() < min_numel or param in embedded
