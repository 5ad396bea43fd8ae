"""Stochastic rounding to FP8: up or down at random, so that it is right on average.

The random numbers are a hash of a key and of the place of the value (counter-based, as in Salmon et al., SC 2011), so
they need no state, and are the same on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["random_bits", "round_stochastically"]

_WORD = 0xFFFFFFFF
_FRACTION_BITS = 23
_BIAS = 127


def random_bits(index: Tensor, key: int) -> Tensor:
    """32 random bits for each index: int64, shape of ``index`` (int64). Other ones for another key.

    The mixing function is lowbias32 of C. Wellons' hash prospector, applied twice.
    """
    return _mix(_mix(index & _WORD) ^ (key & _WORD))


def round_stochastically(values: Tensor, dtype: torch.dtype, index: Tensor, key: int) -> Tensor:
    """Rounds to a number of ``dtype`` above or below, each with the probability that makes the mean right.

    ``floor(|x| / ulp + u) * ulp``, with ``u`` uniform in [0, 1) and of as many bits as the cast drops.

    Args:
        values: fp32, within the range of ``dtype``, or NaN, which stays.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        index: int64, shape of ``values``.

    Returns:
        fp32, exact in ``dtype``.
    """
    info = torch.finfo(dtype)
    mantissa_bits, lowest = -round(math.log2(info.eps)), round(math.log2(info.smallest_normal))
    exponent = ((values.view(torch.int32) >> _FRACTION_BITS & 0xFF) - _BIAS).clamp(min=lowest)
    ulp = (exponent - mantissa_bits + _BIAS << _FRACTION_BITS).view(torch.float32)
    num_bits = _FRACTION_BITS - mantissa_bits
    uniform = (random_bits(index, key) >> 32 - num_bits).float() * 2.0**-num_bits
    return ((values.abs() / ulp + uniform).floor() * ulp).copysign(values)


def _mix(word: Tensor) -> Tensor:
    # A product wraps around at 64 bits, which leaves the lower 32 right.
    word = word ^ word >> 16
    word = word * 0x7FEB352D & _WORD
    word = word ^ word >> 15
    word = word * 0x846CA68B & _WORD
    return word ^ word >> 16
