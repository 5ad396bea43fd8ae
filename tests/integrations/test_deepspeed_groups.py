"""DeepSpeed on four ranks: experts, pipelines, checkpoints; and checkpoints taken over by two ranks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_engines import BAD_VALUES, Layout, coordinated, join_ranks, plain_engine, spoil, state_of, tiny_net
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from distscale.integrations.deepspeed import deepspeed_initialize
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

RANKS = 4
# Grows at the third clean step and has no tolerance left after the overflow at the fifth.
RULE = {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2}
SAVED = {
    "zero0": Layout(0, fp16_block={**RULE, "hysteresis": 1}),  # DeepSpeed has none there
    "zero1": Layout(1, fp16_block=RULE),
    "zero2": Layout(2, fp16_block=RULE),
    "zero2 offload": Layout(2, fp16_block=RULE, offload=True),
    "zero3": Layout(3, fp16_block=RULE),
    "bf16 zero2": Layout(2, fp16=False),
}
MODEL_PARALLEL = {
    "zero0": Layout(0),
    "zero0 fused": Layout(0, fused=True),
    "zero1": Layout(1),
    "zero2 offload": Layout(2, offload=True),
    "zero3": Layout(3),
    "zero3 offload": Layout(3, offload=True),
    "bf16 optimizer": Layout(1, fp16=False, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
}
UNIVERSAL = ("zero1", "zero2", "zero3", "bf16 zero2")


class Experts(nn.Module):
    """Two experts, each on two of four ranks, between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.experts = MoE(
            4, nn.Linear(4, 4), num_experts=2, ep_size=2, min_capacity=0, capacity_factor=4.0, use_rts=False
        )
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed, balance, _ = self.experts(self.first(inputs))
        loss: Tensor = self.last(mixed).float().square().sum() + 0.01 * balance.float()
        return loss


def expert_engine(stage: int, clip: float) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = Experts()
    groups = split({"params": list(model.parameters()), "name": "all"})
    return coordinated(Layout(stage, clip=clip), model, optimizer=SGD(groups, lr=0.5))


def full_norm(engine: Any) -> float:
    """In float64, of the unscaled gradients: those of each expert once, the dense ones once."""
    total = torch.zeros((), dtype=torch.float64)
    for param, values, _ in engine.distscale._surface.gradients():
        is_expert = not getattr(param, "allreduce", True)
        copies = 1 if engine.zero_optimization_stage() else 2 if is_expert else RANKS
        total += values.double().square().sum() / copies
    dist.all_reduce(total)
    return float(total.sqrt()) / engine.distscale.get_scale()


def with_experts(stage: int, rank: int) -> dict[str, Any]:
    engine = expert_engine(stage, clip=0.25)

    def backward() -> None:
        torch.manual_seed(rank)
        engine.backward(engine(torch.randn(4, 4).half()))

    old = [param.detach().double() for param in engine.module.parameters()]
    backward()
    norm = full_norm(engine)
    engine.step()
    moved = torch.zeros((), dtype=torch.float64)
    for param, before in zip(engine.module.parameters(), old, strict=True):
        copies = 2 if not getattr(param, "allreduce", True) else RANKS
        moved += (param.detach().double() - before).square().sum() / copies
    dist.all_reduce(moved)
    seen: dict[str, Any] = {
        "norms": (norm, engine.distscale.last_step.grad_norm, float(engine.get_global_grad_norm())),
        "moved": float(moved.sqrt()),
        "bad": [],
    }
    names = engine.distscale._coordinator.roster._name_of
    for value in BAD_VALUES.values():
        for bad_rank in range(RANKS):
            before_it = state_of(engine)
            backward()
            held = False
            if rank == bad_rank:
                for param, values, _ in engine.distscale._surface.gradients():
                    if "deepspeed_experts" in names[id(param)] and values.numel():
                        values.view(-1)[:1].fill_(value)
                        held = True
                        break
            engine.step()
            report = engine.distscale.last_step
            untouched = all(map(torch.equal, before_it, state_of(engine)))
            seen["bad"].append((bad_rank, held, report.skipped, engine.was_step_applied(), untouched, report.culprit))
    return seen


def through_a_pipeline(rank: int, fp16: bool) -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(0)
    module = PipelineModule(
        layers=[LayerSpec(nn.Linear, 3, 4), nn.Tanh(), LayerSpec(nn.Linear, 4, 1)],
        num_stages=2,
        loss_fn=lambda outputs, targets: (outputs.float() - targets.float()).square().mean(),
        partition_method="uniform",
    )
    layout = Layout(1, fp16, accumulation=2, clip=1.0)
    engine = coordinated(layout, module, optimizer=SGD(module.parameters(), lr=0.1))
    dtype = torch.half if fp16 else torch.bfloat16
    torch.manual_seed(rank % 2)  # both stages of a pipeline see the same data
    batches = iter([(torch.randn(1, 3).to(dtype), torch.randn(1, 1).to(dtype)) for _ in range(200)])
    optimizer = engine.optimizer
    step = optimizer.step
    spoilt: list[bool] = []

    def train(value: float | None = None) -> Any:
        # The schedule runs backward and step, so the value is put in just before the step.
        def spoil_first(*args: Any, **kwargs: Any) -> Any:
            spoilt.append(value is not None and spoil(engine, value))
            return step(*args, **kwargs)

        optimizer.step = spoil_first
        loss = engine.train_batch(batches)
        return float(loss), engine.was_step_applied(), engine.distscale.last_step

    seen: dict[str, Any] = {"clean": train()[:2], "bad": []}
    for value in BAD_VALUES.values():
        for bad_rank in range(RANKS):
            old = state_of(engine)
            _, applied, report = train(value if rank == bad_rank else None)
            untouched = all(map(torch.equal, old, state_of(engine)))
            seen["bad"].append((bad_rank, spoilt[-1], report.skipped, applied, untouched, report.culprit))
    if rank == 0:
        engine.distscale.veto("a test")
    seen["veto"] = train()[1]
    seen["after"] = train()[1]
    return seen


def tied_norm(rank: int, is_coordinated: bool) -> float:
    """Of a pipeline whose first and last layer are one; DeepSpeed alone counts it once."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    ends = [TiedLayerSpec("ends", nn.Linear, 3, 3) for _ in range(2)]
    module = PipelineModule(
        layers=[ends[0], nn.Tanh(), ends[1]],
        num_stages=2,
        loss_fn=lambda outputs, targets: (outputs.float() - targets.float()).square().mean(),
        partition_method="uniform",
    )
    make = coordinated if is_coordinated else plain_engine
    engine = make(Layout(1), module, optimizer=SGD(module.parameters(), lr=0.1))
    torch.manual_seed(rank % 2)
    engine.train_batch(iter([(torch.randn(1, 3).half(), torch.randn(1, 3).half())]))
    return float(engine.get_global_grad_norm())


class TwoPairs:
    """Model parallelism of two ranks, twice, as a trainer tells it to DeepSpeed."""

    def __init__(self, rank: int) -> None:
        models, copies = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        self.get_model_parallel_group = lambda: models[rank // 2]
        self.get_model_parallel_rank = lambda: rank % 2
        self.get_model_parallel_world_size = lambda: 2
        self.get_data_parallel_group = lambda: copies[rank % 2]
        self.get_data_parallel_rank = lambda: rank // 2
        self.get_data_parallel_world_size = lambda: 2


class Halves(nn.Module):
    """Six elements that both ranks of a model have, and three of each of them alone, with gradients of 1 and 2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.slope = 1.0 + rank
        self.common = nn.Parameter(torch.ones(6))
        self.own = nn.Parameter(torch.ones(3))
        self.own.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, factor: Tensor) -> Tensor:
        return (self.common.float().sum() + self.slope * self.own.float().sum()) * factor


def with_model_parallelism(name: str, mpu: TwoPairs) -> dict[str, Any]:
    """The norm, squared, and the parameters after a step that is clipped to a third of it."""
    from deepspeed.runtime.zero import GatheredParameters

    layout = replace(MODEL_PARALLEL[name], clip=21.0**0.5 / 3)
    model = Halves(mpu.get_model_parallel_rank())
    engine = coordinated(layout, model, mpu=mpu)
    engine.backward(engine(torch.ones((), dtype=torch.half if layout.fp16 else torch.bfloat16)))
    engine.step()
    with GatheredParameters(list(model.parameters())):
        values = [float(model.common[0]), float(model.own[0])]
    return {
        "reported": float(engine.get_global_grad_norm()) ** 2,
        "ours": engine.distscale.last_step.grad_norm**2,
        "values": values,
    }


def one_step(engine: Any, rank: int, dtype: torch.dtype, is_bad: bool = False) -> float:
    inputs = torch.linspace(-1.0, 1.0 + rank, 3, dtype=dtype)
    # Too large for the scale, on all ranks and at every stage, in the same way with and without distscale.
    factor = 2.0**120 if is_bad else 1.0
    loss = engine(inputs).float().square().sum()
    engine.backward(loss * factor)
    engine.step()
    return float(loss)


def train_and_save(name: str, is_coordinated: bool, rank: int, folder: Path) -> dict[str, Any]:
    layout = SAVED[name]
    dtype = torch.half if layout.fp16 else torch.bfloat16
    model = tiny_net()
    engine = (coordinated if is_coordinated else plain_engine)(
        layout, model, optimizer=AdamW(model.parameters(), lr=0.01)
    )
    for step in range(6):
        one_step(engine, rank, dtype, is_bad=step == 4 and layout.fp16)
    engine.save_checkpoint(str(folder), client_state={"mine": 7})
    return after(engine, rank, dtype)


def after(engine: Any, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """The scale now and after each of four steps, with the losses; the second overflows."""
    optimizer = engine.optimizer
    at_stage_0 = getattr(optimizer, "loss_scale_config", None)
    coordination = vars(engine).get("distscale")
    seen: dict[str, Any] = {"scales": [], "losses": []}
    if coordination is not None:
        seen["state"] = coordination.state_dict()
    for step in range(4):
        seen["scales"].append((at_stage_0 or optimizer).cur_scale)
        seen["losses"].append(one_step(engine, rank, dtype, is_bad=step == 1 and dtype == torch.half))
    return seen


def load_and_go_on(name: str, is_coordinated: bool, rank: int, folder: Path, universal: bool = False) -> dict[str, Any]:
    layout = SAVED[name]
    if universal:
        layout = replace(layout, extra={**layout.extra, "checkpoint": {"load_universal": True}})
    dtype = torch.half if layout.fp16 else torch.bfloat16
    model = tiny_net()
    # Another start, so that what is loaded is seen.
    layout = replace(layout, fp16_block={**layout.fp16_block, "initial_scale_power": 5} if layout.fp16 else {})
    engine = (coordinated if is_coordinated else plain_engine)(
        layout, model, optimizer=AdamW(model.parameters(), lr=0.01)
    )
    path, client_state = engine.load_checkpoint(str(folder))
    assert path is not None
    return {"mine": client_state.get("mine"), "keys": sorted(map(str, client_state)), **after(engine, rank, dtype)}


def from_json(rank: int, folder: Path) -> Any:
    """The one-line change: deepspeed_initialize, with our block in the file."""
    import json

    config = Layout(2).config
    config["fp16"]["min_loss_scale"] = 0.5
    config["distscale"] = {"init_scale": 64.0, "max_scale": 128.0}
    path = folder / f"config-{rank}.json"
    path.write_text(json.dumps(config))
    model = tiny_net()
    reports: list[Any] = []
    engine, *others = deepspeed_initialize(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        config=str(path),
        dist_init_required=False,
        distscale={"on_step": reports.append},
    )
    for _ in range(8):
        one_step(engine, rank, torch.half)
    policy = engine.distscale._keeper._policy
    return len(others), [report.scale for report in reports], (policy.min_scale, policy.max_scale)


def convert_to_universal(place: Path) -> None:
    """What ``python -m deepspeed.checkpoint.ds_to_universal`` does, without a start of Python for each checkpoint."""
    from deepspeed.checkpoint import ds_to_universal

    tag = (place / "latest").read_text()
    folders = {"input_folder": str(place / tag), "output_folder": str(place / f"{tag}_universal")}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    ds_to_universal.main(
        Namespace(**folders, **workers, keep_temp_folder=False, strict=True, inject_missing_state=True)
    )
    (place / "latest_universal").write_text(f"{tag}_universal")


def on_four(rank: int, folder: Path) -> dict[Any, Any]:
    join_ranks()
    seen: dict[Any, Any] = {"json": from_json(rank, folder)}
    for name in SAVED:
        for is_ours in (False, True):
            place = folder / f"{name}-{is_ours}"
            seen["went on", name, is_ours] = train_and_save(name, is_ours, rank, place)
        for saved_by_us in (False, True):
            for is_ours in (False, True):
                place = folder / f"{name}-{saved_by_us}"
                seen["loaded", name, saved_by_us, is_ours] = load_and_go_on(name, is_ours, rank, place)
    dist.barrier()  # all have saved
    for name in UNIVERSAL[rank::RANKS]:
        for saved_by_us in (False, True):
            convert_to_universal(folder / f"{name}-{saved_by_us}")
    for stage in (0, 1, 2):
        seen["experts", stage] = with_experts(stage, rank)
    # Last, for DeepSpeed remembers the groups of a pipeline for whatever comes after it.
    for fp16 in (True, False):
        seen["pipeline", fp16] = through_a_pipeline(rank, fp16)
    for is_ours in (False, True):
        seen["tied", is_ours] = tied_norm(rank, is_ours)
    mpu = TwoPairs(rank)
    for name in MODEL_PARALLEL:
        seen["model parallel", name] = with_model_parallelism(name, mpu)
    return seen


def on_two(rank: int, folder: Path) -> dict[Any, Any]:
    join_ranks()
    seen: dict[Any, Any] = {}
    for saved_by_us in (False, True):
        for is_ours in (False, True):
            for name in UNIVERSAL:
                place = folder / f"{name}-{saved_by_us}"
                seen[name, saved_by_us, is_ours] = load_and_go_on(name, is_ours, rank, place, universal=True)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(on_four, RANKS, folder, timeout_s=280.0, take_down=False)


@pytest.fixture(scope="module")
def two(four: list[Any], folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(on_two, 2, folder, timeout_s=280.0, take_down=False)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts(stage: int, four: list[Any]) -> None:
    for results in four:
        seen = results["experts", stage]
        true_norm, norm, reported = seen["norms"]
        assert norm == pytest.approx(true_norm, rel=1e-12)
        assert reported == pytest.approx(true_norm, rel=1e-6)
        assert seen["moved"] == pytest.approx(0.5 * 0.25, rel=2e-3)  # the rate times the clipped norm
    check_bad_steps([results["experts", stage]["bad"] for results in four], least=6)


@pytest.mark.parametrize("fp16", [True, False])
def test_a_pipeline_decides_over_all_its_stages(fp16: bool, four: list[Any]) -> None:
    seen = [results["pipeline", fp16] for results in four]
    assert len({results["clean"] for results in seen}) == 1
    assert seen[0]["clean"][1]
    check_bad_steps([results["bad"] for results in seen], least=12)
    assert [(results["veto"], results["after"]) for results in seen] == [(False, True)] * RANKS


def test_tied_layers_of_a_pipeline_count_once(four: list[Any]) -> None:
    for results in four:
        assert results["tied", True] == pytest.approx(results["tied", False], rel=1e-5)


@pytest.mark.parametrize("name", MODEL_PARALLEL)
def test_what_model_parallel_ranks_have_in_common_counts_once(name: str, four: list[Any]) -> None:
    for rank, results in enumerate(four):
        seen = results["model parallel", name]
        assert seen["reported"] == pytest.approx(21.0, rel=1e-6)  # six times 1, and three times 1 and 4
        assert seen["ours"] == pytest.approx(21.0, rel=1e-12)
        assert seen["values"] == pytest.approx([1 - 1 / 3, 1 - (1 + rank % 2) / 3], rel=1e-2)


def check_bad_steps(on_ranks: list[list[Any]], least: int) -> None:
    num_held = 0
    for outcomes in zip(*on_ranks, strict=True):
        bad_rank = outcomes[0][0]
        is_held = outcomes[bad_rank][1]
        num_held += is_held
        for _, _, skipped, applied, untouched, culprit in outcomes:
            assert (skipped, applied) == (is_held, not is_held)
            if is_held:
                assert untouched
                assert culprit.rank == bad_rank
    assert num_held >= least


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("saved_by_us", [False, True])
@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_in_both_directions(name: str, saved_by_us: bool, is_ours: bool, four: list[Any]) -> None:
    for results in four:
        source = results["went on", name, saved_by_us]
        loaded = results["loaded", name, saved_by_us, is_ours]
        check_gone_on(name, source, loaded, is_ours)
        if saved_by_us and is_ours:
            assert loaded["state"] == source["state"]
            assert loaded["losses"] == source["losses"]


def check_gone_on(name: str, source: dict[str, Any], loaded: dict[str, Any], is_ours: bool) -> None:
    assert loaded["mine"] == 7
    assert loaded["scales"] == source["scales"]
    if SAVED[name].fp16 and name != "zero0":
        # Two growths, an overflow that was tolerated, two clean steps; then an overflow that is not.
        assert source["scales"] == [1024.0 * 2, 1024.0 * 2, 1024.0, 1024.0]
    if is_ours:
        assert "distscale" not in loaded["keys"]


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("saved_by_us", [False, True])
@pytest.mark.parametrize("name", UNIVERSAL)
def test_two_ranks_take_over_from_four(
    name: str, saved_by_us: bool, is_ours: bool, four: list[Any], two: list[Any]
) -> None:
    for results in two:
        loaded = results[name, saved_by_us, is_ours]
        check_gone_on(name, four[0]["went on", name, saved_by_us], loaded, is_ours)
    if saved_by_us and is_ours:
        assert two[0][name, True, True]["state"] == four[0]["went on", name, True]["state"]


def test_the_block_in_the_json(four: list[Any]) -> None:
    for results in four:
        num_others, scales, bounds = results["json"]
        assert num_others == 3
        assert bounds == (0.5, 128.0)
        assert scales == [64.0] * 3 + [128.0] * 5
