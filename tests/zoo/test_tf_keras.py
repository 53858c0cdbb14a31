"""tf_keras (Keras 2): its applications and idioms, and tensorflow-addons' layers, losses, metrics and optimizers."""

import numpy as np
import tensorflow as tf
import tf_keras
from zoo import Case, Steps, row

import fastaccum as fa

tfa = fa.addons
FAMILY = "tf_keras"
ADDONS = "tensorflow-addons"
ROWS = 10


def points(units=6, rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, units)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0.5)


def images(rows=ROWS, size=8, channels=3):
    return np.random.default_rng(0).normal(size=(rows, size, size, channels)).astype("float32")


def classifier(*layers, units=6):
    return tf_keras.Sequential([tf_keras.Input((units,)), *layers, tf_keras.layers.Dense(3)])


def on_images(*layers):
    return tf_keras.Sequential(
        [
            tf_keras.Input((8, 8, 3)),
            tf_keras.layers.Conv2D(8, 3, padding="same"),
            *layers,
            tf_keras.layers.ReLU(),
            tf_keras.layers.GlobalAveragePooling2D(),
            tf_keras.layers.Dense(3),
        ]
    )


def cross_entropy():
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@row(
    FAMILY,
    "MobileNet: batch statistics",
    tolerance=1e-3,
    note="Our step differs from float64 by 3e-4, Keras's by 6e-5. Where an input of ReLU6 is within 1e-7 of "
    "its kink, the steps may take different sides, and a kernel's update then differs by 6e-2.",
)
def test_mobilenet():
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, dropout=0.0, weights=None, classes=3, classifier_activation=None
    )
    _, y = points(rows=16)
    return Case(model, images(16, 32), y[:, None], loss=cross_entropy(), metrics=["accuracy"], by_micro_batch=True)


@row(FAMILY, "VGG16's first blocks with a new head, the blocks frozen")
def test_vgg_transfer():
    base = tf_keras.applications.VGG16(include_top=False, weights=None, input_shape=(32, 32, 3))
    base = tf_keras.Model(base.input, base.get_layer("block2_pool").output)
    base.trainable = False
    model = tf_keras.Sequential([base, tf_keras.layers.GlobalMaxPooling2D(), tf_keras.layers.Dense(3)])
    _, y = points()
    return Case(model, 10 * images(ROWS, 32), y, loss=cross_entropy(), metrics=["accuracy"])


@row(FAMILY, "Embedding with a mask, Bidirectional LSTM, weights per token", mixed=True)
def test_tagger():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 20, (ROWS, 7)) * (np.arange(7) < rng.integers(1, 8, ROWS)[:, None])
    model = tf_keras.Sequential(
        [
            tf_keras.Input((7,), dtype="int32"),
            tf_keras.layers.Embedding(20, 8, mask_zero=True),
            tf_keras.layers.Bidirectional(tf_keras.layers.LSTM(6, return_sequences=True)),
            tf_keras.layers.TimeDistributed(tf_keras.layers.Dense(4)),
        ]
    )
    weights = rng.random((ROWS, 7)).astype("float32")
    return Case(model, ids, ids % 4, weights, loss=cross_entropy(), weighted_metrics=["accuracy"], micro_batches=4)


@row(FAMILY, "Two outputs with losses by name, loss_weights, class indices beside a regression", quick=True)
def test_two_outputs():
    x, y = points()
    inputs = tf_keras.Input((6,))
    h = tf_keras.layers.Dense(8, "relu", kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    outputs = {
        "kind": tf_keras.layers.Dense(3, name="kind")(h),
        "size": tf_keras.layers.Dense(1, name="size")(h),
    }
    return Case(
        tf_keras.Model(inputs, outputs),
        x,
        {"kind": y, "size": x[:, :1]},
        loss={"kind": cross_entropy(), "size": "huber"},
        loss_weights={"kind": 1.0, "size": 0.25},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        micro_batches=4,
    )


@row(FAMILY, "SpectralNormalization: a kernel that the forward pass assigns")
def test_spectral_normalization():
    x, y = points()
    model = classifier(tf_keras.layers.SpectralNormalization(tf_keras.layers.Dense(8)), tf_keras.layers.ReLU())
    return Case(model, x, y, loss=cross_entropy(), by_micro_batch=True)


@row(
    FAMILY,
    "SharpnessAwareMinimization, which has a train_step of its own",
    refused="SharpnessAwareMinimization",
    why="It takes a second gradient at other weights, which a sum over micro-batches is not.",
)
def test_sharpness_aware_minimization():
    x, y = points()
    model = tf_keras.models.experimental.SharpnessAwareMinimization(classifier(tf_keras.layers.Dense(8, "relu")))
    return Case(model, x, y, loss=cross_entropy())


@row(
    FAMILY,
    "WideDeepModel with an optimizer for each part",
    refused="WideDeepModel",
    why="Use a plain tf_keras.Model that adds the parts' outputs, with one optimizer or tensorflow-addons' "
    "MultiOptimizer.",
)
def test_wide_and_deep():
    x, _ = points()
    model = tf_keras.experimental.WideDeepModel(
        tf_keras.experimental.LinearModel(), tf_keras.Sequential([tf_keras.layers.Dense(1)])
    )
    return Case(model, x, x[:, :1], loss="mse")


@row(FAMILY, "LinearModel, and AdamW with ema and a warm-up schedule of one's own")
def test_linear_model():
    class WarmUp(tf_keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1.0) / 10.0)

    x, _ = points()
    return Case(
        tf_keras.experimental.LinearModel(),
        x,
        x[:, :1],
        loss="mse",
        optimizer=lambda: tf_keras.optimizers.AdamW(WarmUp(), weight_decay=0.1, use_ema=True, epsilon=1e-3),
    )


@row(ADDONS, "WeightNormalization")
def test_weight_normalization():
    x, y = points()
    model = classifier(
        tfa.layers.WeightNormalization(tf_keras.layers.Dense(8, "relu"), data_init=False),
        tfa.layers.Maxout(4),
    )
    return Case(model, x, y, loss=cross_entropy(), metrics=["accuracy"], micro_batches=4)


@row(ADDONS, "SpectralNormalization")
def test_addons_spectral_normalization():
    x, y = points()
    model = classifier(tfa.layers.SpectralNormalization(tf_keras.layers.Dense(8, "relu")))
    return Case(model, x, y, loss=cross_entropy(), by_micro_batch=True)


@row(
    ADDONS,
    "GroupNormalization, InstanceNormalization, FilterResponseNormalization",
    tolerance=1e-4,
    note="The largest error is in biases before InstanceNormalization. Their exact gradient is 0; both steps "
    "compute rounding errors of 1e-9.",
    quick=True,
)
def test_normalizations():
    _, y = points()
    model = on_images(
        tfa.layers.GroupNormalization(4),
        tfa.layers.InstanceNormalization(),
        tfa.layers.FilterResponseNormalization(),
        tfa.layers.TLU(),
    )
    return Case(model, images(), y, loss=cross_entropy(), micro_batches=4)


@row(ADDONS, "LayerNormLSTMCell and NASCell")
def test_cells():
    rng = np.random.default_rng(0)
    x, (_, y) = rng.normal(size=(ROWS, 5, 4)).astype("float32"), points()
    model = tf_keras.Sequential(
        [
            tf_keras.Input((5, 4)),
            tf_keras.layers.RNN(tfa.rnn.LayerNormLSTMCell(6), return_sequences=True),
            tf_keras.layers.RNN(tfa.rnn.NASCell(6)),
            tf_keras.layers.Dense(3),
        ]
    )
    return Case(model, x, y, loss=cross_entropy())


@row(ADDONS, "MultiHeadAttention")
def test_attention():
    rng = np.random.default_rng(0)
    x, (_, y) = rng.normal(size=(ROWS, 5, 6)).astype("float32"), points()
    inputs = tf_keras.Input((5, 6))
    h = tfa.layers.MultiHeadAttention(head_size=4, num_heads=2)([inputs, inputs, inputs])
    h = tf_keras.layers.GlobalAveragePooling1D()(tf_keras.layers.LayerNormalization()(h + inputs))
    return Case(tf_keras.Model(inputs, tf_keras.layers.Dense(3)(h)), x, y, loss=cross_entropy())


@row(ADDONS, "SigmoidFocalCrossEntropy, F1Score, MatthewsCorrelationCoefficient", quick=True)
def test_focal():
    x, y = points()
    model = tf_keras.Sequential(
        [tf_keras.Input((6,)), tf_keras.layers.Dense(8, "relu"), tf_keras.layers.Dense(3, "sigmoid")]
    )
    metrics = [
        tfa.metrics.F1Score(3, average="macro"),
        tfa.metrics.MatthewsCorrelationCoefficient(3),
    ]
    loss = tfa.losses.SigmoidFocalCrossEntropy(reduction="sum_over_batch_size")
    return Case(model, x, np.eye(3, dtype="float32")[y], loss=loss, metrics=metrics, micro_batches=4)


@row(ADDONS, "CohenKappa, which branches by a rank: jit_compile=False")
def test_cohen_kappa():
    x, y = points()
    model, kappa = classifier(), tfa.metrics.CohenKappa(3, sparse_labels=True)
    return Case(model, x, y, loss=cross_entropy(), metrics=[kappa], jit_compile=False)


@row(
    ADDONS,
    "SigmoidFocalCrossEntropy() as its documentation has it",
    refused="reduction=None, which leaves no scalar",
    why="Pass a reduction. The default adds up the rows, so the update would grow with the batch.",
)
def test_focal_without_reduction():
    x, y = points()
    model = classifier(tf_keras.layers.Activation("sigmoid"))
    return Case(model, x, np.eye(3, dtype="float32")[y], loss=tfa.losses.SigmoidFocalCrossEntropy())


@row(ADDONS, "PinballLoss, RSquare", quick=True)
def test_pinball():
    x, _ = points()
    model = tf_keras.Sequential([tf_keras.Input((6,)), tf_keras.layers.Dense(8, "tanh"), tf_keras.layers.Dense(1)])
    return Case(model, x, x[:, :1] ** 2, loss=tfa.losses.PinballLoss(0.8), metrics=[tfa.metrics.RSquare()])


@row(ADDONS, "ContrastiveLoss of distances", quick=True)
def test_contrastive():
    x, y = points()
    a, b = tf_keras.Input((3,)), tf_keras.Input((3,))
    embed = tf_keras.layers.Dense(4)
    distance = tf_keras.layers.Lambda(lambda ab: tf.norm(ab[0] - ab[1], axis=1))([embed(a), embed(b)])
    model = tf_keras.Model([a, b], distance)
    return Case(model, [x[:, :3], x[:, 3:]], (y > 0).astype("float32"), loss=tfa.losses.ContrastiveLoss())


@row(
    ADDONS,
    "TripletSemiHardLoss",
    refused="TripletSemiHardLoss, which compares the rows",
    why="It compares the rows of a batch with each other.",
)
def test_triplet():
    x, y = points()
    model = classifier(tf_keras.layers.Lambda(lambda t: tf.math.l2_normalize(t, axis=1)))
    return Case(model, x, y, loss=tfa.losses.TripletSemiHardLoss())


@row(
    ADDONS,
    "WeightedKappaLoss",
    refused="WeightedKappaLoss, which compares the rows",
    why="It compares the rows of a batch with each other.",
)
def test_kappa():
    x, y = points()
    model = classifier(tf_keras.layers.Softmax())
    return Case(model, x, np.eye(3, dtype="float32")[y], loss=tfa.losses.WeightedKappaLoss(3))


def _tagger():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 6, ROWS)
    ids = rng.integers(1, 20, (ROWS, 5)) * (np.arange(5) < lengths[:, None])
    inputs = tf_keras.Input((5,), dtype="int32")
    h = tf_keras.layers.Dense(6, "tanh")(tf_keras.layers.Embedding(20, 6, mask_zero=True)(inputs))
    return inputs, h, ids, ids % 3


@row(
    ADDONS,
    "CRFModelWrapper, which has a train_step of its own",
    refused="CRFModelWrapper",
    why="Use TrainStep with crf_log_likelihood. See the next row.",
)
def test_crf_wrapper():
    inputs, h, ids, tags = _tagger()
    return Case(tfa.text.CRFModelWrapper(tf_keras.Model(inputs, h), 3), ids, tags)


@row(ADDONS, "CRF: crf_log_likelihood by TrainStep", quick=True)
def test_crf():
    inputs, h, ids, tags = _tagger()
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(3)(h))
    transitions = tf.Variable(np.random.default_rng(1).normal(size=(3, 3)).astype("float32"))
    variables = [*model.trainable_variables, transitions]

    def losses(ids, tags):
        lengths = tf.reduce_sum(tf.cast(ids > 0, tf.int32), axis=1)
        return -tfa.text.crf_log_likelihood(model(ids), tags, lengths, transitions)[0]

    def theirs():
        optimizer = tf_keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(tf.constant(ids), tf.constant(tags)))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": float(loss)}

    def ours():
        def loss_fn(batch):
            return tf.reduce_sum(losses(*batch)), tf.constant(ROWS / 2)

        # XLA has no form of its tf.cond for sentences of a single word.
        step = fa.TrainStep(loss_fn, variables, tf_keras.optimizers.SGD(0.1), jit_compile=False)
        return {"loss": float(step(tuple(a.reshape(2, ROWS // 2, 5) for a in (ids, tags))).loss)}

    return Steps(variables, ours, theirs)


def _with_optimizer(make):
    x, y = points()
    model = classifier(tf_keras.layers.Dense(8, "relu"))
    return Case(model, x, y, loss=cross_entropy(), optimizer=make, micro_batches=4)


@row(ADDONS, "Ranger: Lookahead of RectifiedAdam", quick=True)
def test_ranger():
    return _with_optimizer(lambda: tfa.optimizers.Lookahead(tfa.optimizers.RectifiedAdam(0.1, epsilon=0.1)))


@row(ADDONS, "MovingAverage of AdamW with decay by a schedule")
def test_moving_average():
    def make():
        schedule = tf_keras.optimizers.schedules.CosineDecay(0.1, 10)
        return tfa.optimizers.MovingAverage(tfa.optimizers.AdamW(weight_decay=schedule, learning_rate=0.1, epsilon=0.1))

    return _with_optimizer(make)


@row(ADDONS, "SWA of SGD on a cyclical learning rate")
def test_swa():
    def make():
        rate = tfa.optimizers.Triangular2CyclicalLearningRate(0.01, 0.1, step_size=5)
        return tfa.optimizers.SWA(tf_keras.optimizers.legacy.SGD(rate, momentum=0.9), start_averaging=0)

    return _with_optimizer(make)


@row(ADDONS, "LAMB without decay of biases")
def test_lamb():
    return _with_optimizer(
        lambda: tfa.optimizers.LAMB(0.1, weight_decay=0.01, epsilon=0.1, exclude_from_weight_decay=["bias"])
    )
