"""The idioms of keras.io's examples: vision and speech."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from zoo import Case, Steps, entry

import fastaccum as fa

FAMILY = "keras.io: vision and speech"
_BIAS_BEFORE_NORM = (
    "Compared with a loop over micro-batches. The largest error is in biases before "
    "BatchNormalization, whose exact gradient is 0 (1e-17 in float64)."
)


def _images(rows, size=8, channels=3, seed=0):
    return np.random.default_rng(seed).random((rows, size, size, channels)).astype("float32")


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        batch_size, height, width, channels = ops.shape(images)
        count = (height // self.patch_size) * (width // self.patch_size)
        patches = ops.image.extract_patches(images, size=self.patch_size)
        return ops.reshape(
            patches, (batch_size, count, self.patch_size * self.patch_size * channels)
        )


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=projection_dim)
        self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(start=0, stop=self.num_patches, step=1), axis=0)
        return self.projection(patch) + self.position_embedding(positions)


def _mlp(x, hidden_units):
    for units in hidden_units:
        x = layers.Dense(units, activation=keras.activations.gelu)(x)
    return x


@entry(
    FAMILY,
    "Vision Transformer from scratch: patches, position embedding, head in float32",
    mixed=True,
    tolerance=1e-4,
    note="The largest error is in the bias of attention's keys, whose exact gradient is 0 (5e-19 in float64).",
    fused=True,
)
def vision_transformer():
    inputs = keras.Input(shape=(8, 8, 3))
    encoded_patches = PatchEncoder(4, 8)(Patches(4)(inputs))
    x1 = layers.LayerNormalization(epsilon=1e-6)(encoded_patches)
    attention_output = layers.MultiHeadAttention(num_heads=2, key_dim=8)(x1, x1)
    x2 = layers.Add()([attention_output, encoded_patches])
    x3 = _mlp(layers.LayerNormalization(epsilon=1e-6)(x2), [16, 8])
    encoded_patches = layers.Add()([x3, x2])
    representation = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(encoded_patches))
    model = keras.Model(
        inputs=inputs, outputs=layers.Dense(5, dtype="float32")(_mlp(representation, [16]))
    )
    return Case(
        model,
        _images(10),
        np.arange(10)[:, None] % 5,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(3, name="top-3-accuracy"),
        ],
        optimizer=lambda: keras.optimizers.SGD(learning_rate=0.1, weight_decay=0.0001),
        micro_batches=4,
    )


@entry(FAMILY, "MLP-Mixer", mixed=True)
def mlp_mixer():
    class MLPMixerLayer(layers.Layer):
        def __init__(self, num_patches, hidden_units):
            super().__init__()
            self.mlp1 = keras.Sequential(
                [layers.Dense(num_patches, activation="gelu"), layers.Dense(num_patches)]
            )
            self.mlp2 = keras.Sequential(
                [layers.Dense(num_patches, activation="gelu"), layers.Dense(hidden_units)]
            )
            self.normalize = layers.LayerNormalization(epsilon=1e-6)

        def call(self, inputs):
            x = self.normalize(inputs)
            mlp1_outputs = self.mlp1(ops.transpose(x, axes=(0, 2, 1)))
            x = ops.transpose(mlp1_outputs, axes=(0, 2, 1)) + inputs
            return x + self.mlp2(self.normalize(x))

    inputs = keras.Input(shape=(8, 8, 3))
    x = layers.Dense(8)(Patches(4)(inputs))
    x = keras.Sequential([MLPMixerLayer(4, 8) for _ in range(2)])(x)
    model = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(model, _images(10), np.arange(10) % 5, loss=loss, metrics=["acc"], micro_batches=4)


class WindowAttention(layers.Layer):
    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, window_size, num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = layers.Dense(dim * 3)
        self.proj = layers.Dense(dim)
        self.relative_position_bias_table = self.add_weight(
            shape=((2 * window_size - 1) ** 2, num_heads),
            initializer=keras.initializers.Zeros(),
            trainable=True,
        )
        coords = np.stack(
            np.meshgrid(np.arange(window_size), np.arange(window_size), indexing="ij")
        ).reshape(2, -1)
        relative = (coords[:, :, None] - coords[:, None, :]).transpose([1, 2, 0]) + window_size - 1
        relative[:, :, 0] *= 2 * window_size - 1
        index = relative.sum(-1)
        self.relative_position_index = self.add_weight(
            shape=index.shape,
            initializer=lambda *a, **k: ops.convert_to_tensor(index),
            trainable=False,
            dtype="int",
        )

    def call(self, x, mask=None):
        _, size, channels = x.shape
        head_dim = channels // self.num_heads
        x_qkv = ops.reshape(self.qkv(x), (-1, size, 3, self.num_heads, head_dim))
        q, k, v = ops.unstack(ops.transpose(x_qkv, (2, 0, 3, 1, 4)), 3)
        attn = (q * self.scale) @ ops.transpose(k, (0, 1, 3, 2))
        bias = ops.take(
            self.relative_position_bias_table,
            ops.reshape(self.relative_position_index, (-1,)),
            axis=0,
        )
        attn = attn + ops.expand_dims(
            ops.transpose(ops.reshape(bias, (size, size, -1)), (2, 0, 1)), axis=0
        )
        if mask is not None:
            windows = mask.shape[0]
            mask_float = ops.cast(ops.expand_dims(ops.expand_dims(mask, axis=1), axis=0), "float32")
            attn = ops.reshape(attn, (-1, windows, self.num_heads, size, size)) + mask_float
            attn = ops.reshape(attn, (-1, self.num_heads, size, size))
        x_qkv = ops.softmax(attn, axis=-1) @ v
        return self.proj(ops.reshape(ops.transpose(x_qkv, (0, 2, 1, 3)), (-1, size, channels)))


def _window_partition(x, size):
    _, height, width, channels = x.shape
    x = ops.reshape(x, (-1, height // size, size, width // size, size, channels))
    return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, size, size, channels))


class SwinTransformer(layers.Layer):
    def __init__(self, dim, num_patch, num_heads, window_size, shift_size):
        super().__init__()
        self.num_patch, self.window_size, self.shift_size = num_patch, window_size, shift_size
        self.norm1 = layers.LayerNormalization(epsilon=1e-5)
        self.attn = WindowAttention(dim, window_size, num_heads)
        self.norm2 = layers.LayerNormalization(epsilon=1e-5)
        self.mlp = keras.Sequential([layers.Dense(16, activation="gelu"), layers.Dense(dim)])

    def build(self, input_shape):
        self.attn_mask = None
        if self.shift_size:
            height, width = self.num_patch
            cuts = (
                slice(0, -self.window_size),
                slice(-self.window_size, -self.shift_size),
                slice(-self.shift_size, None),
            )
            mask_array = np.zeros((1, height, width, 1))
            for count, (h, w) in enumerate((h, w) for h in cuts for w in cuts):
                mask_array[:, h, w, :] = count
            windows = ops.convert_to_numpy(
                _window_partition(ops.convert_to_tensor(mask_array), self.window_size)
            )
            windows = windows.reshape(-1, self.window_size**2)
            mask = np.where(windows[:, None] != windows[:, :, None], -100.0, 0.0)
            self.attn_mask = keras.Variable(
                mask, shape=mask.shape, dtype="float32", trainable=False
            )
        super().build(input_shape)

    def call(self, x):
        height, width = self.num_patch
        size, channels = self.window_size, x.shape[-1]
        x_skip = x
        shifted = ops.reshape(self.norm1(x), (-1, height, width, channels))
        if self.shift_size:
            shifted = ops.roll(shifted, shift=[-self.shift_size, -self.shift_size], axis=[1, 2])
        windows = ops.reshape(_window_partition(shifted, size), (-1, size**2, channels))
        windows = self.attn(windows, mask=self.attn_mask)
        x = ops.reshape(windows, (-1, height // size, width // size, size, size, channels))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, height, width, channels))
        if self.shift_size:
            x = ops.roll(x, shift=[self.shift_size, self.shift_size], axis=[1, 2])
        x = x_skip + ops.reshape(x, (-1, height * width, channels))
        return x + self.mlp(self.norm2(x))


class PatchMerging(layers.Layer):
    def __init__(self, num_patch, embed_dim):
        super().__init__()
        self.num_patch = num_patch
        self.linear_trans = layers.Dense(2 * embed_dim, use_bias=False)

    def call(self, x):
        height, width = self.num_patch
        x = ops.reshape(x, (-1, height, width, x.shape[-1]))
        x = ops.concatenate(
            (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]), axis=-1
        )
        return self.linear_trans(ops.reshape(x, (-1, (height // 2) * (width // 2), x.shape[-1])))


@entry(FAMILY, "Swin Transformer: shifted windows, an attention mask in a variable")
def swin_transformer():
    inputs = keras.Input((8, 8, 3))
    x = PatchEncoder(16, 8)(Patches(2)(inputs))
    x = SwinTransformer(8, (4, 4), 2, 2, 0)(x)
    x = SwinTransformer(8, (4, 4), 2, 2, 1)(x)
    x = PatchMerging((4, 4), 8)(x)
    model = keras.Model(
        inputs, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    )
    return Case(
        model,
        _images(9),
        keras.utils.to_categorical(np.arange(9) % 5, 5),
        loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        metrics=[keras.metrics.CategoricalAccuracy(name="accuracy")],
        micro_batches=2,
    )


def _unet():
    inputs = keras.Input(shape=(8, 8, 3))
    down1 = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    down2 = layers.Conv2D(6, 3, activation="relu", padding="same")(layers.MaxPooling2D()(down1))
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(down2)
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(layers.Concatenate()([up, down1]))
    return keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax", padding="same")(x))


@entry(FAMILY, "U-Net: a weight for each pixel, by its class", mixed=True)
def unet_pixel_weights():
    labels = np.random.default_rng(0).integers(0, 3, (10, 8, 8, 1))
    sample_weights = np.take(np.array([2.0, 2.0, 1.0], "float32") / 5, labels[..., 0])
    return Case(
        _unet(),
        _images(10),
        labels,
        sample_weight=sample_weights,
        loss="sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
        micro_batches=4,
    )


@entry(FAMILY, "U-Net: a weight for each pixel, mean over the weights")
def unet_mean_with_sample_weight():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (10, 8, 8))
    weights = (rng.random((10, 8, 8)) < np.linspace(0.1, 0.9, 10)[:, None, None]).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    return Case(_unet(), _images(10), labels, sample_weight=weights, loss=loss, micro_batches=4)


@entry(
    FAMILY,
    "oxford_pets segmentation: separable convolutions, BatchNormalization, residuals",
    tolerance=1e-3,
    note=_BIAS_BEFORE_NORM,
)
def oxford_pets():
    inputs = keras.Input(shape=(8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    previous = x
    x = layers.Activation("relu")(x)
    x = layers.BatchNormalization()(layers.SeparableConv2D(6, 3, padding="same")(x))
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = layers.add([x, layers.Conv2D(6, 1, strides=2, padding="same")(previous)])
    previous = x
    for _ in range(2):
        x = layers.BatchNormalization()(
            layers.Conv2DTranspose(4, 3, padding="same")(layers.Activation("relu")(x))
        )
        x = layers.UpSampling2D(2)(x)
        previous = layers.Conv2D(4, 1, padding="same")(layers.UpSampling2D(2)(previous))
        x = layers.add([x, previous])
    model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
    labels = np.random.default_rng(0).integers(0, 3, (8, 8, 8))
    return Case(
        model, _images(8), labels, loss="sparse_categorical_crossentropy", by_micro_batch=True
    )


@entry(
    FAMILY,
    "object detection: class and box heads, dicts of losses, weights and targets",
    mixed=True,
)
def detection():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, activation="relu", padding="same")(inputs)
    anchors = layers.Reshape((16, 4))(x)
    classes = layers.Dense(3, name="classification")(anchors)
    boxes = layers.Dense(4, name="box")(anchors)
    model = keras.Model(inputs, {"classification": classes, "box": boxes})
    rng = np.random.default_rng(0)
    found = (rng.random((10, 16)) < np.linspace(0.05, 0.8, 10)[:, None]).astype("float32")
    found[:, 0] = 1.0
    return Case(
        model,
        _images(10),
        {
            "classification": keras.utils.to_categorical(rng.integers(0, 3, (10, 16)), 3),
            "box": rng.random((10, 16, 4)).astype("float32"),
        },
        sample_weight={"classification": np.ones((10, 16), "float32"), "box": found},
        loss={
            "classification": keras.losses.BinaryFocalCrossentropy(from_logits=True),
            "box": keras.losses.Huber(reduction="mean_with_sample_weight"),
        },
        loss_weights={"classification": 1.0, "box": 0.25},
        micro_batches=4,
    )


@entry(FAMILY, "multi-task: GradientAccumulator's reconstructor and classifier of two inputs")
def multitask():
    input1, input2 = keras.Input((8, 8, 1)), keras.Input((8, 8))
    x1 = layers.Conv2D(4, (5, 5), activation="relu", padding="same")(input1)
    x1 = layers.Conv2D(4, (5, 5), activation="relu", padding="same")(
        layers.MaxPooling2D((2, 2))(x1)
    )
    x1 = layers.Conv2D(1, (5, 5), padding="same", name="reconstructor")(
        layers.UpSampling2D((2, 2))(x1)
    )
    x2 = layers.Dense(8, activation="relu")(layers.Flatten()(input2))
    model = keras.Model(
        inputs=[input1, input2], outputs=[x1, layers.Dense(10, name="classifier")(x2)]
    )
    images = _images(10, channels=1)
    return Case(
        model,
        [images, images[..., 0]],
        [images, np.arange(10)],
        loss={
            "classifier": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "reconstructor": "mse",
        },
        metrics={"classifier": keras.metrics.SparseCategoricalAccuracy()},
        micro_batches=4,
    )


@entry(FAMILY, "convolutional autoencoder: x is y", quick=True)
def autoencoder():
    inputs = layers.Input(shape=(8, 8, 1))
    x = layers.Conv2D(4, (3, 3), activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D((2, 2), padding="same")(x)
    x = layers.Conv2DTranspose(4, (3, 3), strides=2, activation="relu", padding="same")(x)
    model = keras.Model(inputs, layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x))
    x = _images(10, channels=1)
    return Case(model, x, x, loss="binary_crossentropy", micro_batches=4)


@entry(
    FAMILY, "super-resolution: sub-pixel shuffling by reshape and transpose, orthogonal initializer"
)
def sub_pixel():
    class DepthToSpace(layers.Layer):
        def __init__(self, block_size):
            super().__init__()
            self.block_size = block_size

        def call(self, inputs):
            batch, height, width, depth = ops.shape(inputs)
            depth = depth // (self.block_size**2)
            x = ops.reshape(inputs, [batch, height, width, self.block_size, self.block_size, depth])
            x = ops.transpose(x, [0, 1, 3, 2, 4, 5])
            return ops.reshape(x, [batch, height * self.block_size, width * self.block_size, depth])

    conv_args = {"activation": "relu", "kernel_initializer": "orthogonal", "padding": "same"}
    inputs = keras.Input(shape=(None, None, 1))
    x = layers.Conv2D(6, 5, **conv_args)(inputs)
    x = layers.Conv2D(1 * (2**2), 3, **conv_args)(x)
    model = keras.Model(inputs, DepthToSpace(2)(x))
    return Case(
        model, _images(10, 4, 1), _images(10, 8, 1), loss="mean_squared_error", micro_batches=4
    )


@entry(FAMILY, "bilinear CNN: the outer product of two feature maps")
def bilinear_cnn():
    inputs = keras.Input((8, 8, 3))
    a = layers.Conv2D(4, 3, activation="relu")(inputs)
    b = layers.Conv2D(5, 3, activation="relu")(inputs)
    a, b = layers.Reshape((36, 4))(a), layers.Reshape((36, 5))(b)
    outer = layers.Lambda(lambda ab: ops.einsum("bij,bik->bjk", *ab) / 36.0)([a, b])
    x = layers.Flatten()(outer)
    x = layers.Lambda(lambda t: ops.sign(t) * ops.sqrt(ops.abs(t) + 1e-9))(x)
    x = layers.UnitNormalization()(x)
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
    y = keras.utils.to_categorical(np.arange(10) % 5, 5)
    return Case(
        model,
        _images(10),
        y,
        loss="categorical_crossentropy",
        metrics=["accuracy"],
        micro_batches=4,
    )


@entry(FAMILY, "next-frame prediction: ConvLSTM2D, BatchNormalization, Conv3D")
def conv_lstm():
    inp = layers.Input(shape=(None, 6, 6, 1))
    x = layers.ConvLSTM2D(
        filters=3, kernel_size=(3, 3), padding="same", return_sequences=True, activation="relu"
    )(inp)
    x = layers.BatchNormalization()(x)
    x = layers.ConvLSTM2D(
        filters=3, kernel_size=(1, 1), padding="same", return_sequences=True, activation="relu"
    )(x)
    x = layers.Conv3D(filters=1, kernel_size=(3, 3, 3), activation="sigmoid", padding="same")(x)
    frames = np.round(np.random.default_rng(0).random((6, 5, 6, 6, 1))).astype("float32")
    model = keras.Model(inp, x)
    return Case(
        model, frames[:, :-1], frames[:, 1:], loss="binary_crossentropy", by_micro_batch=True
    )


@entry(FAMILY, "video classification: TimeDistributed CNN, GRU with a mask of frames")
def video_classification():
    cnn = keras.Sequential(
        [layers.Input((8, 8, 3)), layers.Conv2D(4, 3, strides=2), layers.GlobalAveragePooling2D()]
    )
    frames, mask = keras.Input((5, 8, 8, 3)), keras.Input((5,), dtype="bool")
    x = layers.GRU(6, return_sequences=True)(layers.TimeDistributed(cnn)(frames), mask=mask)
    x = layers.GRU(4)(x)
    model = keras.Model(
        [frames, mask], layers.Dense(3, activation="softmax")(layers.Dense(4, activation="relu")(x))
    )
    x = np.random.default_rng(0).random((7, 5, 8, 8, 3)).astype("float32")
    kept = np.arange(5) < (1 + np.arange(7) % 5)[:, None]
    y = np.arange(7) % 3
    return Case(
        model,
        [x, kept],
        y,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        micro_batches=3,
    )


@entry(
    FAMILY,
    "PointNet: an orthogonality regulariser of the transform, a layer's activity_regularizer",
    tolerance=1e-3,
    note=_BIAS_BEFORE_NORM,
)
def pointnet():
    class OrthogonalRegularizer(keras.regularizers.Regularizer):
        def __init__(self, num_features, l2reg=0.001):
            self.num_features, self.l2reg = num_features, l2reg
            self.eye = ops.eye(num_features)

        def __call__(self, x):
            x = ops.reshape(x, (-1, self.num_features, self.num_features))
            xxt = ops.tensordot(x, x, axes=(2, 2))
            xxt = ops.reshape(xxt, (-1, self.num_features, self.num_features))
            return ops.sum(self.l2reg * ops.square(xxt - self.eye))

    def conv_bn(x, filters):
        x = layers.Conv1D(filters, kernel_size=1, padding="valid")(x)
        return layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(x))

    def tnet(inputs, num_features):
        x = layers.GlobalMaxPooling1D()(conv_bn(inputs, 8))
        x = layers.Dense(
            num_features * num_features,
            kernel_initializer="zeros",
            bias_initializer=keras.initializers.Constant(np.eye(num_features).flatten() + 0.1),
            activity_regularizer=OrthogonalRegularizer(num_features),
        )(x)
        return layers.Dot(axes=(2, 1))([inputs, layers.Reshape((num_features, num_features))(x)])

    inputs = keras.Input(shape=(12, 3))
    x = layers.GlobalMaxPooling1D()(conv_bn(tnet(inputs, 3), 8))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(x))
    points = np.random.default_rng(0).random((8, 12, 3)).astype("float32")
    return Case(
        model, points, np.arange(8) % 4, loss="sparse_categorical_crossentropy", by_micro_batch=True
    )


@entry(
    FAMILY, "orthogonality of each row's transform: activity_regularizer without batch statistics"
)
def orthogonality():
    class RowwiseOrthogonal(keras.regularizers.Regularizer):
        def __call__(self, x):
            x = ops.reshape(x, (-1, 3, 3))
            return 0.01 * ops.sum(
                ops.square(ops.matmul(x, ops.transpose(x, (0, 2, 1))) - ops.eye(3))
            )

    inputs = keras.Input(shape=(12, 3))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1, activation="relu")(inputs))
    x = layers.Dense(9, activity_regularizer=RowwiseOrthogonal())(x)
    x = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(x)])
    model = keras.Model(
        inputs, layers.Dense(4, activation="softmax")(layers.GlobalMaxPooling1D()(x))
    )
    points = np.random.default_rng(0).random((10, 12, 3)).astype("float32")
    return Case(
        model, points, np.arange(10) % 4, loss="sparse_categorical_crossentropy", micro_batches=4
    )


def _augmented(*augmentation):
    return keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            *augmentation,
            layers.Rescaling(1.0 / 2),
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    )


_BINARY = keras.losses.BinaryCrossentropy(from_logits=True)
_LABELS = (np.arange(8) % 2).astype("float32")[:, None]


@entry(
    FAMILY,
    "image classification from scratch: RandomFlip, RandomContrast and Rescaling in the model",
    note="Each micro-batch draws its own augmentations. Compared with a loop over micro-batches that is "
    "compiled too, because XLA draws other numbers from the same seed.",
)
def augmentation_in_the_model():
    model = _augmented(layers.RandomFlip("horizontal", seed=1), layers.RandomContrast(0.1, seed=2))
    x, variables = _images(8), model.trainable_variables

    @tf.function(jit_compile=True)
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = _BINARY(y, model(x, training=True)) / 2
        return tape.gradient(loss, [v.value for v in variables])

    def theirs():
        first, second = gradients(x[:4], _LABELS[:4]), gradients(x[4:], _LABELS[4:])
        keras.optimizers.SGD(0.1).apply(
            [a + b for a, b in zip(first, second, strict=True)], variables
        )

    def ours():
        trainer = fa.Trainer(
            model, keras.optimizers.SGD(0.1), _BINARY, gradient_accumulation_steps=2
        )
        trainer.fit(x, _LABELS, batch_size=4, shuffle=False, verbose=0)

    return Steps(variables, ours, theirs, state=model.non_trainable_variables)


@entry(
    FAMILY,
    "image classification from scratch: RandomRotation in the model",
    refused="RandomRotation",
    why="Refused with `jit_compile=True`, as here; the default trains the model without XLA.",
)
def rotation_in_the_model():
    model = _augmented(layers.RandomFlip("horizontal", seed=1), layers.RandomRotation(0.1, seed=2))
    return Case(model, _images(8), _LABELS, loss=_BINARY)


@entry(
    FAMILY,
    "image classification from scratch: RandomRotation in the model, jit_compile=False",
    note="Each micro-batch draws its own augmentations. Compared with a loop over micro-batches.",
)
def rotation_without_xla():
    model = _augmented(layers.RandomFlip("horizontal", seed=1), layers.RandomRotation(0.1, seed=2))
    return Case(model, _images(8), _LABELS, loss=_BINARY, by_micro_batch=True, jit_compile=False)


@entry(FAMILY, "ViT's augmentation: an adapted Normalization, Resizing")
def normalization_in_the_model():
    images = _images(10)
    normalization = layers.Normalization()
    normalization.adapt(images)
    model = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            normalization,
            layers.Resizing(6, 6),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return Case(
        model, images, np.arange(10) % 3, loss="sparse_categorical_crossentropy", micro_batches=4
    )


@entry(
    FAMILY, "attention-based multiple-instance learning: a list of instances, attention over them"
)
def multiple_instance():
    class MILAttentionLayer(layers.Layer):
        def __init__(self, weight_params_dim):
            super().__init__()
            self.weight_params_dim = weight_params_dim

        def build(self, input_shape):
            input_dim = input_shape[0][1]
            init, reg = "glorot_uniform", keras.regularizers.L2(0.01)
            self.v_weight_params = self.add_weight(
                shape=(input_dim, self.weight_params_dim),
                initializer=init,
                regularizer=reg,
                name="v",
            )
            self.w_weight_params = self.add_weight(
                shape=(self.weight_params_dim, 1), initializer=init, regularizer=reg, name="w"
            )

        def call(self, inputs):
            scores = [
                ops.tensordot(
                    ops.tanh(ops.tensordot(each, self.v_weight_params, axes=1)),
                    self.w_weight_params,
                    axes=1,
                )
                for each in inputs
            ]
            alpha = ops.softmax(ops.stack(scores), axis=0)
            return [alpha[i] for i in range(alpha.shape[0])]

    inputs, embeddings = [], []
    shared_dense_layer_1 = layers.Dense(8, activation="relu")
    for _ in range(3):
        inp = layers.Input((8, 8))
        inputs.append(inp)
        embeddings.append(shared_dense_layer_1(layers.Flatten()(inp)))
    alpha = MILAttentionLayer(4)(embeddings)
    multiply_layers = [layers.multiply([alpha[i], embeddings[i]]) for i in range(3)]
    model = keras.Model(
        inputs, layers.Dense(2, activation="softmax")(layers.concatenate(multiply_layers, axis=1))
    )
    x = [_images(9, channels=1, seed=s)[..., 0] for s in range(3)]
    y = np.arange(9) % 2
    return Case(
        model,
        x,
        y,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        fit={"class_weight": {0: 0.7, 1: 1.9}},
        micro_batches=2,
    )


def _speech(rows=8, frames=12, features=6, classes=5, longest=4):
    rng = np.random.default_rng(0)
    labels = rng.integers(1, classes, (rows, longest)).astype("int32")
    lengths = 1 + np.arange(rows) % longest
    return rng.normal(size=(rows, frames, features)).astype("float32"), np.where(
        np.arange(longest) < lengths[:, None], labels, 0
    )


def _speech_model(classes=5):
    inputs = layers.Input((12, 6))
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(
        layers.Conv1D(6, 3, padding="same")(inputs)
    )
    return inputs, layers.Dense(classes, activation="softmax")(
        layers.Dense(8, activation="relu")(x)
    )


@entry(FAMILY, "speech recognition: keras.losses.CTC, labels of different lengths")
def ctc_loss():
    inputs = layers.Input((12, 6))
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(inputs)
    x, y = keras.Model(inputs, layers.Dense(5)(x)), _speech()
    return Case(x, y[0], y[1], loss=keras.losses.CTC(), micro_batches=3)


def _ctc_batch_cost(y_true, y_pred):
    batch_len, frames = ops.shape(y_pred)[0], ops.shape(y_pred)[1]
    label_length = ops.sum(ops.cast(y_true != 0, "int32"), -1)
    return ops.expand_dims(
        ops.ctc_loss(
            ops.cast(y_true, "int32"),
            ops.log(y_pred + keras.backend.epsilon()),
            label_length,
            ops.full((batch_len,), frames, dtype="int32"),
            mask_index=0,
        ),
        1,
    )


@entry(FAMILY, "speech recognition: a CTC loss function of one's own, one value a row")
def ctc_function():
    x, y = _speech()
    return Case(keras.Model(*_speech_model()), x, y, loss=_ctc_batch_cost, micro_batches=3)


class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        self.add_loss(_ctc_batch_cost(y_true, y_pred))
        return y_pred


@entry(
    FAMILY,
    "OCR of captchas: an endpoint layer that adds a CTC loss for each row, labels among the inputs",
)
def captcha_ocr():
    inputs, predictions = _speech_model()
    labels = layers.Input(name="label", shape=(None,), dtype="float32")
    model = keras.Model([inputs, labels], CTCLayer(name="ctc_loss")(labels, predictions))
    x, y = _speech()
    return Case(model, [x, y.astype("float32")], micro_batches=3)


class OldCTCLayer(layers.Layer):
    """captcha_ocr.py: TensorFlow's sparse CTC."""

    def call(self, y_true, y_pred):
        y_pred_t = ops.log(ops.transpose(y_pred, axes=[1, 0, 2]) + keras.backend.epsilon())
        frames = ops.shape(y_pred)[1] * ops.ones((ops.shape(y_true)[0],), dtype="int32")
        loss = tf.compat.v1.nn.ctc_loss(
            inputs=y_pred_t,
            labels=tf.sparse.from_dense(ops.cast(y_true, "int32")),
            sequence_length=frames,
        )
        self.add_loss(ops.expand_dims(loss, 1))
        return y_pred


@entry(FAMILY, "OCR of captchas: TensorFlow's sparse CTC, jit_compile=False")
def captcha_ocr_sparse():
    inputs, predictions = _speech_model(6)
    labels = layers.Input(name="label", shape=(None,), dtype="float32")
    model = keras.Model([inputs, labels], OldCTCLayer(name="ctc_loss")(labels, predictions))
    x, y = _speech()
    return Case(model, [x, y.astype("float32")], micro_batches=3, jit_compile=False)


@entry(
    FAMILY,
    "image captioning: frozen CNN, Transformer decoder, a mask from the captions",
    mixed=True,
    fused=True,
)
def image_captioning():
    base_model = keras.Sequential(
        [layers.Input((8, 8, 3)), layers.Conv2D(6, 3, strides=2), layers.Reshape((9, 6))]
    )
    base_model.trainable = False
    image, caption = (
        keras.Input((8, 8, 3), name="image"),
        keras.Input((5,), dtype="int32", name="caption"),
    )
    encoded = layers.Dense(8, activation="relu")(base_model(image))
    encoded = layers.LayerNormalization()(
        encoded + layers.MultiHeadAttention(1, 8)(encoded, encoded)
    )
    words = layers.Embedding(15, 8, mask_zero=True)(caption)
    x = layers.LayerNormalization()(
        words + layers.MultiHeadAttention(2, 8)(words, words, use_causal_mask=True)
    )
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, encoded))
    model = keras.Model({"image": image, "caption": caption}, layers.Dense(15, dtype="float32")(x))
    rng = np.random.default_rng(0)
    tokens = np.where(
        np.arange(6) < (2 + np.arange(10) % 5)[:, None], rng.integers(1, 15, (10, 6)), 0
    ).astype("int32")
    return Case(
        model,
        {"image": _images(10), "caption": tokens[:, :-1]},
        tokens[:, 1:],
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        micro_batches=4,
        trainer={"loss_scale": 256.0},
    )


@entry(
    FAMILY,
    "Conformer block: half-step feed-forward, GLU, depthwise Conv1D, relative shift",
    tolerance=5e-5,
    note="The largest error is in the bias of attention's keys, whose exact gradient is 0.",
    fused=True,
)
def conformer():
    def feed_forward(x):
        h = layers.Dense(16, activation="swish")(layers.LayerNormalization()(x))
        return x + 0.5 * layers.Dense(8)(h)

    inputs = layers.Input((12, 6))
    x = layers.Dense(8)(inputs)
    x = feed_forward(x)
    h = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 4)(h, h)
    h = layers.Conv1D(16, 1)(layers.LayerNormalization()(x))
    h = h[..., :8] * ops.sigmoid(h[..., 8:])
    h = layers.DepthwiseConv1D(5, padding="same")(h)
    h = layers.Activation("swish")(layers.GroupNormalization(2)(h))
    x = x + layers.Conv1D(8, 1)(h)
    x = layers.LayerNormalization()(feed_forward(x))
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
    x, _ = _speech(rows=9)
    y = np.random.default_rng(1).integers(0, 5, (9, 12))
    return Case(
        model, x, y, loss="sparse_categorical_crossentropy", metrics=["accuracy"], micro_batches=2
    )


@entry(FAMILY, "involution: kernels computed from the image")
def involution():
    class Involution(layers.Layer):
        def __init__(self, channel, group_number, kernel_size):
            super().__init__()
            self.channel, self.group_number, self.kernel_size = channel, group_number, kernel_size

        def build(self, input_shape):
            self.kernel_gen = keras.Sequential(
                [layers.Conv2D(2, 1), layers.Conv2D(self.kernel_size**2 * self.group_number, 1)]
            )
            self.kernel_gen.build(input_shape)
            self.size = input_shape[1:3]

        def call(self, x):
            height, width = self.size
            kernel = ops.reshape(
                self.kernel_gen(x), (-1, height, width, self.kernel_size**2, 1, self.group_number)
            )
            patches = ops.image.extract_patches(x, size=self.kernel_size, strides=1, padding="same")
            patches = ops.reshape(
                patches,
                (
                    -1,
                    height,
                    width,
                    self.kernel_size**2,
                    self.channel // self.group_number,
                    self.group_number,
                ),
            )
            return ops.reshape(
                ops.sum(ops.multiply(kernel, patches), axis=3), (-1, height, width, self.channel)
            )

    inputs = keras.Input((8, 8, 3))
    x = layers.MaxPooling2D((2, 2))(layers.ReLU()(Involution(3, 1, 3)(inputs)))
    model = keras.Model(inputs, layers.Dense(5)(layers.Flatten()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(
        model, _images(10), np.arange(10) % 5, loss=loss, metrics=["accuracy"], micro_batches=4
    )
