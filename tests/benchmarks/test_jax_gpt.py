"""The JAX programs that ours are compared with compute the same: losses and gradients of `fa.gpt`,
on the CPU.
"""

import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

jax = pytest.importorskip("jax", reason='a peer is JAX: pip install "fastaccum[bench]"')
pytest.importorskip("optax", reason='a peer is JAX: pip install "fastaccum[bench]"')

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 97, 16, 32, 2, 2


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    jax.config.update("jax_platforms", "cpu")  # a CUDA plugin may be installed


@pytest.fixture(scope="module")
def ours():
    """Weights by path, ids and labels, and the loss with its gradients in TensorFlow."""
    model = fa.gpt(
        VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS, tied=True, stacked=True, dtype="float32"
    )
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:  # norms' scales other than 1 too
        variable.assign(variable + rng.normal(0, 0.1, variable.shape).astype("float32"))
    ids, labels = rng.integers(0, VOCABULARY, (2, 3, CONTEXT)).astype("int32")
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(ids))
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    names = [variable.value.name.removesuffix(":0") for variable in model.trainable_variables]
    weights = {
        name: variable.numpy()
        for name, variable in zip(names, model.trainable_variables, strict=True)
    }
    return (
        weights,
        (ids, labels),
        loss,
        dict(zip(names, map(tf.convert_to_tensor, gradients), strict=True)),
    )


@pytest.mark.parametrize("form", ["scan", "remat", "unrolled"])
def test_loss_and_gradients_are_those_of_the_keras_model(form, ours):
    from benchmarks.peers import jax_gpt

    weights, batch, loss, gradients = ours

    def loss_of(params):
        if form == "unrolled":
            blocks = [
                jax.tree.map(lambda stack, i=i: stack[i], params.blocks) for i in range(LAYERS)
            ]
            params = params._replace(blocks=blocks)
        options = {"attention": "xla", "remat": form == "remat", "compute": "float32"}
        return jax_gpt.loss_fn(params, *batch, heads=HEADS, **options)

    theirs, their_gradients = jax.value_and_grad(loss_of)(jax_gpt.from_stacked(weights))
    np.testing.assert_allclose(theirs, loss, rtol=1e-6)
    expected = jax_gpt.from_stacked(
        {name: gradient.numpy() for name, gradient in gradients.items()}
    )
    for one, other in zip(jax.tree.leaves(their_gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_another_number_of_heads_is_noticed(ours):
    from benchmarks.peers import jax_gpt

    weights, batch, loss, _ = ours
    other = jax_gpt.loss_fn(
        jax_gpt.from_stacked(weights), *batch, heads=1, attention="xla", compute="float32"
    )
    assert abs(other - loss) > 1e-4 * loss
