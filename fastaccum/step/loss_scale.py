"""Loss scaling: keeps float16 gradients in range.

There are three rules with the same methods, and no `if enabled`.
"""

from __future__ import annotations

import inspect
import numbers

import numpy as np
import tensorflow as tf

from fastaccum.checks import positive, whole_number

# Above this factor, its inverse or the scaled loss would be lost in float32.
_LARGEST_SCALE = 2.0**100
# Below this factor, gradients that float32 holds would be lost.
_LEAST_SCALE = 2.0**-64


class LossScale(tf.Module):
    """The base of the three rules.

    `scale` multiplies the loss, and `update` moves the scale once per train step.
    """

    def scale(self) -> tf.Tensor:
        """Returns the factor of the next step's loss: float32 scalar."""
        raise NotImplementedError

    def update(self, grads_finite: tf.Tensor) -> None:
        """Moves the scale after a train step; `grads_finite` is a bool scalar."""

    def get_config(self) -> dict[str, float | int]:
        """Returns the constructor's arguments, as plain numbers."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class NoLossScale(LossScale):
    """Scale 1, always: for float32 and bfloat16.

    >>> float(NoLossScale().scale())
    1.0
    """

    def __init__(self) -> None:
        super().__init__()

    def scale(self) -> tf.Tensor:
        return tf.constant(1.0)


class StaticLossScale(LossScale):
    """Keeps one scale in every step.

    Args:
        loss_scale: a positive, finite number; a power of two loses no bits.

    >>> float(StaticLossScale(1024.0).scale())
    1024.0
    """

    def __init__(self, loss_scale: float):
        super().__init__()
        self.loss_scale = _scale("loss_scale", loss_scale)

    def scale(self) -> tf.Tensor:
        return tf.constant(self.loss_scale)


class DynamicLossScale(LossScale):
    """Backs off when a gradient overflows, and grows again after a run of finite steps.

    The algorithm of PyTorch's `GradScaler`, with a floor and a cap:

        scale = init_scale
        good_steps = 0
        for each train step:
            if gradients are finite:
                good_steps += 1
                if good_steps == growth_interval:
                    scale = min(scale * growth_factor, max_scale)
                    good_steps = 0
            else:
                scale = max(scale * backoff_factor, min_scale)
                good_steps = 0

    The state is two variables, `current_scale` (float32) and `good_steps` (int64), which
    `tf.train.Checkpoint` saves. After a train step with nothing valid in it, `fa.TrainStep` puts
    both back.

    Args:
        init_scale: the first scale.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps in a row before the scale grows, at least 1.
        min_scale: the floor, so that the scale never reaches 0.
        max_scale: the cap, so that it never reaches inf.

    Raises:
        ValueError: raised if an argument is out of its range, or not `min_scale <= init_scale <=
            max_scale`.

    >>> loss_scale = DynamicLossScale(init_scale=8.0, growth_interval=2)
    >>> for finite in (True, True, False):
    ...     loss_scale.update(tf.constant(finite))
    ...     print(float(loss_scale.scale()))
    8.0
    16.0
    8.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ):
        super().__init__()
        self.init_scale = _scale("init_scale", init_scale)
        self.growth_factor = positive("growth_factor", growth_factor)
        self.backoff_factor = positive("backoff_factor", backoff_factor)
        self.min_scale = _scale("min_scale", min_scale)
        self.max_scale = _scale("max_scale", max_scale)
        self.growth_interval = whole_number("growth_interval", growth_interval)
        if np.float32(growth_factor) <= 1:
            raise ValueError(
                f"growth_factor={growth_factor} must be above 1 in float32, or the scale never "
                "grows."
            )
        if np.float32(backoff_factor) >= 1:
            raise ValueError(
                f"backoff_factor={backoff_factor} must be below 1 in float32, or overflows never "
                "end."
            )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale={init_scale} must lie between min_scale={min_scale} and "
                f"max_scale={max_scale}."
            )
        self.current_scale = tf.Variable(
            self.init_scale, trainable=False, dtype=tf.float32, name="loss_scale"
        )
        # An int32 variable would live on the host and break XLA on a GPU.
        self.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="good_steps")

    def scale(self) -> tf.Tensor:
        return self.current_scale.read_value()

    def update(self, grads_finite: tf.Tensor) -> None:
        good_steps = self.good_steps + 1
        grow = good_steps >= self.growth_interval
        grown = tf.minimum(self.current_scale * self.growth_factor, self.max_scale)
        backed_off = tf.maximum(self.current_scale * self.backoff_factor, self.min_scale)
        if_finite = tf.where(grow, grown, self.current_scale)
        self.current_scale.assign(tf.where(grads_finite, if_finite, backed_off))
        self.good_steps.assign(tf.where(grads_finite & ~grow, good_steps, 0))


def _scale(name: str, value: float) -> float:
    if positive(name, value) < _LEAST_SCALE:
        raise ValueError(
            f"{name}={value} must be at least {_LEAST_SCALE:.1e}: below, gradients are 0 in "
            "float32."
        )
    if value > _LARGEST_SCALE:
        raise ValueError(
            f"{name}={value} must be at most {_LARGEST_SCALE:.1e}: above, the scaled loss "
            "overflows."
        )
    return float(value)


def get(loss_scale: LossScale | float | str | None, compute_dtype: str) -> LossScale:
    """Returns the rule that `loss_scale` names.

    "auto" is a dynamic one under float16 compute, else none.
    """
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, str) and loss_scale == "auto":
        if compute_dtype == "float16":
            return DynamicLossScale()
        return NoLossScale()
    if loss_scale is None:
        return NoLossScale()
    if isinstance(loss_scale, numbers.Real) and not isinstance(loss_scale, bool):
        return StaticLossScale(loss_scale)
    raise TypeError(
        f"loss_scale={loss_scale!r} must be 'auto', a number, or one of NoLossScale(), "
        "StaticLossScale(...), DynamicLossScale(...)."
    )
