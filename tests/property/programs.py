"""Random programs: which calls may come next, and which of them comes.

The oracle says what a program has done so far, so it is asked what may come next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from calls import (
    NUM_RANKS,
    AddGroup,
    Backward,
    Op,
    OptimizerSpec,
    Restart,
    SetGrowthInterval,
    Step,
    Stop,
    TensorSpec,
    Unscale,
    Update,
    Veto,
    World,
)
from expectations import Stage
from oracle import Oracle


def random_numels(rng: Random, everywhere: bool = False) -> tuple[int | None, ...]:
    # 1, 2 or 4 holders: their reciprocals, which weight the norm, are exact.
    num_holders = 4 if everywhere else rng.choice([4, 4, 2, 1])
    holders = rng.sample(range(NUM_RANKS), num_holders)
    return tuple(rng.choice([3, 1, 7, 0]) if rank in holders else None for rank in range(NUM_RANKS))


def random_tensor(rng: Random, name: str, optimizer: int, everywhere: bool = False) -> TensorSpec:
    return TensorSpec(name, optimizer, rng.choice(["fp32", "fp16", "bf16", "fp64"]), random_numels(rng, everywhere))


def random_world(rng: Random) -> World:
    """A world in which every optimizer has at least one tensor on every rank, as torch demands of an optimizer."""
    optimizers = tuple(
        OptimizerSpec(rng.random() < 0.5, rng.choice([0.0, 0.5]), rng.choice([1.0, 0.25]))
        for _ in range(rng.choice([1, 2, 3]))
    )
    tensors = [
        random_tensor(rng, f"w{index}.{place}", index, everywhere=place == 0)
        for index in range(len(optimizers))
        for place in range(rng.choice([1, 2, 3]))
    ]
    rng.shuffle(tensors)
    policy = rng.choice(["dynamic"] * 4 + ["static", "none"])
    return World(
        optimizers,
        tuple(tensors),
        policy=policy,
        init_scale=rng.choice([2.0**16, 2.0**10, 1.0, 2.0**30, 2.0**-6]),
        growth_factor=rng.choice([2.0, 4.0]),
        backoff_factor=rng.choice([0.5, 0.25]),
        growth_interval=rng.choice([1, 2, 4]),
        hysteresis=rng.choice([1, 1, 2, 3]),
        min_scale=2.0**-6,
        max_scale=rng.choice([2.0**40, 2.0**30]),
        max_norm=rng.choice([None, None, math.inf, 1.0, 16.0]),
        max_consecutive_skips=rng.choice([None, 2, 4]),
        silent=rng.choice([(), (), (0,), (1, 3)]),
    )


def random_backward(rng: Random, world: World, tensors: Sequence[TensorSpec], idle: Sequence[int] = ()) -> Backward:
    """Gradients of powers of two for some of ``tensors``, now and then with a fault somewhere."""
    presence = rng.choice([1.0, 1.0, 0.7, 0.3])
    grads = {
        (rank, spec.name): _powers_of_two(rng, numel)
        for spec in tensors
        for rank, numel in enumerate(spec.numels)
        if numel is not None and rank not in idle and rng.random() < presence
    }
    fault = rng.random()
    filled = [key for key, values in grads.items() if values]
    if fault < 0.3 and filled:
        for key in rng.sample(filled, min(len(filled), rng.choice([1, 1, 2]))):
            bad = rng.choice([math.inf, -math.inf, math.nan, 2.0**14, 2.0**18, 2.0**120])
            if world.max_norm is not None and math.isfinite(bad):
                bad = math.inf  # keeps every sum of squares exact
            place = rng.randrange(len(grads[key]))
            grads[key] = (*grads[key][:place], bad, *grads[key][place + 1 :])
    loss = [0.5] * NUM_RANKS
    if rng.random() < 0.12:
        loss[rng.randrange(NUM_RANKS)] = rng.choice([math.inf, math.nan, -math.inf])
    return Backward(grads, tuple(loss), rng.choice(["fp32"] * 6 + ["fp64", "bf16", "fp16"]), tuple(idle))


def _powers_of_two(rng: Random, numel: int) -> tuple[float, ...]:
    start = rng.randrange(8)
    sign = rng.choice([1.0, -1.0])
    return tuple(sign * 2.0 ** ((start + place) % 5 - 2) for place in range(numel))


Maker = Callable[[Random, Oracle], Op | None]
"""Makes a call that is possible now, or returns None if its kind is not."""


def make_backward(rng: Random, now: Oracle) -> Op | None:
    """A backward pass through all optimizers that are not unscaled yet, or through one of them."""
    # A silent rank cannot tell gradients that come after a step from those that it used up.
    free = _in_stage(now, Stage.READY) if now.world.silent else _in_stage(now, Stage.READY, Stage.STEPPED)
    if not free:
        return None
    chosen = rng.choice([free, free, [rng.choice(free)]])
    holders = {rank for (rank, _), grad in now.grads.items() if grad is not None}
    empty = [rank for rank in range(NUM_RANKS) if rank not in holders]
    idle = empty[: rng.randrange(NUM_RANKS)] if rng.random() < 0.2 else []
    if set(idle) | set(now.world.silent) == set(range(NUM_RANKS)):
        return None
    return random_backward(rng, now.world, [spec for spec in now.tensors if spec.optimizer in chosen], idle)


def make_unscale(rng: Random, now: Oracle) -> Op | None:
    ready = _in_stage(now, Stage.READY)
    return Unscale(rng.choice(ready)) if ready else None


def make_step(rng: Random, now: Oracle) -> Op | None:
    """One step of all optimizers that have not stepped, of some, or of none."""
    if not now.has_scaled and rng.random() < 0.9:
        return None
    left = _in_stage(now, Stage.READY, Stage.UNSCALED)
    some = rng.sample(left, rng.randrange(len(left) + 1))
    chosen = rng.choice([left, left, left, left[:1], left[-1:], some])
    if not now.has_right_answer(chosen):
        return None
    return Step(tuple(chosen), rng.random() < 0.5, rng.random() < 0.7)


def make_update(rng: Random, now: Oracle) -> Op | None:
    """An update, also in the middle of a step.

    Gradients wait over it only in tensors that the scaler knows: those of optimizers that it has met.
    """
    known = {spec.name for spec in now.tensors if spec.optimizer in now.met}
    if any(name not in known for (_, name), grad in now.grads.items() if grad is not None):
        return None
    if not now.has_right_answer(_in_stage(now, Stage.UNSCALED)):
        return None
    if rng.random() < 0.1:
        return Update(2.0 ** rng.choice([0, 5, 10, 15, 20, 25, -10, 35, 50, 130]), rng.random() < 0.5)
    return Update()


def make_aside(rng: Random, now: Oracle) -> Op | None:
    """What may be called at any time."""
    kind = rng.choice(["veto", "veto", "stop", "rule", "group", "group"])
    if kind == "veto":
        return Veto(rng.randrange(NUM_RANKS))
    if kind == "stop":
        return Stop(rng.randrange(NUM_RANKS))
    if kind == "rule":
        return SetGrowthInterval(rng.choice([1, 2, 3])) if now.world.policy == "dynamic" else None
    num_added = len(now.tensors) - len(now.world.tensors)
    if num_added == 2:
        return None
    optimizer = rng.randrange(len(now.world.optimizers))
    return AddGroup(random_tensor(rng, f"added{num_added}", optimizer, everywhere=True))


def make_restart(rng: Random, now: Oracle) -> Op | None:
    if set(now.stages) != {Stage.READY} or now.decisions:
        return None  # a state is saved between steps
    return Restart(now.world.policy == "dynamic" and rng.random() < 0.3)


def make_misuse(rng: Random, now: Oracle) -> Op | None:
    """A call that the scaler has to refuse."""
    calls: list[Op] = [Unscale(index) for index in _in_stage(now, Stage.UNSCALED, Stage.STEPPED)]
    calls += [Step((index,)) for index in _in_stage(now, Stage.STEPPED)]
    if not now.decisions and Stage.UNSCALED not in now.stages:
        calls.append(Update())
    return rng.choice(calls) if calls else None


def _in_stage(now: Oracle, *stages: Stage) -> list[int]:
    return [index for index, stage in enumerate(now.stages) if stage in stages]


# Ordinary steps most of the time, so that scales grow and gradients meet every kind of history.
_RHYTHMS: tuple[Sequence[Maker], ...] = (
    (make_backward, make_step, make_update),
    (make_backward, make_step, make_update),
    (make_backward, make_backward, make_step, make_update),
    (make_backward, make_unscale, make_step, make_update),
    (make_backward, make_step, make_update, make_step, make_update),
    (make_backward, make_step, make_step, make_update),
    (make_backward, make_step, make_backward, make_step, make_update),
    (make_aside,),
    (make_restart,),
    (make_misuse,),
)


def random_program(seed: int, num_ops: int) -> tuple[World, list[Op]]:
    """The world and the calls that belong to ``seed``."""
    rng = Random(seed)
    world = random_world(rng)
    now = Oracle(world)
    ops: list[Op] = []
    while len(ops) < num_ops:
        for make in rng.choice(_RHYTHMS):
            op = make(rng, now)
            if op is not None:
                now.play(op)
                ops.append(op)
    return world, ops
