"""Train a language model with DeepSpeed from a JSON config.

    accelerate launch deepspeed_with_config_support.py --config deepspeed_config_templates/zero_stage2_config.json
    accelerate launch --num_processes 2 deepspeed_with_config_support.py --config deepspeed_config_templates/zero_stage3_offload_config.json
    accelerate launch --use_deepspeed --deepspeed_config_file deepspeed_config_templates/zero_stage3_config.json \
        deepspeed_with_config_support.py --config_name gpt2 --tokenizer_name gpt2 --train_file stories.txt

What differs from any other training: `DeepSpeedPlugin(hf_ds_config=...)`, which a launch with `--use_deepspeed` makes superfluous,
and that `DummyOptim` and `DummyScheduler` stand for the optimizer and the scheduler of the file, and say what fills their "auto".
The files are in `deepspeed_config_templates`; `language_modeling.py` has the other arguments, and reads texts and models.
Without options, a tiny GPT-2 learns to count. The last line is a loss below 0.5. Needs deepspeed and transformers. On CPUs, set
DS_BUILD_SHM_COMM=0 to spare the minute in which DeepSpeed compiles something at its first start.
"""

import argparse
import math

import torch
from language_modeling import add_arguments, evaluate, make_datasets, make_model, make_tokenizer, read_texts, save
from torch.utils.data import DataLoader
from transformers import get_scheduler

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, parse_flag_from_env, set_seed

ZERO2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


def main() -> None:
    """Train, and print the validation loss after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a configuration file of DeepSpeed; default: that of the launch, or ZeRO 2")
    add_arguments(parser)
    args = parser.parse_args()

    launched = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not args.config  # the launch has chosen a plugin
    accelerator = Accelerator(
        deepspeed_plugin=None if launched else DeepSpeedPlugin(hf_ds_config=args.config or ZERO2),
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
    train_loader = DataLoader(train, batch_size=args.per_device_train_batch_size, shuffle=True)
    eval_loader = DataLoader(validation, batch_size=args.per_device_eval_batch_size)
    steps = args.num_train_epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)  # of one process
    config = accelerator.deepspeed_plugin.deepspeed_config
    optimizer_class = DummyOptim if "optimizer" in config else torch.optim.AdamW
    optimizer = optimizer_class(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    if "scheduler" in config:
        scheduler = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=args.num_warmup_steps)
    else:
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, steps)
    model, optimizer, scheduler, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, eval_loader
    )
    accelerator.print(f"ZeRO stage {model.zero_optimization_stage()}")

    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)  # DeepSpeed clips, steps and clears the gradients here
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
