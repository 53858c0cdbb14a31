"""Random training scripts: `Trainer.fit` ends where Keras's `fit` on full batches ends."""

import functools
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from keras import layers, losses, metrics, ops
from random_calls import fuzz

import fastaccum as fa

pytestmark = [pytest.mark.slow, pytest.mark.long]

REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


def row_squares(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


# The grammar: layers by the rank of their input, which they are called on.

INPUTS = {
    "rows": (3,),
    "tokens": (4, 2),
    "masked tokens": (4, 2),
    "images": (4, 3, 2),
    "ids": (4,),
    "masked ids": (4,),
}
OF_ANY_RANK = [
    lambda h: layers.Dense(3, "gelu", kernel_regularizer="l2")(h),
    lambda h: layers.Dense(4, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.8))(h),
    lambda h: layers.Dense(2, bias_regularizer="l1", activity_regularizer="l2")(h),
    lambda h: layers.LayerNormalization(epsilon=0.1)(h),
    lambda h: layers.Multiply()([h, layers.Dense(h.shape[-1], "sigmoid")(h)]),
]
LAYERS = {
    2: [lambda h: layers.PReLU()(h), lambda h: layers.UnitNormalization()(h)],
    3: [
        lambda h: layers.LSTM(3, return_sequences=True)(h),
        lambda h: layers.GRU(2)(h),
        lambda h: layers.Conv1D(3, 2, padding="causal")(h),
        lambda h: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))(h),
        lambda h: layers.MultiHeadAttention(1, 2)(h, h, use_causal_mask=True),
        lambda h: layers.GlobalAveragePooling1D()(h),
    ],
    4: [
        lambda h: layers.Conv2D(4, 2, padding="same", activation="tanh")(h),
        lambda h: layers.SeparableConv2D(2, 2, padding="same")(h),
        lambda h: layers.MaxPooling2D(2, padding="same")(h),
        lambda h: layers.GroupNormalization(1)(h),
        lambda h: layers.Flatten()(h),
    ],
}


class Task(NamedTuple):
    """Targets of one kind: the last layer, and losses and metrics."""

    units: int
    activation: str | None
    losses: list[Any]
    metrics: list[str]


def with_reductions(loss, **options):
    """Returns a maker of the loss for each reduction."""
    return [functools.partial(loss, **options, reduction=reduction) for reduction in REDUCTIONS]


TASKS = {
    "numbers": Task(
        2,
        None,
        [
            *("mse", row_squares, *with_reductions(losses.Huber)),
            *with_reductions(losses.CosineSimilarity),
        ],
        ["mae", "mse"],
    ),
    "classes": Task(
        3,
        "softmax",
        [
            *with_reductions(losses.SparseCategoricalCrossentropy),
            *with_reductions(losses.SparseCategoricalCrossentropy, ignore_class=0),
        ],
        ["accuracy", "sparse_top_k_categorical_accuracy"],
    ),
    "one-hot": Task(
        3,
        "softmax",
        with_reductions(losses.CategoricalCrossentropy, label_smoothing=0.1),
        ["accuracy", "top_k_categorical_accuracy"],
    ),
    "binary": Task(
        2,
        "sigmoid",
        ["binary_crossentropy", *with_reductions(losses.BinaryFocalCrossentropy)],
        ["accuracy", functools.partial(metrics.AUC, num_thresholds=20, name="auc")],
    ),
}
OPTIMIZERS = st.builds(
    functools.partial,
    st.just(keras.optimizers.SGD),
    st.floats(0.01, 0.1),
    momentum=st.floats(0, 0.9),
    global_clipnorm=st.none() | st.floats(0.1, 5.0),
)


class Head(NamedTuple):
    """An output of a model, with its loss and its metrics."""

    task: str
    loss: Any
    metrics: list[Any]
    weighted_metrics: list[Any]


class Script(NamedTuple):
    """What is drawn. Layers are chosen for each rank that their input may have."""

    inputs: str
    heads: list[Head]
    batch_size: int
    accumulation: int
    rows: int
    layers: list[dict[int, Any]] = ()
    optimizer: Any = functools.partial(keras.optimizers.SGD, 0.1)
    options: dict[str, Any] = {}  # noqa: RUF012
    loss_weights: list[float] | None = None
    epochs: int = 1
    is_dataset: bool = False
    is_weighted: bool = False
    is_validated: bool = False

    @property
    def update_rows(self) -> int:
        return self.batch_size * self.accumulation


@st.composite
def heads(draw):
    name = draw(st.sampled_from(list(TASKS)))
    metrics = st.lists(st.sampled_from(TASKS[name].metrics), unique=True, max_size=1)
    return Head(name, draw(st.sampled_from(TASKS[name].losses)), draw(metrics), draw(metrics))


SCRIPTS = st.builds(
    Script,
    inputs=st.sampled_from(list(INPUTS)),
    heads=st.lists(heads(), min_size=1, max_size=2),
    batch_size=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    rows=st.integers(1, 30),
    layers=st.lists(
        st.fixed_dictionaries({k: st.sampled_from(OF_ANY_RANK + v * 2) for k, v in LAYERS.items()}),
        max_size=3,
    ),
    optimizer=OPTIMIZERS,
    options=st.fixed_dictionaries(
        {
            "jit_compile": st.sampled_from([False] * 7 + [True]),
            "steps_per_execution": st.integers(1, 3),
        }
    ),
    loss_weights=st.sampled_from([None, [0.3, 2.0]]),
    epochs=st.integers(1, 3),
    is_dataset=st.booleans(),
    is_weighted=st.booleans(),
    is_validated=st.booleans(),
)


# How a script is built and run.


def make(value):
    """Calls a maker, so that no two models share an object."""
    return value() if isinstance(value, functools.partial) else value


def of_outputs(values):
    return values[0] if len(values) == 1 else values


def build_model(script: Script) -> keras.Model:
    """Makes the model, always with the same weights."""
    keras.utils.set_random_seed(1)
    h = tensor = keras.Input(INPUTS[script.inputs])
    if script.inputs.endswith("ids"):
        h = layers.Embedding(7, 4, mask_zero=script.inputs == "masked ids")(tensor)
    elif script.inputs == "masked tokens":
        h = layers.Masking()(tensor)
    for of_ranks in script.layers:
        h = of_ranks[len(h.shape)](h)
    outputs = []
    for name, head in zip("pq", script.heads, strict=False):
        task = TASKS[head.task]
        outputs.append(layers.Dense(task.units, task.activation, name=name)(h))
    return keras.Model(tensor, of_outputs(outputs))


def compiled_options(script: Script) -> dict[str, Any]:
    """Returns what `compile` and `Trainer` both take."""
    options = {"loss": of_outputs([make(head.loss) for head in script.heads])}
    for name in ("metrics", "weighted_metrics"):
        of_heads = [[make(metric) for metric in getattr(head, name)] for head in script.heads]
        if any(of_heads):
            options[name] = of_outputs(of_heads)
    if len(script.heads) == 2:
        options["loss_weights"] = script.loss_weights
    return options


def build_data(script: Script, model: keras.Model) -> tuple:
    """Returns x, y and, if there are any, sample weights."""
    rng = np.random.default_rng(0)
    shape = (script.rows, *INPUTS[script.inputs])
    x = rng.normal(size=shape).astype("float32")
    if script.inputs.endswith("ids"):
        x = rng.integers(1, 7, size=shape).astype("float32")
    if script.inputs.startswith("masked"):
        lengths = rng.integers(1, 5, size=script.rows)
        lengths[:: script.update_rows] = 4
        x[np.arange(4) >= lengths[:, None]] = 0
    targets = []
    weights = []
    for head, output in zip(script.heads, model.outputs, strict=True):
        shape = (script.rows, *output.shape[1:])
        targets.append(build_targets(script, head, shape, rng))
        weights.append(rng.choice([0.0, 0.5, 1.0, 3.0], size=shape[:-1]).astype("float32"))
        weights[-1][:: script.update_rows] = 1
    data = (x, of_outputs(targets))
    return (*data, of_outputs(weights)) if script.is_weighted else data


def build_targets(script, head, shape, rng):
    size = shape[-1]
    if head.task in ("classes", "one-hot"):
        labels = rng.integers(0, size, size=shape[:-1]).astype("int32")
        labels[:: script.update_rows] = 2  # counts in each update: Keras trains by an empty one
        return np.eye(size, dtype="float32")[labels] if head.task == "one-hot" else labels
    if head.task == "numbers":
        return rng.normal(size=shape).astype("float32")
    return rng.integers(0, 2, size=shape).astype("float32")


class Trained(NamedTuple):
    start: list[np.ndarray]
    weights: list[np.ndarray]
    logs: dict[str, list[float]]


def fit_and_evaluate(script, model, trainer, batch_size, rows_of_evaluation) -> Trained:
    start = model.get_weights()
    data = build_data(script, model)
    options = {"epochs": script.epochs, "verbose": 0, "shuffle": False}
    if script.is_validated:
        options["validation_data"] = data
        options["validation_batch_size"] = rows_of_evaluation
    named = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    if script.is_dataset:
        parts = tuple(tuple(part) if isinstance(part, list) else part for part in data)
        dataset = tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)
        logs = trainer.fit(dataset, **options).history
    else:
        logs = trainer.fit(**named, batch_size=batch_size, **options).history
    options = {"batch_size": rows_of_evaluation, "verbose": 0, "return_dict": True}
    weights = model.get_weights()
    evaluated = trainer.evaluate(**named, **options)
    return Trained(start, weights, {**logs, **{f"evaluate {k}": v for k, v in evaluated.items()}})


def train(script: Script) -> Trained:
    """Runs the script with `fa.Trainer`."""
    model = build_model(script)
    trainer = fa.Trainer(
        model,
        make(script.optimizer),
        gradient_accumulation_steps=script.accumulation,
        **script.options,
        **compiled_options(script),
    )
    return fit_and_evaluate(script, model, trainer, script.batch_size, script.batch_size)


def train_by_keras(script: Script) -> Trained:
    """Runs the script with Keras's eager `fit` on the full batch of each update."""
    model = build_model(script)
    optimizer = make(script.optimizer)
    apply = optimizer.apply
    # Sums a table's gradient by id, before it is clipped.
    optimizer.apply = lambda grads, of: apply([tf.convert_to_tensor(g) for g in grads], of)
    model.compile(optimizer, **compiled_options(script), run_eagerly=True)
    return fit_and_evaluate(script, model, model, script.update_rows, script.rows)


def check(script: Script, trained: Trained) -> None:
    """Raises AssertionError where `Trainer` came to something else than Keras."""
    expected = train_by_keras(script)
    missing = set(expected.logs) - set(trained.logs)
    assert not missing, f"{missing} are missing"
    for weight, wanted, start in zip(
        trained.weights, expected.weights, expected.start, strict=True
    ):
        moved = np.abs(wanted - start).max(initial=0)
        np.testing.assert_allclose(weight, wanted, 1e-4, 1e-3 * moved + 1e-6, err_msg="a weight")
    for name, wanted in expected.logs.items():
        np.testing.assert_allclose(trained.logs[name], wanted, 2e-3, 2e-5, err_msg=name)


# Not shrunk: each attempt trains twice, for minutes in all.
@settings(fuzz(20), phases=[Phase.generate])
@given(script=SCRIPTS)
def test_a_training_script(script):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trained = train(script)
        except (TypeError, ValueError):
            try:
                train_by_keras(script)
            except Exception:
                reject()  # Keras does not train it either
            raise
        check(script, trained)


def test_a_wrong_formula_is_seen():
    """The negative control: the mean of the means of 3 rows and of 1 is not the mean of 4 rows."""
    script = Script("rows", [Head("numbers", "mse", ["mae"], [])], 3, 2, 4)
    right = train(script)
    check(script, right)
    model = build_model(script)
    x, y = build_data(script, model)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.train_on_batch(x, y, sample_weight=np.float32([2 / 3, 2 / 3, 2 / 3, 2]))
    with pytest.raises(AssertionError, match="a weight"):
        check(script, right._replace(weights=model.get_weights()))
    for name in ("loss", "mae", "evaluate loss"):
        with pytest.raises(AssertionError, match=name):
            check(script, right._replace(logs={**right.logs, name: [9.0]}))
