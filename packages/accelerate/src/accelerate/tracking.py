"""Compatibility path for experiment tracking, now `accel_tracking`."""

from accel_tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from accel_tracking.registry import filter_trackers as filter_trackers
from accel_tracking.registry import get_available_trackers as get_available_trackers
from accel_tracking.registry import load_services
from accel_tracking.registry import register_tracker_class as register_tracker_class
from accel_tracking.tracker import GeneralTracker as GeneralTracker
from accel_tracking.tracker import on_main_process as on_main_process
from accel_tracking.trackers.aim import AimTracker as AimTracker
from accel_tracking.trackers.clearml import ClearMLTracker as ClearMLTracker
from accel_tracking.trackers.comet_ml import CometMLTracker as CometMLTracker
from accel_tracking.trackers.dvclive import DVCLiveTracker as DVCLiveTracker
from accel_tracking.trackers.local import LocalTracker as LocalTracker
from accel_tracking.trackers.mlflow import MLflowTracker as MLflowTracker
from accel_tracking.trackers.swanlab import SwanLabTracker as SwanLabTracker
from accel_tracking.trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
from accel_tracking.trackers.trackio import TrackioTracker as TrackioTracker
from accel_tracking.trackers.wandb import WandBTracker as WandBTracker
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here

load_services()  # into LOGGER_TYPE_TO_CLASS; their libraries stay unloaded
