"""The models of tests/zoo/idioms, as people write them: each trains as with its own Keras."""

import pytest
from idioms import generative, structured, text, training, tutorials, vision
from zoo import Entry


def comparisons():
    """Lists each model of the table with each way in which it is compared."""
    params = []
    for module in (generative, structured, text, training, tutorials, vision):
        for function, model in vars(module).items():
            if isinstance(model, Entry):
                for way, marks in model.ways():
                    name = f"{module.__name__}-{function}-{way}"
                    params.append(pytest.param(model, way, marks=marks, id=name))
    return params


@pytest.mark.zoo
@pytest.mark.parametrize(("model", "way"), comparisons())
def test_trains_as_in_keras(model, way, record_property):
    model.compare(way, record_property)
