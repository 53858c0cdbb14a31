"""Whether a resumed training is told that a GPU may compute other bits."""

import collections
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.checkpoint.determinism import deterministic
from fastaccum.kernels.devices import has_gpu

EVERYTHING = "--xla_gpu_deterministic_ops=true"
EXCLUDED = "--xla_gpu_exclude_nondeterministic_ops"
UNTUNED = "--xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    "flags, op_determinism, jit_compile, expected",
    [
        ("", False, True, False),
        (EVERYTHING, False, True, True),
        ("--xla_gpu_deterministic_ops", False, True, True),
        ("-xla_gpu_deterministic_ops=1", False, True, True),
        ("--xla_gpu_deterministic_ops=True", False, True, True),
        ("--xla_gpu_deterministic_ops=false", False, True, False),
        (f"{EVERYTHING} --xla_gpu_deterministic_ops=false", False, True, False),
        (f"--xla_dump_to=/tmp/a=b  {EVERYTHING}\n{UNTUNED}", False, True, True),
        ("--xla_gpu_deterministic_ops_of_mine", False, True, False),
        (EXCLUDED, False, True, False),  # a matmul may still be tuned
        (UNTUNED, False, True, False),  # and scatters still add in any order
        (f"{EXCLUDED} {UNTUNED}", False, True, True),
        (f"{EXCLUDED}=false {UNTUNED}", False, True, False),
        ("", True, True, False),
        (UNTUNED, True, True, True),
        ("--xla_gpu_autotune_level=4", True, True, False),
        (EVERYTHING, False, False, False),  # TensorFlow's own kernels read none of XLA's flags
        ("", True, False, True),
    ],
)
def test_what_makes_a_gpu_deterministic(flags, op_determinism, jit_compile, expected):
    assert deterministic(flags, op_determinism, ["/device:GPU:0"], jit_compile) is expected
    assert deterministic(flags, op_determinism, [], jit_compile)


def fit(folder, epochs):
    """What a fit has to say of a GPU."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fa.Trainer(model, "sgd", "mse").fit(x, y, batch_size=4, epochs=epochs, verbose=0, checkpoint_dir=folder)
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


def test_a_fit_that_is_resumed_on_a_gpu_says_so(tmp_path, monkeypatch):
    has_gpu()  # the programs stay those of a CPU
    device = collections.namedtuple("Device", "name")("/device:GPU:0")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: [device] if kind == "GPU" else [])
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not fit(tmp_path, 1), "nothing was resumed"
    (message,) = fit(tmp_path, 2)
    assert "GPU:0" in message and EVERYTHING in message
    assert not fit(tmp_path, 2), "nothing was left to do"
    flags = tmp_path / "flags"
    flags.write_text(EVERYTHING)
    monkeypatch.setenv("XLA_FLAGS", str(flags))  # XLA reads them from a file, too
    assert not fit(tmp_path, 3)
