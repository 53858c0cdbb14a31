"""Options and schedules, checked and frozen."""

import dataclasses

import keras
import pytest

import fastaccum as fa
from fastaccum.data.stacks import Layout
from fastaccum.step import loss_scale
from fastaccum.step.options import Schedule


def test_options_are_checked_and_frozen():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    options = fa.Trainer(model, "sgd", "mse", loss_scale=128, clip_norm=1)._present_options
    assert repr(options) == (
        "Options(gradient_accumulation_steps=1, steps_per_execution=1, "
        "loss_scale=StaticLossScale(loss_scale=128.0), clip_norm=1.0, "
        "fp32_weight_gradients=True, flash_attention='auto', jit_compile='auto', "
        "float8=False, scan_layers='auto', optimizer_state_dtype='float32', "
        "stochastic_rounding=True, on_nonfinite='skip', shard_optimizer='auto', "
        "max_programs='auto', "
        "own_loss_reduction='mean')"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.clip_norm = 2.0


def test_a_schedule_says_when_to_validate():
    schedule = Schedule(4, validation_freq=2)
    assert [epoch for epoch in range(schedule.epochs) if schedule.validates(epoch)] == [1, 3]
    assert [
        epoch for epoch in range(4) if Schedule(4, validation_freq=[1, 4]).validates(epoch)
    ] == [0, 3]


def test_a_loss_scale_by_its_name():
    rules = [
        loss_scale.get(*given)
        for given in (("auto", "float16"), ("auto", "bfloat16"), (128, "float32"))
    ]
    assert [type(rule).__name__ for rule in rules] == [
        "DynamicLossScale",
        "NoLossScale",
        "StaticLossScale",
    ]
    assert rules[0].get_config() == {
        "init_scale": 32768.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": 1.0,
        "max_scale": 16777216.0,
    }


def test_a_layouts_columns():
    own, real = Layout(1, replicas=4, shards=slice(2, 4)).columns(7)
    assert own.tolist() == [4, 5, 6, 6] and real.tolist() == [True, True, True, False]
