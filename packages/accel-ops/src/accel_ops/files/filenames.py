"""Names of the files that make up a checkpoint or a model folder."""

from __future__ import annotations

from collections.abc import Collection

# A training state. "_1", "_2", ... is added to the stem for the second, third, ... object of a kind.
MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
DATALOADER_NAME = "dl_state_dict"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
WINDOW_NAME = "accumulated_gradients"
CUSTOM_OBJECT_NAME = "custom_checkpoint"
FSDP_MODEL_NAME = "pytorch_model_fsdp"
MANIFEST_NAME = "manifest.json"

# A model folder. The patterns take "" or "-00001-of-00003" as `suffix`.
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

PROFILE_PATTERN_NAME = "profile_{suffix}.json"


def numbered(name: str, index: int) -> str:
    """The file of the object at `index` of its kind: `optimizer.bin`, `optimizer_1.bin`, ..."""
    stem, dot, extension = name.partition(".")
    return f"{stem}_{index}{dot}{extension}" if index else name


def weights_file(index: int, safe_serialization: bool) -> str:
    """The weights file of the model at `index`."""
    return numbered(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, index)


def count_files(names: Collection[str], *patterns: str) -> int:
    """How many objects of a kind a checkpoint holds: the first index for which no pattern names a file."""
    index = 0
    while any(numbered(pattern, index) in names for pattern in patterns):
        index += 1
    return index
