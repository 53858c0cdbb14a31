"""Models of images of keras.applications and KerasHub, on any backend of Keras."""

from __future__ import annotations

from collections.abc import Callable

import keras

CLASSES = 1000


def _application(name: str) -> Callable[[int], keras.Model]:
    def make(size: int) -> keras.Model:
        options = {
            "weights": None,
            "input_shape": (size, size, 3),
            "classes": CLASSES,
            "classifier_activation": None,
        }
        return getattr(keras.applications, name)(**options)

    return make


def vit(size: int) -> keras.Model:
    """Builds KerasHub's ViT-B/16 and its classifier."""
    from keras_hub import models

    sizes = {
        "patch_size": 16,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "mlp_dim": 3072,
    }
    backbone = models.ViTBackbone((size, size, 3), **sizes)
    return models.ViTImageClassifier(backbone, num_classes=CLASSES)


def tiny(size: int) -> keras.Model:
    """Builds two convolutions with BatchNorm between, small enough to run in a test."""
    images = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(images)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.ReLU()(keras.layers.Conv2D(32, 1)(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(CLASSES)(x))


MODELS: dict[str, Callable[[int], keras.Model]] = {
    "resnet50": _application("ResNet50"),
    "vit": vit,
    "efficientnet": _application("EfficientNetB0"),
    "convnext": _application("ConvNeXtTiny"),
    "tiny": tiny,
}


def optimizer(**clipping: float) -> keras.optimizers.Optimizer:
    """Makes the optimizer of all these models."""
    return keras.optimizers.AdamW(3e-4, weight_decay=0.1, **clipping)


def loss() -> keras.losses.Loss:
    """Makes the loss of all these models."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
