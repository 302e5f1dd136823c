"""Megatron-LM: models of transformers trained with tensor, sequence, pipeline, context and expert parallelism of megatron-core."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_integrations.megatron.engine": "MegatronLMEngine",
        "accel_integrations.megatron.model": "MegatronEngine",
        "accel_integrations.megatron.placeholders": "MegatronLMDummyDataLoader MegatronLMDummyScheduler",
        "accel_integrations.megatron.prepared": "MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper",
    },
)
