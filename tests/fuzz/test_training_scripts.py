"""Whole training scripts, drawn at random: after 1 to 3 epochs what Keras comes to with each update
in one batch.
"""

import fuzzing_scripts as given
import numpy as np
import pytest

pytestmark = [pytest.mark.fuzz, pytest.mark.long]


def test_a_training_script(fuzzed):
    fuzzed(given.script, 20)


def test_a_wrong_formula_is_found():
    """Negative control: the mean of two micro-batches' means, of 3 rows and of 1, is not the mean
    of 4 rows.
    """
    call = given.Call(
        "train",
        {
            "loss": "'mse'",
            "optimizer": "optimizers.SGD(0.1)",
            "metrics": "['mae']",
            "gradient_accumulation_steps": "2",
            "jit_compile": "False",
            "batch_size": "3",
            "epochs": "1",
            "feed": "'arrays'",
            "evaluate": "True",
        },
        setup="a = keras.Input((2,))\nmodel = keras.Model(a, layers.Dense(1)(a))\n"
        "x = floats(4, 2, seed=1)\ny = floats(4, 1, seed=2)\nw = None",
    )
    right = given.ours(call)
    assert given.compare(call, right) == []
    weights = np.float32([[1 / 3], [1 / 3], [1 / 3], [1]]) * 2
    wrong = given.ours(
        call._replace(setup=call.setup.replace("w = None", f"w = np.float32({weights.tolist()})"))
    )
    with pytest.raises(AssertionError, match="kernel is off"):
        given.compare(call, wrong._replace(evaluated=right.evaluated))
    with pytest.raises(AssertionError, match="mae is"):
        given.compare(
            call,
            right._replace(history={**right.history, "mean_absolute_error": [0.0], "mae": [0.0]}),
        )
    with pytest.raises(AssertionError, match="evaluate's loss is"):
        given.compare(call, right._replace(evaluated={**right.evaluated, "loss": 9.0}))
    with pytest.raises(AssertionError, match="fit's loss is"):
        given.compare(call, right._replace(history={**right.history, "loss": [9.0]}))
