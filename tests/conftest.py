"""The order of the files, and what one test must not leave behind for the next."""

import keras
import pytest


def pytest_collection_modifyitems(items):
    """Begins with the files that take longest, so that no worker is left with one while the others have nothing."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def clean_keras():
    """Every test starts from the same seeds and from float32, whichever ran before it."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
