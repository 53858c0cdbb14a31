"""The Trainer takes Keras 3 models of every kind, and tf_keras models."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.layers import layer as keras_layer
from oracle import keras_steps

import fastaccum as fa
from fastaccum.adapters import added_losses

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 6)).astype("float32")
Y = X[:, :2].sum(1, keepdims=True).astype("float32")
IDS = RNG.integers(0, 9, size=(20, 6))


class Subclassed(keras.Model):
    """Unbuilt until it is called, its layers made where Keras allows them to be."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.normalize = keras.layers.BatchNormalization()
        self.inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])

    def call(self, x, training=False):
        return self.inner(self.normalize(self.hidden(x), training=training))


def sequential():
    return keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])


def functional():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, inputs])))


def dict_inputs():
    inputs = {name: keras.Input((6,), name=name) for name in ("left", "right")}
    return keras.Model(
        inputs, keras.layers.Dense(1)(keras.layers.Add()([inputs["left"], inputs["right"]]))
    )


def fit(model, x, y=Y, optimizer="sgd", loss="mse", **options):
    """Trains two epochs in train steps of 2 x 4 rows, of which the last has 4."""
    trainer = fa.Trainer(
        model, optimizer, loss, gradient_accumulation_steps=2, jit_compile=False, **options
    )
    return trainer, trainer.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)


@pytest.mark.parametrize(
    "make, x",
    [(sequential, X), (functional, X), (dict_inputs, {"left": X, "right": X})],
    ids=["unbuilt Sequential", "functional", "dict inputs"],
)
def test_a_model_trains_as_keras_trains_it(make, x):
    keras.utils.set_random_seed(3)
    own = make()
    own.compile("sgd", "mse", run_eagerly=True)
    own.build(tf.nest.map_structure(np.shape, x)) if not own.built else None
    model = keras.models.clone_model(own)
    model.build(tf.nest.map_structure(np.shape, x)) if not model.built else None
    model.set_weights(own.get_weights())
    own.fit(x, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    fit(model, x)
    for a, b in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Subclassed, sequential])
def test_an_unbuilt_model_is_built_by_its_first_data(make):
    model = make()
    assert not model.built
    trainer, history = fit(model, X)
    assert model.built
    assert history.history["loss"][1] < history.history["loss"][0]
    assert trainer.predict(X, verbose=0).shape == (20, 1)


def test_batch_statistics_of_a_subclassed_model_move():
    model = Subclassed()
    fit(model, X)
    assert np.abs(model.normalize.moving_mean.numpy()).min() > 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_keeps_variables_in_float32(policy):
    keras.config.set_dtype_policy(policy)
    model = functional()
    trainer, history = fit(model, X, optimizer="adam")
    assert {v.dtype for v in model.variables} == {"float32"}
    assert trainer.predict(X, verbose=0).dtype == policy.removeprefix("mixed_")
    assert history.history["loss"][1] < history.history["loss"][0]


def test_adopting_leaves_no_metric_twice():
    model = functional()
    trainer, _ = fit(model, X, metrics=["mae"])
    assert [m.name for m in model.metrics] == ["loss", "compile_metrics"]
    assert trainer.model.optimizer is trainer.optimizer


# tf_keras: imported in the tests, since importing it binds tf.keras.


@pytest.fixture(scope="module")
def tf_keras():
    return pytest.importorskip("tf_keras")


def legacy(tf_keras, *layers):
    tf_keras.utils.set_random_seed(3)
    inputs = x = tf_keras.Input((6,))
    for layer in layers:
        x = layer(x)
    return tf_keras.Model(inputs, tf_keras.layers.Dense(1)(x))


def test_losses_that_tf_keras_layers_add_are_those_of_the_last_call(tf_keras):
    own, model = (
        legacy(tf_keras, tf_keras.layers.Dense(4, "tanh", activity_regularizer="l2"))
        for _ in range(2)
    )
    own.compile(tf_keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    expected = own.fit(X, Y, batch_size=len(X), shuffle=False, verbose=0)
    trainer = fa.Trainer(
        model, tf_keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=4, jit_compile=False
    )
    history = trainer.fit(X, Y, batch_size=-(-len(X) // 4), shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_an_activity_regulariser_that_is_a_mean_over_rows_says_so(family):
    layers = pytest.importorskip(family).layers

    def sparse(activations):
        return tf.reduce_mean(tf.abs(activations))

    codes = layers.Dense(4, activity_regularizer=sparse, name="codes")
    model = pytest.importorskip(family).Sequential([layers.Input((6,)), codes, layers.Dense(1)])
    with pytest.raises(
        ValueError, match="activity_regularizer sparse of layer 'codes' is a mean over rows"
    ):
        fa.Trainer(model, "sgd", "mse").fit(X, Y, verbose=0)


@pytest.mark.skipif(
    not added_losses._DIVIDES_BY_ROWS, reason="Keras before 3.14 does not divide by rows"
)
def test_an_activity_regulariser_becomes_an_added_loss_as_the_error_says():
    rows = 8
    x, y = X[:rows], Y[:rows]

    def sparse(activations):
        return tf.reduce_mean(tf.abs(activations))

    class Sparse(keras.layers.Layer):
        def call(self, activations):
            self.add_loss(sparse(activations) / rows)
            return activations

    def network(middle, **options):
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                keras.layers.Dense(4, "tanh", **options),
                middle,
                keras.layers.Dense(1),
            ]
        )

    theirs = network(keras.layers.Identity(), activity_regularizer=sparse)
    theirs.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    theirs.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    ours = network(Sparse())
    trainer = fa.Trainer(
        ours, keras.optimizers.SGD(0.5), "mse", gradient_accumulation_steps=4, jit_compile=False
    )
    with pytest.raises(
        ValueError, match="divided by the rows of an update it is as strong as in Keras"
    ):
        refused = network(keras.layers.Identity(), activity_regularizer=sparse)
        fa.Trainer(refused, "sgd", "mse", jit_compile=False).fit(x, y, verbose=0)
    trainer.fit(x, y, batch_size=rows // 4, shuffle=False, verbose=0)
    for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tf_keras_model_trains_as_tf_keras_trains_it(tf_keras, jit_compile):
    own, model = (legacy(tf_keras, tf_keras.layers.Dense(4, "tanh")) for _ in range(2))
    own.compile(tf_keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    expected = own.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    optimizer = tf_keras.optimizers.Adam(0.01)
    trainer = fa.Trainer(
        model, optimizer, "mse", ["mae"], gradient_accumulation_steps=2, jit_compile=jit_compile
    )
    history = trainer.fit(
        X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)
    )
    for a, b in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    assert int(optimizer.iterations) == 6
    np.testing.assert_allclose(
        history.history["val_loss"][-1], own.evaluate(X, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_array_equal(trainer.predict(X, verbose=0), model.predict(X, verbose=0))


def test_a_tf_keras_model_with_state_and_ids(tf_keras):
    tf_keras.utils.set_random_seed(3)
    layers = tf_keras.layers
    normalize = layers.BatchNormalization()
    model = tf_keras.Sequential(
        [
            layers.Input((6,)),
            layers.Embedding(9, 4),
            layers.Flatten(),
            normalize,
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    before = model.layers[0].embeddings.numpy()
    trainer = fa.Trainer(model, tf_keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=2)
    trainer.fit(IDS, Y, batch_size=4, epochs=2, verbose=0)
    assert np.abs(normalize.moving_mean.numpy()).min() > 0
    assert not np.array_equal(model.layers[0].embeddings.numpy(), before)
    weights = model.get_weights()
    with pytest.raises(ValueError, match=r"ids given to embedding .* 0 to 8 exist"):
        trainer.fit(IDS + 1, Y, batch_size=10, verbose=0)
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tf_keras_batch_statistics_are_those_of_tf_keras(tf_keras):
    own, model = (
        legacy(tf_keras, tf_keras.layers.BatchNormalization(momentum=0.5)) for _ in range(2)
    )
    own.compile(tf_keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    own.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    own.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    fit(model, X, optimizer=tf_keras.optimizers.SGD(0.0))
    for a, b in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_tf_keras_regulariser_counts_once_a_step(tf_keras):
    penalised = {"kernel_regularizer": tf_keras.regularizers.L2(0.1)}
    own, model = (legacy(tf_keras, tf_keras.layers.Dense(4, **penalised)) for _ in range(2))
    own.compile(tf_keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    own.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    fit(model, X, optimizer=tf_keras.optimizers.SGD(0.1))
    for a, b in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_keras_3_optimizer_trains_a_tf_keras_model(tf_keras):
    model = legacy(tf_keras, tf_keras.layers.Dense(4))
    _, history = fit(model, X, optimizer="adamw")
    assert history.history["loss"][1] < history.history["loss"][0]


def test_a_trained_tf_keras_model_can_be_saved(tf_keras, tmp_path):
    model = legacy(tf_keras, tf_keras.layers.Dense(4))
    trainer, _ = fit(model, X, optimizer=tf_keras.optimizers.SGD(0.1))
    model.save(tmp_path / "model.keras")
    loaded = tf_keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), trainer.predict(X, verbose=0))


class ByKeyword(keras.Model):
    """Layers that are replaced while a step is traced, called as keras.io calls many."""

    def __init__(self):
        super().__init__()
        self.dilated = keras.layers.Conv2D(3, 2, dilation_rate=2, padding="same")
        self.convolve, self.pool = keras.layers.Conv2D(4, 3), keras.layers.MaxPooling2D()
        self.normalize, self.head = keras.layers.BatchNormalization(), keras.layers.Dense(2)

    def call(self, x, training=None):
        x = self.pool(inputs=self.convolve(inputs=self.dilated(inputs=x)))
        return self.head(inputs=self.normalize(inputs=x, training=training)[:, 0, 0])


class Tied(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = keras.layers.ReversibleEmbedding(9, 4, name="table")

    def call(self, ids):
        return self.table(inputs=self.table(inputs=ids), reverse=True)


@pytest.mark.parametrize(
    "policy", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["images", "tied", "tied, head left out"])
def test_replaced_layers_take_their_arguments_by_keyword(name, policy):
    keras.config.set_dtype_policy(policy)
    x, make, loss = (
        (RNG.normal(size=(8, 5, 5, 1)), ByKeyword, "mse")
        if name == "images"
        else (IDS[:8], Tied, None)
    )
    own, model = make(), make()
    own(x), model(x)
    model.set_weights(own.get_weights())
    before = own.get_weights()
    y = np.ones((8, 2)) if name == "images" else x
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras_steps(own, loss or cross_entropy, [(x, y)], 0.1)
    head = fa.LinearCrossEntropy(head="table") if name == "tied, head left out" else cross_entropy
    fa.Trainer(model, keras.optimizers.SGD(0.1), loss or head).fit(x, y, batch_size=8, verbose=0)
    for a, b, c in zip(model.get_weights(), own.get_weights(), before, strict=True):
        np.testing.assert_allclose(
            a - c, b - c, atol=(1e-6 if policy == "float32" else 0.05) * (1 + np.abs(b).max())
        )


class Regularised(keras.layers.Dense):
    """A loss of its own, a mean over rows, besides what Keras adds for the activity regulariser."""

    def call(self, x):
        y = super().call(x)
        self.add_loss(0.3 * keras.ops.mean(y**2))
        return y


@pytest.mark.parametrize("divided", [True, False], ids=["Keras 3.14", "Keras 3.12"])
def test_activity_regularisers_count_as_keras_has_them(divided, monkeypatch):
    if not divided:  # as before 3.14
        undivided = types.SimpleNamespace(
            **{**vars(keras_layer.ops), "divide_no_nan": lambda loss, rows: loss}
        )
        monkeypatch.setattr(keras_layer, "ops", undivided)
    monkeypatch.setattr(added_losses, "_DIVIDES_BY_ROWS", divided)
    own, model = (
        keras.Sequential(
            [keras.Input((6,)), Regularised(3, activity_regularizer="l2"), keras.layers.Dense(1)]
        )
        for _ in range(2)
    )
    model.set_weights(own.get_weights())
    keras_steps(own, "mse", [(X[:8], Y[:8])] * 2, 0.1)
    fit(model, X[:8], Y[:8], optimizer=keras.optimizers.SGD(0.1))
    for a, b in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Hashed(keras.layers.Embedding):
    def call(self, ids):
        return super().call(keras.ops.cast(ids, "int32") % self.input_dim)


class Padded(keras.layers.Embedding):
    """A row more than it was asked for, and ids from 1."""

    def build(self, shape=None):
        self.input_dim += 1
        super().build(shape)
        self.input_dim -= 1

    def call(self, ids):
        return super().call(ids + 1)


class Embedding(keras.layers.Layer):
    """A name that Keras's layer has too, and an `input_dim` that counts something else."""

    def __init__(self):
        super().__init__()
        self.input_dim, self.dense = 2, keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("make", [lambda: Hashed(5, 3), lambda: Padded(9, 3), Embedding])
def test_an_embedding_that_is_not_given_what_it_looks_up_is_not_refused(make):
    model = keras.Sequential([make(), keras.layers.Flatten(), keras.layers.Dense(1)])
    _, history = fit(model, IDS)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert type(model.layers[0]) is type(make())


@pytest.mark.parametrize(
    "make", [keras.layers.Embedding, keras.layers.ReversibleEmbedding, Padded, "int8"]
)
def test_ids_that_an_embedding_looks_up_must_exist(make):
    embedding = keras.layers.Embedding(8, 3) if make == "int8" else make(8, 3)
    model = keras.Sequential(
        [keras.Input((6,)), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    if make == "int8":
        embedding.quantize("int8")
    trainer = fa.Trainer(model, "sgd", "mse")
    trainer.fit(np.minimum(IDS, 7), Y, batch_size=20, verbose=0)
    before = model.get_weights()
    with pytest.raises(ValueError, match=f"ids given to embedding '{embedding.name}'.* only 0 to"):
        trainer.fit(np.where(IDS == 8, 50, IDS), Y, batch_size=20, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_call_that_the_user_replaced_is_left_as_it_was():
    embedding = keras.layers.Embedding(5, 3)
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    original = embedding.call
    # the ids that it is called with are not looked up
    embedding.call = mine = lambda ids: 2 * original(ids % 5)
    fa.Trainer(model, "sgd", "mse").fit(np.full((2, 2), 17), np.zeros((2, 1)), verbose=0)
    assert vars(embedding)["call"] is mine


class Noisy(keras.layers.Layer):
    def call(self, mean, noise):
        return mean + tf.exp(0.5 * mean) * noise


def test_half_precision_reaches_every_input_of_a_layer():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs, noise = keras.Input((6,)), keras.Input((1,))
    model = keras.Model([inputs, noise], Noisy()(keras.layers.Dense(1)(inputs), noise))
    _, history = fit(model, [X, X[:, :1]])
    assert history.history["loss"][1] < history.history["loss"][0]


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, distillation_loss):
        super().compile(optimizer, jit_compile=False)
        self.distillation_loss = distillation_loss

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.distillation_loss(self.teacher(x), y_pred)


def test_arguments_of_an_overridden_compile_stay():
    model = Distiller(functional(), functional())
    model.teacher.trainable = False
    model.compile("sgd", keras.losses.MeanSquaredError())
    model(X)
    start = model.get_weights()
    fa.Trainer(model, "sgd", jit_compile=False, gradient_accumulation_steps=2).fit(
        X, Y, batch_size=10, verbose=0
    )
    ours = model.get_weights()
    model.set_weights(start)
    model.compile("sgd", keras.losses.MeanSquaredError())
    model.fit(X, Y, batch_size=20, shuffle=False, verbose=0)
    for a, b in zip(ours, model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


class OfPlaces(keras.layers.Layer):
    """Adds what a table has for places, which are a variable, as in KerasHub's SigLIP."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = keras.layers.Embedding(4, 3)

    def build(self, shape):
        self.table.build((4,))
        self.places = self.add_weight(shape=(4,), dtype="int32", initializer="zeros")
        self.places.trainable = False

    def call(self, x):
        return x + self.table(self.places)


def test_ids_may_be_a_variable():
    model = keras.Sequential([keras.Input((4, 3)), OfPlaces(), keras.layers.Dense(1)])
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    x = np.random.default_rng(0).normal(size=(4, 4, 3)).astype("float32")
    y = np.ones((4, 4, 1), "float32")
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=2)
    trainer.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    reference.compile(keras.optimizers.SGD(0.1), "mse")
    reference.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for got, want in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_inputs_may_lack_the_axis_that_the_model_adds():
    """A functional model of columns [rows, 1] takes [rows], as in Keras."""
    inputs = {name: keras.Input((1,), name=name) for name in ("age", "dose")}
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=8).astype("float32") for name in inputs}
    y = rng.normal(size=8).astype("float32")
    before = model.predict(x, verbose=0)
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    logs = trainer.fit(x, y, batch_size=8, verbose=0).history
    assert logs["loss"][0] == pytest.approx(np.mean((before[:, 0] - y) ** 2), rel=1e-5)
    assert logs["mae"][0] == pytest.approx(np.mean(np.abs(before[:, 0] - y)), rel=1e-5)
