"""A resumed fit takes settings of the optimizer anew where `resume` names them, and a rate where
callbacks set it.
"""

import ast
import re

import keras
import numpy as np
import pytest
from resuming import Interruption, Stateless, StopAfter, bits, state

import fastaccum as fa
from fastaccum.basics.attributes import raw
from fastaccum.checkpoint import settings, store
from fastaccum.checkpoint.errors import IncompatibleCheckpointError

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.long]

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
STEPS = 4  # of an epoch
AdamW, SGD, Scheduler = (
    keras.optimizers.AdamW,
    keras.optimizers.SGD,
    keras.callbacks.LearningRateScheduler,
)


def make(optimizer, dtype=None, **options):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, activation="relu", dtype=dtype),
        keras.layers.Dense(1, dtype=dtype),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    return fa.Trainer(
        model, optimizer, "mse", gradient_accumulation_steps=3, jit_compile=False, **options
    )


def fit(trainer, folder=None, **options):
    saving = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 1}
    return trainer.fit(X, Y, batch_size=8, verbose=0, shuffle=False, **saving, **options)


def stop(trainer, folder, after, callbacks=(), **options):
    """Fits until a step has been done, counted from 0 in this fit; returns how many the last
    checkpoint has.
    """
    with pytest.raises(Interruption):
        fit(trainer, folder, callbacks=[*callbacks, StopAfter(after)], **options)
    return store.latest(folder).step


def half():
    return {
        "dtype": "mixed_float16",
        "loss_scale": fa.DynamicLossScale(init_scale=2.0**24, max_scale=2.0**24),
    }


# Settings of the optimizer.


def cosine(rate=0.02, steps=30, module=keras):
    return module.optimizers.schedules.CosineDecay(rate, steps)


def tf_keras_adam(*args, **options):
    import tf_keras

    return tf_keras.optimizers.Adam(*args, **options)


def tf_keras_cosine():
    import tf_keras

    return cosine(module=tf_keras)


def legacy(*args, **options):
    import tf_keras

    return tf_keras.optimizers.legacy.SGD(*args, **options)


def lookahead(rate):
    return fa.addons.optimizers.Lookahead(fa.addons.optimizers.LAMB(rate), sync_period=3)


RATE = {"learning_rate"}
CHANGES = {
    "rate": (lambda: AdamW(5e-3), lambda: AdamW(1e-3), RATE),
    "number to schedule": (lambda: AdamW(5e-3), lambda: AdamW(cosine()), RATE),
    "schedule to number": (lambda: AdamW(cosine()), lambda: AdamW(1e-3), RATE),
    "schedule to schedule": (lambda: AdamW(cosine()), lambda: AdamW(cosine(steps=9)), RATE),
    "weight_decay": (lambda: AdamW(5e-3), lambda: AdamW(5e-3, weight_decay=0.3), {"weight_decay"}),
    "clipnorm and beta_1": (
        lambda: AdamW(5e-3),
        lambda: AdamW(5e-3, clipnorm=0.1, beta_1=0.5),
        {"clipnorm", "beta_1"},
    ),
    "rate and momentum": (
        lambda: SGD(0.05, 0.9),
        lambda: SGD(0.01, 0.5),
        {"learning_rate", "momentum"},
    ),
}
OF_TF_KERAS = {
    "tf_keras": (lambda: tf_keras_adam(5e-3), lambda: tf_keras_adam(1e-3), RATE),
    "tf_keras, number to schedule": (
        lambda: tf_keras_adam(5e-3),
        lambda: tf_keras_adam(tf_keras_cosine()),
        RATE,
    ),
    "tf_keras, schedule to number": (
        lambda: tf_keras_adam(tf_keras_cosine()),
        lambda: tf_keras_adam(1e-3),
        RATE,
    ),
    "legacy": (lambda: legacy(0.05, 0.9), lambda: legacy(0.01, 0.5), {"learning_rate", "momentum"}),
    "legacy, number to schedule": (
        lambda: legacy(0.05, 0.9),
        lambda: legacy(tf_keras_cosine(), 0.9),
        RATE,
    ),
    "addons": (lambda: lookahead(0.01), lambda: lookahead(0.002), RATE),
}


def without_settings(trainer):
    """The variables that go on from a training, by Keras's own lists: all but learning rates and
    their like.
    """
    held = {id(v) for variables in trainer._setup.optimizer.settings.values() for v in variables}
    found = {id(raw(v)): v for v in state(trainer)}
    return [
        v for key, v in found.items() if key not in held and "current_learning_rate" not in v.name
    ]


def by_hand(before, after, epochs, options=dict):
    """Trains an epoch by one optimizer, copies every variable, and trains `epochs` more by
    another.
    """
    first, second = make(before(), **options()), make(after(), **options())
    fit(first)
    fit(second)  # makes its variables
    for target, source in zip(without_settings(second), without_settings(first), strict=True):
        target.assign(np.asarray(source))
    return second, fit(second, initial_epoch=1, epochs=1 + epochs).history


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *(pytest.param(change, dict, id=name) for name, change in CHANGES.items()),
        pytest.param(CHANGES["rate"], half, id="rate under a loss scale"),
        *(
            pytest.param(change, dict, id=name, marks=pytest.mark.slow)
            for name, change in OF_TF_KERAS.items()
        ),
    ],
)
def test_a_setting_changed_on_resume_equals_two_phases_by_hand(tmp_path, change, options):
    before, after, names = change
    expected, history = by_hand(before, after, 2, options)
    fit(make(before(), **options()), tmp_path)
    resumed = make(after(), **options())
    untouched = resumed.model.get_weights()
    with pytest.raises(IncompatibleCheckpointError, match="nothing was changed") as refused:
        fit(resumed, tmp_path, epochs=2)
    assert all(map(np.array_equal, resumed.model.get_weights(), untouched))

    named = ast.literal_eval(re.search(r"fit\(\.\.\., resume=(\{.*?\})\)", str(refused.value))[1])
    assert named == names  # the remedy works at the first try
    found = fit(resumed, tmp_path, epochs=2, resume=named).history
    assert found["loss"][1] == history["loss"][0]

    changes = store.latest(tmp_path).changes
    assert {each["name"] for each in changes} == names
    assert {(each["step"], each["epoch"]) for each in changes} == {(STEPS, 1)}

    again = make(after(), **options())  # in a new process, without a name
    assert fit(again, tmp_path, epochs=3).history["loss"][1:] == history["loss"]
    assert [np.asarray(v).tobytes() for v in without_settings(again)] == [
        np.asarray(v).tobytes() for v in without_settings(expected)
    ]
    assert store.latest(tmp_path).changes == changes
    unchanged, _ = by_hand(before, before, 2, options)
    assert bits(unchanged) != bits(expected)  # or nothing would show that the setting counts


class SetAt(Stateless):
    """Sets the learning rate before a train step, counted over epochs."""

    def __init__(self, step, rate):
        super().__init__()
        self.left, self.rate = step, rate

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            self.model.optimizer.learning_rate = self.rate
        self.left -= 1


@pytest.mark.parametrize("names", ["learning_rate", ["learning_rate", "beta_1"]])
def test_a_rate_changed_in_mid_epoch_counts_from_the_next_step(tmp_path, names):
    step = stop(make(AdamW(5e-3)), tmp_path, 5, epochs=3)
    assert step % STEPS
    expected = make(AdamW(5e-3))
    history = fit(expected, epochs=3, callbacks=[SetAt(step, 1e-3)])
    resumed = make(AdamW(1e-3))
    assert fit(resumed, tmp_path, epochs=3, resume=names).history == history.history
    assert bits(resumed) == bits(expected)


def test_a_script_may_go_on_naming_a_setting(tmp_path, capsys):
    """Keeps the rate that callbacks have set since, though the script still names it."""

    def plateau():
        return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)]

    fit(make(AdamW(5e-3)), tmp_path)
    step = stop(make(AdamW(1e-3)), tmp_path, 10, plateau(), epochs=6, resume=RATE)
    resumed = make(AdamW(1e-3))
    resumed.fit(
        X,
        Y,
        8,
        6,
        2,
        plateau(),
        shuffle=False,
        checkpoint_dir=tmp_path,
        checkpoint_every=1,
        resume=RATE,
    )
    assert "; as saved: learning_rate" in capsys.readouterr().out
    assert (
        store.latest(tmp_path).changes[0]["step"] == STEPS
        and len(store.latest(tmp_path).changes) == 1
    )

    expected, _ = by_hand(lambda: AdamW(5e-3), lambda: AdamW(1e-3), 0)
    fit(expected, epochs=6, initial_epoch=1, callbacks=plateau())
    assert step > STEPS and float(expected.optimizer.learning_rate) < 1e-3
    assert bits(resumed) == bits(expected)


def test_settings_that_are_set_between_two_fits_of_a_trainer(tmp_path):
    """Refuses a setting without its name and takes it with the name, as in a new process, even
    where it is a constant of the program.
    """
    trainer = make(AdamW(5e-3))
    fit(trainer, tmp_path)
    trainer.optimizer.learning_rate = 1e-3
    trainer.optimizer.weight_decay = 0.3
    with pytest.raises(
        IncompatibleCheckpointError, match=r"resume=\{\"learning_rate\", \"weight_decay\"\}"
    ):
        fit(trainer, tmp_path, epochs=2)
    fit(trainer, tmp_path, epochs=2, resume=("weight_decay", "learning_rate"))
    expected, _ = by_hand(lambda: AdamW(5e-3), lambda: AdamW(1e-3, weight_decay=0.3), 1)
    assert bits(trainer) == bits(expected)
    assert fit(trainer, tmp_path, epochs=3).epoch == [0, 1, 2]


def test_names_that_are_no_settings(tmp_path):
    trainer = make(AdamW(5e-3))
    with pytest.raises(ValueError, match=r'resume=\{"learning_rate"\} needs a checkpoint_dir'):
        fit(trainer, resume=RATE)
    for wrong in (None, 1e-3, {"learning_rate": 1e-3}, [1]):
        with pytest.raises(
            TypeError, match=r"must be a name or several, as in resume=\{\"learning_rate\"\}"
        ):
            fit(trainer, tmp_path, resume=wrong)
    known = "learning_rate, weight_decay, clipnorm, .*beta_1, .*epochs and callbacks, need no name"
    for unknown in ("lr", ["learning_rate", "lr"]):
        with pytest.raises(ValueError, match=f"resume names 'lr', and may name .* AdamW: {known}"):
            fit(trainer, tmp_path, resume=unknown)
    assert store.latest(tmp_path) is None
    fit(trainer, tmp_path, resume=RATE)  # nothing to change yet
    fit(make(AdamW(5e-3)), tmp_path, epochs=2, resume="weight_decay")
    with pytest.raises(IncompatibleCheckpointError, match="loss: mse was saved") as refused:
        fit(
            fa.Trainer(trainer.model, AdamW(1e-3), "mae", gradient_accumulation_steps=3),
            tmp_path,
            resume=RATE,
        )
    assert "fit(..., resume" not in str(refused.value)  # that would not do


# The learning rate that callbacks set.


class Watch(Stateless):
    """Notes the rates that `on_epoch_begin` leaves, and those that each step trains with; stands
    behind others.
    """

    def __init__(self):
        super().__init__()
        self.announced, self.used = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.announced.append((epoch, float(self.model.optimizer.learning_rate)))

    def on_train_batch_begin(self, batch, logs=None):
        self.used.append((self.announced[-1][0], batch, float(self.model.optimizer.learning_rate)))


class SetOnTrainBegin(Stateless):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = self.factor * float(self.model.optimizer.learning_rate)


class Counting(keras.callbacks.Callback):
    """Sets a rate by the number of epochs that it has seen begin."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.seen += 1
        self.model.optimizer.learning_rate = 0.01 / self.seen

    def get_state(self):
        return {"seen": self.seen}

    def set_state(self, state):
        self.seen = state["seen"]


def relative(_, rate):
    return rate * 0.7


SAME = {
    "LearningRateScheduler": lambda: [Scheduler(lambda epoch: 0.01 / (1 + epoch))],
    "of the rate before": lambda: [Scheduler(relative)],
    "on_train_begin": lambda: [SetOnTrainBegin(0.3), Scheduler(relative)],
    "a state of its own": lambda: [Counting()],
}


@pytest.mark.filterwarnings("error:.*callbacks set learning_rate")
@pytest.mark.parametrize(("same_trainer", "resume"), [(False, ()), (True, RATE)])
@pytest.mark.parametrize("callbacks", SAME.values(), ids=SAME)
def test_the_rate_of_callbacks_that_are_the_same(tmp_path, callbacks, same_trainer, resume):
    """Compares the rate that each hook announces and uses with the uninterrupted training's, in
    mid-epoch and between epochs.
    """
    expected, watched = make(AdamW(5e-3)), Watch()
    fit(expected, epochs=4, callbacks=[*callbacks(), watched])
    resumed = make(AdamW(5e-3))
    for after in (1, 4, 3):
        stop(resumed, tmp_path, after, callbacks(), epochs=4)
        resumed = resumed if same_trainer else make(AdamW(5e-3))
    first = store.latest(tmp_path)
    again = Watch()
    fit(resumed, tmp_path, epochs=4, callbacks=[*callbacks(), again], resume=resume)
    assert again.announced == watched.announced[first.epoch :]
    assert again.used == watched.used[first.step :]
    assert bits(resumed) == bits(expected)
    assert store.latest(tmp_path).changes == []


def test_a_hook_that_would_find_another_rate_shows(tmp_path, monkeypatch):
    """Shows that the test above can fail: without the rate that the hook had read, a relative
    schedule counts an epoch twice.
    """
    monkeypatch.setattr(settings.HookRates, "prepare_repeat", lambda self, hook: None)
    stop(make(AdamW(5e-3)), tmp_path, 5, [Scheduler(relative)], epochs=3)
    with pytest.warns(UserWarning, match="callbacks set learning_rate"):
        fit(make(AdamW(5e-3)), tmp_path, epochs=3, callbacks=[Scheduler(relative)])


def old(epoch):
    return 0.01


def new(epoch):
    return 0.002 / (1 + epoch)


HOOKS = {
    "on_epoch_begin": (lambda: [Scheduler(old)], lambda: [Scheduler(new)], 0.002 / 2),
    "on_train_begin": (lambda: [SetOnTrainBegin(2.0)], lambda: [SetOnTrainBegin(0.5)], 2.5e-3),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_rate_that_other_callbacks_set_holds_where_it_is_named(tmp_path, hook):
    before, after, rate = HOOKS[hook]
    step = stop(make(AdamW(5e-3)), tmp_path, 5, before(), epochs=3)
    expected = make(AdamW(5e-3))
    later = after() if hook == "on_epoch_begin" else []
    by_hand = [
        *before(),
        *(Scheduler(lambda epoch: new(epoch) if epoch > 1 else old(epoch)) for _ in later),
    ]
    fit(expected, epochs=3, callbacks=[*by_hand, SetAt(step, rate)])

    watch = Watch()
    assert (
        stop(make(AdamW(5e-3)), tmp_path, 1, [*after(), watch], epochs=3, resume=RATE) == step + 1
    )
    assert [used for *_, used in watch.used] == pytest.approx([rate, rate])
    assert [announced for _, announced in watch.announced] == pytest.approx([rate])
    (change,) = store.latest(tmp_path).changes
    assert (change["name"], change["step"], change["epoch"]) == ("learning_rate", step, 1)
    assert (change["saved"], change["now"]) == pytest.approx((0.01, rate))

    resumed = make(AdamW(5e-3))  # in the same epoch again: now the callbacks are as they were saved
    fit(resumed, tmp_path, epochs=3, callbacks=after())
    assert bits(resumed) == bits(expected)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_rate_that_other_callbacks_set_is_not_overridden_in_silence(tmp_path, hook):
    before, after, rate = HOOKS[hook]
    step = stop(make(AdamW(5e-3)), tmp_path, 5, before(), epochs=2)
    expected, resumed, watch = make(AdamW(5e-3)), make(AdamW(5e-3)), Watch()
    fit(expected, epochs=2, callbacks=before())
    told = (
        f"callbacks set learning_rate to {rate:g} in {hook}, where they had set 0.01 before the "
        "checkpoint"
    )
    with pytest.warns(UserWarning, match=rf'{told}.*resume=\{{"learning_rate"\}}'):
        fit(resumed, tmp_path, epochs=2, callbacks=[*after(), watch])
    assert {used for *_, used in watch.used} == {np.float32(0.01)} and len(
        watch.used
    ) == 2 * STEPS - step
    assert bits(resumed) == bits(expected)


def test_other_callbacks_count_from_the_next_epoch_where_a_fit_goes_on_between_epochs(tmp_path):
    fit(make(AdamW(5e-3)), tmp_path, callbacks=[Scheduler(old)])
    expected, resumed = make(AdamW(5e-3)), make(AdamW(5e-3))
    fit(
        expected, epochs=2, callbacks=[Scheduler(lambda epoch: new(epoch) if epoch else old(epoch))]
    )
    fit(resumed, tmp_path, epochs=2, callbacks=[Scheduler(new)])
    assert bits(resumed) == bits(expected)
