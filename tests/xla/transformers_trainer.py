"""Run by `test_transformers.py` in a process of its own: transformers' Trainer, which shards its model by torch_xla itself.

transformers_trainer.py RESULTS FOLDER [--plain]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

NUM_STEPS, GLOBAL_BATCH = 5, 8


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return GLOBAL_BATCH * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.seen.append(logs["loss"])


class XlaTrainer(Trainer):
    """Makes the optimizer from the sharded model: transformers 5 waits for that and then forgets it."""

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = super()._wrap_model(model, *args, **kwargs)
        if self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped


def main(results: str, folder: str, mode: str = "xla_fsdp_v2") -> None:
    is_plain = mode == "--plain"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    devices = 1
    settings: dict[str, Any] = {"use_cpu": True}
    if not is_plain:
        import torch_xla.runtime as xr

        devices = xr.global_runtime_device_count()
        keys = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True}
        settings = {"fsdp": True, "fsdp_config": keys}
    arguments = TrainingArguments(
        output_dir=folder, max_steps=NUM_STEPS, per_device_train_batch_size=GLOBAL_BATCH // devices, logging_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", dataloader_drop_last=True, logging_nan_inf_filter=False,
        **settings,
    )  # fmt: skip
    losses = Losses()
    trainer = (Trainer if is_plain else XlaTrainer)(
        model=model, args=arguments, train_dataset=Tokens(), callbacks=[losses]
    )
    trainer._get_train_sampler = lambda *_: None
    trainer.train()
    seen: dict[str, Any] = {
        "losses": losses.seen,
        "device": str(trainer.args.device),
        "class": type(trainer.model_wrapped).__name__,
    }
    if not is_plain:
        import torch_xla

        named = trainer.model_wrapped.named_parameters()
        seen["specs"] = {name: torch_xla._XLAC._get_xla_sharding_spec(one) for name, one in named}
        seen["loader"] = type(trainer.get_train_dataloader()).__name__
        trainer.save_model(folder)
        seen["saved"] = sorted(path.name for path in Path(folder).iterdir())
    Path(results).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
