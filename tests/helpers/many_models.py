"""Measures the memory that each new model keeps for good.

`python many_models.py keras|ours MODELS` prints bytes a model as its last line.
"""

import sys
from pathlib import Path

import keras
import numpy as np

import fastaccum as fa

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_soak import given_back, resident

X = np.random.default_rng(0).normal(size=(96, 16)).astype("float32")
Y = X.sum(1, keepdims=True)


def fit(kind):
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    )
    if kind == "keras":
        model.compile("adamw", "mse", jit_compile=True)
        model.fit(X, Y, batch_size=32, verbose=0)
    else:
        fa.Trainer(model, "adamw", "mse", gradient_accumulation_steps=4).fit(
            X, Y, batch_size=8, verbose=0
        )


def main(kind, models):
    memory = []
    for _ in range(models):
        fit(kind)
        given_back()
        memory.append(resident())
    warm = 3 * models // 10
    print(np.polyfit(range(warm, models), memory[warm:], 1)[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
