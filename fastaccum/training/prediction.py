"""`Trainer.predict`: Keras's own, with checked arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import arguments
from fastaccum.adapters.callbacks import require
from fastaccum.adapters.models import Model
from fastaccum.data import source


def predict(
    model: Model,
    x: object,
    *,
    batch_size: int | None,
    verbose: int | str,
    steps: int | None,
    callbacks: arguments.CallbacksArgument,
) -> Any:
    """Returns Keras's predictions; raises ValueError for data that the model cannot be called with."""
    for name, value in (("batch_size", batch_size), ("steps", steps)):
        if value is not None:
            checks.whole_number(name, value)
    require(callbacks, verbose, model.callback_kind)
    if model.preprocess is None:
        source.require_predictable(x, model.may_take_text)
    try:
        with checks.naming(f"x ({type(x).__name__})", AttributeError):
            return model.predict(x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)
    except (tf.errors.InvalidArgumentError, StopIteration) as error:
        why = str(error) or "it yields nothing"
        raise ValueError(f"The model cannot be called with x ({type(x).__name__}): {why}") from error
