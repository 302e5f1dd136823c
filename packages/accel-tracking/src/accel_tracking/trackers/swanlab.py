"""SwanLab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import ServiceTracker
from accel_tracking.values import presentable

if TYPE_CHECKING:
    from swanlab import Run

SHOWN = frozenset({"swanlab"})


@known_as("accelerate.tracking.SwanLabTracker")
class SwanLabTracker(ServiceTracker["Run"]):
    """Logs to SwanLab; without an account or network with `init_kwargs={"swanlab": {"mode": "offline"}}`.

    When the training script constructs it, it logs from every process, for grouped runs.

    Args:
        run_name (`str`): Name of the project.
        kwargs: For `swanlab.init`.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    run: Run | None

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False
    run_attribute = "run"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @override
    def _open(self) -> Run:
        import swanlab

        run = swanlab.init(**{"project": self.run_name, **self.init_kwargs})
        swanlab.config["FRAMEWORK"] = "Accelerate"
        return run

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        import swanlab

        swanlab.config.update(config)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; tensors and numbers of other libraries become plain numbers.

        Args:
            values (`dict`): Whatever `swanlab.log` takes: numbers, media, dictionaries of these. Strings and other
                objects become `swanlab.Text`.
            step (`int`, *optional*): The training step.
            kwargs: For `swanlab.log`.
        """
        self.tracker.log({str(name): _value(value) for name, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values (`dict`): By name, a list of images: arrays, tensors, PIL images or paths.
            step (`int`, *optional*): The training step.
            kwargs: For `swanlab.Image`.
        """
        from swanlab import Image

        images = {str(name): [Image(image, **kwargs) for image in batch] for name, batch in values.items()}
        self.tracker.log(images, step=step)

    @override
    def _close(self) -> None:
        self.tracker.finish()

    @on_main_process
    @override
    def abort(self, reason: str) -> None:
        if self.run is not None:
            self.run.finish(state="crashed", error=reason)


def _value(value: Any) -> Any:
    import swanlab

    value = presentable(value, SHOWN)
    if isinstance(value, dict):
        return {name: _value(item) for name, item in value.items()}
    return swanlab.Text(value) if isinstance(value, str) else value
