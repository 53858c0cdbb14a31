"""The report on programs compiled for an H200: which part a kernel belongs to, and what is printed
of figures.
"""

import dataclasses
import json

import pytest

from benchmarks.h200 import __main__ as command
from benchmarks.h200 import parts, report, roofline
from benchmarks.h200.kernels import Kernel
from benchmarks.h200.programs import Gpt

BODY = "jit(train_step)/while/body/closed_call"
BLOCKS = f"{BODY}/transpose(jvp(blocks))/while/body/closed_call/checkpoint"
STACK = "gradient_tape/forward/gpt/blocks/while"


def kernel(scope, kind="elementwise", loops=(8, 4), results=(("bf16", (8, 2048, 2048)),)):
    return Kernel("k", kind, scope, "", 0.0, 0.0, loops, results)


@pytest.mark.parametrize(
    ("each", "part"),
    [
        (kernel("jit(train_step)/optimizer/add", loops=()), parts.UPDATE),
        (kernel(f"{BODY}/transpose(jvp(loss))/btd,vd->btv/dot_general", "gemm"), parts.LOSS),
        (
            kernel(
                "call.14/gradient_tape/forward/linear_cross_entropy/while/BatchMatMulV3", "gemm"
            ),
            parts.LOSS,
        ),
        (kernel(f"{BLOCKS}/rematted_computation/mlp/dot_general", "gemm"), parts.RECOMPUTED),
        (kernel(f"{BLOCKS}/mlp/dot_general", "gemm"), parts.MATMULS),
        (kernel(f"{STACK}/backward/transformer_block/Gelu/mul"), parts.RECOMPUTED),
        (
            kernel(f"{STACK}/backward/gradient_tape/transformer_block/mlp_in/MatMul", "gemm"),
            parts.MATMULS,
        ),
        (kernel("while/forward/gpt_1/block_3_1/attention_1/attention/while/Max"), parts.ATTENTION),
        (kernel(f"{BLOCKS}/attention/dot_product/reduce_sum"), parts.ATTENTION),
        (kernel("while/forward/gpt/block_3/attention/qkv/MatMul", "gemm"), parts.MATMULS),
        (kernel(f"{STACK}/add", results=(("f32", (4, 2048, 8192)),)), parts.SUMS),
        (kernel(f"{BODY}/accumulate/add", results=(("f32", ()),)), parts.SUMS),
        (kernel("while/backward/AddN", "scatter", results=(("f32", (1, 1)),)), parts.EMBEDDING),
        (kernel("forward/gpt/blocks/while/TensorArrayV2Write", "slice"), parts.MOVES),
        (kernel("forward/gpt/blocks/while/forward/transformer_block/mlp_norm_1/Cast"), parts.NORMS),
        (kernel("forward/gpt/blocks/while/forward/transformer_block/Gelu/mul"), parts.ELEMENTWISE),
    ],
)
def test_the_part_that_a_kernel_belongs_to(each, part):
    assert parts.part(each, Gpt()) == part


FIGURES = {
    "launches a micro-batch": 300.0,
    "GB moved": 500.0,
    "temp GB": 5.0,
    "peak GB": 9.0,
    "predicted ms": 400.0,
    "serial ms": 500.0,
    "MFU": 0.8,
    "attention ms": 30.0,
    "attention launches": 8.0,
    "loss launches": 20.0,
    "parts": dict.fromkeys(parts.PARTS, 40.0),
    "weight gradients added": {"epilogue": 15, "apart": 1},
    "accumulation / accumulators": 3.5,
    "wide matmuls": 0,
    "conditionals": 0,
    "unknown trip counts": 0,
    "host transfers": 0,
}


@pytest.fixture(scope="module")
def run():
    """A run in which every program comes to the same."""
    from benchmarks.h200 import bars, cases

    found = bars.Results(dict.fromkeys(cases.everything(), FIGURES))
    head_memory, before = {"temp": 1.0, "logits": 10.0}, json.loads(report.BEFORE.read_text())
    rates = dataclasses.asdict(roofline.Rates())
    return report.Run("2026-11-22", rates, {"jaxlib": "0.10.2"}, found, head_memory, before)


def test_a_bar_is_met_or_not(run):
    from benchmarks.h200.bars import measures

    met = {row.name: row.is_met for row in measures(run.results, run.head_memory)}
    missed = [what for what, is_met in met.items() if not is_met]
    assert len(met) == 17 and missed == [
        "everything recomputed, cuDNN, 24 layers: ms",
        "recomputed, without cuDNN, 24 layers: ms",
        "the same against float32 logits: ms",
        "unrolled: weight gradients added by their GEMM",
        "temp memory, recomputed, 4 layers: GB",
        "temp memory, recomputed, 24 layers: GB",
        "temp memory, unrolled, 4 layers: GB",
    ]


def test_the_report_has_every_program_picture_and_loss(run, tmp_path):
    from benchmarks.h200 import cases, pictures

    drawn = pictures.draw(run.results, run.before["programs"], tmp_path)
    text = report.markdown(run, drawn)
    assert len(drawn) == 3 and all(
        path.name in text and path.stat().st_size < 200_000 for path in drawn.values()
    )
    assert all(f"\n| {name} |" in text for name in (*cases.OURS, *cases.JAX, *parts.PARTS))
    for row in (
        "| everything recomputed, cuDNN, 24 layers: ms | 400 | 400 | 1.00 | at most 0.95 | "
        "**no** |",
        "\n| 5. norms |",
    ):
        assert row in text
    assert "7.9e+14 FLOP/s of half-precision matmuls" in text


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(report, "NEEDED", {"no_such_module": "no-such-package", **report.NEEDED})
    with pytest.raises(SystemExit, match=r"needs no-such-package[,.].*\[test,bench,h200\]"):
        report.write(roofline.Rates())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "0"], "--layers: '0' is no whole number from 1"),
        (["--width", "100"], "--width: '100' is no multiple of 128"),
        (["--file", "no_such_file"], "--file: 'no_such_file' cannot be read"),
        (["--file", __file__], "is no HLO module"),
        (
            ["--save", "no_such_folder/module"],
            "--save: 'no_such_folder/module' is a folder, or in none that there is",
        ),
        (["--half-rate", "-1"], "--half-rate: '-1' is no positive number"),
        (
            ["--jax", "scan", "--attention", "blockwise"],
            "--attention: JAX has cudnn and xla, not blockwise",
        ),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, said):
    with pytest.raises(SystemExit, match="2"):
        command.main(["show", *arguments])
    assert said in capsys.readouterr().err
