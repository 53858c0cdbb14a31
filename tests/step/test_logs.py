"""The losses of an epoch and of an evaluation: those of Keras, or of the formula, and `loss` the
sum of its parts.
"""

import keras
import numpy as np
import pytest

import fastaccum as fa

# an update of 12 rows, and one of 10 whose last micro-batch is short
ROWS, MICRO, ACCUMULATION = 22, 4, 3
WEIGHTS = {"one": 1.0, "two": 0.5}
REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]


def data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 2))
    weight = np.where(np.arange(ROWS) < 12, 0.5, 3.0) * rng.choice([0.0, 1.0], ROWS, p=[0.3, 0.7])
    return x.astype("float32"), y.astype("float32"), weight.astype("float32")


def model_of(outputs):
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    l2 = keras.regularizers.L2(0.1)
    return keras.Model(
        x, {name: keras.layers.Dense(2, kernel_regularizer=l2, name=name)(x) for name in outputs}
    )


def of_formula(model, outputs, reduction):
    """Computes each output's loss and the regularisers in float64, over all rows as one batch."""
    x, y, weight = (each.astype("float64") for each in data())
    penalty, parts = 0.0, {}
    for name in outputs:
        kernel, bias = (w.astype("float64") for w in model.get_layer(name).get_weights())
        loss_sum = (weight * ((x @ kernel + bias - y) ** 2).mean(-1)).sum()
        divisors = {
            "sum": 1.0,
            "mean_with_sample_weight": weight.sum(),
            "sum_over_batch_size": ROWS,
        }
        parts[name] = loss_sum / divisors[reduction]
        penalty += 0.1 * (kernel**2).sum()
    return parts, penalty


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(["one"], marks=[pytest.mark.slow, pytest.mark.sample], id="1"),
        pytest.param(["one", "two"], id="2"),
    ],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_of_weights_and_a_ragged_tail(outputs, reduction):
    x, y, weight = data()
    model = model_of(outputs)
    given = {
        "loss": {name: keras.losses.MeanSquaredError(reduction=reduction) for name in outputs},
        "loss_weights": {name: WEIGHTS[name] for name in outputs},
    }
    y = dict.fromkeys(outputs, y)
    twin = model_of(outputs)
    twin.compile(keras.optimizers.SGD(0.0), run_eagerly=True, **given)
    theirs = twin.fit(
        x, y, MICRO * ACCUMULATION, sample_weight=weight, shuffle=False, verbose=0
    ).history
    parts, penalty = of_formula(model, outputs, reduction)
    for steps in (1, 2):
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.0),
            gradient_accumulation_steps=ACCUMULATION,
            steps_per_execution=steps,
            jit_compile=False,
            **given,
        )
        logs = trainer.fit(x, y, MICRO, sample_weight=weight, shuffle=False, verbose=0).history
        evaluated = trainer.evaluate(x, y, MICRO, sample_weight=weight, verbose=0, return_dict=True)
        assert {name: logs[name][0] for name in theirs} == pytest.approx(
            {k: v[0] for k, v in theirs.items()}, rel=1e-5
        )
        for logged in ({name: values[0] for name, values in logs.items()}, evaluated):
            if len(outputs) > 1:
                total = sum(WEIGHTS[name] * logged[f"{name}_loss"] for name in outputs)
                assert logged["loss"] == pytest.approx(total + penalty, rel=1e-5)
        total = sum(WEIGHTS[name] * part for name, part in parts.items())
        assert evaluated["loss"] == pytest.approx(total + penalty, rel=1e-5)
        for name, part in parts.items() if len(outputs) > 1 else ():
            assert evaluated[f"{name}_loss"] == pytest.approx(part, rel=1e-5)
