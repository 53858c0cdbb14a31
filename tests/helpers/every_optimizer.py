"""An optimizer of each kind, by name, with a model for them and the update as their own libraries
make it.
"""

import keras
import numpy as np
import pytest

import fastaccum as fa

KERAS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "Adam, EMA": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
        global_clipnorm=0.5,
    ),
    "Multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.Adam(0.01)}
        )
    ),
}
# The Keras that has it; its Muon did not run on TensorFlow before.
SINCE = {"Muon": (3, 13), "ScheduleFreeAdamW": (3, 14), "Multi": (3, 15)}
VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
KERAS |= {
    name: lambda: pytest.skip("of a later Keras")
    for name, since in SINCE.items()
    if since > VERSION
}


def tf_keras():
    # Named here, not imported above: collecting the tests must not bind tf.keras, as fa.addons
    # does.
    import tf_keras

    return tf_keras.optimizers


TF_KERAS = {
    "tf_keras SGD": lambda: tf_keras().SGD(0.1, momentum=0.9),
    "tf_keras RMSprop": lambda: tf_keras().RMSprop(0.01, momentum=0.5, centered=True),
    "tf_keras Adafactor": lambda: tf_keras().Adafactor(0.01),
    "tf_keras Adam, EMA": lambda: tf_keras().Adam(
        tf_keras().schedules.ExponentialDecay(0.1, 1, 0.5),
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    ),
    "legacy Adam": lambda: tf_keras().legacy.Adam(
        tf_keras().schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
    "legacy Nadam": lambda: tf_keras().legacy.Nadam(0.01),
}

TFA = {
    "LAMB": lambda: fa.addons.optimizers.LAMB(
        0.01, weight_decay=0.1, exclude_from_weight_decay=["bias"]
    ),
    "tfa AdamW": lambda: fa.addons.optimizers.AdamW(0.1, 0.01),
    "SGDW": lambda: fa.addons.optimizers.SGDW(
        0.1, 0.01, momentum=0.9, exclude_from_weight_decay=["bias"]
    ),
    "LazyAdam": lambda: fa.addons.optimizers.LazyAdam(0.01),
    "RectifiedAdam": lambda: fa.addons.optimizers.RectifiedAdam(0.01, weight_decay=0.1),
    "Lookahead": lambda: fa.addons.optimizers.Lookahead(tf_keras().legacy.Adam(0.1), sync_period=2),
    "NovoGrad": lambda: fa.addons.optimizers.NovoGrad(0.01),
    "Yogi": lambda: fa.addons.optimizers.Yogi(0.01),
    "AdaBelief": lambda: fa.addons.optimizers.AdaBelief(0.01),
    "COCOB": lambda: fa.addons.optimizers.COCOB(),
    "MovingAverage": lambda: fa.addons.optimizers.MovingAverage(
        tf_keras().legacy.Adam(0.1), average_decay=0.5
    ),
    "SWA": lambda: fa.addons.optimizers.SWA(
        tf_keras().legacy.SGD(0.1, momentum=0.9), start_averaging=1, average_period=1
    ),
    "Ranger": lambda: fa.addons.optimizers.Lookahead(
        fa.addons.optimizers.RectifiedAdam(0.1), sync_period=2
    ),
}


def make_model(seed=0):
    rng = np.random.default_rng(seed)
    layers = [keras.Input((3,)), keras.layers.Dense(5, name="a"), keras.layers.Dense(2, name="b")]
    model = keras.Sequential(layers)
    for v in model.trainable_variables:
        v.assign(rng.normal(size=v.shape))
    return model


def raw(variables):
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


def own_apply(optimizer, gradients, variables):
    """The update as the optimizer's own library makes it."""
    if isinstance(optimizer, keras.Optimizer):
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(zip(gradients, raw(variables), strict=True))
