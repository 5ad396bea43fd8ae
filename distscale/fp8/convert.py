"""convert_to_fp8: makes the linear layers of a model multiply in FP8."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn

from distscale.errors import ConfigError
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.linear import Fp8Linear
from distscale.fp8.recipe import Recipe

__all__ = ["convert_to_fp8"]


def convert_to_fp8(
    model: nn.Module,
    recipe: Recipe | Fp8Scales,
    *,
    filter: Callable[[str, nn.Linear], bool] | None = None,
    prefix: str = "",
) -> Fp8Scales:
    """Makes every ``nn.Linear`` of a model an :class:`~distscale.fp8.Fp8Linear`, in place, and returns their scales.

    Modules, parameters and the keys of ``state_dict()`` stay the same. Before the model is wrapped or compiled, on all
    ranks alike; before or after ``parallelize_module``::

        scales = convert_to_fp8(model, DelayedScaling(), filter=lambda name, _: name != "lm_head")
        fully_shard(model)
        scaler = DistributedGradScaler(names=model, fp8=scales)

    Subclasses of ``nn.Linear`` are left as they are, since their ``forward`` is their own; so is the output layer of
    ``nn.MultiheadAttention``, which is never called.

    Args:
        model: a layer alone will do.
        recipe: the same on all ranks; "E4M3" or "HYBRID", as no GPU multiplies E5M2 with E5M2. Or the scales that the
            conversion of another model, or another part of this one, has returned, to add to them.
        filter: given the name of a layer and the layer; those for which it is false stay as they are. The first and the
            last one of a model are often left out.
        prefix: of the names in the scales, where several models share them.

    Returns:
        What the scaler wants as ``fp8``: the tensors "NAME.input", "NAME.weight" and "NAME.grad_output" of each layer.

    Raises:
        ConfigError: if nothing is left to convert, layers are converted already, the scales have their names already,
            the model is wrapped, or the recipe is not one for linear layers. Nothing was converted then.
    """
    scales = recipe if isinstance(recipe, Fp8Scales) else Fp8Scales(recipe)
    if scales.recipe.fp8_format == "E5M2":
        raise ConfigError("E5M2 alone is not for linear layers, no GPU multiplies E5M2 with E5M2: use HYBRID")
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, Fp8Linear):
            raise ConfigError(f"{name or 'the model'} is an Fp8Linear already; a model is to be converted once")
        if _wraps(module):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}: call convert_to_fp8 on the model before it is "
                "wrapped or compiled"
            )
    linears = {name: module for name, module in modules.items() if type(module) is nn.Linear}
    chosen = {name: linear for name, linear in linears.items() if filter is None or filter(name, linear)}
    if not chosen:
        left = f"the filter leaves out all {len(linears)} of them" if linears else "it has no nn.Linear"
        raise ConfigError(f"there is nothing to convert in this {type(model).__name__}: {left}")
    by_name = {prefix + (name or "linear"): linear for name, linear in chosen.items()}
    known = {tensor.name for tensor in scales.tensors}
    for name in by_name:
        if any(tensor.name in known for tensor in Fp8Linear.tensors(name)):
            raise ConfigError(
                f"the scales have a layer {name!r} already, of another model or another part of this one: give "
                "convert_to_fp8 a prefix= of this one, such as 'critic.', the same on all ranks"
            )
    for name, linear in by_name.items():
        Fp8Linear.replace(linear, name, scales)
    return scales


def _wraps(module: nn.Module) -> bool:
    """Whether the modules within have other names, or classes, than those of the model."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    # Importing torch.compile takes seconds; where nobody has done so, nothing is compiled.
    compiled: type | tuple[()] = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    wrappers = (FSDPModule, FullyShardedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)
    return isinstance(module, (*wrappers, compiled))
