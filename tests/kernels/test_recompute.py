"""Compares recomputation with the plain function: values, gradients, state, and the HLO."""

import functools
import types

import h200
import hlo
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras import layers

import fastaccum as fa
from fastaccum.kernels import LayerStack, checkpoint_name, private, recompute
from fastaccum.kernels.recompute import recomputed
from fastaccum.transformer import TransformerBlock

B, T, D = 2, 3, 8
X = np.random.default_rng(0).normal(size=(B, T, D)).astype("float32")


def jitted(function):
    return tf.function(function, jit_compile=True, autograph=False)


def gradients_of(block, on, x=X, depth=2, **options):
    """A step over `block`, called several times with the same weights: its loss, gradients and
    state after.
    """

    @jitted
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(depth):
                call = (lambda y: recomputed(run, y, **options)) if on else run
                y = y + call(y)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return loss, tape.gradient(loss, [x, *(v.value for v in block.trainable_variables)])

    def run(y):
        return block(y, training=True)

    before = [v.numpy() for v in block.variables]
    loss, gradients = step(tf.constant(x))
    after = [v.numpy() for v in block.variables]
    for variable, value in zip(block.variables, before, strict=True):
        variable.assign(value)
    return float(loss), [g.numpy() for g in gradients], after


def require_close(found, expected, rtol=1e-5):
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol)
    for one, other in zip(found[1], expected[1], strict=True):
        one, other = one.astype("float32"), other.astype("float32")
        np.testing.assert_allclose(
            one, other, rtol=rtol, atol=rtol * max(np.abs(other).max(), 1e-3)
        )
    for one, other in zip(found[2], expected[2], strict=True):
        # seeds
        exact = (
            {"rtol": 0} if np.issubdtype(one.dtype, np.integer) else {"rtol": rtol, "atol": 1e-6}
        )
        np.testing.assert_allclose(one, other, **exact)


class DropsTwice(layers.Layer):
    """Draws both dropout masks from one generator."""

    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x, training=None):
        return keras.random.dropout(
            keras.random.dropout(x, 0.3, seed=self.seed), 0.3, seed=self.seed
        )


def dense_block(dtype="float32", between=()):
    first = [layers.LayerNormalization(dtype=dtype), layers.Dense(2 * D, "gelu", dtype=dtype)]
    normalized = layers.BatchNormalization(dtype=dtype)
    return built(keras.Sequential([*first, *between, normalized, layers.Dense(D, dtype=dtype)]))


def built(block):
    block.build((B, T, D))
    return block


@pytest.fixture(scope="module")
def random():
    """A block with every kind of state, weights, batch statistics and seeds, and what it computes
    plainly.
    """
    block = dense_block(between=[DropsTwice("float32")])
    return block, gradients_of(block, on=False)


def test_gradients_and_state_are_the_plain_ones(random):
    block, plain = random
    require_close(gradients_of(block, on=True), plain)


def test_seeds_that_had_moved_on_would_be_seen(random, monkeypatch):
    """The control of what compares gradients: with other dropout masks they differ."""
    (block, plain), backward = random, recompute._Block.backward
    monkeypatch.setattr(
        recompute._Block,
        "backward",
        lambda self, dy, _, kept: backward(self, dy, self.read(), kept),
    )
    with pytest.raises(AssertionError):
        require_close(gradients_of(block, on=True), plain)


def test_a_stack_within():
    block = built(LayerStack(lambda: layers.Dense(D, "tanh"), 2))
    require_close(gradients_of(block, on=True), gradients_of(block, on=False))


@pytest.mark.parametrize(
    "dtype", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_in_mixed_precision(dtype):
    block = dense_block(dtype)
    assert fa.kernels.fp32_weight_gradients(block)
    x = X.astype("float16") if dtype == "mixed_float16" else tf.cast(X, tf.bfloat16)
    found, expected = (gradients_of(block, on, x, depth=1) for on in (True, False))
    assert [g.dtype.name for g in found[1]] == [x.dtype.name, *["float32"] * (len(found[1]) - 1)]
    require_close(found, expected, rtol=1e-2 if dtype == "mixed_bfloat16" else 2e-3)


@pytest.mark.parametrize(
    "policy", ["auto", pytest.param(["projection"], marks=pytest.mark.slow)], ids=str
)
def test_policies(policy):
    block = dense_block()
    require_close(
        gradients_of(block, on=True, depth=1, policy=policy), gradients_of(block, on=False, depth=1)
    )


def test_a_policy_that_names_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no value of a layer has the name 'attentoin'"):
        gradients_of(dense_block(), on=True, policy=["attentoin"])
    with pytest.raises(ValueError, match="policy='all' must be"):
        recomputed(tf.sin, tf.constant(0.0), policy="all")


def products_saved(make, x, w, kept):
    """Counts the products that a policy saves; `make` returns the function, and is called outside
    of what is computed again.
    """

    def products(policy):
        @jitted
        def step(x):
            with tf.GradientTape() as tape:
                y = recomputed(make(), x, policy=policy)
            return tape.gradient(y, w)

        return step.experimental_get_compiler_ir(x)(stage="stablehlo").count("stablehlo.dot")

    return products("nothing_saveable") - products(kept)


def test_a_named_value_is_not_computed_again():
    """Recomputes what follows from the named value: one product less than without the name."""
    w = tf.Variable(tf.ones([D, D]))

    def make():
        return lambda x: tf.tanh(checkpoint_name(tf.tanh(x @ w), "hidden") @ w) @ w

    assert products_saved(make, tf.ones([4, D]), w, ["hidden"]) == 1


def test_a_product_with_a_weight_that_is_cast_outside_is_kept():
    w = tf.Variable(tf.ones([D, D]))

    def make():
        rounded = tf.cast(w, tf.bfloat16)
        return lambda x: tf.tanh(tf.tanh(x @ rounded) @ rounded)

    assert products_saved(make, tf.ones([4, D], tf.bfloat16), w, ["projection"]) == 2


def test_a_product_of_what_ids_make_is_kept():
    """Ids are inputs that vary, although the function captures them."""
    w = tf.Variable(tf.ones([D, D]))

    def make():
        return lambda ids: tf.tanh(tf.tanh(tf.one_hot(ids, D) @ w) @ w)

    assert products_saved(make, tf.range(2), w, ["projection"]) == 2


def test_nests_go_in_and_out():
    w, count = tf.Variable(tf.ones([T, D])), tf.Variable(1.0)
    outside = tf.Variable(2.0)

    def function(inputs, nothing, number, factor):
        assert nothing is None and number == 3
        count.assign_add(1.0)
        count.assign_add(tf.reduce_sum(w) / w.shape.num_elements())
        y = inputs["x"] * w * factor
        return {"y": (y, inputs["ids"] + 1, None, "text", 5), "z": [y * count, inputs["x"]]}

    def run(on):
        @jitted
        def step(x, ids):
            with tf.GradientTape() as tape:
                tape.watch(x)
                factor = outside * 3.0  # captured
                call = (lambda *inputs: recomputed(function, *inputs)) if on else function
                found = call({"x": x, "ids": ids}, None, 3, factor)
                assert found["y"][2:] == (None, "text", 5)
                (y, *_), (z, x_again) = found["y"], found["z"]
                loss = tf.reduce_sum(y**2) + tf.reduce_sum(z) + tf.reduce_sum(x_again**3)
            return found["y"][1], tape.gradient(loss, [x, w, count, outside])

        count.assign(1.0)
        return [*tf.nest.flatten(step(tf.constant(X), tf.range(3))), count.numpy()]

    plain, again = run(False), run(True)
    assert plain[-1] == again[-1] == 3.0
    for found, expected in zip(again, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_keras_masks_go_in_and_come_out():
    mask = tf.constant([[True, False, True], [False, True, True]])

    @jitted
    def step(x):
        seen = []

        def function(x):
            seen.append(private.keras_mask(x, None))
            y = tf.sin(x)
            private.keras_mask.set(y, ~private.keras_mask(x))
            return y

        private.keras_mask.set(x, mask)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(function, x)
        assert seen[0] is not None
        return private.keras_mask(y), tape.gradient(y, x)

    found, gradient = step(tf.constant(X))
    np.testing.assert_array_equal(found, ~mask)
    np.testing.assert_allclose(gradient, np.cos(X), atol=1e-6)


@pytest.mark.parametrize("package", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_gradient_of_an_embedding_stays_sparse(package):
    embedding = package.layers.Embedding(50, D)
    embedding.build(None)
    table = tf.convert_to_tensor(embedding.embeddings).numpy()
    ids = tf.constant([[1, 2], [2, 3]])

    @jitted
    def step(ids):
        with tf.GradientTape() as tape:
            y = recomputed(lambda ids: embedding(ids) ** 2, ids)
        gradient = tape.gradient(
            y, embedding.embeddings.value if package is keras else embedding.embeddings
        )
        assert isinstance(gradient, tf.IndexedSlices)
        return gradient.values, gradient.indices

    values, indices = step(ids)
    np.testing.assert_array_equal(indices, [1, 2, 2, 3])
    np.testing.assert_allclose(values, 2 * table[[1, 2, 2, 3]], rtol=1e-6)


def test_draws_of_tensorflow_are_those_of_the_forward_pass():
    """Draws as the dropout of tf_keras does.

    Since y is linear in x, the gradient shows which elements were dropped.
    """
    dropout = tf_keras.layers.Dropout(0.5)

    @jitted
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(lambda x: dropout(x, training=True), x)
        return y, tape.gradient(y, x)

    y, gradient = step(tf.ones([64, 8]))
    np.testing.assert_array_equal(y, gradient)
    assert 0.3 < np.mean(np.equal(y, 0.0)) < 0.7


def test_functions_that_cannot_be_recomputed_are_refused():
    counter, x = tf.Variable(0.0), tf.constant(X)
    drawing = tf.function(lambda x: x * tf.random.uniform(x.shape), autograph=False)
    counting = tf.function(lambda x: x * counter.assign_add(1.0), autograph=False)

    def gradient(function, order=1):
        @jitted
        def step(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = recomputed(function, x)
                found = tape.gradient(y, x)
            return found if order == 1 else outer.gradient(found, x)

        return step(x)

    with pytest.raises(ValueError, match=r"draws random numbers in \['StatefulPartitionedCall'\]"):
        gradient(lambda x: drawing(x) ** 2)
    with pytest.raises(
        ValueError, match=r"assigns \['Variable:0'\], which 'StatefulPartitionedCall'"
    ):
        gradient(counting)
    with pytest.raises(LookupError, match="no second derivatives"):
        gradient(tf.sin, order=2)


def test_values_that_a_layer_stores_are_read_outside():
    """Reads attention's scores, which a layer keeps in an attribute, in a loss after the call."""
    layer = types.SimpleNamespace(
        last=None, several=[None, 2.0], named={"scores": None, "other": "text"}
    )

    def function(x):
        layer.last, layer.several[0], layer.named["scores"] = tf.sin(x), tf.cos(x), tf.argmax(x, -1)
        return tf.tanh(x)

    def gradient(call):
        @jitted
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(function, x) * layer.last + layer.several[0] ** 2
                loss = y * tf.cast(layer.named["scores"][..., None] + 1, y.dtype)
            return tape.gradient(loss, x)

        return step(tf.constant(X))

    expected = gradient(lambda function, x: function(x))
    np.testing.assert_allclose(
        gradient(functools.partial(recomputed, layers=[layer])), expected, atol=1e-6
    )


def test_elsewhere_it_is_the_function():
    """Eagerly, outside of XLA, and where no tape looks on."""
    x = tf.constant(X)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(tf.sin, x)
        return tape.gradient(y, x)

    def copies(run):
        return [
            n.name
            for n in run.get_concrete_function(x).graph.as_graph_def().node
            if n.name.startswith("forward/")
        ]

    assert copies(jitted(step))  # the control: there it is not
    assert not copies(tf.function(step)) and not copies(jitted(lambda x: recomputed(tf.sin, x)))
    np.testing.assert_allclose(step(x), np.cos(X), atol=1e-6)


class Again(layers.Layer):
    """A block whose activations are computed again."""

    def __init__(self, block, on, dtype):
        super().__init__(dtype=dtype)
        self.block, self.on = block, on
        self.supports_masking = True

    def build(self, shape):
        if not self.block.built:
            self.block.build(shape)

    def call(self, x, training=None):
        run = lambda x: self.block(x, training=training)  # noqa: E731
        return recomputed(run, x, layers=list(self.block._flatten_layers())) if self.on else run(x)


def trained(on, dtype, stacked):
    """Losses and weights of a model whose blocks add losses, assign state, and stand within each
    other.
    """
    keras.utils.set_random_seed(0)
    inner = Again(keras.Sequential(dropped(dtype)), on, dtype)
    normalized = layers.BatchNormalization(dtype=dtype)
    block = [layers.Dense(D, "tanh", activity_regularizer="l2", dtype=dtype), normalized, inner]
    blocks = [
        Again(keras.Sequential([layers.Embedding(20, D, dtype=dtype)]), on, dtype),
        Again(keras.Sequential(block), on, dtype),
    ]
    if stacked:
        blocks.append(LayerStack(lambda: Again(keras.Sequential(dropped(dtype)), on, dtype), 2))
        blocks.append(Again(TransformerBlock(2, dtype=dtype), on, dtype))
    model = keras.Sequential(
        [keras.Input((T,), dtype="int32"), *blocks, layers.Dense(1, dtype="float32")]
    )
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=2)
    ids = np.arange(8 * T).reshape(8, T) % 20
    history = trainer.fit(
        ids, np.ones((8, T, 1), "float32"), batch_size=2, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"], [v.numpy() for v in model.variables]


def dropped(dtype):
    return [layers.Dense(D, dtype=dtype), layers.Dropout(0.3, dtype=dtype)]


SLOW = pytest.param("mixed_float16", True, marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "stacked"), [("float32", False), SLOW])
def test_a_trainer_makes_the_same_steps(dtype, stacked):
    (plain, before), (again, after) = (trained(on, dtype, stacked) for on in (False, True))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2e-3, "atol": 2e-3}
    np.testing.assert_allclose(again, plain, **tolerance)
    for found, expected in zip(after, before, strict=True):
        np.testing.assert_allclose(found, expected, **tolerance)


@pytest.mark.slow
@pytest.mark.sample
def test_in_the_order_for_a_gpu_too(monkeypatch):
    """There blocks add to the accumulators themselves, one block after the other: shared weights
    come twice.
    """
    block = dense_block()

    def train():
        model = keras.Sequential(
            [keras.Input((T, D)), *(Again(block, True, "float32") for _ in range(2))]
        )
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=2)
        before = [v.numpy() for v in model.variables]
        trainer.train_step((X[:, None], X[:, None]))
        after = [v.numpy() for v in model.variables]
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
        return after

    expected, asked, own = train(), [], recompute._in_turn
    monkeypatch.setattr(recompute, "has_gpu", lambda: True)
    monkeypatch.setattr(recompute, "_in_turn", lambda *given: asked.append(given[2]) or own(*given))
    for one, other in zip(train(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert len(asked) == 2 and all(each is not None for each in asked[0][:2])


DEPTH, WIDTH, ROWS = 24, 256, 2048


def compiled_chain(call):
    """A training step of `DEPTH` MLPs in a chain, compiled for an H200: its HLO and its memory."""
    with h200.weightless():
        blocks = [
            keras.Sequential([layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)])
            for _ in range(DEPTH)
        ]
        for block in blocks:
            block.build((ROWS, WIDTH))
    weights = [v.value for block in blocks for v in block.trainable_variables]

    @jitted
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for block in blocks:
                y = y + call(lambda y, block=block: block(y, training=True), y)
            loss = tf.reduce_sum(y**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    with h200.as_on_a_gpu():
        exported = step.experimental_get_compiler_ir(tf.TensorSpec([ROWS, WIDTH]))(
            stage="stablehlo_serialized"
        )
    return h200.compile_for_h200(exported)


@pytest.mark.slow
def test_memory_of_a_chain_of_blocks_on_a_gpu(monkeypatch):
    """Recomputes one product for each block, the first, since nothing reads the second.

    Without the barrier, XLA recomputes none.
    """

    def plainly(function, x):
        return function(x)

    plain, again = compiled_chain(plainly), compiled_chain(recomputed)
    monkeypatch.setattr(private.xla, "optimization_barrier", lambda *tensors: tensors)
    merged = compiled_chain(recomputed)
    compiled = plain, again, merged
    temp = [memory.temp_bytes for _, memory in compiled]
    products = [text.count(" dot(") for text, _ in compiled]
    assert temp[1] <= 0.2 * temp[0]
    assert temp[2] > 0.9 * temp[0]
    assert products[1] - products[0] == DEPTH
    assert products[2] == products[0]


@pytest.mark.slow
def test_a_step_holds_no_more_than_the_inputs_of_blocks_on_a_gpu():
    """The gradient of each weight is added to its accumulator, in its matmul, before the block
    before begins.
    """
    depth, width, rows = 12, 1024, 8192

    def compiled(on):
        with h200.weightless():
            shapes = ((4 * width, "gelu"), (width, None))
            blocks = [
                keras.Sequential([layers.Dense(*s, dtype="mixed_float16") for s in shapes])
                for _ in range(depth)
            ]
            model = keras.Sequential(
                [keras.Input((width,)), *(Again(b, on, "mixed_float16") for b in blocks)]
            )
            trainer = fa.Trainer(
                model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=4
            )
            stack = np.zeros((2, 4, rows, width), "float16")
            text, memory = h200.compile_for_h200(h200.export_step(trainer, tuple(stack)))
        found = list(
            hlo.Program(text).weight_gradients(depth * [(width, 4 * width), (4 * width, width)])
        )
        assert len(found) == 2 * depth and {each.added for each in found} == {"epilogue"}
        # accumulators, and weights in half precision
        return memory.temp_bytes - 6 * model.count_params()

    assert compiled(True) <= 0.2 * compiled(False)
