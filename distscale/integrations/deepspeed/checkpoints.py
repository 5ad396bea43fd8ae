"""The state of a coordinated engine in DeepSpeed's checkpoints, and what those of DeepSpeed alone say.

Ours travels in the client state, as plain numbers. DeepSpeed's files hold its own scaler in the same state, so that
DeepSpeed alone, and its universal checkpoints, can go on with them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distscale.checkpoint import encode
from distscale.integrations.deepspeed.scale import saved_by_deepspeed
from distscale.integrations.deepspeed.settings import BLOCK
from distscale.policy import DynamicScale, Policy

if TYPE_CHECKING:
    from distscale.integrations.deepspeed.coordination import Coordination

__all__ = ["carry_state", "state_to_load"]

_log = logging.getLogger("distscale")


def carry_state(engine: Any, coordination: Coordination) -> None:
    """Lets ``engine.save_checkpoint`` and ``engine.load_checkpoint`` take the state along."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: str, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        state = {**(client_state or {}), BLOCK: coordination.state_dict()}
        with coordination.lent():
            return save(save_dir, tag, state, *args, **kwargs)

    takes = inspect.signature(load)

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        asked = takes.bind(*args, **kwargs)
        asked.apply_defaults()
        is_whole = asked.arguments["load_optimizer_states"] and not asked.arguments["load_module_only"]
        path, client_state = load(*args, **kwargs)
        if path is not None:
            mine = client_state.pop(BLOCK, None) if client_state else None
            coordination.resume(mine, is_whole)
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def state_to_load(
    policy: Policy, mine: Mapping[str, Any] | None, found: Any, is_whole: bool, step: int
) -> Mapping[str, Any] | None:
    """What to go on from after a checkpoint was loaded; None: from the scale as it is.

    Args:
        policy: of this run.
        mine: our state in the checkpoint; None: it is of DeepSpeed alone.
        found: DeepSpeed's dynamic scaler, as the checkpoint has left it, or None.
        is_whole: False if the optimizer was not loaded.
        step: number of the coming step, if the checkpoint does not say.
    """
    if not is_whole:
        return None
    if mine is None and found is not None and isinstance(policy, DynamicScale):
        saved = saved_by_deepspeed(found, policy, step)
        return encode(policy, replace(saved, scale=min(max(saved.scale, policy.min_scale), policy.max_scale)))
    if mine is not None and mine.get("policy") != policy.name:
        # DeepSpeed has loaded everything else by now.
        _log.warning(
            "the checkpoint is of policy %r and this run has %r, which begins afresh", mine.get("policy"), policy.name
        )
        return None
    return mine
