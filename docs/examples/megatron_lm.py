"""Train a small Llama; the same program runs in one process, on replicas, and under Megatron-LM.

accelerate launch --cpu --num_processes 2 --use_megatron_lm --megatron_lm_tp_degree 2 docs/examples/megatron_lm.py
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator
from accelerate.utils import set_seed

STEPS = 30


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 200))
    counting = [torch.arange(start, start + 16) % 64 for start in range(STEPS * 8)]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in counting], batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    model.train()
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    model.eval()
    with torch.no_grad():
        predicted = model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
    right = accelerator.gather_for_metrics(predicted == batch["input_ids"][:, 1:]).float().mean()
    accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right:.0%} of the next tokens are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
