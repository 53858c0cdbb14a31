"""The idioms of people's training scripts: what they pass to compile and fit, layers and models of
their own.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from zoo import Case, Steps, entry

import fastaccum as fa

FIT = "Training scripts: compile and fit"
OWN = "Training scripts: layers and models of one's own"
TUNING = "Training scripts: fine-tuning"


def _data(rows=11, features=6, classes=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, features)).astype("float32"), rng.integers(0, classes, rows)


def _mlp(features=6, classes=4, **options):
    return keras.Sequential(
        [
            keras.Input((features,)),
            layers.Dense(8, activation="relu", **options),
            layers.Dense(classes),
        ]
    )


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _fitted(optimizer, model=None, **options):
    x, y = _data()
    return Case(
        model or _mlp(), x, y, loss=LOSS, optimizer=optimizer, **{"micro_batches": 4, **options}
    )


@entry(FIT, "clipnorm: each variable's gradient clipped by the optimizer")
def clipnorm():
    return _fitted(lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05))


@entry(FIT, "global_clipnorm in the optimizer", quick=True)
def global_clipnorm():
    return _fitted(lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.1))


@entry(FIT, "clipvalue in the optimizer")
def clipvalue():
    return _fitted(lambda: keras.optimizers.RMSprop(1e-2, clipvalue=0.01))


@entry(FIT, "use_ema: averages of the weights, overwritten at the end of fit")
def ema():
    return _fitted(
        lambda: keras.optimizers.Adam(
            1e-2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1
        )
    )


@entry(FIT, "weight decay, biases and norms excluded")
def weight_decay_exclusion():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8),
            layers.LayerNormalization(),
            layers.ReLU(),
            layers.Dense(4),
        ]
    )

    def optimizer():
        adamw = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
        adamw.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return adamw

    return _fitted(optimizer, model)


def _two_epochs(make_optimizer, make_callbacks=lambda: None):
    """Two epochs of two updates: schedules count updates."""
    model = _mlp()
    x, y = _data(rows=22)

    def theirs():
        model.compile(make_optimizer(), LOSS, metrics=["accuracy"], jit_compile=False)
        options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": make_callbacks()}
        return {k: v[-1] for k, v in model.fit(x, y, batch_size=12, **options).history.items()}

    def ours():
        trainer = fa.Trainer(
            model, make_optimizer(), LOSS, ["accuracy"], gradient_accumulation_steps=4
        )
        options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": make_callbacks()}
        return {k: v[-1] for k, v in trainer.fit(x, y, batch_size=3, **options).history.items()}

    return Steps(model.trainable_variables, ours, theirs)


@entry(FIT, "CosineDecay with a warm-up, over four updates", quick=True)
def cosine_decay():
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 10, warmup_target=0.3, warmup_steps=2)
    return _two_epochs(lambda: keras.optimizers.SGD(schedule))


@entry(FIT, "a LearningRateSchedule of one's own (DeepSpeech's, the Transformer's)")
def own_schedule():
    class CustomSchedule(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, d_model, warmup_steps=4):
            self.d_model, self.warmup_steps = d_model, warmup_steps

        def __call__(self, step):
            step = ops.cast(step, "float32") + 1.0
            return self.d_model**-0.5 * ops.minimum(
                ops.rsqrt(step), step * (self.warmup_steps**-1.5)
            )

        def get_config(self):
            return {"d_model": self.d_model, "warmup_steps": self.warmup_steps}

    return _two_epochs(lambda: keras.optimizers.SGD(CustomSchedule(16)))


@entry(FIT, "callbacks that set the learning rate: LearningRateScheduler, ReduceLROnPlateau")
def learning_rate_callbacks():
    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: 0.2 / (epoch + 1)),
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", factor=0.5, patience=1, min_delta=10.0
            ),
        ]

    return _two_epochs(lambda: keras.optimizers.SGD(0.1), callbacks)


@entry(FIT, "class_weight and sample_weight with labels of one-hot rows")
def one_hot_class_weight():
    x, y = _data()
    return Case(
        _mlp(),
        x,
        keras.utils.to_categorical(y, 4),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["categorical_crossentropy"],
        fit={"class_weight": {0: 0.5, 1: 2.0, 2: 3.0}},
        micro_batches=4,
    )


@entry(FIT, "a metric and a loss as functions of one's own")
def functions():
    def rmse(y_true, y_pred):
        return ops.sqrt(ops.mean(ops.square(y_true - y_pred), axis=-1))

    def log_cosh(y_true, y_pred):
        return ops.mean(ops.log(ops.cosh(y_pred - y_true)), axis=-1)

    x, _ = _data()
    return Case(_mlp(), x, x[:, :4] ** 2, loss=log_cosh, metrics=[rmse, "mae"], micro_batches=4)


@entry(FIT, "a metric of one's own with confusion-like state", quick=True)
def own_metric():
    class CategoricalTruePositives(keras.metrics.Metric):
        def __init__(self, name="categorical_true_positives", **kwargs):
            super().__init__(name=name, **kwargs)
            self.true_positives = self.add_variable(shape=(), initializer="zeros", name="ctp")

        def update_state(self, y_true, y_pred, sample_weight=None):
            y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
            values = ops.cast(
                ops.equal(ops.cast(y_true, "int32"), ops.cast(y_pred, "int32")), "float32"
            )
            if sample_weight is not None:
                values = ops.multiply(
                    values, ops.cast(ops.reshape(sample_weight, (-1, 1)), "float32")
                )
            self.true_positives.assign_add(ops.sum(values))

        def result(self):
            return self.true_positives

        def reset_state(self):
            self.true_positives.assign(0.0)

    x, y = _data()
    return Case(
        _mlp(), x, y[:, None], loss=LOSS, metrics=[CategoricalTruePositives()], micro_batches=4
    )


@entry(
    FIT,
    "loss functions of the whole batch: Dice",
    note="That of each micro-batch, and a warning says so; `axis=(1, 2, 3)` is exact.",
)
def dice_of_the_batch():
    return dataclasses.replace(_dice(keras.losses.Dice()), micro_batches=2, by_micro_batch=True)


def _dice(loss):
    model = keras.Sequential(
        [keras.Input((4, 4, 1)), layers.Conv2D(2, 3, padding="same", activation="softmax")]
    )
    rng = np.random.default_rng(0)
    masks = keras.utils.to_categorical(rng.integers(0, 2, (10, 4, 4)), 2)
    return Case(
        model, rng.random((10, 4, 4, 1)).astype("float32"), masks, loss=loss, micro_batches=4
    )


@entry(FIT, "Dice of each row: axis=(1, 2, 3)")
def dice():
    return _dice(keras.losses.Dice(axis=(1, 2, 3)))


@entry(FIT, "adaptive gradient clipping: an optimizer of one's own that overrides apply")
def adaptive_gradient_clipping():
    def unitwise_norm(x):
        axis = None if len(x.shape) <= 1 else tuple(range(len(x.shape) - 1))
        return ops.sqrt(ops.sum(ops.square(x), axis=axis, keepdims=axis is not None))

    class AGC(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            variables = (
                self._trainable_variables if trainable_variables is None else trainable_variables
            )
            clipped = []
            for grad, variable in zip(grads, variables, strict=True):
                limit = ops.maximum(unitwise_norm(variable), 1e-3) * 0.01
                norm = unitwise_norm(grad)
                clipped.append(
                    ops.where(norm < limit, grad, grad * (limit / ops.maximum(norm, 1e-6)))
                )
            super().apply(clipped, trainable_variables)

    return _fitted(lambda: AGC(0.1))


@entry(FIT, "gradient centralization: an optimizer of one's own that overrides update_step")
def gradient_centralization():
    class GCRMSprop(keras.optimizers.RMSprop):
        def update_step(self, gradient, variable, learning_rate):
            if len(gradient.shape) > 1:
                axis = list(range(len(gradient.shape) - 1))
                gradient = gradient - ops.mean(gradient, axis=axis, keepdims=True)
            super().update_step(gradient, variable, learning_rate)

    return _fitted(lambda: GCRMSprop(1e-2, epsilon=1e-3))


@entry(
    FIT,
    "gradient_accumulation_steps of Keras's own optimizer",
    refused="gradient_accumulation_steps",
    why="",
)
def keras_accumulation():
    return _fitted(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))


class LogisticEndpoint(layers.Layer):
    """endpoint_layer_pattern.py"""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy_metric.update_state(targets, logits, sample_weight)
        return keras.activations.sigmoid(logits)


@entry(OWN, "endpoint layer: loss and metric from targets and weights among the inputs", quick=True)
def endpoint_layer():
    inputs, targets = keras.Input((6,), name="inputs"), keras.Input((1,), name="targets")
    sample_weight = keras.Input((1,), name="sample_weight")
    preds = LogisticEndpoint(name="predictions")(layers.Dense(1)(inputs), targets, sample_weight)
    model = keras.Model(
        {"inputs": inputs, "targets": targets, "sample_weight": sample_weight}, preds
    )
    x, y = _data(rows=12)
    weight = np.random.default_rng(1).random((12, 1)).astype("float32")
    x = {"inputs": x, "targets": (y % 2).astype("float32")[:, None], "sample_weight": weight}
    return Case(model, x, micro_batches=4)


@entry(OWN, "metric updated inside call")
def metric_in_call():
    class LogisticActivity(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = layers.Dense(8, activation="relu"), layers.Dense(4)
            self.activity = keras.metrics.Mean(name="activation_mean")

        def call(self, x):
            h = self.hidden(x)
            self.activity.update_state(ops.mean(h, axis=-1))
            return self.out(h)

    x, y = _data(rows=12)
    return Case(LogisticActivity(), x, y, loss=LOSS, metrics=["accuracy"], micro_batches=4)


@entry(OWN, "overridden compute_metrics", quick=True)
def compute_metrics():
    class MyModel(keras.Model):
        def compute_metrics(self, x, y, y_pred, sample_weight):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "twice": 2.0 * results["accuracy"]}

    inputs = keras.Input((6,))
    x, y = _data()
    return Case(
        MyModel(inputs, _mlp()(inputs)), x, y, loss=LOSS, metrics=["accuracy"], micro_batches=4
    )


@entry(OWN, "compute_loss that adds to Keras's own")
def compute_loss_super():
    class Confident(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            probabilities = ops.softmax(y_pred)
            return loss - 0.1 * ops.mean(ops.sum(-probabilities * ops.log(probabilities), -1))

    inputs = keras.Input((6,))
    x, y = _data(rows=12)
    return Case(
        Confident(inputs, _mlp()(inputs)), x, y, loss=LOSS, metrics=["accuracy"], micro_batches=4
    )


@entry(OWN, "subclassed models, nested three deep", quick=True)
def nested_models():
    class Block(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.dense, self.norm = layers.Dense(units), layers.LayerNormalization()

        def call(self, x):
            return ops.relu(self.norm(self.dense(inputs=x)))

    class Encoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block(6), Block(6)]
            self.by_name = {"skip": layers.Dense(6)}

        def call(self, x):
            skip = self.by_name["skip"](x)
            for block in self.blocks:
                x = block(x)
            return x + skip

    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = (
                Encoder(),
                keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(4)]),
            )

        def call(self, inputs, training=False):
            return {"logits": self.head(self.encoder(inputs["features"]), training=training)}

    x, y = _data()
    return Case(
        Classifier(), {"features": x}, {"logits": y}, loss={"logits": LOSS}, micro_batches=4
    )


@entry(OWN, "two inputs, two outputs of one name: a shared head", quick=True)
def outputs_of_one_name():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    trunk, head = layers.Dense(8, activation="relu"), layers.Dense(1, name="score")
    model = keras.Model([a, b], [head(trunk(a)), head(trunk(b))])
    x, _ = _data()
    targets = [x[:, :1], x[:, 1:2] ** 2]
    return Case(
        model,
        [x, x[::-1].copy()],
        targets,
        loss=["mse", "mae"],
        micro_batches=4,
        compare_logs=False,
    )


@entry(OWN, "tied weights: a decoder with the encoder's kernel")
def tied_autoencoder():
    class Tied(layers.Layer):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder

        def build(self, input_shape):
            self.bias = self.add_weight(shape=(6,), initializer="zeros", name="bias")

        def call(self, x):
            return ops.matmul(x, ops.transpose(self.encoder.kernel)) + self.bias

    inputs = keras.Input((6,))
    encoder = layers.Dense(3, activation="tanh")
    x, _ = _data()
    return Case(
        keras.Model(inputs, Tied(encoder)(encoder(inputs))), x, x, loss="mse", micro_batches=4
    )


@entry(OWN, "tied weights: ReversibleEmbedding, from ids to logits", mixed=True)
def reversible_embedding():
    embedding = layers.ReversibleEmbedding(13, 6)
    inputs = keras.Input((5,), dtype="int32")
    h = layers.GRU(6, return_sequences=True)(embedding(inputs))
    model = keras.Model(inputs, embedding(h, reverse=True))
    tokens = np.random.default_rng(0).integers(0, 13, (10, 6)).astype("int32")
    return Case(
        model, tokens[:, :-1], tokens[:, 1:], loss=LOSS, metrics=["accuracy"], micro_batches=4
    )


class RunningMean(layers.Layer):
    """Centres by a running mean of the rows it has seen."""

    def build(self, input_shape):
        self.total = self.add_weight(
            shape=(input_shape[-1],), initializer="zeros", trainable=False, name="total"
        )

    def call(self, inputs, training=False):
        if training:
            self.total.assign(0.9 * self.total + 0.1 * ops.mean(inputs, axis=0))
        return inputs - self.total


@entry(
    OWN,
    "a running mean in add_weight(trainable=False)",
    note="Its state changes with each micro-batch. Compared with a loop over micro-batches.",
)
def running_mean():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), RunningMean(), layers.ReLU(), layers.Dense(4)]
    )
    x, y = _data(rows=12)
    return Case(model, x, y, loss=LOSS, micro_batches=3, by_micro_batch=True)


def _both_by_micro_batch(model, x, y, loss):
    """Ours, and a loop over three micro-batches of four, for state that the model does not list as
    its own.
    """
    loss_fn = keras.losses.get(loss)

    def theirs():
        total, variables, optimizer = None, model.trainable_variables, keras.optimizers.SGD(0.1)
        for i in range(3):
            with tf.GradientTape() as tape:
                value = (
                    ops.mean(
                        loss_fn(y[4 * i : 4 * i + 4], model(x[4 * i : 4 * i + 4], training=True))
                    )
                    / 3
                )
            grads = tape.gradient(value, variables)
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        optimizer.apply_gradients(zip(total, variables, strict=True))

    def ours():
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), loss, gradient_accumulation_steps=3)
        trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0)

    return ours, theirs


@entry(
    OWN,
    "a counter in a tf.Variable that call assigns",
    note="Its state changes with each micro-batch. Compared with a loop over micro-batches.",
)
def tf_variable_state():
    class Annealed(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(1.0, trainable=False)

        def call(self, inputs, training=False):
            if training:
                self.calls.assign_add(1.0)
            return inputs / self.calls

    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "relu"), Annealed(), layers.Dense(4)]
    )
    return Steps(
        [*model.trainable_variables, model.layers[1].calls],
        *_both_by_micro_batch(model, *_data(12), LOSS),
    )


@entry(
    OWN,
    "LSTM(stateful=True): truncated back-propagation, a micro-batch after the other",
    note="Its state changes with each micro-batch. Compared with a loop over micro-batches.",
)
def stateful_lstm():
    inputs = keras.Input(batch_shape=(4, 5, 3))
    lstm = layers.LSTM(4, stateful=True, return_sequences=True)
    model = keras.Model(inputs, layers.Dense(2)(lstm(inputs)))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 5, 3)).astype("float32")
    y = rng.normal(size=(12, 5, 2)).astype("float32")
    return Steps(
        [*model.trainable_variables, *lstm.states], *_both_by_micro_batch(model, x, y, "mse")
    )


@entry(
    OWN,
    "SpectralNormalization around convolutions",
    note="Its vector changes with each micro-batch. Compared with a loop over micro-batches.",
)
def spectral_normalization():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.SpectralNormalization(layers.Conv2D(4, 3, strides=2)),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.SpectralNormalization(layers.Dense(1)),
        ]
    )
    x = np.random.default_rng(0).random((8, 8, 8, 1)).astype("float32")
    y = (np.arange(8) % 3 == 0).astype("float32")[:, None]
    return Case(
        model, x, y, loss=keras.losses.BinaryCrossentropy(from_logits=True), by_micro_batch=True
    )


@entry(OWN, "an activity regulariser of one's own in a layer's call", quick=True)
def activity_regularization():
    class ActivityRegularizationLayer(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * ops.mean(ops.square(inputs)))
            return inputs

    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", activity_regularizer=keras.regularizers.L2(1e-2)),
            ActivityRegularizationLayer(),
            layers.Dense(4, kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2)),
        ]
    )
    x, y = _data(rows=12)
    return Case(model, x, y, loss=LOSS, metrics=["accuracy"], micro_batches=4)


@entry(OWN, "kernel constraints: MaxNorm, NonNeg")
def constraints():
    model = _mlp(
        kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint=keras.constraints.NonNeg()
    )
    return _fitted(lambda: keras.optimizers.SGD(0.5), model)


@entry(OWN, "a residual MLP with a head in float32 under a mixed policy", mixed=True)
def float32_head():
    inputs = keras.Input((6,))
    h = layers.Dense(16, activation="relu")(inputs)
    h = h + layers.Dense(16, activation="relu")(h)
    outputs = layers.Dense(4, activation="softmax", dtype="float32")(h)
    x, y = _data()
    return Case(
        keras.Model(inputs, outputs), x, y, loss="sparse_categorical_crossentropy", micro_batches=4
    )


class LoraLayer(layers.Layer):
    """parameter_efficient_finetuning_of_gpt2_with_lora.py"""

    def __init__(self, original_layer, rank=2, alpha=4, **kwargs):
        super().__init__(**kwargs)
        self.rank, self.alpha = rank, alpha
        self._scale = alpha / rank
        self.original_layer = original_layer
        self.original_layer.trainable = False
        self.A = layers.Dense(units=rank, use_bias=False, name="lora_A")
        self.B = layers.Dense(
            original_layer.units, kernel_initializer="normal", use_bias=False, name="lora_B"
        )

    def call(self, inputs):
        return self.original_layer(inputs) + self.B(self.A(inputs)) * self._scale


@entry(TUNING, "LoRA as a layer around frozen layers", mixed=True)
def own_lora():
    inputs = keras.Input((6,))
    h = LoraLayer(layers.Dense(8, activation="relu"))(inputs)
    x, y = _data()
    return Case(
        keras.Model(inputs, LoraLayer(layers.Dense(4))(h)), x, y, loss=LOSS, micro_batches=4
    )


def _language_model():
    inputs = keras.Input((5,), dtype="int32")
    h = layers.Embedding(12, 8)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True))
    model = keras.Model(inputs, layers.Dense(12)(layers.Dense(8, activation="relu")(h)))
    tokens = np.random.default_rng(0).integers(0, 12, (10, 6)).astype("int32")
    return model, tokens[:, :-1], tokens[:, 1:]


def _with_lora(model):
    for layer in model._flatten_layers():
        if hasattr(layer, "enable_lora") and layer.built:
            layer.enable_lora(2)
            for weight in (
                (layer.lora_kernel_a, layer.lora_kernel_b)
                if hasattr(layer, "lora_kernel_a")
                else ()
            ):
                weight.assign(np.random.default_rng(3).normal(size=weight.shape) * 0.3)
        elif not layer._layers:
            layer.trainable = False
    return model


@entry(TUNING, "enable_lora on Dense, EinsumDense and Embedding", mixed=True, fused=True)
def enable_lora():
    model, x, y = _language_model()
    trainer = {"loss_scale": 256.0}
    return Case(
        _with_lora(model), x, y, loss=LOSS, metrics=["accuracy"], micro_batches=4, trainer=trainer
    )


@entry(TUNING, "int8 weights with LoRA", fused=True)
def int8_lora():
    model, x, y = _language_model()
    model.quantize("int8")
    return Case(_with_lora(model), x, y, loss=LOSS, micro_batches=4)


@entry(
    TUNING,
    "float8 training: model.quantize('float8')",
    refused="float8|overwrite",
    why=(
        "Its gradients are new values for its scales, which can't be added up. Pass "
        "Trainer(float8=True)."
    ),
)
def float8():
    model = _mlp()
    model.quantize("float8")
    x, y = _data(rows=12)
    return Case(model, x, y, loss=LOSS)


@entry(TUNING, "transfer learning: frozen base with BatchNormalization, called with training=False")
def transfer_learning():
    base = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
        ]
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, layers.Dense(4)(base(inputs, training=False)))
    images = np.random.default_rng(0).random((10, 8, 8, 1)).astype("float32")
    return Case(model, images, np.arange(10) % 4, loss=LOSS, metrics=["accuracy"], micro_batches=4)


@entry(TUNING, "fine-tuning some layers: others frozen after the model is built")
def partly_frozen():
    model = keras.Sequential(
        [keras.Input((6,)), *(layers.Dense(8, activation="relu") for _ in range(3))]
    )
    model.add(layers.Dense(4))
    for layer in model.layers[:2]:
        layer.trainable = False
    return _fitted(lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3), model)


@entry(FIT, "GradientAccumulator's sparse test: Embedding, Flatten, sigmoid")
def sparse_embedding():
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 4),
            layers.Flatten(),
            layers.Dense(1, "sigmoid"),
        ]
    )
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (11, 7)).astype("int32"), rng.integers(0, 2, 11).astype("float32")
    return Case(model, x, y, loss="binary_crossentropy", metrics=["accuracy"], micro_batches=4)


@entry(
    FIT,
    "optax's MultiSteps example: an average of micro-batches' means, weighed by their rows",
    quick=True,
)
def unequal_micro_batches():
    x, y = _data(rows=13)
    weight = np.random.default_rng(1).random(13).astype("float32")
    return Case(
        _mlp(), x, y, sample_weight=weight, loss=LOSS, metrics=["accuracy"], micro_batches=5
    )
