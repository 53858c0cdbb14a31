"""Variables as `loss_weights`, which a callback anneals: read in each step, as in Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

ROWS, EPOCHS = 32, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 5)).astype("float32")
Y = [rng.normal(size=(ROWS, 2)).astype("float32"), rng.normal(size=(ROWS, 3)).astype("float32")]


class Anneal(keras.callbacks.Callback):
    """Adds to a weight after each update."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def on_train_batch_end(self, batch, logs=None):
        self.weight.assign(self.weight + 0.25)


def model():
    keras.utils.set_random_seed(1)
    x = keras.Input((5,))
    return keras.Model(x, [keras.layers.Dense(2, name="a")(x), keras.layers.Dense(3, name="b")(x)])


def keras_history(weight, weights):
    theirs = model()
    theirs.compile(keras.optimizers.SGD(0.1), ["mse", "mae"], loss_weights=weights)
    history = theirs.fit(
        X, Y, batch_size=16, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Anneal(weight)]
    )
    return theirs, history.history


def trainer(weights, **options):
    options |= {"loss_weights": weights, "gradient_accumulation_steps": 4}
    return fa.Trainer(model(), keras.optimizers.SGD(0.1), ["mse", "mae"], **options)


def fit(ours, weight, epochs=EPOCHS, **options):
    options |= {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [Anneal(weight)]}
    return ours.fit(X, Y, epochs=epochs, **options).history


def assert_same(ours, theirs):
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_annealed_weight_is_exact(kind, jit_compile):
    weight = kind(0.0)
    theirs, logs = keras_history(weight, [1.0, weight])
    ours_weight = kind(0.0)
    ours = trainer([1.0, ours_weight], jit_compile=jit_compile)
    history = fit(ours, ours_weight)
    assert_same(ours.model, theirs)
    for name in logs:
        np.testing.assert_allclose(history[name], logs[name], rtol=1e-5)
    evaluated = ours.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    expected = theirs.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    np.testing.assert_allclose(
        [evaluated[name] for name in expected], [*expected.values()], rtol=1e-5
    )
    assert ours._builder.engine.compiled_execute.function.experimental_get_tracing_count() == 1


def test_a_single_loss_takes_a_variable():
    weight = keras.Variable(0.5)
    keras.utils.set_random_seed(1)
    one = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    other = keras.models.clone_model(one)
    other.set_weights(one.get_weights())
    one.compile(keras.optimizers.SGD(0.1), "mse", loss_weights=[weight])
    one.fit(X, Y[0], batch_size=16, shuffle=False, verbose=0)
    ours = fa.Trainer(
        other,
        keras.optimizers.SGD(0.1),
        "mse",
        loss_weights=[weight],
        gradient_accumulation_steps=2,
    )
    ours.fit(X, Y[0], batch_size=8, shuffle=False, verbose=0)
    assert_same(other, one)


def test_a_checkpoint_has_the_weight(tmp_path):
    whole, parts = keras.Variable(0.0), keras.Variable(0.0)
    straight = trainer([1.0, whole], jit_compile=False)
    fit(straight, whole)
    fit(trainer([1.0, parts], jit_compile=False), parts, 1, checkpoint_dir=tmp_path)
    parts = keras.Variable(7.0)  # as another process makes it, here with another value
    resumed = trainer([1.0, parts], jit_compile=False)
    fit(resumed, parts, checkpoint_dir=tmp_path)
    assert float(parts.value) == float(whole.value) == 0.25 * 2 * EPOCHS
    assert_same(resumed.model, straight.model)


@pytest.mark.parametrize("weight", [keras.Variable([1.0, 2.0]), tf.Variable(1)])
def test_no_scalar_is_refused(weight):
    with pytest.raises(ValueError, match="make it a scalar of float32"):
        fit(trainer([1.0, weight]), keras.Variable(0.0))


def difference(y_true, y_pred):
    value = tf.numpy_function(
        lambda a, b: np.float32(np.abs(a - b).mean()), [y_true, y_pred], tf.float32
    )
    return tf.ensure_shape(value, [])  # which Keras needs too


def test_a_metric_that_calls_python_trains_without_xla_and_says_so():
    logs = []
    for accumulate in (False, True):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        if not accumulate:
            made.compile(keras.optimizers.SGD(0.1), "mse", metrics=[difference], jit_compile=False)
            logs.append(made.fit(X, Y[0], batch_size=16, shuffle=False, verbose=0).history)
            continue
        ours = fa.Trainer(
            made, keras.optimizers.SGD(0.1), "mse", [difference], gradient_accumulation_steps=2
        )
        with pytest.warns(
            UserWarning, match=r"metrics=\['difference'\], which call Python.*trains without XLA"
        ):
            logs.append(ours.fit(X, Y[0], batch_size=8, shuffle=False, verbose=0).history)
    for name, values in logs[0].items():
        np.testing.assert_allclose(logs[1][name], values, rtol=1e-5)
    asked = fa.Trainer(made, keras.optimizers.SGD(0.1), "mse", [difference], jit_compile=True)
    with pytest.raises(ValueError, match=r"metrics=\['difference'\].*jit_compile='auto' or False"):
        asked.fit(X, Y[0], batch_size=8, verbose=0)
