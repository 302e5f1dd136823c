"""The accelerate command line and the launchers."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_cli.notebook": "PrepareForLaunch debug_launcher notebook_launcher",
    },
)
