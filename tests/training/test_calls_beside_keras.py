"""The calls that fit, evaluate and predict make, and what callbacks read, beside Keras's for the
same training.

Keras trains on the full batch, fastaccum on halves of it; what differs on purpose stands in
`REASONS`, and in docs/guides/callbacks.md.
"""

import random
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 5)).astype("float32")
Y = (RNG.uniform(size=(32, 3)) > 0.5).astype("float32")
ROWS = 16  # of an update

# What Keras calls in fit, evaluate and predict, and fastaccum does not.
REASONS = {
    "evaluate": "validation runs fastaccum's own evaluation",
    "train_step": "the train step is fastaccum's; a model that overrides it is refused",
    "test_step": "the evaluation is fastaccum's",
    "make_train_function": "the train step is fastaccum's",
    "make_test_function": "the evaluation is fastaccum's",
    "compute_loss": "called where the model overrides it",
    "compute_metrics": "called where the model overrides it",
    "reset_metrics": "the step resets the same metrics",
    "get_metrics_result": "the logs come from the train step",
}


class Data(keras.utils.PyDataset):
    """The DataGenerator idiom: shuffles in `on_epoch_end`."""

    def __init__(self, rows, log, **options):
        super().__init__(**options)
        self.rows, self.log = rows, log
        self.order, self.random = np.arange(32), np.random.default_rng(3)

    def __len__(self):
        return 32 // self.rows

    def __getitem__(self, i):
        rows = self.order[i * self.rows : (i + 1) * self.rows]
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.log.append("data.on_epoch_begin")

    def on_epoch_end(self):
        self.log.append("data.on_epoch_end")
        self.random.shuffle(self.order)


class Log(keras.callbacks.Callback):
    """Notes each hook, its arguments and the names of its logs."""

    def __init__(self, log):
        super().__init__()
        self.log = log


def _note(hook):
    def method(self, *args, **keywords):
        logs = keywords.get("logs", args[-1] if args and isinstance(args[-1], dict) else None)
        numbers = [each for each in args if isinstance(each, int)]
        extra = {"grad_norm", "loss_scale", "skipped_steps"}
        self.log.append((hook, numbers, sorted({*(logs or {})} - extra)))

    return method


HOOKS = [
    name
    for name in dir(keras.callbacks.Callback)
    if name.startswith("on_") and "on_batch" not in name
]
for name in HOOKS:
    setattr(Log, name, _note(name))


def make_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "sigmoid")])


@pytest.fixture(scope="module")
def pair():
    """A model that Keras trains, and a Trainer of the same model."""
    theirs = make_model()
    theirs.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    trainer = fa.Trainer(
        make_model(), keras.optimizers.SGD(0.5), "mse", ["mae"], gradient_accumulation_steps=2
    )
    return theirs, trainer


@pytest.fixture
def both(pair):
    """The fit, evaluate and predict of each side, from the same weights, with its rows of a
    batch.
    """
    theirs, trainer = pair
    for model in (theirs, trainer.model):
        model.set_weights(make_model().get_weights())
    return [(theirs, theirs, ROWS), (trainer, trainer.model, ROWS // 2)]


def difference(both):
    pairs = zip(both[0][1].get_weights(), both[1][1].get_weights(), strict=True)
    return max(np.abs(one - other).max() for one, other in pairs)


FITS = {
    "plain": {},
    "shuffled by batches": {"shuffle": True},
    "one batch an epoch": {"steps_per_epoch": 1},
    "threads": {"workers": 2},
    "processes": {"workers": 2, "use_multiprocessing": True},
    "validation": {"validated": True},
    "validation, one step": {"validated": True, "validation_steps": 1},
}


@pytest.mark.parametrize("case", FITS)
def test_hooks_of_data_and_callbacks(both, case):
    logs, validation_logs = [], []
    for side, _, rows in both:
        options = {"shuffle": False, "epochs": 3, "verbose": 0, **FITS[case]}
        workers = {
            name: options.pop(name)
            for name in ("workers", "use_multiprocessing")
            if name in options
        }
        log, validation_log = [], []
        if options.pop("validated", False):
            options["validation_data"] = Data(ROWS, validation_log)
        random.seed(0)
        side.fit(Data(rows, log, **workers), callbacks=[Log(log)], **options)
        logs.append(log)
        validation_logs.append(validation_log)
    assert _without_positions(logs[1]) == _without_positions(logs[0])
    assert validation_logs[1] == validation_logs[0]
    assert logs[0].count("data.on_epoch_end") == 4
    # other batches; Keras reads ahead of the shuffle
    if case not in ("shuffled by batches", "one batch an epoch"):
        assert difference(both) < 1e-6


def _without_positions(log):
    """Leaves out of a log what a test of micro-batches' numbers compares: an evaluation's calls
    stand for several.
    """
    hooks = []
    for each in log:
        if isinstance(each, tuple) and "test_batch" in each[0]:
            if hooks[-1] != "test batches":
                hooks.append("test batches")
        else:
            hooks.append(each)
    return hooks


def test_evaluate_and_predict_call_the_hooks_of_a_pydataset(both):
    logs = []
    for side, _, rows in both:
        log = []
        side.evaluate(Data(rows, log), verbose=0)
        log.append("evaluated")
        side.evaluate(Data(rows, log), steps=1, verbose=0)
        log.append("predicting")
        side.predict(Data(rows, log), verbose=0)
        logs.append(log)
    assert logs[1] == logs[0]


def test_an_epoch_reads_nothing_that_on_epoch_end_may_change(both):
    """The batches of the second epoch come in the order that the hook made before it."""
    read = []

    class Order(Data):
        def __getitem__(self, i):
            read.append(int(self.order[i * self.rows]))
            return super().__getitem__(i)

    first = np.arange(32)
    shuffles = np.random.default_rng(3)
    shuffles.shuffle(first)
    second = first.copy()
    shuffles.shuffle(second)
    trainer = both[1][0]
    trainer.fit(Order(8, []), steps_per_epoch=1, epochs=2, shuffle=False, verbose=0)
    assert read[-4:] == [first[0], first[8], second[16], second[24]]


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 1}])
def test_a_sequence_has_the_hooks_that_tf_keras_calls(both, options):
    tf_keras = pytest.importorskip("tf_keras")

    class Pieces(tf_keras.utils.Sequence):
        def __init__(self, rows, log):
            self.data = Data(rows, log)

        def __len__(self):
            return len(self.data)

        def __getitem__(self, i):
            return self.data[i]

        def on_epoch_end(self):
            self.data.on_epoch_end()

    theirs = tf_keras.Sequential([tf_keras.Input((5,)), tf_keras.layers.Dense(3, "sigmoid")])
    theirs.compile(tf_keras.optimizers.SGD(0.5), "mse")
    theirs.set_weights(both[1][1].get_weights())
    logs = [], []
    for side, rows, log in ((theirs, ROWS, logs[0]), (both[1][0], ROWS // 2, logs[1])):
        data = Pieces(rows, log)
        side.fit(data, epochs=3, shuffle=False, verbose=0, **options)
        log.append("fitted")
        side.evaluate(data, verbose=0)
        log.append("evaluated")
        side.predict(data, verbose=0)
    assert logs[1] == logs[0]
    weights = zip(theirs.get_weights(), both[1][1].get_weights(), strict=True)
    assert max(np.abs(one - other).max() for one, other in weights) < 1e-6


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("steps_per_epoch", [None, 1])
def test_a_resumed_training_has_the_order_of_one_that_never_stopped(
    both, tmp_path, shuffle, steps_per_epoch
):
    trainer = both[1][0]
    start = trainer.model.get_weights()
    options = {"shuffle": shuffle, "steps_per_epoch": steps_per_epoch, "verbose": 0}

    def fit(epochs, folder):
        random.seed(5)
        trainer.model.set_weights(start)
        trainer.fit(Data(8, []), epochs=epochs, checkpoint_dir=tmp_path / folder, **options)

    fit(4, "whole")
    whole = trainer.model.get_weights()
    fit(3, "stopped")
    random.seed(5)
    trainer.fit(Data(8, []), epochs=4, checkpoint_dir=tmp_path / "stopped", **options)
    for one, other in zip(whole, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class StopAtTheEnd(keras.callbacks.Callback):
    """Stops at the last step of an epoch and takes it back, as `fastaccum train` does after its
    last step.
    """

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.is_last = epoch == self.epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.is_last

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False


def test_a_training_stopped_at_the_end_of_an_epoch_goes_on(both, tmp_path):
    """Begins the next epoch where the last one ended, since nothing of it is left."""
    trainer = both[1][0]
    start = trainer.model.get_weights()

    def fit(epochs, folder, *callbacks):
        options = {"steps_per_epoch": 1, "shuffle": False, "verbose": 0}
        trainer.fit(
            Data(8, []),
            epochs=epochs,
            checkpoint_dir=tmp_path / folder,
            callbacks=[*callbacks],
            **options,
        )
        return trainer.model.get_weights()

    whole = fit(4, "whole")
    trainer.model.set_weights(start)
    fit(3, "stopped", StopAtTheEnd(epoch=2))
    resumed = fit(4, "stopped", StopAtTheEnd(epoch=3))
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


# What callbacks read


class Read(keras.callbacks.Callback):
    """Notes what a callback can read at each hook."""

    def __init__(self):
        super().__init__()
        self.read = {}

    def note(self, hook, at, logs):
        model = self.model
        self.read[hook, at] = {
            "params": {name: self.params[name] for name in ("epochs", "steps", "verbose")},
            "logs": {
                name: float(logs[name])
                for name in ("loss", "mae", "val_loss", "val_mae")
                if name in logs
            },
            "metrics": {name: float(value) for name, value in model.get_metrics_result().items()},
            "names": [metric.name for metric in model.metrics],
            "metrics_names": model.metrics_names,
            "iterations": int(model.optimizer.iterations),
            "learning_rate": float(model.optimizer.learning_rate),
            "stop_training": model.stop_training,
            "compiled": model.compiled,
            "loss": model.loss if isinstance(model.loss, str) else None,
        }

    def on_train_begin(self, logs=None):
        self.note("train begin", 0, logs or {})

    def on_epoch_begin(self, epoch, logs=None):
        self.note("epoch begin", epoch, logs or {})

    def on_train_batch_begin(self, batch, logs=None):
        self.note("batch begin", batch, logs or {})

    def on_train_batch_end(self, batch, logs=None):
        self.note("batch end", batch, logs or {})

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch end", epoch, logs or {})

    def on_train_end(self, logs=None):
        self.note("train end", 0, logs or {})


def test_callbacks_read_what_they_read_in_keras(both):
    found = []
    for side, model, rows in both:
        model.optimizer.iterations.assign(0)
        read = Read()
        side.fit(X, Y, batch_size=rows, epochs=2, shuffle=False, verbose=0, callbacks=[read])
        found.append(read.read)
    theirs, ours = found
    assert list(ours) == list(theirs)
    for hook, values in theirs.items():
        if hook == ("train begin", 0):  # where both still have what was before
            values, ours[hook] = ({**each, "metrics": {}} for each in (values, ours[hook]))
        for name in ("logs", "metrics"):
            assert ours[hook].pop(name) == pytest.approx(values.pop(name), abs=1e-6), (hook, name)
        assert ours[hook] == values, hook


@pytest.mark.parametrize("by", ["trainer", "another trainer", "model", "test_on_batch"])
def test_an_evaluation_in_mid_epoch_leaves_the_epochs_logs_alone(both, by):
    trainer = both[1][0]
    start = trainer.model.get_weights()
    plain = trainer.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    trainer.model.set_weights(start)
    read = []

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            before = _results(self.model)
            if by == "test_on_batch":
                self.model.test_on_batch(X[:4], Y[:4])
            elif by == "another trainer":
                other = fa.Trainer(self.model, "sgd", "mse", ["mae"], jit_compile=False)
                other.evaluate(X[:4], Y[:4], verbose=0)
            else:
                (trainer if by == "trainer" else self.model).evaluate(X[:4], Y[:4], verbose=0)
            read.append((before, _results(self.model), dict(logs)))

    history = trainer.fit(
        X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[Evaluate()]
    ).history
    assert history == plain
    assert len(read) == 2
    for before, after, logs in read:
        assert before == after
        assert before == pytest.approx({name: logs[name] for name in ("loss", "mae")}, abs=1e-6)


def _results(model):
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def test_validation_leaves_the_epochs_metrics_and_evaluate_its_own(both):
    trainer = both[1][0]
    read = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: read.append((_results(trainer.model), logs))
    )
    trainer.fit(X, Y, batch_size=8, validation_data=(X[:6], Y[:6]), verbose=0, callbacks=[note])
    ((metrics, logs),) = read
    assert metrics == pytest.approx({"loss": logs["loss"], "mae": logs["mae"]}, abs=1e-6)
    assert metrics["loss"] != pytest.approx(logs["val_loss"], abs=1e-6)
    evaluated = trainer.evaluate(X[:6], Y[:6], return_dict=True, verbose=0)
    assert _results(trainer.model) == pytest.approx(evaluated, abs=1e-6)
    assert trainer.model.evaluate(X[:6], Y[:6], verbose=0, return_dict=True) == pytest.approx(
        evaluated, abs=1e-6
    )


def test_each_outputs_loss_is_among_the_metrics():
    inputs = keras.Input((5,))
    outputs = {name: keras.layers.Dense(3, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    losses = {"a": "mse", "b": "mae"}
    trainer = fa.Trainer(model, "sgd", losses, gradient_accumulation_steps=2, jit_compile=False)
    read = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: read.append((_results(model), logs))
    )
    y = {"a": Y, "b": Y}
    trainer.fit(X, y, batch_size=16, verbose=0, callbacks=[note])
    ((metrics, logs),) = read
    assert metrics == pytest.approx(
        {name: logs[name] for name in ("loss", "a_loss", "b_loss")}, abs=1e-6
    )
    theirs = model.evaluate(X, y, verbose=0, return_dict=True)
    assert theirs == pytest.approx(trainer.evaluate(X, y, verbose=0, return_dict=True), abs=1e-6)
    assert [metric.name for metric in model.metrics].count("a_loss") == 1


# Evaluation and prediction


class EvaluationLogs(keras.callbacks.Callback):
    """Notes the logs of an evaluation's batches and of its end."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_test_batch_end(self, batch, logs=None):
        self.read.append({name: float(value) for name, value in logs.items()})

    def on_test_end(self, logs=None):
        self.read.append({name: float(value) for name, value in logs.items()})


class Stop(EvaluationLogs):
    """Stops an evaluation or a prediction after its first batch."""

    def on_test_batch_end(self, batch, logs=None):
        super().on_test_batch_end(batch, logs)
        self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch, logs=None):
        self.read.append(np.asarray(logs["outputs"]))
        self.model.stop_predicting = True


def test_a_callback_stops_an_evaluation(both):
    found = []
    for side, _, _ in both:
        stop = Stop()
        found.append(
            (
                side.evaluate(
                    X, Y, batch_size=8, steps=4, return_dict=True, verbose=0, callbacks=[stop]
                ),
                stop.read,
            )
        )
    (theirs, read), (ours, our_read) = found
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert len(our_read) == len(read) == 2
    for one, other in zip(our_read, read, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    # the next one is not stopped
    whole = both[1][0].evaluate(X, Y, batch_size=8, return_dict=True, verbose=0)
    assert whole == pytest.approx(
        both[0][0].evaluate(X, Y, batch_size=8, return_dict=True, verbose=0), abs=1e-6
    )
    assert whole != pytest.approx(ours, abs=1e-6)


def test_a_callback_stops_a_prediction(both):
    for side, _, _ in both:
        stop = Stop()
        outputs = side.predict(X, batch_size=8, verbose=0, callbacks=[stop])
        assert outputs.shape == (8, 3)
        (read,) = stop.read
        np.testing.assert_array_equal(read, outputs)
        assert side.predict(X, batch_size=8, verbose=0).shape == (32, 3)


def test_logs_of_a_test_batch_are_those_of_all_batches_before_it(both):
    found = []
    for side, _, _ in both:
        note = EvaluationLogs()
        side.evaluate(X, Y, batch_size=8, steps=4, verbose=0, callbacks=[note])
        found.append(note.read)
    assert len(found[1]) == len(found[0]) == 5
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


# Generators


@pytest.mark.parametrize(("options", "epochs"), [({"steps_per_epoch": 2}, 3), ({}, 1)])
def test_a_generator_yields_the_rows_that_it_yields_to_keras(both, options, epochs):
    def generate(rows, pulled):
        for start in range(0, epochs * 32, rows):
            of_batch = np.arange(start, start + rows) % 32
            pulled.extend(of_batch)
            yield X[of_batch], Y[of_batch]

    pulls = []
    for side, _, rows in both:
        pulled = []
        side.fit(generate(rows, pulled), epochs=epochs, verbose=0, **options)
        pulls.append(pulled)
    assert pulls[0] == pulls[1] == [*range(32)] * epochs
    assert difference(both) < 1e-6


def cycle(pulled):
    """Yields batches of 8 rows of X and Y without end, and notes their rows."""
    while True:
        for start in range(0, 32, 8):
            of_batch = slice(start, start + 8)
            pulled.append(start)
            yield X[of_batch], Y[of_batch]


@pytest.mark.parametrize(
    "options",
    [
        {"validation_steps": 1},
        {"validation_steps": 3},
        {"validation_steps": 3, "validation_freq": 2},
    ],
)
def test_each_validation_goes_on_in_a_generator_where_the_last_one_ended(both, options):
    """Keras goes on if a Dataset reads the generator; by itself it begins again with the first two
    batches.
    """
    pulls, losses = [], []
    for side, _, rows in both:
        pulled = []
        validation = generator = cycle(pulled)
        if rows == ROWS:
            signature = (_spec(X, 8), _spec(Y, 8))
            validation = _dataset(lambda generator=generator: generator, signature)
        fitted = {"batch_size": rows, "epochs": 4, "shuffle": False, "verbose": 0}
        history = side.fit(X, Y, validation_data=validation, **fitted, **options)
        pulls.append(pulled)
        losses.append(history.history["val_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert pulls[1] == pulls[0]
    validations = 4 // options.get("validation_freq", 1)
    assert len(losses[0]) == validations
    assert len(pulls[0]) == validations * options["validation_steps"]


def test_a_validation_by_a_generator_of_all_rows_is_that_of_arrays(both):
    losses = []
    for side, _, rows in both:
        validation = {"validation_data": (X, Y)}
        if rows != ROWS:
            validation = {"validation_data": cycle([]), "validation_steps": 4}
        history = side.fit(X, Y, batch_size=rows, epochs=3, shuffle=False, verbose=0, **validation)
        losses.append(history.history["val_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_evaluations_leave_a_generator_where_keras_does(both, monkeypatch, steps):
    """Keras also drops what its dataset prefetched by then, a batch or two; here it prefetches
    none.
    """
    pulls, losses = [], []
    for side, _, rows in both:
        pulled = []
        generator = cycle(pulled)
        with monkeypatch.context() as patch:
            if rows == ROWS:
                patch.setattr(tf.data.Dataset, "prefetch", lambda dataset, buffer_size: dataset)
            found = [side.evaluate(generator, steps=steps, verbose=0)[0] for _ in range(4)]
        pulls.append(pulled)
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert pulls[1] == pulls[0]
    assert len(pulls[0]) == 4 * max(steps, 2)  # both look at two batches for their shapes


# Schedules


def test_callbacks_read_the_rate_of_a_schedule(both):
    found = []
    for side in ("keras", "fastaccum"):
        model = make_model()
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))
        rates = []

        class Rates(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None, rates=rates):
                rates.append(float(self.model.optimizer.learning_rate))

            def on_train_batch_end(self, batch, logs=None, rates=rates):
                rates.append(float(self.model.optimizer.learning_rate))

            on_epoch_begin = on_epoch_end = on_train_batch_begin

        if side == "keras":
            model.compile(optimizer, "mse")
            model.fit(
                X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, callbacks=[Rates()]
            )
        else:
            trainer = fa.Trainer(
                model, optimizer, "mse", gradient_accumulation_steps=2, jit_compile=False
            )
            trainer.fit(
                X, Y, batch_size=ROWS // 2, epochs=2, shuffle=False, verbose=0, callbacks=[Rates()]
            )
        found.append(rates)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0] == pytest.approx(
        [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125]
    )


# Methods of the model and the optimizer

METHODS = (*REASONS, "predict", "predict_step", "make_predict_function")


def test_methods_of_the_model_that_keras_calls_are_called_or_listed(both, monkeypatch):
    called = [set(), set()]
    calls = called[0]

    def noting(name, method):
        def noted(self, *args, **keywords):
            calls.add(name)
            return method(self, *args, **keywords)

        return noted

    for name in METHODS:
        monkeypatch.setattr(keras.Model, name, noting(name, getattr(keras.Model, name)))
    for (_, model, rows), calls in zip(both, called, strict=True):
        side = model
        if calls is called[0]:
            model = make_model()
            model.compile("sgd", "mse", metrics=["mae"])
            side = model
        else:
            model = make_model()
            side = fa.Trainer(
                model, "sgd", "mse", ["mae"], gradient_accumulation_steps=2, jit_compile=False
            )
        side.fit(X, Y, batch_size=rows, validation_data=(X, Y), verbose=0)
        side.predict(X, verbose=0)
    assert called[0] == set(METHODS)
    assert called[0] - called[1] == {*REASONS}


class Noting(keras.optimizers.SGD):
    """Notes the calls of its methods."""

    def __init__(self):
        super().__init__(0.5)
        self.calls = []

    def build(self, variables):
        self.calls.append("build")
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        if "apply" not in self.calls:  # a trace calls it, and there may be several
            self.calls.append("apply")
        super().apply(grads, trainable_variables)

    def finalize_variable_values(self, var_list):
        self.calls.append("finalize_variable_values")
        super().finalize_variable_values(var_list)


def test_methods_of_the_optimizer_are_called_as_in_keras():
    theirs, ours = Noting(), Noting()
    model, other = make_model(), make_model()
    model.compile(theirs, "mse")
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    trainer = fa.Trainer(other, ours, "mse", gradient_accumulation_steps=2, jit_compile=False)
    trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    assert {*ours.calls} == {*theirs.calls} == {"build", "apply", "finalize_variable_values"}
    assert ours.calls[-1] == theirs.calls[-1] == "finalize_variable_values"
    assert ours.calls.count("finalize_variable_values") == 1
    assert int(ours.iterations) == int(theirs.iterations) == 4


def test_kerass_own_loss_log_of_data_of_unknown_length():
    """Shows that Keras's step starts once more than there are batches, and counts known numbers of
    rows without a loss.
    """
    theirs = make_model()
    theirs.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    signature = tuple(_spec(each, ROWS) for each in (X, Y))
    data = _dataset(
        lambda: ((X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, 32, ROWS)), signature
    )
    logged = theirs.fit(data, verbose=0).history["loss"][0]
    assert logged == pytest.approx(theirs.evaluate(X, Y, verbose=0) * 2 / 3, rel=1e-5)


# The progress line


def test_the_progress_line_counts_train_steps_beside_a_validation_of_unknown_length(both, capsys):
    def batches(count):
        return lambda: ((X[i * 4 : i * 4 + 4], Y[i * 4 : i * 4 + 4]) for i in range(count))

    signature = tuple(_spec(each) for each in (X, Y))
    data, validation = (_dataset(batches(count), signature) for count in (6, 8))
    both[1][0].fit(data, validation_data=validation, verbose=2)
    assert re.findall(r"(\d+)/(\d+)", capsys.readouterr().out)[-1] == ("3", "3")


def _spec(array, rows=None):
    return tf.TensorSpec([rows, *array.shape[1:]], array.dtype)


def _dataset(make, signature):
    return tf.data.Dataset.from_generator(make, output_signature=signature)


def test_the_progress_line_tells_rows_a_second(both, capsys):
    trainer = both[1][0]
    history = trainer.fit(X, Y, batch_size=8, epochs=2, verbose=2)
    said = re.findall(r"rows_per_second: ([\d.e+]+)", capsys.readouterr().out)
    assert len(said) == 2
    assert all(float(each) > 0 for each in said)
    assert "rows_per_second" not in history.history


@pytest.mark.parametrize(("repeated", "says"), [(True, True), (False, False)])
def test_steps_per_epoch_of_endless_data_says_once_what_it_counts(
    both, capsys, monkeypatch, repeated, says
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    data = data.repeat() if repeated else data
    both[1][0].fit(data, steps_per_epoch=2, epochs=2)
    text = (
        "steps_per_epoch=2 counts updates: an epoch reads 4 batches, 2 for each update. Keras's "
        "counts batches."
    )
    assert capsys.readouterr().out.count(text) == says
