"""Blocks of convolutional networks, each a function of a tensor, as `jit_forms` and `models` stack
them.
"""

from keras import layers as kl


def convolved(filters, size=3, strides=1, **options):
    def block(x):
        x = kl.Conv2D(filters, size, strides, "same", use_bias=False, **options)(x)
        return kl.ReLU()(kl.BatchNormalization()(x))

    return block


def residual(filters, strides=1):
    def block(x):
        y = convolved(filters)(convolved(filters, strides=strides)(x))
        return kl.Add()([y, x if strides == 1 else kl.Conv2D(filters, 1, strides)(x)])

    return block


def inverted(filters, strides=1, excite=False):
    """A block of MobileNetV2, or with `excite` of EfficientNet."""

    def block(x):
        y = convolved(4 * x.shape[-1], 1)(x)
        y = kl.DepthwiseConv2D(5 if excite else 3, strides, "same", use_bias=False)(y)
        y = kl.Activation("silu" if excite else "relu6")(kl.BatchNormalization()(y))
        if excite:
            weights = kl.Dense(x.shape[-1] // 4, "silu")(
                kl.GlobalAveragePooling2D(keepdims=True)(y)
            )
            y = kl.Multiply()([y, kl.Dense(y.shape[-1], "sigmoid")(weights)])
        y = kl.BatchNormalization()(kl.Conv2D(filters, 1, use_bias=False)(y))
        return kl.Add()([x, y]) if x.shape == y.shape else y

    return block


def unet(filters, classes, convolutions=1):
    """The scores of each pixel; `convolutions` at each of the scales, of which each has half the
    pixels in a row.
    """

    def level(x, width):
        for _ in range(convolutions):
            x = convolved(width)(x)
        return x

    def model(x):
        skipped = []
        for width in filters[:-1]:
            skipped.append(level(x, width))
            x = kl.MaxPooling2D()(skipped[-1])
        x = level(x, filters[-1])
        for width, skip in zip(filters[-2::-1], reversed(skipped), strict=True):
            x = level(kl.Concatenate()([skip, kl.Conv2DTranspose(width, 2, 2)(x)]), width)
        return kl.Conv2D(classes, 1)(x)

    return model
