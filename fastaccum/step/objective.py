"""Objectives of a train step; a function of one micro-batch is the simplest."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.attributes import Variable
from fastaccum.kernels.variable_stack import VariableStack
from fastaccum.step.tracing import converted


class Objective:
    """Defines what a train step minimises, and may keep the step from moving a weight."""

    state: Sequence[tf.Variable] = ()  # that the forward pass assigns, and a skipped step restores
    # Weights of layers that the forward pass runs in a loop, and does not assign.
    weight_stacks: Sequence[VariableStack] = ()
    # Weights of which the forward pass may read float8 copies, whether they are trained or not.
    float8_kernels: Sequence[keras.Variable] = ()

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Returns the scope of the forward and backward passes of a step."""
        return contextlib.nullcontext()

    def prepare(self, stacks: Sequence[Any], counts: Any = None) -> Any:
        """Computes what every micro-batch must know of the stacks.

        On several devices, `counts` is what was counted of the stacks of all devices together.
        """
        return None

    def sums(self, micro_batch: Any, prepared: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the loss sum and the weight sum of one micro-batch.

        `prepared` is what `prepare` returned.
        """
        raise NotImplementedError

    def typical_weight(self, stacks: Sequence[Any]) -> float:
        """Estimates the weight sum while the step is traced: the number of examples.

        The gradients are summed divided by it, to keep them in range whatever the stacks' size.
        """
        examples = 0
        for stack in stacks:
            # All tensors of a stack are [micro-batches, rows, ...]; an unknown size counts as 1.
            tensors = [tensor for tensor in tf.nest.flatten(stack) if tensor is not None]
            known_sizes = [size for size in tensors[0].shape[:2] if size]
            examples += math.prod(known_sizes)
        return float(examples)

    def denominator(self, weight_sum: tf.Tensor) -> tf.Tensor:
        """Returns the divisor of the loss sum: the weight sum, unless the loss is a sum.

        It is 0 where nothing is valid.
        """
        return weight_sum

    def penalty(self) -> tf.Tensor | None:
        """Computes a loss that is added once per step, as that of weight regularisers."""
        return None

    def accepts(self) -> tf.Tensor:
        """Returns whether the step may change anything: a bool scalar, computed after the loop."""
        return tf.constant(True)


class LossFunction(Objective):
    """Minimises `loss_fn(micro_batch) -> (loss_sum, weight_sum)` and nothing else."""

    def __init__(
        self,
        loss_fn: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
        state: Sequence[tf.Variable] = (),
    ):
        try:
            with contextlib.suppress(ValueError):  # a function of C has no signature
                inspect.signature(loss_fn).bind(None)
        except TypeError:
            raise TypeError(
                f"loss_fn={checks.shown(loss_fn)} must be a function of one micro-batch."
            ) from None
        self.state = tf_variables("state", state)
        # A user's function may have Python's `if` and `while`, which AutoGraph converts. All other
        # code does without, since AutoGraph makes tracing many times as long.
        self._loss_fn = converted(loss_fn)

    def sums(self, micro_batch: Any, prepared: Any) -> tuple[tf.Tensor, tf.Tensor]:
        with checks.naming("loss_fn"):
            return self._loss_fn(micro_batch)


def listed(name: str, values: Iterable[Variable]) -> list[Variable]:
    """Returns the values as a list; raises TypeError for what is no list."""
    cause = None
    try:
        if not isinstance(values, (str, bytes, Mapping)):
            return list(values)
    except Exception as error:  # whatever the object that was passed raises
        cause = error
    raise TypeError(f"{name}={checks.shown(values)} must be a list of variables.") from cause


def tf_variables(name: str, variables: Iterable[Variable]) -> list[tf.Variable]:
    """Returns the tf.Variables behind tf.Variables and Keras variables.

    Raises TypeError for what is neither, and ValueError for a variable that comes twice.
    """
    by_id: dict[int, tf.Variable] = {}
    for variable in listed(name, variables):
        value = variable
        if not isinstance(variable, tf.Variable):
            value = getattr(variable, "value", variable)
        if not isinstance(value, tf.Variable):
            raise TypeError(
                f"{name} holds {checks.shown(variable)}, which is not a tf.Variable or a Keras "
                "variable."
            )
        if id(value) in by_id:
            raise ValueError(f"{name} holds {value.name!r} twice: pass each variable once.")
        by_id[id(value)] = value
    return list(by_id.values())
