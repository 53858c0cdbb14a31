"""Random calls of `Trainer` and its methods: Keras's own eager full-batch step, or a refusal."""

import functools
import importlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st
from random_calls import (
    ANYTHING,
    NAMES,
    Call,
    Values,
    calls,
    code_of,
    codes,
    fuzz,
    integers,
    judge,
    numbers,
    without,
)

import fastaccum as fa

pytestmark = [pytest.mark.slow, pytest.mark.long]

layers = keras.layers
CLASSES = 3


# Models, each with data.


class Subclassed(keras.Model):
    """A model that is built by its first call."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(3, "tanh")
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


def two_outputs(kind):
    a = keras.Input((4,), name="a")
    b = keras.Input((2,), name="b")
    joined = layers.Concatenate()([a, b])
    p = layers.Dense(1, name="p")(joined)
    q = layers.Dense(2, name="q")(joined)
    if kind == "dict":
        return keras.Model({"a": a, "b": b}, {"p": p, "q": q})
    return keras.Model([a, b], [p, q])


def new_model(kind):
    if kind == "subclassed":
        return Subclassed()
    if kind in ("dict", "list"):
        return two_outputs(kind)
    K = package_of(kind)
    if kind == "ids":
        first = [K.Input((3,), dtype="int32"), K.layers.Embedding(7, 2), K.layers.Flatten()]
    else:
        first = [K.Input((4,)), K.layers.Dense(3, "tanh")]
    return K.Sequential([*first, K.layers.Dense(CLASSES if kind in WITH_CLASSES else 1)])


def new_loss(kind):
    if kind in WITH_CLASSES:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"dict": {"p": "mse", "q": "mae"}, "list": ["mse", "mae"]}.get(kind, "mse")


WITH_CLASSES = ("classes", "ids")
SINGLE = ("regression", "classes", "ids", "subclassed", "legacy")
KINDS = (*SINGLE, "dict", "list")


def package_of(kind):
    return importlib.import_module("tf_keras" if kind == "legacy" else "keras")


def inputs(kind, rows=12):
    rng = np.random.default_rng(rows)
    if kind == "ids":
        return rng.integers(0, 7, size=(rows, 3))
    a = rng.normal(size=(rows, 4)).astype("float32")
    b = rng.normal(size=(rows, 2)).astype("float32")
    return {"dict": {"a": a, "b": b}, "list": [a, b]}.get(kind, a)


def targets(kind, rows=12):
    rng = np.random.default_rng(rows + 1)
    if kind in WITH_CLASSES:
        return rng.integers(0, CLASSES, size=rows)
    p = rng.normal(size=(rows, 1)).astype("float32")
    q = rng.normal(size=(rows, 2)).astype("float32")
    return {"dict": {"p": p, "q": q}, "list": [p, q]}.get(kind, p)


def weights(rows=12):
    return np.random.default_rng(rows + 2).uniform(0, 2, size=rows).astype("float32")


def dataset(kind, rows=12, batch=4):
    data = (inputs(kind, rows), targets(kind, rows))
    if kind == "list":
        data = tuple(map(tuple, data))
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


class Batches(keras.utils.PyDataset):
    """The batches of `dataset`."""

    def __init__(self, kind, rows=12, batch=4):
        super().__init__()
        self.batches = list(dataset(kind, rows, batch).as_numpy_iterator())

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def stacked(nest, micro_batches):
    """Splits arrays into micro-batches."""
    return tf.nest.map_structure(lambda a: a.reshape(micro_batches, -1, *a.shape[1:]), nest)


def model(kind="regression"):
    """Makes a model of this kind, always with the same weights."""
    keras.utils.set_random_seed(1)
    made = new_model(kind)
    made(tf.nest.map_structure(tf.constant, inputs(kind, 2)))
    return made


def new_trainer(kind, accumulation=1, **options):
    """Makes a Trainer of SGD, whose update shows the gradient, built and trained once."""
    optimizer = package_of(kind).optimizers.SGD(0.1)
    options = {"gradient_accumulation_steps": accumulation, "jit_compile": False, **options}
    trainer = fa.Trainer(model(kind), optimizer, new_loss(kind), **options)
    trainer.fit(inputs(kind), targets(kind), batch_size=4, verbose=0)
    return trainer


NAMES |= {"model": model, "inputs": inputs, "targets": targets, "weights": weights}
NAMES |= {"dataset": dataset, "Batches": Batches, "stacked": stacked, "Subclassed": Subclassed}
NAMES |= {"new_trainer": new_trainer, "folder": tempfile.mkdtemp}


def variables_of(trainer):
    """Returns what a call that is refused must not move."""
    return [*trainer.model.variables, *trainer.optimizer.variables, *trainer.loss_scale.variables]


def bytes_of(trainer):
    return [variable.numpy().tobytes() for variable in variables_of(trainer)]


@functools.cache
def trainer_and_start(kind, accumulation):
    trainer = new_trainer(kind, accumulation)
    return trainer, [tf.identity(variable) for variable in variables_of(trainer)]


def restored_trainer(kind, accumulation):
    """Returns one Trainer for all calls, with the weights that it had at first."""
    trainer, start = trainer_and_start(kind, accumulation)
    for variable, value in zip(variables_of(trainer), start, strict=True):
        variable.assign(value)
    return trainer


@functools.cache
def reference_model(kind):
    made = model(kind)
    options = {} if kind == "legacy" else {"auto_scale_loss": False}
    optimizer = package_of(kind).optimizers.SGD(0.1)
    made.compile(optimizer, new_loss(kind), run_eagerly=True, **options)
    return made


def check_weights(kind, start, batches, trainer):
    """Compares with Keras's step on each full batch; a step that is not finite is left out."""
    reference = reference_model(kind)
    reference.set_weights(start)
    for batch in batches:
        before = reference.get_weights()
        reference.train_on_batch(*batch)
        if not all(np.isfinite(w).all() for w in reference.get_weights()):
            reference.set_weights(before)
    for result, expected in zip(trainer.model.get_weights(), reference.get_weights(), strict=True):
        atol = 2e-5 * (1 + np.abs(expected).max())
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=atol)


# Batches of the reference.


def arrays_of(nest):
    return tf.nest.map_structure(
        lambda a: np.asarray(a.numpy() if hasattr(a, "numpy") else a), nest
    )


def is_empty(nest):
    return all(leaf is None for leaf in tf.nest.flatten(nest))


def batch_of(x, y=None, sample_weight=None, class_weight=None):
    """Returns all rows as one batch, weighted."""
    sample_weight = None if is_empty(sample_weight) else np.asarray(sample_weight)
    if class_weight is not None:
        labels = np.asarray(y).reshape(len(y), -1)[:, 0].astype(int)
        of_rows = np.array([class_weight.get(int(label), 1.0) for label in labels], "float32")
        is_weighted = sample_weight is not None
        sample_weight = sample_weight.reshape(-1) * of_rows if is_weighted else of_rows
    return [arrays_of(part) for part in (x, y, sample_weight) if part is not None]


def split(batch, rows):
    """Cuts a batch into batches of so many rows."""
    total = len(tf.nest.flatten(batch[0])[0])
    batches = []
    for start in range(0, total, rows):
        stop = start + rows
        cut = lambda a, start=start, stop=stop: a[start:stop]  # noqa: E731
        batches.append([tf.nest.map_structure(cut, part) for part in batch])
    return batches


def joined(batches, count):
    """Joins each `count` batches into one."""
    groups = [batches[i : i + count] for i in range(0, len(batches), count)]
    return [tf.nest.map_structure(lambda *a: np.concatenate(a), *group) for group in groups]


def is_data_source(x):
    return isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")


def batches_of(x):
    if isinstance(x, keras.utils.PyDataset):
        return [list(batch) for batch in x.batches]
    return [list(arrays_of(batch)) for batch in x]


# Values of arguments.

WHOLE = codes("1 | np.int64(3) | Whole(3) | np.float32(2)")
REAL = codes("1 | 2.5 | np.float32(2) | np.int64(3) | Whole(3)")
BOOLS = codes("True | False | np.True_")
EMPTY = codes("() | [] | {} | [[]] | range(0) | {'a': {}}")
TEXTS = codes("'' | 'x' | b'x' | Text('x') | np.str_('a') | '\\ud800'")


def count(low, high):
    return Values([integers(low, high)], without(*WHOLE), WHOLE)


def count_or_none(low, high):
    return Values(["None", integers(low, high)], without("None", *WHOLE), WHOLE)


BOOL = Values(["True", "False"], without(*BOOLS), BOOLS)
BAD_ARRAYS = codes("""
    {0}.astype('complex64') | {0}.astype(str) | {0}.astype('datetime64[s]') | {0}.astype(object)
    {0}.astype('longdouble') | {0}[:0] | {0}[:-1] | {0}[None] | {0}[..., None, None, None] | {0}[0]
    {0}[0, 0] | np.ma.masked_equal({0}, {0}.flat[0]) | {0}.tolist() | iter({0}) | str({0})
    tf.ragged.constant([[1.], [1., 2.]] * 6) | Lies({0}.astype(object), 12) | {0}.dtype
    lambda: {0} | np.rec.fromarrays([{0}]) | [{0}, {0}, {0}] | {{'nothing': {0}}}
    tf.constant({0}.astype(str)) | keras.KerasTensor({0}.shape) | tf.TensorSpec({0}.shape)
    memoryview({0}.tobytes())
""")
ODD_ARRAYS = codes("""
    {0}.astype('float64') | {0}.astype('float16') | {0}.astype('int8') | {0}.astype('uint8')
    {0}.astype('>f8') | {0}.astype('bool') | {0}.astype('bfloat16') | {0}[::-1] | {0}[..., None]
    {0}.T | {0}.ravel() | {0}[:, None] | {0}[..., :1] | {0} * 0 | {0} * -1 | {0} * nan | {0} * inf
    {0} * 1e9 | {0} + 1e6 | {0} - 100 | {0} * 0.5 | tf.constant({0}) | tf.Variable({0})
    keras.Variable({0}) | np.asfortranarray({0}) | np.ma.array({0}) | Lies({0}, 3) | Lies({0}, 0)
    Lies({0}, 100) | [{0}] | ({0},) | [[{0}]] | memoryview(np.ascontiguousarray({0}))
""")
STRANGE_LENGTH = "Lies(np.ones((12, 4)), 3)"


def array_values(code, kind, keep=()):
    """Values for an array of data; of models with several, what takes its place."""
    if kind not in SINGLE:
        odd = [f"{code}[::-1]", f"dict(zip('ab', {code}))", *keep, STRANGE_LENGTH]
        return Values([code], without(STRANGE_LENGTH, *keep), odd)
    bad = [form.format(code) for form in BAD_ARRAYS]
    odd = [form.format(code) for form in ODD_ARRAYS]
    return Values(
        [code], [*without(STRANGE_LENGTH, *keep), *bad * 2], [*odd * 2, STRANGE_LENGTH, *keep]
    )


SOURCES = {
    "dataset": "dataset({!r}, {}, {})",
    "PyDataset": "Batches({!r}, {}, {})",
    "generator": "iter(list(dataset({!r}, {}, {})))",
}


def data_values(kind, rows, form, batch):
    if form != "arrays":
        none = Values(["None"], without("None", *EMPTY), EMPTY)
        source = Values([SOURCES[form].format(kind, rows, batch)], ANYTHING)
        return {"x": source, "y": none, "sample_weight": none}
    return {
        "x": array_values(f"inputs({kind!r}, {rows})", kind),
        "y": array_values(f"targets({kind!r}, {rows})", kind),
        "sample_weight": array_values(f"weights({rows})", "regression", ["None", *EMPTY]),
    }


def fit_values(kind):
    data = f"inputs({kind!r}, 5), targets({kind!r}, 5)"
    bad_validation = codes(f"""
        inputs({kind!r}, 5) | (inputs({kind!r}, 5),) | (inputs({kind!r}, 5), targets({kind!r}, 4))
        (inputs({kind!r}, 5), None, weights(5)) | ({data}, weights(5), 1)
        dataset({kind!r}, 5, 2).repeat()
    """)
    callbacks = codes("""
        None | [] | [keras.callbacks.Callback()] | keras.callbacks.History()
        (keras.callbacks.TerminateOnNaN(),)
        [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)]
    """)
    raising = codes("""
        [keras.callbacks.LambdaCallback(on_epoch_end=raises)]
        [keras.callbacks.LambdaCallback(on_train_batch_end=raises)]
        [keras.callbacks.LambdaCallback(on_train_begin=raises)]
    """)
    numbers_of_lines = ["0", "1", "-0.0", "Whole(3)", "2.5", "np.int64(3)", *BOOLS]
    class_weights = codes("{0: 2.0} | {0: 0.5, 2: 3} | {1: 0.0}") if kind in WITH_CLASSES else []
    return {
        "batch_size": count_or_none(1, 14),
        "epochs": count(1, 3),
        "verbose": Values(
            ["0", "0", "0", "'auto'", "1", "2"], without(*numbers_of_lines), [*BOOLS, "-0.0"]
        ),
        "callbacks": Values(callbacks, without("None", *EMPTY), [*EMPTY, *raising]),
        "validation_split": Values(
            ["0.0", "0", numbers(0.2, 0.8)],
            without("0", "-0.0", "False", "1e-50"),
            ["-0.0", "1e-50"],
        ),
        "validation_data": Values(
            [f"({data})", f"({data}, weights(5))", f"dataset({kind!r}, 5, 2)", "None"],
            [*without("None", *EMPTY), *bad_validation],
            EMPTY,
        ),
        "shuffle": BOOL,
        "initial_epoch": Values(["0", "0", "1"], without("0", "-0.0", *WHOLE), ["-0.0", *WHOLE]),
        "steps_per_epoch": count_or_none(1, 4),
        "validation_steps": count_or_none(1, 1),
        "validation_batch_size": count_or_none(1, 6),
        "validation_freq": Values(
            codes("1 | 2 | [1] | (1, 3) | {2}"), without("range(3)", *WHOLE), ["range(3)"]
        ),
        "checkpoint_dir": Values(
            ["None", "folder()"], [c for c in without("None") if c not in TEXTS]
        ),
        "checkpoint_every": count_or_none(1, 1),
        "keep": count(1, 3),
        "resume": Values(["()", "[]"], without("()", "[]")),  # a name needs a checkpoint_dir
        "global_batch_size": Values(["None"], without("None")),  # others need batch_size="auto"
        "class_weight": Values(
            ["None", *class_weights],
            without("None", "{1: 2}"),
            ["{1: 2}"] if class_weights else [],
        ),
    }


# fit, evaluate, predict


@st.composite
def method_calls(draw, method, names=None):
    """Draws a Trainer and a call of its method on arrays or on a source of batches."""
    kind = draw(st.sampled_from(KINDS))
    accumulation = draw(st.sampled_from([1, 2, 3]))
    form = draw(st.sampled_from(["arrays"] * 4 + list(SOURCES)))
    rows = draw(st.sampled_from([1, 5, 12, 13]))
    table = data_values(kind, rows, form, draw(st.integers(1, 6))) | fit_values(kind)
    if form != "arrays":
        for name in ("class_weight", "validation_split"):
            del table[name]
        # Not read beside batches, as in Keras, and hence not refused.
        size = table["batch_size"]
        table["batch_size"] = Values(size.valid, odd=[*size.bad, *size.odd])
    table["steps"] = table["validation_steps"]
    table["return_dict"] = BOOL
    if names is None:
        names = [name for name in table if name not in ("steps", "return_dict")]
    required = ["x", "y"] if form == "arrays" and "y" in names else ["x"]
    table = {name: table[name] for name in names}
    setup = f"trainer = new_trainer({kind!r}, {accumulation})"
    call = draw(calls(f"trainer.{method}", table, required, setup=setup, may_refuse=True))
    if form == "generator" and method == "fit":  # is read once
        call.arguments.setdefault("epochs", "1")
    return kind, accumulation, call


def check_fit(kind, accumulation, start, trainer, history, arguments):
    x = arguments["x"]
    epochs = int(arguments.get("epochs", 1)) - int(arguments.get("initial_epoch", 0))
    losses = history.history.get("loss", [])
    if epochs <= 0:
        assert not losses
        return
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    if is_data_source(x):
        steps = joined(batches_of(x), accumulation)
        is_shuffled = isinstance(x, keras.utils.PyDataset) and arguments.get("shuffle", True)
    else:
        data = [arguments.get(name) for name in ("x", "y", "sample_weight", "class_weight")]
        batch = batch_of(*data)
        rows = len(tf.nest.flatten(batch[0])[0])
        held_out = float(arguments.get("validation_split", 0))
        if held_out and is_empty(arguments.get("validation_data")):
            rows = int(np.floor(rows * (1 - held_out)))
            batch = split(batch, rows)[0]
        rows = min(int(arguments.get("batch_size") or 32), rows)
        steps = split(batch, rows * accumulation)
        is_shuffled = bool(arguments.get("shuffle", True))
    is_exhausted = hasattr(x, "__next__") and len(losses) == 1
    assert is_exhausted or len(losses) == epochs, f"{len(losses)} epochs"
    if (is_shuffled and len(steps) > 1) or len(losses) < epochs:
        return
    per_epoch = int(arguments.get("steps_per_epoch") or len(steps))
    parts = [steps[i : i + per_epoch] for i in range(0, len(steps), per_epoch)]
    trained = [step for epoch in range(epochs) for step in parts[epoch % len(parts)]]
    check_weights(kind, start, trained, trainer)


def judge_method(drawn, check):
    """Judges a call of a method; `check` takes kind, accumulation, first weights and result."""
    kind, accumulation, call = drawn
    trainer = restored_trainer(kind, accumulation)
    method = getattr(trainer, call.function.removeprefix("trainer."))
    arguments = call.values()
    start = trainer.model.get_weights()
    before = bytes_of(trainer)

    def check_result(result):
        if call.function != "trainer.fit":
            assert bytes_of(trainer) == before, "it moved something"
        check(kind, accumulation, start, trainer, result, call.values())

    judge(call, lambda: method(**arguments), check_result, lambda: bytes_of(trainer))


@fuzz(150)
@given(drawn=method_calls("fit"))
def test_fit(drawn):
    judge_method(drawn, check_fit)


def check_evaluate(kind, accumulation, start, trainer, logs, arguments):
    x = arguments["x"]
    if is_data_source(x):
        batches = batches_of(x)
    else:
        batch = batch_of(*[arguments.get(name) for name in ("x", "y", "sample_weight")])
        batches = split(batch, int(arguments.get("batch_size") or 32))
    if arguments.get("steps") is not None:
        batches = batches[: int(arguments["steps"])]
    reference = reference_model(kind)
    reference.set_weights(start)
    (batch,) = joined(batches, len(batches))
    expected = reference.test_on_batch(*batch, return_dict=True)["loss"]
    loss = logs["loss"] if isinstance(logs, dict) else np.ravel(logs)[0]
    np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-5)


EVALUATE = ("x", "y", "sample_weight", "batch_size", "verbose", "callbacks", "steps", "return_dict")


@fuzz(80)
@given(drawn=method_calls("evaluate", EVALUATE))
def test_evaluate(drawn):
    judge_method(drawn, check_evaluate)


@fuzz(60)
@given(drawn=method_calls("predict", ("x", "batch_size", "verbose", "callbacks", "steps")))
def test_predict(drawn):
    judge_method(drawn, lambda *results: None)


# Trainer

CALLABLE = codes("raises | lambda: None | lambda a, b, c: None | object | Holder | type")
NOTHING = ["None", "[None]", *EMPTY]
LOSSES = codes("""
    'mse' | 'mean_squared_error' | keras.losses.MeanSquaredError() | keras.losses.Huber(0.5)
    ['mae'] | keras.losses.mean_squared_error | 'log_cosh' | keras.losses.MeanSquaredError
    lambda y, p: tf.reduce_mean(tf.square(y - p), -1)
    keras.losses.MeanAbsoluteError(reduction='sum')
    keras.losses.MeanSquaredError(reduction='mean_with_sample_weight')
""")
BAD_LOSSES = codes("""
    'msee' | keras.losses.MeanSquaredError(reduction=None) | lambda y, p: tf.reduce_mean(y - p)
    lambda y: y | lambda y, p: None | lambda y, p: 'a' | lambda y, p: p[:1, 0]
    {'no such output': 'mse'} | keras.metrics.Mean() | 'adam' | keras.losses | ['mse', 'mae', 3]
    lambda y, p: tf.cast(p, tf.int32) | fa.LinearCrossEntropy('no such layer')
    keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=3)
""")
OPTIMIZERS = codes("""
    'sgd' | 'adam' | 'Adam' | keras.optimizers.SGD(0.1, momentum=0.9) | keras.optimizers.Adam(1e-2)
    keras.optimizers.RMSprop() | 'adamw' | keras.optimizers.Adagrad(0.1) | keras.optimizers.Lion()
    keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
""")
BAD_OPTIMIZERS = codes("""
    'adamm' | keras.optimizers.Adam | keras.optimizers.SGD(nan) | keras.optimizers.SGD(inf)
    keras.optimizers.Adam(gradient_accumulation_steps=2) | {'class_name': 'sgd'} | ['sgd']
    keras.optimizers.LossScaleOptimizer('sgd') | keras.losses.MeanSquaredError() | keras.optimizers
""")
METRICS = codes("""
    () | ['mae'] | [keras.metrics.MeanSquaredError()] | ['mse', 'mae'] | None
    [lambda y, p: tf.abs(y - p)]
""")
BAD_METRICS = codes("""
    ['accuracyy'] | [3] | [keras.metrics.MeanSquaredError] | {'no such output': 'mae'} | 'mae'
    [['mae', ['mse', 3]]] | [raises] | [lambda y: y] | [keras.optimizers.SGD()]
    keras.metrics.Mean() | [keras.layers.Dense(1)]
""")
BAD_MODELS = codes("""
    keras.Sequential | keras.layers.Dense(1) | 'model' | keras.Sequential() | keras.Model() | keras
    lambda x: x | keras.Sequential([keras.layers.Input((4,))])
    keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
""")
SCALES = codes("""
    'auto' | None | 8.0 | fa.NoLossScale() | fa.StaticLossScale(1024.)
    fa.DynamicLossScale(init_scale=64.)
""")
BAD_SCALES = codes("""
    'dynamic' | fa.DynamicLossScale | 1e-30 | keras.optimizers.LossScaleOptimizer('sgd')
    fa.StaticLossScale
""")
ODD_WEIGHTS = [*NOTHING, *REAL, *BOOLS, "0", "-0.0", "range(3)"]
ZERO_ONE = ("0", "1")

TABLE = {
    "model": Values(
        codes("model('regression') | model('subclassed') | Subclassed()"),
        [*ANYTHING, *BAD_MODELS * 2],
    ),
    "optimizer": Values(OPTIMIZERS, [*without("None"), *BAD_OPTIMIZERS * 2]),
    "loss": Values(LOSSES, [*without(*CALLABLE), *BAD_LOSSES * 2], CALLABLE),
    "metrics": Values(METRICS, [*without(*NOTHING), *BAD_METRICS * 2], NOTHING),
    "loss_weights": Values(
        ["None", "2.0", "[0.5]", "0.0", "-1.0"], without("-1", *ODD_WEIGHTS), ODD_WEIGHTS
    ),
    "weighted_metrics": Values(METRICS, [*without(*NOTHING), *BAD_METRICS], NOTHING),
    "gradient_accumulation_steps": count(1, 5),
    "loss_scale": Values(
        [*SCALES, numbers(1e-3, 1e6)], [*without("None", *REAL), *BAD_SCALES * 2], REAL
    ),
    "clip_norm": Values(["None", numbers(1e-3, 1e3)], without("None", *REAL), REAL),
    "fp32_weight_gradients": BOOL,
    "flash_attention": Values(["'auto'", "True"], without(*BOOLS, *ZERO_ONE), BOOLS),
    "jit_compile": Values(["False"], without(*BOOLS)),
    "steps_per_execution": count(1, 3),
    "on_nonfinite": Values(["'skip'", "'raise'"], [*ANYTHING, "'skipp'", "['skip']"]),
    "shard_optimizer": Values(["'auto'", "False"], without(*BOOLS, *ZERO_ONE), BOOLS),
    # Of a model's own loss, which these models do not have.
    "own_loss_reduction": Values([], [*ANYTHING, "'none'"]),
}
REQUIRED = ("model", "optimizer", "loss", "jit_compile")
ROWS = 12


def train(**arguments):
    """Makes a Trainer and trains it for an epoch."""
    trainer = fa.Trainer(**arguments)
    x = inputs("regression", ROWS)
    y = targets("regression", ROWS)
    trainer.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    return trainer


def check_trainer(trainer, arguments):
    """Compares with Keras's own step on the full batches, with Keras's own clipping."""
    made = arguments["model"]
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    if not made.built:
        return  # its first weights are drawn as it is built
    optimizer = keras.optimizers.get(arguments["optimizer"])
    config = optimizer.get_config()
    if arguments.get("clip_norm") is not None:
        config["global_clipnorm"] = float(arguments["clip_norm"])
    loss_weights = arguments.get("loss_weights")
    made.compile(
        type(optimizer).from_config(config),
        arguments["loss"],
        loss_weights=None if loss_weights == () else loss_weights,
        auto_scale_loss=False,
        run_eagerly=True,
    )
    batch = batch_of(inputs("regression", ROWS), targets("regression", ROWS))
    for step in split(batch, 2 * int(arguments.get("gradient_accumulation_steps", 1))):
        made.train_on_batch(*step)
    for result, expected in zip(trainer.model.get_weights(), made.get_weights(), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-4)


@st.composite
def trainer_calls(draw):
    table = {name: values for name, values in TABLE.items() if values.valid}
    if draw(st.integers(0, 9)) == 0:
        table["own_loss_reduction"] = Values(TABLE["own_loss_reduction"].bad)
        call = draw(calls("train", table, [*REQUIRED, "own_loss_reduction"], names=("x", "y")))
        return call._replace(bad=(*call.bad, "own_loss_reduction"))
    call = draw(calls("train", table, REQUIRED, names=("x", "y")))
    if draw(st.integers(0, 49)) == 0:
        call.arguments["modle"] = "1"
        return call._replace(bad=(*call.bad, "modle"))
    return call


@fuzz(40)
@given(call=trainer_calls())
def test_a_trainer(call):
    keras.utils.set_random_seed(1)
    arguments = call.values()
    made = arguments["model"]
    is_built = isinstance(made, keras.Model) and made.built
    known = list(made.variables) if is_built else []
    judge(
        call,
        lambda: train(**arguments),
        lambda trainer: check_trainer(trainer, call.values()),
        lambda: [variable.numpy().tobytes() for variable in known],
    )


# Options that are set on a Trainer


OPTIONS = [name for name in TABLE if name not in (*REQUIRED, "metrics", "loss_weights")]
OPTIONS = [name for name in OPTIONS if name != "weighted_metrics"] + ["jit_compile"]


@fuzz(100)
@given(name=st.sampled_from(OPTIONS), data=st.data())
def test_an_option_that_is_set(name, data):
    trainer, _ = trainer_and_start("regression", 2)
    values = TABLE[name]
    is_bad = data.draw(st.booleans())
    code = data.draw(code_of(values.bad if is_bad else [*values.valid, *values.odd] or ["'sum'"]))
    is_bad = is_bad and name != "jit_compile"
    call = Call("vars(trainer).update", {name: code}, bad=(name,) if is_bad else ())
    call = call._replace(setup="trainer = new_trainer('regression', 2)", may_refuse=True)
    (value,) = call.values().values()

    def options():
        return {option: repr(getattr(trainer, option)) for option in OPTIONS}

    before = options()
    value_before = getattr(trainer, name)

    def check(_):
        assert {**options(), name: None} == {**before, name: None}

    try:
        judge(
            call,
            lambda: setattr(trainer, name, value),
            check,
            lambda: (options(), bytes_of(trainer)),
        )
    finally:
        if options() != before:
            setattr(trainer, name, value_before)


# train_step


BAD_STACKS = codes("""
    {0}[:0] | {0}[:, :0] | {0}[0] | {0}[:, :-1] | {0}[None] | {0}.astype('complex64')
    {0}.astype(object) | {0}.tolist() | np.ma.masked_equal({0}, {0}.flat[0]) | {0}.ravel()
    [{0}, {0}, {0}] | {{'nothing': {0}}} | {0}.astype(str)
""")
ODD_STACKS = codes("""
    {0}.astype('float64') | tf.constant({0}) | ({0},) | {0}[..., None] | {0} * nan | {0} - 100
    {0} * 0 | {0}.astype('int8') | tf.Variable({0}) | keras.Variable({0}) | {0}[::-1]
    {0}.astype('>f4') | Lies({0}, 1) | {0} * 1e9
""")


@st.composite
def train_step_calls(draw):
    kind = draw(st.sampled_from([kind for kind in KINDS if kind != "legacy"]))
    micro_batches = draw(st.sampled_from([1, 2, 3]))
    rows = micro_batches * draw(st.sampled_from([1, 3]))
    table = {}
    for name, data in (
        ("x", f"inputs({kind!r}, {rows})"),
        ("y", f"targets({kind!r}, {rows})"),
        ("sample_weight", f"weights({rows})"),
    ):
        code = f"stacked({data}, {micro_batches})"
        keep = NOTHING if name == "sample_weight" else ()
        is_single = kind in SINGLE or name == "sample_weight"
        bad = [form.format(code) for form in BAD_STACKS] if is_single else []
        odd = [form.format(code) for form in ODD_STACKS] if is_single else []
        table[name] = Values([code], [*without(*keep), *bad * 3], [*odd * 2, *keep])
    parts = draw(calls("", table, ["x", "y"]))
    x = table["x"].valid[0]
    y = table["y"].valid[0]
    stack = f"({', '.join(parts.arguments.values())},)"
    bad = parts.bad
    odd = parts.odd
    if draw(st.integers(0, 6)) == 0:
        wrong = [*ANYTHING, x, f"({x},)", f"({x}, None)", f"({x}, {y}, {y}, 1)", f"(None, {y})"]
        stack = draw(code_of([*wrong, f"{{'x': {x}, 'y': {y}}}"]))
        bad = ("stack",)
    names = ("x", "y", "sample_weight", "train step")
    setup = f"trainer = new_trainer({kind!r}, 2)"
    return kind, Call("trainer.train_step", {"stack": stack}, bad, odd, names, setup)


@fuzz(80)
@given(drawn=train_step_calls())
def test_train_step(drawn):
    kind, call = drawn
    trainer = restored_trainer(kind, 2)
    start = trainer.model.get_weights()
    (stack,) = call.values().values()
    # A weight that is bad, but empty in this draw, is no weight.
    assume(call.bad != ("sample_weight",) or len(stack) == 3)

    def check(result):
        parts = []
        for part in call.values()["stack"]:
            if not is_empty(part):
                flat = tf.nest.map_structure(lambda a: a.reshape(-1, *a.shape[2:]), arrays_of(part))
                parts.append(flat)
        check_weights(kind, start, [parts], trainer)

    judge(call, lambda: trainer.train_step(stack), check, lambda: bytes_of(trainer))
