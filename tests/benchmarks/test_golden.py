"""Programs compiled for an H200 are those that tests/golden describes; `python -m benchmarks.h200
golden` renews it.
"""

import copy
import json

import pytest

from benchmarks.h200 import golden, programs, summary

GPTS = [name for name in golden.PROGRAMS if name.startswith("gpt")]


def kept(name):
    return json.loads((golden.FOLDER / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sample if name in ("gpt", "convnet") else ())
        for name in golden.PROGRAMS
    ],
)
def test_the_compiled_program_is_as_described(name):
    before = kept(name)
    if before["versions"] != golden.versions():
        pytest.skip(f"described with {before['versions']}")
    found = golden.differences(before, golden.summarize(golden.PROGRAMS[name]()))
    assert not found, f"renew it, where that is meant, by `{golden.COMMAND} {name}`:\n" + "\n".join(
        found
    )


@pytest.mark.slow
def test_float16_costs_no_more_than_bfloat16():
    float16 = summary.of(programs.gpt(programs.Gpt(layers=2, dtype="float16")))
    assert float16["predicted ms"] <= 1.02 * kept("gpt")["predicted ms"]


@pytest.mark.parametrize("name", GPTS)
def test_no_gpt_waits_for_the_host_or_multiplies_float32(name):
    described = kept(name)
    assert not any(types.startswith("f32") for types in described["matmuls"])
    assert [
        described[fact] for fact in ("unknown trip counts", "conditionals", "host transfers")
    ] == [0, 0, 0]


@pytest.mark.parametrize("name", ["gpt", "gpt_unrolled"])
def test_no_matmul_is_computed_twice(name):
    """All that a program multiplies is what the model does, and cuDNN's scores once more in its
    backward pass.
    """
    assert kept(name)["TFLOP"] == pytest.approx(programs.Gpt(layers=2).flops / 1e12, rel=0.02)


def test_each_program_has_its_file():
    assert {path.stem for path in golden.FOLDER.iterdir()} == set(golden.PROGRAMS)


@pytest.mark.parametrize(
    ("keys", "change", "noticed"),
    [
        (["predicted ms"], lambda ms: ms * 1.015, False),
        (["predicted ms"], lambda ms: ms * 1.03, True),
        (["temp GB"], lambda gb: gb * 0.97, True),
        (["kernels", "reduce"], lambda n: n + 8, False),
        (["kernels", "elementwise"], lambda n: n + max(9, n // 40), True),
        (["kernels", "sort"], lambda n: 16, True),
        (["matmuls", "bf16 x bf16 -> f32"], lambda n: n + 1, True),
        (["matmuls", "f32 x f32 -> f32"], lambda n: 8, True),
        (["conditionals"], lambda n: 1, True),
        (["MFU"], lambda mfu: None, True),
    ],
)
def test_differences_beyond_the_margin_are_noticed(keys, change, noticed):
    before = kept("gpt")
    after = copy.deepcopy(before)
    inner = after
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = change(inner.get(keys[-1]))
    assert bool(golden.differences(before, after)) == noticed
