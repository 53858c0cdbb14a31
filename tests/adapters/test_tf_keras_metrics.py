import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.sample]

ROWS, TIME, CLASSES = 22, 3, 3
rng = np.random.default_rng(0)


def rows_batch():
    return rng.normal(size=(ROWS, 2)).astype("float32"), rng.integers(0, 2, (ROWS, 1))


def tokens_batch():
    valid = rng.random((ROWS, TIME, 1)) < 0.6
    x = rng.normal(size=(ROWS, TIME, 2)).astype("float32") * valid
    return x, rng.integers(0, CLASSES, (ROWS, TIME))


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked tokens"])
def test_metrics_of_tf_keras_log_what_tf_keras_logs(masked):
    tf_keras = pytest.importorskip("tf_keras")
    layers, metrics = tf_keras.layers, tf_keras.metrics

    class Largest(metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight("value", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            if tf.reduce_max(y_pred) > self.value:  # for AutoGraph
                self.value.assign(tf.reduce_max(y_pred))

        def result(self):
            return self.value

    def compiled():
        if masked:
            return [
                metrics.SparseCategoricalAccuracy(name="accuracy"),
                metrics.SparseCategoricalCrossentropy(name="ce"),
            ]
        return [metrics.AUC(name="auc"), metrics.MeanSquaredError(name="mse"), Largest(), "mae"]

    (x, y), width = (tokens_batch(), CLASSES) if masked else (rows_batch(), 1)
    own, model = (
        tf_keras.Sequential(
            [
                tf_keras.Input(x.shape[1:]),
                layers.Masking(),
                layers.Dense(width, activation="softmax" if masked else "sigmoid"),
            ]
        )
        for _ in range(2)
    )
    model.set_weights(own.get_weights())
    weight = rng.uniform(0.5, 2.0, ROWS).astype("float32")
    loss = "sparse_categorical_crossentropy" if masked else "binary_crossentropy"
    weighted = (
        [metrics.SparseCategoricalAccuracy(name="weighted")]
        if masked
        else [metrics.AUC(name="weighted")]
    )
    own.compile(
        tf_keras.optimizers.SGD(0.0),
        loss,
        metrics=compiled(),
        weighted_metrics=weighted,
        run_eagerly=True,
    )
    expected = own.test_on_batch(x, y, weight, return_dict=True)
    fitted = own.fit(x, y, 12, sample_weight=weight, shuffle=False, verbose=0).history
    trainer = fa.Trainer(
        model,
        tf_keras.optimizers.SGD(0.0),
        loss,
        compiled(),
        weighted_metrics=[type(weighted[0])(name="weighted")],
        gradient_accumulation_steps=3,
        jit_compile=False,
    )
    trained = trainer.fit(x, y, 4, sample_weight=weight, epochs=2, shuffle=False, verbose=0).history
    evaluated = trainer.evaluate(x, y, 4, sample_weight=weight, verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(evaluated[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(
            trained[name][-1], fitted[name][0], rtol=2e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize(
    "names", [("keras", "tf_keras"), ("tf_keras", "keras")], ids=" metric of ".join
)
def test_a_metric_of_the_other_keras_is_left_out_of_a_saved_model(names, tmp_path):
    """Leaves out metrics with which a saved model could not be saved or loaded again."""
    K, other = map(pytest.importorskip, names)
    model = K.Sequential([K.Input((3,)), K.layers.Dense(1)])
    metrics = [other.metrics.MeanAbsoluteError("error")]
    trainer = fa.Trainer(model, K.optimizers.SGD(0.1), "mse", metrics, jit_compile=False)
    x = np.ones((4, 3), "float32")
    assert "error" in trainer.fit(x, x[:, :1], batch_size=4, verbose=0).history
    model.save(tmp_path / "model.keras")
    loaded = K.models.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(x, x[:, :1], verbose=0) == pytest.approx(
        trainer.evaluate(x, x[:, :1], verbose=0)[0]
    )
