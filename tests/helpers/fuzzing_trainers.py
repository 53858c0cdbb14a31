"""Trainers of several small models, what may be passed to them, and Keras's own step as the oracle
of a `fit`.
"""

import functools
import importlib
import itertools
import math
import tempfile

import keras
import numpy as np
import tensorflow as tf
from fuzzing import Lies, Theirs, exhausted, generator, raises  # noqa: F401

import fastaccum as fa

nan, inf = float("nan"), float("inf")
layers = keras.layers
RATE = 0.1
CLASSES = 3


def _regression():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)]), "mse"


def _classes():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(CLASSES)])
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _ids():
    stack = [
        keras.Input((3,), dtype="int32"),
        layers.Embedding(7, 2),
        layers.Flatten(),
        layers.Dense(CLASSES),
    ]
    return keras.Sequential(stack), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _two(as_dict):
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    joined = layers.Concatenate()([a, b])
    p, q = layers.Dense(1, name="p")(joined), layers.Dense(2, name="q")(joined)
    if as_dict:
        return keras.Model({"a": a, "b": b}, {"p": p, "q": q}), {"p": "mse", "q": "mae"}
    return keras.Model([a, b], [p, q]), ["mse", "mae"]


class Subclassed(keras.Model):
    """A model that is built by its first call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(3, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


def _legacy():
    K = importlib.import_module("tf_keras")
    return K.Sequential([K.Input((4,)), K.layers.Dense(3, "tanh"), K.layers.Dense(1)]), "mse"


KINDS = {
    "regression": _regression,
    "classes": _classes,
    "ids": _ids,
    "dict": functools.partial(_two, True),
    "list": functools.partial(_two, False),
    "subclassed": lambda: (Subclassed(), "mse"),
    "legacy": _legacy,
}


def inputs(kind, rows=12):
    """What a model of this kind takes."""
    rng = np.random.default_rng(rows)
    if kind == "ids":
        return rng.integers(0, 7, size=(rows, 3))
    x = rng.normal(size=(rows, 4)).astype("float32")
    second = rng.normal(size=(rows, 2)).astype("float32")
    return {"dict": {"a": x, "b": second}, "list": [x, second]}.get(kind, x)


def targets(kind, rows=12):
    """Targets for `inputs`."""
    rng = np.random.default_rng(rows + 1)
    if kind in ("classes", "ids"):
        return rng.integers(0, CLASSES, size=rows)
    y = rng.normal(size=(rows, 1)).astype("float32")
    second = rng.normal(size=(rows, 2)).astype("float32")
    return {"dict": {"p": y, "q": second}, "list": [y, second]}.get(kind, y)


def weights(rows=12):
    """A sample weight for each row."""
    return np.random.default_rng(rows + 2).uniform(0, 2, size=rows).astype("float32")


def dataset(kind, rows=12, batch=4, weighted=False):
    """Batches of tf.data."""
    data = (inputs(kind, rows), targets(kind, rows), *([weights(rows)] if weighted else []))
    if kind == "list":
        data = tuple(tuple(each) if isinstance(each, list) else each for each in data)
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


class Batches(keras.utils.PyDataset):
    """The batches of `dataset`, by a PyDataset."""

    def __init__(self, kind, rows=12, batch=4):
        super().__init__()
        self.batches = list(dataset(kind, rows, batch).as_numpy_iterator())

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def model(kind="regression"):
    """A model of this kind, always with the same weights."""
    keras.utils.set_random_seed(1)
    made, _ = KINDS[kind]()
    made(tf.nest.map_structure(tf.constant, inputs(kind, 2)))
    return made


def new_trainer(kind, accumulation=1, jit_compile=False, **options):
    """A Trainer of SGD, whose update shows the gradient, built and trained once."""
    package = importlib.import_module("tf_keras" if kind == "legacy" else "keras")
    loss = KINDS[kind]()[1]
    options = {"gradient_accumulation_steps": accumulation, "jit_compile": jit_compile, **options}
    made = fa.Trainer(model(kind), package.optimizers.SGD(RATE), loss, **options)
    made.fit(inputs(kind), targets(kind), batch_size=4, verbose=0)
    return made


def variables(trainer):
    """What a refused call must not move."""
    return [*trainer.model.variables, *trainer.optimizer.variables, *trainer.loss_scale.variables]


def folder():
    """A new folder."""
    return tempfile.mkdtemp()


class Oracle:
    """The same model, trained by Keras's own eager full-batch step."""

    def __init__(self, kind):
        self.kind = kind
        package = importlib.import_module("tf_keras" if kind == "legacy" else "keras")
        self.model, loss = model(kind), KINDS[kind]()[1]
        options = {} if kind == "legacy" else {"auto_scale_loss": False}
        self.model.compile(package.optimizers.SGD(RATE), loss, run_eagerly=True, **options)

    def steps(self, weights, batches):
        """Weights after one step on each batch; a step that is not finite is left out, as here."""
        self.model.set_weights(weights)
        for batch in batches:
            before = self.model.get_weights()
            self.model.train_on_batch(*batch)
            if not all(np.isfinite(w).all() for w in self.model.get_weights()):
                self.model.set_weights(before)
        return self.model.get_weights()

    def loss(self, weights, batch):
        """The loss of one batch."""
        self.model.set_weights(weights)
        return self.model.test_on_batch(*batch, return_dict=True)["loss"]


def nothing_as_none(nest):
    """An empty nest as None."""
    return None if all(each is None for each in tf.nest.flatten(nest)) else nest


def plain(nest):
    """A nest of arrays as Keras's own step takes it."""
    return tf.nest.map_structure(
        lambda a: np.asarray(a.numpy() if hasattr(a, "numpy") else a), nest
    )


def arrays_of(x, y, sample_weight, class_weight):
    """One batch of all rows, weighted."""
    if class_weight is not None:
        labels = np.asarray(y).reshape(len(np.asarray(y)), -1)[:, 0].astype(int)
        factors = np.array([class_weight.get(int(label), 1.0) for label in labels], "float32")
        sample_weight = (
            factors if sample_weight is None else np.asarray(sample_weight).reshape(-1) * factors
        )
    return [each if each is None else plain(each) for each in (x, y, sample_weight)]


def rows_of(batch):
    """How many rows a batch has."""
    return len(tf.nest.flatten(batch[0])[0])


def cut(batch, start, stop):
    """Rows of a batch."""
    return tuple(
        tf.nest.map_structure(lambda a: a[start:stop], each) for each in batch if each is not None
    )


def steps_of(batch, size, accumulation):
    """The full batches of a pass over arrays."""
    each = size * accumulation
    return [cut(batch, start, start + each) for start in range(0, rows_of(batch), each)]


def epochs_of(steps, per_epoch, epochs):
    """The steps of each epoch: a pass, or a part of it which the next goes on from."""
    per_epoch = per_epoch or len(steps)
    parts = [steps[i : i + per_epoch] for i in range(0, len(steps), per_epoch)]
    return list(itertools.islice(itertools.cycle(parts), epochs))


def pooled(batches, accumulation):
    """The full batches of a pass over micro-batches."""
    groups = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
    return [tuple(tf.nest.map_structure(lambda *a: np.concatenate(a), *group)) for group in groups]


def steps_in(rows, size, accumulation):
    """How many steps a pass has."""
    return math.ceil(rows / (size * accumulation))


__all__ = [name for name in dir() if not name.startswith("_")]
