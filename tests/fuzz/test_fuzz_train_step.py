"""Random calls of `fa.TrainStep`, and of the step that it makes: the update of an eager loop, or a
refusal.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import ANYTHING, PASTE, Values, draw, numbers, value, without
from fuzzing_kernels import some

pytestmark = pytest.mark.fuzz

NAMES: dict = {}
exec(f"{PASTE}\nfrom fuzzing_kernels import *", NAMES)
SETUP = """\
v = tf.Variable(array(3, seed=1))
w = keras.Variable(array(2, 2, seed=2))
h = tf.Variable(array(2, dtype="float16", seed=3))
d = tf.Variable(array(2, dtype="float64", seed=4))
still = tf.Variable(array(3, seed=5), trainable=False)
i = tf.Variable([1, 2])
c = tf.Variable([1j])
free = tf.Variable([1.0], shape=tf.TensorShape(None))
n = tf.Variable(0, dtype=tf.int64)
with tf.Graph().as_default():
    other = tf.Variable([1.0])
used = keras.optimizers.Adam()
used.build([v])
"""
HELD = ("v", "w", "h", "d", "still", "i", "c", "free", "n")
RETURNED = (
    *(
        "l",
        "(l,)",
        "(l, w, w)",
        "None",
        "(None, w)",
        "(l, None)",
        "('a', w)",
        "(l, 'a')",
        "{'loss': l, 'weight': w}",
    ),
    *(
        "(l * nan, w)",
        "(l * inf, w)",
        "(l, w * nan)",
        "(l, w * inf)",
        "(tf.cast(l, 'int32'), w)",
        "(l, tf.cast(w, 'complex64'))",
    ),
    *(
        "(tf.cast(l, 'complex64'), w)",
        "(l[None], w)",
        "(l, w[None])",
        "(3.0, 1.0)",
        "(3, 1)",
        "(l, True)",
        "(l, -w)",
    ),
    *(
        "tf.stack([l, w])",
        "tf.stack([l, w, w])",
        "(l, tf.constant('a'))",
        "(l > 0, w)",
        "(1e30 * l * 1e30, w)",
        "raises()",
    ),
    *(
        "(tf.stop_gradient(l), w)",
        "(l, w * 0)",
        "'lw'",
        "{l, 1}",
        "iter([l, w])",
        "(l, 10**400)",
        "(keras.KerasTensor(()), w)",
    ),
    *(
        "(l, object())",
        "(tf.ragged.constant([[1.]]), w)",
        "(tf.py_function(lambda x: x, [l], tf.float32), w)",
        "(l, (w, w))",
    ),
)
TAKEN = ("(l, w)",) * 8 + (
    "[l, w]",
    "(l, 1)",
    "(l, 0)",
    "(l, 2.5)",
    "(tf.cast(l, 'float64'), w)",
    "(l, tf.cast(w, 'int64'))",
)
STACKS = (
    *(
        "array({n}, 4)",
        "tf.constant(array({n}))",
        "(array({n}, 2), array({n}, 3, dtype='int32'))",
        "[array({n}, 2, dtype='float16')]",
    ),
    *(
        "{{'a': array({n}, 2), 'b': (array({n}), None)}}",
        "(tf.Variable(array({n}, 2)), {{}}, ())",
        "array({n}, 2, dtype='bool')",
    ),
    *(
        "array({n}, 3).astype('>f4')",
        "np.asfortranarray(array({n}, 3))",
        "array({n}, 0)",
        "keras.Variable(array({n}, 2))",
    ),
)
ODD_STACKS = (
    *(
        "(array(2, 3), array(3, 3))",
        "array(0, 3)",
        "(array(2), array())",
        "(None, None)",
        "[[1., 2.], [3., 4.]]",
        "array(2, dtype='str')",
    ),
    *(
        "array(2).astype('complex64')",
        "{'a': array(2), 1: array(2)}",
        "{None: array(2)}",
        "masked(array(2, 3))",
        "from_a_graph(array(2))",
    ),
    *(
        "tf.ragged.constant([[1.], [1., 2.]])",
        "tf.sparse.from_dense(array(2, 2))",
        "(array(2), 'a')",
        "array(2).astype(object)",
    ),
    *(
        "tf.data.Dataset.from_tensor_slices(array(4, 2))",
        "iter([array(2)])",
        "spoiled(array(2, 2), nan)",
        "spoiled(array(2, 2), inf)",
    ),
    *(
        "array(2, 2).astype('datetime64[s]')",
        "{array(2).tobytes()}",
        "tf.constant(['a', 'b'])",
        "[array(2), [array(2), [array(3)]]]",
    ),
    *(
        "tf.IndexedSlices(array(2), tf.range(2), [2])",
        "type('T', (), {})()",
        "keras.KerasTensor((2, 3))",
        "tf.TensorSpec((2, 3))",
    ),
)
ODD_VARIABLES = (
    *(
        "[]",
        "()",
        "{'v': v}",
        "v",
        "w",
        "'v'",
        "[v, v]",
        "[v, w, w.value]",
        "[i]",
        "[v, i]",
        "[c]",
        "[free]",
        "[v, None]",
        "[array(3)]",
    ),
    *(
        "[other]",
        "[v, 'w']",
        "[[v]]",
        "tf.constant([1.])",
        "[tf.constant([1.])]",
        "{v.ref()}",
        "keras.layers.Dense(1)",
        "(x for x in [])",
    ),
    *("[keras.layers.Dense(1)]", "[keras.KerasTensor((1,))]", "[v, raises]", "map(str, [v])"),
)
OPTIMIZERS = (
    "'sgd'",
    "'SGD'",
    "keras.optimizers.SGD(0.1)",
    "keras.optimizers.Adam(0.1)",
    "keras.optimizers.SGD(0.1, 0.9)",
    "fa.addons.optimizers.LAMB(0.1)",
    "fa.addons.optimizers.SGDW(0.01, 0.1)",
)
ODD_OPTIMIZERS = (
    *(
        "'adamm'",
        "''",
        "keras.optimizers.Adam",
        "keras.optimizers.SGD(nan)",
        "keras.optimizers.Adam(gradient_accumulation_steps=2)",
    ),
    *(
        "keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())",
        "used",
        "keras.optimizers.SGD(loss_scale_factor=2.)",
    ),
    *(
        "keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)",
        "keras.optimizers.SGD(inf)",
        "'optimizer'",
        "[keras.optimizers.SGD()]",
    ),
    *(
        "keras.optimizers.SGD(1e39)",
        "keras.losses.MeanSquaredError()",
        "{'class_name': 'SGD'}",
        "keras.optimizers.Optimizer(0.1)",
    ),
)
SCALES = (
    "None",
    "'auto'",
    "1024.0",
    "2**10",
    "fa.NoLossScale()",
    "fa.StaticLossScale(8.0)",
    "fa.DynamicLossScale(init_scale=4.0)",
)


def loss(rng, variables, returned):
    names = variables.strip("[]()").replace("x for x in ", "").split(", ")
    text = f"distance({', '.join(names)}, of=lambda l, w: {returned})"
    return f"counting(n, {text})" if rng.random() < 0.2 else text


def step(rng):
    variables = some(
        rng,
        "[v]",
        "[v]",
        "[w]",
        "[v, w]",
        "(v, w, h)",
        "[d]",
        "[still]",
        "[h, d]",
        "(x for x in [v, w])",
    )
    if variables.startswith("(x"):
        variables = "iter([v, w])"
    names = variables.replace("iter(", "").rstrip(")")
    bad_functions = (
        "lambda: None",
        "lambda a, b: None",
        "distance",
        "int",
        "print",
        "fa.TrainStep",
        "keras.losses.MeanSquaredError()",
    )
    table = {
        "loss_fn": Values(
            [
                loss(rng, names, some(rng, *TAKEN)),
                f"staticmethod(distance({names.strip('[]()')})).__func__",
            ],
            odd=[*(loss(rng, names, each) for each in RETURNED), *ANYTHING, *bad_functions],
        ),
        "variables": Values([variables], odd=[*ODD_VARIABLES, *ODD_VARIABLES, *ANYTHING]),
        "optimizer": Values(OPTIMIZERS, odd=[*ODD_OPTIMIZERS, *ODD_OPTIMIZERS, *ANYTHING]),
        "loss_scale": Values(
            [*SCALES, numbers(1e-3, 1e2)],
            odd=[*ANYTHING, "'dynamic'", "fa.DynamicLossScale", "2**-70", "2**101"],
        ),
        "clip_norm": Values(["None", numbers(1e-3, 1e3)], odd=ANYTHING),
        "jit_compile": Values(["False"], odd=without("True", "np.True_", *("1",))),
        "state": Values(
            ["[n]", "(n,)", "iter([n])"],
            odd=["n", "[n, n]", "[None]", "'n'", "[i, 3]", "{'n': n}", *ANYTHING],
        ),
        "stack": Values(
            [each.format(n=int(rng.integers(1, 4))) for each in STACKS],
            odd=[*ODD_STACKS, *ODD_STACKS, *ANYTHING],
        ),
    }
    required = ["loss_fn", "variables", "optimizer", "jit_compile", "stack"]
    call = draw(rng, "train", table, required=required, odd=(0, 0, 1, 1, 1, 2), setup=SETUP)
    if rng.random() < 0.03:
        call.arguments["jit_compile"] = "True"
    space = dict(NAMES)
    exec(SETUP, space)
    arguments = {name: value(code, space) for name, code in call.arguments.items()}
    before = bytes_of(space)

    def run():
        try:
            return NAMES["train"](**arguments)
        except (TypeError, ValueError) as error:
            if call.odd or call.bad:
                raise
            raise AssertionError(f"a valid call is refused: {error}") from error

    return call, run, lambda: bytes_of(space), lambda result: right(call, space, result, before)


def bytes_of(space):
    return [np.asarray(space[name]).tobytes() for name in HELD]


def tensor(leaf):
    return None if leaf is None else tf.convert_to_tensor(leaf)


def right(call, space, result, before):
    """Compares variables and report with those of an eager loop over the micro-batches of the same
    stack.
    """
    took = {name: np.array(space[name]) for name in HELD}
    own = dict(NAMES)
    exec(SETUP, own)
    given = {name: value(code, own) for name, code in call.arguments.items()}
    variables, stack = list(given["variables"]), tf.nest.map_structure(tensor, given["stack"])
    tensors = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    count = next(t for t in tf.nest.flatten(stack) if t is not None).shape[0]
    total, loss_sum, weight_sum = [tf.zeros(v.shape, "float64") for v in tensors], 0.0, 0.0
    for k in range(count):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            each, weight = given["loss_fn"](
                tf.nest.map_structure(lambda t, k=k: None if t is None else t[k], stack)
            )
        gradients = tape.gradient(each, tensors)
        total = [
            t if g is None else t + tf.cast(g, "float64")
            for t, g in zip(total, gradients, strict=True)
        ]
        loss_sum, weight_sum = loss_sum + float(each), weight_sum + float(weight)
    norm = float(tf.linalg.global_norm(total)) / abs(weight_sum) if weight_sum else 0.0
    _, report = result
    of_loss = loss_sum / weight_sum if weight_sum else 0.0
    finite = bool(np.isfinite(norm) and np.isfinite(of_loss) and norm < 1e18)
    assert bool(report.grads_finite) == finite, (
        f"grads_finite={report.grads_finite}, where the norm is {norm}"
    )
    if not finite or weight_sum == 0:
        kept = HELD if "state" in call.arguments else HELD[:-1]
        moved = [
            name
            for name, now, then in zip(kept, bytes_of(space), before, strict=False)
            if now != then
        ]
        assert not moved, f"a step that is not taken moved {moved}"
        return
    for name, got, wanted in (
        ("loss", report.loss, loss_sum / weight_sum),
        ("weight", report.weight, weight_sum),
        ("norm", report.grad_norm, norm),
    ):
        assert np.isclose(float(got), wanted, 1e-3, 1e-4), f"{name} is {float(got)}, not {wanted}"
    clip = given.get("clip_norm")
    factor = (min(1.0, float(clip) / norm) if clip is not None and norm else 1.0) / weight_sum
    optimizer = given["optimizer"]
    optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
    optimizer.apply_gradients(
        [(tf.cast(g * factor, v.dtype), v) for g, v in zip(total, tensors, strict=True)]
    )
    for name in HELD:
        wanted = np.asarray(own[name])
        close = np.allclose(
            took[name].astype("complex128"), wanted.astype("complex128"), 5e-3, 5e-3
        )
        assert close, f"{name} became {took[name]}, not {wanted}"


@pytest.mark.sample
def test_a_train_step(fuzzed):
    fuzzed(step, 100)
