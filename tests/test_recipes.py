"""The usual hand-written accumulation loops, each as a scenario: `fit` learns what the recipe
means.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_same, keras_steps

import fastaccum as fa

ROWS, FEATURES, CLASSES = 22, 3, 4
ACCUMULATION, BATCH_SIZE = 3, 4
STEP = ACCUMULATION * BATCH_SIZE

rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, FEATURES)).astype("float32")
LABELS = rng.integers(0, CLASSES, ROWS)
WEIGHTS = [
    rng.normal(size=shape).astype("float32")
    for shape in [(FEATURES, 5), (5,), (5, CLASSES), (CLASSES,)]
]


def make_model(K):
    model = K.Sequential(
        [K.Input((FEATURES,)), K.layers.Dense(5, activation="tanh"), K.layers.Dense(CLASSES)]
    )
    model.set_weights(WEIGHTS)
    return model


def cross_entropy(K):
    return K.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_trainer(K, optimizer, loss=None, accumulation=ACCUMULATION):
    options = {"gradient_accumulation_steps": accumulation, "jit_compile": K is keras}
    return fa.Trainer(make_model(K), optimizer, loss or cross_entropy(K), **options)


def tensors(model):
    return [v.value if isinstance(v, keras.Variable) else v for v in model.trainable_variables]


def by_hand(K, optimizer, micro_batches, steps, compiled=False):
    """The recipe itself, written right: sums of gradients over micro-batches, divided once by the
    rows.
    """
    model = make_model(K)
    optimizer.build(model.trainable_variables)

    def gradient(x, y):
        with tf.GradientTape() as tape:
            losses = K.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            total = tf.reduce_sum(losses)
        return tape.gradient(total, tensors(model))

    gradient = tf.function(gradient, reduce_retracing=True) if compiled else gradient
    for step in steps:
        parts = [micro_batches[i] for i in step]
        rows = sum(len(x) for x, _ in parts)
        sums = [sum(g) for g in zip(*(gradient(x, y) for x, y in parts), strict=True)]
        optimizer.apply_gradients(
            zip([g / rows for g in sums], model.trainable_variables, strict=True)
        )
    return model


def micro_batches(sizes=None):
    ends = np.cumsum(sizes or [BATCH_SIZE] * (ROWS // BATCH_SIZE) + [ROWS % BATCH_SIZE])
    return [(X[a:b], LABELS[a:b]) for a, b in itertools.pairwise([0, *ends])]


def steps_of(count):
    return [range(i, min(i + ACCUMULATION, count)) for i in range(0, count, ACCUMULATION)]


@pytest.fixture(scope="module")
def trainer(K):
    return make_trainer(K, K.optimizers.SGD(0.5))


@pytest.fixture
def fresh(trainer):
    trainer.model.set_weights(WEIGHTS)
    return trainer


@pytest.mark.parametrize("compiled", [False, True], ids=["eager loop", "tf.function loop"])
def test_arrays_with_a_remainder(K, fresh, compiled):
    fresh.fit(X, LABELS, BATCH_SIZE, shuffle=False, verbose=0)
    expected = by_hand(K, K.optimizers.SGD(0.5), micro_batches(), steps_of(6), compiled)
    assert_same(fresh.model.get_weights(), expected.get_weights(), 1e-5)


def test_a_tf_data_pipeline(K, fresh):
    dataset = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(BATCH_SIZE).prefetch(2)
    fresh.fit(dataset, epochs=2, verbose=0)
    expected = by_hand(K, K.optimizers.SGD(0.5), micro_batches(), steps_of(6) * 2)
    assert_same(fresh.model.get_weights(), expected.get_weights(), 1e-5)


def test_batches_of_varying_size(K, fresh):
    sizes = [4, 1, 3, 2, 4, 4, 4]
    batches = micro_batches(sizes)
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=(tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None], tf.int64)),
    )
    fresh.fit(dataset, verbose=0)
    expected = by_hand(K, K.optimizers.SGD(0.5), batches, steps_of(len(sizes)))
    assert_same(fresh.model.get_weights(), expected.get_weights(), 1e-5)


def test_a_custom_loop_around_train_step(K, fresh):
    """`for x, y in dataset: ...` with stacks in place of batches."""
    stack = (
        X[:STEP].reshape(ACCUMULATION, BATCH_SIZE, -1),
        LABELS[:STEP].reshape(ACCUMULATION, BATCH_SIZE),
    )
    losses = [float(fresh.train_step(stack).loss) for _ in range(3)]
    model = make_model(K)
    expected = [
        keras_steps(model, cross_entropy(K), [(X[:STEP], LABELS[:STEP])], 0.5)["loss"]
        for _ in range(3)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same(fresh.model.get_weights(), model.get_weights(), 1e-5)


def test_inside_a_tf_function_with_any_variables():
    """The core within a training loop that is itself a graph."""
    w = tf.Variable([1.0, -1.0])

    def loss_fn(batch):
        x, y = batch
        return tf.reduce_sum((tf.linalg.matvec(x, w) - y) ** 2), tf.cast(tf.size(y), tf.float32)

    step = fa.TrainStep(loss_fn, [w], keras.optimizers.SGD(0.1))
    stacks = (
        rng.normal(size=(4, 3, 2, 2)).astype("float32"),
        rng.normal(size=(4, 3, 2)).astype("float32"),
    )

    @tf.function(jit_compile=True)
    def epoch(stacks):
        for i in tf.range(4):
            step.run(tf.nest.map_structure(lambda t, i=i: t[i], stacks))

    epoch(stacks)
    expected = np.array([1.0, -1.0])
    for x, y in zip(*stacks, strict=True):
        x, y = x.reshape(-1, 2).astype("float64"), y.ravel()
        expected -= 0.1 * 2 * x.T @ (x @ expected - y) / len(y)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5)


def test_a_schedule_counts_updates(K):
    schedule = K.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.7)
    trainer = make_trainer(K, K.optimizers.SGD(schedule))
    trainer.fit(X, LABELS, BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    assert int(trainer.optimizer.iterations.numpy()) == 4
    expected = by_hand(K, K.optimizers.SGD(schedule), micro_batches(), steps_of(6) * 2)
    assert_same(trainer.model.get_weights(), expected.get_weights(), 1e-5)


def test_four_times_32_is_128(K):
    x = rng.normal(size=(256, FEATURES)).astype("float32")
    y = rng.integers(0, CLASSES, 256)
    trainer = make_trainer(K, K.optimizers.SGD(0.5, momentum=0.9), accumulation=4)
    history = trainer.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    model = make_model(K)
    optimizer = K.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, cross_entropy(K), run_eagerly=True)
    expected = model.fit(x, y, batch_size=128, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    assert_same(trainer.model.get_weights(), model.get_weights(), 1e-5)


def test_one_hot_labels_mean_what_integers_mean(K, fresh):
    fresh.fit(X, LABELS, BATCH_SIZE, shuffle=False, verbose=0)
    one_hot = make_trainer(
        K, K.optimizers.SGD(0.5), K.losses.CategoricalCrossentropy(from_logits=True)
    )
    one_hot.fit(X, np.eye(CLASSES)[LABELS], BATCH_SIZE, shuffle=False, verbose=0)
    assert_same(fresh.model.get_weights(), one_hot.model.get_weights(), 1e-6)


def test_dividing_by_the_accumulation_factor(K, fresh):
    """The recipe `loss / factor`, which is right where all micro-batches are full and
    unweighted.
    """
    model = make_model(K)
    total = None
    for x, y in micro_batches()[:ACCUMULATION]:
        with tf.GradientTape() as tape:
            loss = cross_entropy(K)(y, model(x, training=True)) / ACCUMULATION
        gradients = tape.gradient(loss, tensors(model))
        total = (
            gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        )
    for variable, gradient in zip(model.trainable_variables, total, strict=True):
        variable.assign_sub(0.5 * gradient)
    fresh.fit(X[:STEP], LABELS[:STEP], BATCH_SIZE, shuffle=False, verbose=0)
    assert_same(fresh.model.get_weights(), model.get_weights(), 1e-5)


def test_class_weights_of_tokens_hold_from_the_first_fit(K):
    """Class indices [rows, time] must not be taken for one-hot rows before the model is built."""
    time = 3
    x = rng.normal(size=(8, time, FEATURES)).astype("float32")
    y = rng.integers(0, CLASSES, (8, time))
    class_weight = {0: 4.0, 1: 0.0, 2: 0.5}
    weights = np.vectorize(lambda c: class_weight.get(c, 1.0))(y).astype("float32")

    def make():
        model = K.Sequential([K.Input((time, FEATURES)), K.layers.Dense(CLASSES)])
        model.set_weights([WEIGHTS[0][:, :CLASSES], WEIGHTS[3]])
        return model

    ours, theirs = make(), make()
    options = {"gradient_accumulation_steps": 2, "jit_compile": False}
    trainer = fa.Trainer(ours, K.optimizers.SGD(0.5), cross_entropy(K), **options)
    trainer.fit(x, y, 4, class_weight=class_weight, verbose=0)
    keras_steps(theirs, cross_entropy(K), [(x, y, weights)], 0.5)
    assert_same(ours.get_weights(), theirs.get_weights(), 1e-5)
