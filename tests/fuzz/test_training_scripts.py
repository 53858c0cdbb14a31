"""Whole training scripts, drawn at random: after 1 to 3 epochs what Keras comes to with each update
in one batch.
"""

import fuzzing_scripts as given_script
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_calls import fuzz, judge

pytestmark = [pytest.mark.slow, pytest.mark.long]


@settings(fuzz(20), phases=[Phase.generate])  # a seed has nothing to shrink
@given(seed=st.integers(0, 2**32 - 1))
def test_a_training_script(seed):
    call, run, state, check = given_script.script(np.random.default_rng(seed))
    # `run` raises what Keras refuses as well, and AssertionError for a script that Keras trains.
    judge(call._replace(may_refuse=True), run, check, state)


def test_a_wrong_formula_is_found():
    """Negative control: the mean of two micro-batches' means, of 3 rows and of 1, is not the mean
    of 4 rows.
    """
    call = given_script.Call(
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
    right = given_script.ours(call)
    assert given_script.compare(call, right) == []
    weights = np.float32([[1 / 3], [1 / 3], [1 / 3], [1]]) * 2
    wrong = given_script.ours(
        call._replace(setup=call.setup.replace("w = None", f"w = np.float32({weights.tolist()})"))
    )
    with pytest.raises(AssertionError, match="kernel is off"):
        given_script.compare(call, wrong._replace(evaluated=right.evaluated))
    with pytest.raises(AssertionError, match="mae is"):
        given_script.compare(
            call,
            right._replace(history={**right.history, "mean_absolute_error": [0.0], "mae": [0.0]}),
        )
    with pytest.raises(AssertionError, match="evaluate's loss is"):
        given_script.compare(call, right._replace(evaluated={**right.evaluated, "loss": 9.0}))
    with pytest.raises(AssertionError, match="fit's loss is"):
        given_script.compare(call, right._replace(history={**right.history, "loss": [9.0]}))
