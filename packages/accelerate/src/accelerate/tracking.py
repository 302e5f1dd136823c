"""The old path of experiment tracking, now `accel_tracking`."""

from accel_tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from accel_tracking.registry import filter_trackers as filter_trackers
from accel_tracking.registry import get_available_trackers as get_available_trackers
from accel_tracking.registry import register_tracker_class as register_tracker_class
from accel_tracking.tracker import GeneralTracker as GeneralTracker
from accel_tracking.tracker import on_main_process as on_main_process
