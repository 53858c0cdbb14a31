"""The options of the `fastaccum` command, and the devices; --help needs no TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

EPILOG = """\
exit codes: 0 done; 1 failed on its way; 2 bad arguments, nothing started; 130 ended by Ctrl-C;
143 ended by SIGTERM (preemption), after a checkpoint was saved.
The first Ctrl-C ends training after the current step and saves what was learned; a second aborts.
However a run ended, `fastaccum train --resume FOLDER` continues from its last checkpoint.
"""
TRAIN_ABOUT = """\
Trains a small language model (a transformer) on text, byte by byte. A part of the text is
held out, and the model is evaluated on it. Writes a run folder: config.json, metrics.csv,
curve.png, model.keras and checkpoints."""
# The most windows in a micro-batch, micro-batches in an update, and bytes to generate.
MOST = 10**6
MOST_STEPS = 10**9
PRESETS = ("nano", "micro", "124m", "350m", "1.3b")  # of `fastaccum.gpt`, by name
STATE_DTYPES = ("float32", "bfloat16", "int8")  # of `fastaccum.Trainer`
TEMPERATURE = 0.8  # of `fastaccum generate`
CONFIG_FILE = "config.json"  # a folder that holds one is a run's
MODEL_FILE = "model.keras"
# Names that other programs have for options of this one.
OTHER_NAMES = {
    "--model": "--preset",
    "--size": "--preset",
    "--epochs": "--steps",
    "--iterations": "--steps",
    "--learning-rate": "--lr",
    "--gradient-accumulation-steps": "--accum",
    "--accumulation-steps": "--accum",
    "--dtype": "--precision",
    "--fp8": "--float8",
    "--state-dtype": "--optimizer-state-dtype",
    "--output": "--out",
    "--text": "--prompt",
    "--max-new-tokens": "--length",
}

Number = TypeVar("Number", int, float)


class BadArgument(Exception):
    """An argument that cannot be used: one line with the program, the value and the remedy."""


class Parser(argparse.ArgumentParser):
    """A parser whose options cannot be abbreviated, and whose errors are one line."""

    def __init__(self, **settings: Any):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        # Without the usage: the one line that matters would be the last of many.
        raise BadArgument(f"{self.prog}: error: {message}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line.

    The result also has the `command`, the `parser` of this command, and `named_options`, the set of
    options that the command line names.

    Raises:
        BadArgument: raised for what is not an option, with the one that was probably meant; for
            what is not a value of an option; and for a run that is not there.
    """
    parser = make_parser()
    if not argv:
        parser.error(
            "name a COMMAND: train, generate, bench or devices; `fastaccum --help` says what "
            "each does"
        )
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        parsed.parser.error(
            f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, parsed.parser)}"
        )
    # Values do not show which options were named, since a named one may have its default value.
    # Arguments do, since options cannot be abbreviated.
    parsed.named_options = {argument.partition("=")[0] for argument in argv}
    # A missing file is reported here already: TensorFlow's import takes some seconds.
    if getattr(parsed, "resume", None) is not None:
        where = "name a folder that `fastaccum train` wrote, such as runs/nano-adamw-seed0"
        _require_file(
            parsed.parser, f"--resume {parsed.resume!r}", Path(parsed.resume, CONFIG_FILE), where
        )
    if parsed.command == "generate":
        if not parsed.prompt:
            parsed.parser.error(
                "--prompt '' is empty: give at least one character, or leave it out"
            )
        where = "`fastaccum train` saves it when training ends, in the run's folder"
        _require_file(parsed.parser, f"RUN {parsed.run!r}", Path(parsed.run, MODEL_FILE), where)
    return parsed


def _hint(unknown: Sequence[str], parser: Parser) -> str:
    """Says which option was probably meant."""
    names = {*re.findall(r"--[a-z][a-z-]*", parser.format_help())} - {"--help"}
    for argument in unknown:
        name = argument.partition("=")[0].lower().replace("_", "-")
        alike = difflib.get_close_matches(OTHER_NAMES.get(name, name), names, 1)
        if alike:
            return f": did you mean {alike[0]}?"
    return f"; `{parser.prog} --help` lists the options"


def _require_file(parser: Parser, argument: str, file: Path, where: str) -> None:
    if not file.is_file():
        parser.error(f"{argument}: {str(file)!r} is not there: {where}")


def make_parser() -> Parser:
    """Makes the parser of the command line, with a subparser for each command."""
    about = "Trains a small language model on text, with gradient accumulation in one XLA program."
    parser = Parser(prog="fastaccum", description=about, epilog=EPILOG)
    parser.add_argument(
        "--version", action="version", version=f"fastaccum {sys.modules['fastaccum'].__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands.add_parser)
    _add_generate(commands.add_parser)
    commands.add_parser(
        "bench", help="run the benchmarks and write them up (in a clone of the repository)"
    )
    devices = commands.add_parser("devices", help="list what TensorFlow can train on")
    devices.set_defaults(command="devices", parser=devices)
    return parser


def _add_train(add_parser: Callable[..., Parser]) -> None:
    about = TRAIN_ABOUT
    train = add_parser(
        "train", help="train a small language model on text", description=about, epilog=EPILOG
    )
    add = train.add_argument
    text_help = "the text; by default the source code of Python's standard library"
    add("paths", nargs="*", metavar="FILE or FOLDER", help=text_help)
    pack_help = (
        "train on whole files, several of them in one piece of text and none seeing another, "
        "instead of on pieces that begin anywhere"
    )
    add("--pack", action="store_true", help=pack_help)
    steps_help = "updates of the weights, in all (%(default)s)"
    add("--steps", type=_whole(1, MOST_STEPS), default=300, metavar="N", help=steps_help)
    size_help = "pieces of text that go through the model at once, a micro-batch (%(default)s)"
    add("--batch-size", type=_whole(1, MOST), default=8, metavar="N", help=size_help)
    accum_help = "micro-batches whose gradients are added up for one update (%(default)s)"
    add("--accum", type=_whole(1, MOST), default=4, metavar="N", help=accum_help)
    precisions = ["auto", "float32", "mixed_float16", "mixed_bfloat16", "bfloat16"]
    precision_help = (
        "auto (default): mixed_float16 on a GPU, float32 on a CPU; with bfloat16 weights are "
        "bfloat16, too"
    )
    add("--precision", choices=precisions, default="auto", help=precision_help)
    float8_help = (
        "multiply in float8 in training, with --precision mixed_float16 or mixed_bfloat16 (auto is "
        "then the latter): faster on GPUs from NVIDIA's Ada and Hopper on, slower elsewhere"
    )
    add("--float8", action="store_true", help=float8_help)
    state_help = (
        "what the optimizer's state is stored in: float32 (default), or bfloat16 or int8, which "
        "take a half or a quarter of its memory"
    )
    add("--optimizer-state-dtype", choices=STATE_DTYPES, default="float32", help=state_help)
    preset_help = f"model size: {', '.join(PRESETS)} (%(default)s)"
    add("--preset", choices=PRESETS, default="nano", metavar="NAME", help=preset_help)
    optimizer_help = (
        "a Keras optimizer (adamw, the default; lamb, lion, sgd, muon, ...), or one of "
        "tensorflow-addons as tfa:NAME (tfa:LAMB, tfa:NovoGrad, ...)"
    )
    add("--optimizer", default="adamw", metavar="NAME", help=optimizer_help)
    rate_help = (
        "highest learning rate: it rises to this first, then falls to a 50th along a cosine "
        "(%(default)s)"
    )
    # The range of float32's normal numbers.
    positive = _number(float, 2.0**-126, 2.0**127, "positive number, such as 0.004")
    add("--lr", type=positive, default=0.004, metavar="RATE", help=rate_help)
    seed_help = "random seed of weights and data (%(default)s)"
    add("--seed", type=_whole(0, 2**32 - 1), default=0, metavar="N", help=seed_help)
    out_help = (
        "folder to write the run to, new or empty (by default runs/PRESET-OPTIMIZER-seedN, a new "
        "one)"
    )
    add("--out", metavar="FOLDER", help=out_help)
    every_help = "updates from one checkpoint to the next (%(default)s)"
    add("--checkpoint-every", type=_whole(1, MOST_STEPS), default=50, metavar="N", help=every_help)
    resume_help = (
        "continue the run in FOLDER from its last checkpoint, with its options; with --steps N "
        "it is extended to N updates, at the learning rate with which the run's own steps end"
    )
    add("--resume", metavar="FOLDER", help=resume_help)
    cache_help = (
        "neither load nor keep compiled programs ($FASTACCUM_COMPILE_CACHE, or ~/.cache/fastaccum)"
    )
    add("--no-compile-cache", dest="compile_cache", action="store_false", help=cache_help)
    train.set_defaults(command="train", parser=train)


def _add_generate(add_parser: Callable[..., Parser]) -> None:
    about = (
        "Prints a text and how the model that `fastaccum train` saved in a run folder continues it."
    )
    generate = add_parser(
        "generate", help="continue a text with the model of a run", description=about
    )
    add = generate.add_argument
    add("run", metavar="RUN", help="a run folder, with the model.keras of a run that ended")
    add("--prompt", default="\n", metavar="TEXT", help="the text to continue (a line break)")
    add(
        "--length",
        type=_whole(1, MOST),
        default=400,
        metavar="N",
        help="bytes to generate (%(default)s)",
    )
    temperature_help = (
        "how freely to choose: 0 for always the likeliest byte, 1 for as likely as the model "
        "says (%(default)s)"
    )
    temperature = _number(float, 0.0, 1000.0, "number from 0 to 1000, such as 0.8")
    add("--temperature", type=temperature, default=TEMPERATURE, metavar="T", help=temperature_help)
    seed_help = "random seed of the choices (%(default)s)"
    add("--seed", type=_whole(0, 2**32 - 1), default=0, metavar="N", help=seed_help)
    generate.set_defaults(command="generate", parser=generate)


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    return _number(int, minimum, maximum, f"whole number from {minimum} to {maximum}")


def _number(
    kind: Callable[[str], Number], least: Number, most: Number, what: str
) -> Callable[[str], Number]:
    def parse(value: str) -> Number:
        with contextlib.suppress(ValueError):
            number = kind(value)
            if least <= number <= most:
                return number
        raise argparse.ArgumentTypeError(f"{value!r} must be a {what}")

    return parse


def list_devices() -> list[tuple[str, str]]:
    """Lists `(kind, name)` of each device, GPUs first, such as `("CPU", "2 cores")`."""
    import tensorflow as tf

    devices = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        devices.append(("GPU", details.get("device_name", "unnamed")))
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # of these, the cores that this process may use
        cores = len(os.sched_getaffinity(0))
    devices.append(("CPU", f"{cores} cores"))
    return devices
