"""Trains in a process of its own and prints what was said of it, its weights and its warnings."""

import hashlib
import json
import os
import sys
import warnings

import fastaccum as fa  # reads FASTACCUM_COMPILE_CACHE before TensorFlow is imported

# isort: split
import keras
import numpy as np

from fastaccum.step import announcements


def main(*changes):
    for change in changes:
        exec(change, {})
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    said = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        trainer = fa.Trainer(
            model,
            "adam",
            "mse",
            gradient_accumulation_steps=2,
            compile_cache=os.environ.get("FASTACCUM_COMPILE_CACHE") or None,
        )
        x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
        with announcements.announce(said.append):
            for _ in range(3):
                trainer.train_step((x, x[..., :1]))
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
    told = [str(warning.message) for warning in warned]
    print(json.dumps({"weights": weights, "said": "".join(said), "warned": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
