"""keras.applications without pretrained weights, on small images."""

import keras
import numpy as np
from zoo import Case, row

CLASSES = 5


def _images(rows, size=96):
    return np.random.default_rng(0).uniform(0, 255, (rows, size, size, 3)).astype("float32")


def _case(application, size=96, jit_compile="auto", magnifies=False, **options):
    model = application(weights=None, input_shape=(size, size, 3), classes=CLASSES, **options)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return Case(
        model,
        _images(8, size),
        np.arange(8) % CLASSES,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        by_micro_batch=True,
        jit_compile=jit_compile,
        magnifies=magnifies,
    )


@row(
    "keras.applications",
    "MobileNetV3Small",
    tolerance=1e-3,
    note="The largest error is in a bias whose exact gradient is 0, because another normalization follows: "
    "Keras's step and ours differ from float64 by 2e-4 there. On images of 32 by 32 or fewer "
    "pixels, the last blocks average so few values that every weight differs like that.",
)
def test_mobilenet_v3():
    return _case(keras.applications.MobileNetV3Small, dropout_rate=0.0)


def _transferred():
    base = keras.applications.MobileNetV2((96, 96, 3), alpha=0.35, include_top=False, weights=None)
    base.trainable = False
    inputs = keras.Input((96, 96, 3))
    x = keras.applications.mobilenet_v2.preprocess_input(inputs)
    x = base(x, training=False)
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(model, _images(7), np.arange(7) % CLASSES, loss=loss, metrics=["accuracy"])


@row("keras.applications", "MobileNetV2, a new head on a frozen base")
def test_mobilenet_v2_frozen():
    return _transferred()


@row("keras.applications", "ConvNeXtTiny")
def test_convnext():
    return _case(keras.applications.ConvNeXtTiny)


OP_BY_OP = (
    "Compared with `jit_compile=False`, so that both steps run the same kernels, but for the "
    "gradient of BatchNormalization. XLA's kernels round differently, and a deep stack of "
    "untrained BatchNormalization layers magnifies any rounding: of {}, Keras's own float32 step "
    "and ours both differ from a float64 step by {} of the update, in the worst variable."
)


@row(
    "keras.applications",
    "ResNet50, op by op",
    tolerance=1e-3,
    note=OP_BY_OP.format("ResNet50", 0.21),
)
def test_resnet50():
    return _case(keras.applications.ResNet50, size=64, jit_compile=False, magnifies=True)


@row(
    "keras.applications",
    "MobileNetV2, op by op",
    tolerance=1e-3,
    note=OP_BY_OP.format("MobileNetV2", 0.03),
)
def test_mobilenet_v2():
    return _case(
        keras.applications.MobileNetV2, size=64, jit_compile=False, magnifies=True, alpha=0.35
    )


@row(
    "keras.applications",
    "EfficientNetV2B0, op by op",
    tolerance=1e-3,
    note=OP_BY_OP.format("ResNet50", 0.21),
)
def test_efficientnet_v2():
    return _case(keras.applications.EfficientNetV2B0, size=64, jit_compile=False, magnifies=True)


@row("keras.applications", "VGG16")
def test_vgg16():
    return _case(keras.applications.VGG16, size=32)
