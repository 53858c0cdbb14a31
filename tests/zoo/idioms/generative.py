"""The idioms of keras.io's examples: generative models, distillation, metric and reinforcement
learning.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from zoo import Case, Steps, entry

import fastaccum as fa

FAMILY = "keras.io: generative"


def _images(rows, seed=0):
    return np.random.default_rng(seed).random((rows, 8, 8, 1)).astype("float32")


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z, the vector encoding a digit."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        batch = ops.shape(z_mean)[0]
        dim = ops.shape(z_mean)[1]
        epsilon = keras.random.normal(shape=(batch, dim), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class KLDivergence(layers.Layer):
    """Adds the KL term, and samples with the noise given."""

    def call(self, z_mean, z_log_var, epsilon):
        kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        self.add_loss(ops.mean(ops.sum(ops.cast(kl_loss, "float32"), axis=1)))
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


def _encoder(latent_dim=2):
    encoder_inputs = keras.Input(shape=(8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
    x = layers.Flatten()(x)
    x = layers.Dense(8, activation="relu")(x)
    z_mean = layers.Dense(latent_dim, name="z_mean")(x)
    z_log_var = layers.Dense(latent_dim, name="z_log_var")(x)
    return encoder_inputs, z_mean, z_log_var


def _decoder(latent_dim=2):
    latent_inputs = keras.Input(shape=(latent_dim,))
    x = layers.Dense(4 * 4 * 4, activation="relu")(latent_inputs)
    x = layers.Reshape((4, 4, 4))(x)
    x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
    decoder_outputs = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
    return keras.Model(latent_inputs, decoder_outputs, name="decoder")


def _noisy_vae():
    images, z_mean, z_log_var = _encoder()
    noise = keras.Input((2,))
    z = KLDivergence()(z_mean, z_log_var, noise)
    x = [_images(10), np.random.default_rng(1).normal(size=(10, 2)).astype("float32")]
    return [images, noise], _decoder()(z), x


@entry(FAMILY, "variational autoencoder: KL term by add_loss, reconstruction by loss", mixed=True)
def vae_add_loss():
    inputs, reconstruction, x = _noisy_vae()
    return Case(
        keras.Model(inputs, reconstruction), x, x[0], loss="binary_crossentropy", micro_batches=4
    )


@entry(FAMILY, "variational autoencoder: both terms by add_loss, no y")
def vae_add_loss_alone():
    class Reconstruction(layers.Layer):
        def call(self, x, reconstruction):
            loss = ops.sum(keras.losses.binary_crossentropy(x, reconstruction), axis=(1, 2))
            self.add_loss(ops.mean(loss))
            return reconstruction

    inputs, reconstruction, x = _noisy_vae()
    model = keras.Model(inputs, Reconstruction()(inputs[0], reconstruction))
    return Case(model, x, micro_batches=4)


@entry(
    FAMILY,
    "variational autoencoder: sampling by a SeedGenerator",
    note="Each micro-batch draws its own noise. Compared with a loop over micro-batches, without XLA, which "
    "draws other normal numbers from the same seed.",
)
def vae_sampling():
    images, z_mean, z_log_var = _encoder()
    z = Sampling()([z_mean, z_log_var])
    model = keras.Model(images, _decoder()(z))
    return Case(
        model,
        _images(8),
        _images(8),
        loss="binary_crossentropy",
        by_micro_batch=True,
        jit_compile=False,
    )


class VAE(keras.Model):
    """vae.py, with `compute_loss` in place of its `train_step`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        images, z_mean, z_log_var = _encoder()
        self.encoder = keras.Model(images, [z_mean, z_log_var], name="encoder")
        self.decoder = _decoder()

    def call(self, inputs):
        data, epsilon = inputs
        z_mean, z_log_var = self.encoder(data)
        z = z_mean + ops.exp(0.5 * z_log_var) * epsilon
        return z_mean, z_log_var, self.decoder(z)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        z_mean, z_log_var, reconstruction = y_pred
        reconstruction_loss = ops.mean(
            ops.sum(keras.losses.binary_crossentropy(x[0], reconstruction), axis=(1, 2))
        )
        kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        return reconstruction_loss + ops.mean(ops.sum(kl_loss, axis=1))


@entry(FAMILY, "variational autoencoder: overridden compute_loss, no y", mixed=True)
def vae_compute_loss():
    noise = np.random.default_rng(1).normal(size=(10, 2)).astype("float32")
    return Case(VAE(), [_images(10), noise], micro_batches=4)


class VAEWithTrainStep(VAE):
    """vae.py"""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            total_loss = self.compute_loss(data, None, self(data))
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        return {"loss": self.total_loss_tracker.result()}


@entry(
    FAMILY,
    "variational autoencoder: overridden train_step",
    refused="train_step",
    why="Override `compute_loss`, or use `TrainStep`.",
)
def vae_train_step_refused():
    noise = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")
    return Case(VAEWithTrainStep(), [_images(8), noise])


def _stack(array, micro_batches):
    return tf.nest.map_structure(lambda a: tf.reshape(a, (micro_batches, -1, *a.shape[1:])), array)


def _by_hand(loss_fn, variables, optimizer, data):
    """The full batch's step as one writes it with a tape; loss_fn returns a mean."""
    with tf.GradientTape() as tape:
        loss = loss_fn(data)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return float(loss)


@entry(FAMILY, "variational autoencoder: its train_step's loss by TrainStep")
def vae_by_train_step():
    model = VAEWithTrainStep()
    data = [tf.constant(_images(8)), tf.random.stateless_normal((8, 2), [0, 1])]
    model(data)

    def theirs():
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        return {
            "loss": model.fit(tf.data.Dataset.from_tensors(tuple(data)), verbose=0).history["loss"][
                -1
            ]
        }

    def total(batch):
        rows = tf.cast(tf.shape(batch[0])[0], tf.float32)
        return model.compute_loss(batch, None, model(batch)) * rows, rows

    def ours():
        step = fa.TrainStep(total, model.trainable_variables, keras.optimizers.SGD(0.1))
        return {"loss": float(step(_stack(data, 4)).loss)}

    return Steps(model.trainable_variables, ours, theirs)


def _gan(batch_norm):
    discriminator = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [layers.Input((3,)), layers.Dense(4 * 4 * 4), layers.Reshape((4, 4, 4))]
    )
    if batch_norm:
        generator.add(layers.BatchNormalization())
    generator.add(layers.Conv2DTranspose(4, 4, strides=2, padding="same"))
    generator.add(layers.LeakyReLU(negative_slope=0.2))
    generator.add(layers.Conv2D(1, 5, padding="same", activation="sigmoid"))
    return generator, discriminator


class GAN(keras.Model):
    """dcgan_overriding_train_step.py"""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def train_step(self, real_images):
        noise = (
            self.noise
            if hasattr(self, "noise")
            else keras.random.normal((len(real_images), self.latent_dim))
        )
        generated_images = self.generator(noise)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        size = ops.shape(real_images)[0]
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )
        misleading_labels = ops.zeros((size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading_labels, self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@entry(
    FAMILY,
    "DCGAN: overridden train_step and compile, two optimizers",
    refused="train_step",
    why="Use two `TrainStep`s, one for each objective.",
)
def gan_refused():
    generator, discriminator = _gan(batch_norm=False)
    gan = GAN(discriminator, generator, 3)
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    gan.compile(keras.optimizers.Adam(), keras.optimizers.Adam(), loss_fn)

    def ours():
        fa.Trainer(gan, "adam", gradient_accumulation_steps=2).fit(
            _images(8), batch_size=4, verbose=0
        )

    return Steps(gan.trainable_variables, ours, ours)


@entry(FAMILY, "DCGAN: two TrainSteps, one for each optimizer", quick=True)
def gan_example():
    generator, discriminator = _gan(batch_norm=False)
    real = tf.constant(_images(12))
    noise = tf.random.stateless_normal((12, 3), [0, 1])
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def theirs():
        gan = GAN(discriminator, generator, 3)
        gan.noise = noise
        gan.compile(keras.optimizers.SGD(0.2), keras.optimizers.SGD(0.1), loss_fn)
        return {k: float(v) for k, v in gan.train_step(real).items()}

    per_row = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def d_loss(batch):
        real, noise = batch
        combined = tf.concat([generator(noise), real], 0)
        size = tf.shape(real)[0]
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
        return tf.reduce_sum(per_row(labels, discriminator(combined))), tf.cast(
            2 * size, tf.float32
        )

    def g_loss(noise):
        size = tf.shape(noise)[0]
        losses = per_row(tf.zeros((size, 1)), discriminator(generator(noise)))
        return tf.reduce_sum(losses), tf.cast(size, tf.float32)

    def ours():
        d_step = fa.TrainStep(d_loss, discriminator.trainable_variables, keras.optimizers.SGD(0.2))
        g_step = fa.TrainStep(g_loss, generator.trainable_variables, keras.optimizers.SGD(0.1))
        d_result = d_step(_stack([real, noise], 3))
        return {"d_loss": float(d_result.loss), "g_loss": float(g_step(_stack(noise, 3)).loss)}

    return Steps([*discriminator.trainable_variables, *generator.trainable_variables], ours, theirs)


@entry(FAMILY, "WGAN-GP: the critic's gradient penalty, a tape within TrainStep")
def wgan_gp():
    critic = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 5, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    data = [
        tf.constant(_images(12)),
        tf.constant(_images(12, 1)),
        tf.random.stateless_normal((12, 1, 1, 1), [0, 1]),
    ]

    def losses(batch):
        real, fake, alpha = batch
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = critic(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        wasserstein = tf.squeeze(critic(fake, training=True) - critic(real, training=True), -1)
        return wasserstein + 10.0 * (norm - 1.0) ** 2

    def theirs():
        mean = lambda batch: tf.reduce_mean(losses(batch))  # noqa: E731
        return {"loss": _by_hand(mean, critic.trainable_variables, keras.optimizers.SGD(0.1), data)}

    def ours():
        def total(batch):
            return tf.reduce_sum(losses(batch)), tf.cast(tf.shape(batch[0])[0], tf.float32)

        step = fa.TrainStep(total, critic.trainable_variables, keras.optimizers.SGD(0.1))
        return {"loss": float(step(_stack(data, 3)).loss)}

    return Steps(critic.trainable_variables, ours, theirs)


class VectorQuantizer(layers.Layer):
    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim, self.num_embeddings, self.beta = embedding_dim, num_embeddings, beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings),
            initializer="random_uniform",
            trainable=True,
            name="embeddings_vqvae",
        )

    def call(self, x):
        flattened = ops.reshape(x, [-1, self.embedding_dim])
        encodings = ops.one_hot(self.get_code_indices(flattened), self.num_embeddings)
        quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
        quantized = ops.reshape(quantized, ops.shape(x))
        commitment_loss = self.beta * ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        self.add_loss(commitment_loss + codebook_loss)
        return x + ops.stop_gradient(quantized - x)

    def get_code_indices(self, flattened_inputs):
        similarity = ops.matmul(flattened_inputs, self.embeddings)
        distances = (
            ops.sum(flattened_inputs**2, axis=1, keepdims=True)
            + ops.sum(self.embeddings**2, axis=0)
            - 2 * similarity
        )
        return ops.argmin(distances, axis=1)


@entry(FAMILY, "VQ-VAE: codebook and commitment losses by add_loss, straight-through estimator")
def vq_vae():
    inputs = keras.Input((8, 8, 1))
    encoded = layers.Conv2D(4, 1, padding="same")(
        layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    )
    quantized = VectorQuantizer(6, 4)(encoded)
    decoded = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(quantized)
    return Case(keras.Model(inputs, decoded), _images(10), _images(10), loss="mse", micro_batches=4)


class PixelConvLayer(layers.Layer):
    """pixelcnn.py: its call masks the kernel by assigning it."""

    def __init__(self, mask_type, **kwargs):
        super().__init__()
        self.mask_type = mask_type
        self.conv = layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        kernel_shape = ops.shape(self.conv.kernel)
        self.mask = np.zeros(shape=kernel_shape, dtype="float32")
        self.mask[: kernel_shape[0] // 2, ...] = 1.0
        self.mask[kernel_shape[0] // 2, : kernel_shape[1] // 2, ...] = 1.0
        if self.mask_type == "B":
            self.mask[kernel_shape[0] // 2, kernel_shape[1] // 2, ...] = 1.0

    def call(self, inputs):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(inputs)


@entry(FAMILY, "PixelCNN: masked convolutions that assign their kernel in call")
def pixelcnn():
    inputs = keras.Input(shape=(8, 8, 1))
    x = PixelConvLayer(mask_type="A", filters=4, kernel_size=5, activation="relu", padding="same")(
        inputs
    )
    h = layers.Conv2D(filters=4, kernel_size=1, activation="relu")(x)
    h = PixelConvLayer(mask_type="B", filters=4, kernel_size=3, activation="relu", padding="same")(
        h
    )
    x = layers.add([x, h])
    out = layers.Conv2D(1, kernel_size=1, activation="sigmoid", padding="valid")(x)
    x = np.round(_images(10))
    return Case(keras.Model(inputs, out), x, x, loss="binary_crossentropy", micro_batches=4)


class Distiller(keras.Model):
    """knowledge_distillation.py"""

    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super().compile(optimizer=optimizer, metrics=metrics, jit_compile=False)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def _distiller():
    def convnet(filters):
        return keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(filters, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(5),
            ]
        )

    teacher = convnet(6)
    teacher.trainable = False
    return Distiller(student=convnet(3), teacher=teacher)


@entry(FAMILY, "knowledge distillation: overridden compute_loss and compile", quick=True)
def distillation():
    distiller = _distiller()
    x, y = _images(10), np.arange(10) % 5
    distiller(x)
    options = {
        "metrics": [keras.metrics.SparseCategoricalAccuracy()],
        "student_loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss_fn": keras.losses.KLDivergence(),
        "alpha": 0.1,
        "temperature": 10,
    }

    def theirs():
        distiller.compile(optimizer=keras.optimizers.SGD(0.1), **options)
        return {
            k: v[-1]
            for k, v in distiller.fit(x, y, batch_size=10, shuffle=False, verbose=0).history.items()
        }

    def ours():
        distiller.compile(optimizer=keras.optimizers.SGD(0.1), **options)
        metrics = [keras.metrics.SparseCategoricalAccuracy()]
        trainer = fa.Trainer(
            distiller, keras.optimizers.SGD(0.1), metrics=metrics, gradient_accumulation_steps=4
        )
        return {
            k: v[-1]
            for k, v in trainer.fit(x, y, batch_size=3, shuffle=False, verbose=0).history.items()
        }

    return Steps(distiller.trainable_variables, ours, theirs)


class OldDistiller(Distiller):
    """The example as it was for Keras 2."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.student(x, training=True))
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.student.trainable_variables, strict=True)
        )
        return {"loss": loss}


@entry(
    FAMILY,
    "knowledge distillation: overridden train_step",
    refused="train_step",
    why="Override `compute_loss`, as the Keras 3 version of the example does.",
)
def distillation_train_step_refused():
    distiller = _distiller()
    old = OldDistiller(distiller.student, distiller.teacher)
    x, y = _images(8), np.arange(8) % 5
    old(x)
    options = {"student_loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    old.compile("sgd", [], distillation_loss_fn=keras.losses.KLDivergence(), **options)

    def ours():
        fa.Trainer(old, "sgd", gradient_accumulation_steps=2).fit(x, y, batch_size=4, verbose=0)

    return Steps(old.trainable_variables, ours, ours)


def _embedding_model():
    inputs = layers.Input(shape=(8, 8, 1))
    x = layers.Conv2D(4, kernel_size=3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.UnitNormalization()(layers.Dense(6)(x)))


class SiameseModel(keras.Model):
    """siamese_network.py, with `compute_loss` in place of its `train_step`."""

    def __init__(self, embedding, margin=0.5):
        super().__init__()
        self.embedding, self.margin = embedding, margin

    def call(self, inputs):
        anchor, positive, negative = (self.embedding(each) for each in inputs)
        return ops.sum(ops.square(anchor - positive), -1), ops.sum(
            ops.square(anchor - negative), -1
        )

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        ap_distance, an_distance = y_pred
        return ops.mean(ops.maximum(ap_distance - an_distance + self.margin, 0.0))


@entry(FAMILY, "siamese network with a triplet loss: compute_loss, no y")
def siamese_triplet():
    return Case(
        SiameseModel(_embedding_model()), [_images(10, s) for s in range(3)], micro_batches=4
    )


@entry(
    FAMILY,
    "siamese network with a triplet loss: distances as the output, a loss that ignores y",
    quick=True,
)
def siamese_distances():
    embedding = _embedding_model()
    anchor, positive, negative = (
        layers.Input((8, 8, 1), name=n) for n in ("anchor", "positive", "negative")
    )
    a, p, n = embedding(anchor), embedding(positive), embedding(negative)
    distances = ops.stack([ops.sum(ops.square(a - p), -1), ops.sum(ops.square(a - n), -1)], -1)
    model = keras.Model([anchor, positive, negative], distances)

    def triplet_loss(y_true, y_pred):
        return ops.maximum(y_pred[:, 0] - y_pred[:, 1] + 0.5, 0.0)

    x = {name: _images(10, seed) for seed, name in enumerate(("anchor", "positive", "negative"))}
    return Case(model, x, np.zeros((10, 1), "float32"), loss=triplet_loss, micro_batches=4)


@entry(FAMILY, "siamese network with a contrastive loss: a function of Keras's backend")
def siamese_contrastive():
    embedding = _embedding_model()
    left, right = layers.Input((8, 8, 1)), layers.Input((8, 8, 1))
    distance = ops.sqrt(
        ops.sum(ops.square(embedding(left) - embedding(right)), axis=1, keepdims=True) + 1e-7
    )
    model = keras.Model([left, right], layers.Dense(1, activation="sigmoid")(distance))

    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(1 - y_pred, 0))
        return (1 - y_true) * square_pred + y_true * margin_square

    y = (np.arange(10) % 2).astype("float32")[:, None]
    return Case(
        model,
        [_images(10), _images(10, 1)],
        y,
        loss=contrastive_loss,
        metrics=["accuracy"],
        micro_batches=4,
    )


class EmbeddingModel(keras.Model):
    """metric_learning.py, with `compute_loss` in place of its `train_step`."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, inputs):
        anchors, positives = inputs
        return ops.einsum("ae,pe->ap", self.embedding(anchors), self.embedding(positives)) / 0.2

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        sparse_labels = ops.arange(ops.shape(y_pred)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(sparse_labels, y_pred, from_logits=True)
        )


@entry(
    FAMILY,
    "metric learning: anchors against all positives of the batch",
    note="The loss compares the rows of a micro-batch with each other. Compared with a loop over micro-batches.",
)
def metric_learning():
    return Case(
        EmbeddingModel(_embedding_model()), [_images(8), _images(8, 1)], by_micro_batch=True
    )


class SimCLR(EmbeddingModel):
    """semisupervised_simclr.py: the contrastive loss, symmetrised."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        contrastive_labels = ops.arange(ops.shape(y_pred)[0])
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, y_pred, from_logits=True
        )
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, ops.transpose(y_pred), from_logits=True
        )
        return ops.mean(loss_1_2 + loss_2_1) / 2


@entry(
    FAMILY,
    "SimCLR: contrastive loss of two augmentations",
    note="The loss compares the rows of a micro-batch with each other. Compared with a loop over micro-batches.",
)
def simclr():
    return Case(
        SimCLR(_embedding_model()),
        [_images(12), _images(12, 1)],
        micro_batches=3,
        by_micro_batch=True,
    )


@entry(
    FAMILY,
    "supervised contrastive learning: a Loss that overrides __call__ and compares rows",
    refused="__call__|returned shape",
    why="Override `compute_loss` for such a loss. It then compares the rows of each micro-batch.",
)
def supervised_contrastive():
    class SupervisedContrastiveLoss(keras.losses.Loss):
        def __init__(self, temperature=1, name=None):
            super().__init__(name=name)
            self.temperature = temperature

        def __call__(self, labels, feature_vectors, sample_weight=None):
            normalized = keras.utils.normalize(feature_vectors, axis=1, order=2)
            logits = ops.divide(ops.matmul(normalized, ops.transpose(normalized)), self.temperature)
            labels = ops.cast(ops.equal(labels, ops.transpose(labels)), "float32")
            return ops.mean(
                keras.losses.categorical_crossentropy(
                    labels / ops.sum(labels, -1, keepdims=True), logits, True
                )
            )

    y = (np.arange(8) % 2)[:, None]
    return Case(_embedding_model(), _images(8), y, loss=SupervisedContrastiveLoss(0.05))


@entry(
    "keras.io: reinforcement learning",
    "actor-critic: an episode's returns by TrainStep",
    quick=True,
)
def actor_critic():
    inputs = layers.Input(shape=(4,))
    common = layers.Dense(16, activation="relu")(inputs)
    model = keras.Model(
        inputs, [layers.Dense(2, activation="softmax")(common), layers.Dense(1)(common)]
    )
    rng = np.random.default_rng(0)
    states = tf.constant(rng.normal(size=(12, 4)), tf.float32)
    actions = tf.constant(rng.integers(0, 2, 12), tf.int32)
    returns = tf.constant(rng.normal(size=12) + 1.0, tf.float32)
    huber_loss = keras.losses.Huber()

    def theirs():
        variables, optimizer = model.trainable_variables, keras.optimizers.SGD(learning_rate=0.01)
        with tf.GradientTape() as tape:
            actor_losses, critic_losses = [], []
            for state, action, ret in zip(states, actions, returns, strict=True):
                action_probs, critic_value = model(tf.expand_dims(state, 0))
                log_prob = tf.math.log(action_probs[0, action])
                value = critic_value[0, 0]
                actor_losses.append(-log_prob * (ret - value))
                critic_losses.append(huber_loss(tf.expand_dims(value, 0), tf.expand_dims(ret, 0)))
            loss_value = sum(actor_losses) + sum(critic_losses)
        optimizer.apply_gradients(zip(tape.gradient(loss_value, variables), variables, strict=True))
        return {"loss": float(loss_value)}

    def episode(batch):
        state, action, ret = batch
        action_probs, critic_value = model(state)
        value = critic_value[:, 0]
        log_prob = tf.math.log(tf.gather(action_probs, action, batch_dims=1))
        actor = -log_prob * (ret - value)
        critic = keras.losses.huber(value[:, None], ret[:, None])
        # a sum: the micro-batches' shares make 1
        return tf.reduce_sum(actor + critic), tf.constant(1.0 / 4)

    def ours():
        step = fa.TrainStep(episode, model.trainable_variables, keras.optimizers.SGD(0.01))
        return {"loss": float(step(_stack([states, actions, returns], 4)).loss)}

    return Steps(model.trainable_variables, ours, theirs)


@entry(
    "keras.io: reinforcement learning",
    "deep Q-learning: masked Q-values, Huber, clipnorm, by TrainStep",
)
def deep_q_learning():
    def q_model():
        return keras.Sequential(
            [
                layers.Input((8, 8, 2)),
                layers.Conv2D(4, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(8, activation="relu"),
                layers.Dense(3, activation="linear"),
            ]
        )

    model, target = q_model(), q_model()
    rng = np.random.default_rng(0)
    state, after = (tf.constant(rng.random((12, 8, 8, 2)), tf.float32) for _ in range(2))
    action, rewards = tf.constant(rng.integers(0, 3, 12)), tf.constant(rng.random(12), tf.float32)
    done = tf.constant(rng.integers(0, 2, 12), tf.float32)
    loss_function = keras.losses.Huber()

    def updated(after, rewards, done):
        updated_q_values = rewards + 0.99 * tf.reduce_max(target(after), axis=1)
        return updated_q_values * (1 - done) - done

    def theirs():
        optimizer = keras.optimizers.Adam(learning_rate=0.00025, clipnorm=1.0, epsilon=1e-3)
        with tf.GradientTape() as tape:
            q_action = tf.reduce_sum(model(state) * tf.one_hot(action, 3), axis=1)
            loss = loss_function(updated(after, rewards, done), q_action)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return {"loss": float(loss)}

    def replay(batch):
        state, action, rewards, after, done = batch
        q_action = tf.reduce_sum(model(state) * tf.one_hot(action, 3), axis=1)
        losses = keras.losses.huber(updated(after, rewards, done)[:, None], q_action[:, None])
        return tf.reduce_sum(losses), tf.cast(tf.size(losses), tf.float32)

    def ours():
        optimizer = keras.optimizers.Adam(learning_rate=0.00025, clipnorm=1.0, epsilon=1e-3)
        step = fa.TrainStep(replay, model.trainable_variables, optimizer)
        return {"loss": float(step(_stack([state, action, rewards, after, done], 3)).loss)}

    return Steps(model.trainable_variables, ours, theirs)
