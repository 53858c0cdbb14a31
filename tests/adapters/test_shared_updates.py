"""An optimizer's update is traced once for the variables of one spec, and changes no bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_optimizer import KERAS

import fastaccum as fa
from fastaccum.adapters import optimizers
from fastaccum.adapters.shared_updates import shared_updates
from fastaccum.families import adapt_optimizer
from fastaccum.memory import analysis

MATRICES = 3  # and as many vectors, and one vector of another length
# A plain one; slots of other shapes; slots of some variables; a schedule and averages; parts.
ALWAYS = ("AdamW", "Adafactor", "Muon", "Adam, EMA", "Multi")


def make_variables():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 6), "bias": (6,)}
    variables = []
    for _ in range(MATRICES):
        for name, shape in shapes.items():
            variables.append(keras.Variable(rng.normal(size=shape).astype("float32"), name=name))
    variables.append(keras.Variable(rng.normal(size=5).astype("float32"), name="other"))
    return variables


def make_gradients(variables, seed):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=v.shape), tf.float32) for v in variables]


def traced_update(make_optimizer):
    """Returns a built optimizer, its variables, and its update as an XLA program."""
    variables = make_variables()
    optimizer = adapt_optimizer(make_optimizer())
    optimizer.build(variables)

    @tf.function(jit_compile=True, autograph=False)
    def step(gradients, ok):
        optimizer.apply(gradients, variables, ok)

    return optimizer, variables, step


def state_of(optimizer, variables):
    return [v.numpy().tobytes() for v in [*variables, *optimizer.variables]]


def calls_of(step, variables):
    """Lists the functions that the program calls, one for each call."""
    function = step.get_concrete_function(make_gradients(variables, 0), tf.constant(True))
    calls = []
    for operation in function.graph.get_operations():
        if operation.type == "StatefulPartitionedCall":
            calls.append(operation.get_attr("f").name)
    return calls


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in KERAS]
)
def test_each_spec_is_traced_once_and_no_bit_changes(name, monkeypatch):
    optimizer, variables, step = traced_update(KERAS[name])
    calls = calls_of(step, variables)
    assert len(calls) == 2 * MATRICES
    assert len(set(calls)) == 2

    with monkeypatch.context() as alone:
        alone.setattr(optimizers, "in_xla", lambda: False)
        reference, reference_variables, reference_step = traced_update(KERAS[name])
        assert not calls_of(reference_step, reference_variables)

    for seed in range(3):
        gradients = make_gradients(variables, seed)
        before = state_of(optimizer, variables)
        step([tf.fill(g.shape, np.nan) for g in gradients], tf.constant(False))
        assert state_of(optimizer, variables) == before
        step(gradients, tf.constant(True))
        reference_step(gradients, tf.constant(True))
        assert state_of(optimizer, variables) == state_of(reference, reference_variables)
        assert state_of(optimizer, variables) != before


def test_a_constraint_holds_for_its_variable_alone():
    _, variables, step = traced_update(KERAS["AdamW"])
    variables[2].constraint = keras.constraints.NonNeg()
    step(make_gradients(variables, 0), tf.constant(True))
    assert (variables[2].numpy() >= 0).all()
    assert (variables[0].numpy() < 0).any()


def test_a_variable_may_be_excluded_from_weight_decay():
    excluded = []

    def make_optimizer():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=excluded)
        return optimizer

    _, decayed, step = traced_update(make_optimizer)
    step(make_gradients(decayed, 0), tf.constant(True))
    excluded.append("bias")
    _, variables, step = traced_update(make_optimizer)
    step(make_gradients(variables, 0), tf.constant(True))
    for variable, other in zip(variables, decayed, strict=True):
        assert np.array_equal(variable, other) == (variable.name != "bias")


class OfOnesOwn(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


class AssignsItself(keras.optimizers.SGD):
    def assign_sub(self, variable, value):
        super().assign_sub(variable, 2 * value)


@pytest.mark.parametrize("make_optimizer", [OfOnesOwn, AssignsItself])
def test_a_users_optimizer_updates_each_variable_itself(make_optimizer):
    _, variables, step = traced_update(make_optimizer)
    assert not calls_of(step, variables)
    before = [v.numpy() for v in variables]
    gradients = make_gradients(variables, 0)
    step(gradients, tf.constant(True))
    for variable, old, gradient in zip(variables, before, gradients, strict=True):
        np.testing.assert_allclose(variable, old - 0.02 * gradient, rtol=1e-5)


class Draws(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = tf.random.uniform(gradient.shape)
        super().update_step(gradient + 0 * noise, variable, learning_rate)


class Counts(keras.optimizers.SGD):
    """Counts the variables that it has updated."""

    def build(self, variables):
        super().build(variables)
        self.count = self.add_variable((), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.count, 1.0)
        super().update_step(gradient * (0 * self.count + 1), variable, learning_rate)


class ReadsAnother(keras.optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        self.other = variables[-1]

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + 0 * tf.reduce_sum(self.other), variable, learning_rate)


class Calls(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        gradient = tf.cond(tf.reduce_sum(gradient) > 0, lambda: gradient, lambda: gradient)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("make_optimizer", [Draws, Counts, ReadsAnother, Calls])
def test_an_update_that_does_more_than_compute_is_traced_for_each_variable(make_optimizer):
    variables = make_variables()
    optimizer = make_optimizer(0.1)
    optimizer.build(variables)
    before = [v.numpy() for v in variables]

    @tf.function(jit_compile=True, autograph=False)
    def step(gradients, ok):
        pairs = list(zip(gradients, variables, strict=True))
        with shared_updates(optimizer, pairs, ok):
            optimizer.apply(gradients, variables)

    assert not calls_of(step, variables)
    gradients = make_gradients(variables, 0)
    step(gradients, tf.constant(True))
    for variable, old, gradient in zip(variables, before, gradients, strict=True):
        np.testing.assert_allclose(variable, old - 0.1 * gradient, rtol=1e-4, atol=1e-6)
    if make_optimizer is Counts:
        assert int(optimizer.count) == len(variables)


def make_deep_trainer():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, "relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((256,)), *layers])
    return fa.Trainer(model, keras.optimizers.AdamW(1e-3), "mse", jit_compile=True)


def test_no_variable_or_slot_is_copied(monkeypatch):
    x = np.zeros((4, 2, 256), "float32")
    shared = make_deep_trainer().memory_analysis((x, x))
    monkeypatch.setattr(optimizers, "in_xla", lambda: False)
    alone = make_deep_trainer().memory_analysis((x, x))
    for field, value in alone._asdict().items():
        assert abs(getattr(shared, field) - value) < 1024  # scalars


def test_a_step_with_room_is_not_compiled_to_find_out(monkeypatch):
    """Fails if the memory of shared updates is unknown without compiling the step."""
    monkeypatch.setattr(analysis, "compile_programs", lambda programs: pytest.fail("compiled"))
    x = np.zeros((8, 256), "float32")
    make_deep_trainer().fit(x, x, verbose=0)
