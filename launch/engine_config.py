"""The JSON of a DeepSpeed run: completed by the TOML beside it, and held against it, before anything starts.

The TOML says what is trained and how long ([run], [model], [data], [train]); the JSON says by which engine, in which
precision and with which scale. Neither can say what belongs to the other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomli_w

from distscale import ConfigError
from distscale.config import Config
from distscale.integrations.deepspeed.settings import read_config, settings_of, split_block

__all__ = ["changed_engine_keys", "dump_settings", "engine_config"]

AUTO = "auto"
# What "auto" stands for, as in Hugging Face's integration.
FROM_TOML: dict[str, Callable[[Config], int]] = {
    "train_micro_batch_size_per_gpu": lambda config: config.train.batch,
    "gradient_accumulation_steps": lambda config: config.train.accumulation,
    "zero_optimization.reduce_bucket_size": lambda config: config.model.width**2,
    "zero_optimization.stage3_prefetch_bucket_size": lambda config: int(0.9 * config.model.width**2),
    "zero_optimization.stage3_param_persistence_threshold": lambda config: 10 * config.model.width,
}
# One number in both files.
SAME_AS = {"train_micro_batch_size_per_gpu": "train.batch", "gradient_accumulation_steps": "train.accumulation"}
# Blocks of the JSON that the program has no use for.
NOT_HERE = {
    "optimizer": "the program steps AdamW with lr, betas and weight_decay of [train]",
    "scheduler": "the program sets the learning rate by lr and warmup of [train]",
    "tensor_parallel": "the program knows data parallelism alone",
    "sequence_parallel_size": "the program knows data parallelism alone",
    "pipeline": "the program knows data parallelism alone",
}
# Keys of the TOML that the JSON takes the place of.
NOT_IN_TOML: dict[str, set[str] | bool] = {
    "precision": True,
    "scaler": True,
    "parallel": {"layout"},
    "train": {"profile_every", "checkpoint_async"},
    "faults": True,
    "fp8": True,
}
# Why, if not because the JSON says it.
NOT_DONE = {
    "profile_every": "gradients are not profiled",
    "checkpoint_async": "DeepSpeed writes the checkpoints",
    "inject": "no faults are injected",
    "fp8": "nothing is in FP8",
}
# What may change from one call to the next without making another run of it.
FREE_ENGINE_KEYS = frozenset({"steps_per_print", "wall_clock_breakdown", "dump_state"})


def engine_config(path: str, config: Config, world_size: int | None) -> dict[str, Any]:
    """Reads the JSON, puts values of the TOML in place of "auto" and of absent batch sizes, and checks it.

    Args:
        path: of the JSON.
        config: of the run.
        world_size: number of ranks, None if it is not known yet.

    Returns:
        What DeepSpeed is to be given, and our block.

    Raises:
        ConfigError: if DeepSpeed is missing, if the JSON cannot be used, or if it contradicts the TOML.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "--deepspeed needs deepspeed, which is not installed: pip install 'distscale[train,deepspeed]'"
        )
    _check_toml(path, config)
    engine = read_config(path)
    for key, why in NOT_HERE.items():
        if key in engine:
            raise ConfigError(f'{path}: "{key}" has no effect here, since {why}; take it out')
    for key in SAME_AS:
        engine.setdefault(key, AUTO)
    _fill(path, engine, config)
    for key, toml_key in SAME_AS.items():
        if engine[key] != (here := FROM_TOML[key](config)):
            raise ConfigError(
                f'{path}: {key} = {engine[key]!r}, but {toml_key} = {here} in the TOML; write "{AUTO}", or the same'
            )
    _check_batch(path, engine, config, world_size)
    _, block = split_block(engine)
    fp16 = engine.get("fp16", {})
    if isinstance(fp16, Mapping):
        settings_of(fp16, fp16.get("enabled", False), block)
    return engine


def dump_settings(config: Config) -> str:
    """As ``distscale.config.dump_config``, without the keys that the JSON takes the place of."""
    return tomli_w.dumps(config.model_dump(exclude_none=True, exclude=NOT_IN_TOML))


def changed_engine_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns, by dotted key, the old and the new value of every setting that differs and would make another run."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = sorted((before.keys() | after.keys()) - FREE_ENGINE_KEYS)
    pairs = {key: (before.get(key, "absent"), after.get(key, "absent")) for key in keys}
    return {key: (was, now) for key, (was, now) in pairs.items() if was != now}


def _check_toml(path: str, config: Config) -> None:
    for section, keys in NOT_IN_TOML.items():
        given = getattr(config, section).model_fields_set
        for key in sorted(given if keys is True else given & keys):
            if key in NOT_DONE and not getattr(getattr(config, section), key):
                continue
            why = NOT_DONE.get(key, NOT_DONE.get(section, f"{path} says that"))
            raise ConfigError(f"{section}.{key} has no effect with --deepspeed, where {why}; take it out of the TOML")


def _fill(path: str, engine: dict[str, Any], config: Config) -> None:
    for key, value in list(_leaves(engine)):
        if value != AUTO or key == "train_batch_size":
            continue
        if key not in FROM_TOML:
            raise ConfigError(f'{path}: {key} = "{AUTO}", but the TOML has nothing to put there; write a value')
        *blocks, name = key.split(".")
        place = engine
        for block in blocks:
            place = place[block]
        place[name] = FROM_TOML[key](config)


def _check_batch(path: str, engine: dict[str, Any], config: Config, world_size: int | None) -> None:
    given = engine.pop("train_batch_size", AUTO)
    if given == AUTO or world_size is None:
        return
    batch, accumulation = config.train.batch, config.train.accumulation
    if given != (total := batch * accumulation * world_size):
        raise ConfigError(
            f"{path}: train_batch_size = {given!r}, but train.batch = {batch} times train.accumulation = {accumulation}"
            f' times {world_size} ranks is {total}; write "{AUTO}", or {total}'
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
