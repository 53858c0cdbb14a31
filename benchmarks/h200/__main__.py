"""Predicts our programs and JAX's on an H200, on any machine: `python -m benchmarks.h200 show`.

The command needs TensorFlow and XLA's compiler for CUDA (`pip install -e ".[test,h200]"`), for
JAX's programs JAX and optax (`".[test,bench,h200]"`), and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.h200 import (
    beside_jax,
    float8,
    golden,
    models,
    programs,
    report,
    roofline,
    summary,
    vision,
)
from fastaccum.kernels.recomputed_function import POLICIES
from fastaccum.step.compiler_ir import MemoryAnalysis


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.h200", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(required=True)
    _add_show(commands.add_parser("show", help="one program: totals, and its costliest kernels"))
    golden_parser = commands.add_parser("golden", help="renews the summaries in tests/golden")
    golden_parser.add_argument(
        "names",
        nargs="*",
        type=_program,
        metavar="NAME",
        help=f"of {', '.join(golden.PROGRAMS)} (all)",
    )
    golden_parser.set_defaults(
        run=lambda options: golden.renew(options.names or list(golden.PROGRAMS))
    )
    _add_report(
        commands.add_parser("report", help="ours and JAX's against the bars, with pictures")
    )
    _add_models(
        commands.add_parser(
            "models", help="Keras's and KerasHub's models, with attention fused and as it is"
        )
    )
    _add_float8(commands.add_parser("float8", help="models with float8 beside half precision"))
    _add_images(
        commands.add_parser("images", help="models of images beside Keras's own JAX backend")
    )
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except (pytest.skip.Exception, ModuleNotFoundError) as missing:  # the helpers of tests skip
        parser.exit(1, f"{missing.msg}\n")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=_module, help="an optimized HLO module, instead of one of ours"
    )
    parser.add_argument("--json", action="store_true", help="the totals alone, as JSON")
    parser.add_argument(
        "--by", choices=("scope", "kernel"), default="scope", help="what a row of the table is"
    )
    parser.add_argument("--rows", type=_whole, default=40, help="how many (%(default)s)")
    parser.add_argument("--save", type=_new_file, help="where to write the optimized HLO")
    add_gpt_options(parser)
    parser.add_argument(
        "--jax", choices=("scan", "remat", "unrolled"), help="JAX's program of this form instead"
    )
    parser.add_argument(
        "--logits", choices=("bfloat16", "float32"), default="bfloat16", help="JAX's (%(default)s)"
    )
    _add_rates(parser)
    parser.set_defaults(run=show, parser=parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where it goes (benchmarks/results/, by date)"
    )
    parser.add_argument(
        "--processes", type=_whole, default=2, help="that compile side by side (%(default)s)"
    )
    _add_rates(parser)
    parser.set_defaults(
        run=lambda options: print(report.write(_rates(options), options.folder, options.processes)),
    )


def _add_model_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        choices=[[], *models.MODELS],
        metavar="NAME",
        help=", ".join(models.MODELS),
    )
    for name, default in (("layers", 4), ("batch", 8), ("context", 2048)):
        parser.add_argument(f"--{name}", type=_whole, default=default, help="(%(default)s)")


def _add_models(parser: argparse.ArgumentParser) -> None:
    _add_model_names(parser)
    parser.add_argument(
        "--remat",
        nargs="+",
        type=lambda text: None if text == "None" else _policy(text),
        default=[],
        metavar="POLICY",
        help='fused, with each of these of fa.remat; names as "a,b,c"; "None" for as it is',
    )
    _add_rates(parser)
    parser.set_defaults(run=compare_models)


def compare_models(options: argparse.Namespace) -> None:
    """Prints the table of the subcommand `models`."""
    names = options.names or list(models.MODELS)
    sizes = options.layers, options.batch, options.context
    for line in models.table(names, _rates(options), sizes, options.remat):
        print(line, flush=True)


def _add_float8(parser: argparse.ArgumentParser) -> None:
    _add_model_names(parser)
    _add_rates(parser)
    parser.set_defaults(run=compare_float8)


def compare_float8(options: argparse.Namespace) -> None:
    """Prints the table of the subcommand `float8`."""
    names = options.names or ["fa.gpt", "llama", "gemma", "keras-gpt"]
    sizes = options.layers, options.batch, options.context
    for line in float8.table(names, _rates(options), sizes):
        print(line, flush=True)


def _add_images(parser: argparse.ArgumentParser) -> None:
    known = [name for name in vision.MODELS if name != "tiny"]
    parser.add_argument(
        "names", nargs="*", choices=[[], *vision.MODELS], metavar="NAME", help=", ".join(known)
    )
    for field in dataclasses.fields(beside_jax.Sizes):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=_whole, default=field.default, help="(%(default)s)")
    parser.add_argument(
        "--no-triton",
        action="store_true",
        help="multiply by cuBLAS alone: without a device, XLA's Triton finds no tiles for an odd "
        "number of tokens",
    )
    _add_rates(parser)
    parser.set_defaults(run=compare_with_jax)


def compare_with_jax(options: argparse.Namespace) -> None:
    """Prints the tables of the subcommand `images`."""
    names = options.names or ["resnet50", "vit"]
    sizes = beside_jax.Sizes(options.size, options.batch, options.micro_batches)
    flags = {"xla_gpu_enable_triton_gemm": False} if options.no_triton else {}
    for line in beside_jax.table(names, sizes, _rates(options), **flags):
        print(line, flush=True)


def _add_rates(parser: argparse.ArgumentParser) -> None:
    for rate in dataclasses.fields(roofline.Rates):
        parser.add_argument(
            f"--{rate.name}-rate", type=_positive, default=rate.default, help="(%(default)s)"
        )


def _rates(options: argparse.Namespace) -> roofline.Rates:
    names = [rate.name for rate in dataclasses.fields(roofline.Rates)]
    return roofline.Rates(**{name: getattr(options, f"{name}_rate") for name in names})


def add_gpt_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `programs.Gpt`."""
    for field in dataclasses.fields(programs.Gpt):
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            option = f"--{field.name.replace('_', '-')}"
            convert = _width if field.name == "width" else _whole
            parser.add_argument(option, type=convert, default=field.default)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--unrolled", dest="stacked", action="store_false", help="without a LayerStack"
    )
    parser.add_argument(
        "--policy", type=_policy, default="auto", help='as LayerStack takes it; names as "a,b,c"'
    )
    kinds = ("auto", "cudnn", "blockwise", "reference", "xla")
    parser.add_argument(
        "--attention", choices=kinds, default="auto", help="its implementation (xla: JAX's)"
    )
    parser.add_argument("--chunk-size", type=_whole, help="of the cross-entropy")


def gpt_options(options: argparse.Namespace) -> programs.Gpt:
    """Returns the GPT that the options describe."""
    names = [field.name for field in dataclasses.fields(programs.Gpt)]
    return programs.Gpt(**{name: getattr(options, name) for name in names})


def show(options: argparse.Namespace) -> None:
    """Prints the totals and the kernels of the subcommand `show`."""
    if options.file:
        program = programs.Compiled(options.file, MemoryAnalysis(0, 0, 0, 0), options.micro_batches)
    elif options.jax:
        program = _jax_program(options)
    else:
        try:
            program = programs.gpt(gpt_options(options))
        except ValueError as error:  # of sizes that do not fit each other, of an unknown policy
            options.parser.error(str(error).partition("Arguments received")[0].strip())
    if options.save:
        options.save.write_text(program.text)
    rates = _rates(options)
    if options.json:
        print(json.dumps(summary.of(program, rates), indent=1))
    else:
        print(summary.text(program, options.rows, rates, options.by))


def _jax_program(options: argparse.Namespace) -> programs.Compiled:
    attention = "cudnn" if options.attention == "auto" else options.attention
    if attention not in ("cudnn", "xla"):
        options.parser.error(f"argument --attention: JAX has cudnn and xla, not {attention}")
    from benchmarks.h200 import jax_programs  # needs JAX and optax

    program = programs.JaxGpt(options.jax, attention, options.logits, gpt_options(options))
    return jax_programs.gpt(program)


def _policy(text: str) -> str | tuple[str, ...]:
    if text in POLICIES:
        return text
    return tuple(text.split(","))


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _width(text: str) -> int:
    if _whole(text) % 128:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of 128, the width of a head")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def _module(path: str) -> str:
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read: {error}") from None
    if not re.search(r"^ENTRY ", text, re.M):
        raise argparse.ArgumentTypeError(f"{path!r} is no HLO module")
    return text


def _new_file(path: str) -> Path:
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path!r} is a folder, or in none that there is")
    return Path(path)


def _program(name: str) -> str:
    if name not in golden.PROGRAMS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(golden.PROGRAMS)}")
    return name


if __name__ == "__main__":
    main()
