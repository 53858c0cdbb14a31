"""Batches of Python code: read ahead by a thread, copied as they come, and ended in any case."""

import multiprocessing
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_same

import fastaccum as fa
from fastaccum.data.datasets import DatasetSource
from fastaccum.data.python_batches import ReadAhead


def read(x, what="x"):
    return list(DatasetSource(x, what).python_batches)


def batches_of(*arrays):
    return ((x, np.zeros([len(x), 1], "float32")) for x in arrays)


def test_an_array_that_is_written_over_is_read_as_it_was():
    def rewritten():
        x = np.zeros([2, 3], "float32")
        for number in range(10):
            x[:] = number
            yield x, x[:, :1]

    source = DatasetSource(rewritten(), "x")
    pipeline = iter(source.python_batches)
    time.sleep(0.2)  # what may be read ahead has been by now
    batches = list(pipeline)
    # Keras peeks at two batches for their shapes, before either is used: they are the same array.
    assert [float(batch.x[0, 0]) for batch in batches[2:]] == list(range(2, 10))


def test_dtypes_and_shapes_are_those_of_keras():
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(rows, 3)) for rows in (4, 2, 5)]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(arrays)

        def __getitem__(self, i):
            return {"a": arrays[i], "b": arrays[i].astype("float16")}, arrays[i][:, 0] > 0

    source = DatasetSource(Batches(), "x")
    source.origin.epochs.reset()
    source.origin.epochs.begin_epoch()
    ours, theirs = list(source.python_batches), list(source.dataset)
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        tf.nest.assert_same_structure(one, other)
        for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["scipy", "tensorflow"])
def test_sparse_rows_become_dense(kind):
    random = np.random.default_rng(0)
    dense = [random.binomial(1, 0.3, (rows, 6)).astype("float32") for rows in (4, 2, 5)]
    make = (
        pytest.importorskip("scipy.sparse").csr_matrix if kind == "scipy" else tf.sparse.from_dense
    )
    batches = read((make(x), x[:, :1]) for x in dense)
    for batch, x in zip(batches, dense, strict=True):
        np.testing.assert_array_equal(batch.x, x)


def test_a_batch_of_another_shape_or_structure_is_refused_by_name():
    x = np.ones([2, 3], "float32")
    with pytest.raises(
        ValueError, match=r"x \(generator\) yielded an array of shape \(2, 4\) where \(None, 3\)"
    ):
        read(batches_of(x, x, np.ones([2, 4], "float32")))
    with pytest.raises(
        ValueError, match=r"x \(list_iterator\) yielded None where an array was expected"
    ):
        read(iter([(x, x, x[:, 0]), (x, x, x[:, 0]), (x, x, None)]))
    with pytest.raises(
        ValueError, match=r"x \(list_iterator\) yielded a batch of another structure"
    ):
        read(iter([(x, x), (x, x), (x,)]))


def test_a_masked_array_is_refused():
    x = np.ones([2, 3], "float32")

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return np.ma.masked_array(x, mask=x * (i == 2)), x[:, :1]

    trainer = fa.Trainer(
        keras.Sequential([keras.layers.Dense(1)]), "sgd", "mse", gradient_accumulation_steps=3
    )
    with pytest.raises(TypeError, match=r"x \(Batches\) is a masked array with 6 masked elements"):
        trainer.fit(Batches(), shuffle=False, verbose=0)


def test_an_epoch_that_is_left_is_not_read_further():
    """`stop_evaluating` leaves a pass in its middle; no batch is read while hooks are called."""
    calls = []
    being_read = []

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 50

        def __getitem__(self, i):
            being_read.append(i)
            time.sleep(0.2)  # longer than a step: the thread is within this as the pass is left
            calls.append(i)
            being_read.remove(i)
            return np.ones([2, 3], "float32"), np.ones([2, 1], "float32")

        def on_epoch_begin(self):
            calls.append(("begin", list(being_read)))

        def on_epoch_end(self):
            calls.append(("end", list(being_read)))

    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse")
    options = {"validation_data": Batches(), "validation_steps": 40, "callbacks": [Stop()]}
    trainer.fit(np.ones([4, 3]), np.ones([4, 1]), epochs=3, verbose=0, **options)
    hooks = [call for call in calls if isinstance(call, tuple)]
    assert len(hooks) >= 5
    assert all(reading == [] for _, reading in hooks)
    begun = [at for at, call in enumerate(calls) if call == ("begin", [])]
    assert [calls[at + 1] for at in begun] == [0, 0, 0]


@pytest.mark.parametrize("processes", [False, True])
def test_workers_end_with_a_fit_that_is_left_in_its_middle(processes):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return np.ones([2, 3], "float32"), np.ones([2, 1], "float32")

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    def threads():
        return {thread.name for thread in threading.enumerate() if thread.name != "fastaccum-close"}

    before = threads()
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)
    trainer.fit(
        Batches(workers=2, use_multiprocessing=processes),
        shuffle=False,
        verbose=0,
        callbacks=[Stop()],
    )
    end = time.monotonic() + 30
    while threads() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not threads() - before
    assert not multiprocessing.active_children()


def test_an_error_comes_as_it_was_raised_before_a_weight_moves():
    class Broken(keras.utils.PyDataset):
        def __len__(self):
            return 9

        def __getitem__(self, i):
            if i == 4:
                raise ZeroDivisionError("of the user's")
            return np.ones([2, 3], "float32"), np.ones([2, 1], "float32")

    model = keras.Sequential([keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=6)
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        trainer.fit(Broken(), shuffle=False, verbose=0)
    assert int(trainer.optimizer.iterations) == 0
    assert "fastaccum-data" not in [thread.name for thread in threading.enumerate()]


def test_a_thread_reads_ahead_and_no_further():
    taken = []

    def numbers():
        for i in range(100):
            taken.append(i)
            yield i

    def assert_taken(count):
        end = time.monotonic() + 30
        while len(taken) < count and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)  # what a thread that reads too far would need
        assert len(taken) == count

    items = ReadAhead(numbers(), 3, lambda i: 10 * i)
    assert_taken(3)
    assert [next(items), next(items)] == [0, 10]
    assert_taken(5)
    items.close()
    assert [*items] == [20, 30, 40]
    assert "fastaccum-data" not in [thread.name for thread in threading.enumerate()]


def test_items_end_once_and_for_all():
    items = ReadAhead((i for i in range(2)), 5, lambda i: i)
    assert list(items) == [0, 1]
    assert list(items) == []


class Pairs(keras.Model):
    """Takes a pair of inputs and has a loss of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        one, other = inputs
        outputs = self.dense(one + other)
        self.add_loss(keras.ops.mean((outputs - 1) ** 2))
        return outputs


@pytest.mark.parametrize("kind", ["generator", "dataset"])
@pytest.mark.parametrize(
    "others", [(), (None,), (None, None)], ids=["alone", "no target", "neither"]
)
def test_inputs_that_are_a_tuple_are_no_targets(others, kind):
    if others and kind == "dataset":
        pytest.skip("tf.data takes no None")
    one, other = np.random.default_rng(0).random((2, 4, 4), "float32")
    element = ((one, other), *others)
    spec = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape), ((one, other),))

    def data():
        if kind == "dataset":
            return tf.data.Dataset.from_generator(
                lambda: iter([element] * 3), output_signature=spec
            )
        return (element for _ in range(9))

    found = []
    for trains in (lambda m: m.compile("sgd") or m, lambda m: fa.Trainer(m, "sgd")):
        keras.utils.set_random_seed(7)
        found.append(trains(Pairs()).fit(data(), steps_per_epoch=3, verbose=0).history["loss"])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_a_generator_trains_as_its_arrays_do():
    random = np.random.default_rng(0)
    x, y = (
        random.normal(size=(24, 3)).astype("float32"),
        random.normal(size=(24, 1)).astype("float32"),
    )
    found = []
    for data in [
        {"x": x, "y": y, "batch_size": 4},
        {"x": ((x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4))},
    ]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        trainer = fa.Trainer(model, "adam", "mse", gradient_accumulation_steps=3)
        trainer.fit(**data, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert_same(*found, 1e-6)
