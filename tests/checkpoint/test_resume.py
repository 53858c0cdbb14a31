"""A fit that is interrupted and resumed ends bit for bit as one that was not."""

import collections
import functools
import itertools
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from resuming import (
    Beginning,
    Interruption,
    Stateless,
    StopAfter,
    assert_same,
    bits,
    edit_manifest,
    interrupted,
    scramble,
)

import fastaccum as fa
from fastaccum.checkpoint import saver, store
from fastaccum.checkpoint.callback_state import COUNTERS
from fastaccum.data import source
from fastaccum.data.stacks import Layout, Position

pytestmark = pytest.mark.long

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
    """Makes a trainer without XLA unless `options` say otherwise: the saved state is the same, and
    compiling is slow.
    """
    rate = keras.optimizers.schedules.CosineDecay(0.01, 30)
    options = {
        "gradient_accumulation_steps": 3,
        "metrics": ["mae"],
        "jit_compile": False,
        **options,
    }
    return fa.Trainer(mlp(norm, dtype), optimizer or keras.optimizers.AdamW(rate), "mse", **options)


@functools.cache
def shared(steps_per_execution=1):
    """Returns one Trainer for tests that need no particular initial values, traced once for each
    form of the data.
    """
    return trainer(False, steps_per_execution=steps_per_execution)


def arrays():
    return {"x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": 8}


def drawn_anew(data):
    """`data` in a process that drew other random numbers before: the same order can only come from
    the checkpoint.
    """
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
    """Dropout, BatchNorm, metrics, validation, weights, a schedule, and a tail of another shape, in
    mid-epoch.
    """
    make = functools.partial(trainer, jit_compile=True)
    assert_same(
        make, drawn_anew(arrays), [2, 4], tmp_path, epochs=2, validation_data=(X[:20], Y[:20])
    )


def test_metrics_that_make_variables_at_their_first_update(tmp_path):
    class Largest(keras.metrics.Metric):
        largest = None

        def update_state(self, y_true, y_pred, sample_weight=None):
            if self.largest is None:
                self.largest = self.add_weight(shape=y_pred.shape[1:], initializer="zeros")
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_true, 0)))

        def result(self):
            return tf.reduce_sum(self.largest)

    def make():
        metrics = [
            keras.metrics.R2Score(),
            keras.metrics.F1Score("macro", 0.5),
            Largest(name="largest"),
        ]
        return trainer(metrics=metrics)

    assert_same(make, arrays, [2], tmp_path, epochs=1, shuffle=False)


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(False, marks=pytest.mark.slow, id="padded"),
        pytest.param(True, id="exact rows"),
    ],
)
def test_arrays_through_steps_per_execution(tmp_path, norm):
    def make():
        return trainer(norm, steps_per_execution=2)

    assert_same(make, drawn_anew(arrays), [2, 3], tmp_path, every=3, epochs=3)


def test_arrays_with_epochs_that_are_no_passes(tmp_path):
    assert_same(
        lambda: shared(2), drawn_anew(arrays), [1, 4], tmp_path, epochs=3, steps_per_epoch=7
    )


def test_initial_epoch(tmp_path):
    options = {"epochs": 5, "initial_epoch": 2, "steps_per_epoch": 3}
    assert_same(shared, drawn_anew(arrays), [4, 2], tmp_path, **options)


def half():
    rule = fa.DynamicLossScale(init_scale=2.0**24, growth_interval=4, max_scale=2.0**24)
    return trainer(False, keras.optimizers.Adam(0.01), "mixed_float16", loss_scale=rule)


def test_half_precision_after_overflows(tmp_path):
    trained = assert_same(half, drawn_anew(arrays), [3, 6], tmp_path, epochs=3)
    # in the first epoch, whose count was resumed
    assert sum(trained.model.history.history["skipped_steps"]) > 0


def lookahead():
    optimizers = fa.addons.optimizers
    return trainer(False, optimizers.Lookahead(optimizers.LAMB(0.01), sync_period=4))


def averaging():
    return trainer(False, keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lookahead, id="Lookahead(LAMB)", marks=pytest.mark.slow),
        pytest.param(averaging, id="Adam with averages"),
    ],
)
def test_optimizers(tmp_path, make):
    assert_same(make, drawn_anew(arrays), [3, 6], tmp_path, epochs=3)


@pytest.mark.slow
@pytest.mark.sample
def test_tf_keras_model(tmp_path):
    import tf_keras

    def make():
        tf_keras.utils.set_random_seed(1)  # of its own generator, if another test has made one
        layers = [tf_keras.layers.Dense(8, activation="relu"), tf_keras.layers.BatchNormalization()]
        model = tf_keras.Sequential([tf_keras.Input((4,)), *layers, tf_keras.layers.Dense(1)])
        return fa.Trainer(
            model, tf_keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False
        )

    assert_same(make, drawn_anew(arrays), [3, 9], tmp_path, epochs=2)


def test_numbers_that_no_seed_says_are_told_of(tmp_path):
    import tf_keras

    def fit(layer):
        model = tf_keras.Sequential([tf_keras.Input((4,)), layer, tf_keras.layers.Dense(1)])
        trainer = fa.Trainer(model, tf_keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        trainer.fit(
            **drawn_anew(arrays)(), epochs=1, verbose=0, checkpoint_dir=tmp_path / layer.name
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(
                **drawn_anew(arrays)(), epochs=2, verbose=0, checkpoint_dir=tmp_path / layer.name
            )
        return [str(w.message) for w in caught if "random generators" in str(w.message)]

    (told,) = fit(tf_keras.layers.Dropout(0.5, name="dropped"))
    assert "dropped" in told
    assert not fit(tf_keras.layers.Dropout(0.0))


def test_several_outputs(tmp_path):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4, activation="tanh")(inputs)
        outputs = [keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b")]
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        return fa.Trainer(keras.Model(inputs, outputs), sgd, ["mse", "mae"], jit_compile=False)

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
        pytest.param(batches, {}, id="seeded by Keras", marks=pytest.mark.slow),
        pytest.param(
            lambda: batches(known=False), {}, id="of unknown length", marks=pytest.mark.slow
        ),
        pytest.param(lambda: batches(repeat=True), {"steps_per_epoch": 4}, id="endless"),
        pytest.param(batches, {"steps_per_epoch": 4}, id="several passes", marks=pytest.mark.slow),
        pytest.param(lambda: batches().cache(), {}, id="shuffled, then cached"),
        pytest.param(lambda: batches().shuffle(4), {}, id="shuffled twice", marks=pytest.mark.slow),
        pytest.param(
            lambda: batches().map(numpy_identity),
            {},
            id="with Python code in it",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot save the iterator.s state:RuntimeWarning")
@pytest.mark.parametrize("per_execution", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_datasets(tmp_path, dataset, options, per_execution):
    def data():
        # as a script would: TensorFlow draws the seeds of shuffles from it
        keras.utils.set_random_seed(5)
        return {"x": dataset()}

    stops = [3, 4] if per_execution == 1 else [1, 2]
    assert_same(lambda: shared(per_execution), data, stops, tmp_path, epochs=3, **options)


def test_dataset_of_exact_rows_in_dispatches(tmp_path):
    """The last steps of a pass, which do not fill a dispatch, are given out one by one after the
    pass was read.
    """

    def make():
        return trainer(True, steps_per_execution=3)

    def data():
        return {"x": batches(seed=3)}

    assert_same(make, data, [2, 2], tmp_path, epochs=3)


def numpy_identity(x, y):
    x = tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), (None, 4))
    return x, y


@pytest.mark.parametrize(
    "lengths", [[3, 4, 4, 4, 3, 3], pytest.param([3, 3, 4, 4, 3, 3], marks=pytest.mark.slow)]
)
def test_dataset_of_rows_of_varying_shape(tmp_path, lengths):
    """Steps that cannot share a dispatch wait for each other: what was read and not executed is
    saved too.
    """

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        )
        return fa.Trainer(model, "adam", "mse", steps_per_execution=3, jit_compile=False)

    def data():
        def rows(i):
            x = tf.fill([2, tf.gather(lengths, i % 6), 2], tf.cast(i, tf.float32))
            return tf.ensure_shape(x, [2, None, 2]), x[:, 0, :1]

        return {"x": tf.data.Dataset.range(12).map(rows)}

    assert_same(make, data, [1, 2, 2], tmp_path, epochs=2)


@pytest.mark.slow
def test_endless_batches_at_any_step():
    """A place is found again wherever TensorFlow has prefetched to: without a model, at each of 42
    steps.
    """

    def stacks():
        tf.random.set_seed(5)
        shuffled = tf.data.Dataset.range(100).shuffle(30, seed=3)
        made = source.make_data_source(
            shuffled.map(lambda x: (x[None], x[None])).padded_batch(8).repeat(), batch_size=None
        )
        made = made.stacks(Layout(3), 50)
        made.track()
        return made

    def rows(made, at=0, count=8):  # more than a repetition
        dispatches = next(made.epochs(Position(0, 0, at)))
        return [d.stacks[0].x.numpy().tolist() for d in itertools.islice(dispatches, count)]

    whole, ways = rows(stacks(), count=50), set()
    for round_, step in itertools.product(range(5), range(1, 43)):
        if round_ and len(ways) == 2:
            break
        begun = stacks()
        collections.deque(itertools.islice(next(begun.epochs(Position(0, 0))), step), 0)
        # a fast reader is never seen at the end of a repetition
        time.sleep(0.05 * round_ or 0.002 * (step % 5))
        place = begun.position()
        ways.add("held" in place[0])
        goes_on = stacks()
        goes_on.restore(*place)
        assert rows(goes_on, step) == whole[step : step + 8], step
    assert ways == {True, False}  # by TensorFlow's state, and read again where that would lie


class Windows(keras.utils.PyDataset):
    """Batches in an order that each pass changes."""

    def __init__(self):
        super().__init__()
        self.order = list(range(12))

    def __len__(self):
        return 12

    def __getitem__(self, index):
        at = 8 * self.order[index]
        return X[at : at + 8], Y[at : at + 8]

    def on_epoch_end(self):
        self.order = self.order[5:] + self.order[:5]


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.slow), True])
def test_py_dataset(tmp_path, shuffle):
    options = {"epochs": 3, "shuffle": shuffle}
    assert_same(shared, drawn_anew(lambda: {"x": Windows()}), [2, 5], tmp_path, **options)


def test_generator(tmp_path):
    def data():
        return {"x": ((X[i % 90 : i % 90 + 8], Y[i % 90 : i % 90 + 8]) for i in range(0, 1000, 8))}

    options = {"epochs": 3, "steps_per_epoch": 4}
    assert_same(lambda: shared(2), data, [1, 2], tmp_path, **options)


def test_keras_callbacks(tmp_path):
    """Counters and best values, an epoch-wise rate that multiplies itself, the best weights, and a
    CSV file.
    """
    runs = iter("abcd")

    def callbacks():
        run = next(runs) if callbacks.first else "b"
        callbacks.first = False
        return [
            keras.callbacks.EarlyStopping(
                "loss", patience=3, min_delta=0.5, restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau(
                "loss", factor=0.5, patience=1, min_delta=1.0, cooldown=1
            ),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.CSVLogger(tmp_path / f"{run}.csv"),
        ]

    callbacks.first = True

    def make():
        return trainer(False, keras.optimizers.Adam(0.01))

    folder = tmp_path / "checkpoints"
    trained = assert_same(
        make, drawn_anew(arrays), [7, 9, 6], folder, callbacks=callbacks, epochs=9
    )
    assert 3 < len(trained.model.history.epoch) < 9  # it did stop early
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda _: keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True), 5),
        (
            lambda _: keras.callbacks.ReduceLROnPlateau(
                "loss", patience=2, min_delta=0.1, cooldown=3
            ),
            3,
        ),
        (
            lambda folder: keras.callbacks.ModelCheckpoint(
                folder / "best.keras", "loss", save_best_only=True
            ),
            2,
        ),
        (lambda folder: keras.callbacks.ModelCheckpoint(folder / "each.keras", save_freq=3), 2),
    ],
)
def test_whatever_keras_callbacks_count_with_is_saved(make, changes, tmp_path):
    callback, model = make(tmp_path), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback.set_model(model)
    callback.on_train_begin({})
    seen: dict[str, set[str]] = {}
    for epoch, loss in enumerate([2.0, 1.5, 3.0, 3.0]):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_end(batch, {"loss": loss})
        callback.on_epoch_end(epoch, {"loss": loss})
        # of which the first epoch sets some by the arguments
        for name, value in vars(callback).items():
            seen.setdefault(name, set()).add(repr(value))
        model.set_weights([weight + 1.0 for weight in model.get_weights()])
    counted = {name for name, values in seen.items() if len(values) > 1}
    assert counted <= {*COUNTERS[type(callback).__name__]} and len(counted) == changes


def test_a_callback_of_ones_own(tmp_path):
    class Counter(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

    class Saved(Counter):
        def get_state(self):
            return {"batches": self.batches}

        def set_state(self, state):
            self.batches = state["batches"]

    forgetful, saved, trained = Counter(), Saved(), shared()
    interrupted(trained, arrays, [3], tmp_path, callbacks=lambda: [Counter(), Saved()], epochs=1)
    with pytest.warns(UserWarning, match=r"Counter starts afresh .* \(batches\)"):
        trained.fit(
            **arrays(), epochs=2, checkpoint_dir=tmp_path, callbacks=[forgetful, saved], verbose=0
        )
    assert (forgetful.batches, saved.batches) == (5, 10)


def test_a_save_at_an_epochs_last_step(tmp_path):
    """Saves after validation and callbacks: neither is lost, nor done twice."""
    validations = []

    class Watch(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            validations.append(dict(logs))

    def callbacks():
        return [Watch()]

    trained = shared()
    options = {"epochs": 3, "validation_data": (X, Y), "callbacks": callbacks}
    # stops in the 2nd epoch's first step
    history = interrupted(trained, arrays, [5], tmp_path, every=5, **options)
    assert len(validations) == 3
    assert history.history["val_loss"] == [logs["loss"] for logs in validations]


def test_a_fit_of_arrays_before_the_one_that_is_resumed(tmp_path):
    def data():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    first = trainer(False)
    first.fit(**arrays(), epochs=1, checkpoint_dir=tmp_path / "arrays", verbose=0)
    first.fit(data(), epochs=1, checkpoint_dir=tmp_path / "data", verbose=0)
    assert trainer(False).fit(
        data(), epochs=2, checkpoint_dir=tmp_path / "data", verbose=0
    ).epoch == [0, 1]


def test_complete_training_returns_its_history(tmp_path, capsys):
    trained = shared()
    expected = trained.fit(**arrays(), epochs=2, checkpoint_dir=tmp_path, verbose=0)
    after = bits(trained)
    scramble(trained)
    history = trained.fit(**arrays(), epochs=2, checkpoint_dir=tmp_path, verbose=2)
    assert history.history == expected.history and history.epoch == [0, 1]
    assert bits(trained) == after
    assert "training was complete in" in capsys.readouterr().out
    longer = trained.fit(**arrays(), epochs=3, checkpoint_dir=tmp_path, verbose=2)
    assert longer.epoch == [0, 1, 2]
    assert "resumed from" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="has 3 epochs, more than epochs=1: all are returned"):
        assert trained.fit(**arrays(), epochs=1, checkpoint_dir=tmp_path, verbose=0).epoch == [
            0,
            1,
            2,
        ]


def test_values_that_a_callback_logs_come_back(tmp_path):
    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["counts"] = [[2**25 + 1, epoch], [0, 3]]  # float32 holds no such number
            logs["means"] = np.array([0.1, epoch])

    trained, options = shared(), {"checkpoint_dir": tmp_path, "verbose": 0}
    trained.fit(**arrays(), epochs=1, callbacks=[Logs()], **options)
    found = trained.fit(**arrays(), epochs=2, callbacks=[Logs()], **options).history
    assert found["counts"] == [[[2**25 + 1, epoch], [0, 3]] for epoch in (0, 1)]
    restored, logged = found["means"]
    assert restored == [0.1, 0.0] and logged.tolist() == [0.1, 1.0]


# What must fail: a state with something missing is told from a whole one.


def lose_seed(manifest):
    manifest["data"]["seed"] += 1


def test_a_lost_place_in_the_data_shows(tmp_path):
    trained = shared()
    beginning = Beginning(trained)
    keras.utils.set_random_seed(0)
    expected = trained.fit(**arrays(), epochs=2, callbacks=[beginning], verbose=0)
    whole = bits(trained)
    scramble(trained)
    beginning.restore()
    keras.utils.set_random_seed(0)
    with pytest.raises(Interruption):
        options = {
            "checkpoint_dir": tmp_path / "b",
            "checkpoint_every": 1,
            "verbose": 0,
            "epochs": 2,
        }
        trained.fit(**arrays(), callbacks=[StopAfter(2)], **options)
    edit_manifest(store.latest(tmp_path / "b").path, lose_seed)
    history = trained.fit(**arrays(), **options)
    assert bits(trained) != whole
    assert history.history != expected.history


@pytest.mark.parametrize(
    "lost",
    [
        *["iteration", "velocity"],
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("good_steps", "loss_scale", "seed_generator", "skipped")
        ),
    ],
)
def test_a_lost_variable_shows(tmp_path, lost, monkeypatch):
    original = saver.name_variables

    def without(variables):
        groups = original(variables)
        kept = {
            group: {name: v for name, v in named.items() if lost not in f"{name} {v.name}"}
            for group, named in groups.items()
        }
        if sum(map(len, kept.values())) == sum(map(len, groups.values())):
            raise LookupError(lost)  # no such variable
        return kept

    monkeypatch.setattr(saver, "name_variables", without)
    with pytest.raises(AssertionError):
        assert_same(half, drawn_anew(arrays), [3, 6], tmp_path, epochs=3)


def test_data_that_end_before_the_place_to_go_on_from(tmp_path):
    def batches(count):
        return (batch for batch in [(X[:8], Y[:8])] * count)

    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "verbose": 0}
    with pytest.raises(Interruption):
        shared().fit(batches(12), callbacks=[StopAfter(3)], **options)
    with pytest.raises(ValueError, match="ended before the place where training is to go on"):
        shared().fit(batches(3), **options)


def other_batches(size, kind):
    """All rows in batches, of which TensorFlow does not know how many there are."""
    if kind == "generator":
        return ((X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size))
    return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(size)


def test_batches_of_other_sizes_do_not_go_on_in_silence(tmp_path):
    options = {"checkpoint_every": 1, "verbose": 0, "epochs": 2}
    once = options | {"epochs": 1}
    with pytest.raises(Interruption):
        stopped = {"callbacks": [StopAfter(2)], "checkpoint_dir": tmp_path / "a"}
        shared().fit(other_batches(8, "generator"), **stopped, **once)
    with pytest.raises(
        ValueError,
        match="the 2 train steps of this pass that were done before the checkpoint now have",
    ):
        shared().fit(other_batches(4, "generator"), checkpoint_dir=tmp_path / "a", **once)
    shared().fit(other_batches(8, "dataset").rebatch(8), checkpoint_dir=tmp_path / "b", **once)
    with pytest.warns(RuntimeWarning, match="the first train step of a pass has"):
        shared().fit(
            other_batches(8, "dataset").rebatch(4), checkpoint_dir=tmp_path / "b", **options
        )
    shared().fit(other_batches(8, "dataset"), checkpoint_dir=tmp_path / "c", **once)
    with pytest.raises(ValueError, match="a train step would be of 12 rows"):
        shared().fit(other_batches(4, "dataset"), checkpoint_dir=tmp_path / "c", **options)


def test_an_endless_dataset_of_other_batches_does_not_go_on_as_it_was(tmp_path):
    endless = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
    options = {"steps_per_epoch": 2, "verbose": 0, "checkpoint_dir": tmp_path}
    shared().fit(endless.batch(8), **options)
    with pytest.raises(
        ValueError, match=r"batch_size 16 x 3 instead of 8 x 3.* a train step would be of 48 rows"
    ):
        shared().fit(endless.batch(16), epochs=2, **options)


def test_other_values_where_the_place_is_counted_are_told_of(tmp_path):
    def fit(scale):
        batches = ((X[i : i + 8] * scale, Y[i : i + 8]) for i in range(0, len(X), 8))
        stop = [StopAfter(2)] if scale == 1 else None
        shared().fit(
            batches, checkpoint_dir=tmp_path, checkpoint_every=1, verbose=0, callbacks=stop
        )

    with pytest.raises(Interruption):
        fit(1)
    with pytest.warns(
        RuntimeWarning, match="yields other values in this pass than before the checkpoint"
    ):
        fit(2)


def test_an_epoch_that_was_cut_short_and_goes_on_is_refused(tmp_path):
    class Short(Stateless):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False

    with pytest.raises(
        ValueError, match=r"set model\.stop_training within epoch 1 and took it back"
    ):
        shared().fit(**arrays(), epochs=3, verbose=0, callbacks=[Short()], checkpoint_dir=tmp_path)


def test_rows_in_another_order_are_seen_between_epochs(tmp_path):
    def interleaved(size):
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        return tf.data.Dataset.range(4).interleave(lambda i: rows.shard(4, i).batch(size), 4, 1)

    def fit(size, accumulation, epochs):
        model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
        own = fa.Trainer(
            model, "sgd", "mse", gradient_accumulation_steps=accumulation, jit_compile=False
        )
        own.fit(interleaved(size), epochs=epochs, verbose=0, checkpoint_dir=tmp_path)

    fit(4, 2, 1)
    with pytest.raises(ValueError, match=r"cannot go on in other pieces .* in another order"):
        fit(2, 4, 2)


AFTER_MAIN = """
import concurrent.futures, sys, threading, keras, numpy as np, fastaccum as fa
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2)
x, y, executor = np.ones((16, 2)), np.zeros((16, 1)), concurrent.futures.ThreadPoolExecutor(1)
threading.excepthook = lambda args: print("failed", args.exc_value, flush=True)

class Wait(keras.callbacks.Callback):  # until Python starts no call in another thread any more
    def on_epoch_begin(self, epoch, logs=None):
        try:
            while epoch:
                executor.submit(int).result()
        except RuntimeError:
            pass

def work():
    trainer.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Wait()], checkpoint_dir=sys.argv[1])
    print("trained", len(model.history.epoch), flush=True)

threading.Thread(target=work).start()
"""


@pytest.mark.slow
@pytest.mark.sample
def test_a_fit_in_a_thread_goes_on_and_saves_after_the_main_thread_has_ended(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AFTER_MAIN, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "trained 3\n", done.stdout + done.stderr[-2000:]
    assert fa.checkpoint.latest(tmp_path).step == 12
