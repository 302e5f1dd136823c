"""Compatibility path for data loaders."""

from typing import Any

from accel_data.adapter import DataLoaderAdapter as DataLoaderAdapter
from accel_data.adapter import DataLoaderStateMixin as DataLoaderStateMixin
from accel_data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accel_data.loader_shard import DataLoaderShard as DataLoaderShard
from accel_data.prepare import prepare_data_loader as prepare_data_loader
from accel_data.samplers import BatchSamplerShard as BatchSamplerShard
from accel_data.samplers import SeedableRandomSampler as SeedableRandomSampler
from accel_data.samplers import SkipBatchSampler as SkipBatchSampler
from accel_data.samplers import get_sampler as get_sampler
from accel_data.skipping import SkipDataLoader as SkipDataLoader
from accel_data.skipping import skip_first_batches as skip_first_batches
from accel_data.streams import IterableDatasetShard as IterableDatasetShard
from accel_state.libraries import is_torch_xla_available
from accelerate.compat.legacy import legacy_getattr

_legacy_name = legacy_getattr(__name__)


def __getattr__(name: str) -> Any:  # what programs import from here
    if name == "MpDeviceLoaderWrapper" and is_torch_xla_available():  # its class is torch_xla's
        from accel_integrations.engines.xla_loader import MpDeviceLoaderWrapper

        return MpDeviceLoaderWrapper
    return _legacy_name(name)
