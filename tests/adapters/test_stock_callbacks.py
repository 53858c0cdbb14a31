"""Every callback that Keras 3 and tf_keras come with does under `Trainer.fit` what it does under
Keras's own `fit`.

Each case trains a model by Keras (batches of 8 rows) and by the Trainer (2 micro-batches of 4) from
the same weights, and compares what the callback leaves: history, weights, files, messages.
docs/guides/callbacks.md lists what differs.
"""

import csv
import importlib.util
import re
import types

import keras
import numpy as np
import pytest
import requests
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import fastaccum as fa

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")  # two steps of 8 rows
Y = (X.sum(1, keepdims=True) + 1.0).astype("float32")
OURS = {"grad_norm", "loss_scale", "skipped_steps"}


class Side:
    """A model that trains by Keras's `fit` or by the Trainer's."""

    def __init__(self, K, ours):
        self.K, self.ours = K, ours
        keras.utils.set_random_seed(1)
        layers = [K.Input((4,)), K.layers.Dense(3, activation="tanh"), K.layers.Dense(1)]
        self.model = K.Sequential(layers)
        self.optimizer = K.optimizers.SGD(0.1, momentum=0.5, use_ema=K is keras, ema_momentum=0.9)
        if ours:
            self.trainer = fa.Trainer(
                self.model,
                self.optimizer,
                "mse",
                ["mae"],
                gradient_accumulation_steps=2,
                jit_compile=False,
            )
        else:
            self.model.compile(self.optimizer, "mse", metrics=["mae"], jit_compile=False)
        self.fit([], epochs=1)
        self.state = [v.numpy() for v in self.variables]

    @property
    def variables(self):
        slots = self.optimizer.variables
        return [*self.model.variables, *(slots() if callable(slots) else slots)]

    def reset(self, weights):
        for variable, value in zip(
            self.variables, [*weights, *(0 * s for s in self.state[len(weights) :])], strict=True
        ):
            variable.assign(value)
        for average, weight in zip(
            getattr(self.optimizer, "_model_variables_moving_average", ()), weights, strict=False
        ):
            average.assign(weight)
        self.optimizer.learning_rate = 0.1
        # Which Keras's BackupAndRestore leaves, so that every later fit of the same model is taken
        # for a resumed one.
        name = "_initial_epoch" if self.K is keras else "_training_state"
        setattr(self.model, name, None)

    def fit(self, callbacks, **options):
        options = {"shuffle": False, "verbose": 0, "epochs": 3, "callbacks": callbacks, **options}
        if self.ours:
            return self.trainer.fit(X, Y, batch_size=4, **options)
        return self.model.fit(X, Y, batch_size=8, **options)

    def evaluate(self, callbacks):
        by = self.trainer if self.ours else self.model
        return by.evaluate(X, Y, batch_size=4 if self.ours else 8, verbose=0, callbacks=callbacks)


@pytest.fixture(scope="module")
def sides(K):
    theirs, ours = Side(K, False), Side(K, True)
    weights = ours.model.get_weights()
    return K, theirs, ours, weights


@pytest.fixture
def compare(sides, tmp_path):
    """Runs a case by both; asserts that the outcomes, a nest of numbers and texts, are the same."""
    K, *both, weights = sides

    def run(case):
        found = []
        for side in both:
            side.reset(weights)
            folder = tmp_path / ("ours" if side.ours else "keras")
            folder.mkdir()
            found.append({"outcome": case(K, side, folder), "weights": side.model.get_weights()})
        same(*found)
        return found[1]["outcome"]

    return run


def same(expected, found, where="outcome"):
    if isinstance(expected, dict):
        assert set(found) - OURS == set(expected), where
        for key, value in expected.items():
            same(value, found[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(expected, found, strict=True)):
            same(one, other, f"{where}/{i}")
    elif isinstance(expected, (int, float, np.ndarray, np.floating)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=where)
    else:
        assert found == expected, where


def worsen(K, rates=(0.1, 0.05, 0.8, 0.8, 0.8, 0.8)):
    """Sets the learning rate of each epoch: too large a one from the third on."""

    def rate(epoch, logs=None):
        callback.model.optimizer.learning_rate = rates[epoch]

    callback = K.callbacks.LambdaCallback(on_epoch_begin=rate)
    return callback


def fitted(side, callbacks, **options):
    history = side.fit(callbacks, **options)
    return {"epochs": history.epoch, "history": {**history.history}}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# What each does. The function's name is the callback's.


def EarlyStopping(K, side, folder):
    stop = K.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    found = fitted(side, [worsen(K), stop], epochs=6, validation_data=(X, Y))
    return found | {
        "best": stop.best,
        "best weights": stop.best_weights,
        "stopped": stop.stopped_epoch,
    }


def ReduceLROnPlateau(K, side, folder):
    plateau = K.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=1e9)
    return fitted(side, [plateau], epochs=4, validation_data=(X, Y))


def LearningRateScheduler(K, side, folder):
    return fitted(side, [K.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)])


def ModelCheckpoint(K, side, folder):
    save = K.callbacks.ModelCheckpoint
    best = str(folder / "best.keras"), "val_loss"
    often = str(folder / "{epoch}-{batch}.weights.h5")
    callbacks = [
        worsen(K),
        save(*best, save_best_only=True),
        save(often, save_freq=3, save_weights_only=True),
    ]
    found = fitted(side, callbacks, validation_data=(X, Y))
    loaded = K.models.load_model(folder / "best.keras")
    rows = loaded.evaluate(X, Y, verbose=0)
    rate = float(loaded.optimizer.learning_rate)
    return found | {
        "files": names(folder),
        "saved": loaded.get_weights(),
        "evaluated": rows,
        "rate": rate,
    }


def BackupAndRestore(K, side, folder):
    def fail(epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt

    backup = K.callbacks.BackupAndRestore(str(folder / "backup"))
    with pytest.raises(KeyboardInterrupt):
        side.fit([backup, K.callbacks.LambdaCallback(on_epoch_begin=fail)], epochs=4)
    for variable in side.variables:
        variable.assign(tf.zeros_like(variable))  # as a new process has them
    side.optimizer.learning_rate = 0.1
    found = fitted(side, [K.callbacks.BackupAndRestore(str(folder / "backup"))], epochs=4)
    found["iterations"] = int(side.optimizer.iterations)
    return found | {"files": names(folder)}


def CSVLogger(K, side, folder):
    found = fitted(side, [K.callbacks.CSVLogger(str(folder / "log.csv"))], validation_data=(X, Y))
    with (folder / "log.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return found | {"rows": rows}


def scalars(folder):
    """TensorBoard's scalars: by tag, the steps and the values; and which other tags there are."""
    found, others = {}, set()
    for path in sorted(folder.rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(f"{path.parent.name}/{value.tag}", []).append(
                        (event.step, number)
                    )
                else:
                    others.add(value.tag)
    return found, others


def TensorBoard(K, side, folder):
    # tf_keras's writes scalars of single steps only where it is to write their rate, too.
    board = K.callbacks.TensorBoard(
        str(folder), histogram_freq=1, update_freq=2, write_steps_per_second=True
    )
    found = fitted(side, [board], validation_data=(X, Y))
    values, others = scalars(folder)
    values = {
        tag: each
        for tag, each in values.items()
        if not any(name in tag for name in (*OURS, "per_second"))
    }
    assert "keras" in others  # the model's graph
    return found | {"scalars": values, "histograms": sum("histogram" in tag for tag in others)}


def TerminateOnNaN(K, side, folder):
    rates = 0.1, 1e30, 0.1
    found = fitted(side, [worsen(K, rates), K.callbacks.TerminateOnNaN()], epochs=3)
    for weight in side.model.weights:
        weight.assign(tf.zeros_like(weight))  # a step that is not finite changes nothing here
    return {"epochs": found["epochs"]}


def LambdaCallback(K, side, folder):
    called = []
    parts = "epoch", "train_batch" if K is keras else "batch", "train"
    hooks = [f"on_{part}_{when}" for part in parts for when in ("begin", "end")]

    def note(hook):
        return lambda *given, **logs: called.append(
            (hook, *(each for each in given if isinstance(each, int)))
        )

    watch = K.callbacks.LambdaCallback(**{hook: note(hook) for hook in hooks})
    return fitted(side, [watch], validation_data=(X, Y)) | {"called": called}


def History(K, side, folder):
    history = K.callbacks.History()
    found = fitted(side, [history])
    return found | {"own": {**history.history}, "own epochs": history.epoch}


def Callback(K, side, folder):
    class Watch(K.callbacks.Callback):
        seen = ()

        def on_train_batch_end(self, batch, logs=None):
            self.seen = (
                *self.seen,
                (batch, logs["loss"], self.params["steps"], self.params["epochs"]),
            )

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    watch = Watch()
    return fitted(side, [watch], epochs=4) | {"seen": watch.seen}


def CallbackList(K, side, folder):
    seen = []
    note = K.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append((epoch, logs["loss"]))
    )
    callbacks = K.callbacks.CallbackList(
        [note], add_history=True, model=side.model, epochs=3, verbose=0
    )
    return fitted(side, callbacks) | {"seen": seen}


def RemoteMonitor(K, side, folder, monkeypatch):
    posted = []
    monkeypatch.setattr(requests, "post", lambda url, json, headers: posted.append((url, json)))
    found = fitted(side, [K.callbacks.RemoteMonitor("http://127.0.0.1:1", send_as_json=True)])
    return found | {"posted": posted}


def ProgbarLogger(K, side, folder, capsys):
    side.fit([K.callbacks.ProgbarLogger()], verbose=2, epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    kept = [re.sub(r" - (grad_norm|loss_scale|skipped_steps): \S+", "", line) for line in lines]
    return [re.sub(r"\d+m?u?s(/step|/epoch)?|(?<=: )[\d.e+-]+", "#", line) for line in kept]


def SwapEMAWeights(K, side, folder):
    swap = K.callbacks.SwapEMAWeights(swap_on_epoch=True)
    save = K.callbacks.ModelCheckpoint(str(folder / "averages.keras"))
    found = fitted(side, [swap, save], validation_data=(X, Y))
    return found | {"saved": K.models.load_model(folder / "averages.keras").get_weights()}


def OrbaxCheckpoint(K, side, folder):
    if importlib.util.find_spec("orbax") is None:
        pytest.skip("orbax-checkpoint is not installed")
    save = K.callbacks.OrbaxCheckpoint(str(folder / "orbax"), save_freq="epoch", max_to_keep=2)
    return fitted(side, [save]) | {"files": names(folder / "orbax")}


def SidecarEvaluatorModelExport(K, side, folder):
    (folder / "ckpt-7").write_text("")
    paths = str(folder / "best-{epoch}"), str(folder / "ckpt-{epoch}")
    export = K.callbacks.SidecarEvaluatorModelExport(*paths, monitor="loss", save_weights_only=True)
    return {
        "loss": side.evaluate([export]),
        "files": [name for name in names(folder) if "data" in name],
    }


CASES = [
    value
    for name, value in list(globals().items())
    if isinstance(value, types.FunctionType) and name[0].isupper()
]
REFUSED = {"BaseLogger", "UpdateEmbeddingCallback"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_does_what_it_does_in_keras(compare, case, K, request):
    if not hasattr(K.callbacks, case.__name__):
        pytest.skip(f"{K.__name__} has no {case.__name__}")
    fixtures = {
        name: request.getfixturevalue(name)
        for name in ("capsys", "monkeypatch")
        if name in case.__code__.co_varnames
    }
    compare(lambda *given: case(*given, **fixtures))


def test_no_stock_callback_is_left_out(K):
    public = {
        **vars(K.callbacks),
        **vars(getattr(K.callbacks, "experimental", types.SimpleNamespace())),
    }
    classes = {name for name, value in public.items() if isinstance(value, type)}
    assert classes - REFUSED <= {case.__name__ for case in CASES}


def test_what_cannot_work_is_refused_before_training(sides):
    K, _, ours, weights = sides
    if K is keras:
        pytest.skip("nothing of Keras 3 is refused")
    ours.reset(weights)
    with pytest.raises(ValueError, match="BaseLogger, which fails in tf_keras's own fit too"):
        ours.fit([K.callbacks.BaseLogger()])
    layer = K.layers.Embedding(2, 3)
    with pytest.raises(
        ValueError, match="UpdateEmbeddingCallback, which needs the model's own fit"
    ):
        ours.fit([K.callbacks.experimental.UpdateEmbeddingCallback(layer, interval=60)])
    same(weights, ours.model.get_weights())


@pytest.mark.slow
def test_a_profile_holds_the_chosen_steps_under_readable_names(sides, tmp_path):
    K, *_ = sides
    model = K.Sequential(
        [K.Input((4,)), K.layers.Dense(8, name="hidden"), K.layers.Dense(1, name="head")]
    )
    trainer = fa.Trainer(model, K.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=2)
    board = K.callbacks.TensorBoard(str(tmp_path), profile_batch=(3, 5))
    trainer.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[board])
    (path,) = tmp_path.rglob("*.xplane.pb")
    planes = {plane.name: plane for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes}
    host = planes["/host:CPU"]
    events = [
        host.event_metadata[event.metadata_id].name for line in host.lines for event in line.events
    ]
    assert sum(name.startswith("EagerLocalExecute: __inference__execute") for name in events) == 3
    stats = [s for m in planes["/host:metadata"].event_metadata.values() for s in m.stats]
    modules = [hlo_pb2.HloProto.FromString(stat.bytes_value).hlo_module for stat in stats]
    scopes = {
        i.metadata.op_name
        for module in modules
        for c in module.computations
        for i in c.instructions
    }
    for part in ("forward/.*hidden", "gradient_tape/forward/.*hidden", "update"):
        assert any(re.search(part, scope) for scope in scopes), part
