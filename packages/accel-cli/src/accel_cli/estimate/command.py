"""The command `accelerate estimate-memory`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, switch
from accel_cli.errors import UsageError, without_traceback
from accel_cli.estimate.optimizers import OPTIMIZERS
from accel_cli.estimate.several_devices import PARALLEL, rehearse_training
from accel_cli.estimate.sizes import BITS, FormatRow, ModelSize
from accel_state.settings.option import INTEGER, one_of

if TYPE_CHECKING:
    from accel_cli.estimate.report import Report
    from accel_cli.estimate.source import ModelSource
    from accel_cli.estimate.training_report import ModelStates, TrainingStep

HELP = "Estimate the memory that a model needs."

OPTIONS = (
    Flag("model_name", "A folder with a model, the name of one on the Hugging Face Hub, or a class of your own: file.py:Class or "
           "module:Class."),
    Flag("--arguments", "Keyword arguments of the class, as a JSON object.", metavar="JSON"),
    Flag("--library_name", "Library of the model; detected if left out.", kind=one_of("timm", "transformers")),
    Flag("--dtypes", "Dtypes to estimate for.", nargs="+", metavar="DTYPE",
           default=("float32", "float16", "int8", "int4"), kind=one_of(*BITS)),
    switch("--trust_remote_code", "Run code from the model's repository."),
    switch("--json", "Print JSON, with sizes in bytes."),
)  # fmt: skip

TRAINING_OPTIONS = (
    switch("--training", "Simulate one training step on fake tensors, and show its memory."),
    Flag("--optimizer", "Optimizer of the training.", default="adamw", kind=one_of(*OPTIMIZERS), metavar="NAME"),
    Flag("--batch_size", "Examples per device.", default=1, kind=INTEGER, metavar="N"),
    Flag("--sequence_length", "Tokens per example; 512, or the model's maximum, if left out.", kind=INTEGER,
           metavar="N"),
    Flag("--mixed_precision", "Mixed precision dtype.", default="no", kind=one_of("no", "fp16", "bf16")),
    switch("--gradient_checkpointing", "Activation checkpointing: recompute activations in the backward pass."),
    Flag("--parallel", "Kind of parallelism: rehearse training steps on one of several devices.", kind=one_of(*PARALLEL)),
    Flag("--num_devices", "Number of devices.", kind=INTEGER, metavar="N"),
    Flag("--device", "The devices: a name of the table in docs/rehearse.md.", default="h100", metavar="NAME"),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate estimate-memory`."""
    add_options(parser, OPTIONS)
    add_options(parser.add_argument_group("training"), TRAINING_OPTIONS)


def estimate_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate estimate-memory`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    return command_parser(subparsers, "estimate-memory", HELP, add_arguments, estimate_command)


def estimate_command(args: Namespace) -> list[list[Any]]:
    """Print the memory that a model needs.

    Args:
        args: The parsed arguments of `estimate_command_parser`.

    Returns:
        One row for each dtype, as printed.

    Raises:
        ValueError: The model cannot be found or built, or an option of the training is not valid.
    """
    # programs for accelerate 1.15 do not set the newer options
    args = Namespace(**vars(estimate_command_parser().parse_args([args.model_name])) | vars(args))
    report = make_report(args)
    if args.json:
        print(report.as_json())
    else:
        print(report.as_text())
    return report.format_table()


def run(args: Namespace) -> int:
    """Run `accelerate estimate-memory`."""
    estimate_command(args)
    return 0


def gather_data(args: Namespace) -> list[list[Any]]:
    """Estimate without printing.

    Args:
        args: With `model_name`, `library_name`, `dtypes` and `trust_remote_code`.

    Returns:
        For each dtype its name, bytes of the largest layer and of the model, and the result of
        `estimate_training_usage`.

    Raises:
        ValueError: The model cannot be found or built.
    """
    _, rows = _sizes(find_source(args), args)
    return [[row.dtype, row.largest_layer, row.total, row.training] for row in rows]


def make_report(args: Namespace) -> Report:
    """Make the estimate for a command line, without printing it."""
    _check(args)
    from accel_cli.estimate.report import Report

    source = find_source(args)
    size, rows = _sizes(source, args)
    states, step = _train(source, args) if args.training else (None, None)
    rehearsal = rehearse_training(source.library, args) if args.parallel else None
    return Report(args, source.library, size, rows, states, step, rehearsal)


def _check(args: Namespace) -> None:
    for name in ("batch_size", "sequence_length", "num_devices"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}.")
    if args.num_devices is not None and args.parallel is None:
        raise UsageError(f"--num_devices {args.num_devices} needs --parallel. Choose from {', '.join(PARALLEL)}.")
    if args.parallel is not None and args.num_devices is None:
        raise UsageError(f"--parallel {args.parallel} needs --num_devices, the number of ranks.")
    if not args.parallel and "device" in getattr(args, "nondefault", set()):
        raise UsageError(f"--device {args.device} needs --parallel and --num_devices.")
    if not (args.training or args.parallel):
        for name in ("batch_size", "sequence_length", "mixed_precision", "gradient_checkpointing", "optimizer"):
            if name in getattr(args, "nondefault", set()):
                raise UsageError(f"--{name} only affects a training step. Add --training or --parallel.")


def find_source(args: Namespace) -> ModelSource:
    """Find the model of a command line.

    Raises:
        UsageError: There is no such model, or what else the command line says does not fit it.
    """
    from accel_cli.estimate.own_class import find_class, is_class_name
    from accel_cli.estimate.source import find_model

    arguments = getattr(args, "arguments", None)
    with without_traceback():
        if is_class_name(args.model_name):
            return find_class(args.model_name, arguments)
        if arguments is not None:
            raise UsageError(
                f"--arguments are those of a class, such as file.py:Class, and {args.model_name!r} names none."
            )
        return find_model(args.model_name, args.library_name)


def _sizes(source: ModelSource, args: Namespace) -> tuple[ModelSize, list[FormatRow]]:
    from accel_cli.estimate.sizes import format_rows, measure_folder, measure_model

    if source.library is None and source.folder is not None:
        size = measure_folder(source.folder)
    else:
        from accel_cli.estimate.building import build_on_meta

        size = measure_model(_built(lambda: build_on_meta(source, args.trust_remote_code)))
    return size, format_rows(size, list(args.dtypes))


def _train(source: ModelSource, args: Namespace) -> tuple[ModelStates, TrainingStep | None]:
    from accel_cli.estimate.batches import BATCHES, BatchSize
    from accel_cli.estimate.building import build
    from accel_cli.estimate.training import StepSettings, measure_fake

    settings = StepSettings(args.optimizer, args.mixed_precision, args.gradient_checkpointing)
    batch = BatchSize(args.batch_size, args.sequence_length)
    make_batch = BATCHES.get(source.library or "")
    return measure_fake(
        lambda: _built(lambda: build(source, args.trust_remote_code)),
        (lambda model: make_batch(model, batch)) if make_batch else None,
        settings,
    )


def _built(build: Callable[[], Any]) -> Any:
    """Build a model without log messages, and convert errors to one line."""
    import logging

    from accel_state.errors import MissingLibraryError

    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return build()
    except MissingLibraryError as error:
        raise UsageError(str(error)) from error
    except UsageError:
        raise
    except Exception as error:  # any error of a library about the configuration
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"The model cannot be built ({type(error).__name__}: {reason}). Check its config.json."
        ) from error
    finally:
        logger.setLevel(before)
