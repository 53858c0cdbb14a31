"""keras-rs: recommenders."""

import keras
import numpy as np
import pytest
from zoo import Case, row

keras_rs = pytest.importorskip("keras_rs")


@row("keras-rs", "DCN-v2: feature crosses", mixed=True, quick=True)
def test_feature_cross():
    rng = np.random.default_rng(0)
    inputs = keras.Input((8,))
    h = keras_rs.layers.FeatureCross(projection_dim=4)(inputs, inputs)
    h = keras_rs.layers.FeatureCross()(inputs, h)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(h))
    x = rng.normal(size=(16, 8)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    return Case(model, x, y, loss="binary_crossentropy", metrics=["AUC"], micro_batches=4)
