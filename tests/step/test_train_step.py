"""The functional core: exact, untouched by bad gradients, and one lean XLA program."""

import itertools
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.kernels import xla_ops

K, B, D = 4, 3, 5


def make_data(seed=0, micro_batches=K):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(micro_batches, B, D)).astype("float32"),
        rng.normal(size=(micro_batches, B)).astype("float32"),
        rng.uniform(0, 2, size=(micro_batches, B)).astype("float32"),
    )


class Linear:
    """Weighted least squares, with counters that stand for batch statistics."""

    def __init__(self, optimizer="sgd", **options):
        rng = np.random.default_rng(1)
        self.w = tf.Variable(rng.normal(size=D), dtype=tf.float32)
        self.b = tf.Variable(0.1)
        self.seen = tf.Variable(0.0)
        options.setdefault(
            "loss_scale", fa.DynamicLossScale(init_scale=8.0, growth_interval=2, min_scale=2.0)
        )
        self.step = fa.TrainStep(
            self.loss, [self.w, self.b], optimizer, state=[self.seen], **options
        )

    def loss(self, micro_batch):
        x, y, weight = micro_batch
        self.seen.assign_add(tf.reduce_sum(x))
        return tf.reduce_sum(
            weight * (tf.linalg.matvec(x, self.w) + self.b - y) ** 2
        ), tf.reduce_sum(weight)

    def oracle(self, stack):
        """(loss, gradient of w, gradient of b) of the full batch, in float64."""
        x, y, weight = (a.astype("float64").reshape(-1, *a.shape[2:]) for a in stack)
        error = x @ self.w.numpy().astype("float64") + float(self.b) - y
        total = weight.sum()
        return (
            (weight * error**2).sum() / total,
            2 * (weight * error) @ x / total,
            2 * (weight * error).sum() / total,
        )

    def everything(self):
        step = self.step
        return [v.numpy().tobytes() for v in [self.w, self.b, self.seen, *step.optimizer.variables]]


@pytest.fixture(scope="module")
def linear():
    return Linear(keras.optimizers.SGD(0.5))


@pytest.mark.parametrize("seed", range(4))
def test_one_step_is_the_full_batch_step(linear, seed):
    stack = make_data(seed)
    loss, w_grad, b_grad = linear.oracle(stack)
    w, b = linear.w.numpy().astype("float64"), float(linear.b)
    result = linear.step(stack)
    np.testing.assert_allclose(float(result.loss), loss, rtol=1e-5)
    np.testing.assert_allclose(float(result.weight), stack[2].sum(), rtol=1e-6)
    np.testing.assert_allclose(
        float(result.grad_norm), np.sqrt(w_grad @ w_grad + b_grad**2), rtol=1e-5
    )
    np.testing.assert_allclose(linear.w.numpy(), w - 0.5 * w_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(float(linear.b), b - 0.5 * b_grad, rtol=1e-5, atol=1e-6)


def test_the_mean_of_means_fails_the_same_check(linear):
    stack = make_data(7)
    loss, w_grad, _ = linear.oracle(stack)
    micro_batches = [linear.oracle([a[i : i + 1] for a in stack]) for i in range(K)]
    assert abs(np.mean([m[0] for m in micro_batches]) - loss) > 1e-2 * loss
    mean_of_means = np.mean([m[1] for m in micro_batches], axis=0)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(mean_of_means, w_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_clipping_is_by_the_norm_of_the_final_gradient(jit_compile, clip_norm):
    linear = Linear(keras.optimizers.SGD(1.0), clip_norm=clip_norm, jit_compile=jit_compile)
    stack = make_data(3)
    _, w_grad, b_grad = linear.oracle(stack)
    norm = np.sqrt(w_grad @ w_grad + b_grad**2)
    w = linear.w.numpy().astype("float64")
    result = linear.step(stack)
    np.testing.assert_allclose(float(result.grad_norm), norm, rtol=1e-5)
    np.testing.assert_allclose(
        w - linear.w.numpy(), w_grad * clip_norm / max(norm, clip_norm), rtol=1e-4, atol=1e-6
    )


@pytest.fixture(scope="module")
def adam():
    return Linear(keras.optimizers.Adam(0.1))


@pytest.mark.parametrize(
    ("where", "bad"), list(itertools.product(range(K), [np.inf, -np.inf, np.nan]))
)
def test_a_step_with_a_bad_micro_batch_touches_nothing(adam, where, bad):
    adam.step(make_data())
    stack = make_data(where)
    stack[1][where, 1] = bad
    adam.step.loss_scale.current_scale.assign(64.0)
    before = adam.everything()
    result = adam.step(stack)
    assert not result.grads_finite
    assert float(result.loss_scale) == 32.0 and int(adam.step.loss_scale.good_steps) == 0
    assert adam.everything() == before
    adam.step(make_data())
    assert adam.everything() != before


def test_an_operation_that_fails_moves_nothing():
    """Runs without XLA, where operations run as soon as they can: the update count depended on none
    before it.
    """
    w, adam = tf.Variable([1.0, 2.0]), keras.optimizers.Adam()

    def loss(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 5.0)]):
            return tf.reduce_sum((w * x) ** 2), tf.constant(2.0)

    step = fa.TrainStep(loss, [w], adam, jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant([[1.0, 2.0], [1.0, 9.0]]))
    assert not any(v.numpy().any() for v in adam.variables if "learning_rate" not in v.path)
    np.testing.assert_array_equal(w, [1.0, 2.0])


def test_a_step_without_valid_rows_changes_nothing_and_gives_no_nan(adam):
    x, y, weight = make_data()
    adam.step.loss_scale.current_scale.assign(64.0)
    adam.step.loss_scale.good_steps.assign(1)
    before = adam.everything()
    result = adam.step((x, y, np.zeros_like(weight)))
    assert (float(result.loss), float(result.weight), float(result.grad_norm)) == (0.0, 0.0, 0.0)
    assert float(result.loss_scale) == 64.0 and int(adam.step.loss_scale.good_steps) == 1
    assert adam.everything() == before


def test_the_scale_moves_once_per_step_whatever_the_stack(adam):
    scale = adam.step.loss_scale
    scale.current_scale.assign(8.0)
    scale.good_steps.assign(0)
    assert [float(adam.step(make_data()).loss_scale) for _ in range(4)] == [8.0, 16.0, 16.0, 32.0]
    bad = make_data()
    bad[1][:] = np.nan
    assert [float(adam.step(bad).loss_scale) for _ in range(6)] == [16.0, 8.0, 4.0, 2.0, 2.0, 2.0]


def test_a_variable_that_the_loss_does_not_reach_is_left_alone():
    used, unused = tf.Variable(1.0), tf.Variable(1.0)
    step = fa.TrainStep(
        lambda x: (tf.reduce_sum(x * used), tf.cast(tf.size(x), tf.float32)),
        [used, unused],
        keras.optimizers.AdamW(0.1, weight_decay=0.5),
    )
    step(np.ones((K, B), "float32"))
    assert float(used) != 1.0 and float(unused) == 1.0


def test_sparse_gradients_add_up():
    """Repeated rows within and across micro-batches, against a float64 sum."""
    table = tf.Variable(tf.ones([6, 2]))
    ids = np.array([[1, 1, 2], [2, 5, 5], [1, 0, 0]])
    scale = np.arange(9, dtype="float32").reshape(3, 3)

    def loss(micro_batch):
        i, s = micro_batch
        return tf.reduce_sum(tf.gather(table, i) * s[:, tf.newaxis]), tf.constant(1.0)

    fa.TrainStep(loss, [table], keras.optimizers.SGD(1.0))((ids, scale))
    expected = np.ones((6, 2))
    np.add.at(expected, ids.ravel(), -scale.ravel()[:, None] / 3)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


def test_float64_variables_accumulate_in_float64():
    w = tf.Variable(1.0, dtype=tf.float64)
    x = np.array([1e8, 1.0, -1e8])[:, None]
    fa.TrainStep(
        lambda x: (tf.reduce_sum(w * x), tf.constant(1.0)), [w], keras.optimizers.SGD(1.0)
    )(x)
    np.testing.assert_allclose(float(w), 1 - 1 / 3, rtol=1e-7)


def test_a_model_that_overflows_at_first_trains_after_backing_off():
    policy = keras.DTypePolicy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
    )
    trainer = fa.Trainer(model, keras.optimizers.SGD(1e-4), "mse", gradient_accumulation_steps=2)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    history = trainer.fit(
        x, 40 * x.sum(1, keepdims=True) + 100, batch_size=4, epochs=12, shuffle=False, verbose=0
    ).history
    assert trainer.loss_scale.init_scale == 2.0**15
    assert history["skipped_steps"][0] > 0 and history["skipped_steps"][-1] == 0
    assert history["loss_scale"][-1] < 2.0**15
    assert history["loss"][-1] < history["loss"][0]


def test_stacks_of_one_shape_may_differ_in_structure_and_hold_none():
    v = tf.Variable(1.0)

    def loss(batch):
        x = batch["a"] if isinstance(batch, dict) else batch[0]
        return tf.reduce_sum(v * x), tf.constant(2.0)

    step = fa.TrainStep(loss, [v], "sgd")
    x = tf.ones([2, 2])
    results = [float(step(stack).loss) for stack in ((x, None), {"a": x, "b": x}, (x, x))]
    assert results[0] > results[1] > results[2]


class TestErrors:
    def test_a_mean_and_nothing_else(self):
        w = tf.Variable(1.0)
        step = fa.TrainStep(lambda x: tf.reduce_mean(w * x), [w], "sgd")
        with pytest.raises(ValueError, match=r"must return \(loss_sum, weight_sum\)"):
            step(np.ones((2, 2), "float32"))

    def test_losses_that_are_no_scalar(self):
        w = tf.Variable(1.0)
        step = fa.TrainStep(lambda x: (w * x, 1.0), [w], "sgd")
        with pytest.raises(ValueError, match="loss_sum of shape"):
            step(np.ones((2, 2), "float32"))

    def test_a_loss_that_reaches_nothing(self):
        w = tf.Variable(1.0)
        step = fa.TrainStep(lambda x: (tf.reduce_sum(x), 1.0), [w], "sgd")
        with pytest.raises(ValueError, match="reaches none of the 1 variables"):
            step(np.ones((2, 2), "float32"))

    @pytest.mark.parametrize(
        ("stack", "message"),
        [
            ((), "holds no tensor"),
            ((np.ones((2, 2)), np.ones((3, 2))), "different leading axes"),
            ((np.ones((2, 2)), np.float32(1.0)), "holds a scalar"),
            (np.ones((0, 2)), "at least 1"),
        ],
    )
    def test_stacks(self, linear, stack, message):
        before = linear.everything()
        with pytest.raises(ValueError, match=message):
            linear.step(stack)
        assert linear.everything() == before

    def test_arguments(self):
        w = tf.Variable(1.0)

        def loss(x):
            return tf.reduce_sum(w * x), 1.0

        with pytest.raises(
            ValueError, match=r"variables is empty.* call it on a batch, or build it"
        ):
            fa.TrainStep(loss, [], "sgd")
        with pytest.raises(TypeError, match=r"is not a tf\.Variable"):
            fa.TrainStep(loss, [tf.constant(1.0)], "sgd")
        with pytest.raises(ValueError, match="clip_norm=-1"):
            fa.TrainStep(loss, [w], "sgd", clip_norm=-1)
        with pytest.raises(TypeError, match="loss_fn=3"):
            fa.TrainStep(3, [w], "sgd")
        with pytest.raises(TypeError, match=r"loss_fn=.* must be a function of one micro-batch"):
            fa.TrainStep(lambda x, y: loss(x), [w], "sgd")
        with pytest.raises(TypeError, match="jit_compile='yes' must be True or False"):
            fa.TrainStep(loss, [w], "sgd", jit_compile="yes")
        with pytest.raises(TypeError, match="state=3 must be a list of variables"):
            fa.TrainStep(loss, [w], "sgd", state=3)

    @pytest.mark.parametrize(
        ("variables", "error", "message"),
        [
            (lambda w: w, TypeError, "variables=.* must be a list of variables"),
            (lambda w: {"w": w}, TypeError, "variables=.* must be a list of variables"),
            (lambda w: np.array(None), TypeError, "variables=.* must be a list of variables"),
            (lambda w: [w, keras.Variable(0.0), w], ValueError, "variables holds 'w:0' twice"),
            (
                lambda w: [w, tf.Variable(1, name="i")],
                TypeError,
                "variables holds 'i:0' of dtype int32",
            ),
            (
                lambda w: [tf.Variable([1.0], shape=[None], name="n")],
                ValueError,
                r"variables holds 'n:0' of shape \(None,",
            ),
            (
                lambda w: [of_another_graph()],
                ValueError,
                "variables holds 'other:0', which belongs to another graph",
            ),
        ],
    )
    def test_variables(self, variables, error, message):
        w = tf.Variable(1.0, name="w")
        with pytest.raises(error, match=message):
            fa.TrainStep(lambda x: (tf.reduce_sum(w * x), 1.0), variables(w), "sgd")

    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            (lambda loss: (loss, None), TypeError, "loss_fn's weight_sum=None must be a tensor"),
            (lambda loss: {"loss": loss, "weight": 1.0}, TypeError, "loss_sum of dtype string"),
            (lambda loss: (tf.cast(loss, "int32"), 1), TypeError, "loss_sum of dtype int32"),
            (lambda loss: (loss, True), TypeError, "weight_sum of dtype bool"),
            (lambda loss: keras.layers.Dense(1)(loss), ValueError, "loss_fn: .*incompatible"),
        ],
    )
    def test_what_loss_fn_returns(self, returned, error, message):
        w = tf.Variable(1.0)
        step = fa.TrainStep(lambda x: returned(tf.reduce_sum(w * x)), [w], "sgd", jit_compile=False)
        with pytest.raises(error, match=f"(?s){message}"):
            step(np.ones((2, 2), "float32"))

    @pytest.mark.parametrize(
        "stack",
        [None, "text", {"a": object()}, tf.ragged.constant([[1.0], [1.0, 2.0]]), {1: 2, "a": 3}],
    )
    def test_stacks_of_no_tensors(self, linear, stack):
        with pytest.raises((TypeError, ValueError), match="stack"):
            linear.step(stack)

    def test_what_xla_cannot_compile(self):
        w = tf.Variable(1.0)
        step = fa.TrainStep(
            lambda x: (w * tf.cast(tf.reduce_sum(tf.strings.length(x)), "float32"), 1.0), [w], "sgd"
        )
        with pytest.raises(
            ValueError, match=r"XLA cannot compile loss_fn with this stack: .*jit_compile=False"
        ):
            step(tf.constant(["a", "b"]))


def of_another_graph():
    with tf.Graph().as_default():
        return tf.Variable(1.0, name="other")


def test_variables_may_be_a_generator():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    step = fa.TrainStep(
        lambda x: (tf.add_n(variables), 1.0), (v for v in variables), keras.optimizers.SGD(1.0)
    )
    step(np.ones((1, 1), "float32"))
    assert [float(v) for v in variables] == [0.0, 1.0]


@pytest.mark.parametrize(
    "empty", [np.zeros((2, 0), "float32"), {"a": np.zeros((2, 0)), "b": np.ones((2, 3))}]
)
def test_a_stack_whose_first_tensor_is_empty_is_trained_on(empty):
    """The loss was scaled by 1 / 0, and no step was taken."""
    w = tf.Variable(1.0)
    step = fa.TrainStep(lambda x: (w * w, 1.0), [w], keras.optimizers.SGD(0.25), jit_compile=False)
    assert step(empty).grads_finite and float(w) == 0.5


def test_a_loss_with_python_control_flow_over_tensors_is_converted():
    w = tf.Variable(2.0)

    def loss(x):
        total = 0.0
        for value in x:
            if value > 0.0:
                total += w * value
        return total, tf.constant(1.0)

    fa.TrainStep(loss, [w], keras.optimizers.SGD(1.0))(tf.constant([[1.0, -5.0], [3.0, -7.0]]))
    assert float(w) == 2.0 - (1.0 + 3.0) / 2


@pytest.mark.parametrize("sparse", [False, True])
def test_float16_variables_accumulate_in_float32(sparse):
    w = tf.Variable([1.0], dtype=tf.float16)
    x = np.array([2048, 1, 1, -2048], "float16")[:, None]  # 2048 + 1 is 2048 in float16

    def loss(x):
        return tf.reduce_sum((tf.gather(w, [0]) if sparse else w) * x), tf.constant(1.0)

    fa.TrainStep(loss, [w], keras.optimizers.SGD(1.0))(x)
    assert w.numpy().tolist() == [0.5]


def test_the_norm_of_the_unscaled_gradient_does_not_overflow():
    w = tf.Variable([3.0, 4.0])

    def loss(x):
        return tf.reduce_sum(w * w) / 2, tf.constant(1.0)

    result = fa.TrainStep(loss, [w], keras.optimizers.SGD(1.0), loss_scale=2.0**80)(
        np.zeros((1, 1), "float32")
    )
    assert result.grads_finite and float(result.grad_norm) == 5.0
    assert w.numpy().tolist() == [0.0, 0.0]


def test_the_first_leaf_of_a_stack_may_be_none():
    w = tf.Variable([1.0])

    def squared(micro_batch):
        nothing, x = micro_batch
        assert nothing is None
        return tf.reduce_sum((w * x) ** 2), tf.cast(tf.size(x), tf.float32)

    result = fa.TrainStep(squared, [w], "sgd", jit_compile=False)(
        (None, tf.constant([[1.0, 2.0], [3.0, 4.0]]))
    )
    assert float(result.loss) == 7.5


def test_a_variable_that_no_gradient_reaches_is_named():
    used, unused = (keras.Variable([1.0], name=name) for name in ("used", "unused"))

    def squares(micro_batch):
        return tf.reduce_sum((micro_batch * used) ** 2), tf.cast(tf.size(micro_batch), tf.float32)

    step = fa.TrainStep(squares, [used, unused], "sgd", jit_compile=False)
    with pytest.warns(
        UserWarning,
        match=r"No gradient of the loss reaches these trainable variables.*\['unused'\]",
    ):
        step(tf.ones([2, 3, 1]))
    assert float(unused[0]) == 1.0 != float(used[0])


@pytest.mark.parametrize(
    ("draw", "largest", "expected"),
    [
        (lambda: 0.0, 2**28, 2),
        (lambda: 0.0, 10, 1),  # results of a micro-batch take too much memory twice
        # each draw is another one, so that their order tells
        (lambda: tf.random.normal([4]), 2**28, 1),
        (tf.function(lambda: tf.random.uniform([4])), 2**28, 1),
        (lambda: tf.random.stateless_normal([4], [1, 2]), 2**28, 2),
    ],
)
def test_without_xla_two_micro_batches_are_computed_at_a_time(draw, largest, expected, monkeypatch):
    monkeypatch.setattr(xla_ops, "_LARGEST_TURN", largest)
    w, inside, seen, lock = tf.Variable(1.0), set(), [], threading.Lock()

    def wait(x):
        with lock:
            inside.add(x[0])
            seen.append(len(inside))
        time.sleep(0.05)
        with lock:
            inside.remove(x[0])
        return x

    def loss(x):
        slow = tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32, stateful=False), x.shape)
        return tf.reduce_sum((w * slow + draw()) ** 2), tf.constant(4.0)

    fa.TrainStep(loss, [w], "sgd", jit_compile=False)(tf.reshape(tf.range(24.0), [6, 4]))
    assert len(seen) == 6 and max(seen) == expected


def test_without_xla_each_micro_batch_finds_what_the_one_before_assigned():
    """Assigns a variable with work still to do after it, as BatchNormalization moves its averages
    before the backward pass ends.
    """
    w, state = tf.Variable(tf.ones([64, 64])), tf.Variable(0.0)

    def loss(x):
        before = state.read_value()
        state.assign(0.5 * before + tf.reduce_mean(x))
        y = x
        for _ in range(20):
            y = tf.tanh(y @ w)
        # times 0, it would be left out
        return tf.reduce_sum(y) * 1e-9 + before * tf.reduce_sum(w), tf.constant(1.0)

    x = np.random.default_rng(0).normal(size=(12, 64, 64)).astype("float32")
    step = fa.TrainStep(loss, [w], keras.optimizers.SGD(0.0), state=[state], jit_compile=False)
    for _ in range(3):
        start = float(state)
        found, orders = float(step(tf.constant(x)).loss), []
        # the second as a control: the order tells
        for means in (x.mean((1, 2)), x.mean((1, 2))[::-1]):
            value, total = start, 0.0
            for mean in means:
                total, value = total + value * 64 * 64, 0.5 * value + mean
            orders.append((total / 12, value))
        np.testing.assert_allclose((found, float(state)), orders[0], rtol=1e-4)
        assert not np.allclose((found, float(state)), orders[1], rtol=1e-2)


def test_two_micro_batches_at_a_time_train_as_one_at_a_time_bit_for_bit(monkeypatch):
    def weights(largest):
        monkeypatch.setattr(xla_ops, "_LARGEST_TURN", largest)
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        trainer = fa.Trainer(model, "adam", "mse", gradient_accumulation_steps=6, jit_compile=False)
        x = np.random.default_rng(0).normal(size=(6, 4, 8, 8, 1)).astype("float32")
        for _ in range(3):
            trainer.train_step((x, x[:, :, 0, 0]))
        return [w.tobytes() for w in model.get_weights()]

    assert weights(2**28) == weights(0)
