"""Random training scripts: `Trainer.fit` ends where Keras's `fit` on full batches ends."""

import itertools
import math
import re
import warnings
from typing import Any, NamedTuple

import every_optimizer
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, note, reject, settings
from hypothesis import strategies as st
from keras import layers, ops
from random_calls import codes, fuzz

import fastaccum as fa

pytestmark = [pytest.mark.slow, pytest.mark.long]


# What users write.


def squares(y_true, y_pred):
    """A loss of each element."""
    return tf.square(y_true - y_pred)


def row_squares(y_true, y_pred):
    """A loss of each row or token."""
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Scale(layers.Layer):
    """A layer with a regularised and a constrained weight."""

    def build(self, shape):
        size = (shape[-1],)
        self.scale = self.add_weight(shape=size, initializer="ones", regularizer="l2")
        self.shift = self.add_weight(shape=size, initializer="zeros", constraint="non_neg")

    def call(self, x):
        return x * self.scale + self.shift


class AddsLoss(layers.Layer):
    """Adds a loss of all rows, their mean or sum, or one of each row."""

    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def call(self, x):
        losses = 0.01 * ops.sum(ops.square(x), axis=tuple(range(1, len(x.shape))))
        reduce = {"mean": ops.mean, "sum": ops.sum, "rows": ops.identity}[self.reduction]
        self.add_loss(reduce(losses))
        return x


class Wrapped(keras.Model):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def call(self, x, training=False):
        return self.core(x, training=training)


class Penalised(Wrapped):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(tf.nest.flatten(y_pred)[0]))


class OwnMean(Wrapped):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + sum(self.losses)


class OwnSum(Wrapped):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.1 * ops.sum(ops.square(y - y_pred))


def closeness(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


# The grammar. `h` is the tensor that a layer is called on, `w` its width, `r` a loss's reduction.

SHAPES = {"rows": (3,), "tokens": (4, 2), "masked tokens": (4, 2), "images": (4, 3, 2)}
INPUTS = (*SHAPES, "ids", "masked ids")
OF_ANY_RANK = codes("""
    layers.Dense(3, 'gelu', kernel_regularizer='l2')(h) | layers.LayerNormalization(epsilon=0.1)(h)
    layers.Dense(4, 'tanh', use_bias=False, kernel_constraint=keras.constraints.MaxNorm(0.8))(h)
    layers.Dense(2, bias_regularizer='l1', activity_regularizer='l2')(h) | layers.Dropout(0.0)(h)
    layers.ActivityRegularization(l2=0.01)(h) | Scale()(h) | layers.GaussianNoise(0.0)(h)
    layers.Activation('tanh')(h) | layers.RMSNormalization(epsilon=0.1)(h)
    layers.Multiply()([h, layers.Dense({w}, 'sigmoid')(h)])
    (lambda shared: layers.Add()([h, shared(shared(h))]))(layers.Dense({w}, 'tanh'))
""")
LAYERS = {
    1: codes("layers.PReLU()(h) | layers.UnitNormalization()(h)"),
    2: codes("""
        layers.LSTM(3, return_sequences=True)(h) | layers.GRU(2)(h) | layers.SimpleRNN(3)(h)
        layers.Conv1D(3, 2, padding='same')(h) | layers.Conv1D(2, 2, padding='causal')(h)
        layers.TimeDistributed(layers.Dense(3, 'tanh'))(h) | layers.GlobalAveragePooling1D()(h)
        layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))(h)
        layers.MultiHeadAttention(2, 2)(h, h) | layers.Attention()([h, h])
        layers.MultiHeadAttention(1, 2)(h, h, use_causal_mask=True)
    """),
    3: codes("""
        layers.Conv2D(4, 2, padding='same', activation='tanh')(h) | layers.Flatten()(h)
        layers.SeparableConv2D(2, 2, padding='same')(h) | layers.GlobalAveragePooling2D()(h)
        layers.DepthwiseConv2D(2, padding='same')(h) | layers.MaxPooling2D(2, padding='same')(h)
        layers.Conv2DTranspose(4, 2, padding='same')(h) | layers.GroupNormalization(1)(h)
    """),
}
REDUCTIONS = codes("'sum_over_batch_size' | 'sum' | 'mean_with_sample_weight'")


class Task(NamedTuple):
    """Targets of one kind: the last activation, and losses and metrics as code."""

    activation: str | None
    losses: list[str]
    metrics: list[str]


TASKS = {
    "numbers": Task(
        None,
        codes("""
            'mse' | 'mae' | losses.mean_squared_error | row_squares | squares | 'huber'
            losses.MeanSquaredError({r}) | losses.Huber(0.5, {r}) | losses.LogCosh({r})
            losses.CosineSimilarity({r}) | losses.MeanAbsoluteError({r})
        """),
        codes("'mae' | metrics.RootMeanSquaredError() | closeness"),
    ),
    "classes": Task(
        "softmax",
        codes("""
            losses.SparseCategoricalCrossentropy({r}) | 'sparse_categorical_crossentropy'
            losses.SparseCategoricalCrossentropy(ignore_class=0, {r})
            losses.SparseCategoricalCrossentropy(ignore_class=-1, {r})
        """),
        codes("'accuracy' | 'acc' | metrics.SparseCategoricalAccuracy()"),
    ),
    "one-hot": Task(
        None,
        codes("""
            losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, {r})
            losses.CategoricalFocalCrossentropy(from_logits=True, {r}) | losses.CategoricalHinge({r})
        """),
        codes("'accuracy' | metrics.TopKCategoricalAccuracy(2) | metrics.CategoricalAccuracy()"),
    ),
    "binary": Task(
        "sigmoid",
        codes("""
            'binary_crossentropy' | losses.BinaryCrossentropy(label_smoothing=0.2, {r})
            losses.BinaryFocalCrossentropy(apply_class_balancing=True, {r})
        """),
        codes("'accuracy' | metrics.AUC(num_thresholds=20) | metrics.Precision()"),
    ),
}
OPTIMIZERS = {
    **{name: optimizer for name, optimizer in every_optimizer.KERAS.items() if name != "Multi"},
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.3),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.05, weight_decay=0.05),
}
for name, since in every_optimizer.SINCE.items():
    if since > every_optimizer.VERSION:
        OPTIMIZERS.pop(name, None)
CALLBACKS = codes("""
    keras.callbacks.TerminateOnNaN() | keras.callbacks.CSVLogger('/dev/null')
    keras.callbacks.EarlyStopping('loss', min_delta=1e9, restore_best_weights=True)
""")


class Head(NamedTuple):
    """An output of a model, with its loss and its metrics."""

    task: str
    loss: str
    metrics: list[str]
    weighted_metrics: list[str]


class Script(NamedTuple):
    """What was drawn: each part is code, or a number."""

    inputs: str
    heads: list[Head]
    batch_size: int
    rows: int
    layers: list[list[str]] = ()  # of each layer its choice for each rank of its input
    adds: str = ""
    wrapper: str = ""
    optimizer: str = "SGD"
    options: dict[str, Any] = {}  # noqa: RUF012
    callbacks: list[str] = ()
    epochs: int = 1
    fits: int = 1
    feed: str = "arrays"
    is_weighted: bool = False
    is_validated: bool = False

    @property
    def update_rows(self) -> int:
        return self.batch_size * self.options["gradient_accumulation_steps"]


@st.composite
def heads(draw, inputs):
    name = draw(st.sampled_from(list(TASKS)))
    task = TASKS[name]
    loss = draw(st.sampled_from(task.losses))
    loss = loss.replace("{r}", f"reduction={draw(st.sampled_from(REDUCTIONS))}")
    if loss == "squares" and inputs.startswith("masked"):  # a mask is of tokens
        loss = "row_squares"
    metrics = st.sampled_from(task.metrics)
    weighted = st.just([]) if loss == "squares" else st.lists(metrics, max_size=1)
    return Head(name, loss, draw(st.lists(metrics, unique=True, max_size=2)), draw(weighted))


@st.composite
def scripts(draw):
    def chance(percent):
        return draw(st.integers(1, 100)) > 100 - percent

    inputs = draw(st.sampled_from(INPUTS))
    batch = draw(st.integers(1, 7))
    accumulation = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 3 * batch * accumulation + 1))
    a_layer = st.tuples(*[st.sampled_from(OF_ANY_RANK + known * 2) for known in LAYERS.values()])
    drawn = draw(st.lists(heads(inputs), min_size=1, max_size=2))
    choices = ["", "", "Wrapped", "Penalised"]
    if len(drawn) == 1 and drawn[0].task == "numbers":
        choices += ["OwnMean", "OwnSum"]
    wrapper = draw(st.sampled_from(choices))
    has_own_loss = wrapper not in ("", "Wrapped")
    adds = "" if has_own_loss else draw(st.sampled_from([""] * 6 + ["mean", "sum", "rows"]))
    if has_own_loss:
        drawn = [head._replace(metrics=[], weighted_metrics=[]) for head in drawn]
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    options = {
        "gradient_accumulation_steps": accumulation,
        "jit_compile": chance(12),
        "steps_per_execution": draw(st.integers(1, 3)),
    }
    if "clip" not in optimizer and OPTIMIZERS[optimizer]().global_clipnorm is None and chance(15):
        options["clip_norm"] = draw(st.sampled_from([0.1, 0.5, 5.0]))
    if len(drawn) == 2 and chance(50):
        options["loss_weights"] = [0.3, 2.0]
    drawn_layers = draw(st.lists(a_layer, max_size=3))
    if adds == "sum" or wrapper == "OwnSum":
        options["own_loss_reduction"] = "sum"
        # A penalty of activities is a mean, and the option is for sums alone.
        drawn_layers = [c for c in drawn_layers if "ctivity" not in "".join(c)]
    feed = draw(st.sampled_from(["arrays", "dataset", "generator"]))
    has_whole_updates = math.ceil(rows / batch) % accumulation == 0
    epochs = draw(st.integers(1, 3))
    if feed == "generator" and not has_whole_updates:  # it goes on from epoch to epoch
        epochs = 1
    is_weighted = not wrapper.startswith("Own") and chance(40)
    callbacks = draw(st.lists(st.sampled_from(CALLBACKS), unique=True, max_size=2))
    return Script(
        inputs, drawn, batch, rows, drawn_layers, adds, wrapper, optimizer, options, callbacks,
        epochs, draw(st.integers(1, 2)), feed, is_weighted, chance(20),
    )  # fmt: skip


# How a script is built and run.


class Built(NamedTuple):
    model: Any
    optimizer: Any
    x: Any
    y: Any
    sample_weight: Any
    compiled: dict[str, Any]


def evaluate(code, **names):
    return eval(code, {**globals(), "losses": keras.losses, "metrics": keras.metrics, **names})


def build_input(script, rng):
    """Returns an input, its data and what the next layer takes."""
    if script.inputs.endswith("ids"):
        data = rng.integers(1, 7, size=(script.rows, 4)).astype("int32")
        tensor = keras.Input((4,), dtype="int32")
        h = layers.Embedding(7, 4, mask_zero=script.inputs == "masked ids")(tensor)
    else:
        shape = SHAPES[script.inputs]
        data = rng.normal(size=(script.rows, *shape)).astype("float32")
        h = tensor = keras.Input(shape)
        if script.inputs == "masked tokens":
            h = layers.Masking()(tensor)
    if script.inputs.startswith("masked"):
        lengths = rng.integers(1, 5, size=script.rows)
        lengths[:: script.update_rows] = 4
        data[np.arange(4) >= lengths[:, None]] = 0
    return tensor, data, h


def build_targets(script, head, shape, rng):
    size = shape[-1]
    if head.task in ("classes", "one-hot"):
        labels = rng.integers(0, size, size=shape[:-1]).astype("int32")
        ignored = re.search(r"ignore_class=(-?\d)", head.loss)
        if ignored:
            labels[rng.random(labels.shape) < 0.3] = int(ignored.group(1))
        labels[:: script.update_rows] = 2  # counts in each update: Keras trains by an empty one
        return np.eye(size, dtype="float32")[labels] if head.task == "one-hot" else labels
    if head.task == "numbers":
        return rng.normal(size=shape).astype("float32")
    return rng.integers(0, 2, size=shape).astype("float32")


def of_outputs(values):
    return values[0] if len(values) == 1 else values


def build(script: Script) -> Built:
    """Makes model and data, always with the same weights and numbers."""
    rng = np.random.default_rng(0)
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    tensor, x, h = build_input(script, rng)
    for of_ranks in script.layers:
        code = of_ranks[len(h.shape) - 2]
        h = evaluate(code.replace("{w}", str(h.shape[-1])), h=h)
    if script.adds:
        h = AddsLoss(script.adds)(h)
    outputs = []
    for name, head in zip("pq", script.heads, strict=False):
        units = 3 if head.task in ("classes", "one-hot") else 2
        outputs.append(layers.Dense(units, TASKS[head.task].activation, name=name)(h))
    model = keras.Model(tensor, of_outputs(outputs))
    if script.wrapper:
        model = evaluate(script.wrapper)(model)
    model(x[:2])
    targets = []
    weights = []
    for head, output in zip(script.heads, outputs, strict=True):
        shape = (script.rows, *output.shape[1:])
        targets.append(build_targets(script, head, shape, rng))
        of_losses = shape if head.loss == "squares" else shape[:-1]
        of_head = rng.choice([0.0, 0.5, 1.0, 3.0], size=of_losses).astype("float32")
        of_head[:: script.update_rows] = 1
        weights.append(of_head)
    compiled = {}
    if not script.wrapper.startswith("Own"):
        compiled["loss"] = of_outputs([evaluate(head.loss) for head in script.heads])
    for name in ("metrics", "weighted_metrics"):
        of_heads = [[evaluate(code) for code in getattr(head, name)] for head in script.heads]
        if any(of_heads):
            compiled[name] = of_outputs(of_heads)
    sample_weight = of_outputs(weights) if script.is_weighted else None
    optimizer = OPTIMIZERS[script.optimizer]()
    return Built(model, optimizer, x, of_outputs(targets), sample_weight, compiled)


class Trained(NamedTuple):
    start: list[np.ndarray]
    weights: list[np.ndarray]
    logs: dict[str, list[float]]


def fit_data(script: Script, built: Built, batch_size: int) -> dict[str, Any]:
    """Returns the data of `fit` in the form that the script says."""
    x, y, weights = built.x, built.y, built.sample_weight
    if script.feed == "arrays":
        data = {"x": x, "y": y, "sample_weight": weights}
        return {**data, "batch_size": batch_size, "shuffle": False}
    parts = tuple(tuple(p) if isinstance(p, list) else p for p in (x, y, weights) if p is not None)
    dataset = tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)
    if script.feed == "dataset":
        return {"x": dataset}
    data = {"x": itertools.chain(*[list(dataset)] * script.epochs)}
    if script.epochs > 1:
        data["steps_per_epoch"] = math.ceil(script.rows / script.update_rows)
    return data


def fit_and_evaluate(script, trainer, built, batch_size, rows_of_evaluation) -> Trained:
    start = built.model.get_weights()
    data = {"x": built.x, "y": built.y, "sample_weight": built.sample_weight}
    options = {"epochs": script.epochs, "verbose": 0}
    if script.is_validated:
        options["validation_data"] = tuple(part for part in data.values() if part is not None)
        options["validation_batch_size"] = rows_of_evaluation
    logs = {}
    for fit in range(script.fits):
        callbacks = [evaluate(code) for code in script.callbacks]
        data_of_fit = fit_data(script, built, batch_size)
        history = trainer.fit(**data_of_fit, **options, callbacks=callbacks).history
        logs |= {f"fit {fit} {name}": values for name, values in history.items()}
    weights = built.model.get_weights()
    data["batch_size"] = rows_of_evaluation
    evaluated = trainer.evaluate(**data, verbose=0, return_dict=True)
    logs |= {f"evaluate {name}": value for name, value in evaluated.items()}
    return Trained(start, weights, logs)


def train(script: Script) -> Trained:
    """Runs the script with `fa.Trainer`."""
    built = build(script)
    trainer = fa.Trainer(built.model, built.optimizer, **script.options, **built.compiled)
    return fit_and_evaluate(script, trainer, built, script.batch_size, script.batch_size)


def train_by_keras(script: Script, disturb: int = 0) -> Trained:
    """Runs the script with Keras's eager `fit` on the full batch of each update.

    Args:
        disturb: a seed for a disturbance of the weights as large as rounding, or 0.
    """
    built = build(script)
    model = built.model
    optimizer = built.optimizer
    if disturb:
        rng = np.random.default_rng(disturb)
        disturbed = []
        for weight in model.get_weights():
            relative, absolute = rng.normal(size=(2, *weight.shape))
            disturbed.append(weight * (1 + 2e-7 * relative) + 1e-8 * absolute)
        model.set_weights(disturbed)
    optimizer.global_clipnorm = script.options.get("clip_norm", optimizer.global_clipnorm)
    apply = optimizer.apply

    def apply_dense(grads, trainable_variables=None):
        """Sums a table's gradient by id."""
        dense = [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
        return apply(dense, trainable_variables)

    optimizer.apply = apply_dense
    model.compile(
        optimizer,
        **built.compiled,
        loss_weights=script.options.get("loss_weights"),
        run_eagerly=True,
    )
    # A generator's end would begin one more step of Keras's.
    full_batches = script._replace(feed="arrays")
    return fit_and_evaluate(full_batches, model, built, script.update_rows, script.rows)


# What must agree.


def check(script: Script, trained: Trained) -> None:
    """Raises AssertionError where `Trainer` came to something else than Keras."""
    expected = train_by_keras(script)
    # A subclass does not name its outputs: Keras calls their losses and metrics by other names.
    if not (script.wrapper and len(script.heads) == 2):
        missing = set(expected.logs) - set(trained.logs)
        assert not missing, f"{missing} are missing"
    if differences(trained, expected):  # does the training magnify rounding?
        disturbed = [train_by_keras(script, disturb=seed) for seed in (1, 2)]
        problems = differences(trained, expected, disturbed)
        assert not problems, "; ".join(problems)


def differences(trained, expected, disturbed=()):
    """Lists what differs by more than rounding, or than 30 times what it does when disturbed."""

    def differ(value, wanted, tolerance, spread):
        if np.array_equal(value, wanted, equal_nan=True):
            return False
        spread = max([np.abs(other - wanted).max(initial=0) for other in spread], default=0)
        return not np.abs(value - wanted).max(initial=0) <= tolerance + 30 * spread

    problems = []
    for i, wanted in enumerate(expected.weights):
        moved = np.abs(wanted - expected.start[i]).max(initial=0)
        tolerance = 2e-4 * moved + 1e-6 * np.abs(wanted).max(initial=0)
        if differ(trained.weights[i], wanted, tolerance, [d.weights[i] for d in disturbed]):
            problems.append(f"weight {i} is {trained.weights[i]}, not {wanted}")
    for name in set(expected.logs) & set(trained.logs):
        wanted = np.asarray(expected.logs[name])
        tolerance = 2e-3 * np.abs(wanted).max() + 2e-5
        if differ(trained.logs[name], wanted, tolerance, [d.logs[name] for d in disturbed]):
            problems.append(f"{name} is {trained.logs[name]}, not {wanted}")
    return problems


# Not shrunk: each attempt trains twice, for minutes in all.
@settings(fuzz(20), phases=[Phase.generate])
@given(script=scripts())
def test_a_training_script(script):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        note(repr(script))
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
    head = Head("numbers", "'mse'", ["closeness"], [])
    script = Script("rows", [head], 3, 4, options={"gradient_accumulation_steps": 2})
    right = train(script)
    check(script, right)
    built = build(script)
    weights = 2 * np.float32([1 / 3, 1 / 3, 1 / 3, 1])
    built.model.compile(built.optimizer, "mse", run_eagerly=True)
    built.model.train_on_batch(built.x, built.y, sample_weight=weights / weights.mean())
    with pytest.raises(AssertionError, match="weight 0 is"):
        check(script, right._replace(weights=built.model.get_weights()))
    for name in ("fit 0 loss", "fit 0 closeness", "evaluate loss"):
        with pytest.raises(AssertionError, match=f"{name} is"):
            check(script, right._replace(logs={**right.logs, name: [9.0]}))
    with pytest.raises(AssertionError, match="are missing"):
        check(script, right._replace(logs={}))
