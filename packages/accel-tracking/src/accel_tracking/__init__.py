"""Experiment tracking, progress bars and profiling for distributed training."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_tracking.tracker": "GeneralTracker on_main_process",
        "accel_tracking.registry": "filter_trackers get_available_trackers register_tracker_class",
        "accel_tracking.tracker_set": "TrackerSet",
        "accel_tracking.trackers.local": "LocalTracker",
        "accel_tracking.local.reading": "Run Series read_run read_runs",
        "accel_tracking.progress": "progress_bar tqdm",
        "accel_tracking.profiling": "record_profile",
        "accel_tracking.profiling_summary": "ProfileSummary summarize",
    },
)
