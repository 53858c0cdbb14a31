"""Batches of sequences, each padded to a length of its own, as updates of a loop by hand over these
batches.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_batches import ListedBatches as Batches
from oracle import assert_same
from resuming import assert_same as assert_resumes

import fastaccum as fa
from fastaccum.data.datasets import DatasetSource
from fastaccum.data.sizes import Sizes
from fastaccum.step import padding

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

ACCUMULATION = 3
IDS = 20
MASK_VALUE = -1.0  # of the series' padding
SAME_ROWS = [(4, 7), (4, 12), (4, 9), (4, 9), (4, 20), (4, 3), (4, 7), (2, 30)]
OTHER_ROWS = [(4, 7), (3, 12), (4, 9), (5, 9), (4, 20), (1, 3), (4, 7), (2, 30)]
layers = keras.layers


def ids_of(random, rows, length):
    """Draws ids from 1 up, with zeros behind the last one of each row; the first row is the
    longest.
    """
    real = np.arange(length) < np.append(length, random.integers(1, length + 1, rows - 1))[:, None]
    return random.integers(1, IDS, (rows, length)) * real


def texts(shapes, of_tokens=False, weighted=False, seed=0):
    random = np.random.default_rng(seed)
    for rows, length in shapes:
        x = ids_of(random, rows, length)
        y = (
            random.integers(0, 5, x.shape)
            if of_tokens
            else random.normal(size=(rows, 1)).astype("float32")
        )
        weights = random.uniform(0.2, 2, y.shape if of_tokens else rows).astype("float32")
        yield (x, y, weights) if weighted else (x, y)


def series(shapes, seed=0):
    random = np.random.default_rng(seed)
    for rows, length in shapes:
        x = random.normal(size=(rows, length, 3)).astype("float32")
        x[ids_of(random, rows, length) == 0] = MASK_VALUE
        yield x, random.normal(size=(rows, 1)).astype("float32")


def pairs(shapes, seed=0):
    """Texts and translations, of lengths of their own, as dictionaries."""
    random = np.random.default_rng(seed)
    for rows, length in shapes:
        source, target = ids_of(random, rows, length), ids_of(random, rows, length % 7 + 2)
        yield {"source": source, "target": target}, {"words": random.integers(0, 5, target.shape)}


def embedded(mask_zero=True):
    x = keras.Input([None], dtype="int32")
    return x, layers.Embedding(IDS, 4, mask_zero=mask_zero)(x)


def classifier():
    x, h = embedded()
    return keras.Model(x, layers.Dense(1)(layers.Dropout(0.0)(layers.LSTM(4)(h))))


def of_series():
    return keras.Sequential(
        [keras.Input([None, 3]), layers.Masking(MASK_VALUE), layers.GRU(4), layers.Dense(1)]
    )


def tagger():
    x, h = embedded()
    return keras.Model(
        x, layers.Dense(5)(layers.Bidirectional(layers.LSTM(4, return_sequences=True))(h))
    )


def causal():
    """No mask, but no step sees a later one."""
    x, h = embedded(mask_zero=False)
    return keras.Model(x, layers.Dense(5)(layers.LSTM(4, return_sequences=True)(h)))


def attending():
    x, h = embedded()
    h = layers.MultiHeadAttention(2, 3)(h, h)
    return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(h)))


def pooled():
    """No mask: padding would be seen, if only where it is the maximum."""
    x, h = embedded(mask_zero=False)
    h = layers.Conv1D(8, 3, padding="same")(h)
    return keras.Model(x, layers.Dense(1)(layers.GlobalMaxPooling1D()(h)))


def normalized():
    x, h = embedded()
    return keras.Model(x, layers.Dense(1)(layers.BatchNormalization()(layers.LSTM(4)(h))))


def translator():
    source, target = (
        keras.Input([None], name=name, dtype="int32") for name in ("source", "target")
    )
    _, *state = layers.LSTM(4, return_state=True)(layers.Embedding(IDS, 4, mask_zero=True)(source))
    h = layers.LSTM(4, return_sequences=True)(
        layers.Embedding(IDS, 4, mask_zero=True)(target), initial_state=state
    )
    return keras.Model(
        {"source": source, "target": target}, {"words": layers.Dense(5, name="words")(h)}
    )


ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MSE = keras.losses.MeanSquaredError()
# Of each: how the model is made, its data, its loss, and whether padding leaves its results as they
# are.
CASES = {
    "classifier": (classifier, texts, MSE, True),
    "classifier, weighted": (
        classifier,
        lambda s, seed=0: texts(s, weighted=True, seed=seed),
        MSE,
        True,
    ),
    "series": (of_series, series, MSE, True),
    "tagger": (tagger, lambda s: texts(s, of_tokens=True), ENTROPY, True),
    "tagger, weighted": (
        tagger,
        lambda s, seed=0: texts(s, of_tokens=True, weighted=True, seed=seed),
        ENTROPY,
        True,
    ),
    "causal": (causal, lambda s: texts(s, of_tokens=True), ENTROPY, True),
    "causal, weighted": (causal, lambda s: texts(s, of_tokens=True, weighted=True), ENTROPY, True),
    "attending": (attending, texts, MSE, True),
    "translator": (translator, pairs, ENTROPY, True),
    "pooled": (pooled, texts, MSE, False),
    "normalized": (normalized, texts, MSE, True),
}


# Others are run with what takes longer: each of these takes another path.
QUICK = [
    "classifier",
    "series",
    "tagger, weighted",
    "causal, weighted",
    "translator",
    "pooled",
    "normalized",
]
ALL = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def make(case):
    keras.utils.set_random_seed(1)
    return CASES[case][0]()


def sums(loss, y, outputs, weights):
    """Adds up losses of elements that no mask leaves out, and counts these."""
    if isinstance(y, dict):
        ((name, y),) = y.items()
        outputs = outputs[name]
    values = loss.call(tf.convert_to_tensor(y), outputs)
    mask = getattr(outputs, "_keras_mask", None)
    kept = (
        tf.ones_like(values)
        if mask is None or values.shape.rank < 2
        else tf.cast(mask, values.dtype)
    )
    weighted = values * kept if weights is None else values * kept * weights
    return tf.reduce_sum(weighted), tf.reduce_sum(kept)


def train_by_hand(model, batches, loss, epochs=1):
    optimizer = keras.optimizers.SGD(0.1)
    losses = []
    for update in [
        batches[i : i + ACCUMULATION] for i in range(0, len(batches), ACCUMULATION)
    ] * epochs:
        totals, loss_sum, count = None, 0.0, 0.0
        for x, y, *weights in update:
            with tf.GradientTape() as tape:
                part, of_part = sums(loss, y, model(x, training=True), *(weights or [None]))
            found = [
                tf.convert_to_tensor(g) for g in tape.gradient(part, model.trainable_variables)
            ]
            totals = (
                found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
            )
            loss_sum, count = loss_sum + part, count + of_part
        optimizer.apply([total / count for total in totals], model.trainable_variables)
        losses.append(float(loss_sum / count))
    return losses


def trained(case, shapes, epochs=1, metrics=(), **options):
    _, data, loss, _ = CASES[case]
    trainer = fa.Trainer(
        make(case),
        keras.optimizers.SGD(0.1),
        loss,
        metrics,
        gradient_accumulation_steps=ACCUMULATION,
        loss_scale=None,
        **options,
    )
    history = trainer.fit(Batches(data(shapes)), shuffle=False, epochs=epochs, verbose=0)
    return trainer, history


def assert_as_by_hand(case, shapes, **options):
    _, data, loss, _ = CASES[case]
    theirs = make(case)
    train_by_hand(theirs, list(data(shapes)), loss, epochs=2)
    trainer, history = trained(case, shapes, epochs=2, **options)
    assert_same(trainer.model.get_weights(), theirs.get_weights(), 2e-5)
    return trainer, history


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(SAME_ROWS, marks=pytest.mark.slow, id="same rows"),
        pytest.param(OTHER_ROWS, id="other"),
    ],
)
@pytest.mark.parametrize("case", ALL)
def test_updates_are_those_of_a_loop_by_hand(case, shapes):
    _, history = assert_as_by_hand(case, shapes)
    assert history.programs["micro-batch of an update"][0] == 2  # of the first shape, and of all


@pytest.mark.parametrize(
    "case",
    [
        "causal, weighted",
        "pooled",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("classifier", "translator", "normalized")
        ),
    ],
)
def test_updates_are_those_of_a_loop_by_hand_with_xla(case):
    shapes = OTHER_ROWS[:6]
    _, history = assert_as_by_hand(case, shapes, jit_compile=True)
    made, _ = history.programs["micro-batch of an update"]
    if not CASES[case][-1]:
        assert made == len({length for _, length in shapes})
    elif case != "normalized":
        assert made <= 6


def arranged_lengths(model, data, loss, metrics=(), shapes=SAME_ROWS):
    """Returns the lengths of the stacks of a first step, of batches of 7, 12 and 9 steps."""
    trainer = fa.Trainer(
        model, "sgd", loss, metrics, gradient_accumulation_steps=ACCUMULATION, jit_compile=False
    )
    batches = list(data(shapes))
    trainer.fit(Batches(batches[:1]), verbose=0)
    layout = trainer._builder.training_layout(trainer._present_options)
    check = padding.Padding(trainer._builder.engine.objective)
    before = [v.numpy() for v in model.variables]
    source = DatasetSource(Batches(batches), "x")
    sizes = Sizes(
        "x", source.dataset.element_spec, layout._replace(one_trace="never", padding=check)
    )
    stacks, apart = sizes.arrange(list(source.dataset.take(3)), [rows for rows, _ in shapes[:3]])
    for then, now in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(then, now.numpy())
    assert apart
    return {tf.nest.flatten(stack.x)[0].shape[2] for stack in stacks}


PADDED, AS_THEY_ARE = {7, 12}, {7, 12, 9}


@pytest.mark.parametrize("case", CASES)
def test_padding_is_used_where_it_changes_nothing(case):
    _, data, loss, is_exact = CASES[case]
    assert arranged_lengths(make(case), data, loss) == (PADDED if is_exact else AS_THEY_ARE)


def averaging(dtype=None):
    x = keras.Input([None], dtype="int32")
    h = layers.GlobalAveragePooling1D(dtype=dtype)(layers.Embedding(IDS, 4, dtype=dtype)(x))
    return keras.Model(x, layers.Dense(1, dtype=dtype)(h))


def best_of_few():
    """The maximum over steps of a single score, as of bags of instances."""
    x = keras.Input([None, 3])
    scores = layers.Dense(1)(layers.Dense(4, activation="relu")(x))
    return keras.Model(x, layers.GlobalMaxPooling1D()(scores))


def norm_of_features():
    x = keras.Input([None, 3])
    norms = layers.Lambda(lambda t: tf.norm(t, axis=-1))(layers.Dense(4, use_bias=False)(x))
    total = layers.Lambda(lambda t: tf.reduce_sum(t, 1, keepdims=True))(norms)
    return keras.Model(x, layers.Dense(1)(total))


def first_steps():
    x, h = embedded(mask_zero=False)
    return keras.Model(x, layers.Dense(1)(layers.Lambda(lambda t: tf.reduce_mean(t[:, :4], 1))(h)))


class OnlyInInference(layers.Layer):
    def call(self, x, training=False):
        return x if training else x - keras.ops.mean(x, 1, keepdims=True)


class CountingSteps(layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), dtype="int32", trainable=False, initializer="zeros", name="steps"
        )

    def call(self, x):
        self.steps.assign_add(keras.ops.size(x[..., 0]))
        return x


def with_layer(layer):
    x, h = embedded(mask_zero=False)
    return keras.Model(x, layers.Dense(5)(layer(layers.LSTM(4, return_sequences=True)(h))))


class RowMean(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        right = keras.ops.cast(keras.ops.equal(y_true, keras.ops.argmax(y_pred, -1)), "float32")
        super().update_state(keras.ops.mean(right, -1))


def in_front(shapes):
    """Texts whose padding comes first, as that of `keras.utils.pad_sequences`."""
    for x, y in texts(shapes):
        yield np.sort(x, -1), y


def silent_at_first(shapes):
    for rows, length in shapes:
        x = np.random.default_rng(length).normal(size=(rows, length, 3)).astype("float32")
        x[:, : length - 2] = 0
        yield x, x[:, -1, :1]


def weightless_at_first(shapes):
    for x, y, weights in texts(shapes, weighted=True):
        weights[:2] = 0
        yield x, y, weights


def large(shapes):
    for x, y in texts(shapes):
        yield x, 1000 + y


def averaging_series():
    return keras.Sequential(
        [keras.Input([None, 3]), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )


SEEN = {
    "padding in front": (averaging, in_front, MSE),
    "silence": (averaging_series, silent_at_first, MSE),
    "rows without weight": (averaging, weightless_at_first, MSE),
    "large targets": (averaging, large, MSE),
    "bfloat16": (lambda: averaging("mixed_bfloat16"), texts, MSE),
    "a maximum": (best_of_few, series, MSE),
    "a gradient that is NaN": (norm_of_features, series, MSE),
    "the first steps alone": (first_steps, texts, MSE),
    "in inference alone": (
        lambda: with_layer(OnlyInInference()),
        lambda s: texts(s, of_tokens=True),
        ENTROPY,
    ),
    "a count of steps": (
        lambda: with_layer(CountingSteps()),
        lambda s: texts(s, of_tokens=True),
        ENTROPY,
    ),
    "a metric of the user's": (causal, lambda s: texts(s, of_tokens=True), ENTROPY, RowMean),
}


@pytest.mark.parametrize("case", SEEN)
def test_padding_is_not_used_where_it_is_seen(case):
    make_model, data, loss, *metrics = SEEN[case]
    keras.utils.set_random_seed(1)
    assert (
        arranged_lengths(make_model(), data, loss, [metric() for metric in metrics]) == AS_THEY_ARE
    )


def test_rows_that_are_all_padding_keep_their_length_where_it_counts():
    def data(shapes):
        for at, (x, y) in enumerate(texts(shapes)):
            if at == 2:
                x[-1] = 0
            yield x, y

    assert arranged_lengths(make("attending"), data, MSE) == AS_THEY_ARE  # the mean over all steps
    assert arranged_lengths(make("classifier"), data, MSE) == PADDED


def test_padding_that_is_used_where_it_changes_something_is_seen(monkeypatch):
    """A negative control: these tests see a padding that is not left out."""
    monkeypatch.setattr(padding.Padding, "is_same", lambda *_, **__: True)
    with pytest.raises(AssertionError):
        assert_as_by_hand("pooled", SAME_ROWS, jit_compile=True)


def test_an_evaluation_is_that_of_all_rows():
    _, data, loss, _ = CASES["causal, weighted"]
    trainer, _ = trained("causal, weighted", OTHER_ROWS[:3], metrics=["accuracy"])
    batches = list(data(OTHER_ROWS))
    found = trainer.evaluate(Batches(batches), verbose=0, return_dict=True)
    parts = [sums(loss, y, trainer.model(x), w) for x, y, w in batches]
    np.testing.assert_allclose(
        found["loss"], sum(a for a, _ in parts) / sum(b for _, b in parts), rtol=1e-5
    )
    # As in Keras, of the means of each row.
    right = [(trainer.model(x).numpy().argmax(-1) == y).mean(1) for x, y, _ in batches]
    np.testing.assert_allclose(found["accuracy"], np.concatenate(right).mean(), rtol=1e-6)


@pytest.mark.parametrize("case", ["causal", pytest.param("tagger", marks=pytest.mark.slow)])
def test_padding_does_not_count_in_metrics(case):
    metrics = ["accuracy", "sparse_top_k_categorical_accuracy"]
    _, history = trained(case, SAME_ROWS, metrics=metrics, jit_compile=True)
    _, expected = trained(case, SAME_ROWS, metrics=metrics, jit_compile=False)
    assert history.programs["micro-batch of an update"][0] < len(
        {length for _, length in SAME_ROWS}
    )
    np.testing.assert_allclose(history.history["accuracy"], expected.history["accuracy"], rtol=1e-6)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


def test_a_table_of_positions_bounds_the_padding():
    class Positions(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(30, 4), name="table")

        def call(self, x):
            return x + self.table[: x.shape[1]]

    x, h = embedded(mask_zero=False)
    h = layers.LSTM(4, return_sequences=True)(Positions()(h))
    model = keras.Model(x, layers.Dense(5)(h))
    before, losses = model.get_weights(), []
    for jit_compile in (True, False):
        model.set_weights(before)
        optimizer = keras.optimizers.SGD(0.1)
        trainer = fa.Trainer(
            model, optimizer, ENTROPY, gradient_accumulation_steps=2, jit_compile=jit_compile
        )
        batches = texts([(2, 6), (2, 30), (2, 28), (2, 12)], of_tokens=True)
        losses.append(trainer.fit(Batches(batches), shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, "auto"])
@pytest.mark.parametrize("case", ["classifier", "normalized"])
def test_a_resumed_training_ends_bit_for_bit(tmp_path, case, jit_compile):
    def trainer():
        return fa.Trainer(
            make(case),
            "adam",
            MSE,
            gradient_accumulation_steps=ACCUMULATION,
            jit_compile=jit_compile,
        )

    def batches():
        return {"x": Batches(texts(OTHER_ROWS), shuffled=True), "shuffle": False}

    assert_resumes(trainer, batches, [1, 3, 2], tmp_path, epochs=3)


def full_batch(update):
    """Returns the batch that Keras would train an update on, if it were not accumulated."""

    def joined(*arrays):
        if arrays[0].ndim == 1:
            return np.concatenate(arrays)
        is_series = arrays[0].ndim == 3
        longest = max(array.shape[1] for array in arrays)
        padded = []
        for array in arrays:
            missing = [(0, 0)] * array.ndim
            missing[1] = (0, longest - array.shape[1])
            padded.append(np.pad(array, missing, constant_values=MASK_VALUE if is_series else 0))
        return np.concatenate(padded)

    return tf.nest.map_structure(joined, *update)


def signature(batch):
    """Returns specs of batches of any rows and lengths."""

    def spec(array):
        shape = [None, *array.shape[1:]]
        if array.ndim > 1 and array.shape[1] > 1:
            shape[1] = None
        return tf.TensorSpec(shape, array.dtype)

    return tf.nest.map_structure(spec, batch)


GENERATED = ["classifier, weighted", "series", "tagger, weighted", "translator"]


@functools.cache
def side_by_side(case):
    """Makes a trainer and a model of Keras's with the same weights, which examples share: compiled
    once.
    """
    _, _, loss, _ = CASES[case]
    trainer = fa.Trainer(make(case), keras.optimizers.SGD(0.1), loss, loss_scale=None)
    theirs = make(case)
    theirs.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    return trainer, theirs, theirs.get_weights()


@pytest.mark.parametrize("case", GENERATED)
@settings(deadline=None, max_examples=8)
@given(
    more=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 14)), max_size=6),
    accumulation=st.integers(1, 4),
    steps_per_execution=st.integers(1, 2),
    as_dataset=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_generated_updates_are_those_of_keras_on_the_full_batch(
    case, more, accumulation, steps_per_execution, as_dataset, seed
):
    trainer, theirs, weights = side_by_side(case)
    trainer.gradient_accumulation_steps = accumulation
    trainer.steps_per_execution = steps_per_execution
    # The first two show Keras which axes are open.
    batches = list(CASES[case][1]([(2, 3), (3, 6), *more], seed=seed))
    trainer.model.set_weights(weights)
    theirs.set_weights(weights)
    data = Batches(batches)
    if as_dataset:
        data = tf.data.Dataset.from_generator(
            lambda: iter(batches), output_signature=signature(batches[0])
        )
    trainer.fit(data, shuffle=False, verbose=0)
    for start in range(0, len(batches), accumulation):
        theirs.train_on_batch(*full_batch(batches[start : start + accumulation]))
    assert_same(trainer.model.get_weights(), theirs.get_weights(), 2e-5)


def test_a_mean_of_the_batches_means_is_another_update():
    """Averages the batches' means, as Keras's optimizers do: a negative control of the test above."""
    trainer, _, weights = side_by_side("classifier, weighted")
    batches = list(CASES["classifier, weighted"][1]([(2, 3), (6, 9)]))
    trainer.gradient_accumulation_steps = 2
    trainer.model.set_weights(weights)
    trainer.fit(Batches(batches), shuffle=False, verbose=0)
    of_means = make("classifier, weighted")
    of_means.compile(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), MSE, jit_compile=False
    )
    for batch in batches:
        of_means.train_on_batch(*batch)
    ours, others = trainer.model.get_weights(), of_means.get_weights()
    assert max(np.abs(one - other).max() for one, other in zip(ours, others, strict=True)) > 1e-3
