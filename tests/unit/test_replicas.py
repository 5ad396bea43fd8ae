"""Which tensors of one name are replicas: told by their content, and by a neighbour's where that says nothing."""

import pytest
import torch
from torch import Tensor

from distscale.replicas import Look, count_holders, look


def ranks(*params_by_rank: dict[str, Tensor]) -> list[dict[str, int]]:
    return count_holders([look(params, len(params_by_rank)) for params in params_by_rank])


def weight(seed: int) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))


def test_copies_are_one_gradient() -> None:
    assert ranks({"w": weight(0)}, {"w": weight(0)}, {"w": weight(0)}) == [{"w": 3}] * 3


def test_other_values_shapes_and_dtypes_are_others() -> None:
    zeros = torch.zeros(4)
    assert ranks({"w": weight(0)}, {"w": weight(1)}) == [{"w": 1}] * 2
    assert ranks({"w": zeros}, {"w": zeros[:3]}, {"w": zeros.half()}) == [{"w": 1}] * 3
    assert ranks({"w": zeros}, {"w": -zeros}) == [{"w": 1}] * 2


def test_a_name_that_not_all_ranks_have() -> None:
    assert ranks({"a": weight(0)}, {"a": weight(0), "b": weight(1)}, {}) == [{"a": 2}, {"a": 2, "b": 1}, {}]


@pytest.mark.parametrize("place", range(6))
def test_one_changed_element_in_any_place(place: int) -> None:
    other = weight(0)
    other.view(-1)[place] += 0.5
    assert ranks({"w": weight(0)}, {"w": other}) == [{"w": 1}] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype(dtype: torch.dtype) -> None:
    first, second = weight(0).to(dtype), weight(1).to(dtype)
    assert ranks({"w": first}, {"w": first.clone()}, {"w": second}) == [{"w": 2}, {"w": 2}, {"w": 1}]


def test_a_constant_takes_after_the_tensor_before_it_in_its_module() -> None:
    def model(expert: int) -> dict[str, Tensor]:
        return {
            "head.bias": torch.zeros(3),
            "head.weight": weight(0),
            "experts.0.weight": weight(expert),
            "experts.0.bias": torch.zeros(3),
            "experts.norm.weight": torch.ones(3),
            "norm.weight": torch.ones(3),
            "tail.weight": weight(2),
            "tail.bias": torch.zeros(3),
        }

    counts = dict.fromkeys(model(0), 2)
    counts.update({"experts.0.weight": 1, "experts.0.bias": 1, "experts.norm.weight": 1, "norm.weight": 1})
    # The last norm is taken for the experts' own: it stands after them, alone in its module, and says nothing itself.
    assert ranks(model(5), model(6)) == [counts] * 2


def test_a_model_that_is_constant_throughout() -> None:
    assert ranks({"w": torch.zeros(3)}, {"w": torch.zeros(3)}) == [{"w": 2}] * 2


def test_pieces_on_one_mesh_belong_together() -> None:
    pair, other = 1, 2  # two meshes of two ranks each
    replicas = [Look(pair, 10), Look(pair, 11), Look(other, 10), Look(other, 11)]
    assert count_holders([{"w": seen} for seen in replicas]) == [{"w": 4}] * 4
    different = [Look(pair, 10), Look(pair, 11), Look(other, 10), Look(other, 12)]
    assert count_holders([{"w": seen} for seen in different]) == [{"w": 2}] * 4


def test_large_tensors_are_sampled() -> None:
    large = torch.randn(1_000_003)
    assert look({"w": large}, 2) == look({"w": large.clone()}, 2) != look({"w": large + 1}, 2)


def test_a_dtensor_is_constant_only_if_all_its_pieces_are() -> None:
    # On rank 1 the piece is empty; it takes after nothing, for rank 0's says enough.
    mesh = 1
    pieces = [{"v": Look(None, 5), "w": Look(mesh, 10)}, {"v": Look(None, 6), "w": Look(mesh, 11, "v")}]
    assert [counts["w"] for counts in count_holders(pieces)] == [2, 2]


def test_a_constant_beside_a_sharded_tensor_takes_after_the_whole_of_it() -> None:
    # A norm that both ranks hold, beside a weight of which each has a piece: of one model, and of two.
    def rank(mesh: int, content: int) -> dict[str, Look]:
        return {"w": Look(mesh, content), "norm": Look(None, 3, "w")}

    assert [counts["norm"] for counts in count_holders([rank(1, 10), rank(1, 11)])] == [2, 2]
    stages = [rank(1, 10), rank(1, 11), rank(2, 12), rank(2, 13)]
    assert [counts["norm"] for counts in count_holders(stages)] == [2] * 4
