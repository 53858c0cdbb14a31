"""Sums of gradients: as one product after the loop, in less memory, or made by a kernel."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import indexed_slices

import fastaccum as fa
from fastaccum.kernels import gradients
from fastaccum.kernels.gradients import OfferedTotals
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.kernels.trace_context import TraceContext, accumulator_of
from fastaccum.step import compiler_ir as compiled

N, ROWS, WIDTH = 5, 3, 256
RATE = 0.5


class Net:
    """y = relu(x @ a) @ b, both matrices of just the size from which a product may take an
    accumulator's place.
    """

    def __init__(self, **options):
        rng = np.random.default_rng(0)
        self.a, self.b = (
            tf.Variable(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, dtype=tf.float32)
            for _ in range(2)
        )
        options.setdefault("loss_scale", 8.0)
        self.step = fa.TrainStep(self.loss, [self.a, self.b], keras.optimizers.SGD(RATE), **options)

    def forward(self, x):
        return tf.nn.relu(x @ self.a) @ self.b

    def loss(self, micro_batch):
        x, y, weight = micro_batch
        return tf.reduce_sum(weight[:, None] * (self.forward(x) - y) ** 2), tf.reduce_sum(weight)

    def gradients(self, stack):
        """Computes the gradients of the full batch in float64."""
        x, y, weight = (part.astype("float64").reshape(-1, *part.shape[2:]) for part in stack)
        a, b = self.a.numpy().astype("float64"), self.b.numpy().astype("float64")
        hidden = np.maximum(x @ a, 0)
        error = 2 * weight[:, None] * (hidden @ b - y) / weight.sum()
        return x.T @ ((error @ b.T) * (hidden > 0)), hidden.T @ error


def make_stack(micro_batches=N, rows=ROWS):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, micro_batches, rows, WIDTH)).astype("float32")
    weight = rng.uniform(0.5, 2, size=(micro_batches, rows)).astype("float32")
    weight[-1, -1] = 0
    return x, y, weight


@pytest.fixture
def kinds(monkeypatch):
    """Returns the accumulator that summed each variable's gradient, in order."""
    chosen = []

    def spy(*args):
        chosen.append(choose(*args))
        return chosen[-1]

    choose = gradients.choose_accumulator
    monkeypatch.setattr("fastaccum.kernels.gradients.choose_accumulator", spy)
    return lambda: [type(each).__name__ for each in chosen]


@pytest.mark.parametrize("jit_compile", [True, False])
def test_the_product_is_the_full_batch_gradient(jit_compile, kinds):
    net, stack = Net(jit_compile=jit_compile), make_stack()
    before = [v.numpy().astype("float64") for v in (net.a, net.b)]
    expected = net.gradients(stack)
    net.step(stack)
    assert kinds() == ["FactoredAccumulator", "FactoredAccumulator"]
    for variable, start, gradient in zip((net.a, net.b), before, expected, strict=True):
        moved = variable.numpy() - start
        assert np.linalg.norm(moved + RATE * gradient) < 1e-5 * np.linalg.norm(moved)


def test_a_product_that_forgets_a_micro_batch_fails_the_same_check(trained):
    stack = make_stack()
    (gradient, _), (partial, _) = (
        trained.gradients(stack),
        trained.gradients([part[:-1] for part in stack]),
    )
    assert np.linalg.norm(partial - gradient) > 1e-2 * np.linalg.norm(gradient)


@pytest.mark.parametrize("order", [1, -1])
def test_stacks_of_several_shapes_add_up(kinds, order):
    """A product of one stack, and the accumulator of one that is too short for it."""
    net, (x, y, weight) = Net(), make_stack(N + 2)
    stacks = (x[:N], y[:N], weight[:N]), (x[N:, :1], y[N:, :1], weight[N:, :1])
    stacks = stacks[::order]
    flat = [
        np.concatenate([p.reshape(-1, *p.shape[2:]) for p in parts])[None]
        for parts in zip(*stacks, strict=True)
    ]
    expected = net.gradients(flat)
    before = net.a.numpy().astype("float64")
    tf.function(net.step.run, jit_compile=True)(*tf.nest.map_structure(tf.constant, stacks))
    assert kinds() == [
        kind for kind in ("FactoredAccumulator", "SumAccumulator")[::order] for _ in range(2)
    ]
    np.testing.assert_allclose(net.a.numpy(), before - RATE * expected[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", range(N))
def test_a_bad_number_in_any_micro_batch_changes_nothing(bad, trained):
    (x, y, weight), before = make_stack(), [trained.a.numpy(), trained.b.numpy()]
    x[bad, 0, 0] = np.inf
    assert not trained.step((x, y, weight)).grads_finite
    np.testing.assert_array_equal(before, [trained.a.numpy(), trained.b.numpy()])


@pytest.fixture(scope="module")
def trained():
    return Net()


def hlo_and_memory(net, stack):
    trained_step = net.step._compiled
    stack = tf.nest.map_structure(tf.constant, stack)
    return compiled.compiler_ir(trained_step, stack), compiled.memory_analysis(
        trained_step, stack
    ).temp_bytes


def test_rows_of_a_tied_table_are_added_to_its_accumulator(monkeypatch):
    """TensorFlow makes a table of them to add it to the gradient of the product: another in
    memory.
    """
    table = tf.Variable(np.random.default_rng(0).normal(size=(500, 64)), dtype=tf.float32)

    def loss(ids):
        looked_up = tf.gather(table, ids)
        return tf.reduce_sum(
            tf.matmul(tf.nn.tanh(looked_up), table, transpose_b=True) ** 2
        ), tf.constant(1.0)

    # TensorFlow warns of large tables
    monkeypatch.setattr(indexed_slices, "_LARGE_SPARSE_NUM_ELEMENTS", 1)
    before = tf.identity(table)
    ids = tf.constant([[1, 7, 7], [499, 0, 7]])

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            total = tf.add_n([loss(row)[0] for row in tf.unstack(ids)])
        return tape.gradient(total, table)

    with pytest.warns(UserWarning, match="Converting sparse IndexedSlices"):
        expected = before - 1e-3 * gradient() / 2
    step = fa.TrainStep(loss, [table], keras.optimizers.SGD(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(ids)
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
    text = compiled.compiler_ir(step._compiled, ids, stage="hlo")
    (operand,) = re.findall(r"scatter\(f32\[500,64\]\S* %(\w+)", text)
    assert operand == "add"  # of the product's gradient to the accumulator


def test_the_loop_carries_no_accumulator_and_memory_is_less(monkeypatch):
    stack = make_stack()
    hlo, temp = hlo_and_memory(Net(), stack)
    monkeypatch.setattr(gradients, "SMALLEST_MATRIX", WIDTH**2 + 1)
    plain_hlo, plain_temp = hlo_and_memory(Net(), stack)
    (loop,), (plain_loop,) = (
        re.findall(r"^.* while\(.*$", text, re.MULTILINE) for text in (hlo, plain_hlo)
    )
    assert f'known_trip_count":{{"n":"{N}"}}' in loop
    # The two matrices themselves, and in the plain loop their accumulators.
    assert loop.split(" while(")[0].count(f"f32[{WIDTH},{WIDTH}]") == 2
    assert plain_loop.split(" while(")[0].count(f"f32[{WIDTH},{WIDTH}]") == 4
    assert not re.search(r"\bconditional\(", hlo)
    assert temp < plain_temp


def choice(gradient_of, steps=N, rows=ROWS, dtype=tf.float32, shape=(WIDTH, WIDTH)):
    """Returns the accumulator that sums the gradient of `gradient_of(x, kernel)`, a loss."""
    graph = tf.Graph()
    with graph.as_default():
        x, kernel = tf.zeros([rows, shape[0]], dtype), tf.zeros(shape)
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            loss = gradient_of(x, kernel)
        gradient = tape.gradient(loss, kernel)
        return type(
            gradients.choose_accumulator(tf.zeros(shape), gradient, steps, lambda t: None)
        ).__name__


def once(x, kernel):
    return tf.reduce_sum(tf.square(x @ kernel))


def half_of_autodiff(x, kernel):
    """Rounded to float16 in each micro-batch: a product over more rows would round, and overflow,
    elsewhere.
    """
    return tf.reduce_sum(tf.square(x @ tf.cast(kernel, tf.float16)))


def twice(x, kernel):
    return tf.reduce_sum(x @ kernel @ kernel)


@pytest.mark.parametrize(
    "loss, options, kind",
    [
        (once, {}, "FactoredAccumulator"),
        (once, {"rows": WIDTH // 2 // N}, "FactoredAccumulator"),
        # the factors would outgrow the accumulator
        (once, {"rows": WIDTH // 2 // N + 1}, "SumAccumulator"),
        (once, {"steps": gradients.FEWEST_STEPS - 1}, "SumAccumulator"),
        (once, {"shape": (WIDTH, WIDTH - 1)}, "SumAccumulator"),
        (twice, {}, "SumAccumulator"),
        (half_of_autodiff, {"dtype": tf.float16}, "SumAccumulator"),
    ],
)
def test_when(loss, options, kind):
    assert choice(loss, **options) == kind


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("float32", marks=pytest.mark.slow),
        "mixed_float16",
        pytest.param("mixed_bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_keras_model_under_any_policy_and_in_several_steps_of_one_program(
    policy, kinds, monkeypatch
):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(WIDTH, "relu", dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
    )
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(2 * N * ROWS, WIDTH)).astype("float32"),
        rng.normal(size=(2 * N * ROWS, 1)),
    )

    def weights_after_fit():
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
        optimizer = keras.optimizers.SGD(0.01)
        trainer = fa.Trainer(
            copy, optimizer, "mse", gradient_accumulation_steps=N, steps_per_execution=2
        )
        trainer.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        return copy.get_weights()

    ours = weights_after_fit()
    assert kinds() == ["FactoredAccumulator", "SumAccumulator", "SumAccumulator", "SumAccumulator"]
    monkeypatch.setattr(gradients, "SMALLEST_MATRIX", WIDTH**2 + 1)
    for a, b, start in zip(ours, weights_after_fit(), model.get_weights(), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b - start)


# Gradients that a stack of layers adds to a step's totals itself.

K, B, D, DEPTH = 3, 2, 4, 2


def once(stack, x):
    return stack(x)


def in_float16(stack, x):
    return stack(x)


def twice(stack, x):
    """Each weight's gradient is a sum of two, of which the kernel adds one."""
    return stack(tf.sin(stack(x)))


def also_read_by_the_loss(stack, x):
    return stack(x) * tf.reduce_sum(tf.square(stack.trainable_variables[0].value))


def in_a_branch(stack, x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: stack(x), lambda: 2 * x)


def scaled_on_its_way(stack, x):
    """The gradients that the stack returns are not those that reach its weights."""
    weights = [weight.value for weight in stack.trainable_variables]

    @tf.custom_gradient
    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = stack(x)

        def gradient(dy, variables):
            dx, dw = tape.gradient(y, [x, weights], dy)
            by_name = {v.ref(): 3 * each for v, each in zip(weights, dw, strict=True)}
            return dx, [by_name[v.ref()] for v in variables]

        return y, gradient

    return call(x)


# And how many of two accumulators the kernel adds to.
FORMS = {
    once: 2,
    in_float16: 2,
    twice: 2,
    also_read_by_the_loss: 2,
    in_a_branch: 0,
    scaled_on_its_way: 0,
}


def weights_after_a_step(implementation):
    """Trains a stack in each form, and returns its weights."""
    keras.utils.set_random_seed(1)

    def made(form):
        dense = layers.Dense(D, "tanh", dtype="float16" if form is in_float16 else "float32")
        stack = LayerStack(dense, DEPTH, implementation=implementation)
        stack.build((B, D))
        return stack

    stacks = {form: made(form) for form in FORMS}

    def loss(x):
        outputs = [form(stack, tf.cast(x, stack.compute_dtype)) for form, stack in stacks.items()]
        return tf.add_n([tf.reduce_sum(tf.cast(y, tf.float32) ** 2) for y in outputs]), float(
            len(x)
        )

    weights = [weight for stack in stacks.values() for weight in stack.trainable_variables]
    step = fa.TrainStep(loss, weights, keras.optimizers.SGD(0.1), loss_scale=8.0)
    x = np.random.default_rng(0).normal(size=(K, B, D)).astype("float32")
    step(x)
    return {
        form: [weight.numpy() for weight in stack.trainable_variables]
        for form, stack in stacks.items()
    }


def test_a_step_with_sums_made_by_kernels_is_that_of_plain_autodiff(monkeypatch):
    added, init = [], gradients.AddedAccumulator.__init__

    def spy(self, total, *terms):
        added.append(total.shape)
        init(self, total, *terms)

    monkeypatch.setattr(gradients.AddedAccumulator, "__init__", spy)
    ours, theirs = weights_after_a_step("auto"), weights_after_a_step("reference")
    assert len(added) == sum(FORMS.values())
    for form in FORMS:
        tolerance = 1e-3 if form is in_float16 else 1e-5
        for mine, expected in zip(ours[form], theirs[form], strict=True):
            np.testing.assert_allclose(
                mine, expected, rtol=tolerance, atol=tolerance, err_msg=form.__name__
            )


@pytest.mark.parametrize("added", range(3))
def test_a_kernel_adds_one_term_and_the_other_terms_are_left(added):
    with tf.Graph().as_default():
        terms, total = [tf.fill([2], float(i)) for i in range(3)], tf.zeros([2])
        variable = tf.Variable(total)
        accumulators = OfferedTotals([variable], [total])
        with TraceContext(accumulators).entered():
            with_it = total + terms[added]
            accumulator_of(variable).note(terms[added], with_it)
        found, left = accumulators.with_added(tf.add_n(terms))
    assert found is with_it and [*map(id, left)] == [
        id(t) for i, t in enumerate(terms) if i != added
    ]
