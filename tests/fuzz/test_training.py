"""Random training scripts: `Trainer.fit` ends where a plain loop over full batches ends."""

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
from hypothesis import given, note, reject
from hypothesis import strategies as st
from keras import layers, ops
from random_calls import codes, fuzz

import fastaccum as fa

pytestmark = [pytest.mark.slow, pytest.mark.long]

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))


# What users write.


def squares(y_true, y_pred):
    """A loss of each element."""
    return tf.square(y_true - y_pred)


def row_squares(y_true, y_pred):
    """A loss of each row or token."""
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def row_total(y_true, y_pred):
    """A loss of each row, whatever axes it has."""
    difference = tf.abs(y_true - y_pred) ** 1.5
    return tf.reduce_sum(tf.reshape(difference, [tf.shape(difference)[0], -1]), axis=1)


def quantile(q):
    def pinball(y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.maximum(q * error, (q - 1) * error), axis=-1)

    return pinball


class PowerLoss(keras.losses.Loss):
    def __init__(self, power=2.0, **options):
        super().__init__(**options)
        self.power = power

    def call(self, y_true, y_pred):
        return ops.mean(ops.power(ops.abs(y_true - y_pred) + 0.1, self.power), axis=-1)


class Scale(layers.Layer):
    """A layer with a regularised and a constrained weight."""

    def build(self, shape):
        size = (shape[-1],)
        self.scale = self.add_weight(shape=size, initializer="ones", regularizer="l2")
        self.shift = self.add_weight(shape=size, initializer="zeros", constraint="non_neg")

    def call(self, x):
        return x * self.scale + self.shift


class AddsMean(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class AddsSum(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class AddsRows(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x), axis=tuple(range(1, len(x.shape)))))
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


class OwnMetric(keras.metrics.Metric):
    def __init__(self, name="own", **options):
        super().__init__(name=name, **options)
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_pred)))

    def result(self):
        return self.total * 1.0


def closeness(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


# The grammar. `h` is the tensor that a layer is called on, `u` a number of units, `a` an activation,
# `d` further options of a Dense, `w` the width of `h` and `r` a loss's reduction.

ACTIVATIONS = codes("'tanh' | 'gelu' | 'sigmoid' | 'swish' | 'softplus' | 'elu' | None")
DENSE_OPTIONS = codes("""
    use_bias=True | kernel_regularizer='l2' | bias_regularizer=keras.regularizers.L1(0.01)
    activity_regularizer=keras.regularizers.L2(0.01) | use_bias=False
    kernel_constraint=keras.constraints.MaxNorm(0.8)
""")
OF_ANY_RANK = codes("""
    layers.Dense({u}, {a}, {d})(h) | layers.LayerNormalization(epsilon=0.1)(h) | Scale()(h)
    layers.ActivityRegularization(l2=0.01)(h) | layers.Dropout(0.0)(h) | layers.GaussianNoise(0.0)(h)
    layers.Activation('tanh')(h) | layers.RMSNormalization(epsilon=0.1)(h)
    layers.Add()([h, layers.Dense({w}, 'tanh')(h)])
    layers.Multiply()([h, layers.Dense({w}, 'sigmoid')(h)])
    (lambda shared: shared(shared(h)))(layers.Dense({w}, 'tanh', {d}))
""")
LAYERS = {
    1: codes("layers.PReLU()(h) | layers.UnitNormalization()(h)"),
    2: codes("""
        layers.LSTM({u}, return_sequences=True)(h) | layers.GRU({u})(h) | layers.SimpleRNN({u})(h)
        layers.Conv1D({u}, 2, padding='same')(h) | layers.Conv1D({u}, 2, padding='causal')(h)
        layers.TimeDistributed(layers.Dense({u}, 'tanh'))(h) | layers.GlobalAveragePooling1D()(h)
        layers.Flatten()(h) | layers.Bidirectional(layers.SimpleRNN({u}, return_sequences=True))(h)
        layers.MultiHeadAttention(2, 2)(h, h) | layers.Attention()([h, h])
        layers.MultiHeadAttention(1, 2)(h, h, use_causal_mask=True)
    """),
    3: codes("""
        layers.Conv2D({u}, 2, padding='same', activation='tanh')(h) | layers.Flatten()(h)
        layers.SeparableConv2D({u}, 2, padding='same')(h) | layers.GlobalAveragePooling2D()(h)
        layers.DepthwiseConv2D(2, padding='same')(h) | layers.MaxPooling2D(2, padding='same')(h)
        layers.Conv2DTranspose({u}, 2, padding='same')(h) | layers.GroupNormalization(2, epsilon=0.1)(h)
    """),
}
# Layers that treat a batch as a whole: one micro-batch an update, none short.
OF_BATCHES = codes("layers.BatchNormalization()(h) | layers.Dropout(0.4, seed=3)(h)")
REDUCTIONS = codes("'sum_over_batch_size' | 'sum' | 'mean_with_sample_weight'")
LOSSES = {
    "numbers": codes("""
        'mse' | 'mae' | 'huber' | 'log_cosh' | row_squares | squares | row_total | quantile(0.3)
        losses.MeanSquaredError({r}) | losses.MeanAbsoluteError({r}) | losses.Huber(0.5, {r})
        losses.LogCosh({r}) | losses.CosineSimilarity({r}) | PowerLoss(1.5, {r})
        losses.mean_squared_error
    """),
    "positive": codes("""
        'poisson' | losses.Poisson({r}) | losses.MeanSquaredLogarithmicError({r}) | 'msle'
        losses.MeanAbsolutePercentageError({r}) | losses.MeanSquaredError({r})
    """),
    "classes": codes("""
        losses.SparseCategoricalCrossentropy({r}) | 'sparse_categorical_crossentropy'
        losses.SparseCategoricalCrossentropy(ignore_class=0, {r})
        losses.SparseCategoricalCrossentropy(ignore_class=-1, {r})
    """),
    "logits of classes": codes("""
        losses.SparseCategoricalCrossentropy(from_logits=True, {r})
        losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, {r})
        losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1, {r})
    """),
    "one-hot": codes("""
        'categorical_crossentropy' | losses.KLDivergence({r}) | losses.CategoricalHinge({r})
        losses.CategoricalCrossentropy(label_smoothing=0.1, {r})
        losses.CategoricalFocalCrossentropy({r})
    """),
    "logits of one-hot": codes("""
        losses.CategoricalCrossentropy(from_logits=True, {r})
        losses.CategoricalFocalCrossentropy(from_logits=True, {r})
    """),
    "binary": codes("""
        'binary_crossentropy' | losses.BinaryCrossentropy({r})
        losses.BinaryCrossentropy(label_smoothing=0.2, {r})
        losses.BinaryFocalCrossentropy(apply_class_balancing=True, {r})
    """),
    "logits of binary": codes("losses.BinaryCrossentropy(from_logits=True, {r})"),
    "hinge": codes("losses.Hinge({r}) | losses.SquaredHinge({r}) | 'hinge' | 'squared_hinge'"),
}
OUTPUT_ACTIVATIONS = {
    "positive": "softplus", "classes": "softmax", "one-hot": "softmax", "binary": "sigmoid",
    "hinge": "tanh",
}  # fmt: skip
METRICS = {
    "numbers": codes("""
        'mae' | metrics.RootMeanSquaredError() | closeness | metrics.MeanSquaredError()
        OwnMetric() | metrics.CosineSimilarity()
    """),
    "positive": codes("'mape' | metrics.Poisson() | metrics.LogCoshError()"),
    "classes": codes("""
        'accuracy' | 'acc' | metrics.SparseCategoricalAccuracy()
    """),
    "one-hot": codes("""
        'accuracy' | metrics.TopKCategoricalAccuracy(2) | metrics.CategoricalAccuracy()
        metrics.KLDivergence()
    """),
    "binary": codes("""
        'accuracy' | metrics.AUC(num_thresholds=20) | metrics.Precision() | metrics.Recall()
        metrics.BinaryAccuracy() | metrics.TruePositives()
    """),
    "hinge": codes("metrics.Hinge() | metrics.SquaredHinge() | 'mae'"),
}
OPTIMIZERS = {
    **every_optimizer.KERAS,
    "cosine decay": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2)
    ),
    "piecewise": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.01, 0.005, 0.0025])
    ),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.3),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.05, weight_decay=0.05),
}
del OPTIMIZERS["Multi"]  # has no `global_clipnorm`
if KERAS < (3, 13):
    del OPTIMIZERS["Muon"]
if KERAS < (3, 14):
    del OPTIMIZERS["ScheduleFreeAdamW"]


class Head(NamedTuple):
    """An output of a model, with its loss and its metrics."""

    kind: str
    loss: str
    metrics: list[str]
    weighted_metrics: list[str]
    options: str

    @property
    def targets(self) -> str:
        return self.kind.removeprefix("logits of ")


class Script(NamedTuple):
    """What was drawn: each part is code, or a number."""

    inputs: list[str]
    layers: list[str]
    adds: str
    heads: list[Head]
    wrapper: str
    optimizer: str
    options: dict[str, Any]
    fit: dict[str, Any]
    feed: str
    rows: int
    is_weighted: bool
    class_weight: dict[int, float] | None
    fits: int
    has_validation: bool
    policy: str

    @property
    def update_rows(self) -> int:
        return self.fit["batch_size"] * self.options["gradient_accumulation_steps"]


@st.composite
def heads(draw, is_pooled):
    kind = draw(st.sampled_from(list(LOSSES)))
    loss = draw(st.sampled_from(LOSSES[kind]))
    loss = loss.replace("{r}", f"reduction={draw(st.sampled_from(REDUCTIONS))}")
    known = METRICS[kind.removeprefix("logits of ")]
    if loss == "row_total" and not is_pooled:
        loss = "row_squares"  # a mask is of tokens
    weighted = st.lists(st.sampled_from(known), max_size=1)
    if loss in ("squares", "row_total"):
        weighted = st.just([])
    options = draw(st.sampled_from([o for o in DENSE_OPTIONS if o != "use_bias=False"]))
    plain = draw(st.lists(st.sampled_from(known), unique=True, max_size=2))
    return Head(kind, loss, plain, draw(weighted), options)


@st.composite
def layer_codes(draw, is_whole_batch):
    """Draws layers; what each stands on is known once the model is built: a choice for each rank."""
    known = OF_ANY_RANK + (OF_BATCHES * 3 if is_whole_batch else [])
    choices = [draw(st.sampled_from(known + of_rank * 2)) for of_rank in LAYERS.values()]
    filled = []
    for code in choices:
        code = code.replace("{u}", str(draw(st.integers(2, 4))))
        code = code.replace("{a}", draw(st.sampled_from(ACTIVATIONS)))
        filled.append(code.replace("{d}", draw(st.sampled_from(DENSE_OPTIONS))))
    return filled


def without_penalty(code):
    code = code.replace("activity_regularizer=keras.regularizers.L2(0.01)", "use_bias=True")
    return code.replace("layers.ActivityRegularization(l2=0.01)", "Scale()")


@st.composite
def scripts(draw):
    def chance(percent):
        return draw(st.integers(1, 100)) <= percent

    is_whole_batch = chance(10)
    batch = draw(st.integers(1, 7))
    accumulation = 1 if is_whole_batch else draw(st.integers(1, 4))
    rows = draw(st.integers(1, 3 * batch * accumulation + 1))
    if is_whole_batch:
        rows = batch * draw(st.integers(1, 3))
    kinds = st.sampled_from(["rows", "tokens", "masked tokens", "ids", "masked ids", "images"])
    inputs = draw(st.lists(kinds, min_size=1, max_size=2 if chance(20) else 1))
    drawn_layers = draw(st.lists(layer_codes(is_whole_batch), max_size=3))
    adds = draw(st.sampled_from(["AddsMean", "AddsSum", "AddsRows"])) if chance(12) else ""
    is_pooled = inputs == ["rows"] or len(inputs) == 2
    drawn = [draw(heads(is_pooled)) for _ in range(2 if chance(25) else 1)]
    wrapper = ""
    if chance(20):
        wrapper = "Wrapped"
    elif not adds and chance(15):
        is_one_of_numbers = len(drawn) == 1 and drawn[0].kind == "numbers"
        own = ["OwnMean", "OwnSum"] if is_one_of_numbers else []
        wrapper = draw(st.sampled_from(["Penalised", *own]))
    if adds == "AddsSum" or wrapper.startswith("Own"):
        # A penalty of activities is a mean, and `own_loss_reduction="sum"` is for sums alone.
        drawn_layers = [[without_penalty(c) for c in of_ranks] for of_ranks in drawn_layers]
        drawn = [head._replace(options=without_penalty(head.options)) for head in drawn]
    if wrapper.startswith(("Own", "Pen")):
        drawn = [head._replace(metrics=[], weighted_metrics=[]) for head in drawn]
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    options = {"gradient_accumulation_steps": accumulation}
    # XLA draws other numbers for Dropout.
    options["jit_compile"] = chance(12) and not is_whole_batch
    if OPTIMIZERS[optimizer]().global_clipnorm is None and "clip" not in optimizer and chance(12):
        options["clip_norm"] = draw(st.sampled_from([0.1, 0.5, 5.0]))
    if chance(30):
        options["steps_per_execution"] = draw(st.integers(2, 3))
    if len(drawn) == 2 and chance(50):
        options["loss_weights"] = [0.3, 2.0]
    if adds == "AddsSum" or wrapper == "OwnSum":
        options["own_loss_reduction"] = "sum"
    feed = draw(st.sampled_from(["arrays", "arrays", "dataset", "generator", "PyDataset"]))
    fit = {"batch_size": batch, "epochs": draw(st.integers(1, 3))}
    has_whole_steps = math.ceil(rows / batch) % accumulation == 0
    steps = math.ceil(rows / (batch * accumulation))
    if feed == "generator" and not has_whole_steps:  # it goes on from epoch to epoch, amid a step
        fit["epochs"] = 1
    may_end_early = feed == "arrays" or (feed == "dataset" and has_whole_steps)
    if may_end_early and steps > 1 and chance(15):
        fit["steps_per_epoch"] = draw(st.integers(1, steps))
    is_weighted = not wrapper.startswith("Own") and chance(40)
    class_weight = None
    is_of_classes = len(drawn) == 1 and drawn[0].targets in ("classes", "one-hot")
    is_ignoring = "ignore_class" in drawn[0].loss
    if is_pooled and feed == "arrays" and is_of_classes and not is_weighted and not is_ignoring:
        class_weight = draw(st.sampled_from([None, {0: 2.0, 2: 0.5}, {1: 0.0}, {0: 1.0, 1: 3.0}]))
    policy = "float32"
    if chance(5) and not is_whole_batch and "Own" not in wrapper:
        policy = draw(st.sampled_from(["mixed_float16", "mixed_bfloat16"]))
    fits = 2 if chance(20) else 1
    return Script(
        inputs, drawn_layers, adds, drawn, wrapper, optimizer, options, fit, feed,
        rows, is_weighted, class_weight, fits, chance(20), policy,
    )  # fmt: skip


# How a script is built.


class Built(NamedTuple):
    model: Any
    x: Any
    y: Any
    sample_weight: Any
    compiled: dict[str, Any]
    optimizer: Any


def evaluate(code, **names):
    return eval(code, {**globals(), "losses": keras.losses, "metrics": keras.metrics, **names})


def padded(array, rng, value=0):
    """Cuts the sequences off at random lengths, of 1 at least."""
    lengths = rng.integers(1, array.shape[1] + 1, size=len(array))
    kept = np.arange(array.shape[1]) < lengths[:, None]
    kept = kept.reshape(kept.shape + (1,) * (array.ndim - 2))
    return np.where(kept, array, value).astype(array.dtype)


def build_input(kind, rows, name, rng):
    """Returns an input, its data and what the next layer takes."""
    if kind.endswith("ids"):
        data = rng.integers(1, 7, size=(rows, 4)).astype("int32")
        tensor = keras.Input((4,), dtype="int32", name=name)
        h = layers.Embedding(7, 4, mask_zero=kind == "masked ids")(tensor)
    else:
        shape = {"rows": (3,), "images": (4, 3, 2)}.get(kind, (4, 2))
        data = rng.normal(size=(rows, *shape)).astype("float32")
        h = tensor = keras.Input(shape, name=name)
        if kind == "masked tokens":
            h = layers.Masking()(tensor)
    return tensor, padded(data, rng) if kind.startswith("masked") else data, h


def pooled(h):
    rank = len(h.shape) - 1
    return h if rank == 1 else getattr(layers, f"GlobalAveragePooling{rank - 1}D")()(h)


def build_targets(head, shape, rng):
    size = shape[-1]
    if head.targets == "classes":
        labels = rng.integers(0, size, size=shape[:-1]).astype("int32")
        ignored = re.search(r"ignore_class=(-?\d)", head.loss)
        if ignored:
            labels[rng.random(labels.shape) < 0.3] = int(ignored.group(1))
        return labels
    if head.targets == "one-hot":
        return np.eye(size, dtype="float32")[rng.integers(0, size, size=shape[:-1])]
    if head.targets == "binary":
        return rng.integers(0, 2, size=shape).astype("float32")
    if head.targets == "hinge":
        return 2.0 * rng.integers(0, 2, size=shape).astype("float32") - 1
    if head.targets == "positive":
        return rng.uniform(0.5, 2, size=shape).astype("float32")
    return rng.normal(size=shape).astype("float32")


def of_outputs(values):
    return values[0] if len(values) == 1 else values


def build(script: Script, policy: str | None = None) -> Built:
    """Makes model and data, always with the same weights and numbers."""
    rng = np.random.default_rng(0)
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy or script.policy)
    try:
        inputs = [build_input(k, script.rows, "ab"[i], rng) for i, k in enumerate(script.inputs)]
        tensors, data, hidden = (list(parts) for parts in zip(*inputs, strict=True))
        h = hidden[0]
        for of_ranks in script.layers:
            code = of_ranks[len(h.shape) - 2]
            is_masked = getattr(h, "_keras_mask", None) is not None
            if is_masked and "Flatten" in code:  # Keras warns that it drops the mask
                continue
            if "GroupNorm" in code and h.shape[-1] % 2:
                continue
            h = evaluate(code.replace("{w}", str(h.shape[-1])), h=h)
        if len(hidden) == 2:
            h = layers.Concatenate()([pooled(h), pooled(hidden[1])])
        if script.adds:
            h = evaluate(script.adds)()(h)
        outputs = []
        for i, head in enumerate(script.heads):
            units = 3 if head.targets in ("classes", "one-hot") else i + 1
            activation = OUTPUT_ACTIVATIONS.get(head.kind)
            code = f"layers.Dense({units}, {activation!r}, name={'pq'[i]!r}, {head.options})(h)"
            outputs.append(evaluate(code, h=h))
        model = keras.Model(of_outputs(tensors), of_outputs(outputs))
        if script.wrapper:
            model = evaluate(script.wrapper)(model)
        model(tf.nest.map_structure(lambda a: a[:2], of_outputs(data)))
    finally:
        keras.config.set_dtype_policy("float32")
    targets = []
    weights = []
    for head, output in zip(script.heads, outputs, strict=True):
        shape = (script.rows, *output.shape[1:])
        targets.append(build_targets(head, shape, rng))
        of_losses = shape if head.loss == "squares" else shape[:-1]
        of_losses = shape[:1] if head.loss == "row_total" else of_losses
        weights.append(rng.choice([0.0, 0.5, 1.0, 3.0], size=of_losses).astype("float32"))
    compiled = {}
    if not script.wrapper.startswith("Own"):
        compiled["loss"] = of_outputs([evaluate(head.loss) for head in script.heads])
    for name in ("metrics", "weighted_metrics"):
        of_heads = [getattr(head, name) for head in script.heads]
        if any(of_heads):
            compiled[name] = of_outputs([[evaluate(c) for c in of_head] for of_head in of_heads])
    if "loss_weights" in script.options:
        compiled["loss_weights"] = script.options["loss_weights"]
    sample_weight = of_outputs(weights) if script.is_weighted else None
    optimizer = OPTIMIZERS[script.optimizer]()
    return Built(model, of_outputs(data), of_outputs(targets), sample_weight, compiled, optimizer)


def rows_of(built, start, stop):
    parts = [part for part in (built.x, built.y, built.sample_weight) if part is not None]
    return tuple(tf.nest.map_structure(lambda a: a[start:stop], part) for part in parts)


def batches_of(script, built, rows):
    return [rows_of(built, start, start + rows) for start in range(0, script.rows, rows)]


# How it is trained.


class Trained(NamedTuple):
    start: list[np.ndarray]
    weights: list[np.ndarray]
    history: dict[str, list[float]]
    evaluated: dict[str, float]
    built: Built


def data_of(script, built):
    """Returns what `fit` takes."""
    x, y, w = built.x, built.y, built.sample_weight
    if script.feed == "arrays":
        data = {"x": x, "y": y, "sample_weight": w, "shuffle": False}
        return {**data, "class_weight": script.class_weight}
    batches = batches_of(script, built, script.fit["batch_size"])
    if script.feed == "PyDataset":
        return {"x": Batches(batches), "shuffle": False}
    if script.feed == "generator":
        steps = math.ceil(len(batches) / script.options["gradient_accumulation_steps"])
        several = {"steps_per_epoch": steps} if script.fit["epochs"] > 1 else {}
        return {"x": itertools.chain(*[batches] * script.fit["epochs"]), **several}
    parts = [tuple(part) if isinstance(part, list) else part for part in rows_of(built, 0, None)]
    dataset = tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(script.fit["batch_size"])
    return {"x": dataset.repeat() if "steps_per_epoch" in script.fit else dataset}


def train(script: Script, callbacks=(), **options) -> Trained:
    """Runs the script with `fa.Trainer`."""
    built = build(script)
    start = built.model.get_weights()
    options = {**script.options, **built.compiled, **options}
    trainer = fa.Trainer(built.model, built.optimizer, **options)
    everything = rows_of(built, 0, None)
    fit = dict(script.fit)
    if script.has_validation:
        fit |= {"validation_data": everything, "validation_batch_size": fit["batch_size"]}
    history = {}
    for _ in range(script.fits):
        logs = trainer.fit(**data_of(script, built), **fit, callbacks=list(callbacks), verbose=0)
        for name, values in logs.history.items():
            history[name] = history.get(name, []) + values
    data = dict(zip(("x", "y", "sample_weight"), everything, strict=False))
    size = {"batch_size": script.fit["batch_size"]}
    evaluated = trainer.evaluate(**data, **size, verbose=0, return_dict=True)
    return Trained(start, built.model.get_weights(), history, evaluated, built)


class ByElement(keras.losses.Loss):
    """A loss of elements, for which a mask of tokens holds: Keras refuses it."""

    def __init__(self, function):
        super().__init__(name=function.__name__)
        self.call = function

    def __call__(self, y_true, y_pred, sample_weight=None):
        mask = getattr(y_pred, "_keras_mask", None)
        if mask is not None:
            y_pred = tf.identity(y_pred)
            y_pred._keras_mask = tf.broadcast_to(mask[..., None], tf.shape(y_pred))
        return super().__call__(y_true, y_pred, sample_weight)


def train_plainly(script: Script, policy=None, disturb=0, weights=None) -> Trained:
    """Runs the script with Keras's eager step on the full batch of each update.

    Args:
        policy: in place of the script's.
        disturb: a seed for a disturbance of the weights as large as rounding, or 0.
        weights: those to evaluate, in place of the trained ones.
    """
    built = build(script, policy)
    model = built.model
    optimizer = built.optimizer
    start = model.get_weights()
    if disturb:
        rng = np.random.default_rng(disturb)
        disturbed = []
        for weight in start:
            relative, absolute = rng.normal(size=(2, *weight.shape))
            disturbed.append(weight * (1 + 2e-7 * relative) + 1e-8 * absolute)
        model.set_weights(disturbed)
    optimizer.global_clipnorm = script.options.get("clip_norm", optimizer.global_clipnorm)
    apply = optimizer.apply
    # A gradient of a table, summed by id.
    dense = lambda gradient: None if gradient is None else tf.convert_to_tensor(gradient)  # noqa: E731
    optimizer.apply = lambda grads, variables=None: apply([dense(g) for g in grads], variables)
    # Keras cannot sum losses in half precision.
    model._aggregate_additional_loss = lambda loss: ops.sum(ops.cast(loss, "float32"))
    compiled = dict(built.compiled)
    if "loss" in compiled:
        by_element = lambda loss: ByElement(loss) if loss is squares else loss  # noqa: E731
        compiled["loss"] = tf.nest.map_structure(by_element, compiled["loss"])
    scales = (policy or script.policy) == "mixed_float16"
    model.compile(optimizer, **compiled, run_eagerly=True, auto_scale_loss=scales)
    optimizer.build(model.trainable_variables)
    steps = batches_of(script, built, script.update_rows)
    empty = empty_updates(script, built)
    history = {}
    everything = rows_of(built, 0, None)
    weighted = {} if script.class_weight is None else {"class_weight": script.class_weight}
    for _ in range(script.fits):
        for epoch in epochs_of(script, len(steps)):
            model.reset_metrics()
            for index in epoch:
                variables = [*model.weights, *optimizer.variables]
                before = [np.array(v) for v in variables] if empty[index] else []
                logs = model.train_on_batch(*steps[index], **weighted, return_dict=True)
                for variable, value in zip(variables, before, strict=False):
                    variable.assign(value)  # Trainer leaves such an update out
            if script.has_validation:
                model.reset_metrics()
                validated = model.test_on_batch(*everything, return_dict=True)
                logs |= {f"val_{name}": value for name, value in validated.items()}
            for name, value in logs.items():
                history.setdefault(name, []).append(np.asarray(value))
        if int(optimizer.iterations):
            optimizer.finalize_variable_values(model.trainable_variables)
    trained = model.get_weights()
    model.set_weights(trained if weights is None else weights)
    model.reset_metrics()
    evaluated = model.test_on_batch(*everything, return_dict=True)
    return Trained(start, trained, history, evaluated, built)


def epochs_of(script, steps):
    """Returns the steps of each epoch: a pass, or a part of it from which the next goes on."""
    per_epoch = script.fit.get("steps_per_epoch", steps)
    epochs = script.fit["epochs"]
    if script.feed == "dataset":  # repeats
        order = itertools.cycle(range(steps))
        return [list(itertools.islice(order, per_epoch)) for _ in range(epochs)]
    parts = [range(steps)[start : start + per_epoch] for start in range(0, steps, per_epoch)]
    return list(itertools.islice(itertools.cycle(parts), epochs))


def empty_updates(script, built):
    """Tells for each update of a pass whether no element of it counts."""
    count = math.ceil(script.rows / script.update_rows)
    code = repr(script)
    if re.search("Adds|ctivity|Penalised|OwnMean|OwnSum", code):  # losses of all rows
        return [False] * count
    weights = [None] * len(script.heads)
    if built.sample_weight is not None:
        weights = tf.nest.flatten(built.sample_weight)
    masks = tf.nest.flatten(built.model(built.x))
    counted = np.zeros(script.rows, bool)
    for head, y, weight, output in zip(
        script.heads, tf.nest.flatten(built.y), weights, masks, strict=True
    ):
        loss = evaluate(head.loss)
        if script.class_weight is not None:
            labels = y if head.targets == "classes" else y.argmax(-1)
            weight = np.array([script.class_weight.get(int(label), 1.0) for label in labels])
        valid = np.ones([script.rows, 1], bool)
        if getattr(loss, "ignore_class", None) is not None:
            valid = valid & (y.reshape(script.rows, -1) != loss.ignore_class)
        mask = getattr(output, "_keras_mask", None)
        if mask is not None:
            valid = valid & mask.numpy().reshape(script.rows, -1)
        if weight is not None and getattr(loss, "reduction", "") == "mean_with_sample_weight":
            valid = valid & (weight.reshape(script.rows, -1) != 0)
        counted |= valid.any(-1)
    rows = script.update_rows
    return [not counted[i * rows : (i + 1) * rows].any() for i in range(count)]


class RequireStill(keras.callbacks.Callback):
    """Requires that an update without a valid element moves no weight and no slot."""

    def __init__(self, empty):
        super().__init__()
        self.of_a_pass = empty

    def on_train_begin(self, logs=None):
        self.empty = itertools.cycle(self.of_a_pass)

    def variables(self):
        return [np.array(v) for v in (*self.model.weights, *self.model.optimizer.variables)]

    def on_train_batch_begin(self, batch, logs=None):
        self.before = self.variables()

    def on_train_batch_end(self, batch, logs=None):
        if next(self.empty):
            for value, before in zip(self.variables(), self.before, strict=True):
                assert value.tobytes() == before.tobytes(), "an empty update moved a variable"


# What must agree.


def check(script: Script, trained: Trained) -> None:
    """Raises AssertionError where `Trainer` came to something else than the plain loop."""
    if script.policy != "float32":
        check_half_precision(script, trained)
        return
    plain = train_plainly(script, weights=trained.weights)
    spread = [0.0] * len(plain.weights)
    problems = compare_weights(trained, plain, spread)
    if problems:  # does the training magnify rounding?
        disturbed = [train_plainly(script, disturb=seed).weights for seed in (1, 2)]
        for i, weight in enumerate(plain.weights):
            spread[i] = max(np.abs(other[i] - weight).max(initial=0) for other in disturbed)
        problems = compare_weights(trained, plain, spread)
    problems += compare_logs("fit", script, trained.history, plain.history)
    problems += compare_logs("evaluate", script, trained.evaluated, plain.evaluated)
    assert not problems, "; ".join(problems)


def compare_weights(trained, plain, spread):
    problems = []
    for i, (value, expected) in enumerate(zip(trained.weights, plain.weights, strict=True)):
        if not np.size(expected) or np.array_equal(value, expected, equal_nan=True):
            continue
        moved = np.abs(expected - plain.start[i]).max()
        error = np.abs(value - expected).max()
        if not error <= 2e-4 * moved + 1e-6 * np.abs(expected).max() + 30 * spread[i]:
            path = plain.built.model.weights[i].path
            problems.append(f"{path} is off by {error:.2g} of {moved:.2g} that it moved")
    return problems


def compare_logs(what, script, logs, expected):
    # A subclass does not name its outputs: Keras calls their losses and metrics by other names.
    is_nameless = script.wrapper and len(script.heads) == 2
    names = [name for name in expected if name in logs] if is_nameless else list(expected)
    problems = []
    for name in names:
        if name not in logs:
            problems.append(f"{what} lacks {name!r}")
        elif not np.allclose(logs[name], expected[name], 2e-3, 2e-5, equal_nan=True):
            problems.append(f"{what}'s {name} is {logs[name]}, not {expected[name]}")
    return problems


def check_half_precision(script, trained):
    """Requires that weights are about as far from Keras's in float32 as Keras's are."""
    exact = train_plainly(script, policy="float32")
    rounded = train_plainly(script)

    def distance(weights):
        squares = [np.square(a - b).sum() for a, b in zip(weights, exact.weights, strict=True)]
        return np.sqrt(sum(squares))

    moved = distance(exact.start)
    # Keras may have left out its first steps, where its loss scale was too high.
    allowed = max(0.03 * moved, 2 * min(distance(rounded.weights), 0.15 * moved))
    error = distance(trained.weights)
    assert error <= allowed, f"The weights are off by {error:.2g} of {moved:.2g} that they moved"


@fuzz(20)
@given(script=scripts())
def test_a_training_script(script):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        note(repr(script))
        try:
            trained = train(script)
        except (TypeError, ValueError):
            try:
                train_plainly(script)
            except Exception:
                reject()  # Keras does not train it either
            raise
        check(script, trained)
        empty = empty_updates(script, trained.built)
        if any(empty):
            train(script, [RequireStill(empty)], steps_per_execution=1)


def test_a_wrong_formula_is_seen():
    """The negative control: the mean of the means of 3 rows and of 1 is not the mean of 4 rows."""
    script = Script(
        ["rows"], [], "", [Head("numbers", "'mse'", ["'mae'"], [], "use_bias=True")], "", "SGD",
        {"gradient_accumulation_steps": 2, "jit_compile": False}, {"batch_size": 3, "epochs": 1},
        "arrays", 4, False, None, 1, False, "float32",
    )  # fmt: skip
    right = train(script)
    check(script, right)
    built = build(script)
    weights = 2 * np.float32([1 / 3, 1 / 3, 1 / 3, 1])
    built.model.compile(built.optimizer, "mse", run_eagerly=True)
    built.model.train_on_batch(built.x, built.y, sample_weight=weights / weights.mean())
    with pytest.raises(AssertionError, match="kernel is off"):
        check(script, right._replace(weights=built.model.get_weights()))
    for name in ("loss", "mean_absolute_error"):
        name = name if name in right.history else "mae"
        history = {**right.history, name: [9.0]}
        with pytest.raises(AssertionError, match=f"fit's {name} is"):
            check(script, right._replace(history=history))
        with pytest.raises(AssertionError, match=f"evaluate's {name} is"):
            check(script, right._replace(evaluated={**right.evaluated, name: 9.0}))
    with pytest.raises(AssertionError, match="fit lacks 'loss'"):
        check(script, right._replace(history={}))
