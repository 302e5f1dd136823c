"""Compatibility path for `accelerate merge-weights`; loaded bit by bit, so that its help stays quick."""

import sys

from accel_cli.main import merge_main as main
from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_cli.arguments": "CustomArgumentParser=CommandParser",
        "accel_cli.merge": "description merge_command merge_command_parser",
        "accel_integrations.training_state.merge": "merge_fsdp_weights",
    },
)
__all__ += ["main"]

if __name__ == "__main__":
    sys.exit(main())
