"""Random calls of `Trainer` and its methods: Keras's own eager full-batch step, or a refusal."""

import contextlib
import functools
import os
import tempfile
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from random_calls import (
    FLAG,
    LOSS_SCALE,
    Argument,
    Call,
    calls,
    fuzz,
    is_empty,
    is_flag,
    is_number,
    is_positive,
    is_whole,
    judge,
    nothing,
    one_of,
    or_none,
    positive,
    raises,
    whole,
)

import fastaccum as fa

pytestmark = [pytest.mark.slow, pytest.mark.long]

layers = keras.layers
KINDS = ("numbers", "classes", "ids", "dict")


def make_model(kind):
    """Makes a model of a kind, always with the same weights."""
    keras.utils.set_random_seed(1)
    if kind == "dict":
        inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), name="b")}
        joined = layers.Concatenate()(list(inputs.values()))
        return keras.Model(inputs, {"p": layers.Dense(1)(joined), "q": layers.Dense(2)(joined)})
    first = [keras.Input((4,)), layers.Dense(3, "tanh")]
    if kind == "ids":
        first = [keras.Input((3,), dtype="int32"), layers.Embedding(7, 2), layers.Flatten()]
    return keras.Sequential([*first, layers.Dense(1 if kind == "numbers" else 3)])


def arrays_for(kind, rows):
    """Returns x, y and sample_weight."""
    rng = np.random.default_rng(rows)
    a = rng.normal(size=(rows, 4)).astype("float32")
    b = rng.normal(size=(rows, 2)).astype("float32")
    sample_weight = rng.uniform(0, 0.5, size=rows).astype("float32")
    if kind == "dict":
        return {"a": a, "b": b}, {"p": a[:, :1], "q": b}, sample_weight
    if kind == "numbers":
        return a, b[:, :1], sample_weight
    x = a if kind == "classes" else rng.integers(0, 7, (rows, 3))
    return x, rng.integers(0, 3, rows), sample_weight


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def make_source(form, batches):
    """Makes what yields the batches: a dataset, a PyDataset or a generator."""
    if form == "dataset":
        rows = len(tf.nest.flatten(batches[0])[0])
        return tf.data.Dataset.from_tensor_slices(joined(batches)).batch(rows)
    return Batches(batches) if form == "PyDataset" else iter(batches)


def joined(batches):
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *batches)


def split(batch, rows):
    """Cuts a batch into batches of so many rows."""
    total = len(tf.nest.flatten(batch[0])[0])
    batches = []
    for start in range(0, total, rows):
        batches.append(tf.nest.map_structure(lambda a, i=start: a[i : i + rows], tuple(batch)))
    return batches


def batch_of(x, y=None, sample_weight=None, class_weight=None):
    """Returns all rows as one batch of arrays, weighted."""
    if class_weight is not None:
        of_rows = np.array([class_weight.get(int(label), 1.0) for label in np.ravel(y)], "float32")
        given = 1.0 if is_empty(sample_weight) else np.asarray(sample_weight).reshape(-1)
        sample_weight = given * of_rows
    parts = [part for part in (x, y, sample_weight) if not is_empty(part)]
    return tuple(tf.nest.map_structure(as_array, part) for part in parts)


def as_array(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.to_tensor()
    return np.asarray(tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf)


# The arguments


def is_class_weight(value):
    if not isinstance(value, dict) or not value:
        return value is None
    return all(is_whole(k, 0) and (v == 0 or is_positive(v)) for k, v in value.items())


def is_validation_freq(value):
    lists_epochs = isinstance(value, (list, tuple, set)) and len(value) > 0
    return all(map(is_whole, value)) if lists_epochs else is_whole(value)


def are_callbacks(value):
    given = tf.nest.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]
    return is_empty(value) or all(isinstance(c, keras.callbacks.Callback) for c in given)


CALLBACK = st.one_of(
    st.builds(keras.callbacks.History),
    st.builds(keras.callbacks.TerminateOnNaN),
    st.builds(keras.callbacks.LambdaCallback, on_epoch_end=st.just(raises)),
)
METRICS = Argument(
    st.none() | st.lists(st.sampled_from(["mae", "mse", lambda y, p: tf.abs(y - p)]), max_size=2)
)
OF_A_TRAINER = {
    "model": Argument(st.just(make_model), nothing),  # which the test calls
    "optimizer": Argument(
        st.sampled_from(["sgd", "SGD"])
        | st.builds(keras.optimizers.SGD, st.floats(0.01, 0.1), st.floats(0, 0.9))
        | st.builds(keras.optimizers.Adagrad, st.floats(0.01, 0.1))
    ),
    "loss": Argument(
        st.sampled_from(["mse", ["mae"], lambda y, p: tf.reduce_mean(tf.square(y - p), -1)])
        | st.builds(
            keras.losses.Huber,
            st.floats(0.1, 1.0),
            st.sampled_from(["sum", "mean_with_sample_weight", "sum_over_batch_size"]),
        )
    ),
    "metrics": METRICS,
    "weighted_metrics": METRICS,
    "loss_weights": Argument(st.sampled_from([None, 2.0, [0.5], 0.0, -1.0])),
    "gradient_accumulation_steps": whole(1, 5),
    "loss_scale": LOSS_SCALE,
    "clip_norm": or_none(positive(1e-3, 1e3)),
    "fp32_weight_gradients": FLAG,
    "flash_attention": one_of("auto", True, False),
    "jit_compile": Argument(st.just(False), is_flag),
    "steps_per_execution": whole(1, 3),
    "on_nonfinite": one_of("skip", "raise"),
    "shard_optimizer": one_of("auto", True, False),
}
LOSSES = {
    "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "ids": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "dict": {"p": "mse", "q": "mae"},
}


def of_data(kind, rows):
    x, y, sample_weight = (Argument(st.just(part)) for part in arrays_for(kind, rows))
    return {"x": x, "y": y, "sample_weight": or_none(sample_weight)}


def of_fit(kind):
    validation = arrays_for(kind, 5)
    class_weights = st.none()
    if kind in ("classes", "ids"):
        class_weights |= st.dictionaries(st.integers(0, 2), st.floats(0.5, 2.0), min_size=1)
    return {
        "batch_size": or_none(whole(1, 14)),
        "epochs": whole(1, 3),
        "verbose": one_of(0, "auto", 1, 2),
        "callbacks": Argument(st.none() | CALLBACK | st.lists(CALLBACK, max_size=2), are_callbacks),
        "validation_split": Argument(
            st.just(0.0) | st.floats(0.2, 0.8), lambda value: is_number(value) and 0 <= value < 1
        ),
        "validation_data": Argument(st.sampled_from([None, validation[:2], validation])),
        "shuffle": FLAG,
        "initial_epoch": whole(0, 1),
        "steps_per_epoch": or_none(whole(1, 4)),
        "validation_steps": or_none(whole(1, 1)),
        "validation_batch_size": or_none(whole(1, 6)),
        "validation_freq": Argument(st.sampled_from([1, 2, [1], (1, 3), {2}]), is_validation_freq),
        "checkpoint_dir": or_none(
            Argument(st.just("folder"), lambda value: isinstance(value, (str, os.PathLike)))
        ),
        "checkpoint_every": or_none(whole(1, 1)),
        "keep": whole(1, 3),
        "resume": Argument(st.just(()), is_empty),  # a name needs a checkpoint_dir
        "global_batch_size": Argument(st.none(), lambda value: value is None),
        "class_weight": Argument(class_weights, is_class_weight),
    }


class Drawn(NamedTuple):
    """A call of a method, of a Trainer that other arguments may make."""

    kind: str
    call: Call
    form: str = "arrays"  # or the form of the source of `batches`
    batches: list[Any] | None = None

    def arguments(self, *but):
        """Returns the arguments of the method: all but these."""
        arguments = {k: v for k, v in self.call.arguments.items() if k not in but}
        if self.batches is not None:
            arguments["x"] = make_source(self.form, self.batches)
        return arguments


@st.composite
def fits(draw):
    kind = draw(st.sampled_from(KINDS))
    rows = draw(st.sampled_from([1, 5, 12, 13]))
    form = draw(st.sampled_from(["arrays"] * 4 + ["dataset", "PyDataset", "generator"]))
    table = {**OF_A_TRAINER, **of_data(kind, rows), **of_fit(kind)}
    if kind != "numbers":
        table["loss"] = Argument(st.just(LOSSES[kind]))
        for name in ("metrics", "weighted_metrics", "loss_weights"):
            del table[name]
    required = ["model", "optimizer", "loss", "jit_compile", "x", "y"]
    batches = None
    if form != "arrays":
        batches = split(arrays_for(kind, rows)[:2], draw(st.integers(1, 6)))
        for name in ("x", "y", "sample_weight", "class_weight", "validation_split"):
            del table[name]
        required = required[:-2]
        table["batch_size"] = Argument(table["batch_size"].valid)  # not read, as in Keras
    call = draw(calls(table, required))
    if form == "generator":  # is read once
        call.arguments.setdefault("epochs", 1)
    return Drawn(kind, call, form, batches)


# The reference


def train_reference(drawn):
    """Trains by Keras's step on each full batch, with Keras's clipping; returns the model.

    A step that is not finite is left out. None if the order of the rows is not known.
    """
    arguments = drawn.call.arguments
    if drawn.batches is None:
        batch = batch_of(*[arguments.get(k) for k in ("x", "y", "sample_weight", "class_weight")])
        rows = len(tf.nest.flatten(batch[0])[0])
        held_out = float(arguments.get("validation_split", 0))
        if held_out and is_empty(arguments.get("validation_data")):
            rows = int(np.floor(rows * (1 - held_out)))
            batch = split(batch, rows)[0]
        micro_batch = min(int(arguments.get("batch_size") or 32), rows)
    else:
        batch = joined(drawn.batches)
        micro_batch = len(tf.nest.flatten(drawn.batches[0])[0])
    steps = split(batch, micro_batch * int(arguments.get("gradient_accumulation_steps", 1)))
    is_shuffled = bool(arguments.get("shuffle", True)) and drawn.form in ("arrays", "PyDataset")
    if is_shuffled and len(steps) > 1:
        return None
    optimizer = keras.optimizers.get(arguments["optimizer"] or "adamw")  # the default of None
    config = optimizer.get_config()
    if arguments.get("clip_norm") is not None:
        config["global_clipnorm"] = float(arguments["clip_norm"])
    compiled = {}
    for name in ("metrics", "weighted_metrics", "loss_weights"):
        if not is_empty(arguments.get(name)):
            compiled[name] = arguments[name]
    reference = make_model(drawn.kind)
    optimizer = type(optimizer).from_config(config)
    options = {"auto_scale_loss": False, "run_eagerly": True}
    reference.compile(optimizer, arguments["loss"], **compiled, **options)
    apply = optimizer.apply
    # Sums a table's gradient by id, before it is clipped.
    optimizer.apply = lambda grads, of: apply([tf.convert_to_tensor(g) for g in grads], of)
    per_epoch = int(arguments.get("steps_per_epoch") or len(steps))
    parts = [steps[i : i + per_epoch] for i in range(0, len(steps), per_epoch)]
    for epoch in range(epochs_of(arguments)):
        for step in parts[epoch % len(parts)]:
            before = reference.get_weights()
            reference.train_on_batch(*step)
            if not all(np.isfinite(weight).all() for weight in reference.get_weights()):
                reference.set_weights(before)
    return reference


def epochs_of(arguments):
    return int(arguments.get("epochs", 1)) - int(arguments.get("initial_epoch", 0))


def check_close(results, expected):
    for one, other in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, 2e-3, 2e-4 * (1 + np.abs(other).max(initial=0)))


@fuzz(190)
@given(drawn=fits())
def test_a_trainer_and_fit(drawn):
    arguments = drawn.call.arguments
    made = arguments["model"]
    known = []
    if made is make_model:
        made = make_model(drawn.kind)
        known += made.variables
    if isinstance(arguments["optimizer"], keras.Optimizer) and known:
        arguments["optimizer"].build(made.trainable_variables)
        known += arguments["optimizer"].variables

    def run():
        options = {k: v for k, v in arguments.items() if k in OF_A_TRAINER}
        trainer = fa.Trainer(**{**options, "model": made})
        return trainer.fit(**drawn.arguments(*OF_A_TRAINER))

    def check(history):
        losses = history.history.get("loss", [])
        if epochs_of(arguments) <= 0:
            assert not losses
        elif len(losses) < epochs_of(arguments):
            assert drawn.form == "generator" and len(losses) == 1
        else:
            reference = train_reference(drawn)
            if reference is not None:
                check_close(made.get_weights(), reference.get_weights())

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        state = lambda: [variable.numpy().tobytes() for variable in known]  # noqa: E731
        names = ("x", "y", "sample_weight", "labels", "ids")
        judge(drawn.call, run, check, state, names, may_refuse=True)


# evaluate, predict, train_step


@functools.cache
def built_trainer(kind):
    """Makes a Trainer and the values of its variables, and Keras's model beside it."""
    optimizer = keras.optimizers.SGD(0.1)
    loss = LOSSES.get(kind, "mse")
    options = {"gradient_accumulation_steps": 3, "jit_compile": False}
    trainer = fa.Trainer(make_model(kind), optimizer, loss, **options)
    trainer.fit(*arrays_for(kind, 12)[:2], batch_size=4, verbose=0)
    reference = make_model(kind)
    options = {"auto_scale_loss": False, "run_eagerly": True}
    reference.compile(keras.optimizers.SGD(0.1), loss, **options)
    variables = [*trainer.model.variables, *optimizer.variables, *trainer.loss_scale.variables]
    return trainer, reference, variables, [tf.identity(variable) for variable in variables]


@st.composite
def method_calls(draw):
    kind = draw(st.sampled_from(KINDS))
    method = draw(st.sampled_from(["evaluate", "predict", "train_step"]))
    if method == "train_step":
        micro_batches = draw(st.sampled_from([1, 2, 3]))
        arrays = arrays_for(kind, 3 * micro_batches)[: draw(st.integers(2, 3))]
        stack = tf.nest.map_structure(lambda a: a.reshape(micro_batches, 3, *a.shape[1:]), arrays)
        return method, Drawn(kind, draw(calls({"stack": Argument(st.just(stack))}, ["stack"])))
    table = of_data(kind, draw(st.sampled_from([13, 5, 1])))
    table |= {"steps": or_none(whole(1, 1)), "return_dict": FLAG}
    required = ["x", "y", "batch_size"]
    if method == "predict":
        required = ["x", "batch_size"]
        table = {"x": table["x"]}
    table |= {name: of_fit(kind)[name] for name in ("batch_size", "verbose", "callbacks")}
    call = draw(calls(table, required))
    return method, Drawn(kind, call)


@fuzz(220)
@given(drawn=method_calls())
def test_another_method(drawn):
    method, (kind, call, *_) = drawn
    trainer, reference, variables, start = built_trainer(kind)
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    reference.set_weights(trainer.model.get_weights())
    arguments = call.arguments

    def state():
        return [variable.numpy().tobytes() for variable in variables]

    before = state()

    def check(result):
        if method == "train_step":
            stack = batch_of(*arguments["stack"])
            batch = tf.nest.map_structure(lambda a: a.reshape(-1, *a.shape[2:]), stack)
            reference.train_on_batch(*batch)
            is_finite = all(np.isfinite(weight).all() for weight in reference.get_weights())
            if is_finite:
                check_close(trainer.model.get_weights(), reference.get_weights())
                return
        assert state() == before, "it moved something"
        if method == "predict":
            check_close(result, reference.predict_on_batch(*batch_of(arguments["x"])))
        elif method == "evaluate":
            batch = batch_of(*[arguments.get(name) for name in ("x", "y", "sample_weight")])
            if arguments.get("steps") is not None:
                batch = split(batch, int(arguments.get("batch_size") or 32))[0]
            loss = result["loss"] if isinstance(result, dict) else np.ravel(result)[0]
            check_close(loss, reference.test_on_batch(*batch, return_dict=True)["loss"])

    names = ("x", "y", "sample_weight", "train step", "labels", "ids")
    run = getattr(trainer, method)
    judge(call, lambda: run(**arguments), check, state, names, may_refuse=True)
