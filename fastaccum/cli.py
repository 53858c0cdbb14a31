"""The `fastaccum` command: `fastaccum train | generate | plan | bench | devices`.

TensorFlow is imported by the subcommand that needs it, so that `fastaccum --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from fastaccum import lines
from fastaccum.app import options, output


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default the program's own, and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    with output.tolerate_closed_stdout():
        try:
            return _main(argv)
        except options.BadArgument as error:
            print(f"{error.prog}: error: {lines.one_line(str(error))}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print(f"\ninterrupted{' before training began' * (argv[:1] == ['train'])}", file=sys.stderr)
            return 130


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["bench"]:
        # Its options are known in a clone only, and the suites' processes import TensorFlow themselves.
        return _bench(argv[1:])
    parsed = options.parse(argv)
    stream = sys.stdout if parsed.command in ("train", "plan") else sys.stderr
    if stream is sys.stdout or stream.isatty():
        print("loading   TensorFlow", file=stream, flush=True)  # which takes some seconds
    _import_tensorflow(parsed.tensorflow_log)
    if parsed.command == "devices":
        for kind, name in options.list_devices():
            print(f"{kind:5}{name}")
        return 0
    module = importlib.import_module(f"fastaccum.app.{parsed.command}")  # "train", "generate" or "plan"
    return getattr(module, parsed.command)(parsed)


def _bench(argv: Sequence[str]) -> int:
    """Runs `python -m benchmarks` of the clone that this package is part of."""
    clone = pathlib.Path(__file__).resolve().parent.parent
    if not (clone / "benchmarks" / "__main__.py").exists():
        raise options.BadArgument(
            "the benchmarks are not part of an installed package: "
            "run `python -m benchmarks` in a clone of the repository, or `pip install -e .` there.",
            "fastaccum bench",
        )
    sys.path.insert(0, str(clone))
    from benchmarks.__main__ import main

    return main(argv, prog="fastaccum bench")


def _import_tensorflow(log: bool = False) -> None:
    """Imports TensorFlow without its log lines, or with all of them if `log`.

    TensorFlow writes its first lines to the file descriptor before it reads any level, so the descriptor is redirected
    during the import and the search for devices. If these fail, everything is printed.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever Keras's other programs are to use
    if "tensorflow" in sys.modules:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0" if log else "3"  # an error that matters is a Python exception, too
    if log:
        return
    for name in ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE"):
        os.environ.pop(name, None)
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow as tf

            tf.get_logger().setLevel("ERROR")
            tf.config.list_physical_devices()
        except BaseException:
            written.seek(0)
            os.write(stderr, written.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
