import keras
import pytest

from fastaccum.adapters.layer_kinds import may_count_rows


class OfUser(keras.layers.Layer):
    def call(self, x):
        return x / keras.ops.sqrt(float(x.shape[0]))


def test_layers_of_tf_keras_do_not_count_rows():
    tf_keras = pytest.importorskip("tf_keras")
    assert may_count_rows(OfUser())
    assert not may_count_rows(tf_keras.layers.BatchNormalization())
    assert not may_count_rows(tf_keras.layers.LSTM(2))
