"""Interceptors of layers' methods: what wraps what, and that nothing is left behind."""

import copy
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import fastaccum as fa
from fastaccum.adapters.models import Model
from fastaccum.layers import forms
from fastaccum.layers.interceptors import (
    Interceptor,
    Role,
    install,
    installed,
    intercepting,
    remove,
)
from fastaccum.layers.lookups import make_id_observers


class Doubled(keras.layers.Dense):
    def call(self, inputs, training=None):
        return 2.0 * super().call(inputs)


def noting(layer, role, calls, owner=None):
    def replacement(call, *args, **kwargs):
        calls.append(role)
        return call(*args, **kwargs)

    return Interceptor(layer, "call", replacement, role, owner)


ROLES = list(itertools.permutations(Role, 2))


@pytest.mark.parametrize(("first", "second"), ROLES, ids=lambda role: role.name)
@pytest.mark.parametrize(
    "make", [keras.layers.Dense, tf_keras.layers.Dense, Doubled], ids=["Keras", "tf_keras", "own"]
)
def test_the_role_alone_says_what_wraps_what(make, first, second):
    layer, calls = make(3), []
    x = tf.ones([2, 4])
    expected, before = layer(x), dict(vars(layer))
    with intercepting([noting(layer, first, calls)]), intercepting([noting(layer, second, calls)]):
        np.testing.assert_array_equal(layer(x), expected)
        assert calls == sorted((first, second), reverse=True), "the outermost is called first"
    np.testing.assert_array_equal(layer(x), expected)
    assert vars(layer) == before and type(layer) is make and len(calls) == 2


def test_the_last_interceptor_of_a_role_is_outermost():
    layer, calls = keras.layers.Dense(3), []
    for name in ("inner", "outer"):
        replacement = lambda call, x, name=name: (calls.append(name), call(x))[1]  # noqa: E731
        install(Interceptor(layer, "call", replacement, Role.FORM))
    layer(tf.ones([2, 4]))
    assert calls == ["outer", "inner"]


def test_interceptors_may_be_removed_in_any_order():
    layer, calls = Doubled(3), []
    each = {role: noting(layer, role, calls) for role in Role}
    for interceptor in each.values():
        install(interceptor)
    for role in (Role.PRECISION, Role.BYPASS, Role.LOOP, Role.FORM, Role.DOCUMENTS):
        remove(each[role])
    layer(tf.ones([2, 4]))
    assert calls == [Role.OBSERVE, Role.RECOMPUTE]
    assert installed(layer, Role.OBSERVE) == [each[Role.OBSERVE]]
    remove(each[Role.OBSERVE])
    remove(each[Role.RECOMPUTE])
    remove(each[Role.RECOMPUTE])  # of nothing
    assert "call" not in vars(layer)


@pytest.mark.parametrize("owner", [None, keras.layers.Dense])
def test_an_error_leaves_nothing_behind(owner):
    layer = Doubled(3)
    layer(tf.ones([2, 4]))
    before = dict(vars(layer))

    def fail(call, *args, **kwargs):
        raise ValueError("planted")

    with (
        pytest.raises(ValueError, match="planted"),
        intercepting([Interceptor(layer, "call", fail, role, owner) for role in Role]),
    ):
        layer(tf.ones([2, 4]))
    assert vars(layer) == before and type(layer) is Doubled
    with (
        pytest.raises(AttributeError),
        intercepting([noting(layer, Role.FORM, []), Interceptor(layer, "no", fail, 1)]),
    ):
        pass
    assert vars(layer) == before


@pytest.mark.parametrize("order", [1, -1])
def test_a_base_class_and_the_layer_may_both_be_intercepted(order):
    """Observes the call that reaches `super().call`, and wraps the layer's own call around it."""
    layer, calls = Doubled(3), []
    x = tf.ones([2, 4])
    expected = layer(x)
    each = [
        noting(layer, Role.OBSERVE, calls, keras.layers.Dense),
        noting(layer, Role.RECOMPUTE, calls),
    ][::order]
    with intercepting(each[:1]), intercepting(each[1:]):
        np.testing.assert_array_equal(layer(x), expected)
        assert isinstance(layer, Doubled) and type(layer).__name__ == "Doubled"
    assert (
        calls == [Role.RECOMPUTE, Role.OBSERVE]
        and type(layer) is Doubled
        and "call" not in vars(layer)
    )


def test_a_call_that_was_set_on_a_layer_is_no_form_of_its_class():
    layer, calls = keras.layers.Dense(3), []
    layer.call = tf.negative
    with intercepting([noting(layer, role, calls) for role in Role]):
        assert layer(tf.ones([1, 1])).numpy() == [[-1]]
    assert calls == [Role.BYPASS, Role.DOCUMENTS, Role.OBSERVE, Role.LOOP, Role.RECOMPUTE]
    assert layer.call is tf.negative


def test_a_copy_of_a_layer_has_no_interceptors():
    layer, calls = tf_keras.layers.Dense(3), []
    x = tf.ones([2, 4])
    expected = layer(x)
    install(noting(layer, Role.RECOMPUTE, calls))
    copied = copy.deepcopy(layer)
    copied.kernel.assign_add(tf.ones([4, 3]))
    np.testing.assert_allclose(copied(x), expected + 4, rtol=1e-6)
    assert not calls and not installed(copied, Role.RECOMPUTE)


def convolved(policy):
    """A model with layers that several kinds of interceptors apply to."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((8,), dtype="int32")
    x = keras.layers.Reshape((8, 1, 4))(keras.layers.Embedding(5, 4)(ids))
    for name in ("first", "second"):
        x = keras.layers.Conv2D(4, 3, padding="same", dilation_rate=2, dtype=policy, name=name)(x)
    return keras.Model(ids, keras.layers.Dense(1, dtype="float32")(keras.layers.Flatten()(x)))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_forms_precision_recomputation_and_observers_give_one_result_in_any_order(policy):
    model = convolved(policy)
    adapter = Model(model)
    x = tf.constant(np.random.default_rng(0).integers(5, size=(3, 8)))
    fa.remat(model, layer_names=["first", "second"])
    recomputing = [each for layer in model.layers for each in installed(layer, Role.RECOMPUTE)]
    fa.remat(model, None)
    observed = []
    kinds = [
        forms.make_forms(model.layers, True),
        forms.make_fp32(adapter.called_layers),
        recomputing,
        make_id_observers(
            [(model.layers[1], 5)], lambda i, ids: observed.append((i, tuple(ids.shape))), True
        ),
    ]
    assert [len(each) for each in kinds] == [2, 0 if policy == "float32" else 2, 2, 2]

    def gradients(kinds):
        @tf.function(jit_compile=True, autograph=False)
        def step():
            with intercepting([each for kind in kinds for each in kind]), tf.GradientTape() as tape:
                y = model(x)
                return [y, *tape.gradient(y, [v.value for v in model.trainable_variables])]

        return [tf.convert_to_tensor(t).numpy() for t in step()]

    expected = gradients(kinds)
    for ordered in (kinds[::-1], [*kinds[2:], *kinds[:2]]):
        for got, wanted in zip(gradients(ordered), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert set(observed) == {(0, (3, 8))}
    assert all("call" not in vars(layer) for layer in model.layers)
