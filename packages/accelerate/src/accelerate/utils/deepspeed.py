"""The old path of DeepSpeed's configuration and of what stands for its optimizer."""

from accel_integrations.deepspeed_dummies import DummyOptim as DummyOptim
from accel_integrations.deepspeed_dummies import DummyScheduler as DummyScheduler
from accel_state.settings.deepspeed_auto import HfDeepSpeedConfig as HfDeepSpeedConfig
