"""A fit that is interrupted and resumed ends bit for bit as one that was not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from resuming import assert_same

import fastaccum as fa

X = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2.0, 100).astype("float32")


def mlp(norm=True, dtype=None):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="relu", dtype=dtype)]
    if norm:
        layers.append(keras.layers.BatchNormalization(dtype=dtype))
    layers += [keras.layers.Dropout(0.3, dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    return keras.Sequential([keras.Input((4,)), *layers])


def trainer(norm=True, optimizer=None, dtype=None, **options):
    rate = keras.optimizers.schedules.CosineDecay(0.01, 30)
    options = {"gradient_accumulation_steps": 3, "metrics": ["mae"], **options}
    return fa.Trainer(mlp(norm, dtype), optimizer or keras.optimizers.AdamW(rate), "mse", **options)


def arrays():
    return {"x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": 8}


def drawn_anew(data):
    """`data` in a process that drew other random numbers before: the same order can only come from the checkpoint."""
    seeds = iter(range(100))

    def make():
        keras.utils.set_random_seed(7)
        first = next(seeds)
        # The uninterrupted and the first interrupted fit must draw the same order to be compared.
        if first > 1:
            keras.utils.set_random_seed(first)
        return data()

    return make


def test_arrays(tmp_path):
    """Dropout, BatchNorm, metrics, validation, weights, a schedule, and a tail of another shape, in mid-epoch."""
    assert_same(trainer, drawn_anew(arrays), [2, 4, 1], tmp_path, epochs=3, validation_data=(X[:20], Y[:20]))


@pytest.mark.parametrize("norm", [False, True], ids=["padded", "exact rows"])
def test_arrays_through_steps_per_execution(tmp_path, norm):
    def make():
        return trainer(norm, steps_per_execution=2)

    assert_same(make, drawn_anew(arrays), [2, 3], tmp_path, every=3, epochs=3)


def test_arrays_with_epochs_that_are_no_passes(tmp_path):
    def make():
        return trainer(False, steps_per_execution=2)

    assert_same(make, drawn_anew(arrays), [1, 4], tmp_path, epochs=3, steps_per_epoch=7)


def test_initial_epoch(tmp_path):
    options = {"epochs": 5, "initial_epoch": 2, "steps_per_epoch": 3}
    assert_same(lambda: trainer(False), drawn_anew(arrays), [4, 2], tmp_path, **options)


def half():
    rule = fa.DynamicLossScale(init_scale=2.0**24, growth_interval=4, max_scale=2.0**24)
    return trainer(False, keras.optimizers.Adam(0.01), "mixed_float16", loss_scale=rule)


def test_half_precision_after_overflows(tmp_path):
    options = {"epochs": 3}
    whole, _ = assert_same(half, drawn_anew(arrays), [3, 6], tmp_path, **options)
    assert sum(whole.model.history.history["skipped_steps"]) > 0  # in the first epoch, whose count was resumed


def lookahead():
    optimizers = fa.addons.optimizers
    return trainer(False, optimizers.Lookahead(optimizers.LAMB(0.01), sync_period=4))


def averaging():
    return trainer(False, keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3))


@pytest.mark.parametrize("make", [lookahead, averaging], ids=["Lookahead(LAMB)", "Adam with averages"])
def test_optimizers(tmp_path, make):
    assert_same(make, drawn_anew(arrays), [3, 6], tmp_path, epochs=3)


def test_several_outputs(tmp_path):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4, activation="tanh")(inputs)
        outputs = [keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b")]
        return fa.Trainer(keras.Model(inputs, outputs), keras.optimizers.SGD(0.1, momentum=0.9), ["mse", "mae"])

    def data():
        return {"x": X, "y": [Y, -Y], "batch_size": 16}

    assert_same(make, drawn_anew(data), [3, 6], tmp_path, epochs=2)


def batches(*, seed=None, count=100, repeat=False, known=True):
    dataset = tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).shuffle(30, seed=seed)
    if not known:
        dataset = dataset.filter(lambda x, y: x[0] > -1.0)
    return (dataset.repeat() if repeat else dataset).batch(8)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        pytest.param(lambda: batches(seed=3), {}, id="seeded"),
        pytest.param(batches, {}, id="seeded by Keras"),
        pytest.param(lambda: batches(known=False), {}, id="of unknown length"),
        pytest.param(lambda: batches(repeat=True), {"steps_per_epoch": 4}, id="endless"),
        pytest.param(batches, {"steps_per_epoch": 4}, id="several passes"),
        pytest.param(lambda: batches().cache(), {}, id="shuffled, then cached"),
        pytest.param(lambda: batches().shuffle(4), {}, id="shuffled twice"),
        pytest.param(lambda: batches().map(numpy_identity), {}, id="with Python code in it"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot save the iterator.s state:RuntimeWarning")
@pytest.mark.parametrize("per_execution", [1, 2])
def test_datasets(tmp_path, dataset, options, per_execution):
    def data():
        keras.utils.set_random_seed(5)  # as a script would: TensorFlow draws the seeds of shuffles from it
        return {"x": dataset()}

    def make():
        return trainer(False, steps_per_execution=per_execution)

    stops = [3, 4] if per_execution == 1 else [1, 2]
    assert_same(make, data, stops, tmp_path, epochs=3, **options)


def numpy_identity(x, y):
    x = tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), (None, 4))
    return x, y


def test_dataset_of_rows_of_varying_shape(tmp_path):
    """Steps that cannot share a dispatch wait for each other: what was read and not executed is saved too."""

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
        return fa.Trainer(model, "adam", "mse", steps_per_execution=3)

    def data():
        def rows(i):
            length = [3, 4, 4, 4, 3, 3][i % 6]
            return np.full((2, length, 2), i, "float32"), np.full((2, 1), i, "float32")

        signature = tf.TensorSpec([2, None, 2]), tf.TensorSpec([2, 1])
        shapes = [tf.data.Dataset.from_tensors(rows(i)) for i in range(12)]
        parts = [tf.data.Dataset.range(i, i + 1).map(lambda _, p=p: p) for i, p in enumerate(map(rows, range(12)))]
        assert len(shapes) == len(parts)
        dataset = parts[0].map(lambda x, y: (tf.ensure_shape(x, signature[0].shape), y))
        for part in parts[1:]:
            dataset = dataset.concatenate(part.map(lambda x, y: (tf.ensure_shape(x, signature[0].shape), y)))
        return {"x": dataset}

    assert_same(make, data, [1, 2, 2], tmp_path, epochs=2)
