"""Models of images that people bring, of keras.applications and KerasHub, on any backend of Keras;
no fastaccum.
"""

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
    """Builds two convolutions, of 3 x 3 pixels and of one, with BatchNorm between: what a test can
    compile and run.
    """
    images = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(images)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.ReLU()(keras.layers.Conv2D(32, 1)(x))
    return keras.Model(
        images, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    )


MODELS: dict[str, Callable[[int], keras.Model]] = {
    "resnet50": _application("ResNet50"),
    "vit": vit,
    "efficientnet": _application("EfficientNetB0"),
    "convnext": _application("ConvNeXtTiny"),
    "tiny": tiny,
}


def optimizer(**clipping: float) -> keras.optimizers.Optimizer:
    """The optimizer of all of them."""
    return keras.optimizers.AdamW(3e-4, weight_decay=0.1, **clipping)


def loss() -> keras.losses.Loss:
    """The loss of all of them."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
