"""The `fastaccum` command: `fastaccum train | bench | devices`.

TensorFlow is imported by the subcommand that needs it, so that `fastaccum --help` answers at once.
"""

import argparse
import math
import os
import pathlib
import sys
import tempfile

EPILOG = """\
exit codes: 0 done; 1 failed while training; 2 bad arguments, nothing started; 130 ended by Ctrl-C;
143 ended by SIGTERM (preemption), after a checkpoint was saved.
The first Ctrl-C ends training after the current step and saves what was learned; a second one aborts.
However a run ended, `fastaccum train --resume FOLDER` goes on from its last checkpoint.
"""


def main(argv=None):
    """Runs the command line `argv`, by default the program's own, and returns the exit code.

    Raises:
        SystemExit: with code 0 for --help, 2 for bad arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if argv[:1] == ["bench"]:
        # Its options are known in a clone only, and the suites' processes import TensorFlow themselves.
        return bench(argv[1:], parser)
    options = parser.parse_args(argv)
    try:
        import_tensorflow()
        return options.run(options)
    except BadArgument as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted before training began", file=sys.stderr)
        return 130


class BadArgument(Exception):
    """What the user asked for cannot be done: one line that names the value and the remedy."""


def import_tensorflow():
    """Imports TensorFlow without its start-up lines. With TF_CPP_MIN_LOG_LEVEL set, that decides.

    Its first lines are written to the file descriptor before TensorFlow reads any level, so the descriptor is
    led elsewhere for as long as the import and the search for devices last. If they fail, it is all printed.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or "tensorflow" in sys.modules:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as lines:
        os.dup2(lines.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        except BaseException:
            lines.seek(0)
            os.write(stderr, lines.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def train(options):
    """`fastaccum train`."""
    from fastaccum.app import run as text_training

    return text_training.train(options)


def bench(argv, parser):
    """`fastaccum bench`: `python -m benchmarks` of the clone that this package is part of."""
    clone = pathlib.Path(__file__).resolve().parent.parent
    if not (clone / "benchmarks" / "__main__.py").exists():
        parser.error(
            "the benchmarks are not part of an installed package: "
            "run `python -m benchmarks` in a clone of the repository, or `pip install -e .` there."
        )
    sys.path.insert(0, str(clone))
    from benchmarks.__main__ import main

    return main(argv, prog="fastaccum bench")


def devices(options):
    """`fastaccum devices`: what TensorFlow can train on."""
    for kind, name in device_names():
        print(f"{kind:5}{name}")
    return 0


def device_names():
    """`(kind, name)` of each device, GPUs first: `("GPU", "NVIDIA H200")`, `("CPU", "2 cores")`."""
    import tensorflow as tf

    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [("GPU", gpu.get("device_name", "unnamed")) for gpu in gpus] + [("CPU", f"{cores} cores")]


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        # Without the usage: the one line that matters would be the last of many.
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser():
    parser = _Parser(
        prog="fastaccum",
        description="Trains on TensorFlow, a whole gradient-accumulation cycle as one XLA program.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(commands)
    commands.add_parser("bench", help="run the benchmarks and write them up (in a clone of the repository)")
    command = commands.add_parser("devices", help="list what TensorFlow can train on", allow_abbrev=False)
    command.set_defaults(run=devices, parser=command)
    return parser


def _add_train(commands):
    command = commands.add_parser(
        "train",
        help="train a small byte-level transformer on text",
        description="Trains a byte-level decoder-only transformer on text, evaluates it on a part\n"
        "held out, and writes a run folder: config.json, metrics.csv, curve.png, model.keras\n"
        "and checkpoints.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=train, parser=command)
    add = command.add_argument
    add(
        "paths",
        nargs="*",
        metavar="FILE or FOLDER",
        help="the text; by default the source code of Python's standard library",
    )
    add("--steps", type=_whole(1), default=300, metavar="N", help="optimizer updates (%(default)s)")
    add("--batch-size", type=_whole(1), default=8, metavar="N", help="windows in a micro-batch (%(default)s)")
    add("--accum", type=_whole(1), default=4, metavar="N", help="micro-batches in an update (%(default)s)")
    add(
        "--precision",
        choices=["auto", "float32", "mixed_float16", "mixed_bfloat16"],
        default="auto",
        help="auto (default): mixed_float16 on a GPU, float32 on a CPU",
    )
    add("--preset", default="nano", metavar="NAME", help="model size: nano (default), micro, 124m, 350m, 1.3b")
    add(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="a Keras optimizer (adamw, the default; lamb, lion, sgd, muon, ...), or one "
        "of tensorflow-addons as tfa:NAME (tfa:LAMB, tfa:NovoGrad, ...)",
    )
    add(
        "--lr",
        type=_positive,
        default=0.004,
        metavar="RATE",
        help="highest learning rate, after a warm-up; it falls along a cosine to a 50th (%(default)s)",
    )
    add("--seed", type=_whole(0, 2**32 - 1), default=0, metavar="N", help="of weights and data (%(default)s)")
    add(
        "--out",
        metavar="FOLDER",
        help="run folder, new or empty (by default a new one: runs/PRESET-OPTIMIZER-seedN)",
    )
    add(
        "--checkpoint-every",
        type=_whole(1),
        default=50,
        metavar="N",
        help="updates between checkpoints (%(default)s)",
    )
    add(
        "--resume",
        metavar="FOLDER",
        help="go on with the run in FOLDER, from its last checkpoint and with its options: name none beside it",
    )


def _whole(minimum, maximum=None):
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value):
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or number < minimum or (maximum is not None and number > maximum):
            raise argparse.ArgumentTypeError(f"{value!r} must be a whole number {limits}")
        return number

    return parse


def _positive(value):
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{value!r} must be a positive number, such as 0.004")
    return number
