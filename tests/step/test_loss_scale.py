"""The three loss scales, alone: every branch, every field at a value that is not its default."""

import numpy as np
import pytest
import tensorflow as tf

from fastaccum import DynamicLossScale, NoLossScale, StaticLossScale
from fastaccum.step import loss_scale


def walk(scale, finite):
    """(scale, good_steps) after each update of a sequence of outcomes."""
    states = []
    for each in finite:
        scale.update(tf.constant(each))
        states.append((float(scale.scale()), int(scale.good_steps)))
    return states


def test_a_growth_period_step_by_step():
    scale = DynamicLossScale(
        init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3
    )
    assert walk(scale, [True] * 7) == [
        (64, 1),
        (64, 2),
        (256, 0),
        (256, 1),
        (256, 2),
        (1024, 0),
        (1024, 1),
    ]


def test_backoff_starts_the_period_again():
    scale = DynamicLossScale(
        init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3
    )
    assert walk(scale, [True, True, False, True, True, True]) == [
        (64, 1),
        (64, 2),
        (16, 0),
        (16, 1),
        (16, 2),
        (64, 0),
    ]


def test_the_floor_holds():
    scale = DynamicLossScale(init_scale=10.0, backoff_factor=0.5, min_scale=3.0)
    assert [s for s, _ in walk(scale, [False] * 4)] == [5.0, 3.0, 3.0, 3.0]


def test_the_cap_holds():
    scale = DynamicLossScale(init_scale=10.0, growth_factor=2.0, growth_interval=1, max_scale=30.0)
    assert [s for s, _ in walk(scale, [True] * 4)] == [20.0, 30.0, 30.0, 30.0]


@pytest.mark.parametrize("rule", [NoLossScale(), StaticLossScale(8.0)])
def test_rules_without_state_stay(rule):
    before = float(rule.scale())
    rule.update(tf.constant(False))
    assert float(rule.scale()) == before
    assert not rule.variables


def test_a_checkpoint_carries_state_that_is_not_the_default(tmp_path):
    scale = DynamicLossScale(init_scale=64.0, growth_interval=5)
    walk(scale, [True, False, True, True])
    path = tf.train.Checkpoint(scale=scale).write(str(tmp_path / "scale"))
    restored = DynamicLossScale(init_scale=4.0, growth_interval=5)
    tf.train.Checkpoint(scale=restored).read(path).assert_consumed()
    assert (float(restored.scale()), int(restored.good_steps)) == (32.0, 2)


def test_state_dtypes():
    """An int32 variable would live on the host and break XLA on a GPU."""
    scale = DynamicLossScale()
    assert [v.dtype for v in scale.variables] == [tf.float32, tf.int64]


def test_every_field_reaches_the_config():
    fields = {
        "init_scale": 3.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.1,
        "growth_interval": 7,
        "min_scale": 2.0,
        "max_scale": 9.0,
    }
    assert DynamicLossScale(**fields).get_config() == fields


def test_the_names_of_the_rules():
    assert isinstance(loss_scale.get("auto", "float16"), DynamicLossScale)
    for dtype in ("float32", "bfloat16"):
        assert isinstance(loss_scale.get("auto", dtype), NoLossScale)
    assert isinstance(loss_scale.get(None, "float16"), NoLossScale)
    assert loss_scale.get(np.float32(8).item(), "float32").loss_scale == 8.0
    own = StaticLossScale(2.0)
    assert loss_scale.get(own, "float16") is own


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_scale": 0}, ValueError, "init_scale=0 "),
        ({"init_scale": float("inf")}, ValueError, "init_scale=inf"),
        ({"init_scale": "8"}, TypeError, "init_scale='8'"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor=1.0"),
        (
            {"growth_factor": 1 + 1e-9},
            ValueError,
            "growth_factor=1.000000001 must be above 1 in float32",
        ),
        (
            {"backoff_factor": 1 - 1e-9},
            ValueError,
            "backoff_factor=0.999999999 must be below 1 in float32",
        ),
        (
            {"backoff_factor": 1e-46},
            ValueError,
            "backoff_factor=1e-46 must be .*: in float32 it is 0",
        ),
        ({"min_scale": 1e-46}, ValueError, "min_scale=1e-46 must be .*: in float32 it is 0"),
        ({"min_scale": 1e-38}, ValueError, "min_scale=1e-38 must be "),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor=1.0"),
        ({"growth_interval": 0}, ValueError, "growth_interval=0"),
        ({"growth_interval": 1.5}, ValueError, "growth_interval=1.5"),
        ({"min_scale": -1.0}, ValueError, "min_scale=-1.0"),
        ({"init_scale": 0.5}, ValueError, "min_scale=1.0"),
        ({"max_scale": 2.0}, ValueError, "max_scale=2.0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize("bad", ["dynamic", [1.0], True, object()])
def test_bad_rules(bad):
    with pytest.raises(TypeError, match="loss_scale="):
        loss_scale.get(bad, "float16")
