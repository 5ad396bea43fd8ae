"""DeepSpeed: one decision for ZeRO 0 to 3, offload and pipeline, from DeepSpeed's own configuration.

The engine, its JSON and the loop stay as they are::

    engine, optimizer, loader, scheduler = distscale.deepspeed_initialize(model=model, config="ds.json", ...)

    loss = engine(batch)
    engine.backward(loss)
    engine.step()                       # one decision for all ranks
    report = engine.distscale.last_step

See docs/deepspeed.md for what DeepSpeed does otherwise, and what differs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from distscale.errors import ConfigError
from distscale.integrations.deepspeed.checkpoints import carry_state
from distscale.integrations.deepspeed.coordination import Coordination as Coordination
from distscale.integrations.deepspeed.settings import BLOCK, Settings, read_config, settings_of, split_block

__all__ = ["Coordination", "coordinate", "deepspeed_initialize"]


def coordinate(engine: Any, **overrides: Any) -> Coordination:
    """Lets distscale decide for a DeepSpeed engine. To be called on all ranks, after ``deepspeed.initialize``.

    Without overrides, the ``fp16`` block of the engine's configuration means what it means to DeepSpeed.

    Args:
        engine: as ``deepspeed.initialize`` returned it; DeepSpeed 0.18 and 0.19. Only attributes of this engine and of
            its optimizer are changed.
        overrides: ``policy`` ("dynamic", "static", "none" or a policy object); any argument of
            :class:`~distscale.DynamicScale`, such as ``init_scale``, ``min_scale``, ``max_scale``, ``hysteresis``;
            ``max_consecutive_skips`` and ``on_step`` as in :class:`~distscale.DistributedGradScaler`;
            ``deepspeed_check=True`` keeps DeepSpeed's own check and norm; ``reducer``: how ranks talk to each other.

    Returns:
        What decides, which is also ``engine.distscale``.

    Raises:
        ConfigError: if a value is not allowed or the engine cannot be coordinated; the engine is unchanged then.

    Collective: no. Syncs host: no.
    """
    config = getattr(engine, "_config", None)
    fp16 = {} if config is None else config.float16_config.model_dump()
    return _coordinate(engine, settings_of(fp16, bool(fp16.get("enabled")), overrides))


def deepspeed_initialize(
    *args: Any, distscale: Mapping[str, Any] | None = None, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, and :func:`coordinate` with the ``"distscale"`` block of the configuration.

    Args:
        args: as those of ``deepspeed.initialize``.
        kwargs: the same; ``config`` (or ``config_params``, or ``args.deepspeed_config``) is a dict or the path of a
            JSON file. Its block ``"distscale"`` has the overrides of :func:`coordinate` that JSON can express; it is
            taken out before DeepSpeed sees it. ``fp16.min_loss_scale`` may be fractional.
        distscale: overrides of :func:`coordinate`, also those that JSON cannot express; they go before the block.

    Returns:
        engine, optimizer, dataloader and scheduler, as ``deepspeed.initialize`` does. Collective: as it is.

    Raises:
        ConfigError: if a value is not allowed, before DeepSpeed is called.
    """
    deepspeed = _deepspeed()
    given = kwargs.pop("config", None) or kwargs.pop("config_params", None)
    if given is None:
        # On a copy: DeepSpeed refuses to be told twice, and the caller may want to make another engine.
        named: Any = copy.copy(kwargs.get("args") or (args[0] if args else None))
        given = getattr(named, "deepspeed_config", None) or getattr(named, "deepscale_config", None)
        if given is not None:
            named.deepspeed_config = None
            args, kwargs = args[1:], {**kwargs, "args": named}
    if given is None:
        raise ConfigError("deepspeed_initialize() needs config=, a dict or the path of a JSON file")
    config = read_config(given)
    rest, block = split_block(config)
    fp16 = config.get("fp16") or {}
    settings = settings_of(fp16, fp16.get("enabled", False) is True, {**block, **(distscale or {})})
    engine, *others = deepspeed.initialize(*args, config=rest, **kwargs)
    _coordinate(engine, settings)
    return engine, *others


def _coordinate(engine: Any, settings: Settings) -> Coordination:
    coordination = Coordination(engine, settings)
    carry_state(engine, coordination)
    setattr(engine, BLOCK, coordination)
    return coordination


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"deepspeed_initialize() needs {missing.name}, which is not installed: pip install 'distscale[deepspeed]'"
        ) from missing
    return deepspeed
