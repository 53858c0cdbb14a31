"""Checks that a training which is resumed on a GPU warns that bits may differ."""

import warnings

import keras
import numpy as np

import fastaccum as fa
from fastaccum.checkpoint import resume_point

FLAG = "--xla_gpu_deterministic_ops=true"


def fit(folder, epochs, jit_compile=True):
    """Returns the warnings of a fit about a GPU."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=jit_compile)
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(x, y, batch_size=4, epochs=epochs, verbose=0, checkpoint_dir=folder)
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


def test_a_fit_that_is_resumed_on_a_gpu_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(resume_point, "has_gpu", lambda: True)  # the programs stay those of a CPU
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not fit(tmp_path, 1), "nothing was resumed"
    (message,) = fit(tmp_path, 2)
    assert "on a GPU" in message and FLAG in message
    assert not fit(tmp_path, 2), "nothing was left to do"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp/a=b {FLAG}")
    assert not fit(tmp_path, 3)


def test_without_xla_tensorflows_own_switch_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(resume_point, "has_gpu", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    assert not fit(tmp_path, 1, jit_compile=False)
    (message,) = fit(tmp_path, 2, jit_compile=False)
    assert "enable_op_determinism()" in message
    monkeypatch.setattr(resume_point, "has_op_determinism", lambda: True)
    assert not fit(tmp_path, 3, jit_compile=False)
