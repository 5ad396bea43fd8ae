"""send_gradients_in_fp8: makes FSDP2, FSDP1 or DDP reduce the gradients of a model in FP8."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distscale.errors import ConfigError
from distscale.fp8.feedback import Feedback
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.sender import Sender, Traffic, WireOptions

__all__ = ["SentGradients", "send_gradients_in_fp8"]


class SentGradients:
    """What :func:`send_gradients_in_fp8` returns: what was sent, and what is to be saved of it."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """What this rank has sent to others, counted."""
        self.senders: list[Sender] = []
        """One for each FSDP2 unit, or one."""

    def state_dict(self) -> dict[str, Any]:
        """Where stochastic rounding is, the same on all ranks; with error feedback also the residuals of this rank.

        Without either there is nothing worth saving. Residuals are under the scaler's loss scale, so save them between
        ``update()`` and the next backward pass, with the scaler. Syncs host: with error feedback.

        For ``torch.distributed.checkpoint``, which loads what the new state has and nothing else, the residuals are the
        bytes of one entry of each rank.
        """
        num_calls = [sender.num_calls for sender in self.senders]
        state: dict[str, Any] = {"num_calls": num_calls}
        if self._feedbacks:
            residuals = {name: values for feedback in self._feedbacks for name, values in feedback.state_dict().items()}
            state[_entry()] = _to_bytes({"world_size": dist.get_world_size(), "of": num_calls, "residuals": residuals})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave for the same model, on this rank.

        Residuals cannot be divided among another number of ranks: error feedback begins without them then, as where
        they were not saved, with a warning.

        Raises:
            ConfigError: if it is the state of another model.
        """
        num_calls = state.get("num_calls", ())
        if len(num_calls) != len(self.senders):
            raise ConfigError(
                f"this is not the state of gradients sent from {len(self.senders)} units: it is of {len(num_calls)}. "
                "Without loading, rounding begins anew, and error feedback without residuals"
            )
        for sender, calls in zip(self.senders, num_calls, strict=True):
            sender.num_calls = calls
        if self._feedbacks:
            saved = _from_bytes(state[_entry()]) if _entry() in state else {}
            # What was not loaded into a state is as old as that.
            is_mine = saved.get("world_size") == dist.get_world_size() and saved["of"] == num_calls
            if not is_mine:
                warnings.warn(
                    "error feedback begins without residuals: the state has none of this rank among "
                    f"{dist.get_world_size()}, but of {saved.get('world_size', 'other')}",
                    stacklevel=2,
                )
            for feedback in self._feedbacks:
                feedback.load_state_dict(saved["residuals"] if is_mine else {})

    @property
    def _feedbacks(self) -> list[Feedback]:
        return [sender.feedback for sender in self.senders if sender.feedback is not None]


def _entry() -> str:
    return f"residuals_of_rank{dist.get_rank()}"


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)


def send_gradients_in_fp8(
    model: nn.Module,
    scales: Fp8Scales,
    *,
    granularity: Literal["tensor", "block"] | None = None,
    exempt: Callable[[str, nn.Parameter], bool] | None = None,
    min_numel: int = 4096,
    stochastic_rounding: bool = False,
    error_feedback: bool = False,
    gather_in_fp8: bool = False,
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

    They go in E4M3 unless the recipe says E5M2.

    FSDP2: every unit's reduce-scatter. Under HSDP that is the one between shards; the all-reduce between replicas stays
    in its dtype. A unit on one shard has no reduce-scatter, and stays as it is.

    DDP: its all-reduce becomes such a reduce-scatter, and a gather of the averages in 16 bits, or in FP8.

    FSDP1: every unit's reduce-scatter, always in blocks. The hook is not told where one parameter ends, so none is
    exempt.

    Args:
        model: with FSDP2 units, or a ``DistributedDataParallel`` or ``FullyShardedDataParallel``.
        scales: given to the scaler, too; the same recipe on all ranks.
        granularity: "tensor", or "block": a power of two for every 128 values instead of an agreed scale, for one more
            byte for every 128. Nothing saturates then. By default "tensor", with FSDP1 "block".
        exempt: given the name of a parameter and the parameter; those for which it is true travel in bf16. By default
            those are norms, biases and everything else of one dimension, embeddings, and tensors with fewer than
            ``min_numel`` elements.
        stochastic_rounding: round up or down at random, so that the mean is right: more noise and no bias.
        error_feedback: keep what rounding takes away, and add it at the next step; not with FSDP1. It takes 4 bytes for
            each value of the gradients before they are sharded, and as much again from the backward pass to ``update``.
        gather_in_fp8: of DDP: rounds a second time, which adds as much error again, and takes 1 byte instead of 2.
        seed: of stochastic rounding.
        prefix: of the names in ``scales``, where several models share them.

    Raises:
        ConfigError: if the model is not one of these, cannot do what is asked for, or sends in FP8 already.
    """
    if granularity not in (None, "tensor", "block"):
        raise ConfigError(f"granularity={granularity!r} is not allowed: tensor, block")
    # Importing FSDP takes most of a second, and who uses it has done so.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from distscale.fp8.comm_hook import hook_ddp, hook_fsdp1
    from distscale.fp8.reduce_scatter import hook_fsdp2

    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    if is_fsdp1 and (granularity == "tensor" or exempt is not None or error_feedback):
        raise ConfigError(
            "FSDP1 does not tell its hook which parameters a gradient is of, so granularity='tensor', exempt= and "
            "error_feedback= are not for it: leave them out, or use FSDP2"
        )
    if gather_in_fp8 and not isinstance(model, DistributedDataParallel):
        raise ConfigError("gather_in_fp8 is for DDP; with FSDP no gradients are gathered")
    is_blockwise = is_fsdp1 or granularity == "block"
    options = WireOptions(is_blockwise, stochastic_rounding, error_feedback, gather_in_fp8, seed, prefix)
    sent = SentGradients()
    is_exempt = (lambda *_: False) if is_fsdp1 else exempt or _exempt_by_default(model, min_numel)

    def make(params: Mapping[str, nn.Parameter]) -> Sender:
        in_fp8 = [name for name, param in params.items() if param.requires_grad and not is_exempt(name, param)]
        sent.senders.append(Sender(in_fp8, scales, options, sent.traffic))
        return sent.senders[-1]

    if isinstance(model, DistributedDataParallel):
        hook_ddp(model, {param: name for name, param in model.module.named_parameters()}, make)
    elif isinstance(model, FullyShardedDataParallel):
        hook_fsdp1(model, make)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        hook_fsdp2(model, {param: name for name, param in model.named_parameters()}, make)
    else:
        raise ConfigError(
            f"{type(model).__name__} is neither a DDP nor an FSDP1 model, and has no FSDP2 unit: wrap it before, with "
            "fully_shard() for instance"
        )
    return sent


def _exempt_by_default(model: nn.Module, min_numel: int) -> Callable[[str, nn.Parameter], bool]:
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    embedded = {module.weight for module in model.modules() if isinstance(module, embeddings)}
    return lambda _, param: param.ndim < 2 or param.numel() < min_numel or param in embedded
