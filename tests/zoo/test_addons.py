"""Every public class of tensorflow-addons, in a tf_keras model: each stands in the name of a row
below.
"""

import inspect
import re
import tempfile

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from zoo import Case, Steps, row

import fastaccum as fa

tfa = fa.addons
# rows name its classes as they are collected
pytest.importorskip("tensorflow_addons", exc_type=ImportError)
FAMILY = "tensorflow-addons"
ROWS = 8
KERAS = tf_keras.layers


NAMED: set[str] = set()


def addon(name, **about):
    NAMED.update(re.findall(r"\w+", name))
    return row(FAMILY, name, **about)


def points(units=6):
    x = np.random.default_rng(0).normal(size=(ROWS, units)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0.5)


def one_hot(labels, classes=3):
    return np.eye(classes, dtype="float32")[labels]


def random(*shape):
    return np.random.default_rng(0).normal(size=(ROWS, *shape)).astype("float32")


def cross_entropy():
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(*layers, units=6):
    return tf_keras.Sequential([tf_keras.Input((units,)), *layers, KERAS.Dense(3)])


def on_points(*layers, **arguments):
    x, y = points()
    return Case(
        classifier(*layers),
        x,
        y,
        loss=cross_entropy(),
        metrics=["accuracy"],
        micro_batches=4,
        **arguments,
    )


def on(shape, *layers, **arguments):
    """A classifier of what has this shape, by these layers."""
    model = tf_keras.Sequential([tf_keras.Input(shape), *layers, KERAS.Flatten()])
    model.add(KERAS.Dense(3))
    return Case(
        model, random(*shape), points()[1], loss=cross_entropy(), micro_batches=4, **arguments
    )


def _rows(written, named, quick=(), **about):
    """A test for each of the rows of these names, all written by one function of what is beside the
    name.
    """
    for number, (name, each) in enumerate(named.items()):

        @addon(name, quick=name in quick, **about)
        def test(each=each):
            return written(each)

        globals()[f"test{written.__name__}_{number}"] = test


def _by_hand(model, x, y, loss, jit_compile=False):
    """`fit` beside a loop over its two micro-batches, where tf_keras's `fit` cannot be compared
    with.
    """

    @tf.function(jit_compile=jit_compile)
    def loss_and_gradients(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        return value, tape.gradient(value, model.trainable_variables)

    def theirs():
        halves = [
            tf.nest.map_structure(lambda a, i=i: a[i : i + ROWS // 2], (x, y))
            for i in (0, ROWS // 2)
        ]
        values, gradients = zip(*(loss_and_gradients(*half) for half in halves), strict=True)
        means = [(a + b) / 2.0 for a, b in zip(*gradients, strict=True)]
        tf_keras.optimizers.SGD(0.1).apply_gradients(
            zip(means, model.trainable_variables, strict=True)
        )
        return {"loss": float(sum(values)) / 2.0}

    def ours():
        trainer = fa.Trainer(
            model, tf_keras.optimizers.SGD(0.1), loss, gradient_accumulation_steps=2
        )
        return {
            "loss": trainer.fit(x, y, batch_size=ROWS // 2, shuffle=False, verbose=0).history[
                "loss"
            ][0]
        }

    return Steps(model.trainable_variables, ours, theirs, by_train_step=False)


# Layers and activations


@addon(
    "activations: gelu, hardshrink, lisht, mish, rrelu, snake, softshrink, sparsemax, tanhshrink",
    quick=True,
)
def test_activations():
    inputs = tf_keras.Input((6,))
    h = KERAS.Dense(8)(inputs)
    names = (
        "gelu",
        "hardshrink",
        "lisht",
        "mish",
        "snake",
        "softshrink",
        "sparsemax",
        "tanhshrink",
    )
    functions = [getattr(tfa.activations, name) for name in names]
    # bounds that leave nothing to chance
    functions.append(lambda x: tfa.activations.rrelu(x, 0.2, 0.2))
    h = KERAS.Concatenate()([KERAS.Activation(function)(h) for function in functions])
    x, y = points()
    return Case(tf_keras.Model(inputs, KERAS.Dense(3)(h)), x, y, loss=cross_entropy())


@addon("GELU, Snake, Sparsemax, TLU, Maxout, PoincareNormalize, PolynomialCrossing", quick=True)
def test_dense_layers():
    inputs = tf_keras.Input((6,))
    h = tfa.layers.PoincareNormalize()(tfa.layers.Snake()(KERAS.Dense(8)(inputs)))
    h = tfa.layers.Maxout(4)(KERAS.Dense(8)(tfa.layers.GELU()(h)))
    h = KERAS.Reshape((4,))(tfa.layers.TLU()(KERAS.Reshape((1, 1, 4))(h)))
    h = tfa.layers.PolynomialCrossing()([KERAS.Dense(4)(inputs), h])
    h = KERAS.Concatenate()([h, tfa.layers.Sparsemax()(h)])
    x, y = points()
    return Case(tf_keras.Model(inputs, KERAS.Dense(3)(h)), x, y, loss=cross_entropy())


@addon(
    "AdaptiveAveragePooling1D, AdaptiveAveragePooling2D, AdaptiveAveragePooling3D, "
    "AdaptiveMaxPooling1D, AdaptiveMaxPooling2D, SpatialPyramidPooling2D",
    quick=True,
)
def test_pooling():
    inputs, layers = tf_keras.Input((4, 4, 4, 2)), tfa.layers
    h = KERAS.Conv3D(3, 1)(inputs)
    images, sequence = KERAS.Reshape((16, 4, 3))(h), KERAS.Reshape((64, 3))(h)
    pooled = [
        layers.AdaptiveAveragePooling3D(2)(h),
        *(
            kind(2)(images)
            for kind in (layers.AdaptiveAveragePooling2D, layers.AdaptiveMaxPooling2D)
        ),
        *(
            kind(2)(sequence)
            for kind in (layers.AdaptiveAveragePooling1D, layers.AdaptiveMaxPooling1D)
        ),
        layers.SpatialPyramidPooling2D([1, 2])(images),
    ]
    h = KERAS.Concatenate()([KERAS.Flatten()(each) for each in pooled])
    model = tf_keras.Model(inputs, KERAS.Dense(3)(h))
    return Case(model, random(4, 4, 4, 2), points()[1], loss=cross_entropy())


@addon(
    "AdaptiveMaxPooling3D",
    note="TensorFlow has its gradient under XLA alone: compared with a compiled loop by hand.",
    quick=True,
)
def test_max_pooling_3d():
    model = tf_keras.Sequential([tf_keras.Input((4, 4, 4, 2)), KERAS.Conv3D(3, 1)])
    for layer in (tfa.layers.AdaptiveMaxPooling3D(2), KERAS.Flatten(), KERAS.Dense(3)):
        model.add(layer)
    return _by_hand(model, random(4, 4, 4, 2), points()[1], cross_entropy(), jit_compile=True)


class _Unpooled(tf_keras.Model):
    """Max pooling and back, in both ways."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = KERAS.Conv2D(3, 1), KERAS.Dense(3)
        self.unpool = tfa.layers.MaxUnpooling2D()

    def call(self, x):
        h = self.conv(x)
        pooled, at = tf.nn.max_pool_with_argmax(h, 2, 2, "SAME")
        v2 = tfa.layers.MaxUnpooling2DV2([x.shape[0], 4, 4, 3])
        return self.head(tf.reshape(self.unpool(pooled, at) * v2(pooled, at), [-1, 48]))


@addon(
    "MaxUnpooling2D, MaxUnpooling2DV2: jit_compile=False",
    note="XLA has no MaxPoolWithArgmax, whose places they take.",
    quick=True,
)
def test_unpooling():
    return Case(_Unpooled(), random(4, 4, 2), points()[1], loss=cross_entropy(), jit_compile=False)


@addon("WeightNormalization", quick=True)
def test_weight_normalization():
    return on_points(tfa.layers.WeightNormalization(KERAS.Dense(8, "relu"), data_init=False))


@addon("SpectralNormalization", quick=True)
def test_spectral_normalization():
    x, y = points()
    model = classifier(tfa.layers.SpectralNormalization(KERAS.Dense(8, "relu")))
    return Case(model, x, y, loss=cross_entropy(), by_micro_batch=True)


@addon(
    "GroupNormalization, InstanceNormalization, FilterResponseNormalization",
    tolerance=1e-4,
    note="The largest error is in biases before InstanceNormalization. Their exact gradient is 0; both steps "
    "compute rounding errors of 1e-9.",
    quick=True,
)
def test_normalizations():
    return on(
        (8, 8, 3),
        KERAS.Conv2D(8, 3, padding="same"),
        tfa.layers.GroupNormalization(4),
        tfa.layers.InstanceNormalization(),
        tfa.layers.FilterResponseNormalization(),
        KERAS.ReLU(),
        KERAS.GlobalAveragePooling2D(),
    )


@addon("MultiHeadAttention", quick=True)
def test_attention():
    inputs = tf_keras.Input((5, 6))
    h = tfa.layers.MultiHeadAttention(head_size=4, num_heads=2)([inputs, inputs, inputs])
    h = KERAS.GlobalAveragePooling1D()(KERAS.LayerNormalization()(h + inputs))
    model = tf_keras.Model(inputs, KERAS.Dense(3)(h))
    return Case(model, random(5, 6), points()[1], loss=cross_entropy())


@addon(
    "StochasticDepth, NoisyDense", note="The first with a survival probability of 1.", quick=True
)
def test_noise():
    inputs = tf_keras.Input((6,))
    h = tfa.layers.StochasticDepth(1.0)([inputs, KERAS.Dense(6)(inputs)])
    h = tfa.layers.NoisyDense(8, activation="relu")(h)
    x, y = points()
    return Case(tf_keras.Model(inputs, KERAS.Dense(3)(h)), x, y, loss=cross_entropy())


@addon("ESN, ESNCell", quick=True)
def test_echo_state():
    return on((5, 4), KERAS.RNN(tfa.rnn.ESNCell(6), return_sequences=True), tfa.layers.ESN(5))


@addon("NASCell, LayerNormLSTMCell, LayerNormSimpleRNNCell, PeepholeLSTMCell", quick=True)
def test_cells():
    kinds = (
        tfa.rnn.LayerNormLSTMCell,
        tfa.rnn.NASCell,
        tfa.rnn.LayerNormSimpleRNNCell,
        tfa.rnn.PeepholeLSTMCell,
    )
    return on((4, 4), *(KERAS.RNN(kind(6), return_sequences=True) for kind in kinds))


@addon(
    "EmbeddingBag",
    refused="_embedding_bag_ops.so was compiled for TensorFlow 2.15",
    why="It needs an operation that no current TensorFlow can load.",
    quick=True,
)
def test_embedding_bag():
    model = tf_keras.Sequential([tfa.layers.EmbeddingBag(20, 4), KERAS.Dense(3)])
    return Case(model, np.arange(16).reshape(8, 2), points()[1], loss=cross_entropy())


class _Correlated(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.cost, self.head = (
            tfa.layers.CorrelationCost(1, 1, 1, 1, 1, "channels_last"),
            KERAS.Dense(3),
        )

    def call(self, x):
        return self.head(KERAS.Flatten()(self.cost([x, x])))


@addon(
    "CorrelationCost",
    refused="_correlation_cost_ops.so was compiled for TensorFlow 2.15",
    why="It needs an operation that no current TensorFlow can load.",
    quick=True,
)
def test_correlation_cost():
    return Case(_Correlated(), random(4, 4, 2), points()[1], loss=cross_entropy())


# Losses


def _regression(loss, **arguments):
    x, _ = points()
    model = tf_keras.Sequential([tf_keras.Input((6,)), KERAS.Dense(8, "tanh"), KERAS.Dense(1)])
    return Case(model, x, x[:, :1] ** 2, loss=loss, **arguments)


@addon("PinballLoss", quick=True)
def test_pinball():
    return _regression(tfa.losses.PinballLoss(0.8))


@addon("SigmoidFocalCrossEntropy with a reduction", quick=True)
def test_focal():
    x, y = points()
    loss = tfa.losses.SigmoidFocalCrossEntropy(reduction="sum_over_batch_size")
    return Case(classifier(KERAS.Activation("sigmoid")), x, one_hot(y), loss=loss, micro_batches=4)


@addon(
    "SigmoidFocalCrossEntropy() as its documentation has it",
    refused="reduction=None, which leaves no scalar",
    why="Pass a reduction. The default adds up the rows, so the update would grow with the batch.",
)
def test_focal_without_reduction():
    x, y = points()
    return Case(
        classifier(KERAS.Activation("sigmoid")),
        x,
        one_hot(y),
        loss=tfa.losses.SigmoidFocalCrossEntropy(),
    )


@addon("SparsemaxLoss", quick=True)
def test_sparsemax_loss():
    x, y = points()
    return Case(classifier(), x, one_hot(y), loss=tfa.losses.SparsemaxLoss())


@addon("GIoULoss of boxes", quick=True)
def test_giou():
    x, _ = points()
    boxes = np.concatenate([np.minimum(x[:, :2], x[:, 2:4]), np.maximum(x[:, :2], x[:, 2:4])], 1)
    model = tf_keras.Sequential([tf_keras.Input((6,)), KERAS.Dense(4)])
    return Case(model, x, boxes, loss=tfa.losses.GIoULoss())


@addon("ContrastiveLoss of distances", quick=True)
def test_contrastive():
    x, y = points()
    a, b = tf_keras.Input((3,)), tf_keras.Input((3,))
    embed = KERAS.Dense(4)
    distance = KERAS.Lambda(lambda ab: tf.norm(ab[0] - ab[1], axis=1))([embed(a), embed(b)])
    model = tf_keras.Model([a, b], distance)
    return Case(
        model, [x[:, :3], x[:, 3:]], (y > 0).astype("float32"), loss=tfa.losses.ContrastiveLoss()
    )


def _comparing_rows(make):
    """Four rows in a micro-batch, and as many outputs: N-pairs losses take the similarities of
    rows.

    NpairsLoss is NaN in tf_keras's own step, which gives labels an axis more.
    """
    x, y = points()
    loss = make()
    if isinstance(loss, (tfa.losses.NpairsMultilabelLoss, tfa.losses.WeightedKappaLoss)):
        y = np.eye(4, dtype="float32")[y]
    model = tf_keras.Sequential([tf_keras.Input((6,)), KERAS.Dense(4, "softmax")])
    return Case(model, x, y, loss=loss, by_micro_batch=True)


_rows(
    _comparing_rows,
    {
        "TripletSemiHardLoss": lambda: tfa.losses.TripletSemiHardLoss(),
        "TripletHardLoss": lambda: tfa.losses.TripletHardLoss(),
        "LiftedStructLoss": lambda: tfa.losses.LiftedStructLoss(),
        "NpairsMultilabelLoss": lambda: tfa.losses.NpairsMultilabelLoss(),
        "WeightedKappaLoss": lambda: tfa.losses.WeightedKappaLoss(4),
    },
    quick={"TripletSemiHardLoss"},
    note="It compares the rows of each micro-batch, and a warning says so.",
)


# Metrics


@addon(
    "F1Score, FBetaScore, HammingLoss, MatthewsCorrelationCoefficient, MeanMetricWrapper, "
    "MultiLabelConfusionMatrix",
    quick=True,
)
def test_metrics_of_classes():
    x, y = points()
    model = classifier(KERAS.Dense(8, "relu"))
    model.add(KERAS.Activation("sigmoid"))
    metrics = [
        tfa.metrics.F1Score(3, average="macro"),
        tfa.metrics.FBetaScore(3, average="micro", beta=0.5),
        tfa.metrics.HammingLoss(mode="multilabel", threshold=0.6),
        tfa.metrics.MatthewsCorrelationCoefficient(3),
        tfa.metrics.MeanMetricWrapper(tf_keras.losses.mean_squared_error),
        tfa.metrics.MultiLabelConfusionMatrix(3),
    ]
    return Case(model, x, one_hot(y), loss="binary_crossentropy", metrics=metrics, micro_batches=4)


@addon("RSquare", quick=True)
def test_r_square():
    return _regression("mse", metrics=[tfa.metrics.RSquare()])


@addon(
    "PearsonsCorrelation, SpearmansRank, KendallsTauB, KendallsTauC: jit_compile=False", quick=True
)
def test_correlations():
    kinds = ("PearsonsCorrelation", "SpearmansRank", "KendallsTauB", "KendallsTauC")
    metrics = [
        getattr(tfa.metrics, kind)(actual_min=0.0, actual_max=10.0, preds_min=-5.0, preds_max=5.0)
        for kind in kinds
    ]
    return _regression("mse", metrics=metrics, jit_compile=False)


@addon("CohenKappa, which branches by a rank: jit_compile=False", quick=True)
def test_cohen_kappa():
    x, y = points()
    kappa = tfa.metrics.CohenKappa(3, sparse_labels=True)
    return Case(classifier(), x, y, loss=cross_entropy(), metrics=[kappa], jit_compile=False)


class _WithMeans(tf_keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight):
        for metric in self.means:
            metric.update_state(tf.abs(y_pred[:, 0]) + 1.0)
        return super().compute_metrics(x, y, y_pred, sample_weight)


@addon("GeometricMean, HarmonicMean in a model's compute_metrics", quick=True)
def test_means():
    x, y = points()
    model = _WithMeans([tf_keras.Input((6,)), KERAS.Dense(3)])
    model.means = [tfa.metrics.GeometricMean(), tfa.metrics.HarmonicMean()]
    return Case(model, x, y, loss=cross_entropy())


# Optimizers and learning rates


def _with(make):
    x, y = points()
    return Case(classifier(), x, y, loss=cross_entropy(), optimizer=make, micro_batches=4)


OPTIMIZERS = {
    "AdaBelief": lambda: tfa.optimizers.AdaBelief(0.1, epsilon=0.1),
    "AdamW": lambda: tfa.optimizers.AdamW(0.01, 0.1, epsilon=0.1),
    "COCOB": lambda: tfa.optimizers.COCOB(),
    "ConditionalGradient": lambda: tfa.optimizers.ConditionalGradient(0.9, lambda_=1.0),
    "DecoupledWeightDecayExtension by extend_with_decoupled_weight_decay": lambda: (
        tfa.optimizers.extend_with_decoupled_weight_decay(tf_keras.optimizers.legacy.SGD)(
            0.01, learning_rate=0.1
        )
    ),
    "LAMB": lambda: tfa.optimizers.LAMB(
        0.1, weight_decay=0.01, epsilon=0.1, exclude_from_weight_decay=["bias"]
    ),
    "LazyAdam": lambda: tfa.optimizers.LazyAdam(0.1, epsilon=0.1),
    "Lookahead of RectifiedAdam (Ranger)": lambda: tfa.optimizers.Lookahead(
        tfa.optimizers.RectifiedAdam(0.1, epsilon=0.1), sync_period=1
    ),
    "MovingAverage of AdamW with decay by a schedule": lambda: tfa.optimizers.MovingAverage(
        tfa.optimizers.AdamW(
            tf_keras.optimizers.schedules.CosineDecay(0.1, 10), learning_rate=0.1, epsilon=0.1
        )
    ),
    "NovoGrad": lambda: tfa.optimizers.NovoGrad(0.1),
    "ProximalAdagrad": lambda: tfa.optimizers.ProximalAdagrad(0.1, l1_regularization_strength=0.01),
    "RectifiedAdam": lambda: tfa.optimizers.RectifiedAdam(
        0.1, epsilon=0.1, total_steps=10, warmup_proportion=0.1
    ),
    "SGDW": lambda: tfa.optimizers.SGDW(0.01, 0.1, momentum=0.9),
    "SWA of SGD": lambda: tfa.optimizers.SWA(
        tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9), start_averaging=0
    ),
    "Yogi": lambda: tfa.optimizers.Yogi(0.1),
    "CyclicalLearningRate": lambda: tf_keras.optimizers.legacy.SGD(
        tfa.optimizers.CyclicalLearningRate(0.01, 0.1, step_size=5, scale_fn=lambda x: 1.0)
    ),
    "TriangularCyclicalLearningRate": lambda: tf_keras.optimizers.legacy.SGD(
        tfa.optimizers.TriangularCyclicalLearningRate(0.01, 0.1, step_size=5)
    ),
    "Triangular2CyclicalLearningRate": lambda: tf_keras.optimizers.legacy.SGD(
        tfa.optimizers.Triangular2CyclicalLearningRate(0.01, 0.1, step_size=5)
    ),
    "ExponentialCyclicalLearningRate": lambda: tf_keras.optimizers.legacy.SGD(
        tfa.optimizers.ExponentialCyclicalLearningRate(0.01, 0.1, step_size=5)
    ),
}


# The others are among tests/adapters/test_optimizers.py's.
_rows(
    _with,
    OPTIMIZERS,
    quick={"ConditionalGradient", "ProximalAdagrad", "ExponentialCyclicalLearningRate"},
)


@addon(
    "MultiOptimizer",
    refused="use keras.optimizers.MultiOptimizer, or one optimizer",
    why="Keras's has an optimizer for each layer, too.",
    quick=True,
)
def test_multi_optimizer():
    case = on_points(KERAS.Dense(8, "relu"))
    sgd = tf_keras.optimizers.legacy.SGD
    case.optimizer = lambda: tfa.optimizers.MultiOptimizer(
        [(sgd(0.1), layer) for layer in case.model.layers]
    )
    return case


# Callbacks


@addon("callbacks: AverageModelCheckpoint, TimeStopping, TQDMProgressBar", quick=True)
def test_callbacks():
    folder = tempfile.TemporaryDirectory()
    callbacks = [
        tfa.callbacks.AverageModelCheckpoint(False, f"{folder.name}/averages.keras"),
        tfa.callbacks.TimeStopping(3600),
        tfa.callbacks.TQDMProgressBar(),
    ]
    case = _with(lambda: tfa.optimizers.MovingAverage(tf_keras.optimizers.legacy.SGD(0.1)))
    case.fit, case.folder = {"callbacks": callbacks}, folder  # which is removed with the case
    return case


# Text and sequences


def _tagger():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 6, ROWS)
    ids = rng.integers(1, 20, (ROWS, 5)) * (np.arange(5) < lengths[:, None])
    inputs = tf_keras.Input((5,), dtype="int32")
    return (
        inputs,
        KERAS.Dense(6, "tanh")(KERAS.Embedding(20, 6, mask_zero=True)(inputs)),
        ids,
        ids % 3,
    )


@addon(
    "CRFModelWrapper, which has a train_step of its own",
    refused="CRFModelWrapper",
    why="Use TrainStep with crf_log_likelihood. See the next row.",
)
def test_crf_wrapper():
    inputs, h, ids, tags = _tagger()
    return Case(tfa.text.CRFModelWrapper(tf_keras.Model(inputs, h), 3), ids, tags)


@addon(
    "CRF, and CrfDecodeForwardRnnCell within it, with crf_log_likelihood: jit_compile=False",
    note="XLA cannot compile its `tf.cond` for sentences of a single word.",
    quick=True,
)
def test_crf():
    inputs, h, ids, tags = _tagger()
    model = tf_keras.Model(inputs, tfa.layers.CRF(3, name="crf")(h))
    variables = model.trainable_variables

    def losses(ids, tags):
        _, potentials, lengths, transitions = model(ids)
        return -tfa.text.crf_log_likelihood(potentials, tags, lengths, transitions)[0]

    def theirs():
        optimizer = tf_keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(tf.constant(ids), tf.constant(tags)))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": float(loss)}

    def ours():
        def loss_fn(batch):
            return tf.reduce_sum(losses(*batch)), tf.constant(ROWS / 2)

        step = fa.TrainStep(loss_fn, variables, tf_keras.optimizers.SGD(0.1), jit_compile=False)
        return {"loss": float(step(tuple(a.reshape(2, ROWS // 2, 5) for a in (ids, tags))).loss)}

    return Steps(variables, ours, theirs)


class _Translator(tf_keras.Model):
    """A decoder that reads what an encoder wrote, with teacher forcing; returns the logits of each
    position.
    """

    def __init__(self, mechanism, make_sampler):
        super().__init__()
        self.embedding, self.encoder = (
            KERAS.Embedding(12, 6),
            KERAS.LSTM(6, return_sequences=True, return_state=True),
        )
        self.attention, self.head = mechanism, KERAS.Dense(12)
        self.cell = tfa.seq2seq.AttentionWrapper(
            KERAS.LSTMCell(6), mechanism, attention_layer_size=6
        )
        self.decoder = tfa.seq2seq.BasicDecoder(self.cell, make_sampler(self), self.head)

    def initial_state(self, x, beams=1):
        memory, *state = tfa.seq2seq.tile_batch(self.encoder(self.embedding(x)), beams)
        self.attention.setup_memory(memory)
        initial = self.cell.get_initial_state(batch_size=tf.shape(memory)[0], dtype=tf.float32)
        return initial.clone(cell_state=state)

    def call(self, x, training=None):
        targets, lengths = self.embedding(tf.roll(x, 1, 1)), tf.fill([tf.shape(x)[0]], x.shape[1])
        initial = self.initial_state(x)
        outputs, _, _ = self.decoder(
            targets, initial_state=initial, sequence_length=lengths, training=training
        )
        return tf.ensure_shape(outputs.rnn_output, [None, x.shape[1], 12])


SEQUENCES = np.random.default_rng(0).integers(1, 12, (ROWS, 5))


def _translation(
    mechanism=tfa.seq2seq.LuongAttention, make_sampler=lambda _: tfa.seq2seq.TrainingSampler()
):
    model = _Translator(mechanism(6), make_sampler)
    return Case(
        model, SEQUENCES, SEQUENCES[:, ::-1].copy(), loss=cross_entropy(), jit_compile=False
    )


_rows(
    _translation,
    {
        f"AttentionWrapper, BasicDecoder and TrainingSampler with {kind}: jit_compile=False": getattr(
            tfa.seq2seq, kind
        )
        for kind in (
            "BahdanauAttention",
            "BahdanauMonotonicAttention",
            "LuongAttention",
            "LuongMonotonicAttention",
        )
    },
)


SAMPLERS = {
    "ScheduledEmbeddingTrainingSampler": lambda m: tfa.seq2seq.ScheduledEmbeddingTrainingSampler(
        0.0, m.embedding
    ),
    "ScheduledOutputTrainingSampler": lambda _: tfa.seq2seq.ScheduledOutputTrainingSampler(
        0.0, next_inputs_fn=lambda logits: logits[:, :6]
    ),
}


def _sampled(make_sampler):
    return _translation(make_sampler=make_sampler)


_rows(
    _sampled,
    {f"{name} with a probability of 0: jit_compile=False": make for name, make in SAMPLERS.items()},
)


@addon(
    "SequenceLoss",
    refused="SequenceLoss, whose __call__ SequenceLoss overrides",
    why='Use keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight").',
)
def test_sequence_loss():
    case = _translation()
    case.loss = tfa.seq2seq.SequenceLoss()
    return case


def _decoded(model, decode):
    """Sums of the ids that `decode` gives."""
    start, end = tf.fill([ROWS], 1), tf.constant(0)
    return {"ids": float(tf.reduce_sum(decode(model, start, end)))}


def _by_beams(model, start, end):
    decoder = tfa.seq2seq.BeamSearchDecoder(
        model.cell, 2, model.embedding, model.head, maximum_iterations=4
    )
    initial = model.initial_state(SEQUENCES, 2)
    return decoder(None, start_tokens=start, end_token=end, initial_state=initial)[0].predicted_ids


def _by_basic_decoder(make_sampler, **arguments):
    def decode(model, start, end):
        decoder = tfa.seq2seq.BasicDecoder(
            model.cell, make_sampler(model), model.head, maximum_iterations=4
        )
        inputs = model.embedding(start) if arguments else None
        given = {} if arguments else {"start_tokens": start, "end_token": end}
        outputs = decoder(inputs, initial_state=model.initial_state(SEQUENCES), **given)[0]
        return tf.argmax(outputs.rnn_output, -1)

    return decode


def _inference(model):
    def next_inputs(ids):
        return model.embedding(ids)

    return tfa.seq2seq.InferenceSampler(
        lambda outputs: tf.argmax(outputs, -1, tf.int32),
        [],
        tf.int32,
        lambda ids: ids == 0,
        next_inputs,
    )


def _custom(model):
    def sample(time, outputs, state):
        return tf.argmax(outputs, -1, tf.int32)

    def following(time, outputs, state, sample_ids):
        return tf.fill([ROWS], time > 2), model.embedding(sample_ids), state

    def begin(inputs, **_):
        return tf.fill([ROWS], False), inputs

    return tfa.seq2seq.CustomSampler(begin, sample, following)


DECODERS = {
    "BeamSearchDecoder": _by_beams,
    "GreedyEmbeddingSampler": _by_basic_decoder(
        lambda m: tfa.seq2seq.GreedyEmbeddingSampler(m.embedding)
    ),
    "SampleEmbeddingSampler": _by_basic_decoder(
        lambda m: tfa.seq2seq.SampleEmbeddingSampler(m.embedding, 1e-6)
    ),
    "InferenceSampler": _by_basic_decoder(_inference, by_inputs=True),
    "CustomSampler": _by_basic_decoder(_custom, by_inputs=True),
}


def _decoding(decode):
    case = _translation()
    model = case.model
    model(SEQUENCES)

    def theirs():
        model.compile(tf_keras.optimizers.SGD(0.1), case.loss)
        model.fit(case.x, case.y, batch_size=ROWS, shuffle=False, verbose=0)
        return _decoded(model, decode)

    def ours():
        optimizer = tf_keras.optimizers.SGD(0.1)
        trainer = fa.Trainer(
            model, optimizer, case.loss, gradient_accumulation_steps=2, jit_compile=False
        )
        trainer.fit(case.x, case.y, batch_size=ROWS // 2, shuffle=False, verbose=0)
        return _decoded(model, decode)

    return Steps(model.trainable_variables, ours, theirs, by_train_step=False)


_rows(
    _decoding,
    {f"{name}, of a model that fit trained": decode for name, decode in DECODERS.items()},
    quick={"BeamSearchDecoder, of a model that fit trained"},
)


# What the classes in rows are made of, or return.
PARTS = {
    *(
        "AttentionMechanism",
        "AttentionWrapperState",
        "BaseDecoder",
        "BasicDecoderOutput",
        "BeamSearchDecoderOutput",
    ),
    *("BeamSearchDecoderState", "Decoder", "FinalBeamSearchDecoderOutput", "Sampler"),
    *("AveragedOptimizerWrapper", "KerasLegacyOptimizer"),
}


@pytest.mark.zoo
@pytest.mark.sample
def test_every_public_class_has_a_row():
    modules = (
        getattr(tfa, name)
        for name in ("callbacks", "layers", "losses", "metrics", "rnn", "seq2seq", "text")
    )
    found = {
        name
        for module in (*modules, tfa.optimizers)
        for name, _ in inspect.getmembers(module, inspect.isclass)
    }
    assert len(found) > 90 and found - NAMED == PARTS
