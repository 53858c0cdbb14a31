"""What one test must not leave behind for the next."""

import keras
import pytest


@pytest.fixture(autouse=True)
def clean_keras():
    """Every test starts from the same seeds and from float32, whichever ran before it."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
