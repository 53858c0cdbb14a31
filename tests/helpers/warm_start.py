"""A training in a process of its own, with a compile cache: prints what was said of it, and its
weights.
"""

import hashlib
import json
import sys
import warnings

import keras
import numpy as np

import fastaccum as fa
from fastaccum.step import announcements


def main(folder, *changes):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    said = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        trainer = fa.Trainer(
            model, "adam", "mse", gradient_accumulation_steps=2, compile_cache=folder or None
        )
        for change in changes:
            exec(change, {})
        x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
        with announcements.announce(said.append):
            for _ in range(3):
                trainer.train_step((x, x[..., :1]))
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
    told = [str(each.message) for each in warned if "compile" in str(each.message)]
    print(json.dumps({"weights": weights, "said": "".join(said), "warned": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
