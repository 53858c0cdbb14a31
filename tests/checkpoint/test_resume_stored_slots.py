"""Checkpoints of slots and weights in fewer bytes: compact, resumed bit for bit, and converted."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from resuming import Interruption, Stateless, StopAfter, bits

import fastaccum as fa
from fastaccum.adapters import storage as storages
from fastaccum.checkpoint import store

X = np.random.default_rng(0).normal(size=(96, 64)).astype("float32")
Y = X[:, :3].sum(1, keepdims=True)


def make(dtype, policy="float32", **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(70, dtype=policy), keras.layers.Dense(70, dtype=policy)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1, dtype=policy)])
    return fa.Trainer(
        model,
        keras.optimizers.AdamW(1e-2),
        "mse",
        gradient_accumulation_steps=2,
        optimizer_state_dtype=dtype,
        jit_compile=False,
        **options,
    )


def fit(trainer, folder=None, **options):
    saving = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 1}
    arguments = {"batch_size": 8, "epochs": 2, "verbose": 0} | saving | options
    return trainer.fit(X, Y, **arguments)


def stop(trainer, folder, after=7):
    with pytest.raises(Interruption):
        fit(trainer, folder, callbacks=[StopAfter(after)])


def slots(trainer):
    """Returns the slots as float64 arrays, without their scales."""
    without_scales = storages.without_scales(trainer.optimizer)
    return [np.asarray(tf.cast(storages.read(v), tf.float64)) for v in without_scales]


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        ("int8", "float32"),
        ("float32", "bfloat16"),
        pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param("int8", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_bit_for_bit(dtype, policy, tmp_path):
    whole = make(dtype, policy)
    fit(whole)
    stop(make(dtype, policy), tmp_path)
    resumed = make(dtype, policy)
    fit(resumed, tmp_path)
    assert bits(resumed) == bits(whole)


def test_what_is_stored_is_what_is_saved(tmp_path):
    sizes = {}
    for dtype in ("float32", "bfloat16", "int8"):
        folder = tmp_path / dtype
        stop(make(dtype), folder)
        tensors = store.latest(folder).tensors()
        slots_saved = [v for n, v in tensors.items() if n.startswith("optimizer/")]
        sizes[dtype] = sum(len(np.asarray(v).tobytes()) for v in slots_saved)
    assert sizes["bfloat16"] < 0.51 * sizes["float32"]
    assert sizes["int8"] < 0.29 * sizes["float32"]


@pytest.mark.parametrize(
    ("then", "now", "worst"),
    [
        ("float32", "int8", 0.0069),
        ("int8", "float32", 0.0),
        pytest.param("float32", "bfloat16", 2**-8, marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", 0.0069, marks=pytest.mark.slow),
        pytest.param("int8", "bfloat16", 2**-8, marks=pytest.mark.slow),
    ],
)
def test_slots_are_converted_with_a_warning(then, now, worst, tmp_path):
    first = make(then)
    fit(first, tmp_path, epochs=1)
    saved = slots(first)
    resumed = make(now)

    class AtStart(Stateless, keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if not hasattr(self, "slots"):
                self.slots = slots(resumed)
                assert resumed.optimizer.iterations == 6

    at_start = AtStart()
    name = {"int8": "int8 blocks"}
    message = f"slots in {name.get(then, then)}.* and this training stores them in "
    with pytest.warns(UserWarning, match=f"{message}{name.get(now, now)}"):
        fit(resumed, tmp_path, callbacks=[at_start])
    for old, new in zip(saved, at_start.slots, strict=True):
        assert np.all(np.abs(old - new) <= worst * np.abs(old).max())
    assert resumed.optimizer.iterations == 12
