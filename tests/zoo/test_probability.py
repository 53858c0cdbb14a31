"""tensorflow-probability's layers (tf_keras). Weights and latents stand at their posterior's mean
where the full batch and micro-batches would draw different samples.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from zoo import Case, Steps, row

import fastaccum as fa

tfp = pytest.importorskip("tensorflow_probability")
tfd, tfpl, tfb = tfp.distributions, tfp.layers, tfp.bijectors
FAMILY = "tensorflow-probability"
ROWS = 14


def points(units=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, units)).astype("float32")
    return x, (np.sin(x).sum(1, keepdims=True) + 0.1 * rng.normal(size=(ROWS, 1))).astype("float32")


def negative_log_likelihood(y, distribution):
    return -distribution.log_prob(y)


def at_mean(distribution):
    return distribution.mean()


def posterior(kernel_size, bias_size=0, dtype=None):
    n = kernel_size + bias_size
    c = np.log(np.expm1(1.0))
    return tf_keras.Sequential(
        [
            tfpl.VariableLayer(
                2 * n, dtype=dtype, initializer=tf_keras.initializers.RandomNormal(seed=1)
            ),
            tfpl.DistributionLambda(
                lambda t: tfd.Independent(
                    tfd.Normal(loc=t[..., :n], scale=1e-5 + tf.nn.softplus(c + t[..., n:])),
                    reinterpreted_batch_ndims=1,
                ),
                convert_to_tensor_fn=at_mean,
            ),
        ]
    )


def prior(kernel_size, bias_size=0, dtype=None):
    n = kernel_size + bias_size
    return tf_keras.Sequential(
        [
            tfpl.VariableLayer(n, dtype=dtype),
            tfpl.DistributionLambda(
                lambda t: tfd.Independent(tfd.Normal(loc=t, scale=1), reinterpreted_batch_ndims=1),
                convert_to_tensor_fn=at_mean,
            ),
        ]
    )


@row(
    FAMILY,
    "DistributionLambda: regression with a variance of its own, negative log-likelihood",
    quick=True,
)
def test_distribution_lambda():
    x, y = points()
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Dense(8, activation="relu", input_shape=(3,)),
            tf_keras.layers.Dense(2),
            tfpl.DistributionLambda(
                lambda t: tfd.Normal(
                    loc=t[..., :1], scale=1e-3 + tf.math.softplus(0.05 * t[..., 1:])
                )
            ),
        ]
    )
    return Case(model, x, y, loss=negative_log_likelihood, micro_batches=4)


@row(FAMILY, "DenseVariational: regression with an exact KL to a trained prior")
def test_dense_variational():
    x, y = points()
    model = tf_keras.Sequential(
        [
            tf_keras.Input((3,)),
            tfpl.DenseVariational(2, posterior, prior, kl_weight=1 / ROWS, kl_use_exact=True),
            tfpl.DistributionLambda(
                lambda t: tfd.Normal(
                    loc=t[..., :1], scale=1e-3 + tf.math.softplus(0.01 * t[..., 1:])
                )
            ),
        ]
    )
    return Case(model, x, y, loss=negative_log_likelihood, micro_batches=4)


@row(FAMILY, "DenseReparameterization: classification with a KL per example", quick=True)
def test_dense_reparameterization():
    x, y = points()
    options = {
        "kernel_divergence_fn": lambda q, p, _: tfd.kl_divergence(q, p) / ROWS,
        "kernel_posterior_tensor_fn": at_mean,
    }
    model = tf_keras.Sequential(
        [
            tf_keras.Input((3,)),
            tfpl.DenseReparameterization(8, activation="relu", **options),
            tfpl.DenseReparameterization(2, **options),
        ]
    )
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(
        model, x, (y[:, 0] > 0).astype("int32"), loss=loss, metrics=["accuracy"], micro_batches=4
    )


@row(FAMILY, "DenseFlipout and Convolution2DFlipout: Bayesian LeNet")
def test_flipout():
    options = {
        "kernel_divergence_fn": lambda q, p, _: tfd.kl_divergence(q, p) / ROWS,
        "kernel_posterior_tensor_fn": at_mean,
    }
    model = tf_keras.Sequential(
        [
            tf_keras.Input((8, 8, 1)),
            tfpl.Convolution2DFlipout(4, 3, padding="SAME", activation="relu", **options),
            tf_keras.layers.MaxPooling2D(2, padding="SAME"),
            tf_keras.layers.Flatten(),
            tfpl.DenseFlipout(3, **options),
        ]
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 8, 8, 1)).astype("float32"), rng.integers(0, 3, ROWS)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(model, x, y, loss=loss, metrics=["accuracy"])


@row(
    FAMILY,
    "IndependentNormal: two outputs of a distribution each, negative log-likelihoods with weights",
)
def test_independent_normal():
    x, y = points()
    inputs = tf_keras.Input((3,))
    h = tf_keras.layers.Dense(8, activation="tanh")(inputs)
    a = tfpl.IndependentNormal(1, name="a")(
        tf_keras.layers.Dense(tfpl.IndependentNormal.params_size(1))(h)
    )
    b = tfpl.IndependentPoisson(1, name="b")(
        tf_keras.layers.Dense(tfpl.IndependentPoisson.params_size(1))(h)
    )
    return Case(
        tf_keras.Model(inputs, [a, b]),
        x,
        [y, np.round(np.abs(y) * 3)],
        loss=[negative_log_likelihood, negative_log_likelihood],
        loss_weights=[1.0, 0.5],
        micro_batches=4,
    )


@row(FAMILY, "MixtureNormal: a mixture density network")
def test_mixture():
    x, y = points()
    model = tf_keras.Sequential(
        [
            tf_keras.Input((3,)),
            tf_keras.layers.Dense(8, activation="tanh"),
            tf_keras.layers.Dense(tfpl.MixtureNormal.params_size(3, [1])),
            tfpl.MixtureNormal(3, [1]),
        ]
    )
    return Case(model, x, y, loss=negative_log_likelihood, micro_batches=4)


@row(FAMILY, "OneHotCategorical: classification by negative log-likelihood, sample weights")
def test_categorical():
    x, y = points()
    model = tf_keras.Sequential(
        [
            tf_keras.Input((3,)),
            tf_keras.layers.Dense(tfpl.OneHotCategorical.params_size(3)),
            tfpl.OneHotCategorical(3),
        ]
    )
    y = np.eye(3, dtype="float32")[(y[:, 0] > 0) + (y[:, 0] > 1).astype(int)]
    weights = np.linspace(0.0, 2.0, ROWS, dtype="float32")
    return Case(model, x, y, weights, loss=negative_log_likelihood)


def vae(**latent):
    encoded = 2
    code = tfd.Independent(tfd.Normal(loc=tf.zeros(encoded), scale=1), reinterpreted_batch_ndims=1)
    regularizer = latent.pop("regularizer", None)
    encoder = tf_keras.Sequential(
        [
            tf_keras.Input((4, 4, 1)),
            tf_keras.layers.Flatten(),
            tf_keras.layers.Dense(8, activation="relu"),
            tf_keras.layers.Dense(tfpl.MultivariateNormalTriL.params_size(encoded)),
            tfpl.MultivariateNormalTriL(
                encoded,
                convert_to_tensor_fn=at_mean,
                activity_regularizer=tfpl.KLDivergenceRegularizer(code) if regularizer else None,
            ),
            *(
                []
                if regularizer
                else [tfpl.KLDivergenceAddLoss(code, use_exact_kl=False, weight=0.5)]
            ),
        ]
    )
    decoder = tf_keras.Sequential(
        [
            tf_keras.Input((encoded,)),
            tf_keras.layers.Dense(8, activation="relu"),
            tf_keras.layers.Dense(tfpl.IndependentBernoulli.params_size((4, 4, 1))),
            tfpl.IndependentBernoulli((4, 4, 1), tfd.Bernoulli.logits),
        ]
    )
    return tf_keras.Model(inputs=encoder.inputs, outputs=decoder(encoder.outputs[0]))


def digits():
    return (np.random.default_rng(0).random((ROWS, 4, 4, 1)) > 0.5).astype("float32")


@row(FAMILY, "VAE with KLDivergenceAddLoss, an independent Bernoulli decoder")
def test_vae_add_loss():
    return Case(vae(), digits(), digits(), loss=negative_log_likelihood, micro_batches=4)


@row(
    FAMILY,
    "VAE with KLDivergenceRegularizer",
    refused="KLDivergenceRegularizer",
    why="Use KLDivergenceAddLoss, which is exact.",
)
def test_vae_regularizer():
    return Case(vae(regularizer=True), digits(), digits(), loss=negative_log_likelihood)


def _flow(bijector, variables):
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32") * 2 + 1
    flow = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(4)), bijector)
    flow.log_prob(x)
    variables = [*flow.trainable_variables] if variables is None else variables

    def theirs():
        optimizer = tf_keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(flow.log_prob(x))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": float(loss)}

    def ours():
        def loss_fn(x):
            return -tf.reduce_sum(flow.log_prob(x)), tf.constant(float(x.shape[0]))

        step = fa.TrainStep(loss_fn, variables, tf_keras.optimizers.SGD(0.1))
        return {"loss": float(step(tf.reshape(x, [2, ROWS // 2, 4])).loss)}

    return Steps(variables, ours, theirs)


@row(FAMILY, "Masked autoregressive flow by TrainStep", quick=True)
def test_masked_autoregressive_flow():
    made = tfb.AutoregressiveNetwork(params=2, hidden_units=[8], activation="tanh", event_shape=[4])
    return _flow(tfb.MaskedAutoregressiveFlow(made), None)


@row(FAMILY, "RealNVP chain with permutations by TrainStep")
def test_real_nvp():
    template = [tfb.real_nvp_default_template(hidden_layers=[8]) for _ in range(2)]
    chain = tfb.Chain(
        [
            tfb.RealNVP(num_masked=2, shift_and_log_scale_fn=template[0]),
            tfb.Permute([2, 3, 0, 1]),
            tfb.RealNVP(num_masked=2, shift_and_log_scale_fn=template[1]),
        ]
    )
    tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(4)), chain).log_prob(
        tf.zeros([1, 4])
    )
    return _flow(chain, [v for each in template for v in each.trainable_variables])


@row(FAMILY, "Mixture of Gaussians with bijected scales, maximum likelihood by TrainStep")
def test_trainable_distribution():
    x = np.random.default_rng(0).normal(size=(ROWS, 1)).astype("float32")
    loc = tf.Variable([[-1.0], [1.0]])
    scale = tfp.util.TransformedVariable([[1.0], [2.0]], tfb.Softplus())
    logits = tf.Variable([0.0, 0.5])
    mixture = tfd.MixtureSameFamily(
        tfd.Categorical(logits=logits), tfd.MultivariateNormalDiag(loc, scale)
    )
    variables = list(mixture.trainable_variables)

    def theirs():
        optimizer = tf_keras.optimizers.Adam(0.1)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(mixture.log_prob(x))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": float(loss)}

    def ours():
        def loss_fn(x):
            return -tf.reduce_sum(mixture.log_prob(x)), tf.constant(float(x.shape[0]))

        step = fa.TrainStep(loss_fn, variables, tf_keras.optimizers.Adam(0.1))
        return {"loss": float(step(tf.reshape(x, [2, ROWS // 2, 1])).loss)}

    return Steps(variables, ours, theirs)
