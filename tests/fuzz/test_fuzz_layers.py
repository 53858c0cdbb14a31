"""Random LayerStacks, beside the plain layers that they stand for; and layers switched to float32
weight gradients.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import ANYTHING, PASTE, Unmade, Values, draw, value, without
from fuzzing_kernels import some

import fastaccum as fa

pytestmark = pytest.mark.fuzz

NAMES: dict = {}
exec(f"{PASTE}\nfrom fuzzing_kernels import *\nfrom keras.layers import *", NAMES)
GOOD = (
    *(
        "Dense({w})",
        "Dense({w}, 'tanh', kernel_regularizer='l2')",
        "LayerNormalization()",
        "BatchNormalization()",
    ),
    *(
        "Dropout(0.5)",
        "Dropout(0.5, seed=3)",
        "Rescaling(0.5)",
        "keras.Sequential([Dense({w}, 'relu'), Dropout(0.2), Dense({w})])",
    ),
    *(
        "Dense({w}, dtype='mixed_float16')",
        "fa.kernels.LayerStack(lambda: Dense({w}), 2)",
        "Activation('tanh')",
        "Dense({w}, dtype='float64')",
    ),
)
OF_SEQUENCES = (
    "Conv1D({w}, 3, padding='same')",
    "LSTM({w}, return_sequences=True)",
    "EinsumDense('abc,cd->abd', [None, {w}])",
)
BAD = (
    *(
        "Dense({w} + 1)",
        "Embedding(3, {w})",
        "Dense({w}, kernel_constraint='non_neg')",
        "Dense({w}, activity_regularizer='l2')",
    ),
    *(
        "Lambda(lambda x: (x, x))",
        "Lambda(lambda x: None)",
        "Lambda(lambda x: tf.cast(x, 'int32'))",
        "Lambda(lambda x: x[:, :1])",
    ),
    *(
        "Layer()",
        "keras.Model()",
        "InputLayer(shape=({w},))",
        "MultiHeadAttention(1, 2)",
        "Concatenate()",
        "Add()",
        "None",
        "3",
    ),
    *(
        "Dense({w}, dtype='int8_from_float32')",
        "Flatten()",
        "shared",
        "keras.Sequential([keras.Input((7,)), Dense({w})])",
    ),
    *(
        "Dense({w}, kernel_regularizer='orthogonal_regularizer')",
        "keras.Sequential()",
        "Reshape((-1,))",
        "Bidirectional(LSTM({w}))",
    ),
    *(
        "Lambda(lambda x: x.nothing)",
        "Lambda(lambda x: x[9])",
        "Lambda(raises)",
        "raises()",
        "keras.metrics.Mean()",
        "Masking()",
    ),
    *(
        "Dense({w}, kernel_initializer='nothing')",
        "Dense(-1)",
        "Dense",
        "next(two)",
        "StringLookup()",
        "GaussianNoise(0.1)",
    ),
)


def run_stack(make_layer, depth, x, training=None, way="eager", with_kwargs=None, **options):
    """A stack's output, and its gradients of x and of the weights; and those of the plain
    layers.
    """
    stack, plain = fa.kernels.LayerStack(make_layer, depth, **options), None
    if isinstance(x, (np.ndarray, tf.Tensor)):
        stack.build(x.shape)
        plain = stack.unstack()

    def through(call, variables):
        def run():
            given = (
                tf.convert_to_tensor(x) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
            )
            with tf.GradientTape() as tape:
                differentiated = (
                    [given] if isinstance(given, tf.Tensor) and given.dtype.is_floating else []
                )
                tape.watch(differentiated)
                y = call(given)
            return y, tape.gradient(
                y, [*differentiated, *variables()], unconnected_gradients="zero"
            )

        return (
            run if way == "eager" else tf.function(run, autograph=False, jit_compile=way == "xla")
        )

    options = {} if training is None else {"training": training}
    options |= with_kwargs or {}
    ours = through(
        lambda t: stack(t, **options), lambda: [v.value for v in stack.trainable_variables]
    )()

    plain = plain or stack.unstack()

    def in_turn(t):
        t = tf.convert_to_tensor(t)
        for layer in plain:
            t = layer(t, **options)
        return t

    y, gradients = through(
        in_turn, lambda: [v.value for layer in plain for v in layer.trainable_variables]
    )()
    each = len(plain[0].trainable_variables)
    split = len(gradients) - each * len(plain)
    dx, flat = gradients[:split], gradients[split:]
    return ours, (y, [*dx, *(tf.stack(flat[i::each]) for i in range(each))])


NAMES["run_stack"] = run_stack


def stack(rng):
    width, depth = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    lead = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 3)))]
    good = [each.format(w=width) for each in (*GOOD, *(OF_SEQUENCES if len(lead) == 2 else ()))]
    layer = some(rng, *good)
    half = "float16" in layer
    shape = [*lead, width]
    x = f"array({', '.join(map(str, shape))})"
    fresh = [f"lambda: {each.format(w=width)}" for each in BAD]
    table = {
        "make_layer": Values(
            [f"lambda: {layer}", layer],
            odd=[
                *fresh,
                *fresh,
                *(b.format(w=width) for b in BAD[:16]),
                *without("keras.layers.Dense(1)"),
            ],
        ),
        "depth": Values(
            [repr(depth), f"{depth}.0", f"np.int8({depth})"], odd=[*ANYTHING, "0", "-1"]
        ),
        "x": Values(
            [x, f"tf.constant({x})"],
            odd=[
                *(
                    f"{x}[..., :0]",
                    f"{x}[:0]",
                    f"{x}[0]",
                    f"{x}[None]",
                    f"{x}[..., None]",
                    f"[{x}]",
                    f"[{x}, {x}]",
                    f"{{'x': {x}}}",
                ),
                *(
                    f"{x}.astype({d!r})"
                    for d in (
                        "int32",
                        "complex64",
                        "bool",
                        "str",
                        "object",
                        "float64",
                        "float16",
                        ">f4",
                    )
                ),
                *(
                    f"masked({x})",
                    f"{x}.tolist()",
                    f"from_a_graph({x})",
                    f"spoiled({x}, nan)",
                    *ANYTHING,
                ),
            ],
        ),
        "training": Values(
            ["True", "False", "None"],
            odd=without("1", "True", "False", "None", "0", "-0.0", "np.True_"),
        ),
        "implementation": Values(["'auto'", "'auto'", "'reference'"], odd=ANYTHING),
        "name": Values(["'deep'", "None"], odd=without("None", "'x'", "Text('x')", "np.str_('a')")),
        "trainable": Values(["True", "False"], odd=without("True", "False", "np.True_")),
        "with_kwargs": Values(
            ["{}"],
            odd=["{'foo': 1}", "{'mask': None}", "{'mask': 3}", "{'attention_mask': tf.ones([2])}"],
        ),
    }
    call = draw(
        rng,
        "run_stack",
        table,
        required=["make_layer", "depth", "x"],
        odd=(0, 0, 1, 1, 1, 2),
        names=("layer", "layers", "Layer", "regularizer", "x_shape"),
    )
    way = some(rng, *["eager"] * 20, "graph", "graph", "xla")
    call.arguments["way"] = repr(way)
    shared = keras.layers.Dense(width)
    space = {
        **NAMES,
        "shared": shared,
        "two": iter(
            [
                keras.layers.Dense(width),
                keras.layers.Dense(width, "relu"),
                keras.layers.Dense(width),
            ]
        ),
    }
    try:
        arguments = {name: value(code, space) for name, code in call.arguments.items()}
    except Exception as error:
        raise Unmade from error

    def run():
        try:
            return run_stack(**arguments)
        except (TypeError, ValueError) as error:
            if call.odd:
                raise
            raise AssertionError(f"a valid call is refused: {error}") from error

    def right(result):
        (y, gradients), (wanted, plain) = result
        compare("y", y, wanted, half)
        assert len(gradients) == len(plain), (len(gradients), len(plain))
        for i, pair in enumerate(zip(gradients, plain, strict=True)):
            compare(f"gradient {i}", *pair, half)

    return call, run, lambda: b"", right


def compare(what, got, wanted, half):
    got, wanted = (np.asarray(t, "float64") for t in (got, wanted))
    assert got.shape == wanted.shape, f"{what} has shape {got.shape}, not {wanted.shape}"
    tolerance = 3e-2 if half else 1e-3
    np.testing.assert_allclose(
        got,
        wanted,
        tolerance,
        tolerance * max(1.0, np.abs(np.nan_to_num(wanted)).max(initial=0)),
        err_msg=what,
    )


def test_a_layer_stack(fuzzed):
    fuzzed(stack, 80)


def methods(rng):
    odd = [
        "[Dense(3)]",
        "[Dense(3), 3]",
        "[Dense(3), Dense(3)]",
        "[built(3), built(4)]",
        "(built(3), built(3), built(3))",
        "[shared, shared]",
    ]
    table = {
        "layers": Values(
            ["[built(3), built(3)]", "(built(3), built(3))"], odd=[*odd, *odd, *ANYTHING]
        )
    }
    call = draw(
        rng, "assign_from", table, required=["layers"], odd=(0, 1, 1), names=("Layers", "Layer")
    )
    deep = fa.kernels.LayerStack(lambda: keras.layers.Dense(3), 2)
    deep.build((None, 3))

    def built(width):
        layer = keras.layers.Dense(width)
        layer.build((None, 3))
        return layer

    given = value(call.arguments["layers"], {**NAMES, "built": built, "shared": built(3)})

    def right(_):
        for mine, layer in zip(deep.unstack(), given, strict=True):
            np.testing.assert_array_equal(mine.kernel, layer.kernel)

    return (
        call,
        lambda: deep.assign_from(given),
        lambda: [np.asarray(v).tobytes() for v in deep.weights],
        right,
    )


def test_assign_from(fuzzed):
    fuzzed(methods, 60)


def switched(rng):
    function = some(rng, "fp32_weight_gradients", "plain_weight_gradients")
    name = {"fp32_weight_gradients": "model", "plain_weight_gradients": "layers"}[function]
    good = ["small", "small.layers[0]"] + ["small.layers", "[]", "iter(small.layers)"] * (
        name == "layers"
    )
    table = {
        name: Values(
            good,
            odd=[
                *without(
                    "[]",
                    "()",
                    "{}",
                    "set()",
                    "keras.layers.Dense(1)",
                    "range(0)",
                    "generator()",
                    "''",
                ),
                "small.layers + [3]",
                "[None]",
                "[[small]]",
                "keras.Model",
                "small.weights",
            ],
        )
    }
    call = draw(rng, f"fa.kernels.{function}", table, required=[name], odd=(0, 1))
    small = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, dtype="mixed_float16"), keras.layers.Dense(2)]
    )
    if rng.random() < 0.5:
        fa.kernels.fp32_weight_gradients(small)
    kinds = [type(layer) for layer in small.layers]
    given = value(call.arguments[name], {**NAMES, "small": small})

    def right(changed):
        assert all(any(layer is each for each in small.layers) for layer in changed)
        is_switched = type(small.layers[0]) is not keras.layers.Dense
        touched = (
            given is small or given is small.layers[0] or "small.layers" in call.arguments[name]
        )
        assert (
            not touched
            or is_switched == (function == "fp32_weight_gradients")
            or (given is small.layers[0] and not changed)
        )
        assert type(small.layers[1]) is keras.layers.Dense

    return (
        call,
        lambda: getattr(fa.kernels, function)(given),
        lambda: [type(layer) for layer in small.layers] if call.odd else kinds,
        right,
    )


def test_switched_layers(fuzzed):
    fuzzed(switched, 100)
