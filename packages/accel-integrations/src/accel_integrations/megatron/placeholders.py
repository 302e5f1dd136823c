"""Placeholders that a program passes to `Accelerator.prepare` for objects that Megatron-LM builds."""

from __future__ import annotations

from typing import Any

from accel_state.public_names import known_as

NOT_BY_ITSELF = "MegatronLMDummyDataLoader makes its datasets in Accelerator.prepare(), with model, optimizer and scheduler. Pass it to that."


@known_as("accelerate.utils.megatron_lm.MegatronLMDummyDataLoader")
class MegatronLMDummyDataLoader:
    """Placeholder for a data loader: `prepare` returns those of training, validation and test data for one after the other.

    The datasets are those of `MegatronLMPlugin(custom_megatron_datasets_provider_function=...)`, or else Megatron-LM's indexed
    datasets.

    Args:
        dataset_kwargs: Megatron-LM's arguments about data: `micro_batch_size`, the samples of a micro-batch; for indexed datasets
            `data_path`, a path without `.bin` and `.idx`, or several, perhaps each after its weight; `split`, the shares of
            training, validation and test (969, 30, 1), or `train_data_path`, `valid_data_path` and `test_data_path`;
            `seq_length`, `seed` (1234) and `data_cache_path`.

    Attributes:
        dataset_args: The arguments, with `megatron_dataset_flag`.
    """

    dataset_args: dict[str, Any]

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Refuse: `prepare` does it."""
        raise NotImplementedError(NOT_BY_ITSELF)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Refuse: `prepare` does it."""
        raise NotImplementedError(NOT_BY_ITSELF)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """Refuse: `prepare` does it."""
        raise NotImplementedError(NOT_BY_ITSELF)


@known_as("accelerate.utils.megatron_lm.MegatronLMDummyScheduler")
class MegatronLMDummyScheduler:
    """Placeholder for a scheduler that is made as `MegatronLMPlugin` says: warmup, then decay of `lr_decay_style`.

    Args:
        optimizer: The optimizer.
        total_num_steps (`int`, *optional*): Steps of the whole run, counted over all data-parallel processes.
        warmup_num_steps (`int`): Steps in which the learning rate rises, counted in the same way.
        kwargs: Further settings.
    """

    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int
    kwargs: dict[str, Any]

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs
