"""Runs of `fastaccum train`, from options or from a run's folder, and that folder."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras

from fastaccum import checks
from fastaccum.adapters.head import LinearCrossEntropy
from fastaccum.app import text
from fastaccum.app.options import CONFIG_FILE, MOST, MOST_STEPS, BadArgument, list_devices
from fastaccum.basics.warnings import one_line
from fastaccum.checkpoint import store
from fastaccum.families import adapt_optimizer
from fastaccum.memory import device
from fastaccum.trainer import Trainer
from fastaccum.transformer import PRESETS, gpt

HELD_OUT_WINDOWS = 512  # 64 KiB at 128 a window: a standard error of about 0.02 bits per byte
BYTES = 256
CHECKPOINTS = "checkpoints"
ROWS = 100  # of metrics.csv, about
EVALUATIONS = 10
# What `--resume` takes from config.json.
OPTIONS = (
    "steps",
    "batch_size",
    "accum",
    "precision",
    "preset",
    "optimizer",
    "lr",
    "seed",
    "checkpoint_every",
)
EXTENDED = "extended_to_steps"  # in config.json, of a run that `--resume RUN --steps N` made longer
LOWEST_RATE = 0.02  # where the learning rate's schedule ends, as a part of the highest rate


class Done(NamedTuple):
    """The rows of metrics.csv that are complete, and the train steps that they sum up."""

    rows: int
    steps: int


NOTHING_DONE = Done(rows=0, steps=0)


class Run:
    """The text, model and trainer of a run, made from the options.

    Checkpoints carry its `identity`.

    Args:
        options: the options that the run began with. Its schedule of the learning rate is that of
            `options.steps`.
        steps: train steps in all, of a run that was extended; by default `options.steps`.
        done: what a run that is resumed has behind it.
    """

    def __init__(
        self, options: argparse.Namespace, steps: int | None = None, done: Done = NOTHING_DONE
    ):
        self.options = options
        self.steps: int = options.steps if steps is None else steps
        keras.utils.set_random_seed(options.seed)
        optimizer_name = options.optimizer.lower().replace(":", "-")
        self.name = f"{options.preset}-{optimizer_name}-seed{options.seed}"
        kind, device_name = list_devices()[0]
        if options.precision == "auto":
            options.precision = _choose_precision(kind, options.float8)
        if options.float8 and options.precision == "float32":
            raise ValueError(
                "--float8 is for a model in half precision, not --precision float32: pass "
                "--precision mixed_bfloat16"
            )
        self.steps_per_row = math.ceil(options.steps / ROWS)
        # The last row before an extension may be shorter than the others, so those to come are
        # counted from there.
        self.rows = done.rows + math.ceil((self.steps - done.steps) / self.steps_per_row)
        self.evaluated_rows = {
            *range(0, self.rows, math.ceil(self.rows / EVALUATIONS)),
            self.rows,
        } - {0}
        self.context: int = PRESETS[options.preset]["context"]
        if 8 * options.batch_size * options.accum * self.context > device.available("CPU:0").free:
            raise MemoryError  # for a step's ids and labels alone
        self.text = text.read_text(options.paths)
        # What to train on, in micro-batches, and (x, y) to evaluate with.
        self.windows: Any
        self.held_out: tuple[Any, Any]
        if options.pack:
            self.windows, self.held_out = self._pack()
        else:
            windows = MOST_STEPS * MOST  # more than any run takes
            self.windows = text.RandomWindows(
                self.text.train, self.context, options.batch_size, windows, options.seed
            )
            self.held_out = text.spread_windows(self.text.held_out, self.context, HELD_OUT_WINDOWS)
        self.model = gpt(BYTES, preset=options.preset, dtype=options.precision)
        optimizer = make_optimizer(options.optimizer, make_schedule(options.lr, options.steps))
        self.trainer = Trainer(
            self.model,
            optimizer,
            LinearCrossEntropy(),
            gradient_accumulation_steps=options.accum,
            clip_norm=1.0,
            float8=options.float8,
            optimizer_state_dtype=options.optimizer_state_dtype,
        )
        self.identity = {name: getattr(options, name) for name in OPTIONS}
        self.identity["text_sha256"] = self.text.sha256
        if options.float8:
            self.identity["float8"] = True
        if options.optimizer_state_dtype != "float32":
            self.identity["optimizer_state_dtype"] = options.optimizer_state_dtype
        if options.pack:
            self.identity["pack"] = True
            self.identity["files_sha256"] = self.text.sha256_of_files
        # Absolute: the run may be resumed from another working directory.
        self.config = {
            **self.identity,
            "paths": [str(Path(path).resolve()) for path in options.paths],
        }
        if self.steps > options.steps:
            self.config[EXTENDED] = self.steps
        described = f"{kind} {device_name}, {options.precision}"
        if options.float8:
            described += " with float8"
        if options.optimizer_state_dtype != "float32":
            described += f", {options.optimizer_state_dtype} slots"
        self._say(described)

    def _pack(self) -> tuple[Any, tuple[Any, Any]]:
        """Returns packed rows of the text, to train on and to evaluate with."""
        options = self.options
        rows = text.packed_rows(
            self.text.train, self.text.train_lengths, self.context, options.seed
        )
        x_and_y = text.packed_rows_held_out(
            self.text.held_out, self.text.held_out_lengths, self.context, HELD_OUT_WINDOWS
        )
        return rows.batch(options.batch_size, drop_remainder=True), x_and_y

    def _say(self, device_line: str) -> None:
        """Prints what is trained, on what and how."""
        options = self.options
        source = ", ".join(options.paths) or "Python's standard library"
        trained_bytes = len(self.text.train)
        held_out_bytes = len(self.text.held_out)
        rows = options.batch_size * options.accum
        say("device", device_line)
        say("text", f"{source}: {trained_bytes:,} bytes to train on, {held_out_bytes:,} held out")
        say("model", f"{options.preset}: {self.model.count_params():,} parameters")
        say(
            "batch",
            f"micro-batch {options.batch_size} x accumulation {options.accum} = global batch "
            f"{rows:,} {'packed rows' if options.pack else 'windows'} of {self.context:,} bytes",
        )
        say(
            "training",
            f"{self.steps:,} steps of {options.optimizer}, learning rate up to {options.lr:g}",
        )
        if self.steps > options.steps:
            lowest = LOWEST_RATE * options.lr
            say(
                "",
                f"which falls to {lowest:g} over the first {options.steps:,} steps, and then stays "
                "there",
            )


def resume(options: argparse.Namespace) -> Run:
    """Makes the `Run` that continues in the folder `options.resume`, to `--steps` if it is named.

    Raises:
        ValueError: raised if the run cannot continue as it began.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in OPTIONS}
    kept = {"--out", "--pack", "--float8", "--optimizer-state-dtype", *flags.values()} - {"--steps"}
    extra = sorted(kept & options.named_options)
    if options.paths:
        extra.append("FILE or FOLDER")
    if extra:
        raise ValueError(
            f"--resume {options.resume}: a run keeps its options, all but --steps; leave out "
            f"{', '.join(extra)}"
        )
    new_steps = options.steps if "--steps" in options.named_options else None
    file = Path(options.resume, CONFIG_FILE)
    try:
        config = json.loads(file.read_bytes())
        # Through the parser again: it knows what each may be.
        arguments = [f"{flag}={config[name]}" for name, flag in flags.items()]
        parsed = options.parser.parse_args([*arguments, "--", *map(str, config["paths"])], options)
        parsed.pack = bool(config.get("pack"))
        parsed.float8 = bool(config.get("float8"))
        parsed.optimizer_state_dtype = config.get("optimizer_state_dtype", "float32")
        began_with = str(config["text_sha256"])
        steps = _steps_of(config)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, BadArgument) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{str(file)!r} is not what this version writes for a run: {reason}"
        ) from error
    if new_steps is not None:
        if new_steps < steps:
            raise ValueError(
                f"--steps {new_steps}: the run in {options.resume} has {steps} steps: leave "
                "--steps out, or give more"
            )
        steps = new_steps
    run = Run(parsed, steps, _done_in(Path(options.resume, CHECKPOINTS)))
    if run.text.sha256 != began_with:
        raise ValueError(
            f"--resume {options.resume}: the text has changed since the run began: its "
            f"text_sha256 was {began_with:.12}, is {run.text.sha256:.12}; put it back, or begin "
            "a new run"
        )
    return run


def _steps_of(config: Mapping[str, Any]) -> int:
    """Returns the steps of a run in all, as its config.json has them.

    Raises ValueError if no run has so many.
    """
    steps = config.get(EXTENDED, config["steps"])
    if type(steps) is not int or not config["steps"] <= steps <= MOST_STEPS:
        raise ValueError(
            f"{EXTENDED}={steps!r} must be a whole number from {config['steps']} to {MOST_STEPS}"
        )
    return steps


def _done_in(checkpoints: Path) -> Done:
    """Reads off the last checkpoint what `fit` will continue from."""
    with warnings.catch_warnings():
        # of checkpoints that are passed over: `fit` warns again
        warnings.simplefilter("ignore", RuntimeWarning)
        checkpoint = store.latest(checkpoints)
    if checkpoint is None:
        return NOTHING_DONE
    progress = checkpoint.manifest["progress"]
    return Done(rows=progress["epoch"], steps=progress["step"] - progress["step_in_epoch"])


def begin(out: str | None, default: str, config: dict[str, object]) -> Path:
    """Makes the folder of a new run, with config.json.

    The folder is `out`, or the first of default, default-2, ... that is not there. Raises OSError
    or ValueError if `out` has files in it, or a run cannot be in it.
    """
    path = Path(default if out is None else out)
    with checks.naming(f"no run can be in {os.path.abspath(path)!r}"):
        store.absolute(path)
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True, exist_ok=out is not None)
            break
        except FileExistsError:
            if out is not None or not os.path.lexists(path):
                raise  # of a file, or of a folder above it
            path = Path(f"{default}-{number}")
    if os.listdir(path):
        raise FileExistsError(
            f"{str(path)!r} has files in it, which are not overwritten: name a new folder"
        )
    # of two runs that begin at once, one has it
    with open(path / CONFIG_FILE, "x", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    store.flush(path / CONFIG_FILE)
    return path


def record_extension(run: Run, folder: Path) -> None:
    """Writes into config.json to how many steps a run was extended."""
    if EXTENDED in run.config:
        with replacing(folder / CONFIG_FILE) as file:
            file.write_text(json.dumps(run.config, indent=2), encoding="utf-8")


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path to write to; after the block, what is there atomically replaces `file`.

    An OSError names `file`.
    """
    partial = file.with_name(f".partial-{file.name}")
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed
        yield partial
        store.flush(partial)
        os.replace(partial, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error


def _choose_precision(device: str, float8: bool) -> str:
    """Returns the policy of `--precision auto` on a "GPU" or a "CPU"."""
    if float8:
        return "mixed_bfloat16"
    return "mixed_float16" if device == "GPU" else "float32"


def make_schedule(highest: float, steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Makes a schedule that rises from 0 to `highest`, then falls along a cosine to a 50th of it.

    It rises for a twentieth of the steps. After all steps the rate stays where it is.
    """
    warmup = max(1, steps // 20)
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - warmup), alpha=LOWEST_RATE, warmup_target=highest, warmup_steps=warmup
    )


def make_optimizer(
    name: str, rate: keras.optimizers.schedules.LearningRateSchedule
) -> keras.optimizers.Optimizer:
    """Makes an optimizer with this rate: Keras's of this name, or tensorflow-addons's `tfa:NAME`.

    The case of the name does not matter.
    """
    prefix, _, addon = name.partition(":")
    if prefix.lower() == "tfa" and addon:
        from fastaccum import addons

        classes = {}
        for key, value in vars(addons.optimizers).items():
            if inspect.isclass(value):
                classes[key.lower()] = value
        if addon.lower() not in classes:
            raise ValueError(f"--optimizer {name!r} is unknown: tensorflow-addons has no {addon}")
        kind = classes[addon.lower()]
    else:
        kind = type(adapt_optimizer(name).optimizer)
    # The decoupled weight decay that tensorflow-addons's AdamW and SGDW ask for is that of Keras's
    # AdamW.
    values = {"learning_rate": rate, "weight_decay": 0.004}
    arguments = {}
    for parameter in inspect.signature(kind).parameters.values():
        is_required = parameter.default is parameter.empty
        if parameter.name == "learning_rate" or (is_required and parameter.name in values):
            arguments[parameter.name] = values[parameter.name]
    try:
        return kind(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--optimizer {name!r} cannot be made from a learning rate alone: {error}"
        ) from error


def say(topic: str, message: str) -> None:
    """Prints a line with its topic in a column of its own."""
    print(f"{topic:10}{one_line(message)}", flush=True)
