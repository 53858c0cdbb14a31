"""Bad numbers: they never reach weights, slots or statistics, and training that can only skip says
why it ends.
"""

import contextlib
import gc
import re
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.data import source as data
from fastaccum.data.stacks import Layout, Position
from fastaccum.kernels import LayerStack
from fastaccum.step import guards
from fastaccum.step.device_engine import DeviceEngine

pytestmark = pytest.mark.long

RNG = np.random.default_rng(0)
STEPS, K, B = 4, 2, 3
ROWS = STEPS * K * B
X = RNG.normal(size=(ROWS, 3)).astype("float32")
Y = X.sum(1, keepdims=True).astype("float32")
nan, inf = np.nan, np.inf
UNTOUCHED = "Weights, slots and statistics are those of the last good step"


def network(*between, policy=None, **head):
    """Dense, batch normalisation, whatever comes between, and a linear head."""
    keras.config.set_dtype_policy(policy or "float32")
    layers = [
        keras.layers.Dense(4, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        *between,
    ]
    return keras.Sequential(
        [keras.Input((3,)), *layers, keras.layers.Dense(1, name="head", **head)]
    )


def make(model=None, loss="mse", optimizer=None, **options):
    options = {
        "gradient_accumulation_steps": K,
        "on_nonfinite": "raise",
        "jit_compile": False,
        **options,
    }
    return fa.Trainer(model or network(), optimizer or keras.optimizers.Adam(0.01), loss, **options)


def fit(trainer, x=X, y=Y, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return trainer.fit(
            x, y, **{"batch_size": B, "shuffle": False, "verbose": 0, **options}
        ).history


def bytes_of(trainer):
    """Weights, statistics, slots and counters."""
    return [v.numpy().tobytes() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def changed(array, at, value):
    copy = array.copy()
    copy[at] = value
    return copy


@contextlib.contextmanager
def ended(*fragments):
    with pytest.raises(fa.NonFiniteError) as raised:
        yield
    message = str(raised.value)
    assert UNTOUCHED in message and "The cause could not be found" not in message
    for fragment in fragments:
        assert re.search(fragment, message), f"{fragment!r} is not in:\n{message}"


# Where the numbers come from


def log_loss(y_true, y_pred):
    return (
        tf.reduce_mean(tf.square(y_true - y_pred), -1)
        + 0.0 * y_pred[:, 0]
        - tf.math.log(y_true[:, 0] * 0.0)
    )


def root_loss(y_true, y_pred):
    """A finite value with an infinite slope, where prediction and target are one."""
    return tf.sqrt(tf.abs(y_pred[:, 0] * 0.0 + y_true[:, 0] * 0.0)) + y_pred[:, 0]


def exploding(weights):
    return tf.exp(1e3 * tf.reduce_sum(tf.abs(weights)))


def culprit():
    return keras.layers.Lambda(lambda x: tf.math.log(x * 0.0), output_shape=(4,), name="culprit")


IN_X = (r"In micro-batch 1 of the step's 2", r"x holds NaN in its rows 2\.", r"correct these rows")
CASES = {
    "NaN in x": (
        make,
        {"x": changed(X, (5, 1), nan)},
        [*IN_X, r"not finite: 'first' \(Dense\)", "first/kernel"],
    ),
    "-inf in x": (
        make,
        {"x": changed(X, (1, 1), -inf)},
        [r"micro-batch 0", r"x holds inf in its rows 1\."],
    ),
    "inf in y": (
        make,
        {"y": changed(Y, 4, inf)},
        [r"micro-batch 1", r"y holds inf in its rows 1\.", "loss: inf"],
    ),
    "NaN in sample_weight": (
        make,
        {"sample_weight": changed(Y[:, 0], 0, nan)},
        ["sample_weight holds NaN in its rows 0"],
    ),
    "NaN in a row of weight 0": (
        make,
        {"x": changed(X, 2, nan), "sample_weight": changed(np.ones(ROWS), 2, 0.0)},
        [r"micro-batch 0", "x holds NaN in its rows 2", r"a sample_weight of 0 does not"],
    ),
    "all rows NaN": (make, {"x": X * nan}, [r"rows 0, 1, 2\.", r"6 of 6: .* and 1 more"]),
    "an infinite loss with a finite gradient": (
        lambda: make(loss=log_loss),
        {},
        [r"micro-batch 0", r"The loss: inf", r"What to do: look in the loss for a logarithm of 0"],
    ),
    "a finite loss with an infinite gradient": (
        lambda: make(loss=root_loss),
        {},
        [
            r"micro-batch 0",
            r"Gradients that are not finite: 6 of 6",
            r"What to do: the outputs are finite",
        ],
    ),
    "a layer that divides by 0": (
        lambda: make(network(culprit())),
        {},
        [
            r"The first layer whose output is not finite: 'culprit' \(Lambda\)",
            r"'norm', 'head'",
            "What to do: .*'culprit'",
        ],
    ),
    "a batch variance that overflows float32": (
        make,
        {"x": X * np.float32(1e20)},
        [
            r"Statistics that became NaN or inf: .*norm/moving_variance\.",
            r"scale the inputs of these layers down",
        ],
    ),
    "a regulariser that overflows": (
        lambda: make(network(kernel_regularizer=exploding)),
        {},
        [r"The weight regularisers give inf, and gradients .* to .*head/kernel", "smaller weights"],
    ),
    "a sum of finite micro-batches that overflows": (
        lambda: make(loss=keras.losses.MeanAbsoluteError(reduction="sum")),
        {"sample_weight": np.full(ROWS, 1e38)},
        [r"Each micro-batch is finite by itself|The loss: inf"],
    ),
    "a batch variance that overflows float16": (
        lambda: make(network(policy="mixed_float16"), loss_scale=1.0),
        {"x": X * np.float32(6e4)},
        [r"micro-batch 0", r"65504, where float16 ends|variance of a batch overflows"],
    ),
    "float16 past 65504, the scale static": (
        lambda: make(network(policy="mixed_float16"), loss_scale=2.0**24),
        {"y": Y + 1000},
        [
            "no lower loss scale can help: it is 1.67772e.07, of StaticLossScale",
            "lower the loss scale",
        ],
    ),
}


LIKE_ANOTHER = (
    "-inf in x",
    "NaN in sample_weight",
    "all rows NaN",
    "a batch variance that overflows float16",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in LIKE_ANOTHER else ()) for case in CASES],
)
def test_what_is_bad_is_named_and_nothing_moves(case):
    build, arrays, fragments = CASES[case]
    trainer = build()
    trainer._optimizer.build(trainer.model.trainable_variables)
    before = bytes_of(trainer)
    with ended(*fragments):
        fit(trainer, **arrays)
    assert bytes_of(trainer) == before


@pytest.fixture(scope="module")
def compiled():
    """Builds a step with one step per dispatch, and with three."""
    keras.utils.set_random_seed(0)
    trainers = {n: make(jit_compile=True, steps_per_execution=n) for n in (1, 3)}
    for trainer in trainers.values():
        fit(trainer)
    return trainers


@pytest.mark.parametrize(
    ("bad_step", "per_execution"),
    [
        *((0, 1), (3, 1), (0, 3), (1, 3)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (2, 1), (2, 3), (3, 3))),
    ],
)
def test_the_step_and_micro_batch_are_found_and_the_good_steps_before_are_kept(
    compiled, per_execution, bad_step
):
    """Steps after the bad one, in the same dispatch or the next, are good, but are not applied."""
    trainer = compiled[per_execution]
    start = [tf.identity(v) for v in (*trainer.model.variables, *trainer.optimizer.variables)]
    row = (bad_step * K + 1) * B + 2
    updates = int(trainer.optimizer.iterations)
    with ended(rf"after {updates + bad_step} updates", *IN_X):
        fit(trainer, changed(X, (row, 0), nan))
    found = bytes_of(trainer)
    for variable, value in zip(
        (*trainer.model.variables, *trainer.optimizer.variables), start, strict=True
    ):
        variable.assign(value)
    if bad_step:
        fit(trainer, X[: bad_step * K * B], Y[: bad_step * K * B])
    assert found == bytes_of(trainer)
    assert np.isfinite(fit(trainer)["loss"]).all()  # one error says it all


def test_a_hand_written_loop(compiled):
    trainer = compiled[1]
    stack = X[: K * B].reshape(K, B, 3), Y[: K * B].reshape(K, B, 1)
    trainer.train_step(stack)
    before = bytes_of(trainer)
    with ended(*IN_X):
        trainer.train_step((changed(stack[0], (1, 2), nan), stack[1]))
    assert bytes_of(trainer) == before
    assert trainer.train_step(stack).grads_finite and bytes_of(trainer) != before


# Skipping


def test_a_bad_row_now_and_then_is_skipped_and_told():
    """Twelve bad steps, no two in a row: as if they had not been there."""
    bad = changed(X, ([0, 2 * K * B],), nan)
    trainer, good = make(on_nonfinite="skip"), make()
    good.model.set_weights(trainer.model.get_weights())
    with pytest.warns(
        UserWarning, match=r"2 train steps of this epoch were skipped.*on_nonfinite='raise'"
    ):
        history = trainer.fit(bad, Y, batch_size=B, shuffle=False, epochs=6, verbose=0).history
    assert history["skipped_steps"] == [2] * 6
    rows = np.r_[K * B : 2 * K * B, 3 * K * B : ROWS]
    fit(good, X[rows], Y[rows], epochs=6)
    assert bytes_of(trainer) == bytes_of(good)


def test_training_that_can_only_skip_ends_across_epochs():
    trainer = make(on_nonfinite="skip")
    with ended(
        f"{guards.PATIENCE} train steps in a row were not finite, after 0 updates", "micro-batch 0"
    ):
        fit(trainer, X * nan, epochs=9)
    assert trainer.model.history.epoch == [0, 1]  # 4 steps each


def test_a_scale_that_backs_off_is_no_error_and_one_at_its_floor_is():
    scale = fa.DynamicLossScale(init_scale=2.0**24, backoff_factor=2.0**-4, growth_interval=10**6)
    trainer = make(network(policy="mixed_float16"), loss_scale=scale)
    history = fit(trainer, X, Y + 1000, epochs=3)
    assert history["skipped_steps"][0] > 0 and history["skipped_steps"][2] == 0
    assert 1.0 < history["loss_scale"][2] < 2.0**24
    with ended(r"it is 1, of DynamicLossScale", r"65504, where float16 ends"):
        fit(trainer, X * 1e6, epochs=9)
    assert float(scale.scale()) == 1.0


def test_padded_steps_are_not_counted_as_skipped():
    """Pads a dispatch of three with two steps: the third repeats the rows of the second, NaN and
    all.
    """
    trainer = make(on_nonfinite="skip", steps_per_execution=3)
    history = fit(trainer, changed(X, 2 * K * B - 1, nan)[: 2 * K * B], Y[: 2 * K * B])
    assert history["skipped_steps"] == [1]


def test_padded_rows_are_rows_of_the_data():
    stacks = data.make_data_source(X[:7], Y[:7], batch_size=B).stacks(Layout(K))
    for dispatch in next(stacks.epochs(Position(0, 0))):
        x, valid = (t.numpy() for t in (dispatch.stacks[0].x, dispatch.stacks[0].valid))
        assert all((X[:7] == row).all(1).any() for row in x[~valid])


# What is not refused, and what comes from elsewhere


def test_a_metric_of_nan_harms_nothing():
    trainer = make(metrics=[lambda y_true, y_pred: tf.math.log(-tf.abs(y_pred[:, 0]) - 1.0)])
    history = fit(trainer)
    assert (
        np.isnan(history["<lambda>" if "<lambda>" in history else "lambda"]).all()
        and np.isfinite(history["loss"]).all()
    )
    assert history["skipped_steps"] == [0] and int(trainer.optimizer.iterations) == STEPS


def test_validation_with_nan_gives_nan_as_in_keras():
    history = fit(make(), validation_data=(X * nan, Y))
    assert np.isnan(history["val_loss"]).all() and np.isfinite(history["loss"]).all()


def test_state_that_begins_at_infinity_is_no_fault():
    class Smallest(keras.layers.Layer):
        def build(self, shape):
            self.smallest = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(inf), trainable=False
            )
            self.unused = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(nan), trainable=False
            )

        def call(self, x):
            self.smallest.assign(keras.ops.minimum(self.smallest, keras.ops.min(x)))
            return x

    layer = Smallest()
    trainer = make(network(layer))
    fit(trainer)
    assert np.isfinite(layer.smallest.numpy()) and int(trainer.optimizer.iterations) == STEPS


def test_statistics_that_no_step_moves_may_be_nan():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.unused = keras.layers.BatchNormalization(trainable=False)
    model.unused.build((None, 4))
    model.unused.moving_mean.assign(np.full(4, np.nan))
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)
    assert np.isfinite(
        trainer.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0).history["loss"]
    ).all()


def test_statistics_that_are_nan_before_training_are_named():
    norm = keras.layers.BatchNormalization(name="culprit")
    trainer = make(network(norm))
    fit(trainer)
    before = [v.numpy() for v in trainer.model.variables]
    norm.moving_mean.assign(
        np.where(np.arange(norm.moving_mean.shape[0]) == 1, nan, norm.moving_mean)
    )
    with pytest.raises(
        ValueError, match=r"statistics .*culprit/moving_mean hold NaN before training begins"
    ):
        fit(trainer)
    same = [
        np.array_equal(a, v.numpy()) for a, v in zip(before, trainer.model.variables, strict=True)
    ]
    assert same.count(False) == 1  # what was set
    norm.moving_mean.assign(np.zeros(norm.moving_mean.shape))
    fit(trainer)  # the remedy helps


def test_an_update_that_overflows_is_named_by_the_next_step():
    trainer = make(optimizer=keras.optimizers.SGD(3e38))
    with pytest.raises(
        fa.NonFiniteError,
        match=r"(?s)The variables .*head/kernel.* themselves hold NaN or inf.*learning",
    ):
        fit(trainer, X, Y + 100)
    assert int(trainer.optimizer.iterations) == 1


# Other kinds of models


def reader(mask):
    layers = [
        keras.Input((5,), dtype="int32"),
        keras.layers.Embedding(7, 3, mask_zero=mask, name="words"),
    ]
    return keras.Sequential([*layers, keras.layers.Dense(4, name="head")])


def test_embedding_rows_and_infinite_logits():
    """Sparse gradients; and -inf for a class that cannot be, which is finite unless it is the
    label.
    """
    ids, labels = RNG.integers(1, 7, (ROWS, 5)), RNG.integers(1, 4, (ROWS, 5))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def with_infinite_bias(model):
        model.layers[-1].bias.assign([-inf, 0.0, 0.0, 0.0])
        return model

    trainer = make(with_infinite_bias(reader(mask=False)), loss, optimizer="sgd")
    assert np.isfinite(fit(trainer, ids, labels)["loss"]).all()
    with pytest.raises(fa.NonFiniteError, match=r"head/bias.* themselves hold NaN or inf"):
        fit(trainer, ids, changed(labels, (5, 2), 0))

    trainer = make(
        reader(mask=False), lambda y, p: tf.where(y == 0, tf.cast(nan, "float32"), 1.0) * p[..., 0]
    )
    with ended(r"micro-batch 1", r"3 of 3: .*words/embeddings.*'words', 'head'"):
        fit(trainer, ids, changed(labels, (5, 2), 0))


def test_nan_under_a_mask_is_skipped_for_its_gradient():
    """0 * NaN is NaN in the gradient, as in Keras: such a step changes nothing."""
    inputs = keras.Input((5, 3))
    model = keras.Model(
        inputs, keras.layers.Dense(1, name="head")(keras.layers.Masking(0.0)(inputs))
    )
    x = RNG.normal(size=(ROWS, 5, 3)).astype("float32")
    x[:, 3:] = 0.0
    y = x.sum(-1, keepdims=True)
    trainer = make(model)
    fit(trainer, x, y)
    before = bytes_of(trainer)
    with ended(r"micro-batch 0", r"y holds NaN in its rows 1\."):
        fit(trainer, x, changed(y, (1, 4), nan))
    assert bytes_of(trainer) == before


def test_several_outputs_with_dropout_and_a_stack_of_layers():
    inputs = {name: keras.Input((3,), name=name) for name in ("left", "right")}
    both = keras.layers.Concatenate()(list(inputs.values()))
    hidden = LayerStack(lambda: keras.layers.Dense(6, "exponential"), 2, name="stack")(both)
    hidden = keras.layers.Dropout(0.5)(hidden)
    model = keras.Model(
        inputs, [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)]
    )
    trainer = make(model, ["mse", "mae"])
    x = {"left": X, "right": X}
    fit(trainer, x, [Y, Y])
    before = bytes_of(trainer)
    with ended(r"micro-batch 1", r"output is not finite: 'stack' \(LayerStack\)", "stack/kernel"):
        fit(trainer, {**x, "right": changed(X, 5, 1e6)}, [Y, Y])
    assert bytes_of(trainer) == before
    with ended(
        r"micro-batch 1",
        r"x\['right'\] holds inf in its rows 2",
        r"'concatenate\S*' \(Concatenate\)",
    ):
        fit(trainer, {**x, "right": changed(X, (5, 0), inf)}, [Y, Y])
    assert bytes_of(trainer) == before
    with ended(r"micro-batch 0", r"y\[1\] holds NaN in its rows 0"):
        fit(trainer, x, [Y, changed(Y, 0, nan)])
    assert bytes_of(trainer) == before


def test_dropout_is_as_it_was_in_the_failing_step():
    """2 * 3e38 overflows where it is kept, and is 0 where it is dropped: only the same mask finds
    the place.
    """
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dropout(0.5, name="drop"), keras.layers.Dense(1)]
    )
    trainer = make(model, gradient_accumulation_steps=4, jit_compile=True)
    found = set()
    for _ in range(8):
        stack = [a[: 4 * B].reshape(4, B, -1) for a in (X, Y)]
        stack[0] = changed(stack[0], (slice(None), 1, 1), 3e38)
        with contextlib.suppress(fa.NonFiniteError):
            trainer.train_step(tuple(stack))
            continue
        before = trainer.model.layers[0].seed_generator.state.numpy()
        with pytest.raises(fa.NonFiniteError) as raised:
            trainer.train_step(tuple(stack))  # a step that changed nothing comes again as it was
        np.testing.assert_array_equal(before, trainer.model.layers[0].seed_generator.state.numpy())
        found.add(re.search(r"In micro-batch (\d) .*\n.*'drop' \(Dropout\)", str(raised.value))[1])
        trainer.train_step(tuple(np.zeros_like(a) for a in stack))  # goes on to other masks
    assert len(found) > 1


def test_a_transformer_whose_loss_takes_over_the_head():
    ids = RNG.integers(0, 9, (ROWS, 4))
    model = fa.gpt(9, width=4, layers=2, heads=1, context=4)
    trainer = make(model, fa.LinearCrossEntropy())
    model.get_layer("embedding").trainable_variables[0].assign(np.full((9, 4), 3e38))
    with ended(r"micro-batch 0", r"whose output is not finite: ", r"embedding/embeddings"):
        fit(trainer, ids, ids)


def test_a_tf_keras_model():
    tf_keras = pytest.importorskip("tf_keras")
    layers = [
        tf_keras.layers.Dense(4, name="first"),
        tf_keras.layers.BatchNormalization(),
        tf_keras.layers.Dense(1),
    ]
    trainer = make(
        tf_keras.Sequential([tf_keras.Input((3,)), *layers]),
        optimizer=tf_keras.optimizers.Adam(0.01),
    )
    fit(trainer)
    before = [w.tobytes() for w in trainer.model.get_weights()]
    with ended(*IN_X, r"'first' \(Dense\)", r"first/kernel"):
        fit(trainer, changed(X, (5, 1), nan))
    assert [w.tobytes() for w in trainer.model.get_weights()] == before


def test_logs_that_are_kept_hold_no_data(monkeypatch):
    """A callback may keep every step's logs without a look at them: the stacks must not stay with
    them.
    """
    stacks, logs = [], []

    class Keeps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kept.append(logs)

    kept = logs
    trainer = make()
    run = DeviceEngine.dispatch

    def noting(step, dispatch):
        stacks.append(weakref.ref(dispatch.stacks[0].x))
        return run(step, dispatch)

    monkeypatch.setattr(DeviceEngine, "dispatch", noting)
    fit(trainer, callbacks=[Keeps()])
    gc.collect()
    assert len(logs) == len(stacks) == STEPS and not any(stack() is not None for stack in stacks)


@pytest.mark.parametrize("value", ["stop", None, True])
def test_arguments(value):
    with pytest.raises(ValueError, match=f"on_nonfinite={value!r} must be 'skip' or 'raise'"):
        make(on_nonfinite=value)


def test_the_warning_points_at_the_caller():
    trainer = make(on_nonfinite="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(changed(X, (5, 1), nan), Y, batch_size=B, verbose=0)
    assert [w.filename for w in caught if "of this epoch was skipped" in str(w.message)] == [
        __file__
    ]


def test_who_was_stuck_may_mend_the_data_and_go_on(tmp_path):
    """The count of stuck steps is not saved: with on_nonfinite="raise" it would end on data that
    are good.
    """
    bad = X.copy()
    bad[ROWS // 2 :] = nan
    options = {"batch_size": B, "shuffle": False, "verbose": 0, "checkpoint_dir": tmp_path}
    with pytest.warns(UserWarning, match="2 train steps of this epoch were skipped"):
        make(on_nonfinite="skip").fit(bad, Y, epochs=1, **options)
    trainer = make(on_nonfinite="raise")
    with pytest.warns(RuntimeWarning, match="other values"):
        trainer.fit(X, Y, epochs=2, **options)
    assert int(trainer.optimizer.iterations.numpy()) == STEPS // 2 + STEPS


def test_a_step_with_nothing_valid_leaves_the_stuck_ones_in_a_row():
    steps = guards.StuckSteps(patience=2)
    for stuck, valid in ((True, True), (False, False), (True, True)):
        steps.count(tf.constant(stuck), tf.constant(valid))
    assert not steps.running() and steps.since_end(steps.seen()) == 0
