"""A process ends after its fit, however that ended, while the data is read by Python code."""

import os
import signal
import subprocess
import sys
import time
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

SECONDS = 5.0
PROGRAM = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
import fastaccum as fa

kind, end = sys.argv[1:]

def batch(i):
    time.sleep(0.02)  # so that one is being read whenever fit ends
    if end == "data" and i == 30:
        raise RuntimeError("the data failed")
    return np.ones((8, 4), "float32"), np.full((8, 1), np.nan if end == "fit" and i == 30 else 1, "float32")

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return batch(i)

def data():
    if kind == "generator":
        signature = tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1))
        made = tf.data.Dataset.from_generator(lambda: map(batch, range(1000)), output_signature=signature)
        return made.map(lambda x, y: (x, y), num_parallel_calls=tf.data.AUTOTUNE)
    workers = {"threads": {"workers": 2}, "processes": {"workers": 2, "use_multiprocessing": True}}
    return Data(**workers.get(kind, {}))

class End(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and end == "callback":
            raise RuntimeError("the callback failed")
        if batch == 3 and end == "interrupt":
            print("training", flush=True)
        self.model.stop_training = batch == 3 and end == "stop"

if __name__ == "__main__":
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", on_nonfinite="raise", jit_compile=False)
    try:
        history = trainer.fit(data(), validation_data=data(), verbose=0, callbacks=[End()])
    finally:
        print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "end", "said"),
    [
        ("PyDataset", "callback", "the callback failed"),
        pytest.param("PyDataset", "interrupt", "KeyboardInterrupt", marks=pytest.mark.sample),
        ("PyDataset", "fit", "NonFiniteError"),
        ("PyDataset", "data", "the data failed"),
        ("threads", "callback", "the callback failed"),
        pytest.param("processes", "interrupt", "KeyboardInterrupt", marks=pytest.mark.sample),
        ("generator", "fit", "NonFiniteError"),
        pytest.param("generator", "interrupt", "KeyboardInterrupt", marks=pytest.mark.sample),
        ("PyDataset", "stop", ""),
    ],
)
def test_a_process_ends_after_its_fit(tmp_path, kind, end, said):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, program, kind, end],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        if end == "interrupt":
            assert process.stdout.readline() == "training\n"
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to workers too
            asked = time.monotonic()
            assert process.stdout.readline() == "ended\n"
            assert time.monotonic() - asked < SECONDS
        else:
            assert process.stdout.readline() == "ended\n"
        code = process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    errors = (tmp_path / "stderr").read_text()
    assert said in errors and (code != 0) == (end != "stop"), errors[-3000:]


def test_no_python_answers_tensorflow_while_it_reads(monkeypatch):
    """A Ctrl-C in `TensorShape.__len__` would make TensorFlow write outside its memory."""
    asked = []
    length = tf.TensorShape.__len__
    rows = np.ones((4, 2), "float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)

    def counted(shape):
        if "iterator_get_next" in {frame.name for frame in traceback.extract_stack()}:
            asked.append(shape)
        return length(shape)

    monkeypatch.setattr(tf.TensorShape, "__len__", counted)
    trainer.fit(data, epochs=2, verbose=0)
    assert not asked
    next(iter(data))
    assert asked, "TensorFlow asks no more: iterators need no tuples"
