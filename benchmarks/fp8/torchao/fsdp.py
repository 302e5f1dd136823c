"""FP8 with torchao under FSDP 2."""

from typing import Any

import torch
from fp8_curves import Block, Step, compare, convert_by_hand, make_model, make_optimizer, stepping
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from accelerate import FullyShardedDataParallelPlugin, PartialState


def settings() -> dict[str, Any]:
    """Each block is sharded by itself."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return {"fsdp_plugin": plugin}


def by_hand() -> Step:
    """Convert the model, then shard it."""
    model = convert_by_hand(make_model()).to(PartialState().device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
        fully_shard(module, mp_policy=policy)
    return stepping(model, make_optimizer(model))


if __name__ == "__main__":
    compare(by_hand, settings)
