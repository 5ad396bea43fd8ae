"""JSON as people write it for DeepSpeed, which reads Hjson: with comments and trailing commas."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str) -> Any:
    """Reads JSON, and Hjson where the package hjson is installed, as it is with DeepSpeed.

    Raises:
        json.JSONDecodeError: if it is not JSON; where hjson is installed, hjson's own ValueError.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if importlib.util.find_spec("hjson") is None:
            raise
    import hjson

    return json.loads(json.dumps(hjson.loads(text)))  # plain dicts
