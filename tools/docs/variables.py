"""Environment variables that no option row declares: what is read from launchers and by a few places of our own."""

from __future__ import annotations

VARIABLES = {  # name -> what it does, what it takes, the value when it is not set
    "ACCELERATE_BYPASS_DEVICE_MAP": (
        "Let `prepare` take a model with a device map over several devices on several processes.", "true or false", "",
    ),
    "ACCELERATE_CHECK_GRADIENTS": (
        "Compare the first optimizer step with one process before `accelerate launch` starts the run.", "true or false", "false",
    ),
    "ACCELERATE_CONFIG_DS_FIELDS": (
        "Set by `accelerate launch`: the options of DeepSpeed that its JSON file would contain, too.", "names", "",
    ),
    "ACCELERATE_DEBUG_RDV_FILE": ("Set by `debug_launcher`: the file through which its processes meet.", "a path", ""),
    "ACCELERATE_ENABLE_RICH": ("Show tracebacks through rich, where it is installed.", "true or false", "false"),
    "ACCELERATE_FINITE_GRADIENTS": (
        "What happens where a gradient is not finite when an optimizer steps.", "stop, skip or warn", "",
    ),
    "ACCELERATE_IN_TPU_POD": ("Set by `accelerate launch` on the machines of a TPU pod.", "true or false", ""),
    "ACCELERATE_HANG_TIMEOUT": (
        "Set by `accelerate launch --hang_timeout`: loader workers that deliver nothing are named after half of it.", "seconds", "",
    ),
    "ACCELERATE_INIT_INCLUDE_BUFFERS": (
        "Whether `init_empty_weights` puts buffers on the meta device, too.", "true or false", "false",
    ),
    "ACCELERATE_LOG_LEVEL": ("Level of loggers made by `get_logger` without a level.", "a level of `logging`", ""),
    "ACCELERATE_NUM_PROCESSES": (
        "How many processes the bundled check of `notebook_launcher` starts.", "an integer", "1",
    ),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": (
        "Set by `accelerate launch` in jobs on Amazon SageMaker.", "NO, DATA_PARALLEL, MODEL_PARALLEL", "NO",
    ),
    "ACCELERATE_SUPERVISION": (
        "Set by `accelerate launch`: its process id and the folder through which processes report to it.", "", "",
    ),
    "ACCELERATE_TORCH_DEVICE": (
        "The device of this process, in place of the one that its rank would get.", "a device of torch", "",
    ),
    "ACCELERATE_USE_CPU": ("Train on the CPU; `--cpu` sets it.", "true or false", "false"),
    "ACCELERATE_USE_SAGEMAKER": ("Set by `accelerate launch` in jobs on Amazon SageMaker.", "true or false", ""),
    "CUDA_VISIBLE_DEVICES": ("Which GPUs processes see; `--gpu_ids` sets it.", "numbers, separated by commas", ""),
    "HF_HOME": ("The folder above that of the default config file.", "a path", "~/.cache/huggingface"),
    "LOCAL_RANK": ("Rank on this machine, as the launcher says.", "an integer", ""),
    "LOCAL_WORLD_SIZE": ("Processes on this machine, as the launcher says.", "an integer", ""),
    "MASTER_ADDR": ("Where rank 0 is reached.", "a host", ""),
    "MASTER_PORT": ("The port there.", "an integer", ""),
    "OMP_NUM_THREADS": ("Threads of each process on the CPU.", "an integer", ""),
    "PJRT_DEVICE": ("The runtime of torch_xla: see [TPUs](../tpu.md).", "TPU, CPU, ...", ""),
    "RANK": ("Rank of this process, as the launcher says.", "an integer", ""),
    "WORLD_SIZE": ("Number of processes, as the launcher says.", "an integer", ""),
    "XDG_CACHE_HOME": ("The folder of `huggingface/accelerate` where `HF_HOME` is not set.", "a path", "~/.cache"),
}  # fmt: skip
