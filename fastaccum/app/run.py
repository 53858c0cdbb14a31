"""`fastaccum train`: a byte-level transformer on text, from files to a run folder, and on from there."""

import hashlib
import inspect
import json
import math
import platform
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters import optimizers
from fastaccum.adapters.head import LinearCrossEntropy
from fastaccum.app import progress, run_folder, text
from fastaccum.checkpoint import store as checkpoint
from fastaccum.checkpoint.signals import Interrupt, Preempted, Preemption
from fastaccum.cli import BadArgument, device_names
from fastaccum.step.nonfinite import NonFiniteError
from fastaccum.trainer import Trainer
from fastaccum.transformer import PRESETS, gpt

ROWS = 100  # of metrics.csv, about
EVALUATIONS = 10
HELD_OUT_WINDOWS = 512  # 64 KiB at 128 a window: a standard error of about 0.02 bits per byte
SAMPLE_BYTES = 400
BYTES = 256
# What `--resume` takes from config.json, and what must be then as it was.
OPTIONS = ("steps", "batch_size", "accum", "precision", "preset", "optimizer", "lr", "seed", "checkpoint_every")
SAME = ("text_sha256", "parameters", "options_sha256")


def train(options):
    """Trains as the parsed `options` of `fastaccum train` say, and returns the exit code.

    Raises:
        BadArgument: before anything is trained or written.
    """
    try:
        run = Run(options) if options.resume is None else resumed(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise BadArgument(str(error)) from error
    run.announce()
    try:
        folder = run_folder.RunFolder(run.path, run.rows)
        if run.rows is None:
            folder.write_config(run.config)
    except OSError as error:
        raise BadArgument(f"--out: {error}") from error
    try:
        with Interrupt() as interrupt:
            recorder = Recorder(run, folder, interrupt)
            try:
                recorder.fit()
                if recorder.steps_at_row is None:
                    recorder.was_complete()
            except Preempted as preempted:
                say("to go on", f"fastaccum train --resume {folder.path}")
                if not interrupt.requested:
                    return preempted.code
                if recorder.steps != recorder.steps_at_row:
                    recorder.end_row()
            finish(run, folder, recorder, sample=not interrupt.requested)
    except checkpoint.IncompatibleCheckpointError as error:
        raise BadArgument(f"--resume {run.path}: {error}") from error
    except (NonFiniteError, checkpoint.CheckpointWriteError) as error:
        print(f"{error}\nto go on: fastaccum train --resume {folder.path}", file=sys.stderr)
        return 1
    except tf.errors.ResourceExhaustedError:
        print(
            f"out of memory at --batch-size {options.batch_size}: "
            "a smaller one with a larger --accum computes the same updates in less",
            file=sys.stderr,
        )
        return 1
    return 130 if interrupt.requested else 0


def resumed(options):
    """The `Run` that goes on in the folder `options.resume`.

    Raises:
        ValueError: other options beside it, a folder that is no run's, or a text that has changed since.
    """
    given = [name for name, value in vars(options).items() if value != options.parser.get_default(name)]
    if extra := sorted({*given} - {"resume", "paths"}) + ["FILE or FOLDER"] * bool(options.paths):
        raise ValueError(f"--resume {options.resume}: the run has its options; leave out {', '.join(extra)}")
    path = run_folder.Path(options.resume)
    config = run_folder.read_config(path)
    if missing := sorted({*OPTIONS, "paths", *SAME} - config.keys()):
        raise ValueError(f"{str(path / 'config.json')!r} lacks {', '.join(missing)}: no run that can go on")
    # Through the parser again: it knows what each may be.
    arguments = [f"--{name.replace('_', '-')}={config[name]}" for name in OPTIONS]
    paths = config["paths"]
    if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
        raise ValueError(f"{str(path / 'config.json')!r}: paths={paths!r} is no list of names")
    options = options.parser.parse_args([*arguments, "--", *paths], options)
    run = Run(options, path, run_folder.read_rows(path))
    now = run.config
    if config["options_sha256"] != now["options_sha256"]:
        raise ValueError(f"{str(path / 'config.json')!r} was edited: its options are not those that the run began with")
    if changed := [f"{name} was {config[name]!r}, is {now[name]!r}" for name in SAME if config[name] != now[name]]:
        raise ValueError(f"--resume {path}: the run cannot go on as it began: {'; '.join(changed)}")
    found = checkpoint.latest(path / run_folder.CHECKPOINTS)
    say("resuming", f"{path}: " + (f"{found.step:,} steps are done" if found else "no checkpoint, so from the start"))
    for name in ("device", "versions"):
        if config.get(name) != now[name]:
            say("note", f"{name} was {config.get(name)}, is {now[name]}: results will differ by rounding")
    return run


class Run:
    """All that a run needs, made from the options and checked: text, model, trainer, where to write.

    Args:
        options: the parsed options of `fastaccum train`.
        path: the run's folder, and
        rows: what its metrics.csv holds so far, for a run that goes on.
    """

    def __init__(self, options, path=None, rows=None):
        self.options, self.rows = options, rows
        keras.utils.set_random_seed(options.seed)
        if options.preset not in PRESETS:
            raise ValueError(f"--preset {options.preset!r} is unknown: choose {', '.join(PRESETS)}")
        self.path = path or run_folder.unused_path(default_path(options))
        if path is None and options.out is not None:
            self.path = run_folder.Path(options.out)
            run_folder.refuse_used(self.path)
        self.device = " ".join(device_names()[0])
        self.precision = options.precision
        if self.precision == "auto":
            self.precision = "mixed_float16" if device_names()[0][0] == "GPU" else "float32"
        self.context = PRESETS[options.preset]["context"]
        self.text = text.read_text(options.paths)
        self.windows = text.RandomWindows(
            self.text.train, self.context, options.batch_size, options.steps * options.accum, options.seed
        )
        self.held_out = text.spread_windows(self.text.held_out, self.context, HELD_OUT_WINDOWS)
        optimizer = make_optimizer(options.optimizer, learning_rate(options.lr, options.steps))
        self.model = gpt(BYTES, preset=options.preset, dtype=self.precision)
        self.trainer = Trainer(
            self.model,
            optimizer,
            LinearCrossEntropy(),
            gradient_accumulation_steps=options.accum,
            clip_norm=1.0,
        )

    @property
    def sizes(self):
        """What the preset says about the model, but for the vocabulary, which is that of bytes."""
        return {**PRESETS[self.options.preset], "vocabulary_size": BYTES}

    @property
    def tokens_per_step(self):
        return self.options.batch_size * self.options.accum * self.context

    @property
    def config(self):
        """What config.json holds."""
        options = {**{name: getattr(self.options, name) for name in OPTIONS}, "precision": self.precision}
        return {
            **options,
            "options_sha256": hashlib.sha256(json.dumps(options).encode()).hexdigest(),
            # From wherever the run goes on.
            "paths": [str(run_folder.Path(path).resolve()) for path in self.options.paths],
            "device": self.device,
            **self.sizes,
            "parameters": self.model.count_params(),
            "train_bytes": len(self.text.train),
            "held_out_bytes": len(self.text.held_out),
            "text_sha256": hashlib.sha256(self.text.train.tobytes() + self.text.held_out.tobytes()).hexdigest(),
            "versions": {
                "python": platform.python_version(),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        }

    def announce(self):
        """Prints what the run will do."""
        options = self.options
        skipped = f"; {self.text.skipped} that are not text left out" if self.text.skipped else ""
        source = ", ".join(options.paths) or "Python's standard library"
        say("device", self.device)
        say("precision", self.precision)
        say("text", f"{source}: {self.text.files:,} file{'s' * (self.text.files != 1)}{skipped}")
        say("", f"{len(self.text.train):,} bytes to train on, {len(self.text.held_out):,} held out")
        shape = ", ".join(name if value is True else f"{name} {value:,}" for name, value in self.sizes.items())
        say("model", f"{options.preset}: {self.model.count_params():,} parameters ({shape})")
        windows = options.batch_size * options.accum
        say(
            "batch",
            f"micro-batch {options.batch_size} x accumulation {options.accum} = global batch {windows:,} "
            f"windows of {self.context:,} bytes, {self.tokens_per_step:,} tokens",
        )
        say("training", f"{options.steps:,} steps of {options.optimizer}, learning rate up to {options.lr:g}")
        stack = np.zeros((options.accum, options.batch_size, self.context), np.int32)
        memory = self.trainer.memory_analysis((stack, stack))
        say(
            "memory",
            f"{memory.temp_bytes / 2**20:,.1f} MiB temporary and {memory.argument_bytes / 2**20:,.1f} MiB of "
            "weights, optimizer state and data, as XLA states it",
        )


class Recorder(keras.callbacks.Callback):
    """Fits, and on the way shows progress, evaluates, writes metrics.csv, and stops when asked to.

    An epoch of `fit` is here the stretch of steps that one row of metrics.csv sums up.
    """

    def __init__(self, run, folder, interrupt):
        super().__init__()
        self.run, self.folder, self.interrupt = run, folder, interrupt
        self.total = run.options.steps
        self.steps_per_row = math.ceil(self.total / ROWS)
        # A run that goes on where it had ended has nothing to train, and reports what it reached.
        last = folder.rows[-1] if folder.rows else {}
        self.steps, self.skipped = last.get("step", 0), last.get("skipped_steps", 0)
        self.held_out = last.get("held_out_bits_per_byte", math.nan)
        self.shown = self.row_started = time.monotonic()
        self.started = self.shown - last.get("seconds", 0)
        self.steps_at_row = self.steps_before = None
        self.rate = math.nan

    def fit(self):
        with progress.for_stream(self.total) as self.progress:
            self.run.trainer.fit(
                self.run.windows,
                epochs=math.ceil(self.total / self.steps_per_row),
                steps_per_epoch=self.steps_per_row,
                shuffle=False,
                callbacks=[self],
                verbose=0,
                checkpoint_dir=self.folder.checkpoints,
                checkpoint_every=self.run.options.checkpoint_every,
            )

    def get_state(self):
        """Nothing for the checkpoint: what a run that goes on needs to know is in metrics.csv."""
        return {}

    def set_state(self, state):
        """Nothing to take up."""

    def on_epoch_begin(self, epoch, logs=None):
        self.steps_before = epoch * self.steps_per_row
        if self.run.rows is not None and self.steps_at_row is None:
            # Without what was written after the checkpoint from which the run goes on, if only in part.
            self.folder.keep_rows(self.steps_before)
            self.skipped = self.folder.rows[-1]["skipped_steps"] if self.folder.rows else 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps = self.steps_before + batch + 1
        if self.steps_at_row is None:
            # Until here it compiled, which says nothing of its speed.
            float(logs["loss"])
            self.row_started, self.steps_at_row = time.monotonic(), self.steps
        if self.steps == self.total:
            self.model.stop_training = True
        elif self.interrupt.requested:
            Preemption.entered.requested = True
        self.logs = logs
        # A look at the logs waits for the step, so it must be rare.
        if time.monotonic() - self.shown > 0.25:
            self._show(logs)

    def on_epoch_end(self, epoch, logs=None):
        self.logs = logs
        self.end_row()

    def end_row(self):
        """Writes a row of metrics.csv for the steps since the last one."""
        logs = self.logs
        bits = float(logs["loss"]) / math.log(2)
        now = time.monotonic()
        if self.steps > self.steps_at_row:
            self.rate = (self.steps - self.steps_at_row) * self.run.tokens_per_step / (now - self.row_started)
        self.skipped += int(logs["skipped_steps"])
        row = {
            "step": self.steps,
            "seconds": round(now - self.started, 2),
            "bits_per_byte": bits,
            "loss_scale": float(logs["loss_scale"]),
            "grad_norm": float(logs["grad_norm"]),
            "skipped_steps": self.skipped,
        }
        if math.isfinite(self.rate):
            row["tokens_per_second"] = round(self.rate)
        rows = math.ceil(self.total / self.steps_per_row)
        last = self.steps == self.total or self.interrupt.requested
        if last or self.steps // self.steps_per_row % math.ceil(rows / EVALUATIONS) == 0:
            self.held_out = row["held_out_bits_per_byte"] = self._evaluate()
            status = self._status(bits, row["loss_scale"], self.skipped)
            self.progress.note(
                f"step {self.steps:,}/{self.total:,}  held out {self.held_out:.3f} bits per byte  {status}"
            )
        self.folder.add_row(row)
        self.row_started, self.steps_at_row = time.monotonic(), self.steps

    def was_complete(self):
        """Where there was nothing left to train: what was reached, even if metrics.csv no longer says so."""
        self.steps = self.total
        if math.isnan(self.held_out):
            self.held_out = self._evaluate()

    def _evaluate(self):
        x, y = self.run.held_out
        logs = self.run.trainer.evaluate(x, y, batch_size=self.run.options.batch_size, return_dict=True, verbose=0)
        return float(logs["loss"]) / math.log(2)

    def _show(self, logs):
        bits, scale = float(logs["loss"]) / math.log(2), float(logs["loss_scale"])
        skipped = self.skipped + int(logs["skipped_steps"])
        self.progress.update(self.steps, self._status(bits, scale, skipped))
        self.shown = time.monotonic()

    def _status(self, bits, scale, skipped):
        rate = f"{self.rate:,.0f} tokens/s" if math.isfinite(self.rate) else "compiled"
        return f"loss {bits:.3f} bits  {rate}  loss scale {scale:g}  skipped {skipped}"


def finish(run, folder, recorder, sample):
    """Saves the model, draws the curve, says what came out, and prints a sample."""
    folder.save_model(run.model)
    drawn = folder.draw_curve()
    seconds = time.monotonic() - recorder.started
    say("held out", f"{recorder.held_out:.3f} bits per byte after {recorder.steps:,} steps, {seconds:.0f} s")
    if not math.isfinite(recorder.held_out):
        say("", f"the loss is not finite: a lower --lr than {run.options.lr:g} may help")
    curve = "curve.png, " if drawn else ""
    say("saved", f"{folder.path}: config.json, metrics.csv, {curve}model.keras")
    if not drawn:
        say("", "no curve.png, since matplotlib is not installed: pip install matplotlib")
    if sample and math.isfinite(recorder.held_out):
        prompt = bytes(run.text.held_out[: run.context // 2])
        drawn_bytes = text.generate(run.model, prompt, SAMPLE_BYTES, run.context, seed=run.options.seed)
        say("sample", f"continues the first {len(prompt)} bytes held out")
        print(text.printable(prompt) + "│" + text.printable(drawn_bytes))


def learning_rate(highest, steps):
    """A twentieth of the steps up from 0 to `highest`, then down along a cosine to a 50th of it."""
    warmup = max(1, steps // 20)
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - warmup), alpha=0.02, warmup_target=highest, warmup_steps=warmup
    )


def make_optimizer(name, rate):
    """The Keras optimizer called `name` in any case, or tensorflow-addons's for `tfa:NAME`, with that rate.

    Raises:
        ValueError: there is none of that name, or it needs more than a learning rate.
        ImportError: tensorflow-addons is not installed.

    >>> type(make_optimizer("lamb", 0.01)).__name__
    'Lamb'
    """
    prefix, _, addon = name.partition(":")
    if prefix.lower() == "tfa" and addon:
        from fastaccum import addons

        classes = {key.lower(): value for key, value in vars(addons.optimizers).items() if inspect.isclass(value)}
        if addon.lower() not in classes:
            raise ValueError(f"--optimizer {name!r} is unknown: tensorflow-addons has no {addon}")
        kind = classes[addon.lower()]
    else:
        kind = type(optimizers.get(name).optimizer)
    needed = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    # The decoupled weight decay that tensorflow-addons's AdamW and SGDW ask for is that of Keras's AdamW.
    defaults = {"learning_rate": rate, "weight_decay": 0.004}
    if missing := [parameter for parameter in needed if parameter not in defaults]:
        raise ValueError(f"--optimizer {name!r} needs {', '.join(missing)}, which a name cannot give: use Trainer")
    if "learning_rate" in inspect.signature(kind).parameters:
        needed.append("learning_rate")
    return kind(**{key: defaults[key] for key in needed})


def default_path(options):
    """runs/nano-adamw-seed0"""
    optimizer = options.optimizer.lower().replace(":", "-")
    return f"runs/{options.preset}-{optimizer}-seed{options.seed}"


def say(topic, message):
    print(f"{topic:10}{message}", flush=True)
