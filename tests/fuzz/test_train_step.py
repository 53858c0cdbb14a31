"""Random calls of `fa.TrainStep`: the update of an eager loop over micro-batches, or a refusal."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fuzzed_arrays import array
from hypothesis import given
from hypothesis import strategies as st
from random_calls import ANYTHING, NAMES, Values, calls, codes, fuzz, judge, numbers, without

import fastaccum as fa

pytestmark = pytest.mark.slow

KEPT = ("v", "w", "h", "d", "still", "i", "c", "free", "calls")


def make_variables():
    """Makes what calls train, and variables that no call can train."""
    with tf.Graph().as_default():
        of_a_graph = tf.Variable([1.0])
    v = tf.Variable(array(3, seed=1))
    used = keras.optimizers.Adam()
    used.build([v])
    return {
        "v": v,
        "w": keras.Variable(array(2, 2, seed=2)),
        "h": tf.Variable(array(2, dtype="float16", seed=3)),
        "d": tf.Variable(array(2, dtype="float64", seed=4)),
        "still": tf.Variable(array(3, seed=5), trainable=False),
        "i": tf.Variable([1, 2]),
        "c": tf.Variable([1j]),
        "free": tf.Variable([1.0], shape=tf.TensorShape(None)),
        "calls": tf.Variable(0, dtype=tf.int64),
        "of_a_graph": of_a_graph,
        "used": used,
    }


def distance(*variables, of=lambda loss, weight: (loss, weight), calls=None):
    """Returns a `loss_fn` of any nest of numbers, which returns `of(loss_sum, weight_sum)`."""

    @tf.autograph.experimental.do_not_convert
    def loss_fn(micro_batch):
        if calls is not None:
            calls.assign_add(1)
        total = 0.0
        for leaf in tf.nest.flatten(micro_batch):
            if leaf is not None:
                leaf = tf.strings.length(leaf) if leaf.dtype == tf.string else leaf
                total += tf.reduce_sum(tf.sin(tf.cast(leaf, tf.float32)))
        loss = 0.0
        for variable in variables:
            loss += tf.reduce_sum((tf.cast(variable, tf.float32) - total) ** 2)
        return of(loss, 1.0 + total * total)

    return loss_fn


def train(stack, **arguments):
    return fa.TrainStep(**arguments)(stack)


NAMES["distance"] = distance

RETURNED = codes("(l, w) | [l, w] | (l, 1) | (l, 0) | (l, 2.5) | (tf.cast(l, 'float64'), w)")
ODD_RETURNED = codes("""
    l | (l,) | (l, w, w) | None | (None, w) | (l, None) | ('a', w) | (l, 'a') | {'loss': l, 'w': w}
    (l * nan, w) | (l * inf, w) | (l, w * nan) | (l, w * inf) | (tf.cast(l, 'int32'), w)
    (l, tf.cast(w, 'complex64')) | (tf.cast(l, 'complex64'), w) | (l[None], w) | (l, w[None])
    (3.0, 1.0) | (3, 1) | (l, True) | (l, -w) | tf.stack([l, w]) | tf.stack([l, w, w]) | (l > 0, w)
    (l, tf.constant('a')) | (1e30 * l * 1e30, w) | raises() | (tf.stop_gradient(l), w) | (l, w * 0)
    'lw' | {l, 1} | iter([l, w]) | (l, 10**400) | (keras.KerasTensor(()), w) | (l, object())
    (tf.ragged.constant([[1.]]), w) | (tf.py_function(lambda x: x, [l], tf.float32), w) | (l, (w, w))
""")
BAD_FUNCTIONS = codes("""
    lambda: None | lambda a, b: None | distance | int | print | fa.TrainStep
    keras.losses.MeanSquaredError()
""")
STACKS = codes("""
    array({n}, 4) | tf.constant(array({n})) | (array({n}, 2), array({n}, 3, dtype='int32'))
    [array({n}, 2, dtype='float16')] | {{'a': array({n}, 2), 'b': (array({n}), None)}}
    (tf.Variable(array({n}, 2)), {{}}, ()) | array({n}, 2, dtype='bool') | array({n}, 0)
    array({n}, 3).astype('>f4') | np.asfortranarray(array({n}, 3)) | keras.Variable(array({n}, 2))
""")
ODD_STACKS = codes("""
    (array(2, 3), array(3, 3)) | array(0, 3) | (array(2), array()) | (None, None)
    [[1., 2.], [3., 4.]] | array(2, dtype='str') | array(2).astype('complex64')
    {'a': array(2), 1: array(2)} | {None: array(2)} | masked(array(2, 3)) | from_a_graph(array(2))
    tf.ragged.constant([[1.], [1., 2.]]) | tf.sparse.from_dense(array(2, 2)) | (array(2), 'a')
    array(2).astype(object) | tf.data.Dataset.from_tensor_slices(array(4, 2)) | iter([array(2)])
    spoiled(array(2, 2), nan) | spoiled(array(2, 2), inf) | array(2, 2).astype('datetime64[s]')
    {array(2).tobytes()} | tf.constant(['a', 'b']) | [array(2), [array(2), [array(3)]]]
    tf.IndexedSlices(array(2), tf.range(2), [2]) | type('T', (), {})() | tf.TensorSpec((2, 3))
    keras.KerasTensor((2, 3))
""")
ODD_VARIABLES = codes("""
    [] | () | {'v': v} | v | w | 'v' | [v, v] | [v, w, w.value] | [i] | [v, i] | [c] | [free]
    [v, None] | [array(3)] | [of_a_graph] | [v, 'w'] | [[v]] | tf.constant([1.]) | {v.ref()}
    [tf.constant([1.])] | keras.layers.Dense(1) | (x for x in []) | [keras.layers.Dense(1)]
    [keras.KerasTensor((1,))] | [v, raises] | map(str, [v])
""")
OPTIMIZERS = codes("""
    'sgd' | 'SGD' | keras.optimizers.SGD(0.1) | keras.optimizers.Adam(0.1)
    keras.optimizers.SGD(0.1, 0.9) | fa.addons.optimizers.LAMB(0.1)
    fa.addons.optimizers.SGDW(0.01, 0.1)
""")
ODD_OPTIMIZERS = codes("""
    'adamm' | '' | keras.optimizers.Adam | keras.optimizers.SGD(nan) | used | 'optimizer'
    keras.optimizers.Adam(gradient_accumulation_steps=2) | keras.optimizers.SGD(inf)
    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()) | [keras.optimizers.SGD()]
    keras.optimizers.SGD(loss_scale_factor=2.) | keras.optimizers.SGD(1e39)
    keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5) | keras.losses.MeanSquaredError()
    {'class_name': 'SGD'} | keras.optimizers.Optimizer(0.1)
""")
SCALES = codes("""
    None | 'auto' | 1024.0 | 2**10 | fa.NoLossScale() | fa.StaticLossScale(8.0)
    fa.DynamicLossScale(init_scale=4.0)
""")


@st.composite
def train_step_calls(draw):
    trained = draw(st.sampled_from(["v", "v", "w", "v, w", "v, w, h", "d", "still", "h, d"]))
    form = draw(st.sampled_from(["[{}]", "({},)", "iter([{}])"]))
    counts = draw(st.sampled_from(["", "", "", ", calls=calls"]))
    loss_fn = f"distance({trained}, of=lambda l, w: {{}}{counts})"
    odd_functions = [loss_fn.format(code) for code in ODD_RETURNED]
    rows = draw(st.integers(1, 3))
    odd_state = codes("v | [calls, calls] | [None] | 'n' | [i, 3] | {'n': calls}")
    odd_scales = codes("'dynamic' | fa.DynamicLossScale | 2**-70 | 2**101")
    table = {
        "loss_fn": Values(
            [loss_fn.format(code) for code in RETURNED],
            odd=[*odd_functions, *ANYTHING, *BAD_FUNCTIONS],
        ),
        "variables": Values([form.format(trained)], odd=[*ODD_VARIABLES * 2, *ANYTHING]),
        "optimizer": Values(OPTIMIZERS, odd=[*ODD_OPTIMIZERS * 2, *ANYTHING]),
        "loss_scale": Values([*SCALES, numbers(1e-3, 1e2)], odd=[*ANYTHING, *odd_scales]),
        "clip_norm": Values(["None", numbers(1e-3, 1e3)], odd=ANYTHING),
        "jit_compile": Values(["False"] * 30 + ["True"], odd=without("True", "np.True_", "1")),
        "state": Values(codes("[calls] | (calls,) | iter([calls])"), odd=[*odd_state, *ANYTHING]),
        "stack": Values([code.format(n=rows) for code in STACKS], odd=[*ODD_STACKS * 2, *ANYTHING]),
    }
    required = ["loss_fn", "variables", "optimizer", "jit_compile", "stack"]
    return draw(calls("train", table, required))


def bytes_of(space, names=KEPT):
    return {name: np.asarray(space[name]).tobytes() for name in names}


def tensor(leaf):
    return None if leaf is None else tf.convert_to_tensor(leaf)


def check_step(call, trained, before, report):
    """Compares variables and report with an eager loop over the micro-batches of the same stack."""
    space = make_variables()
    arguments = call.values(**space)
    stack = tf.nest.map_structure(tensor, arguments["stack"])
    variables = []
    for variable in arguments["variables"]:
        variables.append(variable if isinstance(variable, tf.Variable) else variable.value)
    gradients = [tf.zeros(variable.shape, "float64") for variable in variables]
    loss_sum = 0.0
    weight_sum = 0.0
    for k in range(next(t for t in tf.nest.flatten(stack) if t is not None).shape[0]):
        micro_batch = tf.nest.map_structure(lambda t, k=k: None if t is None else t[k], stack)
        with tf.GradientTape() as tape:
            tape.watch(variables)
            loss, weight = arguments["loss_fn"](micro_batch)
        for i, gradient in enumerate(tape.gradient(loss, variables)):
            if gradient is not None:
                gradients[i] += tf.cast(gradient, "float64")
        loss_sum += float(loss)
        weight_sum += float(weight)
    norm = float(tf.linalg.global_norm(gradients)) / abs(weight_sum) if weight_sum else 0.0
    mean_loss = loss_sum / weight_sum if weight_sum else 0.0
    is_finite = bool(np.isfinite(norm) and np.isfinite(mean_loss) and norm < 1e18)
    assert bool(report.grads_finite) == is_finite, f"grads_finite, where the norm is {norm}"
    if not is_finite or weight_sum == 0:
        kept = KEPT if "state" in arguments else KEPT[:-1]
        assert bytes_of(trained, kept) == {name: before[name] for name in kept}
        return
    np.testing.assert_allclose(float(report.loss), mean_loss, 1e-3, 1e-4)
    np.testing.assert_allclose(float(report.weight), weight_sum, 1e-3, 1e-4)
    np.testing.assert_allclose(float(report.grad_norm), norm, 1e-3, 1e-4)
    clip = arguments.get("clip_norm")
    factor = 1.0 if clip is None or norm == 0 else min(1.0, float(clip) / norm)
    factor /= weight_sum
    updates = []
    for gradient, variable in zip(gradients, variables, strict=True):
        updates.append((tf.cast(gradient * factor, variable.dtype), variable))
    optimizer = arguments["optimizer"]
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    optimizer.apply_gradients(updates)
    for name in KEPT:
        result = np.asarray(trained[name]).astype("complex128")
        expected = np.asarray(space[name]).astype("complex128")
        assert np.allclose(result, expected, 5e-3, 5e-3), f"{name} is {result}, not {expected}"


@pytest.mark.sample
@fuzz(120)
@given(call=train_step_calls())
def test_train_step(call):
    space = make_variables()
    arguments = call.values(**space)
    before = bytes_of(space)
    judge(
        call,
        lambda: train(**arguments),
        lambda report: check_step(call, space, before, report),
        lambda: bytes_of(space),
    )
