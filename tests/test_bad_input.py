"""Bad input: an error that names the culprit, its value and the remedy, before anything moves."""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

pytestmark = pytest.mark.long

RNG = np.random.default_rng(0)
ROWS = 12
X = RNG.normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(1, keepdims=True).astype("float32")
LABELS = RNG.integers(0, 3, size=ROWS)
IDS = RNG.integers(0, 7, size=(ROWS, 5))
nan, inf = float("nan"), float("inf")
# Keras says it in one way for a functional model and in another for a Sequential one.
WRONG_WIDTH = (
    r"(?s)expected (shape=\(None, 4\), found shape=\(\d+|axis -1 .* value 4, but received .*), 3\)"
)


def stacked(array, *shape):
    return array.reshape(*shape, *array.shape[1:])


def regressor():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])


def make_trainer(model=None, optimizer="adam", loss="mse", **options):
    return fa.Trainer(
        model or regressor(), optimizer, loss, **{"gradient_accumulation_steps": 2, **options}
    )


def bytes_of(trainer):
    state = [*trainer.model.variables, *trainer.optimizer.variables, *trainer.loss_scale.variables]
    return [v.numpy().tobytes() for v in state]


@contextlib.contextmanager
def refused(trainer, error, match):
    """The body raises `error`, and no weight, slot or counter of the built Trainer has moved by a
    bit.
    """
    before = bytes_of(trainer)
    with pytest.raises(error, match=match) as raised:
        yield
    assert type(raised.value) is error
    assert bytes_of(trainer) == before


@pytest.fixture(scope="module")
def trainer():
    """Built and trained once, so that slots are not zero."""
    built = make_trainer(jit_compile=False)
    built.fit(X, Y, batch_size=2, verbose=0)
    return built


# The Trainer's own arguments


def whole(name, at_least=1):
    rule = rf"must be a whole number of at least {at_least}"
    return [
        ({name: 0}, ValueError, rf"{name}=0 {rule}"),
        ({name: -2}, ValueError, rf"{name}=-2 {rule}"),
        ({name: 2.5}, ValueError, rf"{name}=2.5 {rule}"),
        ({name: nan}, ValueError, rf"{name}=nan {rule}"),
        ({name: "4"}, TypeError, rf"{name}='4' {rule}"),
        ({name: True}, TypeError, rf"{name}=True {rule}"),
    ]


@pytest.mark.parametrize(
    "options, error, match",
    [
        *whole("gradient_accumulation_steps"),
        *whole("steps_per_execution"),
        (
            {"clip_norm": 0.0},
            ValueError,
            r"clip_norm=0.0 must be a positive, finite number, or None",
        ),
        ({"clip_norm": -1.0}, ValueError, r"clip_norm=-1.0 must be a positive"),
        ({"clip_norm": nan}, ValueError, r"clip_norm=nan must be a positive, finite number"),
        ({"clip_norm": inf}, ValueError, r"clip_norm=inf must be a positive, finite number"),
        ({"clip_norm": np.float16(inf)}, ValueError, r"clip_norm=inf must be a positive, finite"),
        (
            {"clip_norm": "1"},
            TypeError,
            r"clip_norm='1' must be a positive, finite number, or None",
        ),
        ({"loss": None}, ValueError, r"loss=None.*Pass a Keras loss"),
        ({"loss": {}}, ValueError, r"has no loss of its own.*Pass a Keras loss"),
        ({"loss": "msee"}, ValueError, r"loss='msee' is not a Keras loss. Pass a name"),
        ({"loss": 3}, TypeError, r"loss=3 must be a Keras loss, its name, or fn"),
        ({"optimizer": "adamm"}, ValueError, r"optimizer='adamm' is not a name of keras.*'adam'"),
        ({"optimizer": 0.1}, TypeError, r"optimizer=0.1 is of type float: pass a Keras 3"),
        (
            {"optimizer": keras.optimizers.Adam},
            TypeError,
            r"optimizer=Adam is a class: (pass|call)",
        ),
        (
            {"metrics": ["accuracyy"]},
            ValueError,
            r"metrics='accuracyy' is not a Keras 3 metric. Pass a name",
        ),
        ({"metrics": [3]}, TypeError, r"metrics=3 must be a Keras 3 metric"),
        ({"weighted_metrics": ["mea"]}, ValueError, r"'mea' is not a Keras 3 metric"),
        (
            {"model": "resnet"},
            TypeError,
            r"model='resnet' is not a Keras model: pass a keras.Model",
        ),
        ({"model": keras.Sequential}, TypeError, r"is not a Keras model: pass"),
        ({"model": keras.layers.Dense(1)}, TypeError, r"is not a Keras model: pass"),
        (
            {"loss_scale": "dynamic"},
            TypeError,
            r"loss_scale='dynamic' must be 'auto', a number, or one of",
        ),
        ({"loss_scale": -2.0}, ValueError, r"loss_scale=-2.0 must be a positive"),
        ({"jit_compile": "yes"}, ValueError, r"jit_compile='yes' must be 'auto' or True or False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_trainer_refuses(options, error, match):
    with pytest.raises(error, match=match) as raised:
        make_trainer(**options)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "make, match",
    [
        (
            lambda: keras.optimizers.Adam(gradient_accumulation_steps=4),
            r"Adam has gradient_accumulation_steps=4.*pass .*gradient_accumulation_steps=4",
        ),
        (
            lambda: keras.optimizers.Adam(loss_scale_factor=8.0),
            r"Adam has loss_scale_factor=8.0.*pass .*loss_scale=fastaccum.StaticLossScale\(8.0\)",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
            r"LossScaleOptimizer scales the loss.*pass the optimizer inside it.*loss_scale=",
        ),
    ],
    ids=["accumulates", "scales", "LossScaleOptimizer"],
)
def test_an_optimizer_that_does_the_steps_work_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make_trainer(optimizer=make())


def test_an_optimizer_of_other_variables_is_refused(trainer):
    other = make_trainer(optimizer=trainer.optimizer, jit_compile=False)
    with refused(trainer, ValueError, r"Adam was built on other variables.*make a new"):
        other.fit(X, Y, verbose=0)


def test_a_model_without_trainable_variables_is_refused():
    model = regressor()
    model.trainable = False
    with pytest.raises(
        ValueError, match=r"model '.*' has no trainable variables: there is nothing"
    ):
        make_trainer(model).fit(X, Y, verbose=0)


# The arguments of fit and evaluate


@pytest.mark.parametrize(
    "options, error, match",
    [
        *whole("batch_size"),
        *whole("epochs"),
        *whole("steps_per_epoch"),
        *whole("validation_freq"),
        (
            {"initial_epoch": -1},
            ValueError,
            r"initial_epoch=-1 must be a whole number of at least 0",
        ),
        (
            {"validation_split": -0.1},
            ValueError,
            r"validation_split=-0.1 must be a number of at least 0 and below 1",
        ),
        (
            {"validation_split": 1.0},
            ValueError,
            r"validation_split=1.0 must be a number of at least 0 and below 1",
        ),
        (
            {"validation_split": nan},
            ValueError,
            r"validation_split=nan must be a number of at least 0 and below 1",
        ),
        (
            {"validation_split": 0.99},
            ValueError,
            r"validation_split=0.99 of 12 rows leaves one side empty",
        ),
        (
            {"validation_split": "half"},
            TypeError,
            r"validation_split='half' must be a number of at least 0 and below 1",
        ),
        ({"validation_data": (X, Y[:5])}, ValueError, r"different numbers of rows: .*12.*5"),
        ({"validation_data": (X[:0], Y[:0])}, ValueError, r"x is empty"),
        (
            {"validation_data": (X, Y), "validation_steps": 0},
            ValueError,
            r"validation_steps=0 must be a whole number",
        ),
        (
            {"validation_data": (X, Y), "validation_batch_size": 0},
            ValueError,
            r"batch_size=0 must be a whole number",
        ),
        (
            {"class_weight": [1.0, 2.0]},
            TypeError,
            r"class_weight=\[1.0, 2.0\] must map class indices",
        ),
        ({"class_weight": {"cat": 2.0}}, TypeError, r"class_weight=.*'cat': 2.0 does not"),
        ({"class_weight": {0: nan}}, ValueError, r"class_weight=.*0: nan does not"),
        ({"class_weight": {-1: 1.0}}, ValueError, r"class_weight=.*-1: 1.0 does not"),
        ({"shuffle": "batch"}, TypeError, r"shuffle='batch' must be True or False"),
        (
            {"callbacks": ["early stopping"]},
            TypeError,
            r"callbacks holds 'early stopping': pass keras.callbacks",
        ),
        ({"sample_weight": np.ones(5)}, ValueError, r"different numbers of rows: .*12.*5"),
        (
            {"sample_weight": np.ones((ROWS, 3))},
            ValueError,
            r"sample_weight of shape .* does not fit losses of shape",
        ),
    ],
    ids=lambda value: str(list(value.items())[-1]) if isinstance(value, dict) else "",
)
def test_fit_refuses(trainer, options, error, match):
    with refused(trainer, error, match):
        trainer.fit(X, Y, **{"verbose": 0, "batch_size": 2, **options})


@pytest.mark.parametrize(
    "options, error, match",
    [
        *whole("batch_size"),
        *whole("steps"),
        ({"return_dict": "yes"}, TypeError, r"return_dict='yes' must be True or False"),
        ({"return_dict": np.zeros(2)}, TypeError, r"return_dict=array.* must be True or False"),
        (
            {"callbacks": {1: 2, "a": 3}},
            TypeError,
            r"callbacks is a dict that cannot be taken apart",
        ),
        ({"callbacks": [3]}, TypeError, r"callbacks holds 3"),
        ({"sample_weight": np.ones(5)}, ValueError, r"different numbers of rows"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_evaluate_refuses(trainer, options, error, match):
    with refused(trainer, error, match):
        trainer.evaluate(X, Y, **{"verbose": 0, **options})


@pytest.mark.parametrize(
    "options, error, match",
    [
        *whole("batch_size"),
        *whole("steps"),
        ({"verbose": "loud"}, ValueError, r"verbose='loud' must be 'auto'"),
        ({"callbacks": 3}, TypeError, r"callbacks holds 3: pass keras.callbacks"),
        ({"x": None}, ValueError, r"x=None: there is no data"),
        ({"x": ()}, ValueError, r"x=\(\) holds no array"),
        ({"x": 2j}, ValueError, r"^x \(complex\): Unrecognized data type"),
        ({"x": np.array(3.0)}, ValueError, r"x=array\(3.\) is a scalar"),
        ({"x": np.array([{}, 1])}, TypeError, r"x has dtype object"),
        ({"x": np.zeros((2, 0))}, ValueError, r"^x \(ndarray\): |called with x \(ndarray\): "),
        ({"x": X[:0]}, ValueError, r"^x is empty: it has 0 rows"),
        ({"x": X[:, :3]}, ValueError, WRONG_WIDTH),
        ({"x": memoryview(X)}, TypeError, r"x is a memoryview that cannot be taken apart"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_predict_refuses(trainer, options, error, match):
    with refused(trainer, error, match):
        trainer.predict(**{"x": X, "verbose": 0, **options})


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"stage": "mlir"}, ValueError, r"stage='mlir' must be 'hlo'"),
        ({"stage": 3}, ValueError, r"stage=3 must be 'hlo'"),
        ({"stack": (memoryview(X), Y)}, TypeError, r"x is a memoryview that cannot be taken apart"),
        (
            {"stack": (stacked(X, 3, 4), {1: 2, "a": 3})},
            TypeError,
            r"y is a dict that cannot be taken apart",
        ),
    ],
    ids=["stage", "number", "memoryview", "dict"],
)
def test_compiler_ir_refuses(trainer, options, error, match):
    with refused(trainer, error, match):
        trainer.compiler_ir(**{"stack": (stacked(X, 3, 4), stacked(Y, 3, 4)), **options})


# Arrays


def ragged():
    return tf.ragged.constant([[1.0], [2.0, 3.0]] * 6)


@pytest.mark.parametrize(
    "x, y, error, match",
    [
        (X[:0], Y[:0], ValueError, r"x is empty: it has 0 rows"),
        (
            X,
            Y[:7],
            ValueError,
            r"x, y and sample_weight have different numbers of rows: .*12.*7.*Pass one of each",
        ),
        (X, None, ValueError, r"y=None: arrays need targets"),
        (None, None, ValueError, r"x=None: there is no data"),
        (None, Y, ValueError, r"x=None: there is no data"),
        (X[:, :3], Y, ValueError, WRONG_WIDTH),
        (
            ragged(),
            Y,
            TypeError,
            r"x holds a RaggedTensor: the rows of a stack have one shape. Pad them",
        ),
        (np.array(["a"] * ROWS), Y, TypeError, r"x has dtype <U1: pass numbers"),
        (np.array([b"a"] * ROWS), Y, TypeError, r"x has dtype .*: pass numbers"),
        (np.array([{}] * ROWS), Y, TypeError, r"x has dtype object: pass numbers"),
        (tf.constant(["a"] * ROWS), Y, TypeError, r"x has dtype .*string.*: pass numbers"),
        ("text.txt", Y, TypeError, r"x holds 'text.txt' \(str\); pass arrays"),
        (
            [1.0, 2.0],
            [3.0, 4.0],
            TypeError,
            r"x holds 1.0 \(float\); pass arrays, such as np.asarray",
        ),
        (3, Y, TypeError, r"x holds 3 \(int\); pass arrays"),
        (
            np.float32(3.0),
            Y,
            ValueError,
            r"x=.*3.0.* is a scalar: the first axis must count examples",
        ),
        (X, np.array([None] * ROWS), TypeError, r"y has dtype object"),
        (X, [Y, Y], ValueError, r"y has 2 entries for the 1 outputs"),
        (X, {"other": Y}, ValueError, r"y names \['other'\], but the model's outputs are"),
        (object(), Y, ValueError, r"x \(object\) yields y"),
        (keras.KerasTensor((ROWS, 4)), Y, ValueError, r"^x: A KerasTensor is symbolic"),
        (memoryview(X), Y, TypeError, r"x is a memoryview that cannot be taken apart"),
        (X, {1: Y, "a": Y}, TypeError, r"y is a dict that cannot be taken apart"),
    ],
    ids=lambda value: (
        f"{type(value).__name__}{list(np.shape(value))}" if hasattr(value, "shape") else ""
    ),
)
@pytest.mark.parametrize("built", [True, False])
def test_arrays_that_do_not_fit(trainer, x, y, error, match, built):
    """Refuses arrays both if the program exists and in a first call."""
    if not built:
        trainer = make_trainer(jit_compile=False)
        trainer._optimizer.build(trainer.model.trainable_variables)
    before = bytes_of(trainer)
    with pytest.raises(error, match=match):
        trainer.fit(x, y, batch_size=2, verbose=0)
    assert bytes_of(trainer) == before


# Datasets and generators


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


def batches(count):
    for _ in range(count):
        yield X[:2], Y[:2]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:2], Y[:2]


def used_up():
    generator = batches(1)
    next(generator)
    return generator


def distributed():
    return tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(
        dataset(X, Y).batch(2)
    )


@pytest.mark.parametrize(
    "make, options, error, match",
    [
        (
            lambda: dataset(X, Y),
            {},
            ValueError,
            r"x \(\w+\) is not batched|Call .batch\(batch_size\)",
        ),
        (
            lambda: dataset(Y[:, 0], Y[:, 0]),
            {},
            ValueError,
            r"is not batched: it yields scalars.*Call .batch",
        ),
        (
            lambda: dataset(X, Y).batch(2).repeat(),
            {},
            ValueError,
            r"x \(\w+\) is infinite: pass steps_per_epoch",
        ),
        (
            lambda: dataset(X[:0], Y[:0]).batch(2),
            {},
            ValueError,
            r"x \(\w+\) is empty: it has no batch",
        ),
        (
            lambda: dataset(X, Y).batch(2).filter(lambda *_: False),
            {},
            ValueError,
            r"yielded no batch",
        ),
        (lambda: dataset(X).batch(2), {}, ValueError, r"yields no targets: it must yield \(x, y\)"),
        (
            lambda: dataset(X, Y).batch(2),
            {"y": Y},
            ValueError,
            r"yields y and sample_weight itself: leave them out",
        ),
        (lambda: dataset(X, Y).batch(2), {"sample_weight": Y}, ValueError, r"leave them out"),
        (
            lambda: dataset(X, Y).batch(2),
            {"validation_split": 0.2},
            ValueError,
            r"validation_split=0.2 needs arrays",
        ),
        (
            lambda: dataset(ragged(), Y).batch(2),
            {},
            TypeError,
            r"yields Ragged.*the rows of a stack have one shape. Pad them",
        ),
        (
            lambda: dataset(["a"] * ROWS, Y).batch(2),
            {},
            TypeError,
            r"yields dtype string: pass numbers",
        ),
        (lambda: dataset(X[:, :3], Y).batch(2), {}, ValueError, WRONG_WIDTH),
        (lambda: batches(0), {}, ValueError, r"empty|no batch|no data"),
        (used_up, {}, ValueError, r"empty|no batch|no data"),
        (lambda: Batches(), {"y": Y}, ValueError, r"leave them out"),
        (distributed, {}, TypeError, r"x is a DistributedDataset: pass the tf.data.Dataset itself"),
    ],
)
def test_datasets_that_do_not_fit(trainer, make, options, error, match):
    with refused(trainer, error, match):
        trainer.fit(make(), **{"verbose": 0, **options})


def test_a_batch_of_unequal_lengths_is_refused(trainer):
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    unequal = tf.data.Dataset.from_generator(lambda: iter([(X[:3], Y[:2])]), output_signature=spec)
    with refused(trainer, ValueError, r"different numbers of rows: .*3.*2"):
        trainer.fit(unequal, verbose=0)


# Stacks


@pytest.mark.parametrize(
    "stack, error, match",
    [
        (
            (stacked(X, 3, 4), stacked(Y, 4, 3)),
            ValueError,
            r"different leading axes: shapes=.*3, 4.*4, 3",
        ),
        (
            (stacked(X, 3, 4), stacked(Y, 3, 4)[:, :2]),
            ValueError,
            r"the same first two axes.*\(3, 4, 4\), \(3, 2, 1\)",
        ),
        (
            (X, Y[:, 0]),
            ValueError,
            r"Every tensor of a stack has shape \[micro-batches, rows, ...\]",
        ),
        ((stacked(X, 3, 4)[:0], stacked(Y, 3, 4)[:0]), ValueError, r"micro-batches of at least 1"),
        (
            (stacked(X, 3, 4)[:, :0], stacked(Y, 3, 4)[:, :0]),
            ValueError,
            r"\[micro-batches, rows, ...\]",
        ),
        (
            (stacked(X, 3, 4),),
            ValueError,
            r"takes \(x, y\) or \(x, y, sample_weight\); got tuple of 1 entries",
        ),
        (stacked(X, 3, 4), ValueError, r"takes \(x, y\) or \(x, y, sample_weight\); got ndarray"),
        ((stacked(X, 3, 4), None), ValueError, r"y=None|targets"),
        ((stacked(X[:, :3], 3, 4), stacked(Y, 3, 4)), ValueError, WRONG_WIDTH),
        (
            (stacked(X, 3, 4), stacked(Y, 3, 4), np.ones((3, 2))),
            ValueError,
            r"the same first two axes",
        ),
        (
            (stacked(X, 3, 4), stacked(Y, 3, 4), np.ones((3, 4, 3))),
            ValueError,
            r"sample_weight of shape",
        ),
        ((stacked(X, 3, 4).astype(object), stacked(Y, 3, 4)), TypeError, r"x has dtype object"),
        (({}, stacked(Y, 3, 4)), ValueError, r"x=\{\} holds no array"),
    ],
)
@pytest.mark.parametrize("built", [True, False])
def test_stacks_that_do_not_fit(trainer, stack, error, match, built):
    if not built:
        trainer = make_trainer(jit_compile=False)
        trainer._optimizer.build(trainer.model.trainable_variables)
    with refused(trainer, error, match):
        trainer.train_step(stack)


# Losses


def test_a_loss_without_reduction_is_refused():
    trainer = make_trainer(loss=keras.losses.MeanSquaredError(reduction=None))
    with pytest.raises(ValueError, match=r"reduction=None.*Pass reduction='sum_over_batch_size'"):
        trainer.fit(X, Y, verbose=0)


def test_a_loss_for_no_output_is_refused():
    trainer = make_trainer(loss={"no such output": "mse"})
    with pytest.raises(
        ValueError, match=r"loss names \['no such output'\], but the model's outputs are"
    ):
        trainer.fit(X, Y, verbose=0)


# Labels and ids: XLA would clamp them


@pytest.fixture(scope="module")
def reader():
    """Ids in, labels out, compiled, and trained once."""
    layers = [keras.Input((5,)), keras.layers.Embedding(7, 3, name="words"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3, name="head")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built = make_trainer(model, loss=loss)
    built.fit(IDS, LABELS.astype("float32"), batch_size=2, verbose=0)
    built.evaluate(IDS, LABELS.astype("float32"), batch_size=2, verbose=0)
    return built


def with_one(array, value):
    changed = array.astype("float32")
    changed[-1] = value
    return changed


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int64", 3),
        ("float32", -1),
        pytest.param("uint8", 100, marks=pytest.mark.slow),  # each dtype is a program of its own
        *(pytest.param("float32", value, marks=pytest.mark.slow) for value in (3, 100)),
        *(pytest.param("int64", value, marks=pytest.mark.slow) for value in (100, -1)),
    ],
)
def test_labels_outside_the_classes(reader, value, dtype):
    labels = with_one(LABELS, value).astype(dtype)
    match = rf"labels of output 'head': values from {min(value, 0)} to {max(value, 2)} were seen, but only 0 to 2 exist"
    start = bytes_of(reader)
    with refused(reader, ValueError, match):
        # One train step: the bad label is in it.
        reader.train_step((stacked(IDS, 2, 6), stacked(labels, 2, 6)))
    with refused(reader, ValueError, match):
        reader.fit(IDS, labels, batch_size=6, verbose=0)
    with refused(reader, ValueError, match):
        reader.evaluate(IDS, labels, batch_size=6, verbose=0)
    assert bytes_of(reader) == start
    reader.evaluate(IDS, LABELS.astype("float32"), batch_size=2, verbose=0)  # one error says it all


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_indices_out_of_range_without_xla(reader, steps_per_execution):
    """TensorFlow itself fails then, in the middle of a step."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"jit_compile": False, "steps_per_execution": steps_per_execution}
    trainer = make_trainer(keras.models.clone_model(reader.model), loss=loss, **options)
    trainer._optimizer.build(trainer.model.trainable_variables)
    for value, match in (
        (7, r"values from 0 to 7 were seen, but only 0 to 2 exist"),
        (nan, r"whole"),
    ):
        labels = with_one(LABELS, value)
        with refused(trainer, ValueError, match):
            trainer.fit(IDS, labels, batch_size=6, verbose=0)
        with refused(trainer, ValueError, match):
            trainer.evaluate(IDS, labels, verbose=0)
        with refused(trainer, ValueError, match):
            trainer.train_step((stacked(IDS, 2, 6), stacked(labels, 2, 6)))
    with refused(
        trainer,
        ValueError,
        r"ids given to embedding 'words': values from 3 to 9 were seen, but only 0 to 6",
    ):
        trainer.train_step((stacked(IDS + 3, 2, 6), stacked(LABELS, 2, 6)))
    # what was seen before is not this one's
    trainer.train_step((stacked(IDS, 2, 6), stacked(LABELS, 2, 6)))


@pytest.mark.parametrize("value", [7, 300, -1])
def test_an_id_out_of_range_in_the_second_micro_batch_moves_no_statistics(value):
    layers = keras.layers
    kinds = [
        layers.Embedding(7, 4, name="words"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Flatten(),
    ]
    trainer = make_trainer(
        keras.Sequential([keras.Input((3,), dtype="int32"), *kinds, layers.Dense(1)]),
        jit_compile=False,
    )
    ids, labels = np.arange(36).reshape(2, 6, 3) % 7, np.ones((2, 6, 1), "float32")
    trainer.train_step((ids, labels))
    ids[1, 2, 1] = value
    with refused(
        trainer,
        ValueError,
        rf"embedding 'words': values from {min(value, 0)} to {max(value, 6)} were seen",
    ):
        trainer.train_step((ids, labels))
    trainer.train_step((ids % 7, labels))


@pytest.mark.parametrize("value", [nan, inf, 1.5, -0.5])
def test_labels_that_are_no_whole_numbers(reader, value):
    with refused(reader, ValueError, r"labels of output 'head'"):
        reader.fit(IDS, with_one(LABELS, value), batch_size=6, verbose=0)


@pytest.mark.parametrize("value", [7, -1])
def test_ids_outside_an_embedding(reader, value):
    ids = IDS.copy()
    ids[3, 2] = value
    match = rf"ids given to embedding 'words': values from {min(value, 0)} to {max(value, 6)} .* only 0 to 6 exist"
    labels = LABELS.astype("float32")
    with refused(reader, ValueError, match):
        reader.train_step((stacked(ids, 2, 6), stacked(labels, 2, 6)))
    with refused(reader, ValueError, match):
        reader.fit(ids, labels, batch_size=6, verbose=0)
    with refused(reader, ValueError, match):
        reader.evaluate(ids, labels, batch_size=6, verbose=0)


def test_no_step_after_a_bad_label_is_applied(reader):
    """The error comes a step late; what was dispatched in between has changed nothing."""
    labels = LABELS.astype("float32")
    labels[4] = 9  # in the second of three steps
    updates = int(reader.optimizer.iterations)
    with pytest.raises(ValueError, match=r"values from 0 to 9 were seen"):
        reader.fit(IDS, labels, batch_size=2, verbose=0, shuffle=False)
    assert int(reader.optimizer.iterations) == updates + 1


def test_bad_validation_labels_are_found(reader):
    with pytest.raises(ValueError, match=r"labels of output 'head': values from 0 to 5"):
        reader.fit(
            IDS,
            LABELS.astype("float32"),
            batch_size=2,
            verbose=0,
            validation_data=(IDS, with_one(LABELS, 5)),
        )


# Layers that XLA cannot compile


def test_a_layer_that_says_so_is_named():
    inputs = keras.Input((4,), dtype="int64")
    hashed = keras.layers.Hashing(5, name="hasher")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hashed))
    with pytest.raises(
        ValueError, match=r"XLA cannot compile.*hasher \(Hashing\).*dataset.map.*jit_compile=False"
    ):
        make_trainer(model, jit_compile=True)


def test_a_layer_that_says_so_in_an_unbuilt_model_is_named():
    class Late(keras.Model):
        def build(self, shape):
            self.hasher = keras.layers.Hashing(5, name="hasher")
            self.head = keras.layers.Dense(1)

        def call(self, x):
            return self.head(keras.ops.cast(self.hasher(keras.ops.cast(x, "int64")), "float32"))

    with pytest.raises(ValueError, match=r"hasher \(Hashing\)"):
        make_trainer(Late(), jit_compile=True).fit(X, Y, verbose=0)


def through_text(x):
    return tf.ensure_shape(tf.strings.to_number(tf.strings.as_string(x)), x.shape)


def through_a_count(x):
    whole = tf.cast(tf.abs(x), tf.int32)
    return tf.ensure_shape(
        tf.math.bincount(whole, minlength=4, maxlength=4, dtype=tf.float32, axis=-1), x.shape
    )


OP_UNKNOWN = r"XLA cannot compile this.* in culprit \(Lambda\).*dataset.map.*jit_compile=False.*(AsString|bin)"


@pytest.mark.parametrize(
    "function", [through_text, pytest.param(through_a_count, marks=pytest.mark.slow)]
)
def test_a_layer_with_an_op_that_xla_has_not_is_named(function):
    inputs = keras.Input((4,))
    outputs = keras.layers.Lambda(function, output_shape=(4,), name="culprit")(inputs)
    trainer = make_trainer(keras.Model(inputs, keras.layers.Dense(1)(outputs)))
    trainer._optimizer.build(trainer.model.trainable_variables)
    with refused(trainer, ValueError, OP_UNKNOWN):
        trainer.fit(X, Y, batch_size=4, verbose=0)
    plain = make_trainer(trainer.model, jit_compile=False)
    # the remedy helps
    assert np.isfinite(plain.fit(X, Y, batch_size=4, verbose=0).history["loss"]).all()


def test_layers_that_keras_would_recompute_are_named():
    with keras.RematScope("full"):
        dropped, dense = (
            keras.layers.Dropout(0.5, name="dropped"),
            keras.layers.Dense(3, name="recomputed"),
        )
    with keras.RematScope("list_of_layers", layer_names=["second"]):
        first, second = (
            keras.layers.Dense(3, "tanh", name="first"),
            keras.layers.Dense(3, name="second"),
        )
    with keras.RematScope("activations"):
        fine = keras.layers.Dense(3, "tanh")
    for layer, message in (
        (dropped, r"dropped \(Dropout\)"),
        (dense, r"recomputed \(Dense\)"),
        (second, "^second "),
    ):
        model = keras.Sequential([keras.Input((4,)), first, layer, keras.layers.Dense(1)])
        trainer = make_trainer(model)
        trainer._optimizer.build(trainer.model.trainable_variables)
        with refused(trainer, ValueError, rf"{message}.*RematScope.*call fa\.remat\(model\)"):
            trainer.fit(X, Y, batch_size=4, verbose=0)
    make_trainer(keras.Sequential([keras.Input((4,)), first, fine, keras.layers.Dense(1)])).fit(
        X, Y, verbose=0
    )


# What Keras takes without a word: exactly right here, or refused


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


def scattered(array):
    wide = np.zeros((2 * len(array), 2 * array.shape[1]), array.dtype)
    wide[::2, ::2] = array
    return wide[::2, ::2]


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


class Frame:
    """An array-like, as data frames and other libraries' tensors are."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.fixture(scope="module")
def memory_mapped(tmp_path_factory):
    path = tmp_path_factory.mktemp("arrays") / "x.npy"
    np.save(path, X)
    return np.load(path, mmap_mode="r")


@pytest.fixture(scope="module")
def replay(trainer):
    """Fits from the same start each time, and returns the weights after it."""
    start = [tf.identity(v) for v in (*trainer.model.variables, *trainer.optimizer.variables)]

    def fit(x=X, y=Y, **options):
        for variable, value in zip(
            (*trainer.model.variables, *trainer.optimizer.variables), start, strict=True
        ):
            variable.assign(value)
        trainer.fit(x, y, **{"batch_size": 2, "verbose": 0, "shuffle": False, **options})
        return bytes_of(trainer)

    return fit


class StopsAtOnce(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


EXACT = {
    "non-contiguous": {"x": scattered(X)},
    "negative strides": {"x": backwards(X), "y": backwards(Y)},
    "column-major": {"x": np.asfortranarray(X)},
    "read-only": {"x": read_only(X), "y": read_only(Y)},
    "big-endian": {
        "x": X.astype(">f4"),
        "y": Y.astype(">f4"),
        "sample_weight": np.ones(ROWS, ">f8"),
    },
    "float64": {"x": X.astype("float64"), "y": Y.astype("float64")},
    "a matrix": {"x": np.asmatrix(X)},
    "masked, but nothing is": {"x": np.ma.masked_array(X, False)},
    "array-likes": {"x": Frame(X), "y": Frame(Y)},
    "tensors and variables": {"x": tf.constant(X), "y": keras.Variable(Y)},
    "lists of one array": {"x": [X], "y": (Y,)},
    "targets without their axis of 1": {"y": Y[:, 0]},
    "targets with another axis of 1": {"y": Y[..., None]},
    "weights as bools": {"sample_weight": np.ones(ROWS, bool)},
    "weights as whole numbers": {"sample_weight": np.ones((ROWS, 1), int)},
    "a batch size of NumPy's": {"batch_size": np.int64(2)},
    "epochs of NumPy's": {"epochs": np.uint8(1)},
    "a whole float": {"batch_size": 2.0},
    "endless epochs with a stop": {"epochs": 10**12, "callbacks": [StopsAtOnce()]},
    "factors of NumPy's": {"class_weight": {np.int64(50): np.float32(2)}},
    "a class that no label has": {"class_weight": {2**40: 2.0}},
    "no callbacks": {"callbacks": []},
    "a tuple of callbacks": {"callbacks": ()},
    "validation epochs as a set": {"validation_freq": {1}, "validation_data": (X, Y)},
}


@pytest.mark.parametrize("case", EXACT)
def test_unusual_inputs_that_work_exactly(replay, case):
    assert replay(**EXACT[case]) == replay()


def test_memory_mapped_arrays_work_exactly(replay, memory_mapped):
    assert replay(memory_mapped) == replay()


@pytest.mark.parametrize("size", [ROWS + 1, 2**40, np.uint64(2**62)])
def test_a_micro_batch_larger_than_the_data_is_all_of_it(replay, size):
    assert replay(batch_size=size) == replay(batch_size=ROWS)


@pytest.mark.parametrize("steps", [ROWS, 2**40, np.int64(2**62)])
def test_more_micro_batches_than_there_are_make_one_step(steps):
    weights = []
    for accumulation in (steps, ROWS // 2):
        keras.utils.set_random_seed(0)
        trainer = make_trainer(gradient_accumulation_steps=accumulation, jit_compile=False)
        trainer.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
        assert int(trainer.optimizer.iterations) == 1
        weights.append(bytes_of(trainer))
    assert weights[0] == weights[1]


def masked(array):
    return np.ma.masked_array(array, array > 0)


@pytest.mark.parametrize(
    "options, error, match",
    [
        (
            {"x": masked(X)},
            TypeError,
            r"x is a masked array with \d+ masked elements.*fill them \(.filled",
        ),
        ({"y": masked(Y)}, TypeError, r"y is a masked array with \d+ masked elements"),
        (
            {"sample_weight": np.ma.masked_array(np.ones(ROWS), np.arange(ROWS) < 2)},
            TypeError,
            r"with 2 masked elements",
        ),
        ({"x": X.astype("complex64")}, TypeError, r"x has dtype complex64: pass numbers"),
        ({"y": Y.astype("complex128")}, TypeError, r"y has dtype complex128"),
        ({"x": X.astype("datetime64[s]")}, TypeError, r"x has dtype datetime64\[s\]: pass numbers"),
        (
            {"x": X.astype("timedelta64[s]")},
            TypeError,
            r"x has dtype timedelta64\[s\]: pass numbers",
        ),
        (
            {"x": X.astype("longdouble")},
            TypeError,
            r"x has dtype float\d+|longdouble: pass numbers",
        ),
        ({"x": X.astype(object)}, TypeError, r"x has dtype object: pass numbers"),
        (
            {"x": np.rec.fromarrays([X[:, 0], X[:, 1]])},
            TypeError,
            r"x has dtype .*record.*: pass numbers",
        ),
        ({"x": X.tolist()}, TypeError, r"x holds .* \(float\); pass arrays"),
        ({"x": []}, ValueError, r"x=\[\] holds no array"),
        ({"x": {}}, ValueError, r"x=\{\} holds no array"),
        ({"x": [None]}, TypeError, r"x holds None \(NoneType\); pass arrays"),
        ({"y": [None]}, ValueError, r"Output '.*' has a loss but no target: y holds \[\]"),
        (
            {"x": [X, X]},
            ValueError,
            r"x has 2 arrays, but the model has 1 inputs: pass one for each",
        ),
        ({"x": X[:, 0]}, ValueError, r"(?si)expected .*(2,|axis)"),
        ({"x": X[:, :0]}, ValueError, r"(?si)expected .*(0\)|axis)"),
        ({"y": Y[:, :0]}, ValueError, r"y has shape \(2, 0\) and the predictions have \(2, 1\)"),
        (
            {"y": np.c_[Y, Y]},
            ValueError,
            r"y has shape \(2, 2\) .* \(2, 1\) .*'mean_squared_error' compares element",
        ),
        ({"y": np.array(3.0)}, ValueError, r"y=.*3.* is a scalar"),
        ({"sample_weight": 2.0}, TypeError, r"sample_weight holds 2.0 \(float\)"),
        (
            {"sample_weight": [1.0] * ROWS},
            TypeError,
            r"sample_weight holds 1.0 \(float\); pass arrays",
        ),
        (
            {"sample_weight": np.ones(ROWS, complex)},
            TypeError,
            r"sample_weight has dtype complex128",
        ),
        (
            {"sample_weight": [np.ones(ROWS)] * 2},
            ValueError,
            r"sample_weight has 2 entries for the 1 outputs",
        ),
        (
            {"sample_weight": {"other": np.ones(ROWS)}},
            ValueError,
            r"sample_weight names \['other'\]",
        ),
        (
            {"sample_weight": tf.ragged.constant([[1.0]] * ROWS)},
            TypeError,
            r"sample_weight holds a RaggedTensor",
        ),
        (
            {"batch_size": 10**400},
            ValueError,
            r"batch_size must be a whole number of at least 1 and at most \d+",
        ),
        ({"batch_size": inf}, ValueError, r"batch_size=inf must be a whole number"),
        ({"batch_size": 2j}, TypeError, r"batch_size=2j must be a whole number"),
        ({"batch_size": [2]}, TypeError, r"batch_size=\[2\] must be a whole number"),
        ({"epochs": np.array(1)}, TypeError, r"epochs=array\(1\) must be a whole number"),
        ({"epochs": np.True_}, TypeError, r"epochs=(np.)?True_? must be a whole number"),
        (
            {"steps_per_epoch": 2**63},
            ValueError,
            r"steps_per_epoch must be a whole number .* at most",
        ),
        ({"verbose": "loud"}, ValueError, r"verbose='loud' must be 'auto' or 0 or 1 or 2"),
        ({"verbose": 7}, ValueError, r"verbose=7 must be 'auto'"),
        ({"verbose": None}, ValueError, r"verbose=None must be 'auto'"),
        ({"validation_freq": []}, ValueError, r"validation_freq=\[\] names no epoch"),
        (
            {"validation_freq": [0]},
            ValueError,
            r"validation_freq=0 must be a whole number of at least 1",
        ),
        ({"validation_freq": ["1"]}, TypeError, r"validation_freq='1' must be a whole number"),
        ({"validation_freq": "12"}, TypeError, r"validation_freq='12' must be a whole number"),
        ({"validation_split": True}, TypeError, r"validation_split=True must be a number"),
        ({"validation_data": X}, ValueError, r"y=None: arrays need targets"),
        ({"validation_data": (X, Y, Y, Y)}, ValueError, r"`\(x, y, sample_weight\)`"),
        ({"validation_data": (X, Y, np.ones(3))}, ValueError, r"different numbers of rows"),
        ({"validation_data": (X[:, :3], Y)}, ValueError, WRONG_WIDTH),
        (
            {"validation_data": (X, np.c_[Y, Y])},
            ValueError,
            r"y has shape \(2, 2\) and the predictions have \(2, 1\)",
        ),
        ({"validation_data": (masked(X), Y)}, TypeError, r"x is a masked array"),
        (
            {"callbacks": [keras.callbacks.History]},
            TypeError,
            r"callbacks holds the class History: call it",
        ),
        (
            {"callbacks": keras.callbacks.History},
            TypeError,
            r"callbacks holds the class History: call it",
        ),
        ({"callbacks": [None]}, TypeError, r"callbacks holds None: pass keras.callbacks"),
        ({"callbacks": [lambda epoch, logs: None]}, TypeError, r"callbacks holds <function"),
        ({"class_weight": {}}, TypeError, r"class_weight=\{\} must map class indices"),
        ({"class_weight": {"0": 1.0}}, TypeError, r"'0': 1.0 does not"),
        ({"class_weight": {0.0: 1.0}}, TypeError, r"0.0: 1.0 does not"),
        ({"class_weight": {0: None}}, TypeError, r"0: None does not"),
        ({"class_weight": {0: inf}}, ValueError, r"0: inf does not"),
        ({"class_weight": {0: 1e39}}, ValueError, r"0: 1e\+39 does not"),
        ({"class_weight": {2**70: 1.0}}, ValueError, r"class_weight=.* does not"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_fit_refuses_what_it_cannot_take_as_meant(trainer, options, error, match):
    with refused(trainer, error, match):
        trainer.fit(**{"x": X, "y": Y, "verbose": 0, "batch_size": 2, "shuffle": False, **options})


def test_an_array_that_cannot_be_made_says_why(trainer):
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise OSError("the disk is gone")

    with refused(trainer, OSError, r"the disk is gone"):
        trainer.fit(Broken(), Y, verbose=0)


@pytest.mark.parametrize(
    "options, error, match",
    [
        (
            {"gradient_accumulation_steps": None},
            TypeError,
            r"gradient_accumulation_steps=None must be a whole number",
        ),
        (
            {"gradient_accumulation_steps": 10**400},
            ValueError,
            r"gradient_accumulation_steps must be .* at most",
        ),
        ({"clip_norm": True}, TypeError, r"clip_norm=True must be a positive, finite number"),
        (
            {"clip_norm": 10**400},
            ValueError,
            r"clip_norm=10+(\.\.\.)? must be a positive, finite number",
        ),
        ({"clip_norm": 1e39}, ValueError, r"clip_norm=1e\+39 must be a positive, finite number"),
        (
            {"clip_norm": 1e-50},
            ValueError,
            r"clip_norm=1e-50 must be a positive, finite number, or None: in float32 it",
        ),
        (
            {"clip_norm": np.array([1.0])},
            TypeError,
            r"clip_norm=array\(\[1.\]\) must be a positive, finite number",
        ),
        (
            {"loss_scale": tf.constant(2.0)},
            TypeError,
            r"loss_scale=<tf.Tensor.* must be 'auto', a number, or one of",
        ),
        (
            {"loss_scale": np.ones(2)},
            TypeError,
            r"loss_scale=array.* must be 'auto', a number, or one of",
        ),
        ({"loss_scale": nan}, ValueError, r"loss_scale=nan must be a positive, finite number"),
        ({"loss_scale": 1e-46}, ValueError, r"loss_scale=1e-46 must be .*: in float32 it is 0"),
        ({"loss_scale": 1e-30}, ValueError, r"loss_scale=1e-30 must be at least 5.4e-20"),
        (
            {"loss_scale": 1e300},
            ValueError,
            r"loss_scale=1e\+300 must be a positive, finite number",
        ),
        ({"loss_scale": True}, TypeError, r"loss_scale=True must be"),
        (
            {"loss_scale": fa.DynamicLossScale},
            TypeError,
            r"loss_scale=<class .*DynamicLossScale.* must be",
        ),
        ({"jit_compile": 1}, TypeError, r"jit_compile=1 must be 'auto', True or False"),
        (
            {"fp32_weight_gradients": None},
            TypeError,
            r"fp32_weight_gradients=None must be True or False",
        ),
        (
            {"optimizer": keras.optimizers.SGD(nan)},
            ValueError,
            r"optimizer=SGD has learning_rate=nan",
        ),
        (
            {"optimizer": keras.optimizers.Adam(inf)},
            ValueError,
            r"optimizer=Adam has learning_rate=inf",
        ),
        (
            {"metrics": [keras.metrics.MeanSquaredError]},
            TypeError,
            r"metrics=<class .* must be a Keras 3 metric object",
        ),
        ({"weighted_metrics": [3]}, TypeError, r"weighted_metrics=3 must be a Keras 3 metric"),
        (
            {"metrics": {1: "mae", "a": "mse"}},
            TypeError,
            r"metrics is a dict that cannot be taken apart",
        ),
        ({"metrics": 0}, TypeError, r"metrics=0 must be a Keras 3 metric"),
        ({"loss": memoryview(X)}, TypeError, r"loss is a memoryview that cannot be taken apart"),
        (
            {"loss": keras.losses.SparseCategoricalCrossentropy(axis=3)},
            ValueError,
            r"loss of output 'dense.*' has axis=3, and the output has shape \(.*, 1\)",
        ),
        (
            {"loss": lambda y: y},
            TypeError,
            r"^loss '<lambda>', called with y of shape .* takes 1 positional",
        ),
        ({"loss": keras.layers.Dense(1)}, TypeError, r"^loss .* called with y of shape"),
        ({"metrics": [lambda y: y]}, TypeError, r"^metrics: "),
        (
            {"metrics": {"other": "mae"}},
            ValueError,
            r"metrics names \['other'\], but the model's outputs are",
        ),
        ({"metrics": "mae"}, ValueError, r"metrics.*list, tuple, or dict.*mae"),
        (
            {"loss_weights": "a"},
            ValueError,
            r"loss_weights='a' of output .* must be a finite number",
        ),
        (
            {"loss_weights": nan},
            ValueError,
            r"loss_weights=nan of output .* must be a finite number",
        ),
        ({"weighted_metrics": keras.metrics.Mean()}, ValueError, "weighted_metrics must be a list"),
        (
            {"loss_weights": 1e39},
            ValueError,
            r"loss_weights=1e\+39 of output .* must be a finite number",
        ),
        (
            {"loss_weights": 1e-46},
            ValueError,
            r"loss_weights=1e-46 of output .* float32 does not round to 0",
        ),
        ({"loss_weights": [inf]}, ValueError, r"loss_weights=inf of output"),
        ({"loss_weights": [1.0, 2.0]}, ValueError, r"loss_weights has 2 entries for the 1 outputs"),
        ({"loss_weights": {"other": 1.0}}, ValueError, r"loss_weights names \['other'\]"),
    ],
    ids=lambda value: re.sub(" at 0x.*", "", str(value))[:40] if isinstance(value, dict) else "",
)
def test_a_trainer_refuses_at_once_or_before_its_first_step(options, error, match):
    model = regressor()
    before = [v.numpy().tobytes() for v in model.variables]
    with pytest.raises(error, match=match):
        make_trainer(model, jit_compile=options.pop("jit_compile", False), **options).fit(
            X, Y, verbose=0
        )
    assert [v.numpy().tobytes() for v in model.variables] == before


def test_a_model_without_a_call_and_empty_validation_data_are_named():
    with pytest.raises(ValueError, match="The model, called with x of shape"):
        make_trainer(keras.Model(), jit_compile=False).fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match="validation_data: "):
        make_trainer(regressor(), jit_compile=False).fit(X, Y, verbose=0, validation_data=[])


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": np.float32(8)},
        {"clip_norm": np.float64(9)},
        {"gradient_accumulation_steps": np.int16(2)},
        {"loss_weights": np.float32(2)},
        {"loss_weights": np.int8(2)},
    ],
    ids=str,
)
def test_numpy_scalars_as_arguments(options):
    """Takes NumPy's scalars like Python's numbers."""
    weights = []
    for given in (options, {name: value.item() for name, value in options.items()}):
        keras.utils.set_random_seed(0)
        trainer = make_trainer(jit_compile=False, **given)
        trainer.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
        weights.append(bytes_of(trainer))
    assert weights[0] == weights[1]


# Targets that a loss would broadcast


ONE_HOT = np.eye(3, dtype="float32")[LABELS]
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(loss, outputs=3, **options):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(outputs, "sigmoid", name="head")]
    )
    return make_trainer(model, loss=loss, jit_compile=False, **options)


@pytest.mark.parametrize(
    "loss, outputs, y, match",
    [
        # 3 rows: TensorFlow broadcasts
        ("mse", 3, Y[:, 0], r"y has shape \(3,\) and the predictions have \(3, 3\)"),
        ("mse", 3, Y, r"y has shape \(3, 1\) and the predictions have \(3, 3\)"),
        ("mae", 1, ONE_HOT, r"y has shape \(3, 3\) and the predictions have \(3, 1\)"),
        ("huber", 3, Y, r"'huber' compares element by element"),
        ("hinge", 3, Y, r"'hinge' compares element by element"),
        ("poisson", 3, Y, r"'poisson' compares element by element"),
        ("log_cosh", 3, Y, r"'log_cosh' compares element by element"),
        ("kl_divergence", 3, Y, r"'kl_divergence' compares element by element"),
        ("cosine_similarity", 3, Y, r"'cosine_similarity' compares element by element"),
        (
            "mse",
            3,
            np.ones((ROWS, 3, 3)),
            r"y has shape \(3, 3, 3\) and the predictions have \(3, 3\)",
        ),
        ("binary_crossentropy", 1, ONE_HOT, r"y has shape \(3, 3\)"),
        (
            "categorical_crossentropy",
            3,
            LABELS,
            r"for class indices, use 'sparse_categorical_crossentropy'",
        ),
        (
            "categorical_crossentropy",
            3,
            LABELS[:, None],
            r"for class indices, use 'sparse_categorical_crossentropy'",
        ),
        (
            "categorical_crossentropy",
            3,
            np.eye(4)[LABELS],
            r"y has shape \(3, 4\) and the predictions have \(3, 3\)",
        ),
        (SPARSE, 3, ONE_HOT, r"for one-hot targets, use 'categorical_crossentropy'"),
        (SPARSE, 3, ONE_HOT.astype(int), r"for one-hot targets, use 'categorical_crossentropy'"),
        (SPARSE, 3, np.c_[LABELS, LABELS], r"target.shape=\(3, 2\), output.shape=\(3, 3\)"),
    ],
)
def test_targets_of_another_shape_than_the_predictions(loss, outputs, y, match):
    trainer = classifier(loss, outputs)
    trainer._optimizer.build(trainer.model.trainable_variables)
    with refused(trainer, ValueError, match):
        trainer.fit(X, y, batch_size=3, verbose=0)


@pytest.mark.parametrize(
    "make", [lambda y: y, lambda y: tf.data.Dataset.from_tensor_slices((X, y)).batch(3)]
)
def test_targets_of_another_shape_in_evaluate(trainer, make):
    data = make(np.c_[Y, Y])
    with refused(
        trainer, ValueError, r"y has shape \(\d+, 2\) and the predictions have \(\d+, 1\)"
    ):
        trainer.evaluate(*((X, data) if isinstance(data, np.ndarray) else (data,)), verbose=0)


@pytest.mark.parametrize(
    "returns, match",
    [
        (lambda y, p: tf.cast(p[:, 0], tf.complex64), r"returned dtype complex64.*floating-point"),
        (lambda y, p: tf.reduce_any(p > y, -1), r"returned dtype bool"),
        (lambda y, p: tf.cast(p[:, 0], tf.int32), r"returned dtype int32"),
        (lambda y, p: tf.as_string(p[:, 0]), r"returned dtype string"),
        (lambda y, p: [p[:, 0], p[:, 0]], r"returned .*one tensor|returned \[<tf.Tensor"),
        (lambda y, p: None, r"None"),
        (lambda y, p: 3.0, r"The loss reaches none of the 4 variables"),
        (lambda y, p: p[:2, 0], r"returned shape \(2,\) whatever the number of examples"),
        (
            lambda y, p: tf.transpose(p),
            r"returned shape \(1, \d+\) whatever the number of examples",
        ),
    ],
)
def test_losses_that_return_no_losses(returns, match):
    trainer = make_trainer(loss=lambda y, p: returns(y, p), jit_compile=False)
    trainer._optimizer.build(trainer.model.trainable_variables)
    with refused(trainer, ValueError, match):
        trainer.fit(X, Y, batch_size=2, verbose=0)


@pytest.mark.parametrize(
    "loss, y", [(SPARSE, LABELS), (keras.losses.CategoricalCrossentropy(), ONE_HOT)]
)
def test_a_class_weight_for_no_class(loss, y):
    trainer = classifier(loss)
    trainer._optimizer.build(trainer.model.trainable_variables)
    with refused(
        trainer, ValueError, r"class_weight=\{3: 2.0\} names class 3, but .* 3 classes, from 0 to 2"
    ):
        trainer.fit(X, y, class_weight={3: 2.0}, verbose=0)


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        ("uint64", 2**32),
        pytest.param("uint64", 2**62, marks=pytest.mark.slow),
        *(
            pytest.param("int64", offset, marks=pytest.mark.slow)
            for offset in (2**32, 2**40, 2**62)
        ),
    ],
)
def test_indices_that_wrap_around_in_32_bits(reader, offset, dtype):
    """Refuses indices that are in range only after they wrap around in 32 bits."""
    with refused(reader, ValueError, r"labels of output 'head': values from"):
        reader.train_step((stacked(IDS, 2, 6), stacked((LABELS + offset).astype(dtype), 2, 6)))
    with refused(reader, ValueError, r"ids given to embedding 'words': values from"):
        reader.train_step(
            (stacked((IDS + offset).astype(dtype), 2, 6), stacked(LABELS.astype("float32"), 2, 6))
        )


def test_metrics_and_callbacks_that_raise(trainer):
    class Raises(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise RuntimeError("from a callback")

    def raises(y_true, y_pred):
        raise RuntimeError("from a metric")

    with refused(trainer, RuntimeError, r"from a callback"):
        trainer.fit(X, Y, callbacks=[Raises()], verbose=0)
    other = make_trainer(metrics=[raises], jit_compile=False)
    other._optimizer.build(other.model.trainable_variables)
    with refused(other, RuntimeError, r"from a metric"):
        other.fit(X, Y, verbose=0)


# More datasets and generators


def yields(*items):
    return lambda: (item for item in items)


FOUR = (X[:2], Y[:2])


class Holds(keras.utils.PyDataset):
    def __init__(self, item, length=2):
        super().__init__()
        self.item, self.length = item, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.item


@pytest.mark.parametrize(
    "make, error, match",
    [
        (yields([*FOUR, Y[:2]]), ValueError, r"generator must return a tuple"),
        (yields((*FOUR, Y[:2], Y[:2])), ValueError, r"\(x, y, sample_weight\)"),
        (yields(X[:2]), ValueError, r"generator must return a tuple"),
        (yields({"x": X[:2], "y": Y[:2]}), ValueError, r"generator must return a tuple"),
        (yields(None), ValueError, r"generator must return a tuple"),
        (yields((X[:2], None)), ValueError, r"yields no targets"),
        (yields((None, Y[:2])), ValueError, r"yields None for inputs"),
        (yields((X[0], Y[0])), ValueError, r"different numbers of rows"),
        (yields((X[:2].tolist(), Y[:2].tolist())), ValueError, r"arrays must be at least rank 1"),
        (yields(FOUR, (X[:2, :3], Y[:2])), ValueError, r"called with x of shape \(2, 3\)"),
        (
            yields(FOUR, (X[:2], np.c_[Y, Y][:2])),
            ValueError,
            r"y has shape \(2, 2\) and the predictions",
        ),
        (yields(FOUR, (*FOUR, Y[:2, 0])), ValueError, r"tuple arity mismatch; expected: 2, got: 3"),
        (yields(FOUR, (X[:2], None)), ValueError, r"(?s)structure"),
        (
            yields((X[:2].astype("complex64"), Y[:2])),
            TypeError,
            r"yields dtype complex64: pass numbers",
        ),
        (yields((X[:2].astype(object), Y[:2])), ValueError, r"Invalid dtype: object"),
        (yields((X[:2].astype(str), Y[:2])), ValueError, r"Invalid dtype: str"),
        (
            yields((masked(X[:6]), Y[:6])),
            TypeError,
            r"x \(generator\) is a masked array with \d+ masked",
        ),
        (
            yields((tf.ragged.constant([[1.0], [1.0, 2.0]]), Y[:2])),
            TypeError,
            r"yields RaggedTensorSpec.*Pad them",
        ),
        (
            yields((X[:2], np.c_[Y, Y][:2])),
            ValueError,
            r"y has shape \(\d, 2\) and the predictions have \(\d, 1\)",
        ),
        (
            yields(((X[:2], X[:2]), Y[:2])),
            ValueError,
            r"x has 2 arrays, but the model has 1 inputs",
        ),
        (lambda: Holds((*FOUR, Y, Y)), ValueError, r"must return a tuple"),
        (lambda: Holds(X[:2]), ValueError, r"yields no targets"),
        (lambda: Holds(FOUR, 0), ValueError, r"PyDataset has length 0"),
        (lambda: Holds((X[:2, :3], Y[:2])), ValueError, WRONG_WIDTH),
        (lambda: Holds((X[:2].astype(str), Y[:2])), ValueError, r"Invalid dtype: str"),
        (lambda: dataset(X.astype("complex64"), Y).batch(2), TypeError, r"yields dtype complex64"),
        (lambda: dataset(X, Y).window(2), TypeError, r"yields DatasetSpec"),
        (lambda: dataset(X, Y, np.ones((ROWS, 3))).batch(2), ValueError, r"sample_weight of shape"),
        (lambda: dataset(X, np.c_[Y, Y]).batch(2), ValueError, r"y has shape \(\d, 2\)"),
        (
            lambda: dataset((X, X), Y).batch(2),
            ValueError,
            r"x has 2 arrays, but the model has 1 inputs",
        ),
        (lambda: Holds, ValueError, r"Unrecognized data type: x=<class"),
        (lambda: {1, 2}, ValueError, r"^x \(set\): Unrecognized data type: x=\{1, 2\}"),
    ],
)
def test_more_datasets_that_do_not_fit(trainer, make, error, match):
    with refused(trainer, error, match):
        trainer.fit(make(), verbose=0)


def test_a_dataset_of_unknown_rank(trainer):
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([FOUR]), output_types=(tf.float32, tf.float32)
    )
    with refused(
        trainer, ValueError, r"yields a tensor of unknown rank: give it a shape \(output_signature"
    ):
        trainer.fit(unknown, verbose=0)


@pytest.mark.parametrize(
    "make", [lambda: iter(dataset(X, Y).batch(2)), lambda: iter(list(dataset(X, Y).batch(2)))]
)
def test_iterators_work_exactly(replay, make):
    assert replay(make(), None, batch_size=None) == replay()


def test_batches_of_unknown_width_work_exactly(replay):
    shape = tf.TensorSpec([None, None])
    batches = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, ROWS, 2)]
    unknown = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=(shape, shape))
    assert replay(unknown, None, batch_size=None) == replay()
