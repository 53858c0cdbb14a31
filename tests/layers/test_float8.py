"""`Trainer(float8=...)`: updates against an unfused reference, and which layers take part."""

import functools
import math
import re

import h200
import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from benchmarks.h200 import kernels
from fastaccum.kernels import fp32_layers
from fastaccum.kernels.matmul import einsum_fp32_wgrad
from fastaccum.layers import float8
from fastaccum.layers.interceptors import intercepting

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8, 32)).astype("float32")
LABELS = RNG.integers(0, 7, (4, 8))
IDS = RNG.integers(0, 64, (2, 2, 16)).astype("int32")
OF_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SLOWER = "ignore:float8=True. this device has no float8 products"
pytestmark = pytest.mark.filterwarnings(SLOWER)


def mlp(dtype="mixed_bfloat16"):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="gelu", dtype=dtype, name="first"),
            keras.layers.Dense(48, dtype=dtype, name="second"),
            keras.layers.Dense(7, dtype=dtype, name="last"),
            keras.layers.Softmax(dtype="float32"),
        ]
    )


def gpt(**options):
    keras.utils.set_random_seed(0)
    return fa.gpt(64, 16, 32, 2, 2, dtype="mixed_bfloat16", **options)


def trained(model, stack, loss, steps=1, **options):
    trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), loss, **options)
    before = model.get_weights()
    for _ in range(steps):
        trainer.train_step(stack)
    moves = [now - then for now, then in zip(model.get_weights(), before, strict=True)]
    return trainer, moves


def reference_moves(compiled):
    """The update of `mlp`, by products of the kernel's reference and a tape on each micro-batch."""
    model = mlp()
    first, second, last = (model.get_layer(name) for name in ("first", "second", "last"))
    total = [tf.zeros(v.shape) for v in model.trainable_variables]

    def product(layer, x):
        y = fa.kernels.matmul_float8(x, layer.kernel.value, implementation="reference")
        return y + tf.cast(tf.broadcast_to(layer.bias.value, tf.shape(y)), y.dtype)

    @tf.function(jit_compile=compiled, autograph=False)
    def gradients(x, labels):
        with tf.GradientTape() as tape:
            h = keras.activations.gelu(product(first, tf.cast(x, tf.bfloat16)))
            h = product(second, h)
            logits = fa.kernels.matmul_fp32_wgrad(h, last.kernel.value)
            logits += tf.cast(tf.broadcast_to(last.bias.value, tf.shape(logits)), logits.dtype)
            y = keras.ops.softmax(tf.cast(logits, tf.float32))
            loss = tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(labels, y))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    for x, labels in zip(X, LABELS, strict=True):
        of_batch = gradients(tf.constant(x), tf.constant(labels))
        total = [a + g for a, g in zip(total, of_batch, strict=True)]
    return [-0.1 * t.numpy() / LABELS.size for t in total]


def largest_error(moves, expected):
    """The largest error of a variable's update, by norms."""
    errors = []
    for move, exact in zip(moves, expected, strict=True):
        errors.append(np.linalg.norm(move - exact) / np.linalg.norm(exact))
    return max(errors)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_update_is_that_of_the_reference(compiled):
    stack, loss = (X, LABELS), "sparse_categorical_crossentropy"
    _, moves = trained(mlp(), stack, loss, float8=True, jit_compile=compiled)
    expected = reference_moves(compiled)
    assert largest_error(moves, expected) < 1e-5
    _, half = trained(mlp(), stack, loss, jit_compile=compiled)
    assert largest_error(half, expected) > 3e-2  # the control: without float8


def test_evaluation_and_prediction_stay_in_half_precision():
    half = fa.Trainer(mlp(), "sgd", "sparse_categorical_crossentropy", jit_compile=False)
    ours = fa.Trainer(
        mlp(), "sgd", "sparse_categorical_crossentropy", jit_compile=False, float8=True
    )
    x, labels = X.reshape(-1, 32), LABELS.reshape(-1)
    for trainer in (half, ours):
        trainer.fit(x, labels, batch_size=8, epochs=1, verbose=0, shuffle=False)
    ours.model.set_weights(half.model.get_weights())
    assert ours.evaluate(x, labels, verbose=0) == half.evaluate(x, labels, verbose=0)
    np.testing.assert_array_equal(ours.predict(x, verbose=0), half.predict(x, verbose=0))


def test_each_layer_of_a_stack_has_its_own_scales():
    """Layers whose kernels differ by far: by one scale for all, small kernels would become 0."""

    def layer():
        return keras.layers.Dense(32, dtype="mixed_bfloat16")

    keras.utils.set_random_seed(0)
    stack = fa.kernels.LayerStack(layer, depth=3)
    head = keras.layers.Dense(16, dtype="mixed_bfloat16")
    stacked = keras.Sequential([keras.Input((32,)), stack, head])
    sizes = np.array([1.0, 1e3, 1e-3], "float32")
    kernels = [v for v in stack.trainable_variables if len(v.shape) == 3]
    kernels[0].assign(kernels[0] * sizes[:, None, None])
    apart = keras.Sequential(
        [
            keras.Input((32,)),
            *[layer() for _ in range(3)],
            keras.layers.Dense(16, dtype="mixed_bfloat16"),
        ]
    )
    for i, one in enumerate(apart.layers[:3]):
        one.kernel.assign(kernels[0][i])
    apart.layers[3].set_weights(head.get_weights())
    y = RNG.normal(size=(4, 8, 16)).astype("float32")
    before = kernels[0].numpy()
    trained(stacked, (X, y), "mse", float8=True, jit_compile=True)
    trained(apart, (X, y), "mse", float8=True, jit_compile=True)
    for i, one in enumerate(apart.layers[:3]):
        move = kernels[0].numpy()[i] - before[i]
        expected = one.kernel.numpy() - before[i]
        assert np.linalg.norm(move - expected) < 1e-2 * np.linalg.norm(expected)


def test_a_stack_within_a_stack_trains():
    class Block(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(dtype="mixed_bfloat16", **kwargs)
            self.inner = fa.kernels.LayerStack(
                lambda: keras.layers.Dense(32, dtype="mixed_bfloat16"), depth=2
            )

        def call(self, x):
            return self.inner(x)

    stack = fa.kernels.LayerStack(Block, depth=2)
    below = keras.layers.Dense(32, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((32,)), below, stack, keras.layers.Dense(16)])
    _, moves = trained(model, (X, X[..., :16]), "mse", float8=True, jit_compile=False)
    assert all(move.any() for move in moves)


def test_a_step_that_is_skipped_moves_nothing():
    bad = X.copy()
    bad[2, 3] = np.nan
    _, moves = trained(
        mlp(), (bad, LABELS), "sparse_categorical_crossentropy", float8=True, jit_compile=True
    )
    assert not any(move.any() for move in moves)


def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path):
    x, labels = X.reshape(-1, 32), LABELS.reshape(-1)

    def trainer():
        return fa.Trainer(
            mlp(),
            "adam",
            "sparse_categorical_crossentropy",
            gradient_accumulation_steps=2,
            jit_compile=False,
            float8=True,
        )

    whole, first, resumed = trainer(), trainer(), trainer()
    options = {"batch_size": 4, "verbose": 0, "shuffle": False}
    whole.fit(x, labels, epochs=3, **options)
    first.fit(x, labels, epochs=1, checkpoint_dir=tmp_path, **options)
    resumed.fit(x, labels, epochs=3, checkpoint_dir=tmp_path, **options)
    for a, b in zip(whole.model.get_weights(), resumed.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_recomputed_blocks_give_the_same_update_bit_for_bit():
    moves = []
    for recomputes in (False, True):
        model = gpt(stacked=False)
        if recomputes:
            fa.remat(model, layer_names=["block_0", "block_1"])
        _, moved = trained(model, (IDS, IDS), OF_LOGITS, float8=True, jit_compile=False)
        moves.append(moved)
    for a, b in zip(*moves, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_training_resumed_without_float8_is_refused(tmp_path):
    x, labels = X.reshape(-1, 32), LABELS.reshape(-1)
    loss = "sparse_categorical_crossentropy"
    options = {"batch_size": 8, "verbose": 0, "checkpoint_dir": tmp_path}
    fa.Trainer(mlp(), "sgd", loss, float8=True, jit_compile=False).fit(x, labels, **options)
    other = fa.Trainer(mlp(), "sgd", loss, jit_compile=False)
    with pytest.raises(ValueError, match="float8"):
        other.fit(x, labels, epochs=2, **options)


def test_layers_that_stay_in_half_precision_are_named_with_the_reason():
    keras.utils.set_random_seed(0)

    class Doubled(keras.layers.Dense):
        pass

    x = keras.Input((32,))
    h = keras.layers.Dense(64, name="taken")(x)
    h = keras.layers.Dense(40, name="odd")(h)
    h = Doubled(32, name="own")(h)
    adapted = keras.layers.Dense(32, name="adapted")
    h = adapted(h)
    h = keras.layers.Dense(32, dtype="float32", name="full")(h)
    h = keras.layers.EinsumDense("ab,bcd->acd", (4, 8), name="einsum")(h)
    model = keras.Model(x, keras.layers.Dense(16, name="last")(keras.layers.Flatten()(h)))
    for layer in model.layers:
        if layer.name != "full" and layer.weights:
            layer.dtype_policy = "mixed_bfloat16"
    adapted.enable_lora(2)
    trainer = fa.Trainer(model, "sgd", "mse", float8=True, jit_compile=True)
    choices = trainer.summary(X[0], X[0, :, :16], batch_size=8).float8
    assert {path.split("/")[-1]: choice for path, choice in choices.items()} == {
        "taken": "float8",
        "odd": "its sizes, 64 x 40, are not multiples of 16",
        "own": "Doubled is a class of its own",
        "adapted": "float8",
        "full": "it computes in float32 from float32 weights",
        "einsum": "float8",
        "last": "it is the last layer, whose errors reach the loss unaveraged",
    }


def adapted_mlp():
    """A model whose first two layers have LoRA, with matrices that are not 0."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(64, name="first", dtype="mixed_bfloat16"),
        keras.layers.EinsumDense(
            "ab,bcd->acd", (4, 16), name="second", dtype="mixed_bfloat16", activation="tanh"
        ),
        keras.layers.Flatten(dtype="mixed_bfloat16"),
        keras.layers.Dense(7, name="last", dtype="mixed_bfloat16"),
    ]
    model = keras.Sequential([keras.Input((32,)), *layers])
    for layer in layers[:2]:
        layer.enable_lora(4, lora_alpha=8)
        layer.lora_kernel_b.assign(RNG.normal(0, 0.1, layer.lora_kernel_b.shape))
    return model


def test_a_layer_with_lora_multiplies_by_its_frozen_kernel_in_float8():
    def reference(equation, equations, x, layer):
        y = fa.kernels.einsum_float8(equation, x, layer._kernel.value, implementation="reference")
        low_rank = x
        factors = layer.lora_kernel_a.value, 2.0 * layer.lora_kernel_b.value
        for of_factor, factor in zip(equations, factors, strict=True):
            low_rank = einsum_fp32_wgrad(of_factor, low_rank, factor)
        return y + low_rank

    model = adapted_mlp()
    first, second, last = (model.get_layer(name) for name in ("first", "second", "last"))
    trained = [v.value for v in model.trainable_variables]
    errors = keras.losses.MeanSquaredError()
    y_true = RNG.normal(size=(8, 7)).astype("float32")
    with tf.GradientTape() as tape:
        x = tf.cast(X[0], tf.bfloat16)
        h = reference("ab,bc->ac", ("ab,bc->ac", "ac,cd->ad"), x, first)
        h = reference("ab,bcd->acd", ("ab,bcd->acd", "acd,de->ace"), h, second)
        h = tf.tanh(h)
        logits = fa.kernels.matmul_fp32_wgrad(tf.reshape(h, [8, 64]), last.kernel.value)
        loss = errors(y_true, tf.cast(logits, tf.float32))
    expected = tape.gradient(loss, trained)

    trainer = fa.Trainer(model, keras.optimizers.SGD(1.0), "mse", float8=True, jit_compile=False)
    before = [v.numpy() for v in trained]
    frozen = [layer._kernel.numpy() for layer in (first, second)]
    trainer.train_step((X[:1], y_true[None]))
    for v, then, gradient in zip(trained, before, expected, strict=True):
        if gradient is None:
            continue  # biases, which the reference leaves out: they are 0
        error = np.linalg.norm(then - v.numpy() - gradient) / np.linalg.norm(gradient)
        assert error < 1e-5, v.shape
    for layer, then in zip((first, second), frozen, strict=True):
        np.testing.assert_array_equal(layer._kernel.numpy(), then)


@pytest.mark.parametrize(
    ("equation", "x", "kernel"),
    [
        ("ab,bc->ac", (3, 4), (4, 5)),
        ("...td,dnh->...tnh", (2, 3, 4), (4, 5, 6)),
        ("btnh,nhd->btd", (2, 3, 4, 5), (4, 5, 6)),
        ("abc,cde->adbe", (2, 3, 4), (4, 5, 6)),
    ],
)
def test_lora_is_two_products(equation, x, kernel):
    x = RNG.normal(size=x).astype("float32")
    a = RNG.normal(size=(*kernel[:-1], 2)).astype("float32")
    b = RNG.normal(size=(2, kernel[-1])).astype("float32")
    low = x
    equations = fp32_layers.low_rank_equations(equation, tf.constant(x), tf.zeros(kernel))
    for factor_equation, factor in zip(equations, (a, b), strict=True):
        low = einsum_fp32_wgrad(factor_equation, low, factor)
    delta = a.astype("float64") @ b
    np.testing.assert_allclose(low, np.einsum(equation, x, delta), rtol=1e-4, atol=1e-5)


def test_lora_along_an_axis_of_the_input_stays_in_half_precision():
    x, kernel = tf.zeros([2, 3, 4]), tf.zeros([5, 4])
    assert fp32_layers.low_rank_equations("abc,dc->abd", x, kernel) is None


def choices_of(model, y, **options):
    trainer, _ = trained(model, (X, y), "mse", float8=True, jit_compile=False, **options)
    choices = trainer._engine.objective.float8.choices
    return {path.split("/")[-1]: choice for path, choice in choices.items()}


def ends(name):
    """A model of two layers, "first" and "last", and what follows them."""
    dense = functools.partial(keras.layers.Dense, dtype="mixed_bfloat16")
    x = keras.Input((32,))
    h = dense(16, activation="relu", name="first")(x)
    z = dense(16, name="last")(h)
    follow = {
        "gelu": lambda: keras.layers.Activation("gelu")(z),
        "norm": lambda: keras.layers.LayerNormalization()(z),
        "batch norm": lambda: keras.layers.BatchNormalization()(z),
        "log softmax": lambda: z - keras.ops.logsumexp(z, -1, keepdims=True),
        "residual": lambda: h + z,
        "two heads": lambda: z + dense(16, name="wide")(x),
        "side by side": lambda: keras.layers.Concatenate()([z, dense(16, name="wide")(x)])[:, :16],
        "masked": lambda: keras.ops.where(x[:, :16] > 0, z, -1.0),
    }
    return keras.Model(x, follow[name]())


LAST = "it is the last layer, whose errors reach the loss unaveraged"


@pytest.mark.parametrize(
    "name",
    [
        "gelu",
        "norm",
        "batch norm",
        "log softmax",
        "residual",
        "two heads",
        "side by side",
        "masked",
    ],
)
def test_the_last_layer_is_found_whatever_follows_it(name):
    choices = choices_of(ends(name), X[..., :16])
    assert choices.pop("first") == "float8"
    assert set(choices.values()) == {LAST}


def test_a_layer_that_is_not_called_is_no_obstacle():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16")
            self.first = keras.layers.Dense(32, dtype="mixed_bfloat16", name="first")
            self.unused = keras.layers.Dense(32, dtype="mixed_bfloat16", name="unused")
            self.last = keras.layers.Dense(16, dtype="mixed_bfloat16", name="last")

        def call(self, x):
            return self.last(self.first(x))

    model = Unused()
    model(X[0])
    choices = choices_of(model, X[..., :16])
    assert (choices["first"], choices["last"]) == ("float8", LAST)


def test_layers_switched_to_float32_gradients_take_part():
    model = mlp()
    fa.kernels.fp32_weight_gradients(model)
    choices = choices_of(model, keras.utils.to_categorical(LABELS, 7))
    assert choices == {"first": "float8", "second": "float8", "last": LAST}


def test_what_a_vectorized_map_runs_stays_in_half_precision():
    class Mapped(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16")
            self.dense = keras.layers.Dense(32, dtype="mixed_bfloat16", name="mapped")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return keras.ops.vectorized_map(lambda row: self.dense(row[None])[0], x)

    def make():
        keras.utils.set_random_seed(0)
        dense = functools.partial(keras.layers.Dense, dtype="mixed_bfloat16")
        below, head = dense(32, name="below"), dense(16, name="head")
        return keras.Sequential([keras.Input((32,)), below, Mapped(), head])

    stack = (X, X[..., :16])
    trainer, moves = trained(make(), stack, "mse", float8=True, jit_compile=False)
    choices = trainer._engine.objective.float8.choices
    assert "vectorized_map" in next(choices[path] for path in choices if "mapped" in path)
    _, half = trained(make(), stack, "mse", jit_compile=False)
    assert largest_error(moves, half) < 0.3


def test_a_gradient_of_a_gradient_is_refused():
    x = tf.constant(X[0], tf.bfloat16)
    kernel = tf.constant(RNG.normal(size=(32, 16)), tf.float32)

    def penalty():
        with tf.GradientTape() as outer:
            outer.watch(kernel)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.tanh(fa.kernels.matmul_float8(x, kernel))
            loss = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(loss, kernel)

    with pytest.raises(LookupError, match="product in float8 has no second derivatives"):
        tf.function(penalty, autograph=False)()


def test_a_device_without_float8_products():
    with pytest.warns(RuntimeWarning, match="this device has no float8 products"):
        trained(mlp(), (X, LABELS), "sparse_categorical_crossentropy", float8=True)
    stack, loss = (X, LABELS), "sparse_categorical_crossentropy"
    _, auto = trained(mlp(), stack, loss, float8="auto", jit_compile=False)
    _, half = trained(mlp(), stack, loss, jit_compile=False)
    for a, b in zip(auto, half, strict=True):
        np.testing.assert_array_equal(a, b)


def test_auto_takes_layers_that_gain():
    taken, left = (keras.layers.Dense(n, dtype="mixed_bfloat16") for n in (1008, 992))
    taken.build((None, 1008))
    left.build((None, 992))
    layers = float8.Float8Layers("auto", {})
    with intercepting(layers.make_forms([taken, left])):
        taken(np.zeros((1, 1008), "float32"))
        left(np.zeros((1, 992), "float32"))
    assert layers.choices[taken.path] == "float8"
    assert "992 x 992" in layers.choices[left.path]


def test_a_model_of_which_no_layer_takes_part_is_refused():
    dense = functools.partial(keras.layers.Dense, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((32,)), dense(30, name="odd"), dense(16)])
    before = model.get_weights()
    with pytest.raises(
        ValueError, match=r"no layer of the model multiplies.*odd': its sizes, 32 x 30"
    ):
        trained(model, (X, X[..., :16]), "mse", float8=True, jit_compile=False)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_is_refused_before_a_weight_moves():
    model = mlp("float32")
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"float8=True: no layer .*mixed_bfloat16"):
        trained(model, (X, LABELS), "sparse_categorical_crossentropy", float8=True)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="float8='yes' must be 'auto' or True or False"):
        fa.Trainer(mlp(), "sgd", "mse", float8="yes")

    norm = keras.layers.LayerNormalization(dtype="mixed_bfloat16")
    with pytest.raises(ValueError, match=r"no Dense or EinsumDense layer .* float8=False"):
        trained(keras.Sequential([keras.Input((32,)), norm]), (X, X), "mse", float8=True)

    quantized = mlp()
    quantized.quantize("float8")
    with pytest.raises(ValueError, match=r"Make the model without quantize\(\)"):
        trained(quantized, (X, LABELS), "sparse_categorical_crossentropy", float8=True)
    with pytest.raises(ValueError, match=r"Trainer\(float8=True\)"):
        trained(quantized, (X, LABELS), "sparse_categorical_crossentropy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stacked", "dtype"),
    [(False, "mixed_bfloat16"), (True, "mixed_bfloat16"), (False, "mixed_float16")],
)
def test_on_an_h200_all_listed_products_are_float8(stacked, dtype):
    ids = np.zeros((4, 4, 256), "int32")
    with h200.weightless():
        model = fa.gpt(512, 256, 256, 2, 2, tied=True, stacked=stacked, dtype=dtype)
        trainer = fa.Trainer(model, "adamw", fa.LinearCrossEntropy(), float8=True)
        exported = h200.export_step(trainer, (ids, ids))
    text, _ = h200.compile_for_h200(exported, xla_gpu_enable_triton_gemm=False)
    products = re.findall(r"= \((\w+)\[([\d,]+)\].*__cublas\$lt\$matmul\$f8.*", text)
    gradients = [product for product in products if product[0] == "f32"]
    # qkv, out, mlp_in and mlp_out of two layers: forward, dx and the weight's gradient.
    assert len(products) == 3 * len(gradients) == 3 * 4 * 2
    if not stacked:
        accumulated = re.findall(r"= \(f32\[.*\$f8.*aliasing=\{\{0\}: \(2, \{\}\)\}", text)
        assert len(accumulated) == len(gradients)


@pytest.mark.slow
def test_on_an_h200_projections_of_one_tensor_stay_apart():
    x, y = np.zeros((4, 4, 256, 256), "float32"), np.zeros((4, 4, 256, 16), "float32")
    with h200.weightless():
        given = keras.Input((256, 256))
        h = given
        for _ in range(2):
            attention = keras.layers.MultiHeadAttention(4, 64, dtype="mixed_bfloat16")
            h += attention(h, h)
            attention._query_dense.enable_lora(8)
            attention._value_dense.enable_lora(8)
            attention._key_dense.trainable = False
            attention._output_dense.trainable = False
        model = keras.Model(given, keras.layers.Dense(16, dtype="mixed_bfloat16")(h))
        trainer = fa.Trainer(model, "adamw", "mse", float8=True, flash_attention=False)
        exported = h200.export_step(trainer, (x, y))
    text, _ = h200.compile_for_h200(exported, xla_gpu_enable_triton_gemm=False)
    # Four projections of each layer; in the backward pass four of the second, one of the first.
    assert len(re.findall(r"__cublas\$lt\$matmul\$f8", text)) == 8 + 5
    # The frozen kernels are rounded before the loop, and in it there are copies of activations.
    rounded = []
    for kernel in kernels.read(text):
        for dtype, shape in kernel.results:
            if dtype == "f8e4m3fn" and kernel.kind != "transpose":
                rounded.append((kernel.loops, shape))
    in_loop = [shape for loops, shape in rounded if loops]
    assert len(rounded) - len(in_loop) == 8
    assert all(math.prod(shape) == 4 * 256 * 256 for shape in in_loop)
