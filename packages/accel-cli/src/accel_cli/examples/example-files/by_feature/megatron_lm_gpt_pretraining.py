"""Pretrain a GPT-2 with Megatron-LM: tensor and pipeline parallel, with the training loop of any other model.

    accelerate launch --num_processes 2 --use_megatron_lm --megatron_lm_tp_degree 2 megatron_lm_gpt_pretraining.py
    accelerate launch --num_processes 2 --use_megatron_lm --megatron_lm_pp_degree 2 megatron_lm_gpt_pretraining.py
    accelerate launch megatron_lm_gpt_pretraining.py --config_name gpt2 --tokenizer_name gpt2 --train_file stories.txt

Nothing in the program names Megatron-LM: the launch chooses it. Without its options the same program trains on one process, or
on replicas. The other file, `language_modeling.py`, has the arguments, and reads texts and models. Without options, a tiny GPT-2
learns to count. The last line is a loss below 0.5. Needs transformers, and megatron-core for Megatron-LM.
"""

import argparse
import math

import torch
from language_modeling import add_arguments, evaluate, make_datasets, make_model, make_tokenizer, read_texts, save
from torch.utils.data import DataLoader
from transformers import get_scheduler

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    """Train, and print the validation loss after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.report_to if args.with_tracking else None,
        project_dir=args.output_dir,
    )
    if args.with_tracking:
        accelerator.init_trackers("language_modeling", config=vars(args))
    set_seed(args.seed)
    texts = read_texts(args, accelerator)
    tokenizer = make_tokenizer(args, texts[0], accelerator)
    model = make_model(args, tokenizer, accelerator)
    train, validation = make_datasets(args, texts, tokenizer)
    train_loader = DataLoader(train, batch_size=args.per_device_train_batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(validation, batch_size=args.per_device_eval_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    steps = args.num_train_epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)  # of one process
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, steps)
    model, optimizer, scheduler, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, eval_loader
    )

    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss = evaluate(accelerator, model, eval_loader)
        if args.with_tracking:
            accelerator.log({"loss": loss, "perplexity": math.exp(loss)}, step=epoch)
        accelerator.print(f"epoch {epoch + 1}: perplexity {math.exp(loss):.3f}, loss {loss:.3f}")
    if args.output_dir:
        save(accelerator, model, tokenizer, args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
