"""Tests what a model computes itself: `compute_loss`, `compute_metrics`, added losses, metrics,
steps.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import fastaccum as fa

RNG = np.random.default_rng(0)
ROWS, TIME = 11, 4  # three micro-batches of four rows, the last of three
X = RNG.normal(size=(ROWS, TIME, 5)).astype("float32")
for row, length in enumerate(RNG.integers(1, TIME + 1, ROWS)):
    X[row, length:] = 0.0  # masked
Y = RNG.normal(size=(ROWS, TIME, 3)).astype("float32")
WEIGHT = RNG.uniform(0.5, 2.0, (ROWS, TIME)).astype("float32")


@pytest.fixture
def family(K):
    return K


def tagger(family, **methods):
    """A model of masked tokens with a regulariser, whose class has further methods."""

    def init(self):
        family.Model.__init__(self)
        self.mask = family.layers.Masking()
        self.hidden = family.layers.Dense(4, kernel_regularizer="l2")
        self.out = family.layers.Dense(3)
        self.seen = family.metrics.Mean(name="seen")

    def call(self, x):
        return self.out(self.hidden(self.mask(x)))

    kind = type("Tagger", (family.Model,), {"__init__": init, "call": call, **methods})
    family.utils.set_random_seed(1)
    model = kind()
    model(X[:1])
    return model


def weights(model):
    return [v.numpy() for v in model.trainable_variables]


def both(family, make, y=Y, sample_weight=None, loss=None, metrics=None, **options):
    """The largest difference from Keras's own full-batch step, relative to its update; and both
    logs.
    """
    theirs, ours = make(), make()
    start = weights(theirs)
    theirs.compile(family.optimizers.SGD(0.5), loss=loss, metrics=metrics, run_eagerly=True)
    arrays = {"x": X, "y": y, "sample_weight": sample_weight}
    history = theirs.fit(**arrays, batch_size=ROWS, shuffle=False, verbose=0).history
    trainer = fa.Trainer(
        ours,
        family.optimizers.SGD(0.5),
        loss,
        metrics or (),
        gradient_accumulation_steps=3,
        **{"jit_compile": False, **options},
    )
    logs = trainer.fit(**arrays, batch_size=4, shuffle=False, verbose=0).history
    pairs = zip(start, weights(theirs), weights(ours), strict=True)
    errors = [np.abs(b - c).max() / np.abs(b - a).max() for a, b, c in pairs if np.any(a != b)]
    return max(errors), *({k: v[-1] for k, v in each.items()} for each in (history, logs))


def plus_kl(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
    base = keras.Model if isinstance(self, keras.Model) else tf_keras.Model
    loss = base.compute_loss(self, x, y, y_pred, sample_weight, **options)
    return 0.5 * loss + tf.reduce_mean(y_pred**2)


@pytest.mark.parametrize("jit_compile", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compute_loss_that_adds_to_the_compiled_one(family, jit_compile):
    error, history, logs = both(
        family,
        lambda: tagger(family, compute_loss=plus_kl),
        Y,
        WEIGHT,
        "mse",
        jit_compile=jit_compile,
    )
    assert error < 3e-6
    if family is keras:  # tf_keras logs the compiled loss alone
        assert logs["loss"] == pytest.approx(history["loss"], rel=1e-6)


def test_the_mean_of_micro_batches_would_be_something_else(family):
    """The negative control: masked tokens differ from micro-batch to micro-batch."""
    model = tagger(family, compute_loss=plus_kl)
    model.compile(loss="mse")
    parts = [slice(0, 4), slice(4, 8), slice(8, 11)]
    x, y, weight = map(tf.constant, (X, Y, WEIGHT))
    losses = [float(model.compute_loss(x[p], y[p], model(x[p]), weight[p])) for p in parts]
    whole = float(model.compute_loss(x, y, model(x), weight))
    assert abs(np.average(losses, weights=[4, 4, 3]) - whole) > 1e-3 * abs(whole)


def test_a_compute_loss_of_its_own_without_a_loss(family):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = tf.reduce_mean((y - y_pred) ** 2) + tf.add_n(self.losses)
        self.seen.update_state(loss)
        return loss

    error, _, logs = both(family, lambda: tagger(family, compute_loss=compute_loss))
    assert error < 3e-6
    model = tagger(family, compute_loss=compute_loss)
    x, y = map(tf.constant, (X, Y))
    losses = [
        float(model.compute_loss(x[p], y[p], model(x[p])))
        for p in (slice(0, 4), slice(4, 8), slice(8, 11))
    ]
    # A mean over micro-batches, as the model wrote it; "loss" is by rows.
    assert logs["seen"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert logs["loss"] == pytest.approx(np.average(losses, weights=[4, 4, 3]), rel=1e-5)


def test_a_sum_over_rows_is_told():
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return 0.05 * tf.reduce_sum((y - y_pred) ** 2) + tf.add_n(self.losses)

    def make():
        return tagger(keras, compute_loss=compute_loss)

    error, history, logs = both(keras, make, own_loss_reduction="sum")
    assert error < 3e-6 and logs["loss"] == pytest.approx(history["loss"], rel=1e-6)
    assert both(keras, make)[0] > 0.1
    with pytest.raises(ValueError, match="own_loss_reduction='max' must be 'mean' or 'sum'"):
        fa.Trainer(make(), own_loss_reduction="max")


def test_sums_whose_regularisers_would_count_for_each_micro_batch(family):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_sum((y - y_pred) ** 2) + tf.add_n(self.losses)

    options = {"optimizer": "sgd", "jit_compile": False, "own_loss_reduction": "sum"}
    if family is tf_keras:
        with pytest.raises(
            ValueError, match=r"the compute_loss of a tf_keras model adds the weight"
        ):
            fa.Trainer(tagger(family, compute_loss=compute_loss), **options).fit(X, Y, verbose=0)
    else:
        model = tagger(family, compute_loss=compute_loss)
        model.out.activity_regularizer = keras.regularizers.L2(0.1)
        with pytest.raises(
            ValueError, match=r"the activity regularisers of .* are means over rows"
        ):
            fa.Trainer(model, **options).fit(X, Y, verbose=0)


def test_loss_weights_without_a_loss_to_weight(family):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_mean((y - y_pred) ** 2)

    with pytest.raises(ValueError, match=r"loss_weights=7\.0 without a loss"):
        fa.Trainer(tagger(family, compute_loss=compute_loss), "sgd", loss_weights=7.0)
    model = tagger(family)
    model.compile("sgd", "mse")
    trainer = fa.Trainer(model, family.optimizers.SGD(0.0), loss_weights=2.0, jit_compile=False)
    plain = fa.Trainer(tagger(family), family.optimizers.SGD(0.0), "mse", jit_compile=False)
    losses = [each.evaluate(X, Y, verbose=0)[0] for each in (trainer, plain)]
    penalty = float(tf.add_n(model.losses))
    assert losses[0] - penalty == pytest.approx(2 * (losses[1] - penalty), rel=1e-5)


def test_added_losses_that_are_sums():
    def call(self, x):
        hidden = self.hidden(self.mask(x))
        self.add_loss(0.05 * tf.reduce_sum(hidden**2))
        return self.out(hidden)

    for loss in (None, "mse"):
        error, history, logs = both(
            keras, lambda: tagger(keras, call=call), loss=loss, own_loss_reduction="sum"
        )
        assert error < 3e-6 and logs["loss"] == pytest.approx(history["loss"], rel=1e-6)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, activity_regularizer="l2")])
    with pytest.raises(ValueError, match="own_loss_reduction='sum', but the activity regularisers"):
        fa.Trainer(model, "sgd", "mse", own_loss_reduction="sum").fit(
            X[:, 0], Y[:, 0, :1], verbose=0
        )


def test_losses_per_row_within_a_compute_loss_are_summed():
    def call(self, x):
        hidden = self.hidden(self.mask(x))
        self.add_loss(tf.reduce_sum(hidden**2, [1, 2]))
        return self.out(hidden)

    assert both(keras, lambda: tagger(keras, call=call, compute_loss=plus_kl), loss="mse")[0] < 3e-6


@pytest.mark.parametrize("y", [Y, None])
def test_added_losses_alone(family, y):
    def call(self, x):
        hidden = self.hidden(self.mask(x))
        divergence = tf.reduce_mean(hidden**2)
        self.add_loss(divergence)
        self.seen.update_state(tf.reduce_sum(hidden), 1.0)
        return self.out(hidden)

    error, history, logs = both(family, lambda: tagger(family, call=call), y)
    assert error < 3e-6
    assert logs["loss"] == pytest.approx(history["loss"], rel=1e-6)
    # its mean over three micro-batches
    assert 3 * logs["seen"] == pytest.approx(history["seen"], rel=1e-5)


def test_a_stack_without_targets():
    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(tf.reduce_mean(hidden**2))
        return hidden

    model = tagger(keras, call=call)
    stack = X[:8].reshape(2, 4, TIME, 5)
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.5), jit_compile=False)
    first, second = (float(trainer.train_step(each).loss) for each in [(stack,), (stack, None)])
    assert second < first
    with pytest.raises(ValueError, match=r"A train step takes \(x, y\)"):
        fa.Trainer(tagger(keras), "sgd", "mse").train_step((stack,))


def test_a_compute_metrics_of_its_own(family):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = family.Model.compute_metrics(self, x, y, y_pred, sample_weight)
        self.seen.update_state(tf.reduce_mean(tf.abs(y - y_pred), [1, 2]))
        results["seen"] = self.seen.result()
        results["twice"] = 2 * self.seen.result()
        return results

    error, history, logs = both(
        family, lambda: tagger(family, compute_metrics=compute_metrics), loss="mse", metrics=["mae"]
    )
    assert error < 3e-6
    for name in ("mae", "seen", "twice"):
        assert logs[name] == pytest.approx(history[name], rel=1e-5), name


@pytest.mark.parametrize("method", ["train_step", "test_step", "make_train_function"])
def test_a_step_of_its_own_is_refused(family, method):
    model = tagger(family, **{method: lambda self, *_: {}})
    with pytest.raises(ValueError, match=f"Tagger overrides {method}.*compute_loss"):
        fa.Trainer(model, "sgd", "mse")
    plain = tagger(family)
    plain.train_step = lambda data: {}
    with pytest.raises(ValueError, match="overrides train_step"):
        fa.Trainer(plain, "sgd", "mse")


def test_what_a_model_was_compiled_with(family):
    def make():
        model = tagger(family)
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    model = make()
    trainer = fa.Trainer(
        model, family.optimizers.SGD(0.5), gradient_accumulation_steps=3, jit_compile=False
    )
    logs = trainer.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history
    error, _, expected = both(family, lambda: tagger(family), loss="mse", metrics=["mae"])
    assert error < 3e-6
    assert logs["loss"][0] == expected["loss"] and logs["mae"][0] == expected["mae"]


def test_metrics_compiled_without_a_loss(family):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_mean((y - y_pred) ** 2)

    model = tagger(family, compute_loss=compute_loss)
    model.compile("sgd", metrics=["mae"])
    logs = fa.Trainer(model, "sgd", jit_compile=False).fit(X, Y, verbose=0).history
    assert logs["mae"][0] > 0


def test_results_of_all_metrics_by_name():
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.seen.update_state(tf.reduce_mean(tf.abs(y - y_pred), [1, 2]))
        return {metric.name: metric.result() for metric in self.metrics}

    _, history, logs = both(
        keras, lambda: tagger(keras, compute_metrics=compute_metrics), loss="mse"
    )
    assert logs["seen"] == pytest.approx(history["seen"], rel=1e-5)
    model = tagger(
        keras,
        compute_metrics=lambda self, x, y, y_pred, w=None: {"v": tf.reduce_mean(y_pred, [0, 1])},
    )
    with pytest.raises(ValueError, match=r"compute_metrics returned 'v' of shape \(3,\).*scalar"):
        fa.Trainer(model, "sgd", "mse", jit_compile=False).fit(X, Y, verbose=0)


def test_no_loss_at_all(family):
    with pytest.raises(
        ValueError, match=r"loss=None, and Tagger has no loss of its own.*Pass a Keras loss"
    ):
        fa.Trainer(tagger(family), "sgd").fit(X, Y, verbose=0)


def returning(value):
    return lambda self, x=None, y=None, y_pred=None, sample_weight=None, training=True: value(
        self, y, y_pred
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda self, y, y_pred: tf.reduce_mean(y_pred, 1),
            r"returned .*shape=\(4, 3\).*floating-point scalar",
        ),
        (lambda self, y, y_pred: None, "returned None"),
        (
            lambda self, y, y_pred: (
                plus_kl(self, None, y, y_pred) + plus_kl(self, None, y, -y_pred)
            ),
            "more than once",
        ),
    ],
)
def test_what_compute_loss_may_not_do(value, message):
    model = tagger(keras, compute_loss=returning(value))
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        fa.Trainer(model, "sgd", "mse", jit_compile=False).fit(X, Y, batch_size=4, verbose=0)
    np.testing.assert_array_equal(before[0], weights(model)[0])


def test_logits_that_are_never_computed_are_not_handed_over():
    model = tagger(keras, compute_loss=plus_kl)
    with pytest.raises(
        ValueError, match=r"compute_loss or compute_metrics of its own.*LinearCrossEntropy"
    ):
        fa.Trainer(model, "sgd", fa.LinearCrossEntropy(model.out.name), jit_compile=False).fit(
            X, np.zeros((ROWS, TIME)), verbose=0
        )


def test_a_loss_that_compares_rows_warns():
    def contrast(self, y, y_pred):
        flat = tf.reshape(y_pred, [-1, TIME * 3])
        return tf.reduce_mean(tf.matmul(flat, flat, transpose_b=True))

    model = tagger(keras, compute_loss=returning(contrast))
    with pytest.warns(UserWarning, match="Tagger computes itself may be no sum or mean"):
        trainer = fa.Trainer(model, "sgd", gradient_accumulation_steps=3, jit_compile=False)
        trainer.fit(X, Y, batch_size=4, verbose=0)


def share_of_positives(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
    positive = tf.cast(y[..., 0] > 0, tf.float32)
    return keras.Model.compute_loss(
        self, x, y, y_pred, positive / tf.reduce_sum(positive), **options
    )


def test_weights_that_normalize_a_sum_over_the_batch_are_refused():
    """Refuses a sum that is normalised by the batch's positives, as in detectors: the sum over
    micro-batches would be a multiple of the batch's.
    """
    model = tagger(keras, compute_loss=share_of_positives)
    before = weights(model)
    trainer = fa.Trainer(model, "sgd", keras.losses.MeanSquaredError("sum"), jit_compile=False)
    for _ in range(2):  # a step that was refused is built, and refused, again
        with pytest.raises(
            ValueError,
            match=r"Tagger.compute_loss weights its compiled loss by .*reduction is 'sum'",
        ):
            trainer.fit(X, Y, batch_size=4, verbose=0)
    np.testing.assert_array_equal(before[0], weights(model)[0])
    with pytest.warns(UserWarning, match="Tagger computes itself may be no sum or mean"):
        trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=3, jit_compile=False)
        trainer.fit(X, Y, batch_size=4, verbose=0)


def test_targets_that_compute_loss_makes_for_the_compiled_loss_are_refused():
    def from_inputs(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
        return keras.Model.compute_loss(self, x, x[..., :3], y_pred, sample_weight, **options)

    trainer = fa.Trainer(tagger(keras, compute_loss=from_inputs), "sgd", "mse", jit_compile=False)
    with pytest.raises(
        ValueError, match=r"There is no y, so compute_loss makes the targets.*fastaccum.TrainStep"
    ):
        trainer.fit(X, batch_size=4, verbose=0)


def test_weights_of_single_rows_are_taken_into_a_sum():
    def weighted(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
        return keras.Model.compute_loss(
            self, x, y, y_pred, tf.cast(y[..., 0] > 0, tf.float32), **options
        )

    loss = keras.losses.MeanSquaredError("sum")
    assert both(keras, lambda: tagger(keras, compute_loss=weighted), loss=loss)[0] < 3e-6


@pytest.mark.parametrize("stateful", [False, True])
def test_counting_denominators_moves_no_state(family, stateful):
    """Several losses need the full batch's denominators first: the pass that counts them is none of
    the model's.
    """
    family.utils.set_random_seed(1)
    x = family.Input(batch_shape=(4, TIME, 5))
    hidden = family.layers.LSTM(3, return_sequences=True, stateful=stateful)(x)
    model = family.Model(x, [family.layers.Dense(1)(hidden), family.layers.Dense(2)(hidden)])
    steps = [(X[i : i + 4], [Y[i : i + 4, :, :1], Y[i : i + 4, :, 1:]]) for i in (0, 4)]
    trainer = fa.Trainer(model, family.optimizers.SGD(0.0), ["mse", "mae"], jit_compile=False)
    stack = tf.nest.map_structure(lambda *parts: np.stack(parts), *steps)
    loss = float(trainer.train_step(stack).loss)
    if stateful:
        lstm = model.layers[1]
        (lstm.reset_states if family is tf_keras else lstm.reset_state)()
    expected = []
    for inputs, (first, second) in steps:
        a, b = model(inputs, training=True)
        expected.append(np.mean((a - first) ** 2) + np.mean(np.abs(b - second)))
    assert loss == pytest.approx(np.mean(expected), rel=1e-5)
