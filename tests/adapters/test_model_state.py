import keras

from fastaccum.families import adapt_model


def test_compute_dtype_is_the_lowest_of_any_layer():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(2, dtype="mixed_float16"), keras.layers.Dense(1)]
    )
    assert adapt_model(model).compute_dtype == "float16"
    in_float32 = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    assert adapt_model(in_float32).compute_dtype == "float32"
