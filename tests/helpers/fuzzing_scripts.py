"""Whole training scripts, drawn at random: a model, its losses, data, optimizer and options, each
as Python's source.

`draw` makes one; `ours` and `by_keras` run it, the latter on the full batch of each update;
`compare` finds what differs.
"""

import itertools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from random_calls import Call

import fastaccum as fa

layers, losses, metrics, optimizers, ops = (
    keras.layers,
    keras.losses,
    keras.metrics,
    keras.optimizers,
    keras.ops,
)
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))


# What a script may use beside Keras.


def floats(*shape, seed=0, low=None, high=None):
    """Normal numbers; even ones between two bounds."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=shape) if low is None else rng.uniform(low, high, size=shape)
    return drawn.astype("float32")


def whole(*shape, seed=0, low=0, high=3):
    """Whole numbers from `low` to below `high`."""
    return np.random.default_rng(seed).integers(low, high, size=shape).astype("int32")


def weights_of(*shape, seed=0):
    """Sample weights, zeros among them."""
    rng = np.random.default_rng(seed)
    return rng.choice([0.0, 0.5, 1.0, 3.0], size=shape, p=[0.25, 0.25, 0.25, 0.25]).astype(
        "float32"
    )


def padded(array, seed=0, value=0):
    """The sequences cut off at random lengths, of 1 at least, and filled up with `value`."""
    lengths = np.random.default_rng(seed).integers(1, array.shape[1] + 1, size=len(array))
    kept = np.arange(array.shape[1]) < lengths[:, None]
    return np.where(kept.reshape(kept.shape + (1,) * (array.ndim - 2)), array, value).astype(
        array.dtype
    )


def one_hot(labels, classes):
    """One-hot vectors of labels."""
    return np.eye(classes, dtype="float32")[labels]


def some_replaced(labels, by, seed=0):
    """The labels, a third of them replaced."""
    return np.where(np.random.default_rng(seed).random(labels.shape) < 0.3, by, labels).astype(
        labels.dtype
    )


def squares(y_true, y_pred):
    """One loss for each element."""
    return tf.square(y_true - y_pred)


def row_squares(y_true, y_pred):
    """One loss for each row or token."""
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def row_total(y_true, y_pred):
    """One loss for each row, whatever axes it has."""
    difference = tf.abs(y_true - y_pred) ** 1.5
    return tf.reduce_sum(tf.reshape(difference, [tf.shape(difference)[0], -1]), axis=1)


def quantile(q):
    """A loss with a constant of its own."""

    def pinball(y_true, y_pred):
        e = y_true - y_pred
        return ops.mean(ops.maximum(q * e, (q - 1) * e), axis=-1)

    return pinball


class OwnLoss(keras.losses.Loss):
    """A loss class of a user's own."""

    def __init__(self, power=2.0, **options):
        super().__init__(**options)
        self.power = power

    def call(self, y_true, y_pred):
        return ops.mean(ops.power(ops.abs(y_true - y_pred) + 0.1, self.power), axis=-1)


class Scale(layers.Layer):
    """A custom layer with a weight that is regularised."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", regularizer="l2")
        self.shift = self.add_weight(
            shape=(shape[-1],), initializer="zeros", constraint="non_neg", name="shift"
        )

    def call(self, x):
        return x * self.scale + self.shift


class AddsMean(layers.Layer):
    """Adds a loss that is a mean over rows."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class AddsSum(layers.Layer):
    """Adds a loss that is a sum over rows."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class AddsRows(layers.Layer):
    """Adds a loss for each row."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x), axis=tuple(range(1, len(x.shape)))))
        return x


class Wrapped(keras.Model):
    """A subclass around layers."""

    def __init__(self, core):
        super().__init__()
        self.core = core

    def call(self, x, training=False):
        return self.core(x, training=training)


class Penalised(Wrapped):
    """Adds to the compiled loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(tf.nest.flatten(y_pred)[0]))


class OwnMean(Wrapped):
    """Computes its loss by itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + sum(self.losses)


class OwnSum(Wrapped):
    """Computes a loss that is a sum over rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.1 * ops.sum(ops.square(y - y_pred))


class OwnMetric(keras.metrics.Metric):
    """A metric class of a user's own."""

    def __init__(self, name="own", **options):
        super().__init__(name=name, **options)
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_pred)))

    def result(self):
        return self.total * 1.0  # Keras logs a variable as it is after the validation


def closeness(y_true, y_pred):
    """A metric function of each row or token."""
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


class Batches(keras.utils.PyDataset):
    """A list of batches."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


NAMES: dict[str, Any] = {name: value for name, value in vars().items() if not name.startswith("_")}


# How a script is drawn.


class _Pen:
    """Writes a model, line by line."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.lines, self.count = rng, list[str](), 0
        self.masked = False
        # layers that treat a batch as a whole: one micro-batch an update, none short
        self.by_batch = self.chance(0.1)
        self.adds = self.of("AddsMean", "AddsSum", "AddsRows") if self.chance(0.12) else ""
        # `own_loss_reduction="sum"` is for sums alone, and an activity regulariser is a mean.
        self.penalised = 0.0 if self.adds == "AddsSum" else 0.12

    def of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    @property
    def code(self) -> str:
        return "\n".join(self.lines)

    def seed(self) -> int:
        return int(self.rng.integers(1000))

    def line(self, code: str, name: str = "") -> str:
        self.count += 1
        name = name or f"h{self.count}"
        self.lines.append(f"{name} = {code}")
        return name

    def dense_options(self) -> str:
        found = [
            *(["kernel_regularizer='l2'"] if self.chance(0.15) else []),
            *(["bias_regularizer=keras.regularizers.L1(0.01)"] if self.chance(0.1) else []),
            *(
                ["activity_regularizer=keras.regularizers.L2(0.01)"]
                if self.chance(self.penalised)
                else []
            ),
            *(["kernel_constraint=keras.constraints.MaxNorm(0.8)"] if self.chance(0.12) else []),
            *(["use_bias=False"] if self.chance(0.1) else []),
        ]
        return "".join(f", {each}" for each in found)


def _layer(pen: _Pen, h: str, shape: tuple, first: bool = False) -> tuple[str, tuple]:
    """One more layer upon `h`, whose rows are of this shape; its name and its rows' shape."""
    of, units = pen.of, int(pen.rng.integers(2, 5))
    activation = of("'tanh'", "'gelu'", "'sigmoid'", "'swish'", "'softplus'", "'elu'", "None")
    dense = f"layers.Dense({units}, {activation}{pen.dense_options()})"
    any_rank = [
        ("dense", dense, (*shape[:-1], units)),
        ("dense", dense, (*shape[:-1], units)),
        ("norm", "layers.LayerNormalization(epsilon=0.1)", shape),
        ("scale", "Scale()", shape),
        *([("activity", "layers.ActivityRegularization(l2=0.01)", shape)] if pen.penalised else []),
        ("dropout", "layers.Dropout(0.0)", shape),
        ("noise", "layers.GaussianNoise(0.0)", shape),
        ("unit", "layers.Activation('tanh')", shape),
        ("rms", "layers.RMSNormalization(epsilon=0.1)", shape),
    ]
    residual = [("residual", f"layers.Add()([{h}, layers.Dense({shape[-1]}, 'tanh')({h})])", shape)]
    residual += [
        ("gate", f"layers.Multiply()([{h}, layers.Dense({shape[-1]}, 'sigmoid')({h})])", shape)
    ]
    twice = (
        f"(lambda shared: shared(shared({h})))(layers.Dense({shape[-1]}, "
        f"'tanh'{pen.dense_options()}))"
    )
    residual += [("shared", twice, shape)]
    if len(shape) == 1:
        more = [
            ("prelu", "layers.PReLU()", shape),
            ("unitnorm", "layers.UnitNormalization()", shape),
        ]
    elif len(shape) == 2:
        recurrent = of("LSTM", "GRU", "SimpleRNN", "SimpleRNN")
        heads, sequences = int(pen.rng.integers(1, 3)), pen.chance(0.6)
        out = (shape[0], units) if sequences else (units,)
        two_ways = f"layers.Bidirectional(layers.SimpleRNN({units}, return_sequences=True))"
        causal = ", use_causal_mask=True" if pen.chance(0.4) else ""
        more = [
            ("rnn", f"layers.{recurrent}({units}, return_sequences={sequences})", out),
            (
                "conv",
                f"layers.Conv1D({units}, 2, padding={of('same', 'causal')!r})",
                (shape[0], units),
            ),
            ("time", f"layers.TimeDistributed(layers.Dense({units}, 'tanh'))", (shape[0], units)),
            ("pool", "layers.GlobalAveragePooling1D()", (shape[1],)),
            ("flat", "layers.Flatten()", (shape[0] * shape[1],)),
            *([("bi", two_ways, (shape[0], 2 * units))] if pen.chance(0.4) else []),
        ]
        residual += [("mha", f"layers.MultiHeadAttention({heads}, 2)({h}, {h}{causal})", shape)] * 2
        residual += [("attention", f"layers.Attention()([{h}, {h}])", shape)]
        if shape[1] % 2 == 0:
            more.append(("group", "layers.GroupNormalization(2, epsilon=0.1)", shape))
    else:
        height, width, channels = shape
        more = [
            (
                "conv",
                f"layers.Conv2D({units}, 2, padding='same', activation='tanh')",
                (height, width, units),
            ),
            (
                "separable",
                f"layers.SeparableConv2D({units}, 2, padding='same')",
                (height, width, units),
            ),
            ("depth", "layers.DepthwiseConv2D(2, padding='same')", shape),
            ("pool", "layers.GlobalAveragePooling2D()", (channels,)),
            ("flat", "layers.Flatten()", (height * width * channels,)),
            (
                "max",
                "layers.MaxPooling2D(2, padding='same')",
                (math.ceil(height / 2), math.ceil(width / 2), channels),
            ),
            ("up", f"layers.Conv2DTranspose({units}, 2, padding='same')", (height, width, units)),
        ]
        if channels % 2 == 0:
            more.append(("group", "layers.GroupNormalization(2, epsilon=0.1)", shape))
    if not first:
        more += residual
    if pen.by_batch:
        more += [("batchnorm", "layers.BatchNormalization()", shape)] * 3
        more += [("dropped", f"layers.Dropout(0.4, seed={pen.seed()})", shape)] * 3
    kind, code, shape_of = of(*any_rank, *more, *more)
    if kind == "flat" and pen.masked:  # Keras warns that it drops the mask
        return h, shape
    called = code if f"({h}" in code or f"[{h}" in code else f"{code}({h})"
    return pen.line(called), shape_of


def _pooled(pen: _Pen, h: str, shape: tuple) -> tuple[str, tuple]:
    """Pools `h`, whose rows are of this shape, to one vector a row."""
    return (
        (h, shape)
        if len(shape) == 1
        else (pen.line(f"layers.GlobalAveragePooling{len(shape) - 1}D()({h})"), shape[-1:])
    )


def _input(pen: _Pen, rows: int, name: str) -> tuple[str, str, tuple]:
    """An input of the model: a line of data, the name of what the next layer takes, and its rows'
    shape.
    """
    kind = pen.of("rows", "rows", "tokens", "tokens", "ids", "ids", "images")
    t, seed = int(pen.rng.integers(2, 6)), pen.seed()
    if kind == "rows":
        width = int(pen.rng.integers(1, 5))
        pen.line(f"keras.Input(({width},), name={name!r})", name)
        return f"floats({rows}, {width}, seed={seed})", name, (width,)
    if kind == "images":
        size = int(pen.rng.integers(2, 5))
        pen.line(f"keras.Input(({size}, {size}, 2), name={name!r})", name)
        return f"floats({rows}, {size}, {size}, 2, seed={seed})", name, (size, size, 2)
    if kind == "tokens":
        width = int(pen.rng.integers(1, 4))
        pen.line(f"keras.Input(({t}, {width}), name={name!r})", name)
        data, h = f"floats({rows}, {t}, {width}, seed={seed})", name
        if pen.chance(0.4):
            pen.masked = True
            data, h = f"padded({data}, seed={seed})", pen.line(f"layers.Masking()({name})")
        return data, h, (t, width)
    masks, units = pen.chance(0.5), int(pen.rng.integers(2, 5))
    pen.masked |= masks
    pen.line(f"keras.Input(({t},), dtype='int32', name={name!r})", name)
    data = f"whole({rows}, {t}, seed={seed}, low=1, high=7)"
    data = f"padded({data}, seed={seed})" if masks else data
    options = ", mask_zero=True" if masks else ""
    options += ", embeddings_regularizer='l2'" if pen.chance(0.15) else ""
    return data, pen.line(f"layers.Embedding(7, {units}{options})({name})"), (t, units)


REDUCTIONS = "'sum_over_batch_size'", "'sum_over_batch_size'", "'sum'", "'mean_with_sample_weight'"
OF_NUMBERS = (
    *(
        "'mse'",
        "'mae'",
        "'huber'",
        "'log_cosh'",
        "row_squares",
        "squares",
        "row_total",
        "quantile(0.3)",
    ),
    *(
        "losses.MeanSquaredError({r})",
        "losses.MeanAbsoluteError({r})",
        "losses.Huber(0.5, {r})",
        "losses.LogCosh({r})",
    ),
    *("losses.CosineSimilarity({r})", "OwnLoss(1.5, {r})", "keras.losses.mean_squared_error"),
)
OF_POSITIVE = (
    *("'poisson'", "losses.Poisson({r})", "losses.MeanSquaredLogarithmicError({r})", "'msle'"),
    *("losses.MeanAbsolutePercentageError({r})", "losses.MeanSquaredError({r})"),
)
METRICS_OF = {
    "numbers": (
        *(
            "'mae'",
            "metrics.RootMeanSquaredError()",
            "closeness",
            "metrics.MeanSquaredError()",
            "OwnMetric()",
        ),
        "metrics.CosineSimilarity()",
    ),
    "positive": (
        "'mape'",
        "metrics.Poisson()",
        "metrics.MeanAbsoluteError()",
        "metrics.LogCoshError()",
    ),
    "classes": (
        *(
            "'accuracy'",
            "metrics.SparseTopKCategoricalAccuracy(2)",
            "metrics.SparseCategoricalAccuracy()",
            "'acc'",
        ),
    ),
    "one_hot": (
        *("'accuracy'", "metrics.TopKCategoricalAccuracy(2)", "metrics.CategoricalAccuracy()"),
        "metrics.KLDivergence()",
    ),
    "binary": (
        *(
            "'accuracy'",
            "metrics.AUC(num_thresholds=20)",
            "metrics.Precision()",
            "metrics.Recall()",
        ),
        *("metrics.BinaryAccuracy()", "metrics.TruePositives()", "metrics.F1Score(threshold=0.5)"),
    ),
    "hinge": ("metrics.Hinge()", "metrics.SquaredHinge()", "'mae'"),
}


class _Head(NamedTuple):
    """An output: what it is called, its targets, loss and metrics as code, and the shape of a row's
    losses.
    """

    name: str
    target: str
    kind: str
    loss: str
    weights: str
    metrics: list[str]
    weighted: list[str]
    reduction: str


def _head(pen: _Pen, h: str, shape: tuple, rows: int, name: str) -> _Head:
    of, seed = pen.of, pen.seed()
    kind, size = (
        of("numbers", "numbers", "positive", "classes", "classes", "one_hot", "binary", "hinge"),
        of(1, 2, 3),
    )
    reduction = of(*REDUCTIONS)
    r, per = f"reduction={reduction}", (rows, *shape[:-1])
    dims = ", ".join(map(str, per))
    activation, options = "None", pen.dense_options().replace(", use_bias=False", "")
    if kind == "numbers":
        target, loss = f"floats({dims}, {size}, seed={seed})", of(*OF_NUMBERS)
        if pen.masked and loss == "row_total":  # a mask is of tokens
            loss = "row_squares"
    elif kind == "positive":
        target, loss = f"floats({dims}, {size}, seed={seed}, low=0.5, high=2)", of(*OF_POSITIVE)
        activation = "'softplus'"
    elif kind == "classes":
        size, logits = of(3, 4), pen.chance(0.6)
        activation = "None" if logits else "'softmax'"
        target = f"whole({dims}, seed={seed}, high={size})"
        ignored = of(None, None, -1, 0)
        ignore = "" if ignored is None else f"ignore_class={ignored}, "
        if ignored is not None:
            target = f"some_replaced({target}, {ignored}, seed={seed})"
        if pen.chance(0.3):
            target = f"({target})[..., None]"
        loss = f"losses.SparseCategoricalCrossentropy(from_logits={logits}, {ignore}{{r}})"
        if not logits and ignored is None:
            loss = of(
                loss,
                "'sparse_categorical_crossentropy'",
                "keras.losses.sparse_categorical_crossentropy",
            )
    elif kind == "one_hot":
        size, logits = of(3, 4), pen.chance(0.5)
        activation = "None" if logits else "'softmax'"
        target = f"one_hot(whole({dims}, seed={seed}, high={size}), {size})"
        loss = of(
            f"losses.CategoricalCrossentropy(from_logits={logits}, {{r}})",
            f"losses.CategoricalCrossentropy(from_logits={logits}, label_smoothing=0.1, {{r}})",
            f"losses.CategoricalFocalCrossentropy(from_logits={logits}, {{r}})",
            "losses.CategoricalHinge({r})",
            *(
                []
                if logits
                else ["'categorical_crossentropy'", "losses.KLDivergence({r})", "'kl_divergence'"]
            ),
        )
    elif kind == "binary":
        logits = pen.chance(0.4)
        activation = "None" if logits else "'sigmoid'"
        target = f"whole({dims}, {size}, seed={seed}, high=2).astype('float32')"
        loss = of(
            f"losses.BinaryCrossentropy(from_logits={logits}, {{r}})",
            f"losses.BinaryCrossentropy(from_logits={logits}, label_smoothing=0.2, {{r}})",
            f"losses.BinaryFocalCrossentropy(from_logits={logits}, apply_class_balancing=True, "
            "{r})",
            *([] if logits else ["'binary_crossentropy'"]),
        )
    else:
        target = f"(2.0 * whole({dims}, {size}, seed={seed}, high=2) - 1).astype('float32')"
        loss, activation = (
            of("losses.Hinge({r})", "losses.SquaredHinge({r})", "'hinge'", "'squared_hinge'"),
            "'tanh'",
        )
    drawn = "{r}" in loss
    pen.line(f"layers.Dense({size}, {activation}{options}, name={name!r})({h})", name)
    of_elements = (*per, size) if loss == "squares" else (per[0],) if loss == "row_total" else per
    weight_shape = (
        of_elements
        if len(of_elements) == 1 or pen.chance(0.8)
        else (rows, *[1] * (len(of_elements) - 1))
    )
    weights = f"weights_of({', '.join(map(str, weight_shape))}, seed={seed})"
    known = [each for each in METRICS_OF[kind] if len(shape) == 1 or "F1" not in each]
    plain = [of(*known) for _ in range(of(0, 1, 1, 2))]
    weighted = [of(*known) for _ in range(of(0, 0, 1))]
    weighted = [] if loss in ("squares", "row_total") else weighted
    return _Head(
        name,
        target,
        kind,
        loss.replace("{r}", r),
        weights,
        list(dict.fromkeys(plain)),
        weighted,
        reduction.strip("'") if drawn else "sum_over_batch_size",
    )


def _optimizer(pen: _Pen) -> str:
    of = pen.of
    schedules = "optimizers.schedules."
    rate = lambda value: of(  # noqa: E731
        *[repr(value)] * 3,
        f"{schedules}ExponentialDecay({value}, 2, 0.7)",
        f"{schedules}PiecewiseConstantDecay([1, 3], [{value}, {value / 2}, {value / 4}])",
        f"{schedules}CosineDecay({value}, 6, warmup_target={2 * value}, warmup_steps=2)",
        f"{schedules}PolynomialDecay({value}, 5)",
        f"{schedules}InverseTimeDecay({value}, 2, 0.5)",
        f"{schedules}CosineDecayRestarts({value}, 2)",
    )
    kinds = {
        "SGD": (0.1, of("", "", "momentum=0.9", "momentum=0.9, nesterov=True")),
        "Adam": (0.01, of("", "amsgrad=True", "epsilon=1e-3")),
        "AdamW": (0.01, of("", "weight_decay=0.1")),
        "Adamax": (0.01, ""),
        "Nadam": (0.01, ""),
        "Adagrad": (0.05, ""),
        "Adadelta": (1.0, ""),
        "RMSprop": (0.01, of("", "momentum=0.5", "centered=True")),
        "Ftrl": (
            0.05,
            of("", "l1_regularization_strength=0.01, l2_regularization_strength=0.01", "beta=0.1"),
        ),
        "Lion": (0.005, ""),
        "Lamb": (0.01, ""),
        "Adafactor": (0.02, of("", "relative_step=False")),
        **({"Muon": (0.01, "")} if KERAS >= (3, 13) else {}),
        **({"ScheduleFreeAdamW": (0.01, of("", "warmup_steps=3"))} if KERAS >= (3, 14) else {}),
    }
    name = of("SGD", "SGD", "SGD", "Adam", "Adam", *kinds)
    value, own = kinds[name]
    parts = [rate(value) if name != "ScheduleFreeAdamW" else repr(value)]
    parts += [own] if own else []
    parts += (
        [of("clipnorm=0.3", "global_clipnorm=0.5", "clipvalue=0.05")] if pen.chance(0.2) else []
    )
    if "weight_decay" not in own and pen.chance(0.15):
        parts.append("weight_decay=0.05")
    if pen.chance(0.12) and name != "ScheduleFreeAdamW":
        parts.append(f"use_ema=True, ema_momentum=0.8{of('', ', ema_overwrite_frequency=2')}")
    return f"optimizers.{name}({', '.join(parts)})"


def draw(rng: np.random.Generator) -> Call:
    """A script: the lines that make `model`, `x`, `y` and `w`, and the arguments of `train`."""
    pen = _Pen(rng)
    of, chance = pen.of, pen.chance
    batch, accumulation = int(rng.integers(1, 8)), int(rng.choice([1, 2, 3, 4]))
    rows = int(rng.integers(1, 3 * batch * accumulation + 2))
    if pen.by_batch:
        accumulation, rows = 1, batch * of(1, 2, 3)
    inputs = [_input(pen, rows, name) for name in (["a", "b"] if chance(0.2) else ["a"])]
    h, shape = inputs[0][1:]
    for i in range(of(0, 1, 1, 2, 2, 3)):
        h, shape = _layer(pen, h, shape, first=i == 0 and len(inputs) == 1)
    if len(inputs) == 2:
        other, of_other = inputs[1][1:]
        (other, of_other), (h, shape) = _pooled(pen, other, of_other), _pooled(pen, h, shape)
        h, shape = pen.line(f"layers.Concatenate()([{h}, {other}])"), (shape[0] + of_other[0],)
    if adds := pen.adds:
        h = pen.line(f"{adds}()({h})")
    heads = [_head(pen, h, shape, rows, name) for name in (["p", "q"] if chance(0.25) else ["p"])]
    arguments: dict[str, str] = {}
    as_dict = len(heads) == 2 and chance(0.5)

    def by_output(values: list[str]) -> str:
        if len(heads) == 1:
            return values[0]
        if as_dict:
            return (
                "{"
                + ", ".join(
                    f"{each.name!r}: {value}" for each, value in zip(heads, values, strict=True)
                )
                + "}"
            )
        return f"[{', '.join(values)}]"

    outputs = by_output([each.name for each in heads])
    taken, given = "a", inputs[0][0]
    if len(inputs) == 2:
        both = "[{}, {}]" if chance(0.5) else "{{'a': {}, 'b': {}}}"
        taken, given = both.format("a", "b"), both.format(*(each[0] for each in inputs))
    pen.line(f"keras.Model({taken}, {outputs})", "model")
    wrapper = ""
    if chance(0.2):
        wrapper = "Wrapped"
    elif not adds and chance(0.1):
        wrapper = "Penalised"
        if (
            len(heads) == 1
            and heads[0].kind == "numbers"
            and chance(0.6)
            and "ctivity" not in pen.code
        ):
            wrapper = of("OwnMean", "OwnSum")
    if wrapper:
        pen.line(f"{wrapper}(model)", "model")
    # The loss and the options of a Trainer.
    own = wrapper in ("OwnMean", "OwnSum")
    if not own:
        arguments["loss"] = by_output([each.loss for each in heads])
    if len(heads) == 2 and chance(0.5):
        arguments["loss_weights"] = by_output(["0.3", "2.0"])
    arguments["optimizer"] = _optimizer(pen)
    for name, of_heads in (
        ("metrics", [e.metrics for e in heads]),
        ("weighted_metrics", [e.weighted for e in heads]),
    ):
        if any(of_heads) and not wrapper.startswith(("Own", "Pen")):
            arguments[name] = by_output([f"[{', '.join(each)}]" for each in of_heads])
    if adds == "AddsSum" or wrapper == "OwnSum":
        arguments["own_loss_reduction"] = "'sum'"
    if "clip" not in arguments["optimizer"] and chance(0.12):
        arguments["clip_norm"] = of("0.1", "0.5", "5.0")
    if chance(0.3):
        arguments["steps_per_execution"] = of("2", "3")
    arguments["gradient_accumulation_steps"] = str(accumulation)
    # XLA draws other numbers for Dropout
    arguments["jit_compile"] = str(chance(0.12) and not pen.by_batch)
    # The data and the arguments of fit.
    arguments["batch_size"], arguments["epochs"] = str(batch), of("1", "2", "2", "3")
    feed = arguments["feed"] = of("'arrays'", "'arrays'", "'dataset'", "'generator'", "'PyDataset'")
    setup = [f"x = {given}", f"y = {by_output([each.target for each in heads])}", "w = None"]
    if not own and chance(0.4):
        setup[-1] = f"w = {by_output([each.weights for each in heads])}"
    elif (
        (len(heads), len(shape), feed) == (1, 1, "'arrays'")
        and heads[0].kind in ("classes", "one_hot")
        and chance(0.4)
        and "-1" not in heads[0].target
    ):
        arguments["class_weight"] = of("{0: 2.0, 2: 0.5}", "{1: 0.0}", "{0: 1.0, 1: 3.0, 2: 0.25}")
    arguments["evaluate"] = str(chance(0.5))
    if chance(0.05) and not pen.by_batch and "Own" not in wrapper:
        arguments["policy"] = of("'mixed_float16'", "'mixed_bfloat16'")
    steps, whole_steps = (
        math.ceil(rows / (batch * accumulation)),
        math.ceil(rows / batch) % accumulation == 0,
    )
    if feed == "'generator'" and not whole_steps:  # goes on from epoch to epoch, amid a step
        arguments["epochs"] = "1"
    elif (
        (feed == "'arrays'" or (feed == "'dataset'" and whole_steps)) and steps > 1 and chance(0.15)
    ):
        arguments["steps_per_epoch"] = str(int(rng.integers(1, steps + 1)))
    if chance(0.2):
        arguments["fits"] = "2"
    if chance(0.2):
        arguments["validate"] = "True"
    return Call("train", arguments, setup="\n".join([*pen.lines, *setup]))


# How a script runs.

_OF_TRAINER = (
    *(
        "optimizer",
        "loss",
        "loss_weights",
        "metrics",
        "weighted_metrics",
        "gradient_accumulation_steps",
        "clip_norm",
    ),
    *("steps_per_execution", "own_loss_reduction", "jit_compile"),
)


def made(call: Call, policy: str | None = None) -> dict[str, Any]:
    """What the lines and the arguments of a script make, always with the same weights."""
    given = {name: eval(code, dict(NAMES)) for name, code in call.arguments.items()}
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy or given.get("policy", "float32"))
    space = dict(NAMES)
    try:
        exec(call.setup, space)
        space["model"](tf.nest.map_structure(lambda a: a[:2], space["x"]))
    finally:
        keras.config.set_dtype_policy("float32")
    return given | {name: space[name] for name in ("model", "x", "y", "w")}


def _fit(
    fit: Callable[..., Any], given: dict[str, Any], rows: int, **options: Any
) -> dict[str, list[float]]:
    """Calls `fit`, as often as a script says, with batches of so many rows; the logs."""
    logs: dict[str, list[float]] = {}
    if "validate" in given:
        options["validation_data"] = tuple(
            each for each in (given["x"], given["y"], given["w"]) if each is not None
        )
    for _ in range(given.get("fits", 1)):
        history = fit(**_feed(given, rows), epochs=given["epochs"], verbose=0, **options).history
        logs = {name: logs.get(name, []) + values for name, values in history.items()}
    return logs


def _feed(given: dict[str, Any], rows: int) -> dict[str, Any]:
    """What `fit` takes: the data in batches of so many rows."""
    x, y, w = given["x"], given["y"], given["w"]
    common = {name: given[name] for name in ("class_weight", "steps_per_epoch") if name in given}
    if given["feed"] == "arrays":
        return {"x": x, "y": y, "sample_weight": w, "batch_size": rows, "shuffle": False, **common}
    nest = tuple(
        tuple(each) if isinstance(each, list) else each for each in (x, y, w) if each is not None
    )
    if given["feed"] == "dataset":
        data = tf.data.Dataset.from_tensor_slices(nest).batch(rows)
        return {"x": data.repeat() if "steps_per_epoch" in given else data, **common}
    total = len(tf.nest.flatten(x)[0])
    parts = [
        tf.nest.map_structure(lambda a, i=i: a[i : i + rows], nest) for i in range(0, total, rows)
    ]
    if given["feed"] == "PyDataset":
        return {"x": Batches(parts), "shuffle": False}
    several = (
        {"steps_per_epoch": math.ceil(len(parts) / given["gradient_accumulation_steps"])}
        if given["epochs"] > 1
        else {}
    )
    return {"x": (each for _ in range(given["epochs"]) for each in parts), **several}


def _empty_updates(call: Call, given: dict[str, Any]) -> list[bool]:
    """Tells for each update of a pass if all its weight sums are 0, so that `fa.Trainer` changes
    nothing.
    """
    total, rows = (
        len(tf.nest.flatten(given["x"])[0]),
        given["batch_size"] * given["gradient_accumulation_steps"],
    )
    parts = [slice(i, i + rows) for i in range(0, total, rows)]
    if re.search("Adds|ctivity|Penalised|OwnMean|OwnSum", call.setup):  # losses of all rows
        return [False] * len(parts)
    targets, of_outputs = tf.nest.flatten(given["y"]), tf.nest.flatten(given["loss"])
    weights = [None] * len(targets) if given["w"] is None else tf.nest.flatten(given["w"])
    masks = [
        getattr(each, "_keras_mask", None) for each in tf.nest.flatten(given["model"](given["x"]))
    ]
    counted = np.zeros(total, bool)
    for y, loss, weight, mask in zip(targets, of_outputs, weights, masks, strict=True):
        if "class_weight" in given:
            labels = y.reshape(total) if y.size == total else y.argmax(-1)
            weight = np.array([given["class_weight"].get(int(label), 1.0) for label in labels])
        found = np.ones([total, 1], bool)
        if (ignored := getattr(loss, "ignore_class", None)) is not None:
            found = found & (y.reshape(total, -1) != ignored)
        if mask is not None:
            found = found & mask.numpy().reshape(total, -1)
        if weight is not None and getattr(loss, "reduction", None) == "mean_with_sample_weight":
            found = found & (weight.reshape(total, -1) != 0)
        counted |= found.any(-1)
    return [not counted[part].any() for part in parts]


class _EmptyUpdates(keras.callbacks.Callback):
    """Acts after each update that is empty: undoes it, or requires that it changed nothing."""

    def __init__(self, empty: list[bool], variables: Callable[[], list[Any]], undoes: bool):
        super().__init__()
        self.all, self.variables, self.undoes = empty, variables, undoes

    def on_train_begin(self, logs=None):
        self.empty = itertools.cycle(self.all)

    def on_train_batch_begin(self, batch, logs=None):
        self.is_empty = next(self.empty)
        self.before = [np.array(v) for v in self.variables()] if self.is_empty else []

    def on_train_batch_end(self, batch, logs=None):
        for variable, value in zip(
            self.variables() if self.is_empty else [], self.before, strict=True
        ):
            if self.undoes:
                variable.assign(value)
            elif np.array(variable).tobytes() != value.tobytes():
                raise AssertionError(f"{variable.path} moved in an update without a valid element")


def _require_still(call: Call) -> None:
    """Raises AssertionError if an empty update of `fa.Trainer` moves a weight, a slot or
    `iterations`.
    """
    given = made(call)
    options = {name: given[name] for name in _OF_TRAINER if name in given} | {
        "steps_per_execution": 1
    }
    trainer = fa.Trainer(given["model"], **options)
    variables = lambda: [*trainer.model.weights, *trainer.optimizer.variables]  # noqa: E731
    still = _EmptyUpdates(_empty_updates(call, given), variables, undoes=False)
    _fit(
        trainer.fit,
        given,
        given["batch_size"],
        callbacks=[still],
        validation_batch_size=given["batch_size"],
    )


class _ByElement(keras.losses.Loss):
    """A loss of each element, for which a mask of tokens holds for each of a token's elements."""

    def __init__(self, function):
        super().__init__(name=function.__name__)
        self.call = function

    def __call__(self, y_true, y_pred, sample_weight=None):
        mask = getattr(y_pred, "_keras_mask", None)
        if mask is not None:
            y_pred = tf.identity(y_pred)
            y_pred._keras_mask = tf.broadcast_to(mask[..., None], tf.shape(y_pred))
        return super().__call__(y_true, y_pred, sample_weight)


class Trained(NamedTuple):
    """What a training came to."""

    before: list[np.ndarray]
    after: list[np.ndarray]
    history: dict[str, list[float]]
    model: Any
    evaluated: dict[str, float]
    warned: list[str]
    steps: list[list[dict[str, float]]]  # of each epoch, each step's losses and rows


class _Steps(keras.callbacks.Callback):
    """Each step's losses, which Keras logs as means over the epoch so far."""

    def __init__(self, sizes):
        super().__init__()
        self.all_sizes, self.epochs = sizes, []

    def on_train_begin(self, logs=None):
        self.sizes = itertools.cycle(self.all_sizes)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])

    def on_train_batch_begin(self, batch, logs=None):
        for mean in self.means():
            mean.reset_state()

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[-1].append(
            {mean.name: float(mean.result()) for mean in self.means()} | {"rows": next(self.sizes)}
        )

    def means(self):
        return [self.model._loss_tracker, *getattr(self.model._compile_loss, "metrics", [])]


def ours(call: Call) -> Trained:
    """The script with `fa.Trainer`, over micro-batches."""
    given = made(call)
    model = given["model"]
    before = model.get_weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fa.Trainer(model, **{name: given[name] for name in _OF_TRAINER if name in given})
        history = _fit(
            trainer.fit, given, given["batch_size"], validation_batch_size=given["batch_size"]
        )
        data = {
            "x": given["x"],
            "y": given["y"],
            "sample_weight": given["w"],
            "batch_size": given["batch_size"],
        }
        evaluated = (
            trainer.evaluate(**data, verbose=0, return_dict=True) if given["evaluate"] else {}
        )
    said = [
        str(each.message)
        for each in caught
        if each.filename == __file__ or "Trainer" in str(each.message)
    ]
    return Trained(before, model.get_weights(), history, model, evaluated, said, [])


def by_keras(
    call: Call, result: Trained | None = None, disturb: int = 0, policy: str | None = None
) -> Trained:
    """The script by Keras's own `fit`, with all rows of an update in one batch.

    Keras differs in three things, which are made alike: an update without a valid element is
    undone; a mask of tokens holds for losses of elements, which Keras refuses; losses that layers
    add in half precision, which Keras cannot sum, are cast to float32.

    Args:
        result: of `ours`, whose weights are evaluated.
        disturb: a seed for a disturbance of the weights as large as rounding.
        policy: instead of the script's.
    """
    given = made(call, policy)
    model, optimizer = given["model"], given["optimizer"]
    before = model.get_weights()
    if disturb:
        rng = np.random.default_rng(disturb)
        model.set_weights(
            [
                w * (1 + 2e-7 * rng.normal(size=w.shape)) + 1e-8 * rng.normal(size=w.shape)
                for w in before
            ]
        )
    if "clip_norm" in given:
        optimizer.global_clipnorm = given["clip_norm"]
    apply = optimizer.apply

    def apply_dense(grads, trainable_variables):
        """With a table's gradient summed by id; and a loop's with the static shape that Muon asks
        for.
        """
        pairs = zip(grads, trainable_variables, strict=True)
        dense = [
            None if g is None else tf.ensure_shape(tf.convert_to_tensor(g), v.shape)
            for g, v in pairs
        ]
        return apply(dense, trainable_variables)

    optimizer.apply = apply_dense
    compiled = {
        name: given[name]
        for name in ("loss", "loss_weights", "metrics", "weighted_metrics")
        if name in given
    }
    if "loss" in compiled:
        compiled["loss"] = tf.nest.map_structure(
            lambda f: _ByElement(f) if f is squares else f, compiled["loss"]
        )
    model._aggregate_additional_loss = lambda loss: ops.sum(ops.cast(loss, "float32"))
    # Keras's graph takes constants for what it assigns
    eager = type(optimizer).__name__ == "ScheduleFreeAdamW"
    scales = (policy or given.get("policy")) == "mixed_float16"
    # XLA's `in_top_k` gives a label that is no class the score 0; TensorFlow's own never finds it
    # at the top.
    of_xla = given["jit_compile"] and "ignore_class=-1" in call.code and "SparseTopK" in call.code
    model.compile(
        optimizer, **compiled, run_eagerly=eager, jit_compile=of_xla, auto_scale_loss=scales
    )
    rows = given["batch_size"] * given["gradient_accumulation_steps"]
    if given["feed"] == "generator":
        # Where a generator ends, Keras's step begins once more, and does what needs no batch: it
        # counts, and decays.
        given["feed"] = "PyDataset"
    total = len(tf.nest.flatten(given["x"])[0])
    steps = _Steps([min(rows, total - i) for i in range(0, total, rows)])
    if any(empty := _empty_updates(call, given)):
        model.optimizer.build(model.trainable_variables)
        # Averages that no update has begun would else replace the weights.
        end = model.optimizer.finalize_variable_values
        model.optimizer.finalize_variable_values = lambda v: (
            end(v) if int(model.optimizer.iterations) else None
        )
    undone = _EmptyUpdates(empty, lambda: [*model.weights, *model.optimizer.variables], undoes=True)
    history = _fit(model.fit, given, rows, callbacks=[undone, steps], validation_batch_size=total)
    after, evaluated = model.get_weights(), {}
    if result is not None and given["evaluate"]:
        model.set_weights(result.after)
        data = {"x": given["x"], "y": given["y"], "sample_weight": given["w"], "batch_size": total}
        evaluated = model.evaluate(**data, verbose=0, return_dict=True)
    return Trained(before, after, history, model, evaluated, [], steps.epochs)


def compare(call: Call, result: Trained) -> list[str]:
    """Raises AssertionError where `ours` came to something else than Keras; returns the differences
    that are meant.
    """
    explained = []
    if any(_empty_updates(call, made(call))):
        _require_still(call)
        explained.append("updates without a valid element")
    if "policy" in call.arguments:
        return [*explained, *_compare_rounded(call, result)]
    theirs = by_keras(call, result)
    wrong = _apart(result, theirs, [0.0] * len(theirs.after))
    if wrong:  # rounding, magnified?
        disturbed = [by_keras(call, disturb=seed).after for seed in (1, 2)]
        pairs = zip(theirs.after, *disturbed, strict=True)
        spread = [
            max(np.abs(d - wanted).max(initial=0) for d in others) for wanted, *others in pairs
        ]
        wrong = _apart(result, theirs, spread)
        explained += ["rounding"] * (not wrong)
    fitted, expected, evaluated = result.history, theirs.history, result.evaluated
    if "output_0_loss" in fitted and "output_0_loss" not in expected:
        # A subclass does not name its outputs: Keras calls their losses by the losses' names, their
        # metrics by theirs.
        names = _names_of_keras(theirs.model)
        fitted, evaluated = _renamed(fitted, names), _renamed(evaluated, names)
        explained.append("names of outputs without a name")
    problems = wrong + _values_apart("evaluate", evaluated, theirs.evaluated)
    # Keras's mean of an output's loss takes steps alike where the batch's size is not static, that
    # of the sum does not.
    of_losses = set(theirs.steps[0][0]) - {"rows"}
    problems += _values_apart(
        "fit", fitted, {k: v for k, v in expected.items() if k not in of_losses}
    )
    for name in sorted(of_losses):
        for epoch, steps in enumerate(theirs.steps):
            values, rows = ([step[key] for step in steps] for key in (name, "rows"))
            got, mean = fitted.get(name, [np.nan] * 9)[epoch], np.average(values, weights=rows)
            if np.isclose(got, mean, 2e-3, 2e-5):
                continue
            problems.append(
                f"fit's {name} is {got} in epoch {epoch}, not {mean}, of {values} for {rows}"
            )
    if problems:
        raise AssertionError(
            "; ".join(problems) + (f" WARNED {result.warned}" if result.warned else "")
        )
    return [*dict.fromkeys(explained)]


def _compare_rounded(call: Call, result: Trained) -> list[str]:
    """The same of a script in half precision: as far from Keras in float32 as Keras is in half
    precision.
    """
    exact, rounded = by_keras(call, policy="float32"), by_keras(call)
    ours, theirs, moved = (
        np.sqrt(sum(np.square(a - b).sum() for a, b in zip(each, exact.after, strict=True)))
        for each in (result.after, rounded.after, exact.before)
    )
    # Keras's own may have left out its first steps, where its loss scale was too high.
    if not ours <= max(0.03 * moved, 2 * min(theirs, 0.15 * moved)):
        raise AssertionError(
            f"The weights are off by {ours:.2g} of {moved:.2g} that they moved; Keras's by "
            f"{theirs:.2g}"
        )
    return ["half precision"]


def _names_of_keras(model: Any) -> dict[str, str]:
    """Keras's names of the losses and metrics of outputs that have no name, by what they would be
    with `output_0`.
    """
    losses = [mean.name for mean in model._compile_loss.metrics]
    known = {f"output_{i}_loss": name for i, name in enumerate(losses)}
    if (compiled := model._compile_metrics) is not None:
        names = [*compiled.result()]
        for of_outputs in (compiled._flat_metrics, compiled._flat_weighted_metrics):
            for i, each in enumerate(of_outputs):
                if each is not None:
                    each.output_name = f"output_{i}"
        known |= dict(zip(compiled.result(), names, strict=True))
    return known


def _renamed(logs: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    val = "val_"

    def named(name: str) -> str:
        own = name.removeprefix(val)
        return val * name.startswith(val) + names.get(own, own)

    return {named(name): value for name, value in logs.items()}


def _apart(result: Trained, theirs: Trained, spread: list[float]) -> list[str]:
    found = []
    for i, (got, wanted, start) in enumerate(
        zip(result.after, theirs.after, theirs.before, strict=True)
    ):
        if not np.size(wanted) or np.array_equal(got, wanted, equal_nan=True):
            continue
        moved, error = np.abs(wanted - start).max(), np.abs(got - wanted).max()
        allowed = 2e-4 * moved + 1e-6 * np.abs(wanted).max() + 30 * spread[i]
        if not error <= allowed:
            path = theirs.model.weights[i].path
            found.append(
                f"{path} is off by {error:.2g} of {moved:.2g} that it moved (rounding "
                f"{spread[i]:.1g})"
            )
    return found


def _values_apart(what: str, got: Any, wanted: Any) -> list[str]:
    found = [f"{what} lacks {name!r}" for name in wanted if name not in got]
    for name in wanted:
        if name in got and not np.allclose(got[name], wanted[name], 2e-3, 2e-5, equal_nan=True):
            found.append(f"{what}'s {name} is {got[name]}, not {wanted[name]}")
    return found


def script(rng: np.random.Generator) -> tuple:
    """What `fuzzing.fuzz` takes: a call, what runs it, what must not move, and what checks the
    result.
    """
    call = draw(rng)

    def run():
        try:
            return ours(call)
        except (TypeError, ValueError) as error:
            try:
                by_keras(call)
            except Exception:  # it cannot be trained
                raise error from None
            raise AssertionError(
                f"a valid script is refused: {type(error).__name__}: {error}"
            ) from error

    return call, run, lambda: 0, lambda result: compare(call, result)
