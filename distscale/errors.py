"""Every error that distscale raises on purpose."""

__all__ = ["ConfigError", "DesyncError", "DistScaleError", "ProtocolError", "ScaleExhaustedError"]


class DistScaleError(RuntimeError):
    """Base of all errors of this library."""


class ConfigError(DistScaleError, ValueError):
    """An argument, a setting or a saved state that cannot be meant; nothing was changed."""


class ProtocolError(DistScaleError):
    """Calls in an impossible order, or a peer that failed, died or did not answer in time."""


class DesyncError(DistScaleError):
    """Ranks that must be equal are not; the step was not applied on any of them."""


class ScaleExhaustedError(DistScaleError):
    """Steps keep being skipped and a lower scale cannot help any more."""
