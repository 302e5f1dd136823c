"""Questions about DeepSpeed."""

from __future__ import annotations

from accel_cli.questionnaire.answer import Choice, Joined, Number, Path, Text, Truth, choice
from accel_cli.questionnaire.machine import by_hostfile, on_several_machines
from accel_cli.questionnaire.question import Condition, Question, Topic, every, opposite, said
from accel_state.constants import DEEPSPEED_MULTINODE_LAUNCHERS

STAGES = Choice(
    (
        (0, "nothing (stage 0)"),
        (1, "the optimizer's state (stage 1)"),
        (2, "gradients, too (stage 2)"),
        (3, "parameters, too (stage 3)"),
    )
)
PLACES = Choice((("none", "none"), ("cpu", "CPU memory"), ("nvme", "NVMe disk")))
LAUNCHERS = choice(*DEEPSPEED_MULTINODE_LAUNCHERS, standard="standard: `accelerate launch` is run on every machine")

by_choices: Condition = opposite(said("has_deepspeed_file"))

DEEPSPEED = Topic(
    "DeepSpeed",
    (
        Question("has_deepspeed_file", "Have you got a DeepSpeed JSON file to use?", Truth(), False, is_saved=False),
        Question("deepspeed_config_file", "Where is it?", Path(), None, said("has_deepspeed_file")),
        Question("zero_stage", "What does ZeRO shard?", STAGES, 2, by_choices),
        Question("offload_optimizer_device", "Where is the optimizer's state kept besides the device?", PLACES, "none",
                 every(by_choices, said("zero_stage", 2, 3))),
        Question("offload_optimizer_nvme_path", "In which folder?", Path(), None,
                 said("offload_optimizer_device", "nvme")),
        Question("offload_param_device", "Where are parameters kept besides the device?", PLACES, "none",
                 every(by_choices, said("zero_stage", 3))),
        Question("offload_param_nvme_path", "In which folder?", Path(), None, said("offload_param_device", "nvme")),
        Question("gradient_accumulation_steps", "How many batches make an optimizer step?", Number(least=1), 1,
                 by_choices),
        Question("clips_gradients", "Limit the norm of the gradient?", Truth(), False, by_choices, is_saved=False),
        Question("gradient_clipping", "To how much?", Number(least=0, is_whole=False), 1.0, said("clips_gradients")),
        Question("zero3_save_16bit_model", "Gather 16-bit weights when the model is saved?", Truth(), False,
                 every(by_choices, said("zero_stage", 3))),
        Question("zero3_init_flag", "Shard a transformers model while it is built (deepspeed.zero.Init)?", Truth(),
                 lambda answers: answers.get("zero_stage") == 3,
                 lambda answers: bool(answers["has_deepspeed_file"]) or answers["zero_stage"] == 3),
        Question("has_experts", "Has the model mixture-of-experts layers?", Truth(), False, is_saved=False),
        Question("deepspeed_moe_layer_cls_names", "What are their classes called? With commas between them", Joined(),
                 None, said("has_experts")),
        Question("deepspeed_multinode_launcher", "How are processes started on the other machines?", LAUNCHERS, "pdsh",
                 on_several_machines),
        Question("deepspeed_hostfile", "Where is the list of machines (the hostfile)?", Path(), None,
                 every(by_hostfile, opposite(said("deepspeed_multinode_launcher", "slurm")))),
        Question("deepspeed_exclusion_filter", "Which machines or devices are left out? As in host1@host2:0,1",
                 Text(), None, by_hostfile, is_required=False),
        Question("deepspeed_inclusion_filter", "Or which ones are used alone? As in host1@host2:0,1", Text(), None,
                 lambda answers: by_hostfile(answers) and not answers["deepspeed_exclusion_filter"],
                 is_required=False),
    ),
    section="deepspeed_config",
    asked_when=said("way", "DEEPSPEED"),
)  # fmt: skip
