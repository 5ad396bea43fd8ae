"""What is drawn: an episode is a layout, an optimizer, a scaler's settings, and what goes wrong in each step."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from soak_layouts import LAYOUTS, Kind

__all__ = ["Episode", "Fault", "draw_episodes", "episodes"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong on a rank.

    - "gradient": ``value`` in one element of a reduced gradient, on all ranks that hold this piece of it.
    - "backward": the gradient of this rank's loss is ``value``, and spreads as the layout spreads it.
    - "loss": this rank's loss is ``value``.
    - "idle": this rank's experts get no gradient. (No fault: the step is a good one.)

    and, as no layout brings them about by itself, for distscale alone:

    - "replica": as "gradient", on this rank only, whatever replicas there are of the piece.
    - "huge": as "gradient", a finite value that overflows when it is unscaled; nothing at a scale of 1 or more.
    - "missing": as "idle", on layouts whose ranks always have gradients.
    - "veto".
    """

    kind: str
    rank: int
    tensor: int = 0
    """Among those that the rank holds values of, modulo their number."""
    value: str = "inf"


@dataclass(frozen=True)
class Episode:
    layout: str
    optimizer: str
    max_norm: float | None
    unscales: bool
    """Whether ``unscale_`` is called before ``step``, for the first optimizer."""
    num_backwards: int
    """A step; more than one accumulates."""
    init_scale: float
    growth_interval: int
    seed: int
    """Of the model and the data."""
    steps: tuple[tuple[Fault, ...], ...]
    num_optimizers: int = 1
    """They share the parameters out, and step together."""
    overlaps: bool = False
    """Whether gradients of FSDP2 are swept in the backward pass."""

    @property
    def kind(self) -> Kind:
        return LAYOUTS[self.layout]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Episode:
        fields = json.loads(text)
        fields["steps"] = tuple(tuple(Fault(**fault) for fault in step) for step in fields["steps"])
        return cls(**fields)


NATURAL = ("gradient", "backward", "loss", "idle")
WILD = (*NATURAL, "replica", "huge", "missing", "veto")


@st.composite
def episodes(draw: st.DrawFn, layout: str, num_steps: int, *, wild: bool) -> Episode:
    """Draws the rest of an episode on ``layout``; it shrinks towards no fault. ``wild``: see :class:`Fault`."""
    kinds = WILD if wild else NATURAL
    kind = LAYOUTS[layout]
    fault = st.builds(
        Fault,
        st.sampled_from(kinds if layout != "idle ranks" else (*kinds, "idle", "idle")),
        st.integers(0, kind.num_ranks - 1),
        st.integers(0, 11),
        st.sampled_from(["inf", "-inf", "nan"]),
    )
    # Three steps in five are good ones; the others have neighbours that are not, often enough.
    step = st.integers(0, 9).flatmap(lambda dice: st.tuples(*[fault] * max(0, (dice - 4) // 2)))
    return Episode(
        layout,
        draw(st.sampled_from(kind.optimizers)),
        draw(st.sampled_from([None, 0.05])),
        kind.may_unscale and draw(st.booleans()),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1024.0, 65536.0, 0.0625] if wild else [1024.0, 65536.0])),
        draw(st.sampled_from([2000, 1, 3])),
        draw(st.integers(0, 2**16 - 1)),
        draw(st.tuples(*[step] * num_steps)),
        # Torch's scaler decides for each optimizer by itself.
        draw(st.integers(1, 2)) if wild else 1,
        wild and draw(st.booleans()),
    )


def draw_episodes(layout: str, num_episodes: int, num_steps: int, *, wild: bool) -> list[Episode]:
    """The same at each call, others for each layout; without the simplest, which hypothesis draws first."""
    drawn: list[Episode] = []

    @seed(zlib.crc32(layout.encode()))
    @settings(
        max_examples=num_episodes + 1,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(episodes(layout, num_steps, wild=wild))
    def add(episode: Episode) -> None:
        drawn.append(episode)

    add()
    return drawn[1 : num_episodes + 1]
