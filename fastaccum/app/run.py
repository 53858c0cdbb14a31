"""Makes a run of `fastaccum train` from its options, or from the folder in which it began."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import platform
import secrets
import shutil
import sys
import textwrap
import warnings
from pathlib import Path

import keras
import tensorflow as tf

from fastaccum import lines
from fastaccum.adapters import optimizers
from fastaccum.adapters.head import LinearCrossEntropy
from fastaccum.app import run_folder, text
from fastaccum.app.options import MOST, MOST_STEPS, STEPS, BadArgument, list_devices
from fastaccum.checkpoint import store
from fastaccum.memory import device
from fastaccum.step import compile_cache
from fastaccum.trainer import Trainer
from fastaccum.transformer import PRESETS, gpt

HELD_OUT_WINDOWS = 512  # 64 KiB at 128 a window: a standard error of about 0.02 bits per byte
BYTES = 256
ROWS = 100  # of metrics.csv, about
# What `--resume` takes from config.json, and what must not have changed.
OPTIONS = ("steps", "batch_size", "accum", "precision", "preset", "optimizer", "lr", "seed", "checkpoint_every")
CHANGED = ("steps", "options_sha256")  # where a run is extended
SAME = ("text_sha256", "parameters", "options_sha256")
MOST_FILES = 10_000  # that config.json lists


class Run:
    """The text, model and trainer of a run, made from the options.

    A resumed run has in `rows` the rows of metrics.csv so far. Checkpoints carry the run's `identity`.
    """

    def __init__(self, options: argparse.Namespace, rows: list[run_folder.Row] | None = None):
        self.options, self.rows = options, rows
        self.identity: str = getattr(options, "identity", None) or secrets.token_hex(8)
        options.steps = options.steps or STEPS
        self.steps_per_row = math.ceil(options.steps / ROWS)
        keras.utils.set_random_seed(options.seed)
        self.name = f"{options.preset}-{options.optimizer.lower().replace(':', '-')}-seed{options.seed}"
        self.device = " ".join(list_devices()[0])
        self.precision = resolve_precision(options.precision)
        self.sizes = {**PRESETS[options.preset], "vocabulary_size": BYTES}
        self.context: int = self.sizes["context"]
        self.tokens_per_step: int = options.batch_size * options.accum * self.context
        if 8 * self.tokens_per_step > device.available("CPU:0").free:
            raise MemoryError  # for a step's ids and labels alone
        self.text = text.read_text(options.paths)
        # More than any run takes: they stay the same where it is extended.
        self.windows = text.RandomWindows(
            self.text.train, self.context, options.batch_size, MOST_STEPS * MOST, options.seed
        )
        self.held_out = text.spread_windows(self.text.held_out, self.context, HELD_OUT_WINDOWS)
        if options.compile_cache and (cache := compile_cache.user_folder()) is not None:
            try:
                compile_cache.use(cache)
            except ValueError as error:
                say("note", str(error))
        optimizer = make_optimizer(options.optimizer, make_schedule(options.lr, options.steps))
        self.trainer = make_trainer(options.preset, self.precision, optimizer, options.accum)
        self.model = self.trainer.model

    @property
    def config(self) -> run_folder.Config:
        """The contents of config.json."""
        return self.config_of(self.options.steps)

    def config_of(self, steps: int) -> run_folder.Config:
        """Returns the contents of config.json for a run of so many steps."""
        options = {name: getattr(self.options, name) for name in OPTIONS}
        options |= {"precision": self.precision, "steps": steps}
        return {
            **options,
            "run": self.identity,
            "options_sha256": hashlib.sha256(json.dumps(options).encode()).hexdigest(),
            # Absolute: the run may be resumed from another working directory.
            "paths": [str(Path(path).resolve()) for path in self.options.paths],
            "device": self.device,
            **self.sizes,
            "parameters": self.model.count_params(),
            "train_bytes": len(self.text.train),
            "held_out_bytes": len(self.text.held_out),
            "text_sha256": self.text.sha256,
            "files": self.text.files if self.options.paths and len(self.text.files) <= MOST_FILES else {},
            "versions": {"python": platform.python_version(), "tensorflow": tf.__version__, "keras": keras.__version__},
        }

    def announce(self) -> None:
        """Prints what the run will do."""
        options = self.options
        skipped = f"; {self.text.skipped} that are not text left out" if self.text.skipped else ""
        source = ", ".join(options.paths) or "Python's standard library"
        if binary := self.text.binary:
            say("warning", f"{', '.join(binary)}: holds NUL bytes, so this may be no text; trained on as it is")
        say("device", self.device)
        say("precision", self.precision)
        say("text", f"{source}: {len(self.text.files):,} file{'s' * (len(self.text.files) != 1)}{skipped}")
        say("", f"{len(self.text.train):,} bytes to train on, {len(self.text.held_out):,} held out")
        shape = ", ".join(name if value is True else f"{name} {value:,}" for name, value in self.sizes.items())
        say("model", f"{options.preset}: {self.model.count_params():,} parameters ({shape})")
        batch = f"micro-batch {options.batch_size} x accumulation {options.accum} = global batch"
        windows = f"{options.batch_size * options.accum:,} windows of {self.context:,} bytes"
        say("batch", f"{batch} {windows}, {self.tokens_per_step:,} tokens")
        say("training", f"{options.steps:,} steps of {options.optimizer}, learning rate up to {options.lr:g}")


def require_resumable(options: argparse.Namespace) -> Path:
    """Returns the folder `options.resume`; raises ValueError if no run wrote it, or for options that cannot change."""
    kept = {"--out", *(f"--{name.replace('_', '-')}" for name in OPTIONS)} - {"--steps"}
    named = sorted(kept & {*options.given})
    if extra := named + ["FILE or FOLDER"] * bool(options.paths):
        raise ValueError(
            f"--resume {options.resume}: a run keeps the options that it began with, but for --steps; "
            f"leave out {', '.join(extra)}"
        )
    path = Path(options.resume)
    run_folder.require_own_files(path)
    run_folder.read_config(path)
    return path


def resume(options: argparse.Namespace) -> Run:
    """Makes the `Run` that continues in the folder `options.resume`, to `options.steps` if given.

    Raises:
        ValueError: raised if the run cannot continue as it began.
    """
    path, asked = Path(options.resume), options.steps
    file = repr(str(path / "config.json"))
    config = run_folder.read_config(path)
    if missing := sorted({*OPTIONS, "run", "paths", *SAME} - config.keys()):
        raise ValueError(
            f"{file} lacks {', '.join(missing)}: the run cannot be resumed. The file is of another version of "
            "fastaccum, or was edited"
        )
    # Through the parser again: it knows what each may be.
    arguments = [f"--{name.replace('_', '-')}={config[name]}" for name in OPTIONS]
    paths = config["paths"]
    if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
        raise ValueError(f"{file}: paths={paths!r} is not a list of names")
    try:
        parsed = options.parser.parse_args([*arguments, "--", *paths], options)
    except BadArgument as error:
        raise ValueError(f"{file}: {error}") from None
    steps = parsed.steps
    if asked and asked < steps:
        raise ValueError(f"--steps {asked}: the run in {path} is one of {steps}: leave --steps out, or give more")
    parsed.steps = asked or steps
    parsed.identity = config["run"]
    run = Run(parsed, run_folder.read_rows(path, steps))
    now = run.config_of(steps)
    if other := sorted(config.keys() ^ now.keys()):
        raise ValueError(f"{file} is of another version of fastaccum, which cannot continue it: {', '.join(other)}")
    if any(config[name] != now[name] for name in (*OPTIONS, "options_sha256")):
        raise ValueError(f"{file} was edited: its options are not those that the run began with")
    if changed := [f"{name} was {config[name]!r}, is {now[name]!r}" for name in SAME if config[name] != now[name]]:
        before, files = config["files"] if isinstance(config["files"], dict) else {}, now["files"]
        other = sorted(name for name in before.keys() | files.keys() if before.get(name) != files.get(name))
        states = ["is gone" if name not in files else "has changed" if name in before else "is new" for name in other]
        changed += [*map("{!r} {}".format, other[:5], states), *[f"and {len(other) - 5} more"] * (len(other) > 5)]
        raise ValueError(f"--resume {path}: the run cannot continue as it began: {'; '.join(changed)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which `fit` gives again
        found = store.latest(path / run_folder.CHECKPOINTS)
    state = found.manifest["callbacks"].get("Recorder", {}).get("state", {}) if found else {}
    if found and (state.get("run") != run.identity or not isinstance(state.get("rows"), list)):
        raise ValueError(f"{found.path} is another run's, or is of another version of fastaccum: move it elsewhere")
    for row, saved in zip(run.rows or (), state.get("rows", ()), strict=False):
        if str(sorted(row.items())) != saved:
            raise ValueError(f"{str(path / 'metrics.csv')!r}: this run wrote no row {row}: remove the file")
    say("resuming", f"{path}: " + (f"{found.step:,} steps are done" if found else "no checkpoint, so from the start"))
    if parsed.steps > steps:
        rate = "the learning rate now follows the schedule of the longer run"
        say("extending", f"from {steps:,} to {parsed.steps:,} steps; {rate}")
    for name in ("device", "versions"):
        if config.get(name) != now[name]:
            say("note", f"{name} was {config.get(name)}, is {now[name]}: results will differ by rounding")
    return run


def make_schedule(highest: float, steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Makes a schedule: a twentieth of the steps up from 0 to `highest`, then down along a cosine to a 50th of it."""
    warmup = max(1, steps // 20)
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - warmup), alpha=0.02, warmup_target=highest, warmup_steps=warmup
    )


def resolve_precision(name: str) -> str:
    """Returns the dtype policy of a precision; "auto" is mixed_float16 on a GPU and float32 on a CPU."""
    return name if name != "auto" else "mixed_float16" if list_devices()[0][0] == "GPU" else "float32"


def make_trainer(preset: str, precision: str, optimizer: keras.optimizers.Optimizer, accumulation: int = 1) -> Trainer:
    """Makes the Trainer of a new model of a preset, on bytes."""
    model = gpt(BYTES, preset=preset, dtype=precision)
    return Trainer(model, optimizer, LinearCrossEntropy(), gradient_accumulation_steps=accumulation, clip_norm=1.0)


def make_optimizer(name: str, rate: keras.optimizers.schedules.LearningRateSchedule) -> keras.optimizers.Optimizer:
    """Makes the Keras optimizer called `name` in any case, or tensorflow-addons's for `tfa:NAME`, with this rate."""
    prefix, _, addon = name.partition(":")
    if prefix.lower() == "tfa" and addon:
        from fastaccum import addons

        classes = {key.lower(): value for key, value in vars(addons.optimizers).items() if inspect.isclass(value)}
        if addon.lower() not in classes:
            raise ValueError(f"--optimizer {name!r} is unknown: tensorflow-addons has no {addon}")
        kind = classes[addon.lower()]
    else:
        kind = type(optimizers.get(name).optimizer)
    # The decoupled weight decay that tensorflow-addons's AdamW and SGDW ask for is that of Keras's AdamW.
    values = {"learning_rate": rate, "weight_decay": 0.004}
    parameters = inspect.signature(kind).parameters.values()
    taken = [p.name for p in parameters if p.name == "learning_rate" or p.default is p.empty]
    try:
        return kind(**{name: value for name, value in values.items() if name in taken})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"--optimizer {name!r} cannot be made from a learning rate alone: {error}") from error


def say(topic: str, message: str, *, wraps: bool = True) -> None:
    """Prints a line with its topic in a column of its own; on a terminal it is wrapped, unless it is to be copied."""
    line = f"{topic:10}{lines.one_line(message)}"
    if wraps and sys.stdout.isatty():
        columns = max(30, shutil.get_terminal_size().columns)
        line = textwrap.fill(line, columns, subsequent_indent=" " * 10, break_on_hyphens=False, break_long_words=False)
    print(line, flush=True)
