"""Compatibility path for `accelerate estimate-memory`; loaded bit by bit, so that its help stays quick."""

import sys

from accel_cli.main import estimate_main as main
from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_bigmodel.empty": "init_empty_weights",
        "accel_bigmodel.sizes": "calculate_maximum_sizes",
        "accel_cli.arguments": "CustomArgumentParser=CommandParser",
        "accel_cli.estimate.building": "add_timm_hub_prefix check_has_model create_empty_model",
        "accel_cli.estimate.command": "estimate_command estimate_command_parser gather_data",
        "accel_cli.estimate.hub": "verify_on_hub",
        "accel_cli.estimate.sizes": "estimate_training_usage",
        "accel_cli.estimate.report": "create_ascii_table",
        "accel_ops.memory": "convert_bytes",
        "accel_state.libraries": "is_timm_available is_transformers_available",
    },
)
__all__ += ["main"]

if __name__ == "__main__":
    sys.exit(main())
