"""Saves of workers that each write their own variables: what they tell of them, and a worker that
is lost.
"""

import dataclasses
import os

import keras
import numpy as np
import pytest
from resuming import Interruption, Stateless

import fastaccum as fa
from fastaccum.checkpoint import store
from fastaccum.checkpoint.errors import CheckpointWriteError
from fastaccum.checkpoint.state import Training
from fastaccum.distribute import WorkerLostError
from fastaccum.training import fit as fitting

STEPS = 4


class TwoWorkers:
    """Acts as one of two workers.

    The other one writes a share of its own, until it is lost while a step is saved.
    """

    workers = 2

    def __init__(self, worker, folder, lost_at=None):
        self.worker, self.folder, self.lost_at = worker, folder, lost_at
        self.told, self.heard, self.forgotten = [], [], []

    @property
    def is_chief(self):
        return self.worker == 0

    def gather(self, numbers):
        return [list(numbers)] * self.workers

    def require_same(self, advice, **numbers):
        pass

    def tell(self, about):
        self.told.append(step_of(about))

    def hear(self, about, worker):
        share, fit, step = about.split("/")
        assert share == "share"
        if int(step) == self.lost_at:
            raise WorkerLostError(f"Worker {self.worker} of 2 lost worker {worker}")
        self.heard.append((int(step), worker))
        if self.is_chief:
            store.write_share(
                self.folder / f"step-{int(step):08d}", fit, worker, {"of the other": np.zeros(3)}
            )
        return ""

    def forget(self, about):
        self.forgotten.append(step_of(about))


def step_of(about):
    return int(about.rpartition("/")[2])


@pytest.fixture(scope="module")
def trainer():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return fa.Trainer(model, keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)


@pytest.fixture
def fit(trainer, tmp_path, monkeypatch):
    """Trains as one of two workers, with a save after each step; the slots are this worker's
    own.
    """

    def fit(workers, *callbacks, trainer=trainer, holder_of=None):
        holder_of = holder_of or (lambda variable: workers.worker)

        def training(**parts):
            alone = Training(**parts)
            holders = {id(v): holder_of(v) for v in alone.variables["optimizer"]}
            return dataclasses.replace(alone, workers=workers, holders=holders)

        with monkeypatch.context() as patch:
            patch.setattr(fitting.state, "Training", training)
            saves = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep": 9}
            x = np.ones((16, *trainer.model.input_shape[1:]), "float32")
            y = np.ones((16, *trainer.model.output_shape[1:]), "float32")
            trainer.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=list(callbacks), **saves)

    return fit


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_hears_the_others_and_forgets_all_saves_but_the_last(fit, tmp_path, worker):
    workers = TwoWorkers(worker, tmp_path)
    fit(workers)
    assert workers.told == [1, 2, 3, 4]
    assert workers.heard == [(step, 1 - worker) for step in workers.told]
    assert workers.forgotten == [1, 2, 3]
    if worker == 0:
        assert [store.inspect(path).step for path in store.paths(tmp_path)] == [4, 3, 2, 1]


def test_the_chief_names_the_scales_of_codes_that_another_worker_has(fit, tmp_path):
    layers = [keras.layers.Dense(72, name="first"), keras.layers.Dense(72, name="second")]
    model = keras.Sequential([keras.Input((72,)), *layers])
    coded = fa.Trainer(model, "adam", "mse", optimizer_state_dtype="int8", jit_compile=False)
    workers = TwoWorkers(0, tmp_path)
    fit(workers, trainer=coded, holder_of=lambda variable: int("second" in variable.name))
    scales = store.inspect(store.paths(tmp_path)[0]).manifest["scales"]
    assert len(scales) == 4  # two moments of two kernels
    for codes, of_codes in scales.items():
        assert of_codes == f"{codes}_scales"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("lost_at", [3, STEPS], ids=["between saves", "in the last save"])
def test_a_lost_worker_is_named_and_the_folder_is_not(fit, tmp_path, worker, lost_at):
    workers = TwoWorkers(worker, tmp_path, lost_at)
    with pytest.raises(WorkerLostError, match=f"^Worker {worker} of 2 lost worker {1 - worker}$"):
        fit(workers)
    # the other may still read what was told of the last
    assert workers.forgotten == list(range(1, lost_at - 1))
    if worker == 0:
        assert [store.inspect(path).step for path in store.paths(tmp_path)] == list(
            range(lost_at - 1, 0, -1)
        )


def test_a_lost_worker_is_a_warning_beside_the_error_of_a_fit(fit, tmp_path):
    class Raising(Stateless):
        def on_train_end(self, logs=None):
            raise Interruption

    with (
        pytest.warns(RuntimeWarning, match="Worker 0 of 2 lost worker 1"),
        pytest.raises(Interruption),
    ):
        fit(TwoWorkers(0, tmp_path, lost_at=STEPS), Raising())


def test_another_error_of_a_save_names_the_folder(fit, tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        CheckpointWriteError, match=f"step 1 could not be written to '{tmp_path}': can't start new"
    ):
        fit(TwoWorkers(0, tmp_path))
