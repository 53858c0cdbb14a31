"""Holds wrong uses: type checkers must report the marked lines, and no others."""

import keras
import numpy as np

import fastaccum as fa


def misspelt(model: keras.Model, x: np.ndarray) -> None:
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_step=4)  # error
    trainer.fit(x, x, batchsize=4)  # error
    trainer.evaluate(x, x, batchsize=4)  # error
    trainer.predict(x, batchsize=4)  # error
    trainer.fitt(x, x)  # error
    fa.Trainr(model)  # error
    fa.kernels.atention(x, x, x)  # error


def no_such_choice(model: keras.Model, x: np.ndarray) -> None:
    trainer = fa.Trainer(model, on_nonfinite="ignore")  # error
    trainer.compiler_ir((x, x), stage="optimised_hlo")  # error
    trainer.fit(x, x, verbose="loud")  # error


def wrong_type(model: keras.Model, x: np.ndarray) -> None:
    trainer = fa.Trainer(model, clip_norm="1.0")  # error
    trainer.fit(x, x, epochs="3")  # error
    trainer.fit(x, x, batch_size="most")  # error
    trainer.summary(x, x, batch_size="auto")  # error
    trainer.fit(x, x, checkpoint_dir=3)  # error
