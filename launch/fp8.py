"""FP8 in the example model, as the config asks for it."""

from __future__ import annotations

from torch import nn

from distscale.config import Config
from distscale.fp8 import CurrentScaling, DelayedScaling, Fp8Scales, Recipe, convert_to_fp8, send_gradients_in_fp8
from distscale.sections import Fp8Section

__all__ = ["convert", "send"]


def convert(model: nn.Module, config: Config) -> Fp8Scales | None:
    """Makes the linear layers of the blocks multiply in FP8, if they are to. Before the model is sharded.

    Returns:
        The scales of all that is in FP8; None if nothing is.
    """
    fp8 = config.fp8
    if not fp8.is_used:
        return None
    scales = Fp8Scales(_recipe(fp8))
    if fp8.linears:
        convert_to_fp8(model, scales, filter=lambda name, _: name.startswith("blocks."))
    return scales


def send(model: nn.Module, scales: Fp8Scales | None, config: Config) -> None:
    """Makes gradients travel in FP8, if they are to. After the model was sharded."""
    if scales is not None and config.fp8.gradients:
        # The embeddings are bare parameters here, which distscale does not know for what they are.
        send_gradients_in_fp8(model, scales, exempt=lambda name, param: param.ndim < 2 or name in ("token", "position"))
    if scales is not None and config.fp8.scaling == "none":
        for meter in scales.meters:
            meter.scale.fill_(1.0)


def _recipe(fp8: Fp8Section) -> Recipe:
    if fp8.scaling == "delayed":
        return DelayedScaling(fp8.fp8_format, fp8.margin, fp8.power_of_two, fp8.amax_history_len, fp8.amax_compute_algo)
    return CurrentScaling(fp8.fp8_format, fp8.margin, fp8.power_of_two)
