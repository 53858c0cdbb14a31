"""Blocks of convolutional networks, each a function of a tensor."""

from keras import layers as kl


def convolved(filters, size=3, strides=1, **options):
    """Returns a block of Conv2D without a bias, BatchNormalization and ReLU."""

    def block(x):
        x = kl.Conv2D(filters, size, strides, "same", use_bias=False, **options)(x)
        return kl.ReLU()(kl.BatchNormalization()(x))

    return block


def residual(filters, strides=1):
    """Returns a residual block of two convolutions, its shortcut a convolution if it strides."""

    def block(x):
        y = convolved(filters, strides=strides)(x)
        y = convolved(filters)(y)
        if strides != 1:
            x = kl.Conv2D(filters, 1, strides)(x)
        return kl.Add()([y, x])

    return block


def inverted(filters, strides=1, excite=False):
    """Returns a block of MobileNetV2, or with `excite` of EfficientNet."""

    def block(x):
        y = convolved(4 * x.shape[-1], 1)(x)
        kernel_size = 5 if excite else 3
        y = kl.DepthwiseConv2D(kernel_size, strides, "same", use_bias=False)(y)
        y = kl.BatchNormalization()(y)
        y = kl.Activation("silu" if excite else "relu6")(y)
        if excite:
            mean = kl.GlobalAveragePooling2D(keepdims=True)(y)
            weights = kl.Dense(x.shape[-1] // 4, "silu")(mean)
            y = kl.Multiply()([y, kl.Dense(y.shape[-1], "sigmoid")(weights)])
        y = kl.BatchNormalization()(kl.Conv2D(filters, 1, use_bias=False)(y))
        if x.shape == y.shape:
            return kl.Add()([x, y])
        return y

    return block


def unet(filters, classes, convolutions=1):
    """Returns a U-Net that scores each pixel.

    Args:
        filters: of the scales, the finest first; each next scale halves height and width.
        classes: how many scores a pixel gets.
        convolutions: how many at each scale.
    """

    def convolve(x, width):
        for _ in range(convolutions):
            x = convolved(width)(x)
        return x

    def model(x):
        *finer, coarsest = filters
        skipped = []
        for width in finer:
            x = convolve(x, width)
            skipped.append(x)
            x = kl.MaxPooling2D()(x)
        x = convolve(x, coarsest)
        for width, skip in zip(reversed(finer), reversed(skipped), strict=True):
            x = kl.Conv2DTranspose(width, 2, 2)(x)
            x = convolve(kl.Concatenate()([skip, x]), width)
        return kl.Conv2D(classes, 1)(x)

    return model
