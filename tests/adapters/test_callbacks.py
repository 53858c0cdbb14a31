"""Stock Keras callbacks, and users' own, around a loop that reads its results late."""

import json
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters import callbacks as fa_callbacks
from fastaccum.adapters.callbacks import LateLogs

BATCH, ACCUMULATION, STEPS = 4, 2, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")  # two steps of 8 rows and one of 4
Y = (X.sum(1, keepdims=True) + 1.0).astype("float32")
LOGS = {"loss", "mae", "grad_norm", "loss_scale", "skipped_steps"}


def regressor():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    )


def make_trainer(optimizer, **options):
    return fa.Trainer(
        regressor(), optimizer, "mse", ["mae"], gradient_accumulation_steps=ACCUMULATION, **options
    )


@pytest.fixture(scope="module")
def shared():
    trainer = make_trainer(keras.optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.9))
    fit(trainer)
    return trainer, [v.numpy() * 0 for v in trainer.optimizer.variables]


@pytest.fixture
def trainer(shared):
    """Returns one compiled Trainer for all tests, with its initial weights."""
    trainer, zeros = shared
    trainer.model.set_weights(regressor().get_weights())
    for variable, zero in zip(trainer.optimizer.variables, zeros, strict=True):
        variable.assign(zero)
    for average, weight in zip(
        trainer.optimizer._model_variables_moving_average,
        trainer.model.trainable_variables,
        strict=True,
    ):
        average.assign(weight)
    trainer.optimizer.learning_rate = 0.1
    return trainer


def fit(trainer, *callbacks, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}
    return trainer.fit(X, Y, callbacks=list(callbacks), **options)


def rate(trainer):
    return float(trainer.optimizer.learning_rate)


class Watch(keras.callbacks.Callback):
    """Notes every hook that it is called with, and the logs."""

    def __init__(self):
        super().__init__()
        self.hooks, self.logs = [], {}

    def note(self, hook, at, logs):
        self.hooks.append((hook, at))
        self.logs[hook, at] = dict(logs or {})

    def on_train_batch_begin(self, batch, logs=None):
        self.note("begin", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self.note("end", batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        self.note("test", batch, logs)

    def on_epoch_begin(self, epoch, logs=None):
        self.note("epoch begin", epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch end", epoch, logs)


# The contract of the hooks


def test_hooks_come_in_order_and_count_train_steps(trainer):
    watch = Watch()
    fit(trainer, watch, validation_data=(X, Y))
    steps = [(hook, batch) for batch in range(STEPS) for hook in ("begin", "end")]
    assert watch.hooks[: 1 + len(steps)] == [("epoch begin", 0), *steps]
    assert watch.hooks[-1] == ("epoch end", 0)
    assert {hook for hook, _ in watch.hooks[1 + len(steps) : -1]} == {"test"}


def test_logs_hold_what_a_step_reports(trainer):
    watch = Watch()
    history = fit(trainer, watch, validation_data=(X, Y))
    assert set(watch.logs["end", 0]) == LOGS
    assert set(watch.logs["test", ACCUMULATION - 1]) == {"loss", "mae"}
    assert set(watch.logs["epoch end", 0]) == LOGS | {"val_loss", "val_mae"}
    # Running means: that of the last step is the epoch's.
    assert watch.logs["end", STEPS - 1] == {name: watch.logs["epoch end", 0][name] for name in LOGS}
    assert history.history["loss"][0] == watch.logs["end", STEPS - 1]["loss"]
    assert all(isinstance(value, (int, float)) for value in watch.logs["end", 0].values())


def test_grad_norm_is_the_steps_own(trainer):
    watch = Watch()
    fit(trainer, watch)
    model = regressor()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X[:8]) - Y[:8]) ** 2)
    grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
    assert watch.logs["end", 0]["grad_norm"] == pytest.approx(
        float(tf.linalg.global_norm(grads)), rel=1e-5
    )
    assert watch.logs["end", 0]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_stop_training_in_a_batch_hook_stops_after_that_step(trainer):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    history = fit(trainer, Stop(), epochs=5)
    assert int(trainer.optimizer.iterations) == 2
    assert history.epoch == [0]
    fit(trainer)  # the flag is cleared
    assert int(trainer.optimizer.iterations) == 2 + STEPS


@pytest.mark.parametrize("hook, at", [("on_train_batch_begin", 1), ("on_train_batch_end", 0)])
def test_a_learning_rate_set_in_a_batch_hook_counts_at_the_next_step(trainer, hook, at):
    weights = [trainer.model.get_weights()]

    class Freeze(keras.callbacks.Callback):
        pass

    def freeze(self, batch, logs=None):
        if batch == at:
            self.model.optimizer.learning_rate = 0.0

    setattr(Freeze, hook, freeze)
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(trainer.model.get_weights())
    )
    fit(trainer, Freeze(), note)
    for start, first, second in zip(*weights[:3], strict=True):
        assert np.abs(first - start).min() > 0
        # What is left is the momentum, half of the first step; a gradient would add to it.
        np.testing.assert_allclose(second - first, 0.5 * (first - start), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end", "on_train_begin"]
)
def test_an_exception_reaches_the_caller(trainer, hook):
    def fail(*args, **kwargs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(trainer, keras.callbacks.LambdaCallback(**{hook: fail}))
    fit(trainer)  # and leaves the Trainer usable


def test_a_callback_may_change_its_logs(trainer):
    class Add(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["mine"] = 1.0

        def on_epoch_end(self, epoch, logs=None):
            logs["also"] = 2.0

    watch = Watch()
    history = fit(trainer, Add(), watch)
    assert watch.logs["end", 0]["mine"] == 1.0 and set(watch.logs["end", 0]) == LOGS | {"mine"}
    assert history.history["also"] == [2.0]


def compile_anew(model):
    model.compile(keras.optimizers.SGD(0.1), "mse")


def compile_another_loss(model):
    model.compile(model.optimizer, "mae")


def freeze(model):
    model.layers[0].trainable = False


@pytest.mark.parametrize(
    "change, message",
    [
        (freeze, "trainable variables have changed since this Trainer was built: .*dense.*kernel"),
        (compile_anew, "The model was compiled anew within this fit, by a callback"),
        (compile_another_loss, "The model was compiled anew within this fit, by a callback"),
    ],
)
def test_a_callback_that_changes_what_is_trained_is_refused(change, message):
    trainer = make_trainer("sgd")
    before = trainer.model.get_weights()
    with pytest.raises(ValueError, match=message):
        fit(
            trainer,
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: change(trainer.model)
            ),
        )
    for weight, was in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, was)


@pytest.mark.parametrize("made", ["before", "within"])
def test_a_callback_may_evaluate_by_another_trainer(made):
    def train(*callbacks):
        trainer = make_trainer(keras.optimizers.SGD(0.1), jit_compile=False)
        others = [other(trainer)] if made == "before" else []
        return trainer, fit(
            trainer, *(each(trainer, others) for each in callbacks), epochs=3 if callbacks else 2
        )

    def other(trainer):
        return fa.Trainer(trainer.model, "adam", "mae", ["mse"], jit_compile=False)

    def evaluation(trainer, others):
        def evaluate(epoch, logs):
            trainer.model.stop_training = epoch == 1  # which evaluating keeps
            others[:] = others or [other(trainer)]
            found = others[0].evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
            assert found["mse"] == pytest.approx(
                float(np.mean((trainer.predict(X, verbose=0) - Y) ** 2)), rel=1e-5
            )
            assert trainer.model.stop_training == (epoch == 1)

        return keras.callbacks.LambdaCallback(on_epoch_end=evaluate)

    trainer, history = train(evaluation)
    assert history.history == train()[1].history and len(history.epoch) == 2
    assert trainer.model.optimizer is trainer.optimizer


def test_after_a_fit_that_failed_another_trainer_compiles_the_model():
    first = make_trainer(keras.optimizers.SGD(0.1), jit_compile=False)
    with pytest.raises(ZeroDivisionError):
        fit(first, keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: 1 / 0))
    second = fa.Trainer(first.model, keras.optimizers.SGD(0.2), "mse", jit_compile=False)
    second.evaluate(X, Y, batch_size=BATCH, verbose=0)
    assert first.model.optimizer is second.optimizer


def test_a_model_is_compiled_with_the_optimizer_of_the_trainer_that_fits_it():
    first = make_trainer(keras.optimizers.SGD(0.1), jit_compile=False)
    second = fa.Trainer(first.model, keras.optimizers.SGD(0.1), "mae", jit_compile=False)
    for trainer in (first, second, first):
        fit(trainer, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2))
    assert (rate(first), rate(second)) == (pytest.approx(0.025), pytest.approx(0.05))


# Stock callbacks: beyond what test_stock_callbacks.py compares with Keras


def test_model_checkpoint_in_mid_epoch_names_the_step(trainer, tmp_path):
    save = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "{epoch}-{batch}-{loss:.3f}.keras"), save_freq=2
    )
    watch = Watch()
    fit(trainer, save, watch, epochs=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rsplit("-", 1)[0] for name in names] == ["1-2", "2-1", "2-3"]
    assert names[2] == f"2-3-{watch.logs['end', 2]['loss']:.3f}.keras"


def test_model_checkpoint_and_schedule_with_a_tensorflow_addons_optimizer(tmp_path):
    addons = pytest.importorskip("fastaccum.addons")
    trainer = make_trainer(addons.optimizers.LAMB(0.01), jit_compile=False)
    path = str(tmp_path / "model.keras")
    checkpoint = keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=True)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    history = fit(trainer, checkpoint, schedule, plateau, epochs=3)
    np.testing.assert_allclose(
        history.history["learning_rate"], [0.005, 0.0025, 0.000625], rtol=1e-6
    )
    assert history.history["loss"] == sorted(history.history["loss"], reverse=True)
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), trainer.predict(X, verbose=0))


def scalars(folder):
    """Every scalar in TensorBoard's files, as {tag: [step, ...]}."""
    found = {}
    for path in sorted(folder.rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found.setdefault(value.tag, []).append(event.step)
    return found


@pytest.mark.parametrize("wrap", [list, keras.callbacks.CallbackList])
def test_tensorboard_without_its_package_is_refused_before_training(
    trainer, tmp_path, monkeypatch, wrap
):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it was not installed
    before = [weight.numpy() for weight in trainer.model.weights]
    with pytest.raises(ImportError, match=r"pip install 'fastaccum\[tensorboard\]'"):
        trainer.fit(
            X, Y, callbacks=wrap([keras.callbacks.TensorBoard(str(tmp_path))]), batch_size=BATCH
        )
    assert not any(tmp_path.iterdir())
    for weight, was in zip(trainer.model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), was)


@pytest.mark.parametrize("update_freq, steps", [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6])])
def test_tensorboard_per_step(trainer, tmp_path, update_freq, steps):
    board = keras.callbacks.TensorBoard(
        str(tmp_path), update_freq=update_freq, write_steps_per_second=True
    )
    fit(trainer, board, epochs=2)
    found = scalars(tmp_path)
    assert all(found[f"batch_{name}"] == steps for name in LOGS)


@pytest.mark.parametrize("raise_error", [False, True])
def test_terminate_on_nan(trainer, raise_error):
    x = X.copy()
    x[9] = np.nan  # in the second step
    stop = keras.callbacks.TerminateOnNaN(raise_error=raise_error)
    before = trainer.model.get_weights()
    if raise_error:
        with pytest.raises(RuntimeError, match="NaN or Inf loss"):
            trainer.fit(
                x, Y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0, callbacks=[stop]
            )
    else:
        history = trainer.fit(
            x, Y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0, callbacks=[stop]
        )
        assert np.isnan(history.history["loss"]).all() and history.epoch == [0]
        assert history.history["skipped_steps"] == [1]
    assert int(trainer.optimizer.iterations) == 1  # the step with the NaN moved nothing
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    assert not np.array_equal(trainer.model.get_weights()[0], before[0])


def test_the_older_batch_hooks_are_called_too(trainer):
    seen = []

    class Old(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_batch_end(self, batch, logs=None):
            seen.append(("end", batch, logs["loss"] > 0))

    fit(trainer, Old())
    assert seen == [
        event for batch in range(STEPS) for event in (("begin", batch), ("end", batch, True))
    ]


def test_a_progbar_of_the_users_own_is_the_only_one(trainer, capsys, monkeypatch):
    monkeypatch.setattr(fa_callbacks, "REDRAW_SECONDS", 1e9)  # only the last line of an epoch
    fit(trainer, keras.callbacks.ProgbarLogger(), verbose=1)
    once = capsys.readouterr().out
    fit(trainer, verbose=1)
    assert once.count("mae") == capsys.readouterr().out.count("mae") > 0


def test_a_progress_line_leaves_out_what_says_nothing(trainer, capsys):
    fit(trainer, verbose=2)
    quiet = capsys.readouterr().out
    assert re.search(
        r" - loss: \S+ - grad_norm: \S+ - mae: \S+ - rows_per_second: \S+\s*$", quiet
    ), quiet
    x = X.copy()
    x[9] = np.nan
    with pytest.warns(UserWarning, match="1 train step of this epoch was skipped"):
        trainer.fit(x, Y, batch_size=BATCH, shuffle=False, verbose=2)
    assert "skipped_steps: 1.0000" in capsys.readouterr().out


def test_a_progress_line_holds_a_metric_of_several_numbers(capsys):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    trainer = fa.Trainer(
        model, "sgd", "categorical_crossentropy", [keras.metrics.F1Score()], jit_compile=False
    )
    trainer.fit(np.eye(4, dtype="float32"), np.eye(4, 3, dtype="float32"), batch_size=4, verbose=2)
    assert "f1_score: " in capsys.readouterr().out


def test_an_epochs_progress_begins_without_the_numbers_of_the_one_before(
    trainer, capsys, monkeypatch
):
    monkeypatch.setattr(fa_callbacks, "REDRAW_SECONDS", -1)
    fit(trainer, epochs=2, verbose=1)
    first = [
        line
        for line in re.split("[\r\b\n]+", capsys.readouterr().out)
        if "step" in line and re.search(r"1/3\b", line)
    ]
    assert len(first) == 2 and not any("loss" in line for line in first)


@pytest.mark.parametrize("verbose", ["auto", 0])
def test_a_notebook_is_told_what_is_compiled(trainer, monkeypatch, capsys, verbose):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    hooks = fa_callbacks.Callbacks(
        None, trainer.model, verbose=verbose, epochs=1, steps=1, history=False
    )
    if verbose:
        hooks.advise("Tracing")
    assert (hooks.advise is not None, capsys.readouterr().out) == (
        (True, "Tracing") if verbose else (False, "")
    )


def test_backup_and_restore_resumes_at_the_epoch_of_the_failure(trainer, tmp_path):
    fit(trainer, epochs=4)
    whole, updates = trainer.model.get_weights(), int(trainer.optimizer.iterations)

    def fail(epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt

    model_before = regressor().get_weights()
    trainer.model.set_weights(model_before)
    for variable in trainer.optimizer.variables:
        variable.assign(np.zeros(variable.shape))
    for average, weight in zip(
        trainer.optimizer._model_variables_moving_average, model_before, strict=True
    ):
        average.assign(weight)
    trainer.optimizer.learning_rate = 0.1
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, backup, keras.callbacks.LambdaCallback(on_epoch_begin=fail), epochs=4)
    assert json.loads((tmp_path / "backup" / "training_metadata.json").read_text())["epoch"] == 2
    for variable in [*trainer.model.variables, *trainer.optimizer.variables]:
        variable.assign(np.zeros(variable.shape))  # what a new process would not have
    history = fit(trainer, backup, epochs=4)
    assert history.epoch == [2, 3]
    assert int(trainer.optimizer.iterations) == updates
    for a, b in zip(trainer.model.get_weights(), whole, strict=True):
        np.testing.assert_array_equal(a, b)
    assert fit(trainer, epochs=2).epoch == [0, 1]  # only that fit resumed


# Late logs


def late():
    looked = []
    logs = LateLogs(
        {"loss": tf.constant(0.5), "skipped_steps": tf.constant(2)}, lambda: looked.append(True)
    )
    return logs, looked


@pytest.mark.parametrize(
    "read",
    [
        lambda logs: dict(logs),
        lambda logs: {**logs},
        lambda logs: logs.copy(),
        lambda logs: dict(logs.items()),
        lambda logs: dict(zip(logs, logs.values(), strict=True)),
        lambda logs: {name: logs[name] for name in logs},
        lambda logs: {name: logs.get(name) for name in logs},
        lambda logs: json.loads(json.dumps(logs)),
        lambda logs: logs | {},
        lambda logs: eval(repr(logs)),
        lambda logs: (lambda **kwargs: kwargs)(**logs),
    ],
)
def test_every_look_at_late_logs_finds_numbers(read):
    logs, looked = late()
    assert (
        len(logs) == 2 and "loss" in logs and bool(logs) and list(logs) == ["loss", "skipped_steps"]
    )
    assert not looked
    values = read(logs)
    assert values == {"loss": 0.5, "skipped_steps": 2}
    assert {type(value) for value in values.values()} == {float, int}
    assert looked == [True]
    assert read(logs) == values and looked == [True]


def test_values_that_are_set_in_late_logs_stay():
    logs, _ = late()
    logs["loss"] = 7.0
    logs.update(mine=1.0)
    assert logs == {"loss": 7.0, "skipped_steps": 2, "mine": 1.0}


@pytest.mark.slow
def test_hooks_of_tf_keras_may_name_their_argument_as_they_like():
    import tf_keras

    class Counting(tf_keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, step, found=None):
            self.steps += bool(found)

    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    counting = Counting()
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)
    trainer.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, callbacks=[counting], verbose=0)
    assert counting.steps == 2
