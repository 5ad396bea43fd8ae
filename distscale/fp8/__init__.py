"""FP8: one agreed scale for each tensor, from amax values that travel in the one exchange of the step."""

from distscale.fp8.all_gather import gather_weights_in_fp8 as gather_weights_in_fp8
from distscale.fp8.convert import convert_to_fp8 as convert_to_fp8
from distscale.fp8.keeper import Fp8Scales as Fp8Scales
from distscale.fp8.linear import Fp8Linear as Fp8Linear
from distscale.fp8.recipe import CurrentScaling as CurrentScaling
from distscale.fp8.recipe import DelayedScaling as DelayedScaling
from distscale.fp8.recipe import Recipe as Recipe
from distscale.fp8.send import SentGradients as SentGradients
from distscale.fp8.send import send_gradients_in_fp8 as send_gradients_in_fp8
from distscale.fp8.shards import keep_gradients_in_fp8 as keep_gradients_in_fp8
