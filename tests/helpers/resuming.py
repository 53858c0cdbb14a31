"""A training that is interrupted and goes on, against one that is not: what every test of
checkpoints compares.
"""

import contextlib
import json

import keras
import numpy as np

from fastaccum.basics.attributes import raw
from fastaccum.checkpoint import store
from fastaccum.checkpoint.lock import FolderLock


class Interruption(Exception):
    """Ends a fit in these tests."""


class Stateless(keras.callbacks.Callback):
    """A callback that has nothing to save, and says so."""

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


class StopAfter(Stateless):
    """Raises at the end of the dispatch with the given train step of this fit, counted from 0 over
    epochs.
    """

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise Interruption


@contextlib.contextmanager
def holding(folder):
    """Holds the lock of a folder within the block."""
    lock = FolderLock(folder)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def state(trainer):
    """Every variable of a trainer, found by Keras's own lists rather than by the code under
    test.
    """
    optimizer = trainer.optimizer
    parts = [optimizer]
    while hasattr(parts[-1], "_optimizer"):  # tensorflow-addons's wrappers
        parts.append(parts[-1]._optimizer)
    slots = [
        v
        for part in parts
        for v in (part.variables() if callable(part.variables) else part.variables)
    ]
    rule = trainer.loss_scale
    scale = [v for v in vars(rule).values() if hasattr(v, "assign")]
    return [*trainer.model.variables, *slots, *scale]


def bits(trainer):
    """The bytes of every variable."""
    return [np.asarray(v).tobytes() for v in state(trainer)]


def with_means(trainer):
    """Every variable of a built trainer, those of the running means too."""
    running = trainer._engine.running
    means = [running.loss, *running.losses.values(), *trainer._setup.metrics.compiled.metrics]
    return [*state(trainer), *(v for mean in means for v in mean.variables), running.skipped]


def scramble(trainer):
    """Puts nonsense in every variable but the optimizer's settings: what is not restored will show.

    Another learning rate would be another training.
    """
    settings = {
        id(v) for variables in trainer._setup.optimizer.settings.values() for v in variables
    }
    for variable in with_means(trainer):
        if id(raw(variable)) not in settings:
            variable.assign(np.full_like(np.asarray(variable), 3))


class Beginning(Stateless):
    """Keeps what every variable is before the first step, so that one Trainer's programs can begin
    twice.
    """

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.kept = trainer, []

    def on_train_begin(self, logs=None):
        self.kept = [
            (variable, np.asarray(variable).copy()) for variable in with_means(self.trainer)
        ]

    def restore(self):
        for variable, value in self.kept:
            variable.assign(value)


def interrupted(trainer, data, stops, folder, every=1, callbacks=list, **options):
    """Fits with a stop in each of `stops`, counted in dispatches of that fit, and then to the end:
    the History.
    """
    for stop in stops:
        with contextlib.suppress(Interruption):
            trainer.fit(
                **data(),
                **options,
                checkpoint_dir=folder,
                checkpoint_every=every,
                callbacks=[*callbacks(), StopAfter(stop)],
                verbose=0,
            )
            raise AssertionError(f"the training ended before its dispatch {stop}")
        assert store.latest(folder) is not None
        scramble(trainer)
    return trainer.fit(
        **data(),
        **options,
        checkpoint_dir=folder,
        checkpoint_every=every,
        callbacks=callbacks(),
        verbose=0,
    )


def assert_same(make, data, stops, folder, every=1, callbacks=list, **options):
    """An interrupted training ends bit for bit as one without checkpoints does; returns its
    Trainer.
    """
    trainer = make()
    beginning = Beginning(trainer)
    expected = trainer.fit(**data(), **options, callbacks=[beginning, *callbacks()], verbose=0)
    ended = bits(trainer)
    scramble(trainer)
    beginning.restore()
    history = interrupted(trainer, data, stops, folder, every, callbacks, **options)
    assert history.epoch == expected.epoch
    assert json.dumps(history.history) == json.dumps(expected.history)  # a NaN equals itself there
    assert bits(trainer) == ended
    return trainer


def edit_manifest(path, change):
    """Changes a manifest and writes the checkpoint again: what a mistake in what is saved would
    look like.
    """
    found = store.inspect(path)
    change(found.manifest)
    store.write(path.parent, found.manifest, found.tensors(), keep=99)
