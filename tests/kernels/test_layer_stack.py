"""LayerStack against the plain layers that it stands for: values, gradients, training, and what XLA
makes of it.
"""

import functools
import gc
import re
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import fastaccum as fa
from fastaccum.graphs import row_mixing, traces
from fastaccum.kernels import checkpoint_name, layer_loop
from fastaccum.kernels.layer_loop import LayerGraph
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.step import compiler_ir as compiled
from fastaccum.transformer import TransformerBlock

pytestmark = pytest.mark.long

B, T, D, DEPTH = 2, 5, 12, 3


def transformer_block():
    return TransformerBlock(2)


def random_block(regularizer=None):
    """Every kind of state: weights, batch statistics, seeds."""
    dense = layers.Dense(D, "tanh", kernel_regularizer=regularizer)
    return keras.Sequential([dense, layers.Dropout(0.4), layers.BatchNormalization()])


def mlp_block():
    return keras.Sequential(
        [layers.LayerNormalization(), layers.Dense(4 * D, "gelu"), layers.Dense(D)]
    )


def functional_block():
    x = inputs = keras.Input((T, D))
    return keras.Model(inputs, inputs + layers.Dropout(0.3)(layers.Dense(D, "tanh")(x)))


BLOCKS = [transformer_block, random_block, functional_block]


def stack_and_plain(make_layer, depth=DEPTH, x_shape=(B, T, D), **options):
    """A stack, and the plain layers, each made and built from the same seeds."""
    keras.utils.set_random_seed(1)
    stack = LayerStack(make_layer, depth, **options)
    stack.build(x_shape)
    keras.utils.set_random_seed(1)
    plain = []
    for _ in range(depth):
        plain.append(make_layer())
        if not plain[-1].built:
            plain[-1].build(x_shape)
    return stack, plain


def chain(plain):
    def call(x, training):
        for layer in plain:
            x = layer(x, training=training)
        return x

    return call


def values(*shape, seed=0, dtype="float32"):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(call, variables, x, training=True, jit_compile=True):
    """y, dx and the gradients of the variables, of a loss that every element of y enters in its own
    way.
    """
    weighted = values(*x.shape, seed=9)

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x, training=training)
            loss = tf.reduce_sum(weighted * tf.cast(y, tf.float32))
        return y, *tape.gradient(loss, [x, *(v.value for v in variables)])

    return tf.function(run, jit_compile=jit_compile)(x) if jit_compile is not None else run(x)


def stacked(plain, attribute="trainable_variables"):
    """The plain layers' variables, one list for each weight."""
    return list(zip(*(getattr(layer, attribute) for layer in plain), strict=True))


def plain_gradients(plain, x, **options):
    """`gradients` of the plain layers, stacked over the layers."""
    columns = stacked(plain)
    y, dx, *flat = gradients(chain(plain), [v for column in columns for v in column], x, **options)
    return y, dx, *(tf.stack(flat[i : i + len(plain)]) for i in range(0, len(flat), len(plain)))


def assert_close(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        room = tolerance * (1e-3 + np.abs(b).max())
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=tolerance, atol=room)


def worst(ours, truth):
    """The largest error, relative to the truth's largest element."""
    return max(
        np.abs(np.float64(a) - b).max() / np.abs(b).max() for a, b in zip(ours, truth, strict=True)
    )


@pytest.mark.parametrize("make_layer", BLOCKS)
def test_starts_from_the_values_of_plain_layers(make_layer):
    stack, plain = stack_and_plain(make_layer)
    assert len(stack.weights) == len(plain[0].weights)
    for weight, copies in zip(stack.weights, stacked(plain, "weights"), strict=True):
        np.testing.assert_array_equal(weight, np.stack(copies))
    assert len(stack.trainable_variables) == len(plain[0].trainable_variables)
    kernels = [w.numpy() for w in stack.weights if "kernel" in w.name]
    assert all((k[0] != k[1]).any() for k in kernels)


CASES = [
    *((make_layer, "auto") for make_layer in BLOCKS),
    pytest.param(random_block, "reference", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make_layer", "implementation"), CASES)
def test_equals_the_plain_layers(make_layer, implementation):
    stack, plain = stack_and_plain(make_layer, implementation=implementation)
    x = values(B, T, D)
    assert_close(gradients(stack, stack.trainable_variables, x), plain_gradients(plain, x), 2e-5)
    # Batch statistics moved, and seeds advanced, as theirs.
    for mine, theirs in zip(stack.unstack(), plain, strict=True):
        assert_close(mine.non_trainable_variables, theirs.non_trainable_variables, 1e-6)


@pytest.mark.parametrize("jit_compile", [False, None])
def test_equals_the_plain_layers_without_xla(jit_compile):
    stack, plain = stack_and_plain(random_block)
    x = values(B, T, D)
    ours = gradients(stack, stack.trainable_variables, x, jit_compile=jit_compile)
    assert_close(ours, plain_gradients(plain, x, jit_compile=jit_compile), 2e-5)


def test_a_gradient_taken_outside_the_compiled_function():
    stack, plain = stack_and_plain(lambda: layers.Dense(D, "tanh"))
    forward = tf.function(stack, jit_compile=True)
    x = values(B, T, D)
    ours = gradients(lambda x, training: forward(x), stack.trainable_variables, x, jit_compile=None)
    assert_close(ours, plain_gradients(plain, x), 2e-5)


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_any_shape_and_depth(depth, batch, width, use_bias):
    stack, plain = stack_and_plain(
        lambda: layers.Dense(width, "tanh", use_bias=use_bias), depth, (batch, width)
    )
    x = values(batch, width)
    assert_close(gradients(stack, stack.trainable_variables, x), plain_gradients(plain, x), 2e-5)


def test_float16_errs_no_more_than_the_plain_layers():
    """Against float64: x and its gradient in float16, the weights and theirs in float32."""
    stack, plain = stack_and_plain(lambda: layers.Dense(D, "gelu", dtype="mixed_float16"))
    truth, _ = stack_and_plain(
        lambda: layers.Dense(D, "gelu", dtype="float64"), implementation="reference"
    )
    for weight, exact in zip(stack.weights, truth.weights, strict=True):
        exact.assign(tf.cast(weight.value, tf.float64))
    x = values(B, T, D, dtype="float16")
    ours = gradients(stack, stack.weights, x)
    assert [g.dtype for g in ours[:2]] == [tf.float16] * 2
    assert {g.dtype for g in ours[2:]} == {tf.float32}
    exact = gradients(truth, truth.weights, tf.cast(x, tf.float64), jit_compile=None)
    exact = [np.float64(g) for g in exact]
    plain_error = worst(plain_gradients(plain, x), exact)
    assert worst(ours, exact) <= plain_error + 1e-3
    assert plain_error > 1e-5, "the comparison would not see float16"


def test_a_swapped_pair_of_layers_is_seen():
    """The negative control: the right weights in the wrong order."""
    stack, plain = stack_and_plain(functional_block)
    stack.assign_from([plain[1], plain[0], plain[2]])
    x = values(B, T, D)
    ours, theirs = gradients(stack, stack.trainable_variables, x), plain_gradients(plain, x)
    with pytest.raises(AssertionError):
        assert_close(ours, theirs, 2e-5)


# What is kept for the way back.


def everything_block():
    """Attention and an MLP, dropout, batch statistics."""
    return keras.Sequential([transformer_block(), layers.Dropout(0.4), layers.BatchNormalization()])


POLICIES = [
    {"policy": policy}
    for policy in ("nothing_saveable", "everything_saveable", ["attention"], "auto")
]


@pytest.fixture(scope="module")
def plain_outcome():
    _, plain = stack_and_plain(everything_block, depth=2)
    return plain_gradients(plain, values(B, T, D), jit_compile=False)


@pytest.mark.parametrize("form", [*POLICIES, {"unroll": True}], ids=str)
def test_gradients_are_the_same_whatever_is_kept(form, plain_outcome):
    """Drops the same elements too, or else the gradients would differ."""
    stack, _ = stack_and_plain(everything_block, depth=2, **form)
    ours = gradients(stack, stack.trainable_variables, values(B, T, D), jit_compile=False)
    assert_close(ours, plain_outcome, 2e-5)


def test_the_way_back_reads_what_is_kept(plain_outcome, monkeypatch):
    """The negative control: values spoiled on their way."""
    forward = LayerGraph.forward

    def spoiled(self, *arguments):
        y, after, residuals = forward(self, *arguments)
        return y, after, [2.0 * t for t in residuals]

    monkeypatch.setattr(LayerGraph, "forward", spoiled)
    stack, _ = stack_and_plain(everything_block, depth=2)
    with pytest.raises(AssertionError):
        gradients_of = gradients(
            stack, stack.trainable_variables, values(B, T, D), jit_compile=False
        )
        assert_close(gradients_of, plain_outcome, 2e-5)


class Wave(layers.Layer):
    """sin(exp(x)), of which one value has a name, and one has it in a loop, where nothing can be
    kept.
    """

    def __init__(self, called="wave"):
        super().__init__()
        self.called = called

    def call(self, x):
        _, x = tf.while_loop(
            lambda i, x: i < 2,
            lambda i, x: (i + 1, checkpoint_name(tf.cos(x), self.called)),
            [0, x],
        )
        return tf.sin(checkpoint_name(tf.exp(x), self.called)) * x


def kept(make_layer, policy="auto", training=True):
    """The sizes of what a layer's way forward keeps, relative to x; nothing is compiled."""
    stack, x, graphs = LayerStack(make_layer, 6, policy=policy), tf.TensorSpec([8, 32, D]), []
    stack.build(x.shape)

    def spied(*arguments):
        graphs.append(LayerGraph(*arguments))
        return graphs[-1]

    with mock.patch.object(layer_loop, "LayerGraph", spied):
        tf.function(lambda x: stack(x, training=training)).get_concrete_function(x)
    (graph,) = graphs
    return sorted(t.shape.num_elements() / x.shape.num_elements() for t in graph.residuals)


@pytest.mark.parametrize(
    ("make_layer", "policy", "sizes"),
    [
        # The gradient needs nothing of an MLP's second product.
        (mlp_block, "auto", [1, 4]),
        (mlp_block, ["projection"], [1, 4]),
        (mlp_block, ["attention"], [1]),
        (mlp_block, "nothing_saveable", [1]),
        (Wave, "auto", [1, 1]),
        (Wave, ["wave"], [1, 1]),
        (functools.partial(Wave, "save"), "nothing_saveable", [1]),
        (functools.partial(Wave, "save"), ["save"], [1, 1]),
    ],
)
def test_values_that_each_policy_keeps(make_layer, policy, sizes):
    assert kept(make_layer, policy) == sizes


def test_a_name_that_no_value_has_is_refused():
    with pytest.raises(ValueError, match=r"'waves'.*'attention', 'projection', 'wave'"):
        kept(Wave, ["wave", "waves"])


def test_everything_is_what_plain_autodiff_keeps():
    """Keeps values in the dtype that they have, and recomputes a cast to a wider one."""
    block = keras.Sequential([layers.Dense(D, "relu"), layers.Dense(D)])
    assert kept(block, "everything_saveable") == [1, 1]


def test_values_that_do_not_fit_are_recomputed(monkeypatch):
    """Half of what training leaves of the memory: 4 times the weights, and 5 of the size of x a
    layer.
    """
    weights = 4 * 6 * 4 * (D * 4 * D + 4 * D + 4 * D * D + D + 2 * D)
    needed = weights + 2 * 6 * 5 * 4 * 8 * 32 * D
    monkeypatch.setattr(layer_loop, "device_memory", lambda: needed)
    assert kept(mlp_block) == [1, 4]
    monkeypatch.setattr(layer_loop, "device_memory", lambda: needed - 1)
    assert kept(mlp_block) == [1]
    assert kept(mlp_block, ["projection"]) == [1, 4], "what is named is kept"


@pytest.mark.parametrize(("memory", "loops"), [(1e9, 0), (0, 2)])
def test_a_gpu_that_has_room_for_everything_has_no_loops(memory, loops, monkeypatch):
    monkeypatch.setattr(layer_loop, "device_memory", lambda: memory)
    monkeypatch.setattr(layer_loop, "has_gpu", lambda: True)
    stack = LayerStack(mlp_block, 2, unroll="auto")
    stack.build([B, T, D])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = stack(x, training=True)
        return tape.gradient(y, stack.trainable_variables)

    operations = step.get_concrete_function(tf.TensorSpec([B, T, D])).graph.get_operations()
    assert sum(op.type in ("While", "StatelessWhile") for op in operations) == loops


def test_inference_chooses_nothing():
    assert kept(mlp_block, training=False) == [1]


# Random layers.


def dropped(stack, x):
    y, dx = gradients(stack, [], x)
    np.testing.assert_array_equal(dx != 0, y != 0)
    return y.numpy() == 0


@pytest.mark.parametrize("seed", [None, 7])
def test_dropout_differs_by_layer_and_step_but_not_in_recomputation(seed):
    """Drops half in one layer. Two layers drop three quarters only if they drop different elements."""
    x = tf.ones([50, 40])
    stack = LayerStack(lambda: layers.Dropout(0.5, seed=seed), 2)
    first, second = dropped(stack, x), dropped(stack, x)
    assert first.mean() == pytest.approx(0.75, abs=0.05)
    assert (first != second).any()
    assert not (stack(x, training=False).numpy() == 0).any()


def test_the_seed_fixes_what_is_dropped():
    x = tf.ones([8, 8])

    def draw():
        keras.utils.set_random_seed(3)
        return dropped(LayerStack(lambda: layers.Dropout(0.5), 2), x)

    np.testing.assert_array_equal(draw(), draw())


def test_inference_leaves_state_alone():
    stack, _ = stack_and_plain(random_block)
    before = [v.numpy() for v in stack.variables]
    tf.function(stack, jit_compile=True)(values(B, T, D), training=False)
    for now, then in zip(stack.variables, before, strict=True):
        np.testing.assert_array_equal(now, then)


# Masks and other arguments.


@keras.saving.register_keras_serializable("tests")
class Gate(layers.Layer):
    """Moves x towards a context where the mask allows it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, x_shape):
        self.gate = self.add_weight(shape=(x_shape[-1],), initializer="random_normal", name="gate")

    def call(self, x, context=None, mask=None, double=False):
        y = x * (2.0 if double else 1.0 + self.gate)
        if context is not None:
            y = y + tf.sin(context * x)
        return y if mask is None else tf.where(mask[..., tf.newaxis], y, x)


MASK = tf.constant(np.eye(B, T) == 0)


def masked(x):
    x = tf.identity(x)
    x._keras_mask = MASK
    return x


@pytest.mark.parametrize("jit_compile", [True, None])
def test_a_mask_reaches_every_layer(jit_compile):
    stack, plain = stack_and_plain(Gate)
    x = values(B, T, D)

    def call(x, training):
        y = stack(masked(x))
        assert y._keras_mask is MASK
        return y

    y, dx = gradients(call, [], x, jit_compile=jit_compile)
    expected, d_expected = gradients(lambda x, training: chain(plain)(masked(x), None), [], x)
    assert_close([y, dx], [expected, d_expected], 1e-6)
    np.testing.assert_array_equal(y[0, 0], x[0, 0])
    assert (y[0, 1:] != x[0, 1:]).numpy().all()


@pytest.mark.parametrize("jit_compile", [True, None])
def test_tensor_arguments_reach_every_layer_and_get_gradients(jit_compile):
    x, context = values(B, T, D), values(B, T, D, seed=1)

    def run(implementation):
        stack, _ = stack_and_plain(Gate, implementation=implementation)

        def call(context, training):
            return stack(x, context=context, mask=MASK)

        return gradients(call, stack.weights, context, jit_compile=jit_compile)

    ours = run("auto")
    assert_close(ours, run("reference"), 1e-5)
    np.testing.assert_array_equal(ours[0][0, 0], x[0, 0])
    assert (ours[1][0, 1:] != 0).numpy().all() and not (ours[1][0, 0] != 0).numpy().any()


class Share(layers.Layer):
    def call(self, x, context):
        return x + 0.01 * context


def test_the_gradient_of_a_tensor_that_layers_share_is_summed_in_float32():
    """300 times 0.01; summed in bfloat16, whose numbers are 1/64 apart there, it would be 3.22."""
    stack = LayerStack(lambda: Share(dtype="bfloat16"), 300)
    x = tf.zeros([1, 1], tf.bfloat16)

    @tf.function
    def gradient(context):
        with tf.GradientTape() as tape:
            tape.watch(context)
            y = stack(x, context=context, training=True)
        return tape.gradient(y, context)

    assert gradient(tf.ones_like(x)).numpy().item() == 3.0


def test_python_arguments_reach_every_layer():
    stack, _ = stack_and_plain(Gate)
    x = values(B, T, D)
    np.testing.assert_allclose(stack(x, double=True), 2.0**DEPTH * x)


# In a model.


def model_of(make_layer, plain=False, depth=2, **options):
    """A model with a stack, or with the plain layers; the same weights."""
    keras.utils.set_random_seed(2)
    x = inputs = keras.Input((T, D))
    if plain:
        for _ in range(depth):
            x = make_layer()(x)
    else:
        x = LayerStack(make_layer, depth, name="stack", **options)(x)
    return keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(x))


def stack_of_batches(micro_batches=2):
    return values(micro_batches, 3, T, D), values(micro_batches, 3, T, 1, seed=1)


def as_plain_weights(model):
    stack = model.get_layer("stack")
    return [w for layer in stack.unstack() for w in layer.get_weights()] + model.layers[
        -1
    ].get_weights()


@pytest.mark.parametrize(
    "make_layer", [transformer_block, lambda: random_block(keras.regularizers.L2(0.1))]
)
def test_a_train_step_is_that_of_the_plain_model(make_layer):
    ours, theirs = model_of(make_layer), model_of(make_layer, plain=True)
    options = {"jit_compile": make_layer is transformer_block}
    trainers = [
        fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", **options) for model in (ours, theirs)
    ]
    results = [trainer.train_step(stack_of_batches()) for trainer in trainers]
    assert float(results[0].loss) == pytest.approx(float(results[1].loss), rel=1e-5)
    assert float(results[0].grad_norm) == pytest.approx(float(results[1].grad_norm), rel=1e-4)
    assert_close(as_plain_weights(ours), theirs.get_weights(), 1e-5)


def test_fits_in_float16_with_steps_per_execution_then_evaluates_and_predicts():
    keras.config.set_dtype_policy("mixed_float16")
    model = model_of(random_block)
    options = {"gradient_accumulation_steps": 2, "steps_per_execution": 2, "jit_compile": False}
    trainer = fa.Trainer(model, "adam", "mse", **options)
    assert isinstance(trainer.loss_scale, fa.DynamicLossScale)
    x, y = (np.reshape(t, (-1, *t.shape[2:])) for t in stack_of_batches(8))
    history = trainer.fit(x, y, batch_size=3, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0] and not history["skipped_steps"][-1]
    assert np.isfinite(trainer.evaluate(x, y, batch_size=3, verbose=0))
    assert trainer.predict(x, batch_size=3, verbose=0).shape == y.shape


def test_a_frozen_stack_stays_and_its_statistics_too():
    model = model_of(random_block)
    stack = model.get_layer("stack")
    stack.trainable = False
    before = stack.get_weights()
    assert not stack.trainable_variables and not stack.template.layers[-1].trainable
    fa.Trainer(model, "sgd", "mse", jit_compile=False).train_step(stack_of_batches())
    for now, then in zip(stack.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_frozen_weights_of_layers_stay_frozen():
    def make_layer():
        return keras.Sequential([layers.Dense(D, trainable=False), layers.Dense(D)])

    ours, theirs = model_of(make_layer), model_of(make_layer, plain=True)
    assert len(ours.get_layer("stack").trainable_variables) == 2
    for model in (ours, theirs):
        fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", jit_compile=False).train_step(
            stack_of_batches()
        )
    assert_close(as_plain_weights(ours), theirs.get_weights(), 1e-5)


@pytest.mark.parametrize("given_as", ["function", "layer"])
def test_saves_and_loads(given_as, tmp_path):
    model = model_of(random_block if given_as == "function" else random_block(), depth=3)
    x, _ = stack_of_batches()
    model(x[0], training=True)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x[0]), model(x[0]))
    stack = loaded.get_layer("stack")
    assert (stack.depth, stack.implementation, type(stack.template)) == (
        3,
        "auto",
        keras.Sequential,
    )
    fresh = model_of(
        random_block, depth=3, policy=("attention", "gate"), implementation="reference"
    )
    fresh.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(fresh(x[0]), model(x[0]), atol=1e-6)
    config = fresh.get_layer("stack").get_config()
    again = LayerStack.from_config(config)
    assert (again.implementation, again.policy) == ("reference", ["attention", "gate"])
    del config["policy"]  # as an older file has it
    assert LayerStack.from_config(config).policy == "auto"


def test_a_tensorflow_checkpoint_restores_it(tmp_path):
    model, other = model_of(lambda: layers.Dense(D)), model_of(lambda: layers.Dense(D))
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    for weight in other.weights:
        weight.assign(tf.zeros(weight.shape))
    tf.train.Checkpoint(model=other).restore(path).assert_consumed()
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stack_of_stacks():
    def inner():
        return LayerStack(
            lambda: keras.Sequential([layers.Dense(D, "tanh"), layers.Dropout(0.5)]), 2
        )

    stack, plain = stack_and_plain(inner)
    x = values(B, T, D)
    ours = gradients(stack, stack.weights, x, jit_compile=False)
    assert_close(ours, plain_gradients(plain, x, jit_compile=False), 1e-5)


def test_mixed_precision_survives_saving(tmp_path):
    model = model_of(lambda: TransformerBlock(2, dtype="mixed_float16"))
    model.save(tmp_path / "model.keras")
    stack = keras.models.load_model(tmp_path / "model.keras").get_layer("stack")
    assert stack.compute_dtype == stack.template.attention.qkv.compute_dtype == "float16"
    assert {w.dtype for w in stack.weights} == {"float32"}


def test_weights_stay_float32_where_a_mixed_layer_builds_the_stack():
    class Outer(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.stack = LayerStack(lambda: layers.Dense(D, dtype=self.dtype_policy), 2)

        def call(self, x):
            return self.stack(x)

    outer = Outer(dtype="mixed_float16")
    assert outer(values(B, D)).dtype == tf.float16
    assert [w.value.dtype for w in outer.stack.weights] == [tf.float32] * 2


def test_unstacks_and_takes_weights_back():
    stack, plain = stack_and_plain(random_block)
    other = LayerStack(random_block, DEPTH)
    other.build((B, T, D))
    x = values(B, T, D)
    other.assign_from(stack.unstack())
    ours, again, theirs = (
        of(model, *variables, x, jit_compile=False)[:2]
        for of, model, *variables in (
            (gradients, stack, []),
            (gradients, other, []),
            (plain_gradients, plain),
        )
    )
    for a, b, c in zip(ours, again, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


def test_holds_each_weight_once():
    """Neither the template nor the layers that gave the initial values are weights of the model, or
    stay.
    """
    made = []

    def make_layer():
        layer = layers.Dense(D)
        made.append(weakref.ref(layer))
        return layer

    model = model_of(make_layer, depth=4)
    gc.collect()
    assert [ref() is not None for ref in made] == [True, False, False, False]
    assert model.count_params() == 4 * (D * D + D) + D + 1
    assert not {id(v) for v in model.get_layer("stack").template.variables} & {
        id(v) for v in model.variables
    }
    assert [w.name for w in model.get_layer("stack").weights] == ["kernel", "bias"]


# What XLA makes of it.


def train_program(make_layer, depth, x_shape=(4, 16, D), **options):
    """Forward and backward."""
    stack, _ = stack_and_plain(make_layer, depth, x_shape, **options)

    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(stack(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in stack.weights])

    return tf.function(run, jit_compile=True, autograph=False)


@pytest.fixture(scope="module")
def programs():
    return {
        depth: compiled.compiler_ir(train_program(transformer_block, depth), tf.zeros([4, 16, D]))
        for depth in (4, 24)
    }


def test_the_program_does_not_grow_with_depth(programs):
    sizes = {
        depth: len(re.findall(r"^ .* = ", hlo, re.MULTILINE)) for depth, hlo in programs.items()
    }
    assert sizes[4] == sizes[24] > 100


def test_two_loops_with_trip_counts_that_xla_knows(programs):
    loops = re.findall(r"^.* while\(.*$", programs[24], re.MULTILINE)
    assert len(loops) == 2
    assert all('known_trip_count":{"n":"24"}' in loop for loop in loops)
    assert " conditional(" not in programs[24]


def test_no_product_with_weights_is_computed_twice(programs):
    """Forward 6 of a block, 2 for each on the way back, and attention's scores and weighted values
    once more.
    """

    def products(hlo):
        return len(re.findall(r" dot\(|matmul\"", hlo))

    recomputed = compiled.compiler_ir(
        train_program(transformer_block, 4, policy="nothing_saveable"), tf.zeros([4, 16, D])
    )
    assert products(recomputed) - products(programs[4]) == 4


def test_gradients_are_written_in_place(programs):
    """No copy of a whole stack of weights or gradients: the loops carry each in one buffer."""
    kernels = r"f32\[24,(?:12,48|48,12|12,36)\]"
    assert re.search(kernels + r"\S* dynamic-update-slice", programs[24])
    assert not re.findall(rf"^.* = {kernels}\S* copy\(.*$", programs[24], re.MULTILINE)


def test_a_train_step_keeps_every_trip_count():
    trainer = fa.Trainer(model_of(random_block, depth=5), "adamw", "mse", clip_norm=1.0)
    hlo = trainer.compiler_ir(stack_of_batches(3))
    loops = re.findall(r"^.* while\(.*$", hlo, re.MULTILINE)
    assert len(loops) >= 3 and all("known_trip_count" in loop for loop in loops)
    assert " conditional(" not in hlo


def test_memory_of_a_layer_once_and_of_what_is_kept_per_layer():
    x = tf.zeros([8, 32, D])

    def temp(depth, policy):
        return compiled.memory_analysis(
            train_program(mlp_block, depth, x.shape, policy=policy), x
        ).temp_bytes

    recomputed = temp(12, "nothing_saveable")
    assert (recomputed - temp(4, "nothing_saveable")) / 8 == pytest.approx(
        4 * np.prod(x.shape), rel=0.05
    )
    # The first product is 4 times as wide as x; the gradient needs nothing of the second.
    assert temp(12, "auto") - recomputed == pytest.approx(12 * 4 * 4 * np.prod(x.shape), rel=0.15)


def test_inference_saves_nothing():
    x = tf.zeros([8, 32, D])

    def temp(depth):
        stack, _ = stack_and_plain(mlp_block, depth, x.shape)
        return compiled.memory_analysis(tf.function(stack, jit_compile=True), x).temp_bytes

    assert temp(12) <= 1.01 * temp(4)


def test_one_trace_serves_every_layer():
    calls = []

    class Probe(layers.Layer):
        def call(self, x):
            calls.append(1)
            return x * 2.0

    def count(depth):
        stack = LayerStack(Probe, depth)
        calls.clear()
        gradients(stack, [], tf.ones([2, 3]))
        return len(calls)

    assert count(2) == count(9)


# Bad input.


class Widening(layers.Layer):
    def call(self, x):
        return tf.concat([x, x], -1)


class Casting(layers.Layer):
    def call(self, x):
        return tf.cast(x, tf.float64)


class AddingLosses(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return x


class CountingCalls(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean()

    def call(self, x):
        return x


SHARED = layers.Dense(D)
RATES = iter(np.linspace(0.1, 0.9, 9))


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (Widening, r"Widening.* maps float32 \(2, 5, 12\) to float32 \(2, 5, 24\)"),
        (Casting, "Casting.*float64"),
        (AddingLosses, "AddingLosses.* adds losses"),
        (lambda: layers.Dense(D, activity_regularizer="l2"), "Dense.* adds losses"),
        (lambda: layers.Dense(D, kernel_constraint="max_norm"), "constraint="),
        (lambda: layers.Dense(D, kernel_regularizer="orthogonal_regularizer"), "regularizer="),
        (CountingCalls, "metric"),
        (lambda: SHARED, "share.*kernel"),
        (lambda: layers.Dropout(next(RATES)), "rate.*only names, weights and seeds"),
        (lambda: layers.Dense(D, use_bias=next(RATES) < 0.25), "has variables"),
    ],
)
def test_layers_that_do_not_stack_are_refused(make_layer, message):
    global RATES
    RATES = iter(np.linspace(0.1, 0.9, 9))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        LayerStack(make_layer, 3)(values(B, T, D), training=True)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "depth=0 ", (layers.ReLU, 0), {}),
        (ValueError, "depth=-2 ", (layers.ReLU, -2), {}),
        (ValueError, r"depth=1\.5 ", (layers.ReLU, 1.5), {}),
        (TypeError, "depth='two'", (layers.ReLU, "two"), {}),
        (TypeError, "make_layer=3 must be", (3, 2), {}),
        (TypeError, "make_layer=.*lambda.* must be", (lambda: None, 2), {}),
        (
            ValueError,
            "policy='all'.*'auto' or 'nothing_saveable' or 'every",
            (layers.ReLU, 2),
            {"policy": "all"},
        ),
        (
            ValueError,
            r"policy='wave' must be .* or a list of names",
            (layers.ReLU, 2),
            {"policy": "wave"},
        ),
        (ValueError, r"policy=\['qkv', 3\]", (layers.ReLU, 2), {"policy": ["qkv", 3]}),
        (ValueError, "unroll='yes'.*True or False or 'auto'", (layers.ReLU, 2), {"unroll": "yes"}),
        (
            ValueError,
            "policy='nothing.*unroll=True",
            (layers.ReLU, 2),
            {"policy": "nothing_saveable", "unroll": True},
        ),
        (
            ValueError,
            "implementation='fast'.*'auto' or 'reference'",
            (layers.ReLU, 2),
            {"implementation": "fast"},
        ),
        (TypeError, "make_layer: .*missing 1 required", (layers.Dense, 2), {}),
        (
            ValueError,
            "make_layer returned .*quantized",
            (lambda: layers.Dense(D, dtype="int8_from_float32"), 2),
            {},
        ),
        (TypeError, "name=3 must be", (layers.ReLU, 2), {"name": 3}),
        (TypeError, "trainable='yes' must be", (layers.ReLU, 2), {"trainable": "yes"}),
    ],
)
def test_bad_arguments_name_the_value(error, message, arguments, options):
    with pytest.raises(error, match=message):
        LayerStack(*arguments, **options)


@pytest.mark.parametrize(
    ("given", "taken"), [(1, True), (np.True_, True), (np.False_, False), ("auto", "auto")]
)
def test_numpy_bools_unroll_like_bools(given, taken):
    assert LayerStack(layers.ReLU, 2, unroll=given).unroll is taken


@pytest.mark.parametrize(
    ("make_layer", "error", "message"),
    [
        (
            lambda: layers.MultiHeadAttention(1, 2),
            TypeError,
            r"MultiHeadAttention\), built for x of shape \(2, 5, 12\): ",
        ),
        (lambda: layers.Conv1D(D, 9), ValueError, r"conv1d.* \(Conv1D\), (built|called)"),
        (
            lambda: keras.Sequential([keras.Input((7,)), layers.Dense(D)]),
            ValueError,
            r"Sequential\), called with x float32",
        ),
        (layers.Layer, ValueError, r"\(Layer\), called with x float32 \(2, 5, 12\) and \[\]: "),
        (lambda: layers.Lambda(lambda x: x.nothing), ValueError, r"\(Lambda\), called with x"),
    ],
)
def test_a_layer_that_cannot_take_x_is_named(make_layer, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        LayerStack(make_layer, 2)(values(B, T, D))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None,), {}, TypeError, "x=None must be a tensor"),
        (("text",), {}, ValueError, "x"),
        (({"x": tf.ones([2, D])},), {}, TypeError, "x is a dict"),
        ((tf.ones([]),), {}, TypeError, r"x has x_shape=.* one tensor"),
        (
            (tf.ones([2, D]),),
            {"training": "yes"},
            ValueError,
            "training='yes' must be True or False",
        ),
        (
            (tf.ones([2, D]),),
            {"nothing": 1},
            TypeError,
            r"\(Dense\), called with x .* and \['nothing'\]",
        ),
    ],
)
def test_bad_calls_are_named(arguments, options, error, message):
    with pytest.raises(
        error if error is TypeError else (TypeError, ValueError), match=f"(?s){message}"
    ):
        LayerStack(lambda: layers.Dense(D), 2)(*arguments, **options)


def test_a_stack_that_is_made_frozen():
    """The other layers were not frozen, so that it could not be built."""
    stack, plain = stack_and_plain(lambda: layers.Dense(D), trainable=False)
    assert not stack.trainable_variables and not any(layer.trainable for layer in stack.unstack())
    np.testing.assert_allclose(
        stack(values(B, T, D)), chain(plain)(values(B, T, D), training=False), rtol=1e-5
    )


def test_variables_of_another_owner_are_refused():
    foreign = tf.Variable(tf.ones([D]), name="foreign")

    class Scale(layers.Layer):
        def call(self, x):
            return x * foreign

    with pytest.raises(ValueError, match=r"Scale.*not its own.*foreign"):
        gradients(LayerStack(Scale, 2), [], values(B, T, D))


def test_a_trained_weight_that_its_layer_assigns_is_refused():
    stack = LayerStack(lambda: layers.SpectralNormalization(layers.Dense(D)), 2)
    with pytest.raises(ValueError, match=r"SpectralNormalization\) assigns '.*kernel'"):
        stack(values(B, T, D), training=True)


@pytest.mark.parametrize("policy", ["auto", "everything_saveable"])
def test_draws_that_would_be_others_when_computed_again_are_refused(policy):
    class Noise(layers.Layer):
        def __init__(self, factor, **options):
            super().__init__(**options)
            self.factor = factor

        def call(self, x):
            noise = tf.random.uniform(x.shape)
            return x * noise if self.factor else x + noise

    x = values(B, T, D)
    with pytest.raises(ValueError, match=r"draws random numbers in .*RandomUniform"):
        gradients(LayerStack(lambda: Noise(True), 2, policy=policy), [], x, jit_compile=False)
    # needs no draw again
    gradients(LayerStack(lambda: Noise(False), 2, policy=policy), [], x, jit_compile=False)


def test_values_that_the_loop_keeps_do_not_mix_rows():
    stack = LayerStack(lambda: layers.Dense(D), 2)
    graph = traces.trace(lambda x: stack(x, training=True), tf.TensorSpec([B, D])).graph
    assert row_mixing.first_cross_example_op(graph) is None


def test_a_mask_that_layers_do_not_support_is_refused():
    x = values(B, T, D)
    x._keras_mask = tf.ones([B, T], tf.bool)
    with pytest.raises(ValueError, match=r"transformer_block.*does not support masking"):
        LayerStack(transformer_block, 2)(x)


def test_more_than_one_input_is_refused():
    with pytest.raises((TypeError, ValueError), match="one tensor"):
        LayerStack(layers.Add, 2)([tf.ones([2, 3]), tf.ones([2, 3])])


def test_weights_that_do_not_fit_are_refused():
    stack, plain = stack_and_plain(lambda: layers.Dense(D))
    with pytest.raises(ValueError, match="has 2 layers, but depth=3"):
        stack.assign_from(plain[:2])
    other = layers.Dense(D + 1)
    other.build((None, D))
    with pytest.raises(ValueError, match=r"Layer 3.*has variables"):
        stack.assign_from([*plain[:2], other])
    with pytest.raises(TypeError, match=r"layers=\[1, 2, 3\] must be a list of Keras layers"):
        stack.assign_from([1, 2, 3])
    with pytest.raises(ValueError, match="has no weights yet"):
        LayerStack(layers.ReLU, 2).unstack()


def test_second_derivatives_are_refused():
    stack = LayerStack(lambda: layers.Dense(3, "tanh"), depth=2)

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = stack(x)
            squared = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(squared, x)

    with pytest.raises(Exception, match="A LayerStack has no second derivatives"):
        second(tf.ones([2, 3]))


class Embedded(layers.Layer):
    def build(self, shape):
        self.embedding = layers.Embedding(5, shape[-1])
        self.embedding.build(None)

    def call(self, x, ids):
        return x + self.embedding(ids)


def test_an_embedding_inside_is_refused():
    with pytest.raises(ValueError, match=r"Embedded.*embedding.*embed outside"):
        LayerStack(Embedded, depth=2)(tf.zeros([2, 4]), ids=tf.zeros([2], tf.int32))


class HalfInside(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(shape[-1], dtype="mixed_float16")
        self.dense.build(shape)

    def call(self, x):
        return tf.cast(self.dense(x), x.dtype)


def test_a_layer_of_low_precision_inside_is_seen():
    model = keras.Sequential([keras.Input((4,)), LayerStack(HalfInside, depth=2)])
    assert isinstance(fa.Trainer(model, "sgd", "mse").loss_scale, fa.DynamicLossScale)


def test_a_switched_stack_takes_the_weights_of_plain_layers():
    stack = LayerStack(lambda: layers.Dense(4, dtype="mixed_float16"), depth=3)
    fa.kernels.fp32_weight_gradients(stack)
    x = tf.ones([2, 4], tf.float16)
    before = stack(x)
    stack.assign_from(stack.unstack())
    np.testing.assert_array_equal(stack(x), before)
