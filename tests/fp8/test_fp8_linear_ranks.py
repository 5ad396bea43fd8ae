"""FP8 linears on two ranks: in FSDP2, FSDP1, DDP and tensor parallelism, with ranks that see different things."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from distscale import DistributedGradScaler
from distscale.errors import ConfigError
from distscale.fp8 import DelayedScaling, Fp8Linear, convert_to_fp8, gather_weights_in_fp8
from distscale.fp8.scales import bits_of_amax, scale_of_amax
from ranks import run_ranks

RECIPE = DelayedScaling()
LOSS_SCALE = 256.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Whose side branch is not used by every rank, while some micro-batches have no token at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.side, self.last = Block(), Block(), Block()
        self.calls_side = True
        """Without tokens, where it is not used: FSDP wants all ranks to call its units."""
        self.recomputes: bool | None = None
        """Of the last block: None, or whether by reentrant checkpoints."""

    def forward(self, x: Tensor, uses_side: bool) -> Tensor:
        x = self.first(x)
        if uses_side:
            x = x + self.side(x)
        elif self.calls_side:
            x = x + self.side(x[:0]).sum()
        return self.last(x) if self.recomputes is None else checkpoint(self.last, x, use_reentrant=self.recomputes)


def micro_batches(rank: int) -> list[Tensor]:
    """Of rank 0: 8 and 3 tokens; of rank 1: 5 larger ones, and none."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, 16, generator=generator) * (1 + 2 * rank) for size in ((8, 3), (5, 0))[rank]]


def train(model: nn.Module, rank: int) -> None:
    for x in micro_batches(rank):
        (model(x, uses_side=rank == 0).float().square().sum() * LOSS_SCALE).backward()


def seen_alone(model: nn.Module, rank: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Amax bits by module over both ranks, and the mean of their gradients, of an unsharded copy of the model."""
    model = copy.deepcopy(model).to(dtype)
    for x in micro_batches(rank):
        (model(x.to(dtype), rank == 0).float().square().sum() * LOSS_SCALE).backward()
    amax = {name: module.meter.amax for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    grads = {}
    for name, param in model.named_parameters():
        grads[name] = torch.zeros_like(param).float() if param.grad is None else param.grad.float() / 2
    for bits in amax.values():
        dist.all_reduce(bits, dist.ReduceOp.MAX)
    for grad in grads.values():
        dist.all_reduce(grad)
    return amax, grads


def scales_of(amax: Tensor) -> list[float]:
    """Of the input, the weight and the gradient of one layer: what follows from its amax bits."""
    largest = torch.tensor([448.0, 448.0, 57344.0], dtype=torch.float64)
    return scale_of_amax(amax.view(torch.float32), largest, RECIPE).tolist()


def plain_name(name: str) -> str:
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def check_first_step(
    rank: int,
    wrap: Callable[[Model], nn.Module],
    dtype: torch.dtype,
    recomputes: bool | None = None,
    calls_side: bool = True,
) -> None:
    """All ranks get the scales of what both have seen, a rank that did not use a module too, and go on with them."""
    model = Model()
    model.calls_side = calls_side
    scales = convert_to_fp8(model, RECIPE)
    amax, grads = seen_alone(model, rank, dtype)
    model.recomputes = recomputes
    wrapped = wrap(model)
    optimizer = SGD(wrapped.parameters(), lr=1e-3)
    scaler = DistributedGradScaler("cpu", init_scale=LOSS_SCALE, names=wrapped, fp8=scales)
    scaler.scale(torch.tensor(1.0))
    train(wrapped, rank)
    for name, param in wrapped.named_parameters():
        if param.grad is not None:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            truth = grads[plain_name(name)]
            if grad.shape == truth.shape:  # FSDP1 has pieces
                assert (grad - truth).norm() <= 2e-2 * truth.norm(), name
    scaler.step(optimizer)
    scaler.update()
    linears = {plain_name(name): layer for name, layer in wrapped.named_modules() if isinstance(layer, Fp8Linear)}
    assert linears.keys() == amax.keys()
    for name, linear in linears.items():
        assert linear.meter.scale.tolist() == scales_of(amax[name]), name
        assert all(linear.meter.scale)
    for _ in range(2):
        optimizer.zero_grad()
        train(wrapped, rank)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.last_step.skipped
    everywhere: list[str | None] = [None, None]
    dist.all_gather_object(everywhere, str([linear.meter.scale.tolist() for linear in linears.values()]))
    assert everywhere[0] == everywhere[1]


def in_fsdp2(dtype: torch.dtype) -> Callable[[Model], nn.Module]:
    def wrap(model: Model) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in (model.first, model.side, model.last):
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    return wrap


in_fsdp1 = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))


def check_that_unsharded_weights_are_freed() -> None:
    model = Model()
    convert_to_fp8(model, RECIPE)
    in_fsdp2(torch.bfloat16)(model)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = model(torch.ones(7, 16), True).sum()
    weights = [tensor for tensor in saved if tensor.shape in ((16, 40), (40, 16)) and tensor.dtype == torch.bfloat16]
    assert len(weights) == 5  # the first one has no use: its input needs no gradient
    assert not any(weight.untyped_storage().size() for weight in weights)
    loss.backward()


def check_wrapped_models_are_refused() -> None:
    for wrap, name in (
        (in_fsdp2(torch.float32), "FSDPModel"),
        (in_fsdp1, "FullyShardedDataParallel"),
        (DistributedDataParallel, "DistributedDataParallel"),
    ):
        with pytest.raises(ConfigError, match=f"is a {name}: call convert_to_fp8 on the model before it is wrapped"):
            convert_to_fp8(wrap(Model()), RECIPE)


# ---------------------------------------------------------------- tensor parallelism


def run_block(block: Block, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Output and the gradient of the input, for a loss whose gradient with respect to the output is ``weights``."""
    x = x.clone().requires_grad_()
    output = block(x)
    (output * weights).sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def check_tensor_parallel(mesh: DeviceMesh, plan: dict[str, ParallelStyle], sequence_is_sharded: bool) -> None:
    """Shards see, together, what the whole layers see, and give the same output and gradients."""
    torch.manual_seed(0)
    x, weights = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    whole, shards = Block(), Block()
    shards.load_state_dict(whole.state_dict())
    convert_to_fp8(whole, RECIPE)
    convert_to_fp8(shards, RECIPE)
    parallelize_module(shards, mesh, plan)
    pairs = [(whole.up, shards.up), (whole.down, shards.down)]
    for layer in (whole.up, whole.down, shards.up, shards.down):
        layer.meter.scale.copy_(torch.tensor([64.0, 1024.0, 4096.0]))  # those of shards alone would differ
    output, grad = run_block(whole, x, weights)
    mine = (
        (lambda values: values.chunk(2, dim=1)[mesh.get_local_rank()]) if sequence_is_sharded else lambda values: values
    )
    output_of_shards, grad_of_shards = run_block(shards, mine(x), mine(weights))
    torch.testing.assert_close(output_of_shards, mine(output))
    torch.testing.assert_close(grad_of_shards, mine(grad))
    for layer, shard in pairs:
        bits = shard.meter.amax.clone()
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=mesh.get_group())
        assert torch.equal(bits, layer.meter.amax) and bits.all()
        for param, piece in zip(layer.parameters(), shard.parameters(), strict=True):
            assert isinstance(piece.grad, DTensor) and param.grad is not None
            assert piece.grad.placements == piece.placements
            torch.testing.assert_close(piece.grad.full_tensor(), param.grad)


def check_other_placements(mesh: DeviceMesh) -> None:
    """Whatever the layouts of input and weight, the output is that of the whole."""
    torch.manual_seed(0)
    whole = nn.Linear(16, 10)
    convert_to_fp8(whole, RECIPE)
    x, weights = torch.randn(3, 4, 16), torch.randn(3, 4, 10)
    for layer in (Replicate(), Shard(0), Shard(1)):
        for given in (Replicate(), Shard(0), Shard(1), Shard(2)):
            sharded = copy.deepcopy(whole)
            sharded.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh, [layer]))
            on_bias = [Replicate() if layer == Shard(1) else layer]
            sharded.bias = nn.Parameter(distribute_tensor(whole.bias.detach(), mesh, on_bias))
            for linear in (whole, sharded):
                linear.meter.scale.copy_(torch.tensor([64.0, 1024.0, 4096.0]))
            one = x.clone().requires_grad_()
            other = distribute_tensor(x, mesh, [given]).requires_grad_()
            whole.zero_grad()
            output, output_of_shards = whole(one), sharded(other)
            torch.testing.assert_close(output_of_shards.full_tensor(), output)
            (output * weights).sum().backward()
            (output_of_shards * distribute_tensor(weights, mesh, [Replicate()])).sum().backward()
            for found, truth in (
                (other.grad, one.grad),
                (sharded.weight.grad, whole.weight.grad),
                (sharded.bias.grad, whole.bias.grad),
            ):
                torch.testing.assert_close(found.full_tensor(), truth)
            with pytest.raises(ConfigError, match="its input is not one on the same mesh"):
                sharded(x)


def check_fsdp2_of_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Block()
    scales = convert_to_fp8(model, RECIPE)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = SGD(model.parameters(), lr=1e-3)
    scaler = DistributedGradScaler("cpu", init_scale=LOSS_SCALE, names=model, fp8=scales)
    torch.manual_seed(1)
    for _ in range(2):
        scaler.scale(model(torch.randn(5, 16)).float().square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    found = [*model.up.meter.scale.tolist(), *model.down.meter.scale.tolist()]
    everywhere: list[list[float] | None] = [None, None]
    dist.all_gather_object(everywhere, found)
    assert everywhere[0] == everywhere[1] == found and all(found)


# ---------------------------------------------------------------- torch.compile


def train_blocks(seed: int, lay_out: Callable[[nn.Sequential], None], is_compiled: bool) -> list[Tensor | str]:
    """Losses, weights and FP8 histories of four steps; compiled, if so, before the layout, as trainers do it."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    scales = convert_to_fp8(model, RECIPE)
    for block in model if is_compiled else ():
        block.compile(backend="aot_eager", fullgraph=True)
    lay_out(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = DistributedGradScaler("cpu", init_scale=LOSS_SCALE, names=model, fp8=scales)
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor | str] = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 16, generator=generator)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    for param in model.parameters():
        assert isinstance(param, DTensor)
        found.append(param.full_tensor().detach())
    assert all(linear.meter.scale.all() for linear in model.modules() if isinstance(linear, Fp8Linear))
    return [*found, scales.state_dict()["amax_history"]]


def check_compiled(rank: int, mesh: DeviceMesh) -> None:
    """Each block is one graph, and trains bit by bit as without the compiler."""

    def in_fsdp2_with_gather(model: nn.Sequential) -> None:
        for block in model:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        gather_weights_in_fp8(model)

    def in_tensor_parallel(model: nn.Sequential) -> None:
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    for seed, lay_out in ((rank, in_fsdp2_with_gather), (0, in_tensor_parallel)):
        expected, compiled = (train_blocks(seed, lay_out, is_compiled) for is_compiled in (False, True))
        assert compiled.pop() == expected.pop()
        for value, truth in zip(compiled, expected, strict=True):
            assert torch.equal(value, truth)
        assert torch._dynamo.utils.counters["stats"].pop("unique_graphs")  # the compiler did have a part in it


def check_pipeline(rank: int) -> None:
    """What torch runs before the first step, on memory that nothing was written to, does not count."""
    torch.manual_seed(rank)
    stage_model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    convert_to_fp8(stage_model, RECIPE)
    inputs: list[Tensor] = []
    stage_model[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
    gradients: list[Tensor] = []

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        if output.requires_grad:  # torch 2.11 has no gradients in the dry run
            output.register_hook(lambda grad: gradients.append(grad.clone()))

    stage_model.register_forward_hook(watch)
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean())
    torch.use_deterministic_algorithms(True)  # fills memory that nothing was written to with NaN
    if rank == 0:
        schedule.step(torch.randn(4, 16))
    else:
        schedule.step(target=torch.zeros(4, 16))
    torch.use_deterministic_algorithms(False)
    assert len(inputs) == 3  # one dry run
    # Of rank 1 in unwritten memory, but for torch 2.11, whose dry run is of zeros.
    assert inputs[0].isnan().any() == (rank == 1 and TorchVersion(torch.__version__) >= (2, 12))
    meter = stage_model[0].meter
    assert meter.amax[0] == bits_of_amax(torch.cat(inputs[1:]))
    assert 0 < meter.amax[2] <= bits_of_amax(torch.cat(gradients[-2:]))


def ranks(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_first_step(rank, in_fsdp2(dtype), dtype)
    for recomputes in (False, True):
        check_first_step(rank, in_fsdp2(torch.bfloat16), torch.bfloat16, recomputes)
    check_first_step(
        rank,
        lambda model: DistributedDataParallel(model, find_unused_parameters=True),
        torch.float32,
        calls_side=False,
    )
    halves = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    check_first_step(
        rank,
        lambda model: in_fsdp1(model, mixed_precision=halves, use_orig_params=True),
        torch.bfloat16,
    )
    check_that_unsharded_weights_are_freed()
    check_wrapped_models_are_refused()
    mesh = init_device_mesh("cpu", (2,))
    check_tensor_parallel(mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, sequence_is_sharded=False)
    by_sequence = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    check_tensor_parallel(mesh, by_sequence, sequence_is_sharded=True)
    check_other_placements(mesh)
    check_fsdp2_of_tensor_parallel(rank)
    check_pipeline(rank)
    check_compiled(rank, mesh)


@pytest.mark.timeout(240)  # the compiler's first use takes long
def test_ranks_agree_in_every_layout() -> None:
    run_ranks(ranks, 2, timeout_s=230, group_timeout_s=100)
