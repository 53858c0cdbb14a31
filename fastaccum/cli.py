"""The `fastaccum` command: `fastaccum train | plan | bench | devices`.

TensorFlow is imported by the subcommand that needs it, so that `fastaccum --help` answers at once.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from fastaccum import lines
from fastaccum.app import options, output


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default the program's own, and returns the exit code."""
    with output.may_end():
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        except options.BadArgument as error:
            print(f"{error.prog}: error: {lines.one_line(str(error))}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("\ninterrupted before training began", file=sys.stderr)
            return 130


def _main(argv: Sequence[str]) -> int:
    parser = options.make_parser()
    if argv[:1] == ["bench"]:
        # Its options are known in a clone only, and the suites' processes import TensorFlow themselves.
        return _bench(argv[1:], parser)
    parsed = parser.parse_args(argv)
    _import_tensorflow()
    if parsed.command == "devices":
        for kind, name in options.device_names():
            print(f"{kind:5}{name}")
        return 0
    if parsed.command == "plan":
        from fastaccum.app import plan

        return plan.plan(parsed)
    from fastaccum.app import train

    return train.train(parsed)


def _bench(argv: Sequence[str], parser: options.Parser) -> int:
    """`python -m benchmarks` of the clone that this package is part of."""
    clone = pathlib.Path(__file__).resolve().parent.parent
    if not (clone / "benchmarks" / "__main__.py").exists():
        parser.error(
            "the benchmarks are not part of an installed package: "
            "run `python -m benchmarks` in a clone of the repository, or `pip install -e .` there."
        )
    sys.path.insert(0, str(clone))
    from benchmarks.__main__ import main

    return main(argv, prog="fastaccum bench")


def _import_tensorflow() -> None:
    """Imports TensorFlow without its start-up lines, unless TF_CPP_MIN_LOG_LEVEL says which ones to print.

    The first of them are written to the file descriptor before TensorFlow reads any level, so the descriptor is
    redirected during the import and the search for devices. If they fail, everything is printed.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever Keras's other programs are to use
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
