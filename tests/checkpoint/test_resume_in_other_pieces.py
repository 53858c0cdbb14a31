"""A training that goes on in other pieces ends as the uninterrupted one does, but for float32
rounding.
"""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import warnings

import keras
import numpy as np
import pieces
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import Job, farthest
from resuming import Interruption, StopAfter, edit_manifest, scramble

import fastaccum as fa
from fastaccum.checkpoint.errors import IncompatibleCheckpointError
from fastaccum.data import source
from fastaccum.data.stacks import Layout, Position
from fastaccum.families import adapt_model

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.long]

# Relative to the largest number of each variable. Measured: 3e-7 for weights, 8e-6 for a momentum
# that is almost 0.
OF_WEIGHTS, ROUNDING = 1e-6, 2e-5


class Whole:
    """Trainings without interruption, one for each kind of data, with the checkpoint of every
    step.
    """

    def __init__(self, folder):
        self.folder, self.ends, self.trainers = folder, {}, {}

    def trainer(self, accumulation, data):
        """A Trainer of this data, traced once for all tests; its numbers are wrong but for the
        first time.
        """
        # as for a new one: datasets that are made next shuffle by it
        keras.utils.set_random_seed(1)
        if (accumulation, data) not in self.trainers:
            self.trainers[accumulation, data] = pieces.trainer(accumulation)
        elif self.trainers[accumulation, data]._engine is not None:
            scramble(self.trainers[accumulation, data])
        return self.trainers[accumulation, data]

    def end(self, data):
        """The numbers at the end of the training."""
        if data not in self.ends:
            trained = self.trainer(2, data)
            saved = {"checkpoint_dir": self.folder / data, "checkpoint_every": 1, "keep": 99}
            self.ends[data] = pieces.numbers(
                trained, pieces.fit(trained, getattr(pieces, data)(12), **saved)
            )
        return self.ends[data]

    def until(self, step, data, folder):
        """A folder with the checkpoint of a step of it, which was made in pieces of 12 x 2 on one
        device.
        """
        self.end(data)
        name = f"step-{step:08d}"
        shutil.copytree(self.folder / data / name, folder / name)
        return folder


def assert_same(ended, whole):
    """Weights, slots, averages, loss scale and History."""
    assert farthest(ended[:4], whole[:4]) < OF_WEIGHTS
    assert farthest(ended, whole) < ROUNDING


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("data", "step", "batch_size", "accumulation"),
    [
        ("arrays", 2, 24, 1),
        ("arrays", 5, 8, 3),  # at the end of an epoch
        ("arrays", 4, 4, 6),  # before a last step of four rows
        pytest.param("arrays", 9, 3, 8, marks=pytest.mark.slow),
        ("in_order", 1, 6, 4),
        pytest.param("dataset", 2, 24, 1, marks=pytest.mark.slow),
        pytest.param("dataset", 5, 8, 3, marks=pytest.mark.slow),
        ("dataset", 8, 4, 6),
        ("endless", 7, 6, 4),
        ("py_dataset", 3, 8, 3),
        pytest.param("py_dataset", 5, 3, 8, marks=pytest.mark.slow),
        ("generator", 3, 4, 6),
        pytest.param("generator", 4, 24, 1, marks=pytest.mark.slow),
    ],
)
def test_pieces(whole, tmp_path, capsys, data, step, batch_size, accumulation):
    folder = whole.until(step, data, tmp_path)
    trained = whole.trainer(accumulation, data)
    options = {"checkpoint_dir": folder, "checkpoint_every": 1, "verbose": 2}
    ended = pieces.numbers(
        trained, pieces.fit(trained, getattr(pieces, data)(batch_size), **options)
    )
    assert_same(ended, whole.end(data))
    said = capsys.readouterr().out
    assert "in other pieces: " in said
    if data == "arrays":
        assert (
            f"in other pieces: batch_size {batch_size} x {accumulation} instead of 12 x 2\n" in said
        )


def test_a_place_that_is_off_by_one_row_is_noticed(whole, tmp_path):
    """The comparison sees a place that is off by a row, and updates of other rows."""

    def ended(folder, accumulation, change, **options):
        whole.until(2, "arrays", folder)
        edit_manifest(folder / "step-00000002", change)
        trained = whole.trainer(accumulation, "arrays")
        return pieces.numbers(
            trained, pieces.fit(trained, {**pieces.arrays(4), **options}, checkpoint_dir=folder)
        )

    rolled = {
        name: np.roll(value, 1, 0)
        for name, value in pieces.arrays(4).items()
        if name != "batch_size"
    }
    with pytest.warns(RuntimeWarning, match="hold other values"):
        assert (
            farthest(
                ended(tmp_path / "row", 6, lambda manifest: None, **rolled), whole.end("arrays")
            )
            > 1e-3
        )

    def of_20_rows(manifest):
        manifest["description"]["batch plan"]["global_batch"] = 20
        manifest["cut"]["batch_size"] = 10

    assert farthest(ended(tmp_path / "product", 5, of_20_rows), whole.end("arrays")) > 1e-3


def test_back_and_forth(whole, tmp_path):
    """Each part of a training takes up what the last one left in other pieces."""
    whole.until(1, "dataset", tmp_path)
    for stop, (size, accumulation) in ((2, (24, 1)), (3, (4, 6)), (1, (8, 3)), (None, (12, 2))):
        job = Job(str(tmp_path), "dataset", size, accumulation, stop=stop)
        ended = pieces.run(job, whole.trainer(accumulation, "dataset"))
    assert_same(ended, whole.end("dataset"))


def test_the_same_pieces_are_bit_identical(whole, tmp_path):
    ended = pieces.run(
        Job(str(whole.until(3, "dataset", tmp_path)), "dataset", 12, 2), whole.trainer(2, "dataset")
    )
    for ours, theirs in zip(ended, whole.end("dataset"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Own(keras.metrics.MeanAbsoluteError):
    """Rows of a metric of one's own are never padded: a last step of fewer rows has another
    shape.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, y_pred, sample_weight)


def test_steps_that_were_read_ahead(tmp_path):
    """Keeps steps that were read ahead in the checkpoint. In other pieces they are read again."""

    def run(size, accumulation, stop=None):
        trained = trainers.get(size) or pieces.trainer(
            accumulation, metrics=[Own(name="own")], steps_per_execution=3
        )
        trainers[size] = trained
        return pieces.run(Job(str(tmp_path), "dataset", size, accumulation, stop=stop), trained)

    trainers = {}
    run(12, 2, stop=2)  # three steps at once, then one, while the fifth is held
    expected = run(12, 2)  # takes that up, and holds another in the next epoch
    shutil.rmtree(tmp_path / "step-00000010")
    assert json.loads((tmp_path / "step-00000009" / "manifest.json").read_text())["data"]["held"]
    assert_same(run(4, 6), expected)


def test_results_that_depend_on_the_pieces_are_warned_of(tmp_path):
    layers = [
        lambda: keras.layers.Dropout(0.5, name="masks"),
        lambda: keras.layers.BatchNormalization(name="norm"),
    ]
    of_two = pieces.trainer(2, layers=layers)
    pieces.run(Job(str(tmp_path), "in_order", 10, 2, stop=1), of_two)
    message = r"\(batch_size 20 x 1 instead of 10 x 2\), which 'masks', 'norm' depend on: the numbers will not be"
    with pytest.warns(RuntimeWarning, match=message):
        assert (
            pieces.run(Job(str(tmp_path), "in_order", 20, 1), pieces.trainer(1, layers=layers))
            is not None
        )
    pieces.run(Job(str(tmp_path / "same"), "in_order", 10, 2, stop=1), of_two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pieces.run(Job(str(tmp_path / "same"), "in_order", 10, 2), of_two)


@pytest.mark.parametrize("of", [keras, tf_keras])
def test_layers_whose_rates_are_0_hang_on_no_pieces(of):
    """Covers layers that have a random generator but draw nothing: recurrent cells of Keras 3, and
    tf_keras's random layers.
    """

    def told(rate):
        cell = of.layers.GRUCell(2, recurrent_dropout=rate, name="cell")
        layers = [of.layers.RNN(cell), of.layers.Dropout(rate, name="masks"), of.layers.Dense(1)]
        return adapt_model(
            of.Sequential([of.layers.InputLayer((3, 2)), *layers])
        ).split_sensitive_layers

    assert told(0.0) == []
    assert told(0.5) == ["'cell'", "'masks'"]


class KeepsItsShape(keras.layers.Layer):
    """Keeps the shape that it was built for, with its batch axis, and reads it again."""

    def build(self, input_shape):
        self.built_for = input_shape
        self.factor = self.add_weight((input_shape[-1],), "ones")

    def call(self, x):
        return x * self.factor * len(self.built_for)


class KeepsTheirShapes(keras.layers.Add):
    def build(self, input_shape):
        super().build(input_shape)
        self.built_for = list(input_shape)

    def call(self, inputs):
        return super().call(inputs) * len(self.built_for)


class OfTwoInputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.add, self.dense = KeepsTheirShapes(), keras.layers.Dense(1)

    def call(self, x):
        return self.dense(self.add([x, x]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.Sequential([keras.layers.Dense(1)]),
        pytest.param(
            lambda: keras.Sequential([KeepsItsShape(), keras.layers.Dense(1)]),
            marks=pytest.mark.slow,
        ),
        OfTwoInputs,
        lambda: tf_keras.Sequential([tf_keras.layers.Dense(1)]),
    ],
    ids=[
        "unbuilt",
        "a layer that keeps a shape",
        "a layer that keeps two shapes",
        "unbuilt, tf_keras",
    ],
)
def test_a_model_that_is_built_by_its_first_batch_goes_on_in_other_pieces(tmp_path, make):
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def fit(features, batch_size, accumulation, epochs, folder):
        keras.utils.set_random_seed(0)
        tf_keras.utils.set_random_seed(0)  # of its own generator, if another test has made one
        trainer = fa.Trainer(
            make(), "sgd", "mse", gradient_accumulation_steps=accumulation, jit_compile=False
        )
        options = {
            "batch_size": batch_size,
            "epochs": epochs,
            "verbose": 0,
            "checkpoint_dir": folder,
        }
        trainer.fit(x[:, :features], x[:, :1], **options)
        return trainer.model.get_weights()

    expected = fit(4, 4, 2, 2, tmp_path / "whole")
    fit(4, 4, 2, 1, tmp_path / "parts")
    for one, other in zip(fit(4, 8, 1, 2, tmp_path / "parts"), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(IncompatibleCheckpointError, match=r"4.*was saved, now"):
        fit(3, 8, 1, 3, tmp_path / "parts")


def test_complete_training_is_complete_in_any_pieces(whole, tmp_path, capsys):
    trained = whole.trainer(3, "dataset")
    history = pieces.fit(
        trained, pieces.dataset(8), checkpoint_dir=whole.until(10, "dataset", tmp_path), verbose=2
    )
    assert farthest(pieces.numbers(trained, history), whole.end("dataset")) == 0
    assert "training was complete" in capsys.readouterr().out


# What is refused.


def rows(seed=3):
    return tf.data.Dataset.from_tensor_slices((pieces.X, pieces.Y, pieces.WEIGHTS)).shuffle(
        30, seed=seed
    )


def unseeded():
    tf.random.set_seed(None)
    return rows(None)


REFUSED = {
    "arrays of another product": (
        lambda: pieces.arrays(12),
        lambda: pieces.arrays(4),
        r"batch_size \* gradient_accumulation_steps must be 24, as saved \(12 x 2\), and is 4 x 3: batch_size=4 with "
        r"gradient_accumulation_steps=6 would do",
    ),
    "a dataset of another product": (
        lambda: {"x": rows().repeat().batch(12), "steps_per_epoch": 5},
        lambda: {"x": rows().repeat().batch(10), "steps_per_epoch": 5},
        r"would be of 30 rows: batches of 24 / gradient_accumulation_steps rows would do",
    ),
    "a dataset of other steps": (
        lambda: {"x": rows().batch(12)},
        lambda: {"x": rows().batch(4)},
        r"batch plan.steps_per_pass: 5 was saved, now 9",
    ),
    "rows that are dropped": (
        lambda: {"x": rows().take(92).batch(12, drop_remainder=True)},
        lambda: {"x": rows().take(92).batch(8, drop_remainder=True)},
        r"batch plan.rows: 84 was saved, now 88",
    ),
    "no seed": (
        lambda: {"x": unseeded().batch(12)},
        lambda: {"x": unseeded().batch(8)},
        r"it shuffles without a seed, so that its order cannot be found again",
    ),
    "another order": (
        lambda: {"x": rows().batch(12)},
        lambda: {"x": rows(4).batch(8)},
        r"it yields other rows than it did, or in another order",
    ),
    "shuffled batches": (
        lambda: {"x": rows().batch(12).shuffle(9, seed=1)},
        lambda: {"x": rows().batch(8).shuffle(9, seed=1)},
        r"it shuffles batches: do so before .batch\(...\)",
    ),
    "repeated batches": (
        lambda: {"x": rows().batch(12).repeat(), "steps_per_epoch": 5},
        lambda: {"x": rows().batch(8).repeat(), "steps_per_epoch": 5},
        r"it repeats batches: do so before .batch\(...\)",
    ),
    "a PyDataset in an order of Keras's": (
        lambda: pieces.py_dataset(12, shuffle=True),
        lambda: pieces.py_dataset(8, shuffle=True),
        r"its batches are shuffled \(shuffle=True\)",
    ),
    "batches of varying size": (
        lambda: {"x": ((pieces.X[:n], pieces.Y[:n]) for n in [12] * 8), "steps_per_epoch": 4},
        lambda: {
            "x": ((pieces.X[:n], pieces.Y[:n]) for n in [8, 8, 8, 4, 4, 16, 8, 8, 8]),
            "steps_per_epoch": 4,
        },
        r"its 3 train steps so far, of 72 rows|other rows",
    ),
    "a generator that is over": (
        lambda: {"x": ((pieces.X[:n], pieces.Y[:n]) for n in [12] * 8), "steps_per_epoch": 4},
        lambda: {"x": ((pieces.X[:n], pieces.Y[:n]) for n in [8] * 4), "steps_per_epoch": 4},
        r"its 3 train steps so far, of 72 rows",
    ),
}


@pytest.mark.filterwarnings("ignore:.*shuffles without a seed", "ignore:.*cannot save the iterator")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    """Names the change that would be allowed, before a weight moves or the folder changes."""
    first, second, message = REFUSED[case]
    saved = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "epochs": 2, "verbose": 0}
    with contextlib.suppress(Interruption):
        pieces.trainer(2).fit(**first(), callbacks=[StopAfter(3)], **saved)
    goes_on = pieces.trainer(3)
    before, files = goes_on.model.get_weights(), contents(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        goes_on.fit(**second(), **saved)
    assert "nothing was changed" in str(raised.value).lower()
    assert all(map(np.array_equal, goes_on.model.get_weights(), before))
    assert contents(tmp_path) == files


def contents(folder):
    return {path: path.read_bytes() for path in folder.glob("step-*/*")}


# Any numbers: the rows of each step alone, without a model.


def steps(data, accumulation, start=None, saved=None):
    """The rows of each train step of two epochs, as sets, and the place after each; from a place
    on.
    """
    stacks = data.stacks(Layout(accumulation), None, 2)
    stacks.track()
    if saved is not None:
        stacks.find(saved, "", True)
    given, places = [], []
    at = start or Position(0, 0)
    for epoch, dispatches in zip(range(at.epoch, 2), stacks.epochs(at), strict=False):
        for dispatch in dispatches:
            valid = [stack.x.numpy()[stack.mask.numpy()] for stack in dispatch.stacks]
            given.append((epoch, sorted(np.concatenate(valid).ravel().tolist())))
            places.append(stacks.position()[0])
        places[-1:] = [stacks.position()[0]]  # as fit does after the last of an epoch
    return given, places


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_numbers(data):
    """Whatever the rows of an update are cut into, each step has the same rows, from any step
    on.
    """
    product = data.draw(st.integers(1, 24), "rows in an update")
    divisors = [n for n in range(1, product + 1) if product % n == 0]
    count = data.draw(st.integers(1, 60), "rows")
    first, second = (
        data.draw(st.sampled_from(divisors), name) for name in ("batch_size", "another batch_size")
    )
    x = np.arange(count, dtype="float32")[:, None]
    kinds = {
        "arrays": lambda size: source.make_data_source(x, x, batch_size=size, shuffle=True, seed=1),
        "dataset": lambda size: source.make_data_source(
            tf.data.Dataset.from_tensor_slices((x, x)).shuffle(9, seed=1).batch(size),
            batch_size=None,
        ),
    }
    make = kinds[data.draw(st.sampled_from(sorted(kinds)), "kind")]
    whole, places = steps(make(first), product // first)
    at = data.draw(st.integers(1, len(whole)), "steps done") - 1
    per_epoch = len(whole) // 2
    position = Position(0, *divmod(at + 1, per_epoch))
    goes_on, _ = steps(make(second), product // second, position, places[at])
    assert goes_on == whole[at + 1 :]


# Replicas and workers, in processes of their own.


@contextlib.contextmanager
def process(count, jobs, *worker):
    command = [sys.executable, pieces.__file__, str(count), json.dumps(jobs), *worker]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as started:
        try:
            yield
            _, said = started.communicate(timeout=200)
            assert started.returncode == 0, said[-4000:]
        finally:
            started.kill()


@contextlib.contextmanager
def two_workers(jobs):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = ",".join(str(each.getsockname()[1]) for each in sockets)
    with process(1, jobs, ports, "0"), process(1, jobs, ports, "1"):
        yield


CUTS = {"one": (12, 2), "1": (24, 1), "2": (8, 3), "4": (4, 6), "workers": (6, 4)}


def start(place, jobs):
    """Starts a process for jobs on so many replicas or workers, or nothing where this process can
    run them.
    """
    if place == "workers":
        return two_workers(jobs)
    if place in "24":
        return process(int(place), jobs)
    scope = (
        contextlib.nullcontext
        if place == "one"
        else tf.distribute.MirroredStrategy(["CPU:0"]).scope
    )
    for job in jobs:
        if (ended := pieces.run(job, pieces.trainer(job.accumulation, scope))) is not None:
            np.savez(f"{job.folder}.npz", *ended)
    return contextlib.nullcontext()


@pytest.mark.slow
def test_replicas_and_workers(whole, tmp_path):
    """Moves a training from one device to 2 and 4 replicas and two workers, between these, to one
    replica, and back.
    """
    ways = {  # which training goes on where
        "arrays": [("one", "1"), ("one", "2"), ("one", "4"), ("one", "workers")],
        "dataset": [("one", "2"), ("one", "4"), ("one", "workers"), ("one", "1")],
    }
    back = {
        "arrays": [
            ("2", "4"),
            ("4", "2"),
            ("workers", "2"),
            ("4", "workers"),
            ("2", "one"),
            ("workers", "one"),
        ],
        "dataset": [
            ("2", "4"),
            ("4", "2"),
            ("2", "workers"),
            ("workers", "4"),
            ("4", "one"),
            ("4", "1"),
        ],
    }

    def job(data, way):
        return Job(
            str(tmp_path / f"{data} from {' to '.join(way)}"),
            data,
            *CUTS[way[-1]],
            way[-1] != "one",
        )

    def run(ways, more=()):
        jobs = [*(job(data, way) for data, pairs in ways.items() for way in pairs), *more]
        with contextlib.ExitStack() as running:
            for place in ("workers", "4", "2", "1", "one"):
                here = [
                    each for each in jobs if (each.batch_size, each.accumulation) == CUTS[place]
                ]
                if here:
                    running.enter_context(start(place, here))

    for data, pairs in ways.items():
        for way in pairs:
            whole.until(
                {"arrays": 2, "dataset": 6}[data], data, pathlib.Path(job(data, way).folder)
            )
    begun = {(data, way[0]): job(data, way[:1]) for data, pairs in back.items() for way in pairs}
    run(ways, begun.values())
    for data, pairs in back.items():
        for way in pairs:
            shutil.copytree(
                f"{begun[data, way[0]].folder}/step-00000003",
                f"{job(data, way).folder}/step-00000003",
            )
    run(back)
    differences = {}
    for each in (
        *(job(data, way) for data in ways for way in (*ways[data], *back[data])),
        *begun.values(),
    ):
        ended = list(np.load(f"{each.folder}.npz").values())
        expected = whole.end(each.data)
        differences[pathlib.Path(each.folder).name] = (
            farthest(ended[:4], expected[:4]),
            farthest(ended, expected),
        )
    assert len(differences) == 26
    assert not {
        way: each for way, each in differences.items() if each[0] > OF_WEIGHTS or each[1] > ROUNDING
    }
