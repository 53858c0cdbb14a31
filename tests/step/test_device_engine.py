"""A model's step: state that a bad step leaves alone, dropout, and indices that XLA would clamp."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

K, B, D = 3, 4, 5


def make_stack(seed=0, k=K):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(k, B, D)).astype("float32"), rng.integers(0, 3, (k, B))


@pytest.fixture(scope="module")
def normalised():
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((D,)),
        keras.layers.Dense(6),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    scale = fa.DynamicLossScale(init_scale=2.0**10)
    return fa.Trainer(model, keras.optimizers.Adam(0.01), loss, ["accuracy"], loss_scale=scale)


def everything(trainer):
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return {v.path: v.numpy().tobytes() for v in variables}


@pytest.mark.parametrize("where", range(K))
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_micro_batch_leaves_weights_slots_and_statistics(normalised, where, bad):
    normalised.train_step(make_stack())
    x, y = make_stack(1)
    x[where, 1, 2] = bad
    before, scale = everything(normalised), float(normalised.loss_scale.scale())
    assert any("moving_mean" in path for path in before)
    assert not normalised.train_step((x, y)).grads_finite
    assert everything(normalised) == before
    assert float(normalised.loss_scale.scale()) == max(scale / 2, 1.0)
    assert normalised.train_step(make_stack()).grads_finite
    after = everything(normalised)
    assert all(
        after[path] != before[path] for path in before if "moving" in path or "kernel" in path
    )


class Counting(keras.layers.Layer):
    """State that no `add_weight` has made."""

    def __init__(self):
        super().__init__()
        self.mean, self.calls = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x))
        return x - self.mean


def of_keras(make):
    return keras.Sequential([keras.Input((D,)), make(), keras.layers.Dense(3)])


def of_tf_keras():
    tf_keras = pytest.importorskip("tf_keras")

    class Normalized(tf_keras.layers.Dense):
        """Assigns a weight that the optimizer trains, as a spectral normalisation does."""

        def call(self, x, training=False):
            if training:
                self.kernel.assign(self.kernel / tf.norm(self.kernel))
            return super().call(x)

    return tf_keras.Sequential([tf_keras.Input((D,)), Normalized(4), tf_keras.layers.Dense(3)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_keras(lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4))),
        lambda: of_keras(Counting),
        of_tf_keras,
    ],
    ids=["SpectralNormalization", "tf.Variable", "tf_keras"],
)
def test_a_skipped_step_restores_whatever_the_model_assigns(make):
    model, (x, y) = make(), make_stack()
    trainer = fa.Trainer(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def values():
        own = (
            [model.layers[0].mean, model.layers[0].calls]
            if isinstance(model.layers[0], Counting)
            else []
        )
        return [v.numpy().tobytes() for v in (*model.weights, *own)]

    first = values()
    trainer.train_step((x, y))
    before = values()
    assert all(a != b for a, b in zip(before, first, strict=True))
    x[1, 0, 0] = np.nan
    assert not trainer.train_step((x, y)).grads_finite
    assert values() == before


def test_statistics_that_were_frozen_since_do_not_move_on():
    normalization = keras.layers.BatchNormalization(scale=False, center=False, name="norm")
    trainer = fa.Trainer(
        of_keras(lambda: normalization), "sgd", "sparse_categorical_crossentropy", jit_compile=False
    )
    trainer.train_step(make_stack())
    before = everything(trainer)
    normalization.trainable = False
    with pytest.raises(ValueError, match=r"`trainable` of \['norm'\]"):
        trainer.train_step(make_stack())
    assert everything(trainer) == before
    normalization.trainable = True
    trainer.train_step(make_stack())


class Noise(keras.layers.Layer):
    """Multiplies by a trained vector of ones under dropout: with SGD, its gradient shows the
    masks.
    """

    def __init__(self, seed):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=seed)

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x, training=False):
        return keras.ops.sum(
            self.dropout(self.factor * x, training=training), axis=-1, keepdims=True
        )


def make_masked(seed=7, width=64):
    model = keras.Sequential([keras.Input((width,)), Noise(seed)])
    return fa.Trainer(
        model, keras.optimizers.SGD(1.0), lambda y, p: p[:, 0], gradient_accumulation_steps=2
    )


def masks(trainer, x):
    """The gradient of each step: the sum over its micro-batches of rows times masks."""
    layer = trainer.model.layers[-1]
    gradients = []
    for stack in x:
        before = layer.factor.numpy()
        trainer.train_step((stack, np.zeros((*stack.shape[:2], 1), "float32")))
        gradients.append(before - layer.factor.numpy())
    return np.array(gradients)


def test_dropout_differs_between_micro_batches_and_steps_and_repeats_under_a_seed():
    width = 64
    one = np.ones((1, 1, 1, width), "float32")
    first_only, second_only = (
        np.concatenate([a, b], 1) for a, b in ((one, 0 * one), (0 * one, one))
    )
    trainer = make_masked()
    state = trainer.model.layers[-1].dropout.seed_generator.state
    seed = state.numpy()
    a = masks(trainer, first_only)
    state.assign(seed)
    b = masks(trainer, second_only)
    c = masks(trainer, second_only)
    for x in (a, b, c):
        assert 0.2 < np.count_nonzero(x) / width < 0.8
    assert (a != b).any(), "both micro-batches of one step had the same mask"
    assert (b != c).any(), "two steps had the same mask"
    repeated = make_masked()
    np.testing.assert_array_equal(masks(repeated, first_only), a)


def make_language_model(vocabulary=9):
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(vocabulary, 3, name="tokens"),
            keras.layers.Dense(5),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return fa.Trainer(model, keras.optimizers.Adam(0.1), loss)


@pytest.fixture(scope="module")
def language_model():
    return make_language_model()


def tokens(ids=0, labels=0):
    return np.full((2, B, 4), ids, "int32"), np.full((2, B, 4), labels, "int32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, 9), r"embedding 'tokens': values from 0 to 9 were seen, but only 0 to 8"),
        ((0, -1), r"embedding 'tokens': values from -1 to"),
        ((1, 5), r"labels of output .*: values from 0 to 5 were seen, but only 0 to 4"),
        ((1, -2), r"labels of output .*: values from -2 to"),
    ],
)
def test_indices_out_of_range_are_named_and_nothing_moves(language_model, change, message):
    language_model.train_step(tokens())
    before = everything(language_model)
    stack = tokens()
    stack[change[0]][1, 2, 3] = change[1]
    with pytest.raises(ValueError, match=message):
        language_model.train_step(stack)
    assert everything(language_model) == before
    language_model.train_step(tokens(labels=1))
    assert everything(language_model) != before


def test_labels_out_of_range_are_named_without_xla():
    """TensorFlow's own operation fails for them, in the middle of the step."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    metrics = [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
    trainer = fa.Trainer(model, "sgd", loss, metrics, jit_compile=False)
    before = model.get_weights()
    x, y = np.ones((2, B, 4), "float32"), np.zeros((2, B))
    y[1, 2] = 7
    for call in (
        lambda: trainer.train_step((x, y)),
        lambda: trainer.evaluate(x[1], y[1], verbose=0),
    ):
        with pytest.raises(
            ValueError, match=r"values from 0 to 7 were seen, but only 0 to 2 exist"
        ):
            call()
    assert all(map(np.array_equal, model.get_weights(), before))


def test_an_ignored_class_is_no_label_out_of_range(language_model):
    stack = tokens()
    stack[1][:, :, 1:] = -1
    assert float(language_model.train_step(stack).weight) == 2 * B


def two_taggers(jit_compile=True):
    """Makes two outputs of labels (-1 for none), with a penalty, and slots that a zero gradient
    would move.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    hidden = keras.layers.Dense(6, kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(3, name=name)(hidden) for name in "pq"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
    return fa.Trainer(model, optimizer, [loss, loss], jit_compile=jit_compile)


@pytest.mark.parametrize("jit_compile", [True, False])
def test_an_update_without_a_valid_element_in_any_output_changes_nothing(jit_compile):
    trainer = two_taggers(jit_compile)
    x, y = make_stack()
    none = np.full_like(y, -1)
    trainer.train_step((x, (y, y)))
    before = everything(trainer)
    result = trainer.train_step((x, (none, none)))
    assert everything(trainer) == before and float(result.weight) == 0.0
    assert result.grads_finite
    one = none.copy()
    one[2, 1] = 0
    trainer.train_step((x, (none, one)))
    after = everything(trainer)
    assert all(
        after[path] != before[path] for path in before if "kernel" in path or "iteration" in path
    )


def test_the_largest_indices_are_in_range(language_model):
    language_model.train_step(tokens(8, 4))


def test_fit_reads_late_but_moves_nothing_after_a_bad_label():
    """The steps behind the bad one are dispatched before it is read; they must not move a weight
    either.
    """
    trainer = make_language_model()
    x, y = np.zeros((40, 4), "int32"), np.zeros((40, 4), "int32")
    y[9, 0] = 7
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(everything(trainer))
    )
    with pytest.raises(ValueError, match="values from 0 to 7"):
        trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[callback])
    assert len(seen) >= 3
    assert everything(trainer) == seen[1] == seen[-1] != seen[0]


def test_the_result_is_five_scalars_on_the_device(language_model):
    result = language_model.train_step(tokens())
    assert isinstance(result, fa.StepResult)
    assert [t.dtype for t in result] == [tf.float32, tf.float32, tf.float32, tf.bool, tf.float32]


def test_an_embedding_called_in_reverse_takes_no_ids_there():
    embedding = keras.layers.ReversibleEmbedding(7, D)
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, embedding(embedding(inputs), reverse=True))
    trainer = fa.Trainer(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.random.default_rng(0).integers(0, 7, (4, 2))
    # Vectors far outside [0, 7), which are no ids.
    embedding.embeddings.assign(100 * np.ones((7, D)))
    trainer.fit(ids, ids, batch_size=2, verbose=0)
    with pytest.raises(ValueError, match="embedding 'reversible_embedding"):
        trainer.fit(ids + 5, ids, batch_size=2, verbose=0)


def test_programs_are_traced_anew_where_the_model_computes_otherwise():
    factor = 1.0
    model = keras.Sequential(
        [keras.Input((D,)), keras.layers.Dense(1), keras.layers.Lambda(lambda x: factor * x)]
    )
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.0), "mse")
    x, y = make_stack()[0], np.zeros((K, B, 1), "float32")

    def losses():
        rows = x.reshape(-1, D), y.reshape(-1, 1)
        return float(trainer.train_step((x, y)).loss), trainer.evaluate(
            *rows, batch_size=B, verbose=0
        )

    before = losses()
    factor = 3.0
    assert losses() == before
    trainer._engine.retrace()
    np.testing.assert_allclose(losses(), np.multiply(9.0, before), rtol=1e-6)


class Doubled(keras.Model):
    """A `compute_loss` of its own around the compiled loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2.0 * super().compute_loss(x, y, y_pred, sample_weight, training)


@pytest.mark.parametrize(
    "model, reduction", [(keras.Model, "sum"), (Doubled, "sum_over_batch_size")]
)
def test_padding_of_the_last_execution_is_in_no_log(model, reduction):
    a = keras.Input((2,))
    outputs = [
        keras.layers.Dense(1, kernel_initializer="zeros", name=name)(a) for name in ("p", "q")
    ]
    losses = [keras.losses.MeanSquaredError(reduction=reduction) for _ in outputs]
    options = {"gradient_accumulation_steps": 2, "steps_per_execution": 2, "jit_compile": False}
    trainer = fa.Trainer(model(a, outputs), keras.optimizers.SGD(1e-9), losses, **options)
    y = np.ones([12, 1], "float32")
    # three steps of four rows
    logs = trainer.fit(np.ones([12, 2]), [y, y], batch_size=2, verbose=0).history
    each = 4.0 if reduction == "sum" else 1.0
    assert [logs["p_loss"], logs["q_loss"]] == pytest.approx(np.full([2, 1], each))
    assert logs["loss"] == pytest.approx([2 * each * (2 if model is Doubled else 1)])
