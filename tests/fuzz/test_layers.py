"""Random LayerStacks beside the plain layers that they stand for, and switched layers."""

import fuzzed_arrays  # noqa: F401  # which calls name
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from random_calls import ANYTHING, NAMES, Values, calls, codes, fuzz, judge, without

import fastaccum as fa

pytestmark = pytest.mark.slow

NAMES |= {name: getattr(keras.layers, name) for name in dir(keras.layers) if name[0].isupper()}

GOOD = codes("""
    Dense({w}) | Dense({w}, 'tanh', kernel_regularizer='l2') | LayerNormalization() | Dropout(0.5)
    BatchNormalization() | Dropout(0.5, seed=3) | Rescaling(0.5) | Dense({w}, dtype='mixed_float16')
    keras.Sequential([Dense({w}, 'relu'), Dropout(0.2), Dense({w})]) | Activation('tanh')
    fa.kernels.LayerStack(lambda: Dense({w}), 2) | Dense({w}, dtype='float64')
""")
OF_SEQUENCES = codes("""
    Conv1D({w}, 3, padding='same') | LSTM({w}, return_sequences=True)
    EinsumDense('abc,cd->abd', [None, {w}])
""")
ODD = codes("""
    Dense({w} + 1) | Embedding(3, {w}) | Dense({w}, kernel_constraint='non_neg') | Layer()
    Dense({w}, activity_regularizer='l2') | Lambda(lambda x: (x, x)) | Lambda(lambda x: None)
    Lambda(lambda x: tf.cast(x, 'int32')) | Lambda(lambda x: x[:, :1]) | keras.Model() | Add()
    InputLayer(shape=({w},)) | MultiHeadAttention(1, 2) | Concatenate() | None | 3 | Flatten()
    Dense({w}, dtype='int8_from_float32') | shared | Reshape((-1,)) | keras.Sequential()
    keras.Sequential([keras.Input((7,)), Dense({w})]) | Bidirectional(LSTM({w})) | Lambda(raises)
    Dense({w}, kernel_regularizer='orthogonal_regularizer') | Lambda(lambda x: x.nothing)
    Lambda(lambda x: x[9]) | raises() | keras.metrics.Mean() | Masking() | Dense(-1) | Dense
    Dense({w}, kernel_initializer='nothing') | next(two) | StringLookup() | GaussianNoise(0.1)
""")
ODD_X = codes("""
    {0}[..., :0] | {0}[:0] | {0}[0] | {0}[None] | {0}[..., None] | [{0}] | [{0}, {0}] | {{'x': {0}}}
    {0}.astype('int32') | {0}.astype('complex64') | {0}.astype('bool') | {0}.astype('str')
    {0}.astype('object') | {0}.astype('float64') | {0}.astype('float16') | {0}.astype('>f4')
    masked({0}) | {0}.tolist() | from_a_graph({0}) | spoiled({0}, nan)
""")


def run_with_gradients(call, x, variables, way):
    """Returns the output, and its gradients by `x` and by the variables."""

    def run():
        is_array = isinstance(x, np.ndarray) and x.dtype.kind == "f"
        tensor = tf.convert_to_tensor(x) if is_array else x
        watched = []
        if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
            watched = [tensor]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            y = call(tensor)
        return y, tape.gradient(y, [*watched, *variables()], unconnected_gradients="zero")

    if way != "eager":
        run = tf.function(run, autograph=False, jit_compile=way == "xla")
    return run()


def run_stack(way, make_layer, depth, x, training=None, with_kwargs=None, **options):
    """Returns output and gradients of a stack, and those of its plain layers."""
    stack = fa.kernels.LayerStack(make_layer, depth, **options)
    plain = None
    if isinstance(x, (np.ndarray, tf.Tensor)):
        stack.build(x.shape)
        plain = stack.unstack()
    kwargs = {} if training is None else {"training": training}
    kwargs |= with_kwargs or {}
    stack_variables = lambda: [v.value for v in stack.trainable_variables]  # noqa: E731
    result = run_with_gradients(lambda t: stack(t, **kwargs), x, stack_variables, way)
    plain = plain or stack.unstack()

    def call_in_turn(t):
        t = tf.convert_to_tensor(t)
        for layer in plain:
            t = layer(t, **kwargs)
        return t

    def plain_variables():
        return [v.value for layer in plain for v in layer.trainable_variables]

    y, gradients = run_with_gradients(call_in_turn, x, plain_variables, way)
    of_a_layer = len(plain[0].trainable_variables)
    of_x = len(gradients) - of_a_layer * len(plain)
    stacked = [tf.stack(gradients[of_x + i :: of_a_layer]) for i in range(of_a_layer)]
    return result, (y, [*gradients[:of_x], *stacked])


@st.composite
def stack_calls(draw):
    width = draw(st.integers(1, 4))
    depth = draw(st.integers(1, 3))
    lead = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    good = [*GOOD, *OF_SEQUENCES] if len(lead) == 2 else GOOD
    layer = draw(st.sampled_from(good)).format(w=width)
    odd = [code.format(w=width) for code in ODD]
    x = f"array({', '.join(map(str, [*lead, width]))})"
    odd_training = without("1", "True", "False", "None", "0", "-0.0", "np.True_")
    odd_kwargs = codes("""
        {'foo': 1} | {'mask': None} | {'mask': 3} | {'attention_mask': tf.ones([2])}
    """)
    table = {
        "make_layer": Values(
            [f"lambda: {layer}", layer],
            odd=[*[f"lambda: {code}" for code in odd] * 2, *odd, *without("keras.layers.Dense(1)")],
        ),
        "depth": Values([repr(depth), f"{depth}.0", f"np.int8({depth})"], odd=ANYTHING),
        "x": Values([x, f"tf.constant({x})"], odd=[*[c.format(x) for c in ODD_X], *ANYTHING]),
        "training": Values(["True", "False", "None"], odd=odd_training),
        "implementation": Values(["'auto'", "'auto'", "'reference'"], odd=ANYTHING),
        "name": Values(["'deep'", "None"], odd=without("None", "'x'", "Text('x')", "np.str_('a')")),
        "trainable": Values(["True", "False"], odd=without("True", "False", "np.True_")),
        "with_kwargs": Values(["{}"], odd=odd_kwargs),
    }
    names = ("layer", "layers", "Layer", "regularizer", "x_shape")
    call = draw(calls("run_stack", table, ["make_layer", "depth", "x"], names=names))
    return call._replace(way=draw(st.sampled_from(["eager"] * 20 + ["graph", "graph", "xla"])))


def check_stack(call, result):
    (y, gradients), (expected, plain_gradients) = result
    tolerance = 3e-2 if "float16" in call.arguments["make_layer"] else 1e-3
    for value, plain in zip([y, *gradients], [expected, *plain_gradients], strict=True):
        value = np.asarray(value, "float64")
        plain = np.asarray(plain, "float64")
        assert value.shape == plain.shape
        scale = max(1.0, np.abs(np.nan_to_num(plain)).max(initial=0))
        np.testing.assert_allclose(value, plain, tolerance, tolerance * scale)


@fuzz(80)
@given(call=stack_calls())
def test_a_layer_stack(call):
    keras.utils.set_random_seed(0)
    Dense = keras.layers.Dense
    two = iter([Dense(2), Dense(2, "relu"), Dense(2)])
    arguments = call.values(shared=Dense(2), two=two)
    judge(call, lambda: run_stack(call.way, **arguments), lambda result: check_stack(call, result))
