"""Losses, layers and metrics that compute with the number of rows in their batch, which a
micro-batch has fewer of.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.data.stacks import Batch
from fastaccum.graphs import row_counts, traces

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(27, n)).astype("float32") for n in (6, 3))
WEIGHTS = RNG.uniform(0.2, 2.0, 27).astype("float32")


def squares(y, p):
    return tf.reduce_sum((y - p) ** 2, -1)


@tf.function
def in_a_function(values):
    return values / tf.cast(tf.shape(values)[0], tf.float32)


def in_a_loop(y, p):
    rows = tf.cast(tf.shape(p)[0], tf.float32)
    return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v / rows), [0, squares(y, p)])[1]


def in_a_later_turn(y, p):
    """Each turn divides by what the one before has left."""
    rows = tf.cast(tf.shape(p)[0], tf.float32)
    return tf.while_loop(
        lambda i, n, v: i < 2, lambda i, n, v: (i + 1, rows, v / n), [0, 1.0, squares(y, p)]
    )[2]


# Each with the power of the number of rows that it has.
LOSSES = {
    "tf.shape": (lambda y, p: squares(y, p) / tf.cast(tf.shape(p)[0], p.dtype), -1.0),
    "ops.shape": (lambda y, p: squares(y, p) / keras.ops.shape(p)[0], -1.0),
    "ops.size": (lambda y, p: squares(y, p) / keras.ops.cast(keras.ops.size(p), "float32"), -1.0),
    "Python's arithmetic": (
        lambda y, p: 3.0 * squares(y, p) * (0.5 / int(p.shape[0]) ** 0.5),
        -0.5,
    ),
    "a product": (lambda y, p: squares(y, p) * tf.cast(2 * tf.shape(p)[0], tf.float32), 1.0),
    "a little beside it": (
        lambda y, p: squares(y, p) / (tf.cast(tf.shape(p)[0], p.dtype) + 1e-7),
        -1.0,
    ),
    "a tf.function": (lambda y, p: in_a_function(squares(y, p)), -1.0),
    "a loop": (in_a_loop, -2.0),
    "a loop's later turn": (in_a_later_turn, -1.0),
}
# And what has no such power.
OTHERS = {
    "a logarithm": lambda y, p: squares(y, p) * tf.math.log(tf.cast(tf.shape(p)[0], tf.float32)),
    "a summand": lambda y, p: squares(y, p) + tf.cast(tf.shape(p)[0], tf.float32) * tf.abs(p[:, 0]),
    "operations": lambda y, p: sum(squares(y, p) for _ in range(1 + p.shape[0] % 3)),
    "a comparison": lambda y, p: (
        tf.where(y[:, 0] * 1e6 < tf.cast(tf.shape(p)[0], tf.float32), 1.0, 2.0) * squares(y, p)
    ),
}


def by_shape(y, p):
    rows = tf.shape(p)[0]
    index = tf.stack([tf.range(rows), tf.zeros([rows], tf.int32)], 1)
    wide = tf.reshape(tf.broadcast_to(p[:, None], [rows, 2, 3]), [rows, -1])
    padded = tf.concat([wide, keras.ops.zeros((keras.ops.shape(p)[0], 2))], 1)
    return (
        squares(y, p)
        + tf.gather_nd(padded, index)
        + tf.cast(tf.reshape(tf.cast(p, tf.int32), [rows, 3])[:, 0], p.dtype)
    )


def model(middle=lambda h: h):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    return keras.Model(
        inputs, keras.layers.Dense(3)(middle(keras.layers.Dense(4, activation="tanh")(inputs)))
    )


def as_class(name, reduction):
    class Own(keras.losses.Loss):
        def call(self, y, p):
            return LOSSES[name][0](y, p)

    return Own(reduction=reduction)


def optimizer():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def require_equal(make, *, y=Y, weights=None, trainer=None, **losses):
    """27 rows in updates of 12, of which the last has 3: in Keras whole, here in micro-batches of
    4.
    """
    theirs, ours = make(), make()
    theirs.compile(optimizer(), **losses, run_eagerly=True)
    trainer = fa.Trainer(
        ours,
        optimizer(),
        gradient_accumulation_steps=3,
        **losses,
        **{"jit_compile": False, **(trainer or {})},
    )
    data = {"x": X, "y": y, "sample_weight": weights, "shuffle": False, "verbose": 0}
    expected = theirs.fit(**data, batch_size=12).history
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs = trainer.fit(**data, batch_size=4).history
    for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6)
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-5)
    assert logs["loss_scale"] in ([1.0], [8.0])  # that of the beginning
    evaluated = [each.evaluate(X, y, batch_size=10, verbose=0) for each in (theirs, trainer)]
    np.testing.assert_allclose(evaluated[1], evaluated[0], rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_power_of_the_rows_is_found(name):
    loss, power = LOSSES[name]
    trainer = fa.Trainer(model(), optimizer(), loss, jit_compile=False)
    step = trainer._builder.get_or_build(
        tf.nest.map_structure(lambda a: tf.TensorSpec([4, *a.shape[1:]]), Batch(X, Y)),
        trainer._present_options,
    )
    assert [o.power for o in step.objective.losses.outputs] == [power]


variant = pytest.mark.slow
SCALE = fa.DynamicLossScale(8.0)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("tf.shape", "sum_over_batch_size"),
        ("tf.shape", "sum"),
        pytest.param("ops.size", "mean_with_sample_weight", marks=variant),
        pytest.param("Python's arithmetic", "sum", marks=variant),
        pytest.param("a loop", "sum_over_batch_size", marks=variant),
    ],
)
def test_a_power_of_the_rows_is_that_of_the_whole_update(name, reduction):
    weights = None if reduction == "sum_over_batch_size" else WEIGHTS
    require_equal(model, loss=as_class(name, reduction), weights=weights)


@pytest.mark.parametrize(
    "trainer",
    [
        {"steps_per_execution": 2, "loss_scale": SCALE},
        pytest.param({"jit_compile": True}, marks=variant),
    ],
    ids=lambda options: next(iter(options)),
)
def test_functions_in_several_steps_of_a_dispatch_and_in_xla(trainer):
    require_equal(model, loss=LOSSES["ops.size"][0], trainer=trainer)


def two_outputs():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(6)(inputs)
    return keras.Model(
        inputs, [keras.layers.Dense(3)(hidden), keras.layers.Reshape((2, 3))(hidden)]
    )


def test_several_outputs_one_of_them_of_tokens():
    losses = [
        as_class("tf.shape", "sum"),
        lambda y, p: squares(y, p) / tf.cast(tf.size(p), tf.float32),
    ]
    y = [Y, RNG.normal(size=(27, 2, 3)).astype("float32")]
    require_equal(two_outputs, y=y, loss=losses, loss_weights=[0.5, 2.0])


class Halved(keras.Model):
    """Halves the compiled loss in a `compute_loss` of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.5 * super().compute_loss(x, y, y_pred, sample_weight)


def halved():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    return Halved(inputs, keras.layers.Dense(3)(inputs))


@variant
def test_the_compiled_loss_in_a_compute_loss():
    require_equal(halved, loss=as_class("tf.shape", "sum"))


@pytest.mark.parametrize(
    "name", ["a logarithm", *(pytest.param(n, marks=variant) for n in OTHERS if n != "a logarithm")]
)
def test_other_uses_of_the_row_count_are_warned_of(name):
    trainer = fa.Trainer(
        model(), "sgd", OTHERS[name], gradient_accumulation_steps=2, jit_compile=False
    )
    with pytest.warns(UserWarning, match="no sum or mean over the rows of a batch"):
        trainer.fit(X, Y, batch_size=9, verbose=0)


def test_shapes_indices_and_ranges_of_rows_say_nothing():
    specs = tf.TensorSpec([4, 3]), tf.TensorSpec([4, 3])
    one = traces.trace(lambda pair: by_shape(*pair), specs)
    assert row_counts.find_row_counter(one, lambda pair: by_shape(*pair), specs) is None


class Root(keras.layers.Layer):
    def call(self, x):
        return x / keras.ops.sqrt(keras.ops.cast(keras.ops.shape(x)[0], x.dtype))


class Counted(keras.layers.Layer):
    """Adds a loss, a metric and shapes that depend on the number of rows, and a result that does
    not.
    """

    def build(self, shape):
        self.seen = keras.metrics.Mean()

    def call(self, x):
        rows = keras.ops.shape(x)[0]
        self.add_loss(tf.reduce_sum(x**2) / tf.cast(rows, tf.float32))
        self.seen.update_state(x)
        return keras.ops.reshape(
            keras.ops.concatenate([x, keras.ops.zeros((rows, 2))], 1), (rows, 6)
        )


class Cell(keras.layers.Layer):
    state_size = output_size = 4

    def call(self, x, states):
        new = states[0] + x / keras.ops.cast(keras.ops.shape(x)[0], x.dtype)
        return new, [new]


LAYERS = {
    "a layer": Root(),
    "a Lambda": keras.layers.Lambda(lambda h: h * (1.0 / tf.cast(tf.shape(h)[0], tf.float32))),
    "an activation": lambda h: keras.layers.Activation(
        lambda h: h / tf.cast(tf.shape(h)[0], h.dtype)
    )(h),
    "a cell in a loop": lambda h: keras.layers.RNN(Cell())(keras.layers.RepeatVector(3)(h)),
}


def told(middle, **options):
    batch = options.pop("batch_size", 9)
    trainer = fa.Trainer(model(middle), optimizer(), "mse", jit_compile=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(X, Y, batch_size=batch, verbose=0)
    return [
        each
        for each in caught
        if "computes with the number of rows in its batch" in str(each.message)
    ]


def in_heads(h):
    heads = keras.layers.Reshape((1, 2, 2))(h)
    attention = keras.layers.Lambda(lambda t: keras.ops.dot_product_attention(t, t, t))
    return keras.layers.Reshape((4,))(attention(heads))


@tf.function
def root_of_the_width(t):
    return tf.math.sqrt(tf.cast(tf.shape(t)[-1], t.dtype))


# What is read off a shape: another axis than that of the rows, and that of the rows.
OTHER_AXES = {
    "Keras's attention": in_heads,
    "TensorFlow's tutorial": lambda t: t / tf.math.sqrt(tf.cast(tf.shape(t)[-1], tf.float32)),
    "a slice of a slice": lambda t: t / tf.cast(tf.reduce_prod(tf.shape(t)[0:2][1:]), tf.float32),
    "tf.slice": lambda t: t / tf.cast(tf.slice(tf.shape(t), [1], [1]), tf.float32),
    "tf.gather": lambda t: t / tf.cast(tf.gather(tf.shape(t), 1), tf.float32),
    "a tf.function": lambda t: t / root_of_the_width(t),
}
FIRST_AXES = {
    "an element": lambda t: t / tf.cast(tf.shape(t)[0], tf.float32),
    "an element from the end": lambda t: t / tf.cast(tf.shape(t)[-2], tf.float32),
    "a slice of a slice": lambda t: t / tf.cast(tf.reduce_prod(tf.shape(t)[0:2][:1]), tf.float32),
    "all of a shape": lambda t: t / tf.cast(tf.reduce_prod(tf.shape(t)[0:]), tf.float32),
    "tf.slice": lambda t: t / tf.cast(tf.slice(tf.shape(t), [0], [1]), tf.float32),
    "tf.gather": lambda t: t / tf.cast(tf.gather(tf.shape(t), 0), tf.float32),
}


@pytest.mark.parametrize("name", ["Keras's attention", "TensorFlow's tutorial"])
def test_layers_that_read_another_axis_need_no_word(name):
    layer = OTHER_AXES[name]
    middle = layer if layer is in_heads else keras.layers.Lambda(layer)
    assert not told(middle, gradient_accumulation_steps=3)


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        *(
            pytest.param(f, False, id=f"another axis by {name}")
            for name, f in OTHER_AXES.items()
            if f is not in_heads
        ),
        *(pytest.param(f, True, id=f"the rows by {name}") for name, f in FIRST_AXES.items()),
    ],
)
def test_the_elements_that_are_taken_of_a_shape_decide(function, counts):
    specs = tf.TensorSpec([4, 3])
    assert (
        row_counts.find_row_counter(traces.trace(function, specs), function, specs) is not None
    ) == counts


@pytest.mark.parametrize(
    "name", ["a layer", *(pytest.param(n, marks=variant) for n in LAYERS if n != "a layer")]
)
def test_layers_are_told_of_where_the_update_has_more_rows(name):
    assert told(LAYERS[name], gradient_accumulation_steps=3)


def test_layers_are_told_of_once_however_often_the_step_is_traced():
    trainer = fa.Trainer(
        model(LAYERS["a layer"]),
        optimizer(),
        "mse",
        gradient_accumulation_steps=3,
        jit_compile=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (9, 4):
            trainer.fit(X, Y, batch_size=batch, verbose=0)
    assert (
        sum("computes with the number of rows in its batch" in str(each.message) for each in caught)
        == 1
    )


def test_layers_whose_batch_is_the_update_need_no_word():
    """Gives no warning, and does not pad the short batch at the end."""
    assert not told(LAYERS["a layer"], batch_size=12)
    theirs, ours = model(LAYERS["a layer"]), model(LAYERS["a layer"])
    theirs.compile(optimizer(), "mse", run_eagerly=True)
    trainer = fa.Trainer(ours, optimizer(), "mse", jit_compile=False)
    for fit in (theirs.fit, trainer.fit):
        fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)


@variant
def test_layers_in_bfloat16_are_told_of():
    with_python = keras.layers.Lambda(lambda h: h * (1.0 / (h.shape[0] or 1)), dtype="bfloat16")
    assert told(with_python, gradient_accumulation_steps=3)


@variant
def test_layers_that_only_add_losses_count_or_reshape_need_no_word():
    assert not told(lambda h: Counted()(h), gradient_accumulation_steps=3)


def test_a_stack_by_hand_is_told_of_too():
    trainer = fa.Trainer(model(LAYERS["a layer"]), optimizer(), "mse", jit_compile=False)
    with pytest.warns(UserWarning, match="computes with the number of rows in its batch"):
        trainer.train_step((X.reshape(3, 9, 6), Y.reshape(3, 9, 3)))


def test_metric_functions_are_told_of():
    def by_rows(y, p):
        return squares(y, p) / tf.cast(tf.shape(p)[0], tf.float32)

    trainer = fa.Trainer(
        model(), optimizer(), "mse", [by_rows], gradient_accumulation_steps=3, jit_compile=False
    )
    with pytest.warns(
        UserWarning, match="The metric 'by_rows' may be no .*mean over the rows of a batch"
    ):
        trainer.fit(X, Y, batch_size=4, verbose=0)
