"""docs/memory.md's formula, by hand and beside XLA's plan for an H200."""

from pathlib import Path

import keras
import pytest

import fastaccum as fa
from benchmarks.memory import formula
from fastaccum.kernels import cross_entropy

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


@pytest.mark.parametrize("preset", ["nano", "micro"])
def test_parameters_are_those_of_the_model(preset):
    assert formula.parameters(preset) == fa.gpt(preset=preset).count_params()


@pytest.mark.parametrize("name", formula.SLOTS)
def test_slots_are_those_of_the_optimizers(name):
    options = {"momentum": 0.9} if "momentum" in name else {}
    optimizer = getattr(keras.optimizers, name.partition(",")[0])(1e-3, **options)
    variable = keras.Variable(keras.ops.zeros([10, 100]))
    optimizer.build([variable])
    slots = sum(
        v.value.shape.num_elements()
        for v in optimizer.variables
        if tuple(v.shape) == tuple(variable.shape)
    )
    assert 4 * slots / 1000 == formula.SLOTS[name]


@pytest.mark.parametrize("tokens", [8192, 16384, 65536])
def test_the_loss_cuts_its_tokens_as_the_formula_has_it(tokens, monkeypatch):
    monkeypatch.setattr(cross_entropy, "has_gpu", lambda: True)
    shapes = [([tokens, 1], "float32"), ([50257, 1], "float32"), ([tokens], "int32")]
    hidden, kernel, labels = (keras.ops.zeros(shape, dtype) for shape, dtype in shapes)
    head, _ = cross_entropy._make_head(
        hidden, kernel, labels, None, transposed=True, chunk_size=None
    )
    assert head.tokens.length == formula.tokens_at_once(tokens, 50257)


def test_a_larger_policy_and_a_larger_micro_batch_take_more():
    sizes = [
        formula.peak_bytes(formula.Setting("1.3b", 8, policy))
        for policy in ("unrolled", *formula.LOOPS)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert formula.peak_bytes(formula.Setting("1.3b", 9)) > sizes[0]


def test_the_page_has_the_table_of_the_formula():
    assert formula.on_cards() in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [formula.CASES[0], formula.Setting("124m", 8, "nothing_saveable")], ids=str
)
def test_the_formula_is_within_its_bar_of_xlas_plan(setting):
    plan = formula.plan_of(setting)
    assert formula.peak_bytes(setting) == pytest.approx(plan.peak_bytes, rel=formula.BAR)


def test_bytes_that_the_formula_lacks_would_show():
    """A formula without accumulators, say, or without copies in half precision, would be outside of
    the bar.
    """
    setting = formula.Setting("124m", 8, "nothing_saveable")
    found, plan = formula.parts(setting), 2_890_732_146  # compiled for an H200, 2026-11-22
    assert formula.peak_bytes(setting) == pytest.approx(plan, rel=formula.BAR)
    for part in (
        "weights",
        "optimizer slots",
        "accumulators",
        "half-precision copies",
        "head and loss",
    ):
        assert abs(formula.peak_bytes(setting) - found[part] - plan) > formula.BAR * plan
