"""Random calls of `fa.TrainStep`: the update of an eager loop over micro-batches, or a refusal."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from random_calls import (
    LOSS_SCALE,
    Argument,
    calls,
    fuzz,
    inf,
    is_flag,
    judge,
    nan,
    or_none,
    positive,
    raises,
)

import fastaccum as fa

pytestmark = pytest.mark.slow


class Variables:
    """One variable of each kind, and a count of micro-batches."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.all = [
            *[tf.Variable(rng.normal(size=3), dtype=d) for d in ("float32", "float16", "float64")],
            keras.Variable(rng.normal(size=(2, 2))),
            tf.Variable([1, 2]),
        ]
        self.count = tf.Variable(0)

    def bytes(self):
        return [np.asarray(variable).tobytes() for variable in [*self.all, self.count]]

    def arguments(self, drawn):
        """Returns the arguments, with variables in place of their numbers."""
        chosen = drawn["variables"]
        if isinstance(chosen, (list, tuple)):
            chosen = [self.all[i] if type(i) is int and 0 <= i < 5 else i for i in chosen]
        of = drawn["loss_fn"]
        arguments = {**drawn, "variables": chosen, "state": [self.count]}
        if callable(of) and of is not raises:
            arguments["loss_fn"] = self.make_loss(chosen, of)
        return arguments

    def make_loss(self, variables, of):
        """Returns a `loss_fn` of any nest of numbers, which returns `of(loss_sum, weight_sum)`."""

        @tf.autograph.experimental.do_not_convert
        def loss_fn(micro_batch):
            self.count.assign_add(1)
            total = 0.0
            for leaf in tf.nest.flatten(micro_batch):
                if leaf is not None:
                    total += tf.reduce_sum(tf.sin(tf.cast(leaf, tf.float32)))
            loss = 0.0
            for variable in variables:
                loss += tf.reduce_sum((tf.cast(variable, tf.float32) - total) ** 2)
            return of(loss, 0.1 + total * total)

        return loss_fn


ODD_SUMS = st.sampled_from(
    [
        *(lambda s: s * nan, lambda s: s * inf, lambda s: s * 0, lambda s: -s, lambda s: s[None]),
        *(lambda s: tf.cast(s, "int32"), lambda s: tf.cast(s, "complex64"), lambda s: s > 0),
        *(lambda s: s * 1e30 * 1e30, lambda s: tf.cast(s, "float64"), lambda s: 3, lambda s: None),
        *(tf.stop_gradient, tf.as_string, lambda s: object(), lambda s: (s, s), raises),
    ]
)
ODD_RESULTS = st.one_of(
    ODD_SUMS.map(lambda odd: lambda loss, weight: (odd(loss), weight)),
    ODD_SUMS.map(lambda odd: lambda loss, weight: (loss, odd(weight))),
    st.sampled_from([lambda loss, weight: loss, lambda loss, weight: (loss, weight, weight)]),
)


@st.composite
def stacks(draw):
    lead = draw(st.integers(1, 3))
    rng = np.random.default_rng(lead)
    arrays = []
    for shape in draw(st.lists(st.sampled_from([(), (2,), (3, 2), (0,)]), min_size=1, max_size=2)):
        dtype = draw(st.sampled_from(["float32", "float16", "int32", "bool", ">f4"]))
        arrays.append(rng.normal(size=(lead, *shape)).astype(dtype))
    nests = [arrays[0], tuple(arrays), {"a": arrays[0], "b": (arrays[-1], None)}]
    return draw(st.sampled_from(nests))


ARGUMENTS = {
    "loss_fn": Argument(
        st.sampled_from([lambda loss, weight: (loss, weight), lambda loss, weight: [loss, 2.5]]),
        odd=ODD_RESULTS,
    ),
    "variables": Argument(
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        odd=st.lists(st.integers(0, 4), max_size=3),
    ),
    "optimizer": Argument(
        st.sampled_from(["sgd", "SGD"])
        | st.builds(keras.optimizers.SGD, st.floats(0.01, 0.1), st.floats(0, 0.9))
        | st.builds(keras.optimizers.Adam, st.floats(0.01, 0.1))
        | st.builds(fa.addons.optimizers.SGDW, st.floats(0.001, 0.01), st.floats(0.01, 0.1)),
        odd=st.builds(keras.optimizers.SGD, st.sampled_from([nan, inf, 1e39])),
    ),
    "loss_scale": LOSS_SCALE,
    "clip_norm": or_none(positive(1e-3, 1e3)),
    "jit_compile": Argument(st.sampled_from([False] * 30 + [True]), is_flag),
    "stack": Argument(stacks()),
}


def check_step(drawn, trained, report):
    """Compares variables and report with an eager loop over the micro-batches of the same stack."""
    expected = Variables()
    arguments = expected.arguments(drawn)
    before = expected.bytes()
    stack = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), arguments["stack"]
    )
    variables = []
    for variable in arguments["variables"]:
        variables.append(variable if isinstance(variable, tf.Variable) else variable.value)
    gradients = [tf.zeros(variable.shape, "float64") for variable in variables]
    loss_sum = 0.0
    weight_sum = 0.0
    for k in range(next(t for t in tf.nest.flatten(stack) if t is not None).shape[0]):
        micro_batch = tf.nest.map_structure(lambda t, k=k: None if t is None else t[k], stack)
        with tf.GradientTape() as tape:
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
        assert trained.bytes() == before
        return
    np.testing.assert_allclose(float(report.loss), mean_loss, 1e-3, 1e-4)
    np.testing.assert_allclose(float(report.weight), weight_sum, 1e-3, 1e-4)
    np.testing.assert_allclose(float(report.grad_norm), norm, 1e-3, 1e-4)
    clip_norm = arguments.get("clip_norm")
    factor = 1 / weight_sum
    if clip_norm is not None and norm > 0:
        factor *= min(1.0, float(clip_norm) / norm)
    updates = []
    for gradient, variable in zip(gradients, variables, strict=True):
        updates.append((tf.cast(gradient * factor, variable.dtype), variable))
    optimizer = arguments["optimizer"]
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    else:
        optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer.apply_gradients(updates)
    for result, wanted in zip(
        [*trained.all, trained.count], [*expected.all, expected.count], strict=True
    ):
        np.testing.assert_allclose(np.asarray(result), np.asarray(wanted), 5e-3, 5e-3)


@pytest.mark.sample
@fuzz(120)
@given(call=calls(ARGUMENTS, ["loss_fn", "variables", "optimizer", "jit_compile", "stack"]))
def test_train_step(call):
    variables = Variables()
    arguments = variables.arguments(call.arguments)
    stack = arguments.pop("stack")
    judge(
        call,
        lambda: fa.TrainStep(**arguments)(stack),
        lambda report: check_step(call.arguments, variables, report),
        variables.bytes,
    )
