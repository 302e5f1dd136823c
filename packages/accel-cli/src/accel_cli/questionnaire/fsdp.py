"""Questions about fully sharded data parallelism."""

from __future__ import annotations

from accel_cli.questionnaire.answer import Choice, Joined, Number, Truth, choice
from accel_cli.questionnaire.question import Question, Topic, every, said
from accel_state.constants import (
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

VERSIONS = Choice(((2, "fully_shard, the newer one (version 2)"), (1, "FullyShardedDataParallel (version 1)")))
POLICIES = choice(
    *FSDP_AUTO_WRAP_POLICY,
    TRANSFORMER_BASED_WRAP="TRANSFORMER_BASED_WRAP: the blocks of a transformer",
    SIZE_BASED_WRAP="SIZE_BASED_WRAP: modules above a size",
    NO_WRAP="NO_WRAP: the model as one piece",
)
in_version_1, in_version_2 = said("fsdp_version", 1), said("fsdp_version", 2)

FSDP = Topic(
    "Fully sharded data parallelism",
    (
        Question("fsdp_version", "Which of torch's implementations?", VERSIONS, 2),
        Question("fsdp_sharding_strategy", "What is sharded?", choice(*FSDP_SHARDING_STRATEGY), "FULL_SHARD",
                 in_version_1),
        Question("fsdp_reshard_after_forward", "Free gathered parameters after the forward pass? Less memory, slower",
                 Truth(), True, in_version_2),
        Question("fsdp_offload_params", "Keep parameters and gradients in CPU memory?", Truth(), False),
        Question("fsdp_auto_wrap_policy", "Which modules are sharded by themselves?", POLICIES,
                 "TRANSFORMER_BASED_WRAP"),
        Question("knows_blocks", "Take the blocks that the model names itself (_no_split_modules)?", Truth(), True,
                 said("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"), is_saved=False),
        Question("fsdp_transformer_layer_cls_to_wrap",
                 "What are the classes of the blocks called? With commas between them", Joined(), None,
                 lambda answers: answers.get("knows_blocks") is False),
        Question("fsdp_min_num_params", "From how many parameters on?", Number(least=1), 100_000_000,
                 said("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")),
        Question("fsdp_backward_prefetch", "When does the backward pass gather the next parameters?",
                 choice(*FSDP_BACKWARD_PREFETCH), "BACKWARD_PRE", in_version_1),
        Question("fsdp_state_dict_type", "In which form are checkpoints?", choice(*FSDP_STATE_DICT_TYPE),
                 "FULL_STATE_DICT", in_version_1),
        Question("fsdp_state_dict_type", "In which form are checkpoints?", choice(*FSDP2_STATE_DICT_TYPE),
                 "SHARDED_STATE_DICT", in_version_2),
        Question("fsdp_forward_prefetch", "Gather the next parameters early in the forward pass, too?", Truth(), False,
                 in_version_1),
        Question("fsdp_use_orig_params", "Show the optimizer the original parameters?", Truth(), True, in_version_1),
        Question("fsdp_cpu_ram_efficient_loading", "Load pretrained weights on the first process only?", Truth(),
                 True),
        Question("fsdp_sync_module_states", "Send the first process's weights to all others?", Truth(), True,
                 in_version_1,
                 lambda value, answers: "Weights that only the first process loads must be sent to the others."
                 if answers["fsdp_cpu_ram_efficient_loading"] and not value else ""),
        Question("fsdp_activation_checkpointing", "Compute activations again in the backward pass? Less memory",
                 Truth(), False),
        Question("fsdp_activation_checkpointing_offload", "Keep what remains of them in CPU memory?", Truth(), False,
                 every(in_version_2, said("fsdp_activation_checkpointing"))),
    ),
    section="fsdp_config",
    asked_when=said("way", "FSDP"),
)  # fmt: skip
