"""The idioms of tensorflow/docs' tutorials and guides, and of keras.io's scripts with losses or
steps of their own.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from zoo import Case, Steps, entry

import fastaccum as fa

TUTORIALS = "tensorflow/docs"
EXAMPLES = "keras.io: losses and steps of one's own"
BY_MICRO_BATCH = (
    "Its loss is a ratio of sums over the batch, as a warning says. Compared with a loop over "
    "micro-batches."
)


def _uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape).astype("float32")


def _ids(rows, length, vocabulary, seed=0):
    """Sentences of other lengths, padded by 0."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocabulary, (rows, length))
    lengths = rng.integers(2, length + 1, (rows, 1))
    return np.where(np.arange(length) < lengths, ids, 0)


def _by_fit(script, remedy, data, micro_batches=2, loss=None, metrics=(), **compiled):
    """The script's own train_step in Keras's fit on the full batch, beside a Trainer of the
    remedy's model.

    Both models hold the same layers.
    """
    x, y = data if isinstance(data, tuple) else (data, None)
    rows = len(tf.nest.flatten(x)[0])

    def theirs():
        if loss is None:
            script.compile(**compiled)
        else:
            script.compile(loss=loss, **compiled)
        history = script.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        return {"loss": float(np.mean(history.history["loss"][-1]))}

    def ours():
        trainer = fa.Trainer(
            remedy,
            keras.optimizers.SGD(0.1),
            loss,
            metrics,
            gradient_accumulation_steps=micro_batches,
        )
        size = -(-rows // micro_batches)
        history = trainer.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        return {"loss": history.history["loss"][-1]}

    return Steps(remedy.trainable_variables, ours, theirs, by_train_step=False)


# ---------------------------------------------------------------------------------------------------------------------
# tensorflow/docs: text


def masked_loss(label, pred):
    """transformer.ipynb"""
    mask = label != 0
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, pred)
    mask = tf.cast(mask, dtype=loss.dtype)
    loss *= mask
    return tf.reduce_sum(loss) / tf.reduce_sum(mask)


def masked_accuracy(label, pred):
    """transformer.ipynb"""
    pred = tf.argmax(pred, axis=2)
    label = tf.cast(label, pred.dtype)
    match = label == pred
    mask = label != 0
    match = match & mask
    match = tf.cast(match, dtype=tf.float32)
    mask = tf.cast(mask, dtype=tf.float32)
    return tf.reduce_sum(match) / tf.reduce_sum(mask)


class CustomSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """transformer.ipynb"""

    def __init__(self, d_model, warmup_steps=40):
        super().__init__()
        self.d_model = tf.cast(d_model, tf.float32)
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = tf.cast(step, dtype=tf.float32)
        arg1 = tf.math.rsqrt(step + 1.0)
        arg2 = (step + 1.0) * (self.warmup_steps**-1.5)
        return tf.math.rsqrt(self.d_model) * tf.math.minimum(arg1, arg2)


class TutorialTransformer(keras.Model):
    """transformer.ipynb: padding masks, causal attention, logits without a mask."""

    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.source = layers.Embedding(vocabulary, width, mask_zero=True)
        self.target = layers.Embedding(vocabulary, width, mask_zero=True)
        self.encode = layers.MultiHeadAttention(2, 4)
        self.attend_to_past = layers.MultiHeadAttention(2, 4)
        self.attend_to_source = layers.MultiHeadAttention(2, 4)
        self.norms = [layers.LayerNormalization() for _ in range(3)]
        self.final_layer = layers.Dense(vocabulary)

    def call(self, inputs):
        context, x = inputs
        context = self.source(context)
        x = self.target(x)
        context = self.norms[0](context + self.encode(context, context))
        x = self.norms[1](x + self.attend_to_past(x, x, use_causal_mask=True))
        x = self.norms[2](x + self.attend_to_source(x, context))
        logits = self.final_layer(x)
        with contextlib.suppress(AttributeError):
            # Keras would scale the losses by the mask, too.
            del logits._keras_mask
        return logits


@entry(
    TUTORIALS,
    "Transformer: masked_loss and masked_accuracy of one number, a learning rate schedule of "
    "one's own",
    note=BY_MICRO_BATCH,
    fused=True,
    quick=True,
)
def transformer():
    return Case(
        TutorialTransformer(),
        (_ids(8, 6, 11), _ids(8, 5, 11, seed=1)),
        _ids(8, 5, 11, seed=2),
        loss=masked_loss,
        metrics=[masked_accuracy],
        optimizer=lambda: keras.optimizers.SGD(CustomSchedule(8)),
        by_micro_batch=True,
        jit_compile=False,
    )


@entry(
    TUTORIALS,
    "Transformer: the same loss by a Keras loss, exact: one loss per token, the mask as "
    "sample_weight",
    fused=True,
)
def transformer_by_weights():
    y = _ids(8, 5, 11, seed=2)
    return Case(
        TutorialTransformer(),
        (_ids(8, 6, 11), _ids(8, 5, 11, seed=1)),
        y,
        sample_weight=(y != 0).astype("float32"),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        micro_batches=4,
        jit_compile=False,
    )


def masked_loss_by_sums(label, pred):
    """The masked loss as the warning says: the pair of its sums."""
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, pred)
    mask = tf.cast(label != 0, dtype=loss.dtype)
    return tf.reduce_sum(loss * mask), tf.reduce_sum(mask)


@entry(TUTORIALS, "Transformer: the same loss as the warning says, exact: its two sums")
def transformer_by_sums():
    model = TutorialTransformer()
    x = (_ids(10, 6, 11), _ids(10, 5, 11, seed=1))
    y = _ids(10, 5, 11, seed=2)
    model(x)

    def theirs():
        model.compile(keras.optimizers.SGD(0.1), masked_loss)
        return {
            "loss": model.fit(x, y, batch_size=10, shuffle=False, verbose=0).history["loss"][-1]
        }

    def ours():
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.1),
            masked_loss_by_sums,
            gradient_accumulation_steps=4,
            jit_compile=False,
        )
        return {
            "loss": trainer.fit(x, y, batch_size=3, shuffle=False, verbose=0).history["loss"][-1]
        }

    return Steps(model.trainable_variables, ours, theirs, by_train_step=False)


class Translator(keras.Model):
    """nmt_with_attention.ipynb: a bidirectional encoder, a decoder that attends to it."""

    def __init__(self, vocabulary=12, units=6):
        super().__init__()
        self.source = layers.Embedding(vocabulary, units, mask_zero=True)
        self.rnn = layers.Bidirectional(layers.GRU(units, return_sequences=True), merge_mode="sum")
        self.target = layers.Embedding(vocabulary, units, mask_zero=True)
        self.decoder = layers.GRU(units, return_sequences=True, return_state=True)
        self.mha = layers.MultiHeadAttention(num_heads=1, key_dim=units)
        self.layernorm = layers.LayerNormalization()
        self.add = layers.Add()
        self.output_layer = layers.Dense(vocabulary)

    def call(self, inputs):
        context, x = inputs
        context = self.rnn(self.source(context))
        x, _ = self.decoder(self.target(x))
        attended, scores = self.mha(query=x, value=context, return_attention_scores=True)
        self.last_attention_weights = tf.reduce_mean(scores, axis=1)
        x = self.layernorm(self.add([x, attended]))
        return self.output_layer(x)


@entry(
    TUTORIALS,
    "translation with attention: a masked loss of one number, attention weights kept on self",
    note=BY_MICRO_BATCH,
)
def translator():
    return Case(
        Translator(),
        (_ids(8, 6, 12), _ids(8, 5, 12, seed=1)),
        _ids(8, 5, 12, seed=2),
        loss=masked_loss,
        metrics=[masked_accuracy],
        by_micro_batch=True,
        jit_compile=False,
    )


def caption_loss(labels, preds):
    """image_captioning.ipynb: neither padding nor banned tokens."""
    labels = tf.cast(labels, tf.int32)  # Keras has made floats of them
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, preds)
    mask = (labels != 0) & (loss < 1e8)
    mask = tf.cast(mask, loss.dtype)
    loss = loss * mask
    return tf.reduce_sum(loss) / tf.reduce_sum(mask)


class TokenOutput(layers.Layer):
    """image_captioning.ipynb: logits with the words' frequencies as bias, -1e9 for banned ones."""

    def __init__(self, vocabulary):
        super().__init__()
        self.dense = layers.Dense(vocabulary)
        log_p = np.log(np.arange(1, vocabulary + 1) / np.sum(np.arange(1, vocabulary + 1)))
        log_p[:2] = -1e9
        self.bias = log_p.astype("float32")

    def call(self, x):
        return self.dense(x) + self.bias


@entry(
    TUTORIALS,
    "image captioning: a masked loss that leaves out banned tokens",
    note=BY_MICRO_BATCH,
    fused=True,
)
def image_captioning():
    image = keras.Input((4, 4, 3))
    words = keras.Input((5,), dtype="int32")
    features = layers.Reshape((16, 8))(layers.Conv2D(8, 1)(image))
    x = layers.Embedding(9, 8, mask_zero=True)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, features))
    model = keras.Model([image, words], TokenOutput(9)(x))
    return Case(
        model,
        [_uniform(8, 4, 4, 3), _ids(8, 5, 9)],
        _ids(8, 5, 9, seed=1).astype("int32"),
        loss=caption_loss,
        by_micro_batch=True,
        jit_compile=False,
    )


class Word2Vec(keras.Model):
    """word2vec.ipynb"""

    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.target_embedding = layers.Embedding(vocab_size, embedding_dim, name="w2v_embedding")
        self.context_embedding = layers.Embedding(vocab_size, embedding_dim)

    def call(self, pair):
        target, context = pair
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        word_emb = self.target_embedding(target)
        context_emb = self.context_embedding(context)
        return tf.einsum("be,bce->bc", word_emb, context_emb)


@entry(TUTORIALS, "word2vec: negative samples, a dot product by einsum")
def word2vec():
    rng = np.random.default_rng(0)
    pair = (rng.integers(0, 9, (10, 1)), rng.integers(0, 9, (10, 5)))
    labels = np.tile([1, 0, 0, 0, 0], (10, 1))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return Case(
        Word2Vec(9, 4),
        pair,
        labels,
        loss=loss,
        metrics=["accuracy"],
        micro_batches=4,
        jit_compile=False,
    )


class Characters(keras.Model):
    """text_generation.ipynb: a GRU that returns its state on demand."""

    def __init__(self, vocab_size=9, embedding_dim=4, rnn_units=6):
        super().__init__()
        self.embedding = layers.Embedding(vocab_size, embedding_dim)
        self.gru = layers.GRU(rnn_units, return_sequences=True, return_state=True)
        self.dense = layers.Dense(vocab_size)

    def call(self, inputs, states=None, return_state=False, training=False):
        x = self.embedding(inputs, training=training)
        if states is None:
            states = ops.zeros((ops.shape(x)[0], self.gru.units))
        x, states = self.gru(x, initial_state=states, training=training)
        x = self.dense(x, training=training)
        if return_state:
            return x, states
        return x


class CustomTraining(Characters):
    """text_generation.ipynb: a train_step that does what Keras's does."""

    def train_step(self, inputs):
        inputs, labels = inputs
        with tf.GradientTape() as tape:
            predictions = self(inputs, training=True)
            loss = self.compute_loss(y=labels, y_pred=predictions)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def _characters(model):
    text = np.random.default_rng(0).integers(0, 9, (10, 7))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(model, text[:, :-1], text[:, 1:], loss=loss, micro_batches=4, jit_compile=False)


@entry(
    TUTORIALS,
    "text generation: a train_step that does what Keras's does",
    refused="train_step",
    why="Remove it, or train the class that it extends.",
)
def text_generation_refused():
    return _characters(CustomTraining())


@entry(
    TUTORIALS,
    "text generation: the same without train_step, a GRU that returns its state on demand",
)
def text_generation():
    return _characters(Characters())


# ---------------------------------------------------------------------------------------------------------------------
# tensorflow/docs: audio, time series, images, guides


def mse_with_positive_pressure(y_true, y_pred):
    """music_generation.ipynb"""
    mse = (y_true - y_pred) ** 2
    positive_pressure = 10 * tf.maximum(-y_pred, 0.0)
    return tf.reduce_mean(mse + positive_pressure)


@entry(
    TUTORIALS,
    "music generation: a dict of losses, two functions of one number, loss_weights",
    quick=True,
)
def music_generation():
    inputs = keras.Input((5, 3))
    x = layers.LSTM(6)(inputs)
    outputs = {
        "pitch": layers.Dense(7, name="pitch")(x),
        "step": layers.Dense(1, name="step")(x),
        "duration": layers.Dense(1, name="duration")(x),
    }
    loss = {
        "pitch": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "step": mse_with_positive_pressure,
        "duration": mse_with_positive_pressure,
    }
    y = {
        "pitch": np.random.default_rng(1).integers(0, 7, 10),
        "step": _uniform(10, 1, seed=2),
        "duration": _uniform(10, 1, seed=3),
    }
    return Case(
        keras.Model(inputs, outputs),
        _uniform(10, 5, 3),
        y,
        loss=loss,
        loss_weights={"pitch": 0.05, "step": 1.0, "duration": 1.0},
        micro_batches=4,
        jit_compile=False,
    )


class FeedBack(keras.Model):
    """time_series.ipynb: an LSTM cell that reads its own predictions."""

    def __init__(self, units, out_steps, num_features):
        super().__init__()
        self.out_steps = out_steps
        self.lstm_cell = layers.LSTMCell(units)
        self.lstm_rnn = layers.RNN(self.lstm_cell, return_state=True)
        self.dense = layers.Dense(num_features)

    def warmup(self, inputs):
        x, *state = self.lstm_rnn(inputs)
        return self.dense(x), state

    def call(self, inputs, training=None):
        predictions = []
        prediction, state = self.warmup(inputs)
        predictions.append(prediction)
        for _ in range(1, self.out_steps):
            x, state = self.lstm_cell(prediction, states=state, training=training)
            prediction = self.dense(x)
            predictions.append(prediction)
        predictions = tf.stack(predictions)
        return tf.transpose(predictions, [1, 0, 2])


@entry(TUTORIALS, "time series: an autoregressive LSTM cell that reads its own predictions")
def time_series_feedback():
    return Case(
        FeedBack(6, 4, 3),
        _uniform(10, 5, 3),
        _uniform(10, 4, 3, seed=1),
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.MeanAbsoluteError()],
        micro_batches=4,
        jit_compile=False,
    )


class ResidualWrapper(keras.Model):
    """time_series.ipynb: a model that predicts the change since the last step."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, inputs, *args, **kwargs):
        return inputs + self.model(inputs, *args, **kwargs)


@entry(
    TUTORIALS,
    "time series: a residual wrapper with *args and **kwargs, windows made by split_window in "
    "tf.data",
)
def time_series_residual():
    head = layers.Dense(3, kernel_initializer="zeros")
    model = ResidualWrapper(keras.Sequential([layers.LSTM(6, return_sequences=True), head]))
    series = _uniform(15, 3)
    model(series[None, :4])

    def windows(batch):
        split = lambda window: (window[:, :4], window[:, 1:])  # noqa: E731
        data = keras.utils.timeseries_dataset_from_array(
            series, None, 5, shuffle=False, batch_size=batch
        )
        return data.map(split)

    def theirs():
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1), metrics=["mae"])
        history = model.fit(windows(11), verbose=0).history
        return {"loss": history["loss"][-1], "mae": history["mae"][-1]}

    def ours():
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.1),
            "mse",
            ["mae"],
            gradient_accumulation_steps=4,
            jit_compile=False,
        )
        history = trainer.fit(windows(3), verbose=0).history
        return {"loss": history["loss"][-1], "mae": history["mae"][-1]}

    return Steps(model.trainable_variables, ours, theirs, by_train_step=False)


class CVAE(keras.Model):
    """cvae.ipynb, with the noise among the inputs."""

    def __init__(self, latent_dim=2):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(4, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(2 * latent_dim),
            ]
        )
        self.decoder = keras.Sequential(
            [
                layers.Input((latent_dim,)),
                layers.Dense(4 * 4 * 2, activation="relu"),
                layers.Reshape((4, 4, 2)),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
            ]
        )


def log_normal_pdf(sample, mean, logvar, raxis=1):
    """cvae.ipynb"""
    log2pi = tf.math.log(2.0 * np.pi)
    return tf.reduce_sum(
        -0.5 * ((sample - mean) ** 2.0 * tf.exp(-logvar) + logvar + log2pi), axis=raxis
    )


@entry(
    TUTORIALS, "convolutional VAE: its own loop, a Monte Carlo estimate of the ELBO, by TrainStep"
)
def cvae():
    model = CVAE()
    data = [tf.constant(_uniform(12, 8, 8, 1)), tf.random.stateless_normal((12, 2), [0, 1])]

    def losses(batch):
        x, epsilon = batch
        mean, logvar = tf.split(model.encoder(x), num_or_size_splits=2, axis=1)
        z = epsilon * tf.exp(logvar * 0.5) + mean
        cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=model.decoder(z), labels=x)
        logpx_z = -tf.reduce_sum(cross_ent, axis=[1, 2, 3])
        return -(logpx_z + log_normal_pdf(z, 0.0, 0.0) - log_normal_pdf(z, mean, logvar))

    def theirs():
        optimizer = keras.optimizers.SGD(0.01)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(data))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": float(loss)}

    def total(batch):
        return tf.reduce_sum(losses(batch)), tf.cast(tf.shape(batch[0])[0], tf.float32)

    def ours():
        step = fa.TrainStep(total, model.trainable_variables, keras.optimizers.SGD(0.01))
        stack = [tf.reshape(each, (3, 4, *each.shape[1:])) for each in data]
        return {"loss": float(step(stack).loss)}

    return Steps(model.trainable_variables, ours, theirs)


@entry(TUTORIALS, "pix2pix: a generator's loss of an adversarial and an L1 term, two TrainSteps")
def pix2pix():
    generator = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh"),
        ]
    )
    image = keras.Input((8, 8, 3))
    target = keras.Input((8, 8, 3))
    x = layers.Concatenate()([image, target])
    x = layers.LeakyReLU()(layers.Conv2D(4, 4, strides=2, padding="same")(x))
    discriminator = keras.Model([image, target], layers.Conv2D(1, 4)(x))
    data = [tf.constant(_uniform(8, 8, 8, 3)), tf.constant(_uniform(8, 8, 8, 3, seed=1))]
    loss_object = keras.losses.BinaryCrossentropy(from_logits=True)

    def generator_loss(disc_generated_output, gen_output, target):
        gan_loss = loss_object(tf.ones_like(disc_generated_output), disc_generated_output)
        l1_loss = tf.reduce_mean(tf.abs(target - gen_output))
        return gan_loss + 100 * l1_loss

    def discriminator_loss(disc_real_output, disc_generated_output):
        real_loss = loss_object(tf.ones_like(disc_real_output), disc_real_output)
        return real_loss + loss_object(tf.zeros_like(disc_generated_output), disc_generated_output)

    # As the tutorial's train_step: both gradients before either update.
    def theirs():
        optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
        image, target = data
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            gen_output = generator(image, training=True)
            disc_real = discriminator([image, target], training=True)
            disc_generated = discriminator([image, gen_output], training=True)
            gen_loss = generator_loss(disc_generated, gen_output, target)
            disc_loss = discriminator_loss(disc_real, disc_generated)
        gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
        disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        optimizers[0].apply_gradients(
            zip(gen_gradients, generator.trainable_variables, strict=True)
        )
        optimizers[1].apply_gradients(
            zip(disc_gradients, discriminator.trainable_variables, strict=True)
        )
        return {"gen": float(gen_loss), "disc": float(disc_loss)}

    def rows(batch):
        return tf.cast(tf.shape(batch[0])[0], tf.float32)

    def gen_total(batch):
        image, target = batch
        output = generator(image, training=True)
        loss = generator_loss(discriminator([image, output], training=True), output, target)
        return loss * rows(batch), rows(batch)

    def disc_total(batch):
        image, target, output = batch
        real = discriminator([image, target], training=True)
        loss = discriminator_loss(real, discriminator([image, output], training=True))
        return loss * rows(batch), rows(batch)

    def stack(nest):
        return [tf.reshape(each, (2, 4, *each.shape[1:])) for each in nest]

    def ours():
        fakes = generator(data[0], training=True)  # before the generator's update
        gen_step = fa.TrainStep(gen_total, generator.trainable_variables, keras.optimizers.SGD(0.1))
        disc_step = fa.TrainStep(
            disc_total, discriminator.trainable_variables, keras.optimizers.SGD(0.1)
        )
        gen = gen_step(stack(data))
        disc = disc_step(stack([*data, fakes]))
        return {"gen": float(gen.loss), "disc": float(disc.loss)}

    return Steps([*generator.trainable_variables, *discriminator.trainable_variables], ours, theirs)


def _regression_net():
    inputs = keras.Input((4,))
    return inputs, layers.Dense(1)(layers.Dense(5, activation="relu")(inputs))


class OwnLossAndMetrics(keras.Model):
    """customizing_what_happens_in_fit.ipynb: the lower-level step, with its own loss and
    metrics.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = ops.mean(keras.losses.mean_squared_error(y, y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


class OwnLossByComputeLoss(keras.Model):
    """The same, as the refusal says."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(keras.losses.mean_squared_error(y, y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.mae_metric.update_state(y, y_pred)
        return {"mae": self.mae_metric.result()}


@entry(
    TUTORIALS,
    "customizing fit: a train_step with its own loss and metrics",
    refused="train_step",
    why="Override `compute_loss` and `compute_metrics`. See the next row.",
)
def customizing_fit_refused():
    inputs, outputs = _regression_net()
    return Case(OwnLossAndMetrics(inputs, outputs), _uniform(10, 4), _uniform(10, 1, seed=1))


@entry(TUTORIALS, "customizing fit: the same by compute_loss and compute_metrics")
def customizing_fit():
    inputs, outputs = _regression_net()
    script = OwnLossAndMetrics(inputs, outputs)
    remedy = OwnLossByComputeLoss(inputs, outputs)
    data = _uniform(10, 4), _uniform(10, 1, seed=1)
    return _by_fit(script, remedy, data, micro_batches=4, optimizer=keras.optimizers.SGD(0.1))


# ---------------------------------------------------------------------------------------------------------------------
# keras.io: losses of one number


def charbonnier_loss(y_true, y_pred):
    """mirnet.py"""
    return tf.reduce_mean(tf.sqrt(tf.square(y_true - y_pred) + tf.square(1e-3)))


def peak_signal_noise_ratio(y_true, y_pred):
    """mirnet.py"""
    return tf.image.psnr(y_pred, y_true, max_val=255.0)


@entry(
    EXAMPLES,
    "MIRNet: Charbonnier loss of one number, PSNR as metric, selective fusion of kernels",
    quick=True,
)
def mirnet():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    low = layers.UpSampling2D(2)(layers.Conv2D(4, 3, padding="same")(layers.MaxPooling2D(2)(x)))
    fused = layers.Add()([x, low])
    gap = layers.GlobalAveragePooling2D(keepdims=True)(fused)
    squeezed = layers.Conv2D(2, 1, activation="relu")(gap)
    chosen = [layers.Conv2D(4, 1, activation="softmax")(squeezed) for _ in range(2)]
    x = layers.Add()([chosen[0] * x, chosen[1] * low])
    model = keras.Model(inputs, inputs + layers.Conv2D(3, 3, padding="same")(x))
    return Case(
        model,
        _uniform(10, 8, 8, 3),
        _uniform(10, 8, 8, 3, seed=1),
        loss=charbonnier_loss,
        metrics=[peak_signal_noise_ratio],
        micro_batches=4,
        jit_compile=False,
    )


def get_mixture_loss_func(num_mixes):
    """approximating_non_function_mappings.py, with its mixture of normal densities written out."""

    def mdn_loss_func(y_true, y_pred):
        mus, sigmas, logits = ops.split(y_pred, 3, axis=-1)
        z = (y_true - mus) / sigmas
        log_density = -0.5 * ops.square(z) - ops.log(sigmas) - 0.5 * np.log(2 * np.pi)
        log_likelihood = ops.logsumexp(ops.log_softmax(logits) + log_density, axis=-1)
        return ops.mean(-log_likelihood)

    return mdn_loss_func


@entry(EXAMPLES, "mixture density network: a loss of one number, made by a function")
def mixture_density():
    inputs = keras.Input((1,))
    x = layers.Dense(6, activation="relu")(inputs)
    mus = layers.Dense(3)(x)
    sigmas = layers.Dense(3, activation=lambda x: ops.elu(x) + 1 + 1e-6)(x)
    model = keras.Model(inputs, layers.Concatenate()([mus, sigmas, layers.Dense(3)(x)]))
    return Case(
        model,
        _uniform(10, 1),
        _uniform(10, 1, seed=1),
        loss=get_mixture_loss_func(3),
        micro_batches=4,
        jit_compile=False,
    )


class RetinaNetBoxLoss(keras.losses.Loss):
    """retinanet.py"""

    def __init__(self, delta):
        super().__init__(reduction="none", name="RetinaNetBoxLoss")
        self._delta = delta

    def call(self, y_true, y_pred):
        difference = y_true - y_pred
        absolute = tf.abs(difference)
        loss = tf.where(absolute < self._delta, 0.5 * difference**2, absolute - 0.5)
        return tf.reduce_sum(loss, axis=-1)


class RetinaNetClassificationLoss(keras.losses.Loss):
    """retinanet.py"""

    def __init__(self, alpha, gamma):
        super().__init__(reduction="none", name="RetinaNetClassificationLoss")
        self._alpha = alpha
        self._gamma = gamma

    def call(self, y_true, y_pred):
        cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred)
        probs = tf.nn.sigmoid(y_pred)
        alpha = tf.where(tf.equal(y_true, 1.0), self._alpha, (1.0 - self._alpha))
        pt = tf.where(tf.equal(y_true, 1.0), probs, 1 - probs)
        loss = alpha * tf.pow(1.0 - pt, self._gamma) * cross_entropy
        return tf.reduce_sum(loss, axis=-1)


class RetinaNetLoss(keras.losses.Loss):
    """retinanet.py: boxes and a class in one tensor, a row's losses by its positive anchors."""

    def __init__(self, num_classes=4, alpha=0.25, gamma=2.0, delta=1.0):
        super().__init__(reduction="sum_over_batch_size", name="RetinaNetLoss")
        self._clf_loss = RetinaNetClassificationLoss(alpha, gamma)
        self._box_loss = RetinaNetBoxLoss(delta)
        self._num_classes = num_classes

    def call(self, y_true, y_pred):
        box_labels = y_true[:, :, :4]
        box_predictions = y_pred[:, :, :4]
        cls_labels = tf.one_hot(
            tf.cast(y_true[:, :, 4], tf.int32), self._num_classes, dtype=tf.float32
        )
        cls_predictions = y_pred[:, :, 4:]
        positive_mask = tf.cast(tf.greater(y_true[:, :, 4], -1.0), tf.float32)
        ignore_mask = tf.equal(y_true[:, :, 4], -2.0)
        clf_loss = self._clf_loss(cls_labels, cls_predictions)
        box_loss = self._box_loss(box_labels, box_predictions)
        clf_loss = tf.where(ignore_mask, 0.0, clf_loss)
        box_loss = tf.where(tf.equal(positive_mask, 1.0), box_loss, 0.0)
        normalizer = tf.reduce_sum(positive_mask, axis=-1)
        clf_loss = tf.math.divide_no_nan(tf.reduce_sum(clf_loss, axis=-1), normalizer)
        box_loss = tf.math.divide_no_nan(tf.reduce_sum(box_loss, axis=-1), normalizer)
        return clf_loss + box_loss


@entry(
    EXAMPLES, "RetinaNet: a Loss of two others, each row by its positive anchors, anchors ignored"
)
def retinanet():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(inputs)
    boxes = layers.Reshape((16, 4))(layers.Conv2D(4, 3, padding="same")(x))
    classes = layers.Reshape((16, 4))(layers.Conv2D(4, 3, padding="same")(x))
    model = keras.Model(inputs, layers.Concatenate()([boxes, classes]))
    labels = _uniform(10, 16, 5, seed=1)
    labels[..., 4] = np.random.default_rng(2).integers(-2, 4, (10, 16))
    return Case(
        model,
        _uniform(10, 8, 8, 3),
        labels,
        loss=RetinaNetLoss(),
        micro_batches=4,
        jit_compile=False,
    )


class QREmbedding(layers.Layer):
    """memory_efficient_embeddings.py: an id's quotient and remainder."""

    def __init__(self, num_categories, embedding_dim, num_buckets):
        super().__init__()
        self.num_buckets = num_buckets
        self.q_embeddings = layers.Embedding(num_buckets, embedding_dim)
        self.r_embeddings = layers.Embedding(num_buckets, embedding_dim)

    def call(self, inputs):
        quotient = tf.math.floordiv(inputs, self.num_buckets)
        remainder = tf.math.floormod(inputs, self.num_buckets)
        return self.q_embeddings(quotient) * self.r_embeddings(remainder)


@entry(
    EXAMPLES,
    "memory-efficient embeddings: quotient and remainder, blocks of other widths by frequency",
)
def memory_efficient_embeddings():
    users = keras.Input((), dtype="int32", name="user_id")
    movies = keras.Input((), dtype="int32", name="movie_id")
    user = QREmbedding(16, 4, 4)(users)
    movie = layers.Dense(4)(layers.Embedding(10, 2)(movies))
    outputs = layers.Activation("sigmoid")(layers.Dot(axes=1)([user, movie])) * 5
    rng = np.random.default_rng(0)
    x = {"user_id": rng.integers(0, 16, 10), "movie_id": rng.integers(0, 10, 10)}
    return Case(
        keras.Model({"user_id": users, "movie_id": movies}, outputs),
        x,
        5 * _uniform(10, 1),
        loss="mse",
        metrics=["mae"],
        micro_batches=4,
        jit_compile=False,
    )


class RandomFeatures(layers.Layer):
    """quasi_svm.py: random Fourier features of a Gaussian kernel."""

    def __init__(self, output_dim, scale):
        super().__init__()
        self.output_dim = output_dim
        self.scale = scale

    def build(self, input_shape):
        normal = keras.initializers.RandomNormal(stddev=1.0, seed=0)
        uniform = keras.initializers.RandomUniform(0, 2 * np.pi, seed=1)
        shape = (input_shape[-1], self.output_dim)
        self.kernel = self.add_weight(shape=shape, initializer=normal, trainable=False)
        self.bias = self.add_weight(shape=(self.output_dim,), initializer=uniform, trainable=False)

    def call(self, inputs):
        return ops.cos(ops.matmul(inputs / self.scale, self.kernel) + self.bias)


@entry(EXAMPLES, "quasi-SVM: random Fourier features, hinge loss on one-hot labels")
def quasi_svm():
    model = keras.Sequential([layers.Input((6,)), RandomFeatures(16, 2.0), layers.Dense(3)])
    labels = keras.utils.to_categorical(np.random.default_rng(0).integers(0, 3, 10), 3)
    return Case(
        model,
        _uniform(10, 6),
        labels,
        loss=keras.losses.hinge,
        metrics=[keras.metrics.CategoricalAccuracy(name="acc")],
        micro_batches=4,
        jit_compile=False,
    )


@entry(
    EXAMPLES,
    "behaviour sequence transformer: ratings times embeddings, positions, features of the user",
    fused=True,
)
def behaviour_sequence():
    movies = keras.Input((5,), dtype="int32")
    ratings = keras.Input((4,))
    user = keras.Input((), dtype="int32")
    encoded = layers.Embedding(12, 6)(movies)
    positions = layers.Embedding(4, 6)(ops.arange(4))
    past = (encoded[:, :4] + positions) * ops.expand_dims(ratings, -1)
    sequence = layers.Concatenate(axis=1)([past, encoded[:, 4:]])
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=6)(sequence, sequence)
    x = layers.LayerNormalization()(layers.Add()([sequence, attended]))
    x = layers.LeakyReLU()(layers.Dense(6)(x))
    x = layers.Concatenate()([layers.Flatten()(x), layers.Embedding(7, 3)(user)])
    model = keras.Model(
        [movies, ratings, user], layers.Dense(1)(layers.Dense(8, activation="relu")(x))
    )
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 12, (10, 5)), _uniform(10, 4), rng.integers(0, 7, 10)]
    return Case(
        model,
        x,
        5 * _uniform(10, 1, seed=1),
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.MeanAbsoluteError()],
        optimizer=lambda: keras.optimizers.SGD(0.01),
        micro_batches=4,
        jit_compile=False,
    )


# ---------------------------------------------------------------------------------------------------------------------
# keras.io: train_step of one's own


class SpeechTransformer(keras.Model):
    """transformer_asr.py, without its train_step: one decoder's attention to the sound."""

    def __init__(self, classes=7, width=8):
        super().__init__()
        self.num_classes = classes
        self.listen = layers.Conv1D(width, 3, strides=2, padding="same", activation="relu")
        self.words = layers.Embedding(classes, width)
        self.attend = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()
        self.classifier = layers.Dense(classes)

    def call(self, inputs):
        source, target = inputs
        sound = self.listen(source)
        words = self.words(target)
        return self.classifier(self.norm(words + self.attend(words, sound)))


class SpeechTransformerScript(SpeechTransformer):
    """transformer_asr.py: its train_step makes targets and weights from one batch."""

    def __init__(self):
        super().__init__()
        self.loss_metric = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_metric]

    def train_step(self, batch):
        source = batch["source"]
        target = batch["target"]
        dec_input = target[:, :-1]
        dec_target = target[:, 1:]
        with tf.GradientTape() as tape:
            preds = self([source, dec_input])
            one_hot = tf.one_hot(dec_target, depth=self.num_classes)
            mask = tf.math.logical_not(tf.math.equal(dec_target, 0))
            loss = self.compute_loss(None, one_hot, preds, sample_weight=mask)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


@entry(
    EXAMPLES,
    "speech recognition Transformer: a train_step that makes targets and weights",
    refused="train_step",
    why="Make targets and weights in `dataset.map`. See the next row.",
)
def speech_transformer_refused():
    batch = {"source": _uniform(8, 6, 4), "target": _ids(8, 5, 7)}
    return Case(
        SpeechTransformerScript(),
        batch,
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
    )


@entry(
    EXAMPLES, "speech recognition Transformer: targets and weights by dataset.map, label smoothing"
)
def speech_transformer():
    script = SpeechTransformerScript()
    source, target = _uniform(8, 6, 4), _ids(8, 5, 7)
    script([source, target[:, :-1]])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    inputs = [keras.Input((6, 4)), keras.Input((4,), dtype="int32")]
    remedy = keras.Model(inputs, SpeechTransformer.call(script, inputs))

    def prepared(batch):
        dec_target = batch["target"][:, 1:]
        x = (batch["source"], batch["target"][:, :-1])
        return x, tf.one_hot(dec_target, depth=7), tf.cast(dec_target != 0, tf.float32)

    def theirs():
        script.compile(keras.optimizers.SGD(0.1), loss)
        history = script.fit(
            {"source": source, "target": target}, batch_size=8, shuffle=False, verbose=0
        )
        return {"loss": history.history["loss"][-1]}

    def ours():
        data = (
            tf.data.Dataset.from_tensor_slices({"source": source, "target": target})
            .batch(2)
            .map(prepared)
        )
        trainer = fa.Trainer(
            remedy,
            keras.optimizers.SGD(0.1),
            loss,
            gradient_accumulation_steps=4,
            jit_compile=False,
        )
        return {"loss": trainer.fit(data, verbose=0).history["loss"][-1]}

    return Steps(remedy.trainable_variables, ours, theirs, by_train_step=False)


def color_constancy_loss(x):
    """zero_dce.py"""
    mean_rgb = tf.reduce_mean(x, [1, 2], keepdims=True)
    mr, mg, mb = mean_rgb[:, :, :, 0], mean_rgb[:, :, :, 1], mean_rgb[:, :, :, 2]
    d_rg, d_rb, d_gb = tf.pow(mr - mg, 2), tf.pow(mr - mb, 2), tf.pow(mb - mg, 2)
    return tf.pow(tf.pow(d_rg, 2) + tf.pow(d_rb, 2) + tf.pow(d_gb, 2), 0.5)


def exposure_loss(x, mean_val=0.6):
    """zero_dce.py"""
    mean = tf.nn.avg_pool2d(tf.reduce_mean(x, 3, keepdims=True), 4, 4, "VALID")
    return tf.reduce_mean(tf.pow(mean - mean_val, 2))


def illumination_smoothness_loss(x):
    """zero_dce.py: sums, divided by the batch's rows."""
    batch_size = tf.cast(tf.shape(x)[0], tf.float32)
    count_h = tf.cast((tf.shape(x)[2] - 1) * tf.shape(x)[3], tf.float32)
    count_w = tf.cast(tf.shape(x)[2] * (tf.shape(x)[3] - 1), tf.float32)
    h_tv = tf.reduce_sum(tf.pow(x[:, 1:] - x[:, :-1], 2))
    w_tv = tf.reduce_sum(tf.pow(x[:, :, 1:] - x[:, :, :-1], 2))
    return 2 * (h_tv / count_h + w_tv / count_w) / batch_size


class ZeroDCE(keras.Model):
    """zero_dce.py, with its losses in compute_loss."""

    def __init__(self, net):
        super().__init__()
        self.dce_model = net

    def call(self, data):
        curves = self.dce_model(data)
        x = data
        for curve in tf.split(curves, 2, axis=-1):
            x = x + curve * (tf.pow(x, 2) - x)
        return curves, x

    def losses_of(self, curves, enhanced):
        return {
            "illumination": 200 * illumination_smoothness_loss(curves),
            "color": 5 * tf.reduce_mean(color_constancy_loss(enhanced)),
            "exposure": 10 * tf.reduce_mean(exposure_loss(enhanced)),
        }

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return sum(self.losses_of(*y_pred).values())


class ZeroDCEScript(ZeroDCE):
    """zero_dce.py: train_step and compile of its own."""

    def compile(self, learning_rate, **kwargs):
        super().compile(**kwargs)
        self.optimizer = keras.optimizers.SGD(learning_rate=learning_rate)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self.losses_of(*self(data))
            total_loss = sum(losses.values())
        gradients = tape.gradient(total_loss, self.dce_model.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.dce_model.trainable_weights, strict=True)
        )
        return {"loss": total_loss, **losses}


def _dce_net():
    net = keras.Sequential(
        [layers.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu", padding="same")]
    )
    net.add(layers.Conv2D(6, 3, activation="tanh", padding="same"))
    return net


@entry(
    EXAMPLES,
    "Zero-DCE: a train_step of losses without targets, compile of its own",
    refused="train_step",
    why="Override `compute_loss`. See the next row.",
)
def zero_dce_refused():
    return Case(ZeroDCEScript(_dce_net()), _uniform(10, 8, 8, 3))


@entry(EXAMPLES, "Zero-DCE: its losses by compute_loss, one divided by the batch's rows")
def zero_dce():
    net = _dce_net()
    images = _uniform(10, 8, 8, 3)
    script, remedy = ZeroDCEScript(net), ZeroDCE(net)
    script(images)
    remedy(images)
    return _by_fit(script, remedy, images, micro_batches=4, learning_rate=0.1)


class EDSRModel(keras.Model):
    """edsr.py: a train_step as Keras's, test images one by one in predict_step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def _edsr(model_class):
    inputs = keras.Input((4, 4, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    x_new = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    x = layers.Add()([layers.Conv2D(4, 3, padding="same")(x_new), x])
    x = layers.Conv2D(12, 3, padding="same")(x)
    outputs = layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2))(x)
    return model_class(inputs, outputs)


def _edsr_case(model_class):
    return Case(
        _edsr(model_class),
        _uniform(10, 4, 4, 3),
        _uniform(10, 8, 8, 3, seed=1),
        loss="mae",
        metrics=[peak_signal_noise_ratio],
        micro_batches=4,
        jit_compile=False,
    )


@entry(
    EXAMPLES,
    "EDSR: a train_step that does what Keras's does",
    refused="train_step",
    why="Remove it.",
)
def edsr_refused():
    return _edsr_case(EDSRModel)


@entry(EXAMPLES, "EDSR: without its train_step, sub-pixel upsampling, PSNR as metric")
def edsr():
    class EDSRWithKerasStep(EDSRModel):
        pass

    EDSRWithKerasStep.train_step = keras.Model.train_step  # as the refusal says
    return _edsr_case(EDSRWithKerasStep)


class RealNVP(keras.Model):
    """real_nvp.py: masked coupling layers, the likelihood in compute_loss."""

    def __init__(self, couplings):
        super().__init__()
        self.masks = tf.constant([[0.0, 1.0], [1.0, 0.0]])
        self.layers_list = couplings

    def call(self, x, training=True):
        log_det_inv = 0.0
        for i in reversed(range(2)):
            x_masked = x * self.masks[i]
            reversed_mask = 1 - self.masks[i]
            s, t = self.layers_list[i](x_masked)
            s, t = s * reversed_mask, t * reversed_mask
            x = reversed_mask * (x * tf.exp(-s) - t * tf.exp(-s)) + x_masked
            log_det_inv -= tf.reduce_sum(s, [1])
        return x, log_det_inv

    def log_loss(self, y, logdet):
        log_prob = -0.5 * tf.reduce_sum(tf.square(y), -1) - np.log(2 * np.pi)
        return -tf.reduce_mean(log_prob + logdet)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.log_loss(*y_pred)


class RealNVPScript(RealNVP):
    """real_nvp.py: its train_step."""

    def __init__(self, couplings):
        super().__init__(couplings)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(*self(data))
        g = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def _couplings():
    couplings = []
    for _ in range(2):
        inputs = keras.Input((2,))
        s = layers.Dense(2, activation="tanh")(layers.Dense(6, activation="relu")(inputs))
        t = layers.Dense(2)(layers.Dense(6, activation="relu")(inputs))
        couplings.append(keras.Model(inputs, [s, t]))
    return couplings


@entry(
    EXAMPLES,
    "RealNVP: a train_step of a likelihood",
    refused="train_step",
    why="Override `compute_loss`. See the next row.",
)
def real_nvp_refused():
    return Case(RealNVPScript(_couplings()), _uniform(10, 2))


@entry(EXAMPLES, "RealNVP: its likelihood by compute_loss")
def real_nvp():
    couplings = _couplings()
    script, remedy = RealNVPScript(couplings), RealNVP(couplings)
    x = _uniform(10, 2)
    script(x)
    remedy(x)
    return _by_fit(script, remedy, x, micro_batches=4, optimizer=keras.optimizers.SGD(0.1))


class MyTrainer(keras.Model):
    """trainer_pattern.py: a step for any model, which it wraps."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.model(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def call(self, x):
        return self.model(x)


def _digits():
    return keras.Sequential(
        [layers.Input((6, 6)), layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(5)]
    )


@entry(
    EXAMPLES,
    "trainer pattern: a model that wraps another to train it",
    refused="train_step",
    why="Pass the inner model. See the next row.",
)
def trainer_pattern_refused():
    labels = np.arange(10) % 5
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(MyTrainer(_digits()), _uniform(10, 6, 6), labels, loss=loss)


@entry(EXAMPLES, "trainer pattern: the inner model")
def trainer_pattern():
    model = _digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = _uniform(10, 6, 6), np.arange(10) % 5
    optimizer = keras.optimizers.SGD(0.1)
    return _by_fit(MyTrainer(model), model, data, micro_batches=4, loss=loss, optimizer=optimizer)
