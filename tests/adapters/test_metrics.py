import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

ROWS, TIME, CLASSES = 22, 3, 3
rng = np.random.default_rng(0)


def classifier(K):
    K.utils.set_random_seed(0)
    return K.Sequential(
        [
            K.Input((TIME, 2)),
            K.layers.Masking(),
            K.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def value(K=keras):
    K.utils.set_random_seed(1)
    return K.Sequential([K.Input((2,)), K.layers.Dense(1, activation="sigmoid")])


def rows_batch():
    return rng.normal(size=(ROWS, 2)).astype("float32"), rng.integers(0, 2, (ROWS, 1))


def tokens_batch():
    valid = rng.random((ROWS, TIME, 1)) < 0.6
    x = rng.normal(size=(ROWS, TIME, 2)).astype("float32") * valid
    return x, rng.integers(0, CLASSES, (ROWS, TIME))


def keras_figures(K, model, loss, metrics, batch, weighted_metrics=()):
    """Keras's own, over all rows as one batch, and of an epoch in batches of 12 that leaves the
    weights alone.
    """
    twin = K.models.clone_model(model)
    twin.set_weights(model.get_weights())
    twin.compile(
        K.optimizers.SGD(0.0),
        loss=loss,
        metrics=metrics,
        weighted_metrics=weighted_metrics,
        run_eagerly=True,
    )
    x, y, *weight = batch
    fitted = twin.fit(
        x, y, 12, sample_weight=weight[0] if weight else None, shuffle=False, verbose=0
    ).history
    twin.reset_metrics()
    return twin.test_on_batch(*batch, return_dict=True), {
        name: values[-1] for name, values in fitted.items()
    }


def check(K, make_model, loss, make_metrics, batch, make_weighted=lambda K: [], jit_compile=False):
    """Metrics of `evaluate`, and of an epoch of `fit` that leaves the weights alone, are Keras's
    own.
    """
    model = make_model(K)
    expected, fitted = keras_figures(K, model, loss, make_metrics(K), batch, make_weighted(K))
    trainer = fa.Trainer(
        model,
        K.optimizers.SGD(0.0),
        loss,
        metrics=make_metrics(K),
        weighted_metrics=make_weighted(K),
        gradient_accumulation_steps=3,
        jit_compile=jit_compile and K is keras,
    )
    x, y, *weight = batch
    weight = weight[0] if weight else None
    history = trainer.fit(x, y, 4, sample_weight=weight, shuffle=False, verbose=0).history
    evaluated = trainer.evaluate(x, y, 4, sample_weight=weight, verbose=0, return_dict=True)
    own = {"grad_norm", "loss_scale", "skipped_steps"}
    trained = {name: values[-1] for name, values in history.items() if name not in own}
    assert set(trained) == set(evaluated) == set(expected)
    for name in expected:
        np.testing.assert_allclose(
            evaluated[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name
        )
        np.testing.assert_allclose(trained[name], fitted[name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore:You are passing weight as `float`")
def test_over_all_rows_whatever_pads_them(K):
    x, y = rows_batch()
    check(
        K,
        value,
        "binary_crossentropy",
        lambda K: [
            "accuracy",
            "mae",
            K.metrics.AUC(name="area"),
            K.metrics.Precision(name="precision"),
            K.metrics.R2Score(),
            K.metrics.RootMeanSquaredError(),
            K.metrics.BinaryIoU(name="iou"),
        ],
        (x, y.astype("float32")),
        jit_compile=True,
    )


def test_weighted_and_unweighted_side_by_side(K):
    weights = rng.choice([0.0, 0.5, 2.0], size=ROWS).astype("float32")
    check(
        K,
        value,
        "mse",
        lambda K: ["accuracy", "mae"],
        (*rows_batch(), weights),
        lambda K: ["mae", K.metrics.Recall(name="recall")],
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_masked_tokens_are_left_out(K, weighted):
    batch = tokens_batch()
    if weighted:
        batch = (*batch, rng.choice([0.0, 0.5, 2.0], size=(ROWS, TIME)).astype("float32"))
    check(
        K,
        classifier,
        "sparse_categorical_crossentropy",
        lambda K: ["accuracy", K.metrics.SparseTopKCategoricalAccuracy(2)],
        batch,
        lambda K: ["sparse_categorical_crossentropy"] if weighted else [],
        jit_compile=weighted,
    )


def test_a_weight_per_row_holds_for_each_of_its_tokens():
    x, y = tokens_batch()
    weights = rng.choice([0.0, 0.5, 2.0], size=ROWS).astype("float32")
    model = classifier(keras)
    trainer = fa.Trainer(
        model,
        "sgd",
        "sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
        jit_compile=False,
    )
    found = trainer.evaluate(x, y, 4, sample_weight=weights, verbose=0, return_dict=True)
    factors = (x != 0).any(-1) * weights[:, np.newaxis]
    right = model.predict(x, verbose=0).argmax(-1) == y
    np.testing.assert_allclose(
        found["accuracy"], (right * factors).sum() / factors.sum(), rtol=1e-5
    )


def test_metrics_of_several_outputs_by_name(K):
    def make_model(K):
        K.utils.set_random_seed(2)
        x = K.Input((2,))
        return K.Model(
            x,
            {
                "one": K.layers.Dense(1, name="one")(x),
                "two": K.layers.Dense(CLASSES, "softmax", name="two")(x),
            },
        )

    x, y = rows_batch()
    check(
        K,
        make_model,
        {"one": "mse", "two": "sparse_categorical_crossentropy"},
        lambda K: {"one": ["mae"], "two": ["accuracy", "sparse_categorical_crossentropy"]},
        (x, {"one": x[:, :1] ** 2, "two": y[:, 0]}),
    )


def test_with_one_value_for_each_class(K):
    x, y = tokens_batch()
    check(
        K,
        lambda K: K.Sequential([K.Input((2,)), K.layers.Dense(CLASSES, "softmax")]),
        "categorical_crossentropy",
        lambda K: [K.metrics.F1Score()],
        (x[:, 0], np.eye(CLASSES, dtype="float32")[y[:, 0]]),
    )


@keras.saving.register_keras_serializable()
class Total(keras.Metric):
    """A metric as users write them: it ignores the sample weights, and would count rows that
    pad.
    """

    def __init__(self, name="total", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(
            keras.ops.sum(keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred))
        )

    def result(self):
        return self.total


def test_a_metric_that_ignores_weights_sees_no_row_that_pads():
    check(keras, value, "mse", lambda K: [Total()], rows_batch())


def test_a_function_per_row_and_one_per_batch(K):
    def off(y_true, y_pred):
        return tf.abs(tf.cast(y_true, tf.float32) - y_pred)[:, 0]

    check(K, value, "mse", lambda K: [off], rows_batch())

    def worst(y_true, y_pred):
        return tf.reduce_max(off(y_true, y_pred))

    model = value(K)
    x, y = rows_batch()
    trainer = fa.Trainer(model, K.optimizers.SGD(), "mse", metrics=[worst], jit_compile=False)
    found = trainer.evaluate(x, y, 4, verbose=0, return_dict=True)["worst"]
    errors = np.abs(model.predict(x, verbose=0) - y)
    # As in Keras: the mean of the batches' values.
    np.testing.assert_allclose(
        found, np.mean([errors[i : i + 4].max() for i in range(0, ROWS, 4)]), rtol=1e-5
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("fitted", [False, True], ids=["", "fitted"])
def test_one_that_is_no_mean_over_rows_is_warned_of(micro_batches, fitted, recwarn):
    """Warns where accumulation makes a difference, in a later fit too, and logs the mean over
    micro-batches.
    """

    def dice(y_true, y_pred):
        y_true = tf.cast(y_true, tf.float32)
        return 2 * tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_true + y_pred)

    def compared(y_true, y_pred):
        return tf.abs(y_pred - tf.reduce_mean(y_pred, axis=0))[:, 0]

    @tf.function
    def in_function(y_true, y_pred):
        return tf.abs(y_pred - tf.reduce_mean(y_pred, axis=0))[:, 0]

    def by_row(y_true, y_pred):
        return tf.abs(tf.cast(y_true, tf.float32) - y_pred)[:, 0]

    x, y = rows_batch()
    cosine = keras.metrics.CosineSimilarity("cosine", axis=0)
    trainer = fa.Trainer(
        value(),
        keras.optimizers.SGD(0.0),
        "mse",
        [dice, compared, in_function, by_row, cosine, "mae"],
        gradient_accumulation_steps=1 if fitted else micro_batches,
        jit_compile=False,
    )
    if fitted:
        trainer.fit(x, y, 4, shuffle=False, verbose=0)
        trainer.gradient_accumulation_steps = micro_batches
    logged = trainer.fit(x, y, 4, shuffle=False, verbose=0).history["dice"][0]
    warned = [
        str(each.message) for each in recwarn if "no sum or mean over the rows" in str(each.message)
    ]
    assert len(warned) == (4 if micro_batches > 1 else 0)
    for name in ("'dice'", "'compared'", "'in_function'", "'cosine'") if warned else ():
        assert sum(name in message for message in warned) == 1
    p = trainer.model.predict(x, verbose=0)
    batches = [slice(i, i + 4) for i in range(0, ROWS, 4)]
    own = [2 * (y[b] * p[b]).sum() / (y[b] + p[b]).sum() for b in batches]
    assert logged == pytest.approx(np.mean(own), rel=1e-5)


@pytest.mark.parametrize("shape", [(8, 5, 1), (10, 4, 4, 1)], ids=["tokens", "pixels"])
def test_metrics_of_axes_as_long_as_a_micro_batch(shape):
    """Checks axes of the micro-batch's length, which Keras could take for the axis of row weights."""
    local = np.random.default_rng(3)
    x = local.normal(size=(*shape[:-1], 2)).astype("float32")
    y = local.integers(0, 2, shape)

    def metrics():
        K = keras.metrics
        return [
            K.Precision(name="precision"),
            K.AUC(name="area"),
            K.BinaryIoU(name="iou"),
            K.TruePositives(name="tp"),
        ]

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1, "sigmoid")])
    expected, fitted = keras_figures(keras, model, "binary_crossentropy", metrics(), (x, y))
    trainer = fa.Trainer(
        model,
        keras.optimizers.SGD(0.0),
        "binary_crossentropy",
        metrics(),
        gradient_accumulation_steps=2,
        jit_compile=False,
    )
    logged = trainer.fit(x, y, shape[1], shuffle=False, verbose=0).history
    evaluated = trainer.evaluate(x, y, shape[1], verbose=0, return_dict=True)
    for name in expected:
        assert logged[name][0] == pytest.approx(fitted[name], rel=1e-5)
        assert evaluated[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_function_may_return_a_number(K):
    def steps(y_true, y_pred):
        return 3.0

    def numpy_scalar(y_true, y_pred):
        return np.float32(2.0)

    x, y = rows_batch()
    model = value(K)
    model.compile(
        "sgd", "mse", metrics=[steps, numpy_scalar], weighted_metrics=[steps], run_eagerly=True
    )
    trainer = fa.Trainer(
        value(K),
        K.optimizers.SGD(),
        "mse",
        [steps, numpy_scalar],
        weighted_metrics=[steps],
        jit_compile=False,
    )
    theirs = model.evaluate(x, y, verbose=0, return_dict=True)
    ours = trainer.evaluate(x, y, verbose=0, return_dict=True)
    assert ours == pytest.approx(theirs, rel=1e-5) and len(ours) == 4


def test_a_name_that_is_taken_gets_a_number_and_an_object_is_given_once():
    x, y = rows_batch()
    mae = keras.metrics.MeanAbsoluteError(name="loss")
    trainer = fa.Trainer(value(), "sgd", "mse", [mae, "mae"], jit_compile=False)
    logs = trainer.evaluate(x, y, verbose=0, return_dict=True)
    assert logs["loss_1"] == logs["mae"] != logs["loss"]
    with pytest.raises(ValueError, match="The metric 'loss' is given twice"):
        fa.Trainer(
            value(), "sgd", "mse", [mae], weighted_metrics=[mae], jit_compile=False
        ).evaluate(x, y, verbose=0)


def test_start_anew_in_every_epoch(K):
    x, y = rows_batch()
    trainer = fa.Trainer(value(K), K.optimizers.SGD(0.0), "mse", metrics=["mae"], jit_compile=False)
    history = trainer.fit(x, y, 8, epochs=3, validation_data=(x, y), verbose=0).history
    for name in ("mae", "val_mae"):
        np.testing.assert_allclose(history[name], [history["mae"][0]] * 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (["acuracy"], ValueError, "metrics='acuracy' is not a Keras 3 metric"),
        ([keras.metrics.AUC], TypeError, "must be a Keras 3 metric object"),
        ([3], TypeError, "metrics=3"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, error, message):
    with pytest.raises(error, match=message):
        fa.Trainer(value(), "sgd", "mse", metrics=metrics)
