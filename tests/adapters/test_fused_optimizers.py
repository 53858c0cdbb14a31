"""Each optimizer inside the fused step: four micro-batches equal one full batch, and a bad step
leaves no trace.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_optimizer import KERAS, TF_KERAS, TFA, make_model, own_apply, raw

import fastaccum as fa

NAMED = {**KERAS, **TFA, **{name: TF_KERAS[name] for name in ("tf_keras SGD", "legacy Adam")}}
K, B = 4, 6


def make_stack(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(K, B, 3)).astype("float32"), rng.normal(size=(K, B, 2)).astype(
        "float32"
    )


def full_batch_gradients(model, stack):
    x, y = (tf.reshape(t, [K * B, -1]) for t in stack)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return tape.gradient(loss, raw(model.trainable_variables))


# One of each kind: every optimizer's own update is in test_optimizers.py.
FIRST = {"Adam", "Muon", "Lamb", "Lookahead", "SWA", "tf_keras SGD", "legacy Adam"}


@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in NAMED]
)
def test_four_micro_batches_are_one_full_batch(name):
    fused, reference = make_model(), make_model()
    optimizer, own = NAMED[name](), NAMED[name]()
    trainer = fa.Trainer(
        fused, optimizer, keras.losses.MeanSquaredError(), gradient_accumulation_steps=K
    )
    for seed in range(3):
        own_apply(
            own, full_batch_gradients(reference, make_stack(seed)), reference.trainable_variables
        )
        result = trainer.train_step(make_stack(seed))
        assert result.grads_finite
    for ours, theirs in zip(fused.trainable_variables, reference.trainable_variables, strict=True):
        np.testing.assert_allclose(
            ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5, err_msg=ours.path
        )

    state = raw(fused.trainable_variables) + trainer._optimizer.variables
    before = [v.numpy().tobytes() for v in state]
    x, y = make_stack(0)
    x[2, 3] = np.nan
    assert not trainer.train_step((x, y)).grads_finite
    assert [v.numpy().tobytes() for v in state] == before
    assert int(trainer._optimizer.iterations) == 3
