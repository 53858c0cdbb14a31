"""One interface to Keras 3 and tf_keras models."""

from __future__ import annotations

import keras

from fastaccum.adapters import huggingface
from fastaccum.adapters.arguments import KerasModel
from fastaccum.adapters.keras_models import Model as Model
from fastaccum.adapters.packages import kinds
from fastaccum.adapters.tf_keras_models import PretrainedModel, TFKerasModel


def get(model: KerasModel) -> Model:
    """Returns the adapter for a Keras 3 or tf_keras model."""
    if isinstance(model, keras.Model):
        return Model(model)
    if huggingface.is_pretrained(model):
        return PretrainedModel(model)
    if "tf_keras.Model" in kinds(model):
        return TFKerasModel(model)
    raise TypeError(f"model={model!r} is not a Keras model: pass a keras.Model (Keras 3) or a tf_keras.Model.")
