"""`fastaccum train`: a byte-level transformer on text, from files to a run folder."""

import inspect
import math
import platform
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from fastaccum import optimizers, progress, run_folder, text
from fastaccum.cli import BadArgument, device_names
from fastaccum.head_loss import LinearCrossEntropy
from fastaccum.interrupt import Interrupt
from fastaccum.trainer import Trainer
from fastaccum.transformer import PRESETS, gpt

ROWS = 100  # of metrics.csv, about
EVALUATIONS = 10
HELD_OUT_WINDOWS = 512  # 64 KiB at 128 a window: a standard error of about 0.02 bits per byte
SAMPLE_BYTES = 400
BYTES = 256


def train(options):
    """Trains as the parsed `options` of `fastaccum train` say, and returns the exit code.

    Raises:
        BadArgument: before anything is trained or written.
    """
    keras.utils.set_random_seed(options.seed)
    try:
        run = Run(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise BadArgument(str(error)) from error
    run.announce()
    try:
        folder = run_folder.RunFolder(run.path)
        folder.write_config(run.config)
    except OSError as error:
        raise BadArgument(f"--out: {error}") from error
    try:
        with Interrupt() as interrupt:
            recorder = Recorder(run, folder, interrupt)
            recorder.fit()
            finish(run, folder, recorder, sample=not interrupt.requested)
    except tf.errors.ResourceExhaustedError:
        print(
            f"out of memory at --batch-size {options.batch_size}: "
            "a smaller one with a larger --accum computes the same updates in less",
            file=sys.stderr,
        )
        return 1
    return 130 if interrupt.requested else 0


class Run:
    """All that a run needs, made from the options and checked: text, model, trainer, where to write."""

    def __init__(self, options):
        self.options = options
        if options.preset not in PRESETS:
            raise ValueError(f"--preset {options.preset!r} is unknown: choose {', '.join(PRESETS)}")
        self.path = run_folder.unused_path(default_path(options))
        if options.out is not None:
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
        options = {name: value for name, value in vars(self.options).items() if name not in {"run", "parser", "out"}}
        return {
            **options,
            "precision": self.precision,
            "device": self.device,
            **self.sizes,
            "parameters": self.model.count_params(),
            "train_bytes": len(self.text.train),
            "held_out_bytes": len(self.text.held_out),
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
        self.steps = self.skipped = 0
        self.held_out = math.nan
        self.started = self.shown = self.row_started = time.monotonic()
        self.steps_at_row = 0
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
            )

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 1:
            # Until here it compiled, which says nothing of its speed.
            float(logs["loss"])
            self.row_started, self.steps_at_row = time.monotonic(), 1
        if self.interrupt.requested or self.steps == self.total:
            self.model.stop_training = True
        # A look at the logs waits for the step, so it must be rare.
        if time.monotonic() - self.shown > 0.25:
            self._show(logs)

    def on_epoch_end(self, epoch, logs=None):
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
        if last or (epoch + 1) % math.ceil(rows / EVALUATIONS) == 0:
            self.held_out = row["held_out_bits_per_byte"] = self._evaluate()
            status = self._status(bits, row["loss_scale"], self.skipped)
            self.progress.note(
                f"step {self.steps:,}/{self.total:,}  held out {self.held_out:.3f} bits per byte  {status}"
            )
        self.folder.add_row(row)
        self.row_started, self.steps_at_row = time.monotonic(), self.steps

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
