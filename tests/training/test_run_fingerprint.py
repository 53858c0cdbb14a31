"""Checks that whatever changes a training changes its description, which workers and resumed
trainings compare.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import fastaccum as fa
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.fingerprint.differences import differences
from fastaccum.fingerprint.objects import describe
from fastaccum.fingerprint.values import plain
from fastaccum.step.options import Options

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def description(trainer):
    """Describes an unbuilt trainer, as a checkpoint and a worker would."""
    sample = trainer._setup.make_source(X, Y, None, trainer._present_options, batch_size=4).sample
    groups = {
        "model": trainer.model.variables,
        **{name: [] for name in ("optimizer", "loss_scale", "step")},
    }
    return trainer._builder.fingerprint.describe(groups, trainer._present_options, sample, {})


# Every argument of every class of Keras's.

LAYER = functools.partial(keras.layers.LSTM, 3)
NEEDED = {
    "units": 3,
    "filters": 2,
    "kernel_size": 2,
    "pool_size": 2,
    "rate": 0.3,
    "input_dim": 5,
    "output_dim": 4,
    "num_heads": 2,
    "key_dim": 3,
    "head_dim": 4,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "dims": (2, 1),
    "n": 2,
    "target_shape": (4, 1),
    "factor": 0.3,
    "stddev": 0.2,
    "padding": 1,
    "cropping": 1,
    "size": 2,
    "height": 4,
    "width": 4,
    "output_size": 2,
    "equation": "ab,bc->ac",
    "output_shape": 4,
    "num_tokens": 5,
    "activation": "tanh",
    "initial_learning_rate": 0.1,
    "decay_steps": 100,
    "decay_rate": 0.5,
    "boundaries": [10],
    "first_decay_steps": 50,
    "values": [0.1, 0.01],
    "num_classes": 3,
    "target_class_ids": [1],
    "scale": 0.5,
    "sensitivity": 0.5,
    "specificity": 0.5,
    "precision": 0.5,
    "recall": 0.5,
    "height_factor": 0.2,
    "width_factor": 0.2,
    "cell": lambda: keras.layers.LSTMCell(3),
    "cells": lambda: [keras.layers.LSTMCell(3)],
    "layer": LAYER,
    "function": lambda: np.abs,
    "fn": lambda: keras.losses.mean_squared_error,
}
VALUES = [
    *(
        None,
        "tanh",
        "same",
        "causal",
        "channels_first",
        "sum",
        "l2",
        "ones",
        "max_norm",
        "concat",
        "bilinear",
    ),
    *(
        "reflect",
        "PR",
        "majoring",
        "fan_out",
        "uniform",
        "multi_hot",
        "micro",
        "replace",
        "sqrtn",
        "columns",
    ),
    *(5, 2, 1, 0.25, 0.5, True, False, (2, 2), (2, 2, 2), [1, 2], [0.5, 0.5]),
]
# What moves no weight: names, initial values, other implementations of one function, what is read
# with another argument alone, and what Keras itself takes and leaves unread.
NO_CHANGE = {
    *("name", "weights", "use_cudnn", "flash_attention", "lora_alpha", "vocabulary", "idf_weights"),
    *(
        "IntegerLookup.trainable",
        "IntegerLookup.dtype",
        "StringLookup.trainable",
        "StringLookup.dtype",
    ),
    *(
        "VarianceScaling.distribution",
        "variance_scaling.distribution",
        "SimpleRNN.activity_regularizer",
    ),
}
KINDS = {
    "optimizers": keras.Optimizer,
    "schedules": keras.optimizers.schedules.LearningRateSchedule,
    "losses": keras.losses.Loss,
    "metrics": keras.metrics.Metric,
    "regularizers": keras.regularizers.Regularizer,
    "constraints": keras.constraints.Constraint,
    "initializers": keras.initializers.Initializer,
    "layers": keras.layers.Layer,
}
# How many arguments of each are changed at least.
COUNTS = dict(zip(KINDS, (170, 20, 60, 90, 5, 7, 36, 600), strict=True))
# Keras's classes that need SciPy, which neither Keras nor the extra "test" installs.
NEED_SCIPY = {keras.initializers.STFT: "initializers", keras.layers.STFTSpectrogram: "layers"}


def classes(kind):
    module = keras.optimizers.schedules if kind == "schedules" else getattr(keras, kind)
    found = {
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, KINDS[kind])
    }
    return sorted(found - {KINDS[kind]} - NEED_SCIPY.keys(), key=lambda each: each.__name__)


def changes(made, kind):
    """The arguments of a class that can be another value, with both; the class itself as it is made
    without one.
    """
    parameters = inspect.signature(made.__init__).parameters
    needed = {n: NEEDED[n] for n, p in parameters.items() if n in NEEDED and p.default is p.empty}
    needed = {n: value() if callable(value) else value for n, value in needed.items()}
    try:
        was = made(**needed)
    except (TypeError, ValueError):
        return
    yield None, was, made(**needed)
    more = {"trainable": True, "dtype": "float32"} if kind == "layers" else {}
    for name in [*more, *parameters]:
        default = needed.get(name, getattr(parameters.get(name), "default", more.get(name)))
        if (
            {name, f"{made.__name__}.{name}"} & NO_CHANGE
            or (name == "seed" and kind == "layers")
            or callable(default)
        ):
            continue
        numbers = [default * 2 + 1, default / 2 + 0.125] if type(default) in (int, float) else []
        booleans = [not default] if isinstance(default, bool) else []
        for value in [
            *booleans,
            *numbers,
            *(["mixed_float16", "float16"] if name == "dtype" else []),
            *VALUES,
        ]:
            if value != default and not _repeats(default, value):
                with contextlib.suppress(Exception):  # which takes no such value
                    yield name, was, made(**{**needed, name: value})
                    break


def _repeats(default, value):
    """Returns whether Keras takes two values for the same, as 1 and (1, 1)."""
    return (
        isinstance(default, tuple) and {*np.ravel(default)} == {value}
        if np.ndim(value) == 0
        else False
    )


def check_every_argument(found, least):
    """Asserts that each argument of these classes shows in their description: `least` arguments or
    more.
    """
    silent, false, count = [], [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made, kind in found.items():
            for name, was, now in changes(made, kind):
                same = json.dumps(describe(was)) == json.dumps(describe(now))
                count += name is not None
                if name is None and not same:
                    false.append(made.__name__)
                elif name is not None and same:
                    silent.append(f"{made.__name__}.{name}")
    assert not silent and not false
    assert count >= least


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.slow if each == "layers" else ()) for each in KINDS],
)
def test_every_argument_is_seen(kind):
    check_every_argument(dict.fromkeys(classes(kind), kind), COUNTS[kind])


def test_every_argument_is_seen_of_what_needs_scipy():
    pytest.importorskip("scipy", reason="Keras's short-time Fourier transforms need scipy")
    check_every_argument(NEED_SCIPY, 13)


# Classes and functions of the user's.


class Factor:
    """A regulariser, a constraint, a schedule or an initialiser, as they are called."""

    def __init__(self, factor):
        self._factor = factor

    def __call__(self, x, dtype=None):
        return self._factor * keras.ops.sum(x)


class Regularizer(Factor, keras.regularizers.Regularizer):
    pass


class Constraint(Factor, keras.constraints.Constraint):
    pass


class Initializer(Factor, keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.full(shape, self._factor)


class Schedule(Factor, keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return self._factor

    def get_config(self):
        return {}


class OfKeras(keras.optimizers.schedules.CosineDecay):
    def get_config(self):
        return {}


class Layer(keras.layers.Layer):
    gain = 1.0

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self._factor = factor

    def call(self, x):
        return x * self._factor * self.gain

    def get_config(self):
        raise AttributeError("'Layer' object has no attribute 'rope_scaling_factor'")


class Loss(keras.losses.Loss):
    def __init__(self, factor):
        super().__init__()
        self.held = {"factors": [factor]}

    def call(self, y_true, y_pred):
        return self.held["factors"][0] * (y_true - y_pred) ** 2


class Metric(keras.metrics.Mean):
    def __init__(self, factor):
        super().__init__()
        self.scale = np.array([factor])

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(self.scale * y_pred)


class Optimizer(keras.optimizers.SGD):
    def __init__(self, factor):
        super().__init__(0.1)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.factor, variable, learning_rate)


class Settings:
    """Holds a program's options, some of which do not matter to its training."""

    def __init__(self, **values):
        vars(self).update(values)


def closed_over(factor):
    return lambda y_true, y_pred: factor * (y_true - y_pred) ** 2


def with_default(factor):
    def loss(y_true, y_pred, factor=factor):
        return factor * (y_true - y_pred) ** 2

    return loss


def with_keyword_default(factor):
    def loss(y_true, y_pred, *, factor=factor):
        return factor * (y_true - y_pred) ** 2

    return loss


FACTOR = 1.0


def of_global(factor):
    def loss(y_true, y_pred):
        return FACTOR * (y_true - y_pred) ** 2

    return type(loss)(loss.__code__, {**globals(), "FACTOR": factor}, "loss")


def of_global_within(factor):
    def loss(y_true, y_pred):
        return sum(FACTOR * each for each in [(y_true - y_pred) ** 2])

    return type(loss)(loss.__code__, {**globals(), "FACTOR": factor}, "loss")


def of_helper(factor):
    inner = closed_over(factor)

    def loss(y_true, y_pred):
        return inner(y_true, y_pred) + 1

    return loss


def of_settings(factor):
    settings = Settings(factor=factor, resume=factor > 1)

    def loss(y_true, y_pred):
        return settings.factor * (y_true - y_pred) ** 2

    return loss


def edited(factor):
    line = f"def loss(y, p):\n    '''A loss.'''\n    return {factor} * (y - p) ** 2\n"
    exec(line, made := {})
    return made["loss"]


def dense(**options):
    return keras.layers.Dense(2, **options)


def exempt(optimizer, *names):
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


def model_of(*layers):
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


def trainer_of(
    layers=(), optimizer="sgd", loss="mse", metrics=(), after=lambda trainer: None, **options
):
    keras.utils.set_random_seed(0)
    trainer = fa.Trainer(
        model_of(*layers), optimizer, loss, metrics, **{"jit_compile": False, **options}
    )
    after(trainer)
    return trainer


def of_layer(**values):
    return lambda trainer: [
        setattr(trainer.model.layers[0], name, value) for name, value in values.items()
    ]


def of_optimizer(**values):
    return lambda trainer: [
        setattr(trainer.optimizer, name, value) for name, value in values.items()
    ]


def of_kernel(**values):
    return lambda trainer: [
        setattr(trainer.model.layers[0].kernel, name, value) for name, value in values.items()
    ]


def frozen(names):
    def tell(trainer):
        for variable in trainer.model.variables:
            variable.trainable = variable.name not in names

    return tell


class OwnModel(keras.Model):
    def __init__(self, factor):
        super().__init__()
        self.dense, self.factor = keras.layers.Dense(1), factor
        self.build((None, 4))

    def call(self, x):
        return self.dense(x) * self.factor


# What makes a trainer from a number, of which another number is another training.
MADE = {
    **{
        f"{what}_regularizer": lambda f, what=what: trainer_of(
            [dense(**{f"{what}_regularizer": Regularizer(f)})]
        )
        for what in ("kernel", "bias", "activity")
    },
    "plain regularizer": lambda f: trainer_of([dense(kernel_regularizer=Factor(f))]),
    "regularizer function": lambda f: trainer_of(
        [dense(kernel_regularizer=lambda w: f * keras.ops.sum(w))]
    ),
    "constraint": lambda f: trainer_of([dense(kernel_constraint=Constraint(f))]),
    "initializer": lambda f: trainer_of([dense(bias_initializer=Initializer(f))]),
    "activation": lambda f: trainer_of([dense(activation=lambda x: f * x)]),
    "lambda": lambda f: trainer_of([keras.layers.Lambda(lambda x: f * x)]),
    "layer without a get_config that works": lambda f: trainer_of([Layer(f)]),
    "regularizer of a cell": lambda f: trainer_of(
        [
            keras.layers.Reshape((2, 2)),
            keras.layers.RNN(keras.layers.GRUCell(2, kernel_regularizer=Regularizer(f))),
        ]
    ),
    "subclassed model": lambda f: fa.Trainer(OwnModel(f), "sgd", "mse"),
    "loss": lambda f: trainer_of(loss=Loss(f)),
    "loss by output": lambda f: trainer_of(loss=[Loss(f)]),
    "loss_weights": lambda f: trainer_of(loss_weights=[f]),
    "huber": lambda f: trainer_of(loss=keras.losses.Huber(f)),
    "closure": lambda f: trainer_of(loss=closed_over(f)),
    "partial": lambda f: trainer_of(loss=functools.partial(with_default(0.0), factor=f)),
    "method": lambda f: trainer_of(loss=Loss(f).call),
    "default": lambda f: trainer_of(loss=with_default(f)),
    "keyword default": lambda f: trainer_of(loss=with_keyword_default(f)),
    "global": lambda f: trainer_of(loss=of_global(f)),
    "global of a function within": lambda f: trainer_of(loss=of_global_within(f)),
    "helper": lambda f: trainer_of(loss=of_helper(f)),
    "settings": lambda f: trainer_of(loss=of_settings(f)),
    "code": lambda f: trainer_of(loss=edited(f)),
    "tf.function": lambda f: trainer_of(loss=tf.function(closed_over(f))),
    "metric": lambda f: trainer_of(metrics=[Metric(f)]),
    "metric function": lambda f: trainer_of(metrics=[closed_over(f)]),
    "argument of a metric": lambda f: trainer_of(
        metrics=[keras.metrics.BinaryAccuracy(threshold=f / 4)]
    ),
    "weighted metric": lambda f: trainer_of(weighted_metrics=[Metric(f)]),
    "optimizer": lambda f: trainer_of(optimizer=Optimizer(f)),
    "schedule": lambda f: trainer_of(optimizer=keras.optimizers.SGD(Schedule(f))),
    "schedule of Keras's": lambda f: trainer_of(optimizer=keras.optimizers.SGD(OfKeras(f, 100))),
    "rate function": lambda f: trainer_of(optimizer=keras.optimizers.SGD(lambda: f)),
    "legacy schedule": lambda f: trainer_of(
        optimizer=tf_keras.optimizers.legacy.SGD(
            keras.optimizers.schedules.CosineDecay(0.1, int(9 * f))
        )
    ),
    "exclude_from_weight_decay": lambda f: trainer_of(
        optimizer=exempt(keras.optimizers.AdamW(), *["bias"][: int(f > 1)])
    ),
    "optimizer attribute": lambda f: trainer_of(
        optimizer="adamw", after=lambda t: setattr(t.optimizer, "weight_decay", f)
    ),
    "ema": lambda f: trainer_of(
        optimizer="adam", after=lambda t: setattr(t.optimizer, "use_ema", f > 1)
    ),
    "layer attribute": lambda f: trainer_of(
        [keras.layers.Dropout(0.1)], after=of_layer(rate=f / 4)
    ),
    "trainable layer": lambda f: trainer_of([dense()], after=of_layer(trainable=f > 1)),
    "trainable variable": lambda f: trainer_of([dense()], after=frozen(["bias"][: int(f > 1)])),
    "regularizer of a variable": lambda f: trainer_of(
        [dense()], after=of_kernel(regularizer=keras.regularizers.L2(f))
    ),
    "constraint of a variable": lambda f: trainer_of(
        [dense()], after=of_kernel(constraint=keras.constraints.MaxNorm(f))
    ),
    "class attribute": lambda f: trainer_of([type("Layer", (Layer,), {"gain": f})(1.0)]),
}


@pytest.mark.parametrize("what", MADE)
def test_code_and_settings_of_users_change_the_fingerprint(what):
    was, same, other = (description(MADE[what](factor)) for factor in (1.0, 1.0, 2.0))
    assert not differences(was, same)
    assert differences(was, other)


def test_settings_that_a_program_does_not_read_may_differ():
    """Options that say how to run, docstrings, sets in another order, where a function stands."""

    def of(resume, text):
        settings = Settings(factor=1.0, resume=resume, begun=object())
        exec(text, made := {"settings": settings})
        return description(trainer_of(loss=made["loss"]))

    text = (
        "def loss(y, p):\n    '''{}'''\n    return settings.factor * (y - p) ** len({{'a', 'b'}})\n"
    )
    assert not differences(of(False, text.format("One.")), of(True, "\n\n" + text.format("Two.")))


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Proxy:
    """Raises errors other than AttributeError for missing attributes."""

    factor = 1.0

    def __getattr__(self, name):
        raise RuntimeError(name)


LOOP = {"factor": 1.0}
LOOP["itself"] = [LOOP]


@pytest.mark.parametrize(
    "settings",
    [Attributes(factor=1.0), Proxy(), LOOP, "no UTF-8: \udcff"],
    ids=lambda s: type(s).__name__,
)
def test_whatever_a_loss_reads_is_described(settings):
    text = json.dumps(plain(describe(lambda y, p: (y, settings.factor, p))), ensure_ascii=False)
    assert b"settings" in text.encode()


def test_only_settings_that_the_code_names_are_compared():
    def described(**settings):
        return describe(lambda y, p: settings["factor"] * (y - p))

    assert described(factor=1.0, epochs=1) == described(factor=1.0, epochs=2)
    assert described(factor=1.0, epochs=1) != described(factor=2.0, epochs=1)


def test_large_values_are_compared_by_their_checksum():
    vocabulary = [f"word {number}" for number in range(10**5)]
    tables = [vocabulary, dict.fromkeys(vocabulary, 0.5), "".join(vocabulary), set(vocabulary)]
    others = [
        vocabulary[::-1],
        dict.fromkeys(vocabulary, 0.25),
        "".join(vocabulary[::-1]),
        {*vocabulary[1:]},
    ]
    for table, other in zip(tables, others, strict=True):
        was, now = (describe(lambda y, p, t=each: (y, t, p)) for each in (table, other))
        assert len(json.dumps(was)) < 500
        assert was != now


SECRET, SECRETS = (
    "hunter2",
    {"token": b"hunter2", "hosts": ["hunter2"], "names": {"hunter2", "hunter1"}},
)


class Secretive(Loss):
    def __init__(self, secret):
        super().__init__(1.0)
        self.secret = secret

    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred) if self.secret else y_pred


def test_texts_that_a_loss_reads_are_told_by_their_checksums():
    def made(secret, secrets):
        def loss(y, p, default=secret):
            return y - p if SECRET and default and secret and secrets else p

        globals_ = {**globals(), "SECRET": secret}
        return type(loss)(loss.__code__, globals_, "loss", (secret,), loss.__closure__)

    other = {"token": b"other", "hosts": ["other"], "names": {"other"}}
    for was, now, names in [
        (made(SECRET, SECRETS), made("other", SECRETS), ["loss reads SECRET", "loss reads secret"]),
        (
            made(SECRET, SECRETS),
            made(SECRET, other),
            [f"loss reads secrets.{name}" for name in other],
        ),
        (Secretive(SECRET), Secretive("other"), ["secret"]),
        (
            functools.partial(closed_over(1.0), SECRET),
            functools.partial(closed_over(1.0), "other"),
            ["of"],
        ),
    ]:
        described = plain(describe(was))
        assert "hunter" not in json.dumps(described)
        assert not differences(described, plain(describe(was)))
        told = differences(described, plain(describe(now)))
        assert all(any(each.startswith(f"{name}: ") for each in told) for name in names), told


def _settings(form, scale):
    """A loss that reads a setting which stands in a class."""

    class Settings:
        weight = scale
        calls = 0

        @staticmethod
        def weigh(x):
            Settings.calls += 1
            return Settings.weight * x

    class Inherited(Settings):
        pass

    @dataclasses.dataclass
    class Data:
        weight: float = scale

    forms = {
        "a class": lambda y, p: Settings.weight * (y - p) ** 2,
        "a subclass": lambda y, p: Inherited.weight * (y - p) ** 2,
        "a dataclass": lambda y, p: Data.weight * (y - p) ** 2,
        "a static method": lambda y, p: Settings.weigh((y - p) ** 2),
    }
    return forms[form]


@pytest.mark.parametrize("form", ["a class", "a subclass", "a dataclass", "a static method"])
def test_settings_that_stand_in_a_class_are_compared(form):
    loss = _settings(form, 1.0)
    described = plain(describe(loss))
    loss(1.0, 0.5)
    assert not differences(described, plain(describe(loss)))
    assert not differences(described, plain(describe(_settings(form, 1.0))))
    assert any(
        "weight" in each for each in differences(described, plain(describe(_settings(form, 3.0))))
    )


def test_an_attribute_is_compared_if_another_of_its_name_is_set_elsewhere():
    class Holder:
        pass

    def made(scale):
        settings, seen = Holder(), Holder()
        settings.scale = scale

        def loss(y, p):
            seen.scale = 1
            return settings.scale * (y - p) ** 2

        return loss

    loss = made(1.0)
    described = plain(describe(loss))
    loss(1.0, 0.5)
    assert not differences(described, plain(describe(loss)))
    assert differences(described, plain(describe(made(5.0))))


CALLS = 0


class Counting(Layer):
    """Keeps and counts values that it does not read again."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x)


def counting(y, p):
    global CALLS
    CALLS += 1
    return keras.ops.mean((y - p) ** 2, -1)


def test_counters_of_layers_and_losses_are_no_other_training(tmp_path):
    trainer = trainer_of([Counting(1.0)], loss=counting)
    for epochs in (1, 2):
        trainer.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, checkpoint_dir=tmp_path)
    assert CALLS > 1
    assert len(trainer.model.history.epoch) == 2


SEEN = []


class Annealed(Layer):
    """Scales by a factor that a callback changes in training."""


def appending(y, p):
    SEEN.append(len(SEEN))
    return keras.ops.mean((y - p) ** 2, -1)


def test_changes_made_by_training_are_no_other_training(tmp_path):
    def fit(epochs):
        def anneal(epoch, logs=None):
            trainer.model.layers[0]._factor /= 2

        options = {
            "callbacks": [keras.callbacks.LambdaCallback(on_epoch_end=anneal)],
            "checkpoint_dir": tmp_path,
        }
        return trainer.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, **options)

    def made():
        SEEN.clear()
        return trainer_of([Annealed(1.0)], loss=appending)

    trainer = made()
    fit(1)
    assert SEEN and trainer.model.layers[0]._factor == 0.5
    assert len(fit(2).epoch) == 2
    trainer.model.layers[0]._factor = 7.0  # which is not of training
    for _ in range(2):
        with pytest.raises(
            IncompatibleCheckpointError, match=r"annealed._factor: 1.0 was saved, now 7.0$"
        ):
            fit(3)
    trainer.model.layers[0]._factor = 0.25
    assert len(fit(3).epoch) == 3
    trainer = made()  # as in a new process
    assert len(fit(4).epoch) == 4


def test_values_that_a_layer_only_records_may_differ():
    """The time of a call, or its last result, which none of its code reads."""

    class Noting(keras.layers.Layer):
        def call(self, inputs):
            self.seen = time.time()
            return inputs

    def of():
        layer = Noting()
        layer(X)
        return describe(layer)

    assert not differences(of(), of())


# The arguments of Trainer, each with another value. One that is not in this table, or in no
# manifest, fails a test.

ARGUMENTS = {
    "model": lambda: model_of(dense()),
    "optimizer": "adam",
    "loss": "mae",
    "metrics": ["mae"],
    "loss_weights": [2.0],
    "weighted_metrics": ["mae"],
    "gradient_accumulation_steps": 2,
    "loss_scale": 8.0,
    "clip_norm": 1.0,
    "fp32_weight_gradients": False,
    "jit_compile": True,
    "steps_per_execution": 2,
    "on_nonfinite": "raise",
    "own_loss_reduction": "sum",
    "scan_layers": True,
    "shard_optimizer": False,
    "max_programs": 2,
    "flash_attention": False,
    "float8": True,
    "optimizer_state_dtype": "int8",
    "stochastic_rounding": False,
    "compile_cache": None,
}
MOVE_NO_WEIGHT = {*Options.names(must_agree=False), "compile_cache"}
# Where a manifest has what is not an option of the train step.
GROUPS = {
    "metrics": "loss.metrics",
    "weighted_metrics": "loss.weighted_metrics",
    "loss_weights": "loss.loss_weights",
}
GROUPS |= {name: name for name in ("model", "optimizer", "loss", "loss_scale")}


def in_half_precision():
    return [keras.layers.Dense(16, dtype="mixed_bfloat16") for _ in range(2)]


@pytest.mark.filterwarnings("ignore:float8=True. this device has no float8 products")
@pytest.mark.parametrize(
    "name", [name for name in inspect.signature(fa.Trainer.__init__).parameters if name != "self"]
)
def test_every_argument_of_a_trainer_is_in_the_manifest_or_moves_no_weight(tmp_path, name):
    def fit(epochs, **other):
        arguments = {
            "model": model_of(*layers()),
            "optimizer": "sgd",
            "loss": "mse",
            "jit_compile": False,
            **other,
        }
        keras.utils.set_random_seed(0)
        # One micro-batch a step, however many are allowed: the same update.
        options = {"batch_size": 8, "epochs": epochs, "verbose": 0, "checkpoint_dir": tmp_path}
        return fa.Trainer(**arguments).fit(X, Y, **options)

    assert name in ARGUMENTS, (
        "give it another value here, and a rule in step/options.py if it is an option"
    )
    layers = in_half_precision if name == "float8" else list
    value = ARGUMENTS[name]
    other = {name: value() if callable(value) else value}
    fit(1)
    if name in MOVE_NO_WEIGHT:
        assert len(fit(2, **other).epoch) == 2
        return
    with pytest.raises(IncompatibleCheckpointError) as raised:
        fit(2, **other)
    assert f" {GROUPS.get(name, f'batch plan.{name}')}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epsilon", 0.1), ("floatx", "float64"), ("image_data_format", "channels_first")],
)
def test_settings_of_keras_are_compared(name, value):
    was = description(trainer_of())
    before = getattr(keras.config, name)()
    getattr(keras.config, f"set_{name}")(value)
    try:
        now = description(trainer_of())
    finally:
        getattr(keras.config, f"set_{name}")(before)
    assert f"batch plan.{name}: {before} was saved, now {value}" in differences(was, now)


def test_code_of_another_python_is_not_compared():
    was = description(trainer_of(loss=edited(1.0)))
    other = json.loads(
        json.dumps(was)
        .replace(f"of Python 3.{sys.version_info[1]}", "of Python 3.99")
        .replace('"code": "', '"code": "0')
    )
    assert was != other and not differences(was, other)


# Other processes, and trainings that are resumed.

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import keras
import test_run_fingerprint as tests
from fastaccum.fingerprint.objects import describe

made = {what: tests.description(make(1.0)) for what, make in tests.MADE.items()}
for kind in tests.KINDS:
    for each in tests.classes(kind):
        made[each.__name__] = [describe(was) for name, was, _ in tests.changes(each, kind) if name is None]
json.dump(made, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_another_process_describes_the_same(tmp_path):
    """Describes without a seed: sets and dicts have another order, and addresses and random numbers
    differ.
    """
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / seed)]
        subprocess.run(arguments, env=environment, check=True, cwd=os.path.dirname(__file__))
    first, second = (json.loads((tmp_path / seed).read_text()) for seed in ("1", "2"))
    assert len(first) > 250
    assert not differences(first, second)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        (
            "kernel_regularizer",
            "model.layers.dense.kernel_regularizer._factor: 1.0 was saved, now 2.0",
        ),
        (
            "layer without a get_config that works",
            "model.layers.layer._factor: 1.0 was saved, now 2.0",
        ),
        ("closure", "loss.loss.<lambda> reads factor: 1.0 was saved, now 2.0"),
        ("schedule", "optimizer.learning_rate._factor: 1.0 was saved, now 2.0"),
        (
            "exclude_from_weight_decay",
            "model.trained.sequential/dense/bias.decays: nothing was saved, now False",
        ),
        ("own_loss_reduction", "batch plan.own_loss_reduction: mean was saved, now sum"),
    ],
)
def test_another_training_is_refused_by_name(tmp_path, what, names):
    made = MADE | {
        "own_loss_reduction": lambda f: trainer_of(own_loss_reduction="mean" if f == 1 else "sum")
    }
    fit = functools.partial(
        made[what](1.0).fit, X, Y, batch_size=4, verbose=0, checkpoint_dir=tmp_path
    )
    fit(epochs=1)
    assert fit.func.__self__ is not (again := made[what](1.0))
    assert (
        len(again.fit(X, Y, batch_size=4, verbose=0, checkpoint_dir=tmp_path, epochs=2).epoch) == 2
    )
    other = made[what](2.0)
    before = other.model.get_weights()
    with pytest.raises(IncompatibleCheckpointError) as raised:
        other.fit(X, Y, batch_size=4, verbose=0, checkpoint_dir=tmp_path, epochs=3)
    assert names in str(raised.value)
    assert all((a == b).all() for a, b in zip(before, other.model.get_weights(), strict=True))
