import keras
import numpy as np
import tensorflow as tf

from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.outputs import Matched, Outputs

ROWS, MICRO_BATCH = 5, 3
rng = np.random.default_rng(0)


def test_a_class_of_keras_that_compares_rows_sees_no_row_that_pads():
    """Targets [rows, 1] and predictions [rows, 1, 2] are broadcast, each row against all others.

    The class has no function whose trace would show that: its update alone does.
    """
    y_true = rng.normal(size=(ROWS, 1)).astype("float32")
    y_pred = rng.normal(size=(ROWS, 1, 2)).astype("float32")
    expected = keras.metrics.RootMeanSquaredError()
    metrics = Metrics([keras.metrics.RootMeanSquaredError()])
    y_true_spec = keras.KerasTensor((None, 1))
    y_pred_spec = keras.KerasTensor((None, 1, 2))
    metrics.build(Outputs(["out"], y_pred_spec), y_true_spec)
    assert not metrics.mixing
    assert metrics.need_exact_rows

    for start in range(0, ROWS, MICRO_BATCH):
        rows = slice(start, start + MICRO_BATCH)
        expected.update_state(y_true[rows], y_pred[rows])
        batch = Matched([tf.constant(y_true[rows])], [tf.constant(y_pred[rows])], [None], [None])
        metrics.update(batch, {})
    result = metrics.result(training=True)["root_mean_squared_error"]
    np.testing.assert_allclose(result, expected.result(), rtol=1e-6)
