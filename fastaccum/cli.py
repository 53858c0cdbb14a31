"""The `fastaccum` command: `fastaccum train | generate | bench | devices`.

TensorFlow is imported by the subcommand that needs it, so that `fastaccum --help` answers at once.
"""

from __future__ import annotations

import importlib
import io
import os
import pathlib
import sys
from collections.abc import Sequence

from fastaccum.app import options
from fastaccum.basics.warnings import one_line
from fastaccum.step import compile_cache


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default the program's own, and returns the exit code."""
    if sys.stdout is None:  # closed, as by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal in ASCII gets escapes
    if argv is None:
        argv = sys.argv[1:]
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except options.BadArgument as error:
        print(one_line(str(error)), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["bench"]:
        # Its options are known in a clone only, and the suites' processes import TensorFlow
        # themselves.
        return _bench(argv[1:])
    parsed = options.parse(argv)
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever Keras's other programs are to use
    if parsed.command == "devices":
        for kind, name in options.list_devices():
            print(f"{kind:5}{name}")
        return 0
    if parsed.command == "train":
        compile_cache.choose(compile_cache.user_folder() if parsed.compile_cache else None)
        print("loading   TensorFlow", flush=True)  # which takes some seconds
    module = importlib.import_module(f"fastaccum.app.{parsed.command}")  # "train" or "generate"
    return getattr(module, parsed.command)(parsed)


def _bench(argv: Sequence[str]) -> int:
    """Runs `python -m benchmarks` of the clone that this package is part of."""
    clone = pathlib.Path(__file__).resolve().parent.parent
    if not (clone / "benchmarks" / "__main__.py").exists():
        raise options.BadArgument(
            "fastaccum bench: error: the benchmarks are not part of an installed package: "
            "run `python -m benchmarks` in a clone of the repository, or `pip install -e .` there."
        )
    sys.path.insert(0, str(clone))
    from benchmarks.__main__ import main

    return main(argv, prog="fastaccum bench")
