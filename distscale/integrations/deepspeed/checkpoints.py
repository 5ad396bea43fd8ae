"""The state of a coordinated engine in DeepSpeed's checkpoints, and what those of DeepSpeed alone say.

Ours travels in the client state, as plain numbers. DeepSpeed's files hold its own scaler in the same state, so that
DeepSpeed alone, and its universal checkpoints, can go on with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distscale.integrations.deepspeed.settings import BLOCK

if TYPE_CHECKING:
    from distscale.integrations.deepspeed.coordination import Coordination

__all__ = ["carry_state"]


def carry_state(engine: Any, coordination: Coordination) -> None:
    """Lets ``engine.save_checkpoint`` and ``engine.load_checkpoint`` take the state along."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: str, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        state = {**(client_state or {}), BLOCK: coordination.state_dict()}
        with coordination.lent():
            return save(save_dir, tag, state, *args, **kwargs)

    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> Any:
        path, client_state = load(load_dir, *args, **kwargs)
        if path is not None:
            mine = client_state.pop(BLOCK, None) if client_state else None
            coordination.resume(mine)
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
