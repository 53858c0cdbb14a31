"""Checks that need several logical devices, hence a process of their own: `python on_replicas.py
COUNT [NAME ...]`.

Prints, as its last line, {name: traceback or null} as JSON. `test_replicas.py` runs it.
"""

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters.models import Model
from fastaccum.distribute import replicas

COUNT = int(sys.argv[1]) if __name__ == "__main__" else 1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 6)).astype("float32")
Y = RNG.normal(size=(23, 3)).astype("float32")
WEIGHTS = RNG.uniform(0.1, 2.0, size=23).astype("float32")


@functools.cache
def strategy():
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(COUNT)])


def dense(seed=1, **options):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3, **options),
        ]
    )


def tokens():
    keras.utils.set_random_seed(1)
    ids = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(11, 6, mask_zero=True)(ids)
    return keras.Model(ids, keras.layers.Dense(4)(keras.layers.Dense(8, activation="tanh")(hidden)))


def replicated(make):
    with strategy().scope():
        return make()


def values(trainer):
    """Every variable that a step may change, one list of NumPy arrays a replica."""
    replicas = trainer._replicas
    variables = [v.value for v in (*trainer.model.variables, *trainer.optimizer.variables)]
    components = [
        [v.numpy() for v in replicas.strategy.experimental_local_results(each)]
        for each in variables
    ]
    assert all(len(each) == COUNT for each in components)
    # of no strategy: copied before each step
    own = trainer.loss_scale.variables, [trainer._engine.running.skipped]
    for variable in (v for each in own for v in each):
        copies = replicas._copies[id(variable.handle)][1]
        components.append([variable.numpy(), *(copy.numpy() for copy in copies)])
    return list(zip(*components, strict=True))


def assert_same_on_all(trainer):
    first, *others = values(trainer)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def assert_close(ours, theirs, tolerance=3e-6):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def compare(make, fit, trainer_options, predict_on):
    """Trains on one device, without XLA, and on several; histories, evaluations, predictions and
    weights must agree.
    """
    seen = []
    for model, own in ((make(), {"jit_compile": False}), (replicated(make), {})):
        trainer = fa.Trainer(model, **{**trainer_options(), **own})
        keras.utils.set_random_seed(3)
        history, evaluated = fit(trainer)
        seen.append(
            (
                history,
                evaluated,
                trainer.predict(predict_on, verbose=0, batch_size=5),
                model.get_weights(),
            )
        )
    assert_same_on_all(trainer)
    (history, evaluated, predicted, weights), (history_n, evaluated_n, predicted_n, weights_n) = (
        seen
    )
    assert history.keys() == history_n.keys()
    for name in history:
        np.testing.assert_allclose(
            history_n[name], history[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert_close(evaluated_n, evaluated, 1e-5)
    assert_close([predicted_n], [predicted], 1e-5)
    assert_close(weights_n, weights)
    return trainer


def check_a_plan_is_for_the_rows_of_one_replica():
    model = replicated(dense)
    trainer = replicated(lambda: fa.Trainer(model, "adamw", "mse", gradient_accumulation_steps=2))
    before, sample = trainer.model.get_weights(), (X[:1], Y[:1])
    plan = fa.plan(trainer, sample, global_batch_size=4 * COUNT, memory_limit="1GiB")
    assert (plan.batch_size, plan.accumulation_steps) == (4 * COUNT, 1)
    assert {c.batch_size for c in plan.considered} <= {COUNT, 2 * COUNT, 4 * COUNT}
    assert_close(trainer.model.get_weights(), before, 0)
    weights = []
    for size, options in (("auto", {"global_batch_size": 4 * COUNT}), (4 * COUNT, {})):
        model = replicated(dense)
        trainer = fa.Trainer(model, "adamw", "mse")
        keras.utils.set_random_seed(3)
        trainer.fit(X, Y, batch_size=size, verbose=0, **options)
        weights.append(model.get_weights())
    assert_close(*weights, 0)
    try:
        fa.plan(trainer, sample, global_batch_size=COUNT + 1)
        raise AssertionError("rows that the replicas cannot share were not refused")
    except ValueError as error:
        assert f"shared equally by {COUNT} replicas" in str(error), error


def check_a_trainer_is_let_go():
    def train():
        model = replicated(dense)
        trainer = replicated(lambda: fa.Trainer(model, "adamw", "mse", jit_compile=False))
        trainer.fit(X, Y, batch_size=8, verbose=0)
        return [
            weakref.ref(each)
            for each in (trainer, trainer._engine, model, *(v.value for v in model.variables))
        ]

    train()
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, tf.Graph)}
    references = train()
    gc.collect()
    assert not [reference() for reference in references if reference() is not None]
    assert not [
        each for each in gc.get_objects() if isinstance(each, tf.Graph) and id(each) not in before
    ]


def check_a_metric_made_under_the_scope_goes_on_without_it():
    with tempfile.TemporaryDirectory() as folder:
        for epochs, make in ((1, replicated), (2, lambda plain: plain())):
            metrics = make(lambda: [keras.metrics.MeanAbsoluteError(name="mae")])
            trainer = fa.Trainer(make(dense), "sgd", "mse", metrics, jit_compile=False)
            trainer.fit(X, Y, batch_size=8, epochs=epochs, checkpoint_dir=folder, verbose=0)


def check_tokens_weights_tails_and_clipping():
    """An embedding (sparse gradients) with token masks, sample weights, ragged tails, clip_norm,
    Adam, shuffling and steps_per_execution; evaluate and predict; labels out of range on one
    replica.
    """
    x, y = RNG.integers(0, 11, size=(23, 5)), RNG.integers(0, 4, size=(23, 5))

    def fit(trainer):
        history = trainer.fit(
            x, y, sample_weight=WEIGHTS, batch_size=5, epochs=2, verbose=0
        ).history
        return history, trainer.evaluate(x, y, sample_weight=WEIGHTS, batch_size=5, verbose=0)

    def options():
        return {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": ["sparse_categorical_accuracy"],
            "gradient_accumulation_steps": 3,
            "clip_norm": 0.1,
            "steps_per_execution": 2,
        }

    trainer = compare(tokens, fit, options, x)

    before = values(trainer)
    bad = y.copy()
    bad[7, 0] = 9
    try:
        trainer.fit(x, bad, batch_size=23, verbose=0)
        raise AssertionError("a label out of range was not refused")
    except ValueError as error:
        assert "9" in str(error) and "labels" in str(error)
    for now, then in zip(values(trainer), before, strict=True):
        assert_close(now[: len(trainer.model.weights)], then[: len(trainer.model.weights)], 0)


def check_float8():
    """The update is that on one device of as many micro-batches, each with the same scales."""

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(32, activation="tanh", dtype="mixed_bfloat16"),
                keras.layers.Dense(16, dtype="mixed_bfloat16"),
                keras.layers.Dense(16, dtype="mixed_bfloat16", trainable=False),
                keras.layers.Dense(3, dtype="float32"),
            ]
        )
        model.layers[0].enable_lora(2)
        return model

    rows = 4 * COUNT
    x = RNG.normal(size=(2 * rows, 16)).astype("float32")
    y = RNG.normal(size=(2 * rows, 3)).astype("float32")
    options = {"float8": True, "jit_compile": False}
    alone = fa.Trainer(make(), "adam", "mse", gradient_accumulation_steps=2 * COUNT, **options)
    alone.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    weights = []
    for shares in (False, True):
        model = replicated(make)
        trainer = fa.Trainer(
            model, "adam", "mse", gradient_accumulation_steps=2, shard_optimizer=shares, **options
        )
        trainer.fit(x, y, batch_size=rows, epochs=2, verbose=0, shuffle=False)
        if not shares:
            assert_same_on_all(trainer)
        weights.append(model.get_weights())
        for ours, theirs in zip(model.get_weights(), alone.model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-6)
    for shared, whole in zip(*weights, strict=True):
        np.testing.assert_array_equal(shared, whole)


def check_stored_slots():
    """Slots and weights in fewer bytes: all replicas have the same, and shares the same again."""
    x = RNG.normal(size=(8 * COUNT, 64)).astype("float32")
    y = RNG.normal(size=(8 * COUNT, 3)).astype("float32")

    for policy, state_dtype, rounding in (
        ("float32", "int8", 1e-4),
        ("bfloat16", "bfloat16", 2**-5),  # a few units of the last place
    ):

        def make(policy=policy):
            keras.utils.set_random_seed(1)
            layers = [
                keras.layers.Dense(64, activation="tanh", dtype=policy),
                keras.layers.Dense(72, activation="tanh", dtype=policy),
                keras.layers.Dense(3, dtype=policy),
            ]
            return keras.Sequential([keras.Input((64,)), *layers])

        options = {"optimizer_state_dtype": state_dtype, "jit_compile": False}
        alone = fa.Trainer(make(), "adam", "mse", gradient_accumulation_steps=2 * COUNT, **options)
        alone.fit(x, y, batch_size=2, epochs=3, verbose=0, shuffle=False)
        weights = []
        for shares in (False, True):
            model = replicated(make)
            trainer = fa.Trainer(
                model,
                "adam",
                "mse",
                gradient_accumulation_steps=2,
                shard_optimizer=shares,
                **options,
            )
            trainer.fit(x, y, batch_size=2 * COUNT, epochs=3, verbose=0, shuffle=False)
            if not shares:
                assert_same_on_all(trainer)
            dtypes = {v.dtype.name for v in trainer._optimizer.variables if v.shape.rank > 1}
            if state_dtype == "int8":
                assert dtypes == {"int8", "float32"}, dtypes  # the last kernel is small
            else:
                assert dtypes == {"bfloat16"}, dtypes
            weights.append([np.asarray(w, "float32") for w in model.get_weights()])
            for ours, theirs in zip(weights[-1], alone.model.get_weights(), strict=True):
                np.testing.assert_allclose(ours, np.asarray(theirs, "float32"), atol=rounding)
        for shared, whole in zip(*weights, strict=True):
            np.testing.assert_array_equal(shared, whole)


def check_packed_rows():
    """The update is that on one device, and so are the shares of tokens; mixing is refused."""
    ids = [RNG.integers(1, 11, length).astype("int32") for length in (3, 8, 2, 5, 7, 1, 4, 6, 8)]
    rows = {"a": fa.pack(ids[:4], 8), "b": fa.pack(ids[4:], 8)}
    batches = fa.mix(rows, {"a": 1, "b": 1}, stop="all_exhausted").batch(3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def language_model(mixing=False):
        keras.utils.set_random_seed(1)
        tokens = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(11, 8)(tokens)
        x = x + keras.layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
        if mixing:
            x = keras.layers.Conv1D(8, 3, padding="same")(x)
        return keras.Model(tokens, keras.layers.Dense(11)(x))

    alone = fa.Trainer(
        language_model(), keras.optimizers.SGD(0.1), loss, gradient_accumulation_steps=2
    )
    model = replicated(language_model)
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), loss, gradient_accumulation_steps=2)
    expected = alone.fit(batches, epochs=2, verbose=0).history
    history = trainer.fit(batches, epochs=2, verbose=0).history
    assert_same_on_all(trainer)
    for name, values_of_epochs in expected.items():
        np.testing.assert_allclose(history[name], values_of_epochs, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(model.get_weights(), alone.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    np.testing.assert_allclose(
        trainer.evaluate(batches, verbose=0), alone.evaluate(batches, verbose=0), rtol=1e-5
    )

    model = replicated(lambda: language_model(mixing=True))
    with pytest.raises(ValueError, match="Conv1D"):
        fa.Trainer(model, "sgd", loss).fit(batches, verbose=0)


def check_losses_that_compute_with_the_number_of_rows():
    """That number is the update's, and in an evaluation the batch's, however many replicas share
    the rows.
    """

    class ByRows(keras.losses.Loss):
        def call(self, y, y_pred):
            return tf.reduce_sum((y - y_pred) ** 2, -1) / tf.cast(tf.shape(y_pred)[0], tf.float32)

    for reduction, rows, size in (("sum", 23, 5), ("sum_over_batch_size", 20, 4)):

        def fit(trainer, rows=rows, size=size):
            history = trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0).history
            return history, [trainer.evaluate(X[:rows], Y[:rows], batch_size=size, verbose=0)]

        def options(reduction=reduction):
            loss = ByRows(reduction=reduction)
            return {
                "optimizer": "sgd",
                "loss": loss,
                "gradient_accumulation_steps": 2,
                "jit_compile": False,
            }

        compare(dense, fit, options, X)


def check_logs_that_a_model_makes():
    """By `get_metrics_result` and `reset_metrics` of its own; and what callbacks read of it in
    mid-epoch.
    """

    class Own(keras.Sequential):
        epochs = 0

        def get_metrics_result(self):
            results = super().get_metrics_result()
            return {**results, "perplexity": keras.ops.exp(results["loss"])}

        def reset_metrics(self):
            super().reset_metrics()
            self.epochs += 1

    def fit(trainer):
        read = []

        class Read(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                results = self.model.get_metrics_result()
                read.append([float(results[name]) for name in ("loss", "mae", "perplexity")])
                assert_close(
                    read[-1], [float(logs[name]) for name in ("loss", "mae", "perplexity")], 1e-5
                )

        history = trainer.fit(
            X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, callbacks=[Read()]
        ).history
        assert trainer.model.epochs == 2
        return history, [*read, trainer.evaluate(X, Y, batch_size=5, verbose=0)]

    options = {
        "optimizer": "sgd",
        "loss": "mse",
        "metrics": ["mae"],
        "gradient_accumulation_steps": 2,
    }
    trainer = compare(lambda: Own(dense().layers), fit, lambda: options, X)
    assert {"loss", "mae", "perplexity"} <= trainer.evaluate(
        X, Y, return_dict=True, verbose=0
    ).keys()


def check_losses_that_are_one_number_for_a_batch():
    """A mean and a sum with sample weights, which scale the batch, and a pair of sums, with a short
    last update.
    """

    def mean(y, p):
        return tf.reduce_mean(tf.square(y - p))

    def summed(y, p):
        return tf.reduce_sum(tf.square(y - p)) / 64

    def pair(y, p):
        mask = tf.cast(y > 0, tf.float32)
        return tf.reduce_sum(mask * tf.square(y - p)), tf.reduce_sum(mask)

    def of_keras(y, p):  # which divides by the number of replicas
        return keras.losses.MeanSquaredError()(y, p) + keras.losses.MeanAbsoluteError()(y, p)

    x, y = X[:20], Y[:20]
    for loss, weights in (
        (mean, WEIGHTS[:20]),
        (summed, WEIGHTS[:20]),
        (of_keras, None),
        (pair, None),
    ):
        compare(
            dense,
            lambda trainer, weights=weights: (
                trainer.fit(
                    x, y, sample_weight=weights, batch_size=4, shuffle=False, verbose=0
                ).history,
                [trainer.evaluate(x, y, sample_weight=weights, batch_size=4, verbose=0)],
            ),
            lambda loss=loss: {"optimizer": "sgd", "loss": loss, "gradient_accumulation_steps": 2},
            x,
        )


def check_variables_as_loss_weights():
    """A weight that a callback anneals has its value on every replica, made inside the scope or
    outside of it.
    """

    class Anneal(keras.callbacks.Callback):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def on_train_batch_end(self, batch, logs=None):
            self.weight.assign(self.weight + 0.5)

    def two_outputs():
        keras.utils.set_random_seed(1)
        x = keras.Input((6,))
        return keras.Model(x, [keras.layers.Dense(3)(x), keras.layers.Dense(3)(x)])

    def trained(model, weight, rows):
        options = {
            "loss_weights": [1.0, weight],
            "gradient_accumulation_steps": 2,
            "jit_compile": False,
        }
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), ["mse", "mae"], **options)
        data = X[:16], [Y[:16], Y[:16]]
        trainer.fit(
            *data, batch_size=rows, epochs=2, shuffle=False, verbose=0, callbacks=[Anneal(weight)]
        )
        return model.get_weights()

    expected = trained(two_outputs(), keras.Variable(0.0), 4)
    weights = [
        keras.Variable(0.0),
        replicated(lambda: keras.Variable(0.0)),
        replicated(lambda: tf.Variable(0.0)),
    ]
    for weight in weights:
        assert_close(trained(replicated(two_outputs), weight, 4), expected)
    try:
        trained(replicated(two_outputs), tf.Variable(0.0), 4)
        raise AssertionError("a variable of one device was not refused")
    except ValueError as error:
        assert "make it inside, or a keras.Variable" in str(error), error


def check_layers_that_compute_with_the_number_of_rows_are_told_of():
    def make():
        keras.utils.set_random_seed(1)
        layer = keras.layers.Lambda(lambda h: h / tf.sqrt(tf.cast(tf.shape(h)[0], h.dtype)))
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), layer])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fa.Trainer(replicated(make), "sgd", "mse", jit_compile=False).fit(
            X[:20], Y[:20], batch_size=4, verbose=0
        )
    assert any(
        "computes with the number of rows in its batch" in str(each.message) for each in caught
    )


def check_several_outputs():
    """Two losses with divisors of their own, one a sum, with a regulariser, which counts once."""

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
        return keras.Model(
            inputs,
            [keras.layers.Dense(3, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)],
        )

    y = [Y, Y[:, :1]]

    def fit(trainer):
        history = trainer.fit(
            X, y, sample_weight=[WEIGHTS, WEIGHTS[::-1]], batch_size=5, epochs=2, verbose=0
        ).history
        return history, trainer.evaluate(X, y, batch_size=5, verbose=0)

    def options():
        losses = [keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), "mae"]
        return {
            "optimizer": "sgd",
            "loss": losses,
            "loss_weights": [0.3, 2.0],
            "gradient_accumulation_steps": 2,
            "jit_compile": False,
        }

    seen = []
    for model in (make(), replicated(make)):
        trainer = fa.Trainer(model, **options())
        keras.utils.set_random_seed(3)
        seen.append((*fit(trainer), model.get_weights()))
    for name in seen[0][0]:
        np.testing.assert_allclose(
            seen[1][0][name], seen[0][0][name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert_close(seen[1][1], seen[0][1], 1e-5)
    assert_close(seen[1][2], seen[0][2])
    assert_same_on_all(trainer)


class Own(keras.Model):
    """A loss and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")
        self.out = keras.layers.Dense(3)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.size.update_state(tf.reduce_sum(tf.abs(y_pred), 1))
        return loss + tf.reduce_mean(y_pred**2)


def check_a_loss_and_a_metric_of_its_own():
    """The compiled loss within it is that of all rows, by their weights."""

    def make():
        keras.utils.set_random_seed(1)
        model = Own()
        model.build((None, 6))
        return model

    def fit(trainer):
        given = {"sample_weight": WEIGHTS[:20], "batch_size": 4, "verbose": 0}
        return trainer.fit(X[:20], Y[:20], epochs=2, **given).history, trainer.evaluate(
            X[:20], Y[:20], **given
        )

    def options():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return {
            "optimizer": "sgd",
            "loss": loss,
            "gradient_accumulation_steps": 2,
            "jit_compile": False,
        }

    compare(make, fit, options, X)
    metrics = type("Metrics", (Own,), {"compute_metrics": lambda self, *arrays: {}})
    try:
        fit(fa.Trainer(replicated(metrics), **options()))
        raise AssertionError("a compute_metrics was not refused")
    except ValueError as error:
        assert "overrides compute_metrics" in str(error)


def check_a_loss_and_a_layer_that_call_python():
    """Whose gradients are those of the last call in the process: each replica's must be its own."""

    def through_python(function, *tensors, like):
        return tf.ensure_shape(tf.py_function(function, tensors, tf.float32), like.shape)

    def make():
        model = dense()
        model.add(
            keras.layers.Lambda(lambda x: through_python(lambda t: tf.tanh(t) * 2.0, x, like=x))
        )
        return model

    def loss(y_true, y_pred):
        return through_python(
            lambda a, b: tf.reduce_mean((a - b) ** 2, -1), y_true, y_pred, like=y_pred[:, 0]
        )

    def fit(trainer):
        history = trainer.fit(X, Y, batch_size=5, epochs=3, shuffle=False, verbose=0).history
        return history, [trainer.evaluate(X, Y, batch_size=5, verbose=0)]

    compare(
        make, fit, lambda: {"optimizer": "adam", "loss": loss, "gradient_accumulation_steps": 2}, X
    )


def check_several_strategies():
    """By turns, on the same devices and on fewer, though TensorFlow numbers their collectives
    alike.
    """
    trainers, expected = [], None
    for devices, width in ((COUNT, 8), (COUNT, 5), (1, 8), (COUNT, 8)):
        own = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])
        keras.utils.set_random_seed(1)
        with own.scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(3)]
            )
        trainers.append(
            fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2, jit_compile=False)
        )
        trainers[-1].fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    for trainer in trainers:
        trainer.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
        trainer.predict(X, verbose=0)
        expected = trainer.model.get_weights() if expected is None else expected
    for trainer in trainers[2:]:
        assert_close(trainer.model.get_weights(), expected)


def check_labels_out_of_range_op_by_op():
    """Of one replica, without XLA: no replica counts an update, in any order in which they come to
    it.
    """
    labels = np.arange(20) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for row in (0, 9, 19):
        model = replicated(dense)
        trainer = fa.Trainer(model, "adam", loss, gradient_accumulation_steps=2, jit_compile=False)
        before = model.get_weights()
        bad = labels.copy()
        bad[row] = 7
        for _ in range(4):
            try:
                trainer.train_step((X[:20].reshape(2, 10, 6), bad.reshape(2, 10)))
                raise AssertionError("a label out of range was not refused")
            except ValueError as error:
                assert "7" in str(error)
            iterations = trainer.optimizer.iterations.value
            counts = [
                int(v.numpy())
                for v in trainer._replicas.strategy.experimental_local_results(iterations)
            ]
            assert counts == [0] * COUNT, counts
        assert all(map(np.array_equal, model.get_weights(), before))
        trainer.train_step((X[:20].reshape(2, 10, 6), labels.reshape(2, 10)))
        assert_same_on_all(trainer)


def check_overflow():
    """mixed_float16: one replica's rows overflow, all replicas skip the step and back off alike."""
    x = X.copy()
    x[4] = 6e4  # the last row of a first micro-batch of 5: the last replica's

    def make():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return dense()
        finally:
            keras.config.set_dtype_policy("float32")

    seen = []
    for model, jit_compile in ((make(), False), (replicated(make), True)):
        loss_scale = fa.DynamicLossScale(init_scale=2.0**10, growth_interval=2, backoff_factor=0.25)
        options = {"gradient_accumulation_steps": 2, "jit_compile": jit_compile}
        trainer = fa.Trainer(model, "adamw", "mse", loss_scale=loss_scale, **options)
        before = model.get_weights()
        rows = lambda a, at: a[at : at + 10].reshape(2, 5, -1)  # noqa: E731
        result = trainer.train_step((rows(x * 10, 0), rows(Y, 0)))
        assert not result.grads_finite and float(result.loss_scale) == 2.0**8
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        scales = [
            float(trainer.train_step((rows(X, at), rows(Y, at))).loss_scale)
            for at in (10, 5, 12, 3)
        ]
        seen.append((scales, model.get_weights()))
    assert seen[0][0] == seen[1][0] == [2.0**8, 2.0**9, 2.0**9, 2.0**10]
    assert_close(seen[1][1], seen[0][1], 2e-3)  # float16 activations
    assert int(trainer.optimizer.iterations.numpy()) == 4
    assert_same_on_all(trainer)


def check_batch_norm():
    """Each replica normalises by its own share; moving statistics are the replicas' mean."""

    def make():
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.Dense(3),
        ]
        return keras.Sequential([keras.Input((6,)), *layers])

    share, micro_batches = 2, 2
    rows = micro_batches * share * COUNT
    stack = (a[:rows].reshape(micro_batches, COUNT, share, -1) for a in (X[:rows], Y[:rows]))
    x, y = stack
    model = replicated(make)
    trainer = fa.Trainer(
        model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=micro_batches
    )
    trainer.train_step(
        (x.reshape(micro_batches, COUNT * share, -1), y.reshape(micro_batches, COUNT * share, -1))
    )

    # The same rows on one device, a share at a time: the same sum of gradients.
    one = make()
    options = {"gradient_accumulation_steps": micro_batches * COUNT, "jit_compile": False}
    fa.Trainer(one, keras.optimizers.SGD(0.1), "mse", **options).train_step(
        (x.reshape(-1, share, x.shape[-1]), y.reshape(-1, share, y.shape[-1]))
    )
    assert_close(
        [v.numpy() for v in model.trainable_variables], [v.numpy() for v in one.trainable_variables]
    )

    # Each replica's own statistics, one model a replica.
    moving = []
    for i in range(COUNT):
        own = make()
        for j in range(micro_batches):
            own(x[j, i], training=True)
        moving.append([v.numpy() for v in own.non_trainable_variables])
    expected = [np.mean(each, axis=0) for each in zip(*moving, strict=True)]
    statistics = model.layers[1].non_trainable_variables
    assert_close([v.numpy() for v in statistics], expected[: len(statistics)])
    assert np.abs(moving[0][0] - moving[1][0]).max() > 1e-3  # or the mean would prove nothing
    assert_same_on_all(trainer)

    before = model.get_weights()
    for given in (X[: 4 * COUNT + 1], X[: 4 * COUNT]):
        batch_size = 2 * COUNT if len(given) % COUNT else 2 * COUNT - 1
        try:
            trainer.fit(given, Y[: len(given)], batch_size=batch_size, verbose=0)
            raise AssertionError("shards that do not divide were not refused")
        except ValueError as error:
            assert "replicas" in str(error) and "batch_size" in str(error), error
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def check_one_all_reduce_a_step():
    """The traced program of a step holds one collective a replica, at 1 and at 16 micro-batches."""
    counts = {}
    for micro_batches in (1, 16):
        trainer = fa.Trainer(
            replicated(dense), "adam", "mse", ["mae"], gradient_accumulation_steps=micro_batches
        )
        shape = (micro_batches, 2 * COUNT)
        stack = np.zeros((*shape, 6), "float32"), np.zeros((*shape, 3), "float32")
        trainer.train_step(stack)
        _, batch = trainer._step_inputs.prepare(stack)
        graph = trainer._engine._executor.function.get_concrete_function(
            [None] * COUNT, batch
        ).graph.as_graph_def()
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        counts[micro_batches] = sum(
            "Reduce" in n.op and ("Collective" in n.op or "Nccl" in n.op) for n in nodes
        )
        # None in the compiled programs, and none that adds what comes from several devices without
        # a collective.
        compiled = {n.attr["f"].func.name for n in nodes if n.attr["_XlaMustCompile"].b}
        assert len(compiled) == 2, compiled
        outside = [
            *graph.node,
            *(
                n
                for f in graph.library.function
                if "collective_on_all" in f.signature.name
                for n in f.node_def
            ),
        ]
        assert not [n.name for n in outside if n.op == "AddN"]
        assert len(outside) > len(graph.node)
    assert counts == {1: COUNT, 16: COUNT}, counts


def check_sums_of_several_dtypes_lose_no_digit():
    """In one collective: those of float64 numbers beside float32's."""
    parts = [
        tf.constant(0.5),
        tf.constant(1 / 3, tf.float64),
        None,
        tf.constant([2**24 + 1.0], tf.float64),
    ]
    for single, third, nothing, whole in replicas.replicas_for(Model(replicated(dense))).all_reduce(
        [parts] * COUNT
    ):
        assert (single.dtype, third.dtype, nothing) == (tf.float32, tf.float64, None)
        assert (float(single), float(third)) == (0.5 * COUNT, COUNT / 3) and float(whole[0]) == (
            2**24 + 1
        ) * COUNT


def check_mean_of_replica_means_is_another_result():
    """With 5 rows on several replicas, means of means would weigh rows differently; the step does
    not.
    """
    x, y = X[:5], Y[:5]
    before = dense().get_weights()

    def moved(indices):
        model = dense()
        sgd = keras.optimizers.SGD(1.0)
        fa.Trainer(model, sgd, "mse", jit_compile=False).train_step(
            (x[None, indices], y[None, indices])
        )
        return [now - then for now, then in zip(model.get_weights(), before, strict=True)]

    size = -(-5 // COUNT)
    shards = [np.arange(5)[i : i + size] for i in range(0, 5, size)]
    means = [np.mean(each, axis=0) for each in zip(*map(moved, shards), strict=True)]
    model = replicated(dense)
    fa.Trainer(model, keras.optimizers.SGD(1.0), "mse", jit_compile=False).train_step(
        (x[None], y[None])
    )
    ours = [now - then for now, then in zip(model.get_weights(), before, strict=True)]
    assert_close(ours, moved(np.arange(5)))
    assert max(np.abs(a - b).max() for a, b in zip(ours, means, strict=True)) > 1e-3


def check_masks_differ_and_seeds_do_not():
    """Every replica drops other features, from seeds that are the same again after the step."""

    def make():
        keras.utils.set_random_seed(1)
        head = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), head])

    model = replicated(make)
    trainer = fa.Trainer(model, keras.optimizers.SGD(1.0), lambda y_true, y_pred: y_pred[:, 0])
    ones = np.ones((1, COUNT, 64), "float32")
    trainer.train_step((ones, ones[..., 0]))
    # on how many replicas each feature was
    kept = np.round((1.0 - model.get_weights()[0].ravel()) * COUNT / 2)
    assert set(kept) <= set(range(COUNT + 1))
    assert np.mean((kept > 0) & (kept < COUNT)) > 0.2, kept
    assert_same_on_all(trainer)


def with_statistics():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


def check_resumed():
    """A fit that breaks off goes on bit by bit: weights, slots, statistics, masks, logs."""

    class BreaksOff(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 8:
                raise InterruptedError

    def trainer():
        model, adam = replicated(with_statistics), keras.optimizers.Adam(0.01)
        return fa.Trainer(model, adam, "mse", gradient_accumulation_steps=2, jit_compile=False)

    def fit(trainer, **options):
        keras.utils.set_random_seed(1)  # of the shuffle
        return trainer.fit(X[:20], Y[:20], batch_size=COUNT, epochs=4, verbose=0, **options).history

    whole, first, second = trainer(), trainer(), trainer()
    expected = fit(whole)
    with tempfile.TemporaryDirectory() as folder:
        saved = {"checkpoint_dir": folder, "checkpoint_every": 3}
        with contextlib.suppress(InterruptedError):
            fit(first, callbacks=[BreaksOff()], **saved)
        assert fit(second, **saved) == expected
    assert_same_on_all(second)
    for ours, theirs in zip(values(second)[0], values(whole)[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def check_not_finite():
    """One replica's bad row: the step is refused on all, and the error names the row."""
    trainer = fa.Trainer(
        replicated(with_statistics), "adam", "mse", on_nonfinite="raise", jit_compile=False
    )
    stack = X[:20].reshape(2, 10, 6).copy(), Y[:20].reshape(2, 10, 3)
    trainer.train_step(stack)
    before = values(trainer)[0][: len(trainer.model.variables)]
    stack[0][1, 9, 0] = np.nan
    try:
        trainer.train_step(stack)
    except fa.NonFiniteError as error:
        assert "micro-batch 1 of the step's 2" in str(error) and "x holds NaN in its rows 9" in str(
            error
        ), error
    else:
        raise AssertionError("nothing was raised")
    assert_same_on_all(trainer)
    for variable, old, new in zip(
        trainer.model.variables, before, values(trainer)[0], strict=False
    ):
        np.testing.assert_array_equal(old, new, variable.path)


def check_datasets():
    """Batches of varying size, and everything made inside the scope, metrics and Trainer too."""
    sizes = [5, 2, 4, 5, 5, 2]
    parts = np.split(np.arange(23), np.cumsum(sizes)[:-1])

    def batches():
        for rows in parts:
            yield X[rows], Y[rows], WEIGHTS[rows]

    signature = tuple(tf.TensorSpec([None, *a.shape[1:]], tf.float32) for a in (X, Y, WEIGHTS))

    def dataset():
        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    seen = []
    for scope in (contextlib.nullcontext, strategy().scope):
        with scope():
            trainer = fa.Trainer(
                dense(),
                keras.optimizers.Adam(
                    keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), use_ema=True
                ),
                "mse",
                [keras.metrics.RootMeanSquaredError(), "mae"],
                loss_scale=fa.DynamicLossScale(init_scale=4.0, growth_interval=2),
                gradient_accumulation_steps=2,
                jit_compile=False,
            )
            history = trainer.fit(dataset(), epochs=2, verbose=0, validation_data=dataset()).history
        seen.append((history, trainer.model.get_weights()))
    for name in seen[0][0]:
        np.testing.assert_allclose(
            seen[1][0][name], seen[0][0][name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert_close(seen[1][1], seen[0][1])
    assert_same_on_all(trainer)


def check_lengths_that_differ():
    """Texts that are padded per batch, which the replicas' shares are padded alike of; refused
    without a mask.
    """
    lengths, random = [7, 3, 5, 9, 4], np.random.default_rng(0)
    ids = [random.integers(1, 11, (4, length)) for length in lengths]

    def batches():
        for each in ids:
            yield each, each % 3

    def dataset():
        spec = tf.TensorSpec([None, None], tf.int64)
        return tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))

    def tagger(mask_zero=True, flip=False):
        keras.utils.set_random_seed(1)
        x = keras.Input((None,), dtype="int64")
        h = keras.layers.Embedding(11, 4, mask_zero=mask_zero)(x)
        return keras.Model(
            x,
            keras.layers.Dense(3)(
                keras.layers.LSTM(4, return_sequences=True, go_backwards=flip)(h)
            ),
        )

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def fit(trainer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of three programs
            history = trainer.fit(dataset(), epochs=2, verbose=0).history
        return history, trainer.evaluate(dataset(), verbose=0)

    def options():
        return {
            "optimizer": "sgd",
            "loss": loss,
            "metrics": ["accuracy"],
            "gradient_accumulation_steps": 2,
        }

    compare(tagger, fit, options, ids[0])
    trainer = fa.Trainer(replicated(lambda: tagger(mask_zero=False, flip=True)), **options())
    before = trainer.model.get_weights()
    try:
        trainer.fit(dataset(), verbose=0)
        raise AssertionError("lengths that would be padded unseen were not refused")
    except ValueError as error:
        assert "padded_batch(k * b).unbatch().batch(b)" in str(error), error
    assert_close(trainer.model.get_weights(), before, 0)


def check_learning_rate_from_the_host():
    """A learning rate assigned between steps reaches every replica."""
    seen = []
    for model in (dense(), replicated(dense)):
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        trainer.train_step((X[None, :4], Y[None, :4]))
        trainer.optimizer.learning_rate = 0.01
        trainer.train_step((X[None, :4], Y[None, :4]))
        seen.append(model.get_weights())
    assert_close(seen[1], seen[0])
    assert_same_on_all(trainer)


def check_settings_changed_on_resume():
    """The rate, a variable of each replica, and the weight decay, a constant: as on one device."""

    def train(make, **options):
        with tempfile.TemporaryDirectory() as folder:
            for epochs, rate, decay in ((1, 0.01, 0.0), (2, 0.002, 0.1)):
                adam = keras.optimizers.AdamW(rate, weight_decay=decay)
                trainer = fa.Trainer(make(dense), adam, "mse", jit_compile=False, **options)
                named = {"learning_rate", "weight_decay"}
                fitted = {
                    "batch_size": 8,
                    "shuffle": False,
                    "verbose": 0,
                    "checkpoint_dir": folder,
                    "resume": named,
                }
                trainer.fit(X[:16], Y[:16], epochs=epochs, **fitted)
        return trainer

    expected = train(lambda plain: plain())
    for shares in (False, True):
        resumed = train(replicated, shard_optimizer=shares)
        assert_close(resumed.model.get_weights(), expected.model.get_weights())


def check_lora_enabled_outside_the_scope():
    """Its matrices, which no strategy knows when the Trainer is made, are trained on all
    replicas.
    """
    for shared in (False, True):
        seen = []
        for model, options in ((dense(), {}), (replicated(dense), {"shard_optimizer": shared})):
            keras.utils.set_random_seed(2)
            for layer in model.layers:
                layer.enable_lora(2)
            trainer = fa.Trainer(
                model, keras.optimizers.Adam(0.01), "mse", jit_compile=False, **options
            )
            trainer.fit(X[:16], Y[:16], batch_size=4, shuffle=False, verbose=0)
            seen.append(model.get_weights())
        assert_close(seen[1], seen[0])
        if not shared:
            assert_same_on_all(trainer)


def check_a_kernel_that_the_forward_pass_assigns():
    def make():
        keras.utils.set_random_seed(1)
        normalized = keras.layers.SpectralNormalization(keras.layers.Dense(8))
        return keras.Sequential([keras.Input((6,)), normalized, keras.layers.Dense(3)])

    model, alone = replicated(make), make()
    for each, jit_compile in ((model, True), (alone, False)):
        trainer = fa.Trainer(
            each, "sgd", "mse", gradient_accumulation_steps=2, jit_compile=jit_compile
        )
        trainer.fit(X[:16], Y[:16], batch_size=4, shuffle=False, verbose=0)
    assert_close(model.get_weights(), alone.get_weights())
    before = model.get_weights()
    trainer = fa.Trainer(model, model.optimizer, "mse", gradient_accumulation_steps=2)
    trainer.fit(np.where(X[:8] == X[3], np.nan, X[:8]), Y[:8], batch_size=4, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), before))
    assert_same_on_all(trainer)


def check_refused():
    """Strategies and layers that cannot work, by name, when the Trainer is made."""

    def refused(*words, model):
        try:
            fa.Trainer(model, "sgd", "mse")
        except ValueError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError(f"{words} were not refused")

    one = tf.distribute.OneDeviceStrategy("CPU:0")
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0")
    for each in (one, central):
        with each.scope():
            refused(type(each).__name__, "MirroredStrategy", model=dense())
    outside = dense()
    with strategy().scope():
        refused("outside the scope", model=outside)
    normalized = [
        keras.Input((6,)),
        keras.layers.BatchNormalization(synchronized=True, name="norm"),
    ]
    refused("'norm'", "synchronized", model=replicated(lambda: keras.Sequential(normalized)))

    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(0.0, name="calls", trainable=False)

        def call(self, x):
            self.calls.assign_add(1.0)
            return x

    counting = replicated(
        lambda: keras.Sequential([keras.Input((6,)), Counting(), keras.layers.Dense(3)])
    )
    try:
        fa.Trainer(counting, "sgd", "mse").fit(X, Y, verbose=0)
    except ValueError as error:
        assert "['calls:0']" in str(error) and "add_weight" in str(error), error
    else:
        raise AssertionError("a variable that no strategy can keep alike was not refused")

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight(initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

        def result(self):
            return self.value

    try:
        fa.Trainer(replicated(dense), "sgd", "mse", [Largest()]).fit(X, Y, verbose=0)
    except ValueError as error:
        assert "'largest'" in str(error) and "derive them from" in str(error), error
    else:
        raise AssertionError("a metric that is no sum was not refused")


def check_blocks_computed_again():
    """Masks and statistics, each replica's own, are those of the plain model."""

    def deep():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,))])
        for _ in range(3):
            model.add(keras.layers.Dense(8, activation="tanh"))
            model.add(keras.layers.BatchNormalization())
            model.add(keras.layers.Dropout(0.3))
        model.add(keras.layers.Dense(3))
        return model

    seen = []
    for recompute in (False, True):
        model = replicated(deep)
        if recompute:
            fa.remat(model)
        trainer = replicated(
            lambda model=model: fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2)
        )
        keras.utils.set_random_seed(3)
        trainer.fit(X[:16], Y[:16], batch_size=2 * COUNT, epochs=2, verbose=0)
        assert_same_on_all(trainer)
        seen.append(values(trainer)[0])
    assert_close(*seen)


def check_programs_are_traced_anew():
    factor = 1.0

    def scaled():
        hidden = keras.layers.Dense(3)(inputs := keras.Input((6,)))
        return keras.Model(inputs, keras.layers.Lambda(lambda x: factor * x)(hidden))

    trainer = fa.Trainer(replicated(scaled), keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    zeros = np.zeros_like(Y)

    def losses():
        trained = trainer.fit(X, zeros, batch_size=8, verbose=0).history["loss"][0]
        return trained, trainer.evaluate(X, zeros, batch_size=8, verbose=0)

    before = losses()
    factor = 3.0
    assert losses() == before
    trainer._engine.retrace()
    np.testing.assert_allclose(losses(), np.multiply(9.0, before), rtol=1e-5)


def cases(checks, first, on_four, alone=()):
    """Those `first` on two replicas are among README's tests; those `alone` on four are not run on
    two.
    """
    others = [name for name in checks if name not in (*first, *alone)]
    runs = (2, first, ()), (2, others, pytest.mark.slow), (4, on_four, pytest.mark.slow)
    return [
        pytest.param(count, tuple(names), name, marks=marks, id=f"{count}-{name}")
        for count, names, marks in runs
        for name in names
    ]


@functools.cache
def outcomes(count, names, path=__file__):
    """What each check came to on `count` logical devices, which a process must have before
    TensorFlow starts.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, path, str(count), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(checks):
    names = sys.argv[2:] or [
        name.removeprefix("check_") for name in checks if name.startswith("check_")
    ]
    outcomes = {}
    for name in names:
        keras.utils.set_random_seed(0)
        try:
            checks[f"check_{name}"]()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * COUNT
    )
    main(globals())
