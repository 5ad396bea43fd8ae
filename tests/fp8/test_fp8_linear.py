"""Fp8Linear on one rank: what it computes, what it saves, and what it counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from distscale.errors import ConfigError
from distscale.fp8 import CurrentScaling, DelayedScaling, Fp8Linear, Fp8Scales, Recipe, convert_to_fp8
from distscale.fp8.cast import cast, quantize
from distscale.fp8.meter import Meter, Metered
from distscale.fp8.scales import bits_of_amax, scale_of_amax
from distscale.sweep import INF_BITS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HYBRID = DelayedScaling()


def converted(linear: nn.Linear, recipe: Recipe = HYBRID) -> Fp8Linear:
    convert_to_fp8(linear, recipe)
    assert isinstance(linear, Fp8Linear)
    return linear


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 7))


def amax_by_name(scales: Fp8Scales) -> dict[str, int]:
    scales.agree([scales.tensors], torch.device("cpu"))
    bits = scales.collect(torch.device("cpu")).bits
    return {tensor.name: int(value) for tensor, value in zip(scales.tensors, bits, strict=True)}


def step(scales: Fp8Scales, loss_scale: float = 1.0) -> None:
    """What the scaler does at each step, on one rank."""
    scales.agree([scales.tensors], torch.device("cpu"))
    scales.commit(scales.collect(torch.device("cpu")).bits, torch.tensor(0.0), torch.tensor(loss_scale))
    scales.clear()
    scales.hand_out(torch.tensor(loss_scale))


def relative_error(values: Tensor, truth: Tensor) -> float:
    return ((values.double() - truth.double()).norm() / truth.double().norm()).item()


# ---------------------------------------------------------------- the cast


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("of", [torch.float64, torch.float32, torch.bfloat16])
def test_cast_saturates_what_is_finite_and_nothing_else(dtype: torch.dtype, largest: float, of: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3e30, 3e30, torch.inf, -torch.inf, torch.nan], dtype=of)
    for scale in (2.0**-126, 1.0, 2.0**126):
        found = cast(values, torch.tensor(scale), dtype).float()
        assert found[-3:].isnan().all()
        assert not found[:-3].isnan().any() and not found[:-3].isinf().any()
        assert found[:2].tolist() == [0, 0] and found.signbit().tolist()[:2] == [False, True]
        if scale >= 1:
            assert found[3:5].tolist() == [-largest, largest]


def test_a_scale_that_is_known_is_used_and_an_unknown_one_is_the_tensor_s_own() -> None:
    meter = Meter([Metered("x", False), Metered("g", True)])
    values = torch.tensor([0.1, -5.0, 3.0])
    for index, dtype, largest in ((0, E4M3, 448.0), (1, E5M2, 57344.0)):
        fp8, scale = quantize(values, meter, index, HYBRID, records=True)
        assert fp8.dtype == dtype and scale == scale_of_amax(torch.tensor(5.0), largest, HYBRID)
        meter.scale[index] = 0.5
        fp8, scale = quantize(values, meter, index, HYBRID, records=True)
        assert scale == 0.5 and torch.equal(fp8.float(), (values * 0.5).to(dtype).float())
        assert meter.amax[index] == bits_of_amax(values)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_bad_value_is_seen_and_leaves_the_others_as_they_are(bad: float) -> None:
    meter = Meter([Metered("x", False)])
    fp8, scale = quantize(torch.tensor([0.25, bad, 2.0]), meter, 0, HYBRID, records=True)
    assert scale == 1 and meter.amax[0] >= INF_BITS
    assert fp8.float().isnan().tolist() == [False, True, False]
    assert quantize(torch.zeros(3), meter, 0, HYBRID, records=False)[1] == 1


# ---------------------------------------------------------------- the products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 32), (2, 5, 33), (33,), (0, 33)])
@pytest.mark.parametrize("recipe", [HYBRID, DelayedScaling(fp8_format="E4M3", power_of_two=False), CurrentScaling()])
def test_the_products_are_those_of_the_casts(dtype: torch.dtype, shape: tuple[int, ...], recipe: Recipe) -> None:
    torch.manual_seed(1)
    linear = converted(nn.Linear(shape[-1], 21, dtype=dtype), recipe)
    assert linear.bias is not None
    input = torch.randn(shape, dtype=dtype, requires_grad=True)
    output = linear(input)
    grad_output = torch.randn_like(output) * 1e-4
    output.backward(grad_output)

    def rounded(values: Tensor, is_gradient: bool) -> Tensor:
        fp8, scale = quantize(values, Meter([Metered("", is_gradient)]), 0, recipe, records=False)
        return (fp8.double() / scale.double()).reshape(-1, values.shape[-1])

    x, w, g = rounded(input, False), rounded(linear.weight, False), rounded(grad_output, True)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for found, truth, like in (
        (output, x @ w.t() + linear.bias.double(), output),
        (input.grad, g @ w, input),
        (linear.weight.grad, g.t() @ x, linear.weight),
        (linear.bias.grad, grad_output.double().reshape(-1, 21).sum(0), linear.bias),
    ):
        assert found is not None and found.dtype == dtype and found.shape == like.shape and found.is_contiguous()
        truth = truth.reshape(found.shape)
        assert (found.double() - truth).norm() <= tolerance * truth.norm() + 1e-30


@pytest.mark.parametrize(("fp8_format", "gradient_error"), [("E4M3", 0.05), ("HYBRID", 0.08)])
def test_errors_beside_fp32_are_those_of_fp8(fp8_format: str, gradient_error: float) -> None:
    """Two operands, each rounded to 4 significant bits (E4M3: 2.6 % rms) or 3 (E5M2: 5.3 %)."""
    torch.manual_seed(2)
    plain = nn.Linear(256, 128)
    linear = converted(copy.deepcopy(plain), DelayedScaling(fp8_format=fp8_format))  # type: ignore[arg-type]
    input = torch.randn(64, 256, requires_grad=True)
    same = input.detach().clone().requires_grad_()
    for _ in range(2):  # by its own amax, then by history
        input.grad = same.grad = None
        linear.zero_grad(), plain.zero_grad()
        output, truth = linear(input), plain(same)
        # So small that a cast without a scale would leave nothing of it.
        grad_output = torch.randn_like(truth) * 1e-7
        output.backward(grad_output), truth.backward(grad_output)
        assert 0.01 < relative_error(output, truth) < 0.05
        for found, true in ((input.grad, same.grad), (linear.weight.grad, plain.weight.grad)):
            assert found is not None and true is not None
            assert 0.01 < relative_error(found, true) < gradient_error
        linear.meter.scale.copy_(
            torch.tensor([scale_of_amax(amax, 448.0, HYBRID) for amax in linear.meter.amax.view(torch.float32)])
        )


def test_every_product_is_one_that_gpus_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in multiples of 16, a second operand in columns, not E5M2 twice; a CPU takes anything."""
    multiply, shapes = torch._scaled_mm, []

    def checked(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        assert left.is_contiguous() and right.t().is_contiguous()
        assert left.shape[1] % 16 == 0 and not any(size % 16 for size in right.shape)
        assert min(left.shape) > 0 and E4M3 in (left.dtype, right.dtype)
        assert kwargs["scale_a"].dtype == kwargs["scale_b"].dtype == torch.float32
        shapes.append((*left.shape, right.shape[1]))
        return multiply(left, right, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    linear = converted(nn.Linear(20, 33))
    for num_tokens in (0, 1, 16, 19):
        output = linear(torch.randn(num_tokens, 20, requires_grad=True))
        output.sum().backward()
        assert output.shape == (num_tokens, 33)
    one = [(1, 32, 48), (1, 48, 32), (33, 16, 32)]  # forward, by input, by weight
    assert shapes == [*one, (16, 32, 48), (16, 48, 32), (33, 16, 32), (19, 32, 48), (19, 48, 32), (33, 32, 32)]


def test_history_scales_the_next_step_and_saturates_what_has_grown() -> None:
    linear = nn.Linear(16, 16, bias=False)
    scales = convert_to_fp8(linear, HYBRID)
    assert isinstance(linear, Fp8Linear)
    nn.init.eye_(linear.weight)
    linear(torch.full((2, 16), 3.0)).sum().backward()
    step(scales)
    assert linear.meter.scale.tolist() == [128.0, 256.0, 32768.0]  # powers of two below 448/3, 448/1, 57344/1
    assert linear(torch.full((1, 16), 100.0)).max() == 448 / 128
    step(scales)
    assert linear(torch.full((1, 16), 100.0)).max() == 96  # E4M3 of 100 * 4, the even one of its two neighbours


def test_current_scaling_goes_by_each_tensor_s_own_amax() -> None:
    linear = nn.Linear(16, 16, bias=False)
    scales = convert_to_fp8(linear, CurrentScaling())
    nn.init.eye_(linear.weight)
    linear(torch.full((2, 16), 3.0)).sum().backward()
    step(scales)
    assert linear(torch.full((1, 16), 100.0)).max() == 96


def test_a_wrong_number_of_features_is_an_error() -> None:
    linear = converted(nn.Linear(12, 4))
    with pytest.raises(ValueError, match=r"12 features got an input of shape \(3, 9\)"):
        linear(torch.ones(3, 9))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_input_without_floating_point_is_an_error(dtype: torch.dtype) -> None:
    linear = converted(nn.Linear(12, 4))
    with pytest.raises(ValueError, match=f"an input of {dtype}: convert it to fp32, fp16 or bf16"):
        linear(torch.ones(3, 12, dtype=dtype))
    assert not linear.meter.amax.any()


def test_an_input_may_be_of_another_dtype_than_the_weight() -> None:
    """As under DDP, with activations in bf16 and weights in fp32."""
    linear = converted(nn.Linear(12, 4))
    input = torch.randn(3, 12, dtype=torch.bfloat16, requires_grad=True)
    output = linear(input)
    output.sum().backward()
    assert input.grad is not None and linear.weight.grad is not None
    assert output.dtype == input.grad.dtype == torch.bfloat16 and linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_dtype_as_to_other_linears(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(12, 4)
    linear = converted(copy.deepcopy(plain))
    input = torch.randn(5, 12, requires_grad=True)
    with torch.autocast("cpu", dtype):
        output, truth = linear(input), plain(input)
    assert output.dtype == truth.dtype == dtype
    output.sum().backward()
    assert input.grad is not None and input.grad.dtype == torch.float32
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.float32
    assert linear.meter.amax[0] == bits_of_amax(input.to(dtype))


# ---------------------------------------------------------------- what is saved


def test_the_input_is_saved_in_fp8_and_of_the_weight_no_copy() -> None:
    linear = converted(nn.Linear(32, 16))
    saved: list[Tensor] = []
    input = torch.randn(8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear(input)
    matrices = {tuple(tensor.shape): tensor for tensor in saved if tensor.dim() == 2}
    assert sorted(matrices) == [(8, 32), (16, 32)]
    assert matrices[8, 32].dtype == E4M3
    assert matrices[16, 32].data_ptr() == linear.weight.data_ptr()


def test_the_backward_pass_casts_the_weight_by_the_scale_of_the_forward_pass() -> None:
    linear = converted(nn.Linear(16, 16, bias=False))
    input = torch.ones(2, 16, requires_grad=True)
    output = linear(input)
    linear.meter.scale[1] = 2.0**-100  # a weight cast by it would be 0
    output.sum().backward()
    assert input.grad is not None and relative_error(input.grad, linear.weight.sum(0).expand(2, 16)) < 0.1


# ---------------------------------------------------------------- what counts


def test_amax_is_the_maximum_over_micro_batches_and_calls() -> None:
    linear = nn.Linear(12, 12, bias=False)
    scales = convert_to_fp8(linear, HYBRID)
    seen: list[Tensor] = []
    gradients: list[Tensor] = []
    for size in (1.0, 9.0, 2.0):  # the largest is neither the first nor the last
        input = torch.randn(3, 12) * size
        once = linear(input)
        twice = linear(once)  # a module that is called twice
        for output in (once, twice):
            output.register_hook(lambda grad: gradients.append(grad.clone()))
        (twice.sum() * size).backward()
        seen += [input, once]
    assert amax_by_name(scales) == {
        "linear.input": int(bits_of_amax(torch.cat(seen))),
        "linear.weight": int(bits_of_amax(linear.weight)),
        "linear.grad_output": int(bits_of_amax(torch.cat(gradients))),
    }
    step(scales)
    assert not any(amax_by_name(scales).values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_changes_nothing(use_reentrant: bool) -> None:
    def run(call: Callable[[nn.Module, Tensor], Tensor]) -> tuple[dict[str, int], list[Tensor | None]]:
        model = two_layers()
        scales = convert_to_fp8(model, HYBRID)
        for _ in range(2):
            torch.manual_seed(4)
            for size in (5.0, 1.0):
                (call(model, torch.randn(6, 12, requires_grad=True) * size) ** 2).sum().backward()
            found = amax_by_name(scales)
            step(scales)
        return found, [param.grad for param in model.parameters()]

    plain, gradients = run(lambda model, input: model(input))
    again, gradients_again = run(lambda model, input: checkpoint(model, input, use_reentrant=use_reentrant))
    assert again == plain and all(plain.values())
    assert all(map(torch.equal, gradients, gradients_again))


def test_evaluation_and_passes_without_gradients_count_nothing() -> None:
    model = two_layers()
    scales = convert_to_fp8(model, HYBRID)
    input = torch.randn(6, 12, requires_grad=True)
    expected = model(input)
    expected.sum().backward()
    scales.clear()

    with torch.no_grad():
        assert torch.equal(model(input), expected)
    with torch.inference_mode():
        assert torch.equal(model(input), expected)
    model.eval()
    output = model(input)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert not any(amax_by_name(scales).values())

    model.train()
    model(input).sum().backward()
    assert all(amax_by_name(scales).values())


def test_frozen_layers_count_what_they_see() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    scales = convert_to_fp8(model, HYBRID)
    model[0].requires_grad_(False)  # the first: no backward pass at all
    model[1].weight.requires_grad_(False)
    model[2].requires_grad_(False)  # a backward pass for its input alone
    model(torch.randn(4, 8)).sum().backward()
    assert model[1].bias is not None and model[1].bias.grad is not None
    assert all(param.grad is None for param in model.parameters() if param is not model[1].bias)
    unseen = {name for name, bits in amax_by_name(scales).items() if bits == 0}
    # Bias is added outside of the product, so nothing needs a gradient of the product of layers 0 and 1.
    assert unseen == {"0.grad_output", "1.grad_output"}


def test_unused_layers_and_empty_inputs_leave_nothing() -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8), "empty": nn.Linear(8, 8)})
    scales = convert_to_fp8(model, HYBRID)
    (model["used"](torch.randn(4, 8)).sum() + model["empty"](torch.randn(0, 8)).sum()).backward()
    found = amax_by_name(scales)
    assert {name for name, bits in found.items() if bits} == {
        *(f"used.{name}" for name in ("input", "weight", "grad_output")),
        "empty.weight",
    }
    assert model["empty"].weight.grad is not None and not model["empty"].weight.grad.any()
    assert model["unused"].weight.grad is None


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_bad_values_stay_bad(bad: float) -> None:
    linear = converted(nn.Linear(8, 8, bias=False))
    input = torch.randn(4, 8, requires_grad=True)
    poisoned = input.detach().clone()
    poisoned[1, 2] = bad
    assert linear(poisoned).isnan().any(dim=1).tolist() == [False, True, False, False]
    assert linear.meter.amax[0] >= INF_BITS
    output = linear(input)
    grad_output = torch.ones_like(output)
    grad_output[3, 3] = bad
    output.backward(grad_output)
    assert input.grad is not None and input.grad.isnan().any(dim=1).tolist() == [False, False, False, True]
    assert linear.weight.grad is not None and linear.weight.grad.isnan().any(dim=1).nonzero().tolist() == [[3]]
    assert linear.meter.amax[2] >= INF_BITS


# ---------------------------------------------------------------- the conversion


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.block = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=False)})
        self.same = self.block["up"]
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_modules_parameters_and_keys_stay() -> None:
    model = Tied()
    before = dict(model.named_parameters()), list(model.state_dict()), dict(model.named_modules())
    called: list[str] = []
    model.block["up"].register_forward_hook(lambda *_: called.append("hook"))
    scales = convert_to_fp8(model, HYBRID, filter=lambda name, linear: name != "head" and linear.in_features < 100)
    after = dict(model.named_parameters()), list(model.state_dict()), dict(model.named_modules())
    assert after[1] == before[1]
    assert all(after[0][name] is param for name, param in before[0].items())
    assert all(after[2][name] is module for name, module in before[2].items())
    assert {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)} == {
        "block.up",
        "block.down",
    }
    assert [tensor.name for tensor in scales.tensors] == [
        f"block.{layer}.{name}" for layer in ("up", "down") for name in ("input", "weight", "grad_output")
    ]
    assert [tensor.is_gradient for tensor in scales.tensors] == [False, False, True] * 2
    model.same(torch.ones(2, 8))
    assert called == ["hook"]
    # The rest of the model may follow, into the same scales.
    assert convert_to_fp8(model.head, scales) is scales
    assert scales.tensors[-1].name == "linear.grad_output"
    assert model.head.weight is model.embedding.weight


def test_models_share_scales_under_names_of_their_own_or_nothing_is_converted() -> None:
    actor, critic = nn.Sequential(nn.Linear(8, 8)), nn.ModuleDict({"other": nn.Linear(8, 8), "0": nn.Linear(8, 8)})
    scales = convert_to_fp8(actor, HYBRID)
    before = scales.tensors
    with pytest.raises(ConfigError, match=r"have a layer '0' already, .*: give convert_to_fp8 a prefix="):
        convert_to_fp8(critic, scales)
    assert scales.tensors == before
    assert not any(isinstance(layer, Fp8Linear) for layer in critic.values())
    convert_to_fp8(critic, scales, prefix="critic.")
    head = nn.Linear(8, 8)
    convert_to_fp8(head, scales, prefix="critic.")
    names = [tensor.name for tensor in scales.tensors if tensor.name.endswith(".weight")]
    assert names == ["0.weight", "critic.other.weight", "critic.0.weight", "critic.linear.weight"]


def test_a_copy_counts_for_nobody() -> None:
    linear = converted(nn.Linear(8, 8))
    other = copy.deepcopy(linear)
    other(torch.ones(2, 8)).sum().backward()
    assert not linear.meter.amax.any() and other.meter.amax.all()


def test_a_model_on_meta_gets_its_memory_later() -> None:
    with torch.device("meta"):
        linear = converted(nn.Linear(8, 8))
    linear.to_empty(device="cpu")
    nn.init.eye_(linear.weight), nn.init.zeros_(linear.bias)
    assert linear.double().float()(torch.eye(8)).equal(torch.eye(8))
    assert linear.meter.scale.dtype == torch.float32 and linear.meter.scale.device.type == "cpu"


def test_a_pass_on_meta_gives_the_shape_and_leaves_the_scales_alone() -> None:
    with torch.device("meta"):
        linear = converted(nn.Linear(8, 5))
    linear.meter.scale.fill_(2.0)
    output = linear(torch.ones(3, 8, dtype=torch.bfloat16, device="meta"))
    assert output.shape == (3, 5) and output.dtype == torch.bfloat16 and output.device.type == "meta"
    assert linear.meter.scale.tolist() == [2.0] * 3


def test_a_pass_with_fake_tensors_gives_the_shape_and_counts_nothing() -> None:
    """As estimates of memory do; native code would write to memory that is not there."""
    linear = converted(nn.Linear(8, 5))
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = linear(torch.ones(3, 8))
        output.sum().backward()
    assert isinstance(output, FakeTensor) and output.shape == (3, 5)
    assert not linear.meter.amax.any()


def test_scales_that_move_in_inference_mode_serve_in_training() -> None:
    """A model on a GPU, whose first pass is an evaluation; another device is all that matters here."""
    meter = Meter([Metered("x", False)])
    with torch.inference_mode():
        meter.move(torch.device("meta"))
    assert meter.scale.device.type == "meta"
    assert not any(tensor.is_inference() for tensor in (meter.scale, meter.amax, meter.num_saturated))


def test_mistakes_are_told() -> None:
    model = two_layers()
    with pytest.raises(ConfigError, match="is not an FP8 recipe"):
        convert_to_fp8(model, "E4M3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no GPU multiplies E5M2"):
        convert_to_fp8(model, DelayedScaling(fp8_format="E5M2"))
    with pytest.raises(ConfigError, match=r"this Sequential: it has no nn.Linear"):
        convert_to_fp8(nn.Sequential(nn.GELU()), HYBRID)
    with pytest.raises(ConfigError, match="the filter leaves out all 2 of them"):
        convert_to_fp8(model, HYBRID, filter=lambda name, _: name == "1")
    with pytest.raises(ConfigError, match="OptimizedModule: call convert_to_fp8 on the model before it is wrapped"):
        convert_to_fp8(torch.compile(model, backend="eager"), HYBRID)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not made by itself"):
        Fp8Linear(3, 4)
    assert not any(isinstance(module, Fp8Linear) for module in model)
    convert_to_fp8(model, HYBRID)
    with pytest.raises(ConfigError, match="0 is an Fp8Linear already"):
        convert_to_fp8(model, HYBRID)
