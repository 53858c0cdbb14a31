"""The log of a program's trace and compilation."""

import re

import keras
import numpy as np

import fastaccum as fa


def test_a_log_without_a_terminal_tells_of_a_compilation(capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=True)
    trainer.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=2, epochs=2, verbose=2)
    shown = capsys.readouterr().out
    first, second = re.search(
        r"Tracing the train step: (\S+) s\. Compiling it: (\S+) s\.\n", shown
    ).groups()
    assert float(first) > 0 and float(second) > 0
    assert shown.count("Compiling it") == 1 and "\x1b" not in shown
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=True)
    trainer.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=2, verbose=0)
    assert capsys.readouterr().out == ""
