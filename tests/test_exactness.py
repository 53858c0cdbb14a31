"""Compares one accumulated step with the full batch: by hand in float64, and by Keras itself."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    LEARNING_RATE,
    assert_is_step,
    assert_same,
    coefficients,
    family,
    keras_steps,
    softmax_cross_entropy,
    squared_error,
    two_layers,
)

import fastaccum as fa

pytestmark = pytest.mark.long

TIME, CLASSES, IDS = 3, 3, 5
quick = settings(deadline=None, database=None, max_examples=8)
seeds = st.integers(0, 2**32 - 1)


# What a batch is: rows, tokens behind a Masking layer, tokens with labels to ignore, ids of which 0
# is masked.


def rows_model(K, features=3, hidden=4, outputs=2):
    return K.Sequential(
        [
            K.Input((features,)),
            K.layers.Dense(hidden, activation="tanh"),
            K.layers.Dense(outputs),
        ]
    )


def tokens_model(K):
    return K.Sequential(
        [
            K.Input((TIME, 3)),
            K.layers.Masking(),
            K.layers.Dense(4, activation="tanh"),
            K.layers.Dense(CLASSES),
        ]
    )


def ids_model(K):
    return K.Sequential(
        [
            K.Input((TIME,), dtype="int32"),
            K.layers.Embedding(IDS, 4, mask_zero=True),
            K.layers.Activation("tanh"),
            K.layers.Dense(CLASSES),
        ]
    )


def labels_of(rng, rows):
    return rng.integers(0, CLASSES, (rows, TIME)).astype("int32")


def rows_batch(rng, rows, features=3, outputs=2):
    x, y = rng.normal(size=(rows, features)), rng.normal(size=(rows, outputs))
    return x.astype("float32"), y.astype("float32"), np.ones(rows, bool)


def masked_batch(rng, rows):
    x = rng.normal(size=(rows, TIME, 3)).astype("float32")
    valid = rng.random((rows, TIME)) < rng.choice([0.1, 0.6, 1.0])
    return x * valid[..., np.newaxis], labels_of(rng, rows), valid


def ignored_batch(rng, rows):
    x = rng.normal(size=(rows, TIME, 3)).astype("float32")
    labels = labels_of(rng, rows)
    valid = rng.random((rows, TIME)) < rng.choice([0.1, 0.6, 1.0])
    return x, np.where(valid, labels, -1), valid


def ids_batch(rng, rows):
    ids = rng.integers(0, IDS, (rows, TIME)).astype("int32")
    return ids, labels_of(rng, rows), ids != 0


def cross_entropy(**options):
    return lambda K, reduction: K.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, **options
    )


# kind: (model, batch, loss of a Keras and a reduction, loss by hand)
KINDS = {
    "rows": (
        rows_model,
        rows_batch,
        lambda K, r: K.losses.MeanSquaredError(reduction=r),
        squared_error,
    ),
    "masked": (tokens_model, masked_batch, cross_entropy(), softmax_cross_entropy),
    "ignored": (tokens_model, ignored_batch, cross_entropy(ignore_class=-1), softmax_cross_entropy),
    "ids": (ids_model, ids_batch, cross_entropy(), softmax_cross_entropy),
}


@functools.cache
def trainer_of(K, kind, reduction, accumulation, weighted, *sizes):
    """Makes one trainer for each compiled program, with XLA for one reduction; `weighted` only keys
    the cache.
    """
    model, _, loss, _ = KINDS[kind]
    return fa.Trainer(
        model(K, *sizes),
        K.optimizers.SGD(LEARNING_RATE),
        loss(K, reduction),
        gradient_accumulation_steps=accumulation,
        jit_compile=K is keras and reduction == "sum_over_batch_size",
    )


def random_weights(model, rng):
    weights = [rng.normal(size=w.shape).astype("float32") for w in model.get_weights()]
    model.set_weights(weights)
    return weights


def sample_weights(rng, shape):
    return rng.choice([0.0, 0.5, 1.0, 3.0], size=shape, p=[0.4, 0.2, 0.2, 0.2]).astype("float32")


def batched(batch, sizes):
    """The batch as a tf.data.Dataset of batches of these sizes."""
    ends = np.cumsum(sizes)
    spec = tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in batch)
    return tf.data.Dataset.from_generator(
        lambda: (
            tuple(a[end - n : end] for a in batch) for n, end in zip(sizes, ends, strict=True)
        ),
        output_signature=spec,
    )


REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
CASES = [
    *(("keras", kind, reduction, True) for kind in KINDS for reduction in REDUCTIONS),
    *(("keras", kind, "sum_over_batch_size", False) for kind in KINDS),
    ("keras", "rows", "mean", True),
    *(
        ("tf_keras", kind, reduction, True)
        for kind in KINDS
        for reduction in ("sum_over_batch_size", "sum")
    ),
]


@pytest.mark.parametrize(("K", "kind", "reduction", "weighted"), CASES, indirect=["K"])
def test_a_step_is_that_of_the_full_batch(K, kind, reduction, weighted):
    accumulation, batch_size = 3, 4
    trainer = trainer_of(K, kind, reduction, accumulation, weighted)
    model_of, batch_of, loss_of, loss_by_hand = KINDS[kind]
    twin = model_of(K)

    @quick
    @given(seed=seeds, tail=st.integers(1, batch_size), data=st.data())
    def check(seed, tail, data):
        rng = np.random.default_rng(seed)
        before = random_weights(trainer.model, rng)
        if data.draw(st.booleans(), label="batches of varying size"):
            sizes = [batch_size, tail, data.draw(st.integers(1, batch_size))]
        else:
            sizes = [batch_size, batch_size, tail]
        x, y, valid = batch_of(rng, sum(sizes))
        weights = sample_weights(rng, valid.shape) if weighted else None
        batch = (x, y) if weights is None else (x, y, weights)
        if sizes[1] == batch_size:
            history = trainer.fit(
                x, y, batch_size, sample_weight=weights, shuffle=False, verbose=0
            ).history
        else:
            history = trainer.fit(batched(batch, sizes), verbose=0).history

        factors = coefficients(reduction, valid, weights)
        loss, gradients = two_layers(before, x, y, loss_by_hand, factors)
        assert_is_step(trainer.model.get_weights(), before, gradients)
        np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5, atol=1e-6)

        if K is not keras and not valid.any():  # tf_keras divides by their number, 0
            return
        twin.set_weights(before)
        logs = keras_steps(twin, loss_of(K, reduction), [batch])
        assert_same(trainer.model.get_weights(), twin.get_weights(), tolerance=4e-6)
        np.testing.assert_allclose(history["loss"], [logs["loss"]], rtol=1e-5, atol=1e-6)

    check()


@pytest.mark.parametrize(
    ("features", "hidden", "outputs", "accumulation", "batch_size"),
    [(1, 1, 1, 1, 1), (3, 4, 2, 1, 7), (2, 5, 3, 5, 2), (4, 2, 1, 2, 1)],
)
def test_models_of_any_shape(K, features, hidden, outputs, accumulation, batch_size):
    trainer = trainer_of(
        K, "rows", "sum_over_batch_size", accumulation, False, features, hidden, outputs
    )

    @quick
    @given(seed=seeds, tail=st.integers(1, batch_size))
    def check(seed, tail):
        rng = np.random.default_rng(seed)
        before = random_weights(trainer.model, rng)
        rows = tail if accumulation == 1 else (accumulation - 1) * batch_size + tail
        # A lone micro-batch is never padded: its own size would be another program.
        rows = batch_size if accumulation == 1 else rows
        x, y, valid = rows_batch(rng, rows, features, outputs)
        trainer.fit(x, y, batch_size, shuffle=False, verbose=0)
        _, gradients = two_layers(
            before, x, y, squared_error, coefficients("sum_over_batch_size", valid)
        )
        assert_is_step(trainer.model.get_weights(), before, gradients)

    check()


def test_a_weight_per_row_holds_for_each_of_its_tokens():
    """Keras itself cannot broadcast [rows] weights over [rows, time] losses."""
    rng = np.random.default_rng(4)
    trainer = trainer_of(keras, "masked", "mean_with_sample_weight", 3, "per row")
    before = random_weights(trainer.model, rng)
    x, y, valid = masked_batch(rng, 10)
    weights = sample_weights(rng, 10)
    trainer.fit(x, y, 4, sample_weight=weights, shuffle=False, verbose=0)
    factors = coefficients(
        "mean_with_sample_weight", valid, np.repeat(weights[:, np.newaxis], TIME, 1)
    )
    _, gradients = two_layers(before, x, y, softmax_cross_entropy, factors)
    assert_is_step(trainer.model.get_weights(), before, gradients)


class TestTheMeanOfMeans:
    """Tests a negative control: the check above tells the common mistake from the truth."""

    rng = np.random.default_rng(3)
    x, y, valid = masked_batch(rng, 12)
    valid = np.arange(TIME) < np.array([1, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1])[:, np.newaxis]
    x = rng.normal(size=x.shape).astype("float32") * valid[..., np.newaxis]
    before = tuple(map(rng.standard_normal, [(3, 4), 4, (4, CLASSES), CLASSES], ["float32"] * 4))

    def gradients(self, valid, rows=slice(None)):
        factors = coefficients("sum_over_batch_size", valid[rows])
        return two_layers(self.before, self.x[rows], self.y[rows], softmax_cross_entropy, factors)[
            1
        ]

    def mean_of_means(self, valid):
        micro_batches = [self.gradients(valid, slice(i, i + 4)) for i in (0, 4, 8)]
        mean = [sum(parts) / 3 for parts in zip(*micro_batches, strict=True)]
        return [w - LEARNING_RATE * g for w, g in zip(self.before, mean, strict=True)]

    def test_is_not_the_step_of_the_full_batch(self):
        with pytest.raises(AssertionError):
            assert_is_step(self.mean_of_means(self.valid), self.before, self.gradients(self.valid))

    def test_would_be_if_all_micro_batches_weighed_the_same(self):
        valid = np.ones_like(self.valid)
        assert_is_step(self.mean_of_means(valid), self.before, self.gradients(valid))

    def test_is_what_keras_accumulates(self):
        model = tokens_model(keras)
        model.set_weights(self.before)
        optimizer = keras.optimizers.SGD(LEARNING_RATE, gradient_accumulation_steps=3)
        model.compile(
            optimizer, cross_entropy()(keras, "mean"), run_eagerly=True, auto_scale_loss=False
        )
        model.fit(self.x, self.y, batch_size=4, shuffle=False, verbose=0)
        assert_same(model.get_weights(), self.mean_of_means(self.valid), tolerance=1e-5)
        with pytest.raises(AssertionError):
            assert_is_step(model.get_weights(), self.before, self.gradients(self.valid))


# What a whole model adds: compared with Keras's own full-batch step.


def same_as_keras(
    make_model, loss, x, y, sample_weight=None, *, rows, jit_compile=False, **compiled
):
    """Trains twins over the same rows, and compares weights and the logs of the last step."""
    ours, theirs = make_model(), make_model()
    K, accumulation, batch_size = family(ours), 3, 4
    random_weights(ours, np.random.default_rng(8))
    theirs.set_weights(ours.get_weights())
    trainer = fa.Trainer(
        ours,
        K.optimizers.SGD(0.1),
        loss,
        gradient_accumulation_steps=accumulation,
        jit_compile=jit_compile,
        **compiled,
    )
    history = trainer.fit(
        x, y, batch_size, sample_weight=sample_weight, shuffle=False, verbose=0
    ).history
    step = accumulation * batch_size
    batch = (x, y) if sample_weight is None else (x, y, sample_weight)
    batches = [
        tf.nest.map_structure(lambda a, i=i: a[i : i + step], batch) for i in range(0, rows, step)
    ]
    logs = keras_steps(theirs, loss, batches, 0.1, **compiled)
    assert_same(ours.get_weights(), theirs.get_weights(), tolerance=5e-6)
    return history, logs


def test_regularisers_count_once_a_step(K):
    def make_model():
        return K.Sequential(
            [
                K.Input((3,)),
                K.layers.Dense(4, "tanh", kernel_regularizer=K.regularizers.L2(0.3)),
                K.layers.Dense(2, bias_regularizer=K.regularizers.L1(0.2)),
            ]
        )

    x, y, _ = rows_batch(np.random.default_rng(0), 10)
    weights = sample_weights(np.random.default_rng(1), 10)
    history, logs = same_as_keras(make_model, "mse", x, y, weights, rows=10, jit_compile=K is keras)
    np.testing.assert_allclose(history["loss"], [logs["loss"]], rtol=1e-5)


def mean_square(K, axis):
    class MeanSquare(K.layers.Layer):
        def call(self, x):
            self.add_loss(0.3 * tf.reduce_mean(tf.square(x), axis=axis))
            return x

    return MeanSquare()


@pytest.mark.parametrize("axis", [None, -1], ids=["a mean", "one per row"])
def test_added_losses_count_by_the_rows_of_a_ragged_tail(K, axis):
    if K is not keras and axis is not None:
        pytest.skip("tf_keras adds up losses of one shape only")

    def make_model():
        return K.Sequential(
            [
                K.Input((3,)),
                K.layers.Dense(4, "tanh", activity_regularizer=K.regularizers.L2(0.2)),
                mean_square(K, axis),
                K.layers.Dense(2, kernel_regularizer="l2"),
            ]
        )

    x, y, _ = rows_batch(np.random.default_rng(0), 21)
    same_as_keras(make_model, "mse", x, y, rows=21)
    history, logs = same_as_keras(make_model, "mse", x[:10], y[:10], rows=10)
    np.testing.assert_allclose(history["loss"], [logs["loss"]], rtol=1e-5)


def in_one_mode(K, mode):
    class InOneMode(K.layers.Layer):
        def call(self, x, training=False):
            if training == mode:
                self.add_loss(tf.reduce_mean(tf.square(x)))
            return x

    return InOneMode()


@pytest.mark.parametrize("mode", [True, False], ids=["training", "inference"])
def test_losses_that_are_added_in_one_mode_only(K, mode):
    if K is not keras and not mode:
        pytest.skip("tf_keras trains by the loss that its construction of the model left behind")

    def make_model():
        return K.Sequential(
            [K.Input((3,)), K.layers.Dense(4), in_one_mode(K, mode), K.layers.Dense(2)]
        )

    x, y, _ = rows_batch(np.random.default_rng(0), 10)
    same_as_keras(make_model, "mse", x, y, rows=10)
    model = make_model()
    trainer = fa.Trainer(model, K.optimizers.SGD(), "mse", jit_compile=False)
    ours = trainer.evaluate(x, y, batch_size=10, verbose=0)
    np.testing.assert_allclose(ours, model.evaluate(x, y, batch_size=10, verbose=0), rtol=1e-5)


def two_tasks(K, as_dict):
    """Rows and tokens in; a value per row and classes per token, behind a mask, out."""
    row, tokens = K.Input((2,), name="row"), K.Input((TIME, 3), name="tokens")
    hidden = K.layers.Dense(4, activation="tanh")(K.layers.Masking()(tokens))
    pooled = K.layers.GlobalAveragePooling1D()(hidden)
    value = K.layers.Dense(1, name="value")(K.layers.Concatenate()([row, pooled]))
    classes = K.layers.Dense(CLASSES, name="classes")(hidden)
    outputs = {"value": value, "classes": classes} if as_dict else [value, classes]
    return K.Model({"row": row, "tokens": tokens}, outputs)


class TestSeveralOutputs:
    rng = np.random.default_rng(6)
    tokens, classes, valid = masked_batch(rng, 10)
    valid = np.arange(TIME) < rng.integers(1, TIME + 1, 10)[:, np.newaxis]
    tokens = (rng.normal(size=tokens.shape) * valid[..., np.newaxis]).astype("float32")
    x = {"row": rng.normal(size=(10, 2)).astype("float32"), "tokens": tokens}  # noqa: RUF012
    value = rng.normal(size=(10, 1)).astype("float32")
    weights = sample_weights(rng, 10), sample_weights(rng, (10, TIME))

    def check_logs(self, history, logs):
        for name in ("loss", "value_loss", "classes_loss"):
            np.testing.assert_allclose(history[name], [logs[name]], rtol=1e-5, err_msg=name)

    def test_by_name_each_with_its_own_weights_mask_and_denominator(self, K):
        reduction = "mean_with_sample_weight" if K is keras else "sum_over_batch_size"
        loss = {"value": "mse", "classes": cross_entropy()(K, reduction)}
        history, logs = same_as_keras(
            lambda: two_tasks(K, as_dict=True),
            loss,
            self.x,
            {"value": self.value, "classes": self.classes},
            dict(zip(("value", "classes"), self.weights, strict=True)),
            rows=10,
            jit_compile=K is keras,
            loss_weights={"value": 0.5, "classes": 3.0},
        )
        self.check_logs(history, logs)

    def test_losses_in_a_list_one_of_them_a_sum(self, K):
        history, logs = same_as_keras(
            lambda: two_tasks(K, as_dict=False),
            ["mae", cross_entropy()(K, "sum")],
            self.x,
            [self.value, self.classes],
            rows=10,
            loss_weights=[2.0, 0.25],
        )
        self.check_logs(history, logs)


def test_batch_statistics_are_those_of_each_micro_batch(K):
    """Against a loop by hand over the same micro-batches, the smaller last one included."""

    def make_model():
        return K.Sequential(
            [
                K.Input((3,)),
                K.layers.Dense(4),
                K.layers.BatchNormalization(momentum=0.8),
                K.layers.Dense(2),
            ]
        )

    ours, theirs = make_model(), make_model()
    theirs.set_weights(ours.get_weights())
    x, y, _ = rows_batch(np.random.default_rng(5), 22)
    trainer = fa.Trainer(
        ours, K.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=3, jit_compile=K is keras
    )
    trainer.fit(x, y, 4, shuffle=False, verbose=0)

    for start in (0, 12):
        rows = range(start, min(start + 12, 22), 4)
        with tf.GradientTape() as tape:
            total = tf.add_n(
                [
                    tf.reduce_sum(
                        K.losses.mean_squared_error(
                            y[i : i + 4], theirs(x[i : i + 4], training=True)
                        )
                    )
                    for i in rows
                ]
            ) / len(x[start : start + 12])
        gradients = tape.gradient(
            total, [v.value if K is keras else v for v in theirs.trainable_variables]
        )
        for variable, gradient in zip(theirs.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
    assert_same(ours.get_weights(), theirs.get_weights(), tolerance=2e-5)


def test_repeated_ids_of_an_embedding_add_up(K):
    trainer = trainer_of(K, "ids", "sum_over_batch_size", 3, False)
    rng = np.random.default_rng(9)
    before = random_weights(trainer.model, rng)
    ids = np.full((12, TIME), 2, "int32")
    labels = labels_of(rng, 12)
    trainer.fit(ids, labels, 4, shuffle=False, verbose=0)
    factors = coefficients("sum_over_batch_size", ids != 0)
    _, gradients = two_layers(before, ids, labels, softmax_cross_entropy, factors)
    assert_is_step(trainer.model.get_weights(), before, gradients)
    untouched = [0, 1, 3, 4]
    np.testing.assert_array_equal(trainer.model.get_weights()[0][untouched], before[0][untouched])


def test_a_step_without_any_valid_token_changes_nothing(K):
    trainer = trainer_of(K, "ids", "sum_over_batch_size", 3, False)
    before = random_weights(trainer.model, np.random.default_rng(9))
    history = trainer.fit(
        np.zeros((12, TIME), "int32"), np.zeros((12, TIME), "int32"), 4, verbose=0
    ).history
    assert history["loss"] == [0.0]
    for now, then in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)]
)
def test_low_precision_stays_near_the_float32_gradient(K, policy, tolerance):
    set_policy = K.config.set_dtype_policy if K is keras else K.mixed_precision.set_global_policy
    set_policy(policy)
    try:
        model = tokens_model(K)
    finally:
        set_policy("float32")
    rng = np.random.default_rng(2)
    before = random_weights(model, rng)
    x, y, valid = masked_batch(rng, 10)
    loss, options = cross_entropy()(K, "sum_over_batch_size"), {"gradient_accumulation_steps": 3}
    trainer = fa.Trainer(
        model, K.optimizers.SGD(LEARNING_RATE), loss, jit_compile=K is keras, **options
    )
    history = trainer.fit(x, y, 4, shuffle=False, verbose=0).history
    loss, gradients = two_layers(before, x, y, softmax_cross_entropy, coefficients("mean", valid))
    assert history["skipped_steps"] == [0]
    np.testing.assert_allclose(history["loss"], [loss], rtol=tolerance)
    for now, then, gradient in zip(model.get_weights(), before, gradients, strict=True):
        np.testing.assert_allclose(
            then - now, gradient, rtol=0, atol=tolerance * np.abs(gradient).max()
        )
