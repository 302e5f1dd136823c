"""Training backends: engines, mixed precision, prepared optimizers and compilation behind one interface."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_integrations.engines.ddp": "DDPEngine",
        "accel_integrations.engines.delegating": "DelegatingEngine",
        "accel_integrations.engines.engine": "Engine EngineContext",
        "accel_integrations.engines.registry": "ENGINES make_engine",
        "accel_integrations.engines.single": "SingleEngine",
        "accel_integrations.precision.precision": "Precision",
        "accel_integrations.prepared.optimizer": "AcceleratedOptimizer",
        "accel_integrations.prepared.prepared": "Prepared",
        "accel_integrations.prepared.scheduler": "AcceleratedScheduler",
        "accel_integrations.averaging": "WindowAverage",
        "accel_integrations.compile": "compile_model compile_regions compile_regions_deepspeed compile_regions_fsdp2",
        "accel_integrations.unwrap": "extract_model_from_parallel",
    },
)
