"""The options of the `fastaccum` command, and the devices that there are. Needs no TensorFlow to answer --help."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

EPILOG = """\
exit codes: 0 done; 1 failed while training; 2 bad arguments, nothing started; 130 ended by Ctrl-C;
143 ended by SIGTERM (preemption), after a checkpoint was saved.
The first Ctrl-C ends training after the current step and saves what was learned; a second one aborts.
However a run ended, `fastaccum train --resume FOLDER` continues from its last checkpoint.
"""
MOST = 10**6  # windows in a micro-batch, micro-batches in an update
MOST_STEPS = 10**9
LARGEST = math.nextafter(2.0**128, 0.0)  # where float32 ends
STEPS = 300
_MEANT = {"--model": "--preset", "--size": "--preset", "--epochs": "--steps", "--learning-rate": "--lr"}
PRESETS = ("nano", "micro", "124m", "350m", "1.3b")  # of `fastaccum.gpt`, by name

Number = TypeVar("Number", int, float)


class BadArgument(Exception):
    """An argument that cannot be used: one line that names the value and the remedy."""

    def __init__(self, message: str, prog: str = "fastaccum train"):
        super().__init__(message)
        self.prog = prog


class Parser(argparse.ArgumentParser):
    """A parser whose options cannot be abbreviated, and whose errors are one line."""

    def __init__(self, **settings: Any):
        super().__init__(
            epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        # Without the usage: the one line that matters would be the last of many.
        raise BadArgument(message, self.prog)


class _Version(argparse.Action):
    """Looks up the versions and prints them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        found = metadata.packages_distributions()  # TensorFlow's may be tensorflow-cpu, or tf-nightly
        others = ((name, found.get(name.lower())) for name in ("TensorFlow", "Keras"))
        shown = ", ".join(f"{name} {metadata.version(of[0]) if of else 'not installed'}" for name, of in others)
        print(f"fastaccum {sys.modules['fastaccum'].__version__} ({shown}, Python {platform.python_version()})")
        parser.exit()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; `command` and `parser` are the subcommand's, `given` the options that it names.

    Raises:
        BadArgument: raised for what is not an option, with the one that was probably meant, and for a missing file.
    """
    parser = make_parser()
    if not argv:
        parser.error("name a COMMAND: train, generate, plan, bench or devices; `fastaccum --help` says what each does")
    parsed, unknown = parser.parse_known_args(argv)
    # Options cannot be abbreviated, and one that equals its default is given, too.
    parsed.given = [each.partition("=")[0] for each in itertools.takewhile("--".__ne__, argv)]
    if unknown:
        from difflib import get_close_matches

        names = re.findall(r"--[\w-]+", parsed.parser.format_help())
        given = [_MEANT.get(each, each) for each in (each.split("=")[0] for each in unknown)]
        meant = next((found for each in given for found in get_close_matches(each, names, 1)), None)
        hint = f": did you mean {meant}?" if meant else f"; `{parsed.parser.prog} --help` lists the options"
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    for path in getattr(parsed, "paths", ()):
        if not os.path.lexists(path):
            parsed.parser.error(f"{path!r} does not exist: give a text file, or a folder of them.")
    return parsed


def make_parser() -> Parser:
    """Makes the parser of the command line."""
    parser = Parser(
        prog="fastaccum",
        description="Trains a small language model on text, with gradient accumulation in one XLA program.",
    )
    version = "print the versions of fastaccum, TensorFlow, Keras and Python"
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands.add_parser)
    _add_generate(commands.add_parser)
    plan = commands.add_parser(
        "plan",
        help="find the micro-batch that fits the device",
        description="Finds the largest micro-batch with which `fastaccum train` fits the device, by compiling its\n"
        "train step for a few of them. Nothing is trained.",
    )
    plan.epilog = "exit codes: 0 done; 1 nothing fits; 2 bad arguments, nothing started."
    add = plan.add_argument
    _add_model(add)
    pieces = "pieces of text in an update (%(default)s)"
    add("--global-batch", type=_whole(1, MOST), default=32, metavar="N", help=pieces)
    limit = "what the device may hold, in bytes or as 16GiB (by default what is free of it)"
    add("--memory-limit", type=_path, metavar="SIZE", help=limit)
    add("--recompute", choices=["auto"], help="auto: where nothing fits, look for activations to compute again")
    _finish(plan, "plan")
    commands.add_parser("bench", help="run the benchmarks and write them up (in a clone of the repository)")
    devices = commands.add_parser("devices", help="list what TensorFlow can train on")
    _finish(devices, "devices")
    return parser


def _finish(parser: Parser, command: str) -> None:
    """Adds the options that every subcommand has."""
    log = "print TensorFlow's own log lines, too"
    parser.add_argument("--tensorflow-log", action="store_true", help=log)
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(command=command, parser=parser, given=())


def _add_train(add_parser: Callable[..., Parser]) -> None:
    train = add_parser(
        "train",
        help="train a small language model on text",
        description="Trains a small language model (a transformer) on text, byte by byte. A part of the text is\n"
        "held out, and the model is evaluated on it. Writes a run folder: config.json, metrics.csv,\n"
        "curve.png, model.keras and checkpoints.",
    )
    add = train.add_argument
    text = "the text; by default the source code of Python's standard library"
    add("paths", nargs="*", type=_path, metavar="FILE or FOLDER", help=text)
    add("--steps", type=_whole(1, MOST_STEPS), metavar="N", help=f"updates of the weights, in all ({STEPS})")
    size = "pieces of text that go through the model at once, a micro-batch (%(default)s)"
    add("--batch-size", type=_whole(1, MOST), default=8, metavar="N", help=size)
    accum = "micro-batches whose gradients are added up for one update (%(default)s)"
    add("--accum", type=_whole(1, MOST), default=4, metavar="N", help=accum)
    _add_model(add)
    rate = "highest learning rate: it rises to this first, then falls to a 50th along a cosine (%(default)s)"
    positive = _number(float, 2.0**-126, LARGEST, "positive number, such as 0.004")
    add("--lr", type=positive, default=0.004, metavar="RATE", help=rate)
    seed = "random seed of weights and data (%(default)s)"
    add("--seed", type=_whole(0, 2**32 - 1), default=0, metavar="N", help=seed)
    out = "folder to write the run to, new or empty (by default runs/PRESET-OPTIMIZER-seedN, a new one)"
    add("--out", type=_path, metavar="FOLDER", help=out)
    every = "updates from one checkpoint to the next (%(default)s)"
    add("--checkpoint-every", type=_whole(1, MOST_STEPS), default=50, metavar="N", help=every)
    resume = "continue the run in FOLDER from its last checkpoint; --steps N makes it one of N steps"
    add("--resume", type=_path, metavar="FOLDER", help=resume)
    cache = "neither load nor keep compiled programs ($FASTACCUM_COMPILE_CACHE, or ~/.cache/fastaccum)"
    add("--no-compile-cache", dest="compile_cache", action="store_false", help=cache)
    _finish(train, "train")


def _add_generate(add_parser: Callable[..., Parser]) -> None:
    generate = add_parser(
        "generate",
        help="continue a text with the model of a run",
        description="Prints a text and how the model that `fastaccum train` saved in a run folder continues it.",
    )
    generate.epilog = (
        "exit codes: 0 done; 1 failed while generating; 2 bad arguments, nothing generated; 130 ended by Ctrl-C."
    )
    add = generate.add_argument
    add("run", type=_path, metavar="RUN", help="a run folder, with the model.keras of a run that ended")
    add("--prompt", default="\n", metavar="TEXT", help="the text to continue (a line break)")
    add("--length", type=_whole(1, MOST), default=400, metavar="N", help="bytes to generate (%(default)s)")
    freely = "how freely to choose: 0 for always the likeliest byte, 1 for as likely as the model says (%(default)s)"
    number = _number(float, 0.0, LARGEST, "number from 0, such as 0.8")
    add("--temperature", type=number, default=0.8, metavar="T", help=freely)
    add("--seed", type=_whole(0, 2**32 - 1), default=0, metavar="N", help="random seed of the choices (%(default)s)")
    _finish(generate, "generate")


def _add_model(add: Callable[..., argparse.Action]) -> None:
    """Adds the options of a model and its optimizer."""
    precisions = ["auto", "float32", "mixed_float16", "mixed_bfloat16"]
    precision = "auto (default): mixed_float16 on a GPU, float32 on a CPU"
    add("--precision", choices=precisions, default="auto", help=precision)
    preset = f"model size: {', '.join(PRESETS)} (%(default)s)"
    add("--preset", type=str.lower, choices=PRESETS, default="nano", metavar="NAME", help=preset)
    optimizer = (
        "a Keras optimizer (adamw, the default; lamb, lion, sgd, muon, ...), or one "
        "of tensorflow-addons as tfa:NAME (tfa:LAMB, tfa:NovoGrad, ...)"
    )
    add("--optimizer", default="adamw", metavar="NAME", help=optimizer)


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    return _number(int, minimum, maximum, f"whole number from {minimum} to {maximum}")


def _number(kind: Callable[[str], Number], least: Number, most: Number, what: str) -> Callable[[str], Number]:
    def parse(value: str) -> Number:
        with contextlib.suppress(ValueError):
            if least <= (number := kind(value)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{value!r} must be a {what}")

    return parse


def _path(value: str) -> str:
    with contextlib.suppress(UnicodeEncodeError):
        if value and b"\0" not in os.fsencode(value):
            return value
    raise argparse.ArgumentTypeError(f"{value!r} is not a path: no file can have such a name")


def list_devices() -> list[tuple[str, str]]:
    """Lists `(kind, name)` of each device, GPUs first: `("GPU", "NVIDIA H200")`, `("CPU", "2 cores")`."""
    import tensorflow as tf

    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [("GPU", gpu.get("device_name", "unnamed")) for gpu in gpus] + [("CPU", f"{cores} cores")]


def name_options(message: str) -> str:
    """Replaces a Trainer's arguments in an error's message by the options that stand for them."""
    message = re.sub(r"batch_size=(\d+) with gradient_accumulation_steps=(\d+)", r"--batch-size \1 --accum \2", message)
    return message.replace("recompute='auto'", "--recompute auto")
