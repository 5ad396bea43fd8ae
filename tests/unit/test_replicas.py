"""Which tensors of one name are replicas: told by their values and gradients, up to rounding."""

import pytest
import torch
from torch import Tensor, nn

from distscale.replicas import Look, count_holders, look


def looks_at(named: dict[str, Tensor], world_size: int = 2, scale: float = 1.0) -> dict[str, Look]:
    return look(named, world_size, frozenset(), scale)


def ranks(*params_by_rank: dict[str, Tensor]) -> list[dict[str, int]]:
    return count_holders([looks_at(params, len(params_by_rank)) for params in params_by_rank]).by_rank


def weight(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 2), generator=torch.Generator().manual_seed(seed))


def param(values: Tensor, grad: Tensor | None) -> nn.Parameter:
    made = nn.Parameter(values.clone())
    made.grad = grad
    return made


def replicas(first: Tensor, second: Tensor) -> tuple[bool, bool]:
    """Whether the two count as copies, and whether that is final."""
    counted = count_holders([looks_at({"w": first}), looks_at({"w": second})])
    return counted.by_rank == [{"w": 2}] * 2, counted.are_final


def test_copies_are_one_gradient() -> None:
    assert ranks(*[{"w": param(weight(0), weight(1))}] * 3) == [{"w": 3}] * 3


def test_other_values_shapes_and_dtypes_are_others() -> None:
    zeros = torch.zeros(4)
    assert replicas(param(weight(0), weight(2)), param(weight(1), weight(2))) == (False, True)
    assert ranks(*[{"w": param(values, None)} for values in (zeros, zeros[:3], zeros.half())]) == [{"w": 1}] * 3


@pytest.mark.parametrize("values", [torch.ones(6), torch.zeros(3, 2), weight(0)])
def test_equal_values_with_gradients_of_their_own(values: Tensor) -> None:
    # Norms, zeros, and experts copied from one layer, or stages that were made from one seed.
    grad, other = weight(1, *values.shape), weight(2, *values.shape)
    assert replicas(param(values, grad), param(values, grad.clone())) == (True, True)
    assert replicas(param(values, grad), param(values, other)) == (False, True)
    assert replicas(param(values, grad), param(values, -grad)) == (False, True)
    assert replicas(param(values, grad), param(values, 2 * grad)) == (False, True)


@pytest.mark.parametrize("of", ["values", "gradient"])
def test_rounding_makes_no_other_tensor(of: str) -> None:
    # After a restart replicas may be apart in the last bits, and their gradients are computed apart.
    for seed in range(100):
        values, grad = weight(seed, 40), weight(seed + 1000, 40)
        noise = 1.0 + 2**-8 * torch.rand(40, generator=torch.Generator().manual_seed(seed))
        other = param(values * noise, grad) if of == "values" else param(values, grad * noise)
        assert replicas(param(values, grad), other) == (True, True)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 200_000])
def test_gradients_that_differ_are_told_apart(size: int) -> None:
    values = torch.ones(size)
    for seed in range(100 if size < 1000 else 3):
        one, other = weight(seed, size), weight(seed + 1000, size)
        differ = float((one - other).norm() / torch.maximum(one.norm(), other.norm())) > 0.25
        assert differ or size < 4
        assert not (differ and replicas(param(values, one), param(values, other))[0])


@pytest.mark.parametrize("place", range(1, 50))
def test_gradients_of_one_element_each(place: int) -> None:
    one, other, values = torch.zeros(50), torch.zeros(50), torch.ones(50)
    one[0] = other[place] = 1.0
    assert not replicas(param(values, one), param(values, other))[0]


@pytest.mark.parametrize("place", range(6))
def test_one_changed_element_in_any_place(place: int) -> None:
    other = weight(0)
    other.view(-1)[place] += 0.5
    assert not replicas(param(weight(0), None), param(other, None))[0]


@pytest.mark.parametrize("grad", [None, torch.zeros(4), torch.full((4,), torch.inf), torch.full((4,), torch.nan)])
def test_without_a_gradient_the_values_decide_for_now(grad: Tensor | None) -> None:
    ones = torch.ones(4)
    assert replicas(param(ones, grad), param(ones, grad)) == (True, False)
    assert replicas(param(ones, grad), param(ones, weight(0, 4))) == (False, False)
    assert replicas(param(ones, grad), param(weight(0, 4), grad)) == (False, True)


def test_what_never_has_a_gradient_is_final() -> None:
    frozen = torch.ones(4)
    assert replicas(frozen, frozen.clone()) == (True, True)
    assert replicas(param(torch.ones(0), None), param(torch.ones(0), None)) == (True, True)


def test_what_has_a_gradient_adds_all_of_it_beside_one_that_has_none() -> None:
    ones, grad = torch.ones(4), weight(0, 4)
    tensors = [param(ones, None), param(ones, grad), param(ones, grad), param(ones, weight(1, 4))]
    assert [counts["w"] for counts in ranks(*[{"w": tensor} for tensor in tensors])][1:] == [2, 2, 1]


def test_the_scale_that_a_gradient_carries_does_not_matter() -> None:
    ones, grad = torch.ones(4), weight(0, 4)
    scaled, unscaled = param(ones, grad * 1024), param(ones, grad)
    one = look({"w": scaled}, 2, frozenset(), 1024.0)
    other = look({"w": unscaled}, 2, frozenset([id(unscaled)]), 1024.0)
    assert count_holders([one, other]) == ([{"w": 2}] * 2, True)


def test_a_name_that_not_all_ranks_have() -> None:
    a, b = param(weight(0), weight(2)), param(weight(1), weight(3))
    assert ranks({"a": a}, {"a": a, "b": b}, {}) == [{"a": 2}, {"a": 2, "b": 1}, {}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype(dtype: torch.dtype) -> None:
    first, second = (param(weight(seed).to(dtype), weight(3).to(dtype)) for seed in (0, 1))
    assert ranks({"w": first}, {"w": first}, {"w": second}) == [{"w": 2}, {"w": 2}, {"w": 1}]
    other = param(first.detach(), weight(4).to(dtype))
    assert replicas(first, other) == (False, True)


def test_a_gradient_of_any_size() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    for size in (1e-300, 1e300):
        one, other = (param(ones, size * weight(seed, 4).double()) for seed in (0, 1))
        assert replicas(one, one) == (True, True)
        assert replicas(one, other) == (False, True)


def test_pieces_on_one_mesh_belong_together() -> None:
    def piece(mesh: int, place: int, seed: int) -> Look:
        return looks_at({"w": param(torch.ones(4), weight(seed, 4))})["w"]._replace(mesh=mesh, place=place)

    def holders(*pieces: Look) -> list[int]:
        return [count["w"] for count in count_holders([{"w": seen} for seen in pieces]).by_rank]

    pair, other = 1, 2  # two meshes of two ranks each
    assert holders(piece(pair, 0, 10), piece(pair, 1, 11), piece(other, 0, 10), piece(other, 1, 11)) == [4] * 4
    assert holders(piece(pair, 0, 10), piece(pair, 1, 11), piece(other, 0, 10), piece(other, 1, 12)) == [2] * 4
    # In the order of the mesh, not of the ranks.
    assert holders(piece(pair, 0, 10), piece(pair, 1, 11), piece(other, 1, 11), piece(other, 0, 10)) == [4] * 4
    assert holders(piece(pair, 0, 10), piece(pair, 1, 11), piece(other, 0, 11), piece(other, 1, 10)) == [2] * 4


def test_where_all_ranks_are_in_the_mesh_there_is_nothing_to_tell() -> None:
    assert count_holders([{"w": Look(1, 0)}] * 3) == ([{"w": 3}] * 3, True)


def test_large_tensors_are_sampled() -> None:
    large = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    assert replicas(param(large, large), param(large.clone(), large))[0]
    assert not replicas(param(large, large), param(large + 1, large))[0]
