"""Loss functions that return one number for a batch: exact if it is a mean or sum over rows, else
with one warning.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from scalar_losses import (
    CASES,
    DATA,
    IDS,
    X,
    masked_cross_entropy,
    masked_mse,
    mse,
)

import fastaccum as fa
from fastaccum.adapters.losses import Losses
from fastaccum.adapters.outputs import Outputs

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

BATCH, MICRO_BATCH = 16, 4  # of 22 rows: updates of 4 x 4 rows, and of 4 and 2


def make_model(data):
    keras.utils.set_random_seed(1)
    return data.make_model()


def weights_of_keras(data, loss, **options):
    """Trains on full batches."""
    model = make_model(data)
    model.compile(keras.optimizers.SGD(0.02), loss, run_eagerly=True)
    history = model.fit(data.x, data.y, batch_size=BATCH, shuffle=False, verbose=0, **options)
    return model.get_weights(), history.history["loss"][0]


def weights_of_the_loop(data, loss):
    """Averages the values of micro-batches by their rows."""
    model = make_model(data)
    optimizer = keras.optimizers.SGD(0.02)
    losses = []
    for start in range(0, len(data.x), BATCH):
        x, y = data.x[start : start + BATCH], data.y[start : start + BATCH]
        with tf.GradientTape() as tape:
            total = 0.0
            for first in range(0, len(x), MICRO_BATCH):
                rows = slice(first, first + MICRO_BATCH)
                value = loss(tf.cast(y[rows], tf.float32), model(x[rows]))
                total += value * len(x[rows]) / len(x)
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(total) * len(x))
    return model.get_weights(), sum(losses) / len(data.x)


def train(data, loss, k=BATCH // MICRO_BATCH, jit_compile=False, **options):
    """Trains in micro-batches; returns the weights, the loss and the warnings of scalars."""
    model = make_model(data)
    trainer = fa.Trainer(
        model,
        keras.optimizers.SGD(0.02),
        loss,
        gradient_accumulation_steps=k,
        jit_compile=jit_compile,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = trainer.fit(
            data.x, data.y, batch_size=BATCH // k, shuffle=False, verbose=0, **options
        )
    of_losses = [str(w.message) for w in caught if "no mean or sum over its rows" in str(w.message)]
    others = [str(w.message) for w in caught if "no sum or mean" in str(w.message)]
    assert not others
    return model.get_weights(), history.history["loss"][0], of_losses


def require_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# What runs without `-m slow`, and what CI runs of the others.
AT_EVERY_COMMIT = {"mse", "dice of the batch", "center", "a mean and a sum"}
SAMPLE = {"yolo's sums by batch size", "yolo's sums by boolean_mask", "a mask within tf.function"}


def with_marks(values, at_every_commit, sample=()):
    """Marks values as slow, but for some; a `sample` of them for CI."""
    params = []
    for value in values:
        marks = [] if value in at_every_commit else [pytest.mark.slow]
        if value in sample:
            marks.append(pytest.mark.sample)
        params.append(pytest.param(value, marks=marks))
    return params


@pytest.mark.parametrize("name", with_marks(CASES, AT_EVERY_COMMIT, SAMPLE))
def test_every_scalar(name):
    case = CASES[name]
    data = DATA[case.data]
    ours, loss, told = train(data, case.loss)
    if case.over_rows:
        expected, expected_loss = weights_of_keras(data, case.loss)
    else:
        expected, expected_loss = weights_of_the_loop(data, case.loss)
    if case.over_rows and case.is_proven:
        assert not told
    else:
        assert len(told) == 1
        assert "loss_sum, weight_sum" in told[0]
    require_equal(ours, expected)
    assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("name", with_marks(["rmse", "masked cross-entropy", "cox"], ["rmse"]))
def test_one_micro_batch_has_the_value_of_keras(name):
    """Nothing is told: the batch is whole."""
    case = CASES[name]
    data = DATA[case.data]
    ours, loss, told = train(data, case.loss, k=1)
    expected, expected_loss = weights_of_keras(data, case.loss)
    assert not told
    require_equal(ours, expected)
    assert loss == pytest.approx(expected_loss, rel=1e-6)


class OfClass(keras.losses.Loss):
    """A loss whose `call` returns a scalar, for any reduction."""

    def __init__(self, reduce, reduction):
        super().__init__(reduction=reduction)
        self.reduce = reduce

    def call(self, y_true, y_pred):
        return self.reduce(tf.square(y_true - y_pred))


WEIGHTS = np.random.default_rng(2).uniform(0.5, 2.0, len(X)).astype("float32")
REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]


@pytest.mark.parametrize("reduction", with_marks(REDUCTIONS, REDUCTIONS[:1]))
@pytest.mark.parametrize("reduce", with_marks([tf.reduce_mean, tf.reduce_sum], [tf.reduce_sum]))
def test_weights_scale_the_batch_as_in_keras(reduce, reduction):
    """Scales by the mean or the sum of the weights, since Keras multiplies the scalar by each
    weight and reduces the products.
    """
    data = DATA["numbers"]
    loss = OfClass(reduce, reduction)
    ours, _, told = train(data, loss, sample_weight=WEIGHTS / 8)
    expected, _ = weights_of_keras(data, loss, sample_weight=WEIGHTS / 8)
    assert not told
    require_equal(ours, expected)


def test_class_weights_scale_the_batch_as_in_keras():
    data = DATA["classes"]
    arcface = CASES["arcface"].loss
    ours, _, _ = train(data, arcface, class_weight={0: 1.0, 1: 3.0, 2: 0.5})
    expected, _ = weights_of_keras(data, arcface, class_weight={0: 1.0, 1: 3.0, 2: 0.5})
    require_equal(ours, expected)


def masked_model():
    keras.utils.set_random_seed(1)
    ids = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(5, 4, mask_zero=True)(ids)
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


@pytest.mark.parametrize("reduction", with_marks(REDUCTIONS, ["sum"]))
@pytest.mark.parametrize(
    "weights",
    [np.repeat(WEIGHTS[:, None], 6, 1) / 8, pytest.param(None, marks=pytest.mark.slow)],
)
def test_a_mask_scales_the_batch_as_in_keras(reduction, weights):
    """The scalar has all tokens in it, as in Keras; under "sum" it is multiplied by the number that
    the mask leaves.
    """
    y = np.random.default_rng(4).normal(size=(len(IDS), 6, 1)).astype("float32")
    loss = OfClass(lambda t: tf.reduce_mean(t) / 50, reduction)
    theirs = masked_model()
    theirs.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    theirs.fit(IDS, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0)
    optimizer = keras.optimizers.SGD(0.1)
    trainer = fa.Trainer(
        masked_model(), optimizer, loss, gradient_accumulation_steps=4, jit_compile=False
    )
    trainer.fit(IDS, y, sample_weight=weights, batch_size=4, shuffle=False, verbose=0)
    require_equal(trainer.model.get_weights(), theirs.get_weights())


def mask_as_pair(y, p):
    mask = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(mask * tf.square(y - p)), tf.reduce_sum(mask)


def tokens_as_pair(y, p):
    losses = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    mask = tf.cast(y != 0, losses.dtype)
    return tf.reduce_sum(losses * mask), tf.reduce_sum(mask)


@pytest.mark.parametrize("jit_compile", with_marks([False, True], [True]))
@pytest.mark.parametrize(
    ("name", "ratio", "pair"),
    [
        ("tokens", masked_cross_entropy, tokens_as_pair),
        pytest.param("numbers", masked_mse, mask_as_pair, marks=pytest.mark.slow),
    ],
)
def test_a_pair_of_sums_is_the_quotient_over_the_whole_batch(name, ratio, pair, jit_compile):
    data = DATA[name]
    ours, loss, told = train(data, pair, jit_compile=jit_compile)
    expected, expected_loss = weights_of_keras(data, ratio)
    assert not told
    require_equal(ours, expected)
    apart, _, _ = train(data, ratio)
    assert max(np.abs(a - b).max() for a, b in zip(apart, expected, strict=True)) > 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_one_number_for_groups_of_rows_of_batches_that_may_differ():
    """Triplets in a batch of a number of rows that is not known: the trace needs one that three
    divides.
    """

    def triplets(y, outputs):
        anchor, other = (
            ops.reshape(outputs, (-1, 3, 2))[:, 0],
            ops.reshape(outputs, (-1, 3, 2))[:, 1],
        )
        return ops.mean(ops.maximum(ops.sum((anchor - other) ** 2, -1) + y[::3, 0], 0.0))

    x, y = np.random.default_rng(0).normal(size=(2, 12, 2)).astype("float32")
    found = []
    for data in (
        {"x": x, "y": y, "batch_size": 6},
        {"x": ((x[i : i + 6], y[i : i + 6]) for i in (0, 6))},
    ):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
        trainer = fa.Trainer(model, "sgd", triplets, gradient_accumulation_steps=2)
        with pytest.warns(UserWarning, match="one number for a whole batch"):
            trainer.fit(**data, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_one_number_for_batches_of_unknown_length():
    """Takes batches of unknown length, as `padded_batch` makes them."""
    inputs = np.random.default_rng(0).normal(size=(16, 6, 4)).astype("float32")

    def fit(k, loss):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((None, 4)), layers.Dense(4)])
        rows = tf.data.Dataset.from_tensor_slices((inputs, inputs)).batch(16 // k)
        length = tf.Variable(5)  # which TensorFlow cannot tell beforehand
        dataset = rows.map(lambda x, y: (x[:, :length], y[:, :length]))
        if k == 1:
            model.compile(keras.optimizers.SGD(0.1), loss)
            model.fit(dataset, verbose=0)
        else:
            options = {"gradient_accumulation_steps": k, "jit_compile": False}
            fa.Trainer(model, keras.optimizers.SGD(0.1), loss, **options).fit(dataset, verbose=0)
        return model.get_weights()

    expected = fit(1, mse)
    require_equal(fit(4, mse), expected)
    sums = lambda y, p: (squares(y, p), tf.size(y))  # noqa: E731
    require_equal(fit(4, sums), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_of_half_precision_make_no_doubt(dtype):
    spec = keras.KerasTensor((4, 3), dtype)
    losses = Losses(mse).bind(Outputs(["a"], spec), spec)
    assert not losses.unproven


def squares(y, p):
    return tf.reduce_sum(tf.square(y - p))


def counted(y):
    return tf.reduce_sum(tf.cast(y > -100, tf.float32))


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (
            lambda y, p: (mse(y, p), tf.cast(tf.shape(p)[0], tf.float32)),
            "loss_sum does not grow with the rows",
        ),
        (lambda y, p: (squares(y, p), tf.constant(1.0)), "weight_sum does not grow with the rows"),
        (
            lambda y, p: (squares(y, p), tf.maximum(counted(y), 1.0)),
            r"weight_sum is no sum .* \(see Maximum",
        ),
        (
            lambda y, p: (squares(y, p), counted(y) + 1.0),
            "weight_sum is no sum over the rows: those of two",
        ),
        (
            lambda y, p: (tf.sqrt(squares(y, p)), counted(y)),
            r"loss_sum is no sum over the rows \(see Sqrt",
        ),
    ],
)
def test_a_pair_that_does_not_add_up_is_refused(pair, reason):
    spec = keras.KerasTensor((4, 3))
    with pytest.raises(ValueError, match=f"its {reason}"):
        Losses(pair).bind(Outputs(["a"], spec), spec)


def chosen_as_pair(y, p):
    chosen = y > 0
    return [tf.reduce_sum(tf.square(tf.boolean_mask(y - p, chosen))), tf.math.count_nonzero(chosen)]


def test_a_pair_may_be_a_list_with_a_count():
    data = DATA["numbers"]
    ours, _, _ = train(data, chosen_as_pair)
    expected, _ = weights_of_keras(data, masked_mse)
    require_equal(ours, expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: tf.reduce_mean(tf.square(y - p), keepdims=True),
        lambda y, p: ops.reshape(mse(y, p), (1,)),
    ],
    ids=["axes of 1", "one axis of 1"],
)
def test_one_number_may_have_axes(loss):
    data = DATA["numbers"]
    ours, value, told = train(data, loss)
    expected, expected_value = weights_of_keras(data, loss)
    assert not told
    require_equal(ours, expected)
    assert value == pytest.approx(expected_value, rel=1e-6)


def roll_where_large(y, p):
    return mse(y, p) + ops.mean(ops.where(y > 2, ops.roll(p, 1, axis=0), 0.0))


def add_up_where_large(y, p):
    return mse(y, p) + ops.mean(ops.where(y > 2, ops.cumsum(p, axis=0), 0.0))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: mse(y, p) + 1e-5 * squares(0.0, p),
        lambda y, p: squares(y, p) + 1e-3 * mse(0.0, p),
        roll_where_large,
        add_up_where_large,
    ],
    ids=[
        "a small sum beside a mean",
        "a small mean beside a sum",
        "rolled rows",
        "sums along rows",
    ],
)
def test_mixing_that_few_or_small_numbers_hide_is_warned_of(loss):
    spec = keras.KerasTensor((4, 3))
    losses = Losses(loss).bind(Outputs(["a"], spec), spec)
    assert list(losses.unproven) == ["a"]


class Annealed(keras.losses.Loss):
    """A loss that grows with a number; `counts` if it counts its calls itself."""

    def __init__(self, reduce, counts):
        super().__init__()
        self.reduce, self.counts = reduce, counts
        self.step = tf.Variable(1.0, trainable=False, name="step")

    def call(self, y_true, y_pred):
        if self.counts:
            self.step.assign_add(1.0)
        return self.step * self.reduce(ops.square(y_true - y_pred))


def count_steps(loss):
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: loss.step.assign_add(1.0)
    )


@pytest.mark.parametrize(
    "reduce", [ops.mean, lambda t: ops.mean(t, axis=-1)], ids=["one number", "one for each row"]
)
def test_a_loss_that_counts_its_calls_is_refused(reduce):
    """The remedy is exact."""
    data = DATA["numbers"]
    counting = Annealed(reduce, counts=True)
    with pytest.raises(
        ValueError, match=r"loss 'annealed.*' assigns \['step:0'\].*assign it in a callback"
    ):
        train(data, counting)
    assert float(counting.step) == 1.0
    loss, other = Annealed(reduce, counts=False), Annealed(reduce, counts=False)
    ours, _, _ = train(data, loss, callbacks=[count_steps(loss)])
    expected, _ = weights_of_keras(data, other, callbacks=[count_steps(other)])
    require_equal(ours, expected)
    assert float(loss.step) == float(other.step) == 3.0


NORMAL = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")


def test_a_count_of_the_model_is_assigned_by_its_compute_loss():
    """Applies the remedy that the refusal of an assigning loss names."""

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.step = (
                keras.layers.Dense(2),
                self.add_weight(initializer="ones", trainable=False),
            )

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
            self.step.assign_add(1.0)
            return self.step * ops.mean(ops.square(y - y_pred))

    def make():
        keras.utils.set_random_seed(0)
        model = Counting()
        model(np.zeros((1, 3), "float32"))
        return model

    x, y = NORMAL[:16, :3], NORMAL[:16, 3:]
    theirs, ours = make(), make()
    theirs.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    theirs.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    trainer = fa.Trainer(ours, keras.optimizers.SGD(0.1), jit_compile=False)
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for own, each in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(own, each, atol=1e-6)


def test_a_loss_that_squeezes_its_rows_takes_micro_batches_of_two():
    x, y = NORMAL[:8, :3], NORMAL[:8, 3:4]

    def loss(y_true, y_pred):
        return tf.squeeze(tf.square(y_true - y_pred))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", loss, gradient_accumulation_steps=2, jit_compile=False)
    with pytest.raises(
        ValueError, match=r"a single number for a micro-batch of one row.*pass batch_size=2"
    ):
        trainer.fit(x, y, batch_size=1, verbose=0)
    trainer.fit(x, y, batch_size=2, verbose=0)


class Noisy(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, y_true, y_pred):
        return ops.mean(
            ops.square(y_true - y_pred + keras.random.normal(ops.shape(y_pred), seed=self.seeds)),
            axis=-1,
        )


def test_a_loss_may_draw_numbers():
    train(DATA["numbers"], Noisy())


def test_a_pair_takes_no_weights():
    with pytest.raises(ValueError, match="which sample_weight and class_weight cannot weigh"):
        train(DATA["numbers"], mask_as_pair, sample_weight=WEIGHTS)


@pytest.mark.parametrize("name", with_marks(["mse", "yolo's sums"], ["mse"]))
@pytest.mark.parametrize("jit_compile", with_marks([False, True], [False]))
def test_evaluation_is_of_all_rows_as_one_batch(name, jit_compile):
    """Covers a short last batch and weights."""
    case = CASES[name]
    data = DATA[case.data]
    model = make_model(data)
    trainer = fa.Trainer(
        model, "sgd", case.loss, gradient_accumulation_steps=2, jit_compile=jit_compile
    )
    model.compile("sgd", case.loss)
    for weights in (None, WEIGHTS):
        arguments = {"sample_weight": weights, "verbose": 0}
        whole = model.evaluate(data.x, data.y, batch_size=len(data.x), **arguments)
        assert trainer.evaluate(data.x, data.y, batch_size=4, **arguments) == pytest.approx(
            whole, rel=1e-5
        )


@pytest.mark.parametrize("policy", with_marks(["float32", "mixed_float16"], ["float32"]))
def test_several_outputs_with_scalars_and_others(policy):
    """The loss of each output is logged as in Keras, in steps of a dispatch compiled by XLA."""
    # 32 rows: Keras counts a short batch as a long one in an output's log
    x = np.concatenate([X, X[:10]])
    y = [x[:, :3] * 0.5, x[:, 3:]]

    def model():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        a = keras.layers.Dense(3, name="a")(inputs)
        b = keras.layers.Dense(2, name="b")(inputs)
        return keras.Model(inputs, [a, b])

    losses = {"loss": [mse, "mae"], "loss_weights": [0.3, 2.0]}
    keras.config.set_dtype_policy(policy)
    theirs, ours = model(), model()
    optimizers = [keras.optimizers.SGD(0.1) for _ in "ab"]
    theirs.compile(optimizers[0], **losses, run_eagerly=True, auto_scale_loss=False)
    options = {"gradient_accumulation_steps": 2, "steps_per_execution": 2, "jit_compile": True}
    if policy != "float32":
        options["loss_scale"] = None
    trainer = fa.Trainer(ours, optimizers[1], **losses, **options)
    expected = theirs.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    found = trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    tolerance = 1e-6 if policy == "float32" else 2e-3
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5 if policy == "float32" else 2e-3)


class Doubled(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight, training)


def test_the_compiled_loss_in_a_compute_loss_is_a_scalar():
    def model():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        return Doubled(inputs, keras.layers.Dense(3)(inputs))

    data = DATA["numbers"]._replace(make_model=model)
    ours, _, _ = train(data, mse, sample_weight=WEIGHTS)
    expected, _ = weights_of_keras(data, mse, sample_weight=WEIGHTS)
    require_equal(ours, expected)


@pytest.mark.parametrize(
    "kind", with_marks([keras.losses.Dice, keras.losses.Tversky], [keras.losses.Dice])
)
def test_losses_of_keras_that_are_scalars_are_told_of(kind):
    data = DATA["bits"]
    ours, _, told = train(data, kind())
    expected, _ = weights_of_the_loop(data, kind())
    assert len(told) == 1
    require_equal(ours, expected)


def test_without_weights_a_scalar_needs_no_reduction():
    """Trains without weights, since with them Keras would return one number for each weight."""
    data = DATA["numbers"]
    loss = OfClass(tf.reduce_mean, None)
    ours, _, _ = train(data, loss)
    expected, _ = weights_of_keras(data, loss)
    require_equal(ours, expected)
    with pytest.raises(ValueError, match="reduction=None: with sample_weight"):
        train(data, loss, sample_weight=WEIGHTS)


def test_a_step_as_a_call_takes_scalars_too():
    data = DATA["numbers"]
    model, other = make_model(data), make_model(data)
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), mse, jit_compile=False)
    x, y = data.x[:16], data.y[:16]
    result = trainer.train_step((x.reshape(4, 4, 5), y.reshape(4, 4, 3)))
    other.compile(keras.optimizers.SGD(0.1), mse)
    assert float(result.loss) == pytest.approx(float(other.train_on_batch(x, y)), rel=1e-6)
    require_equal(model.get_weights(), other.get_weights())
