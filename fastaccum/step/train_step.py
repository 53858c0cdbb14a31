"""One gradient-accumulation cycle as one XLA program: the heart of fastaccum."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum import checks
from fastaccum.adapters import arguments, optimizers
from fastaccum.data.stacks import trip_count
from fastaccum.kernels import gradients, trace_context
from fastaccum.kernels.rounded import hoisted_casts
from fastaccum.kernels.xla_ops import in_xla, loop, turns_at_once
from fastaccum.lines import warn
from fastaccum.step import compilable
from fastaccum.step import loss_scale as loss_scales
from fastaccum.step.objective import LossFunction, Objective, listed, tf_variables
from fastaccum.step.program import Program

R = TypeVar("R")


class StepResult(NamedTuple):
    """The results of one train step: scalars on the device. Reading one waits for the step.

    Attributes: loss: float32, the sum of all micro-batches' losses divided by `weight`, 0 if that
        is 0; and the penalty. weight: the denominator, float32: the sum of the weights; for a Keras
        loss that is a sum, 1, or 0 without rows. grad_norm: the global norm of the gradient before
        clipping, float32. grads_finite: whether the gradient's norm, the loss and the new state are
        finite, bool. If not, the step was
            skipped, as is one of weight 0: only the loss scale may have moved, down where the norm
                was not finite.
        loss_scale: the loss scale after the step, float32.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    grad_norm: tf.Tensor
    grads_finite: tf.Tensor
    loss_scale: tf.Tensor


class Accumulated(NamedTuple):
    """Sums over micro-batches; those of several devices add up to those of the whole stack."""

    # Of `loss_sum * scale`, in float32 (float64 for float64 variables); None for those that the
    # loss does not reach.
    gradients: list[tf.Tensor | None]
    loss_sum: tf.Tensor  # float32 scalar
    weight_sum: tf.Tensor  # float32 scalar
    # float32 scalar, the same on every device: what the losses of `gradients` were multiplied by
    scale: tf.Tensor
    state: list[tf.Tensor]  # what the state variables held before the first micro-batch
    # bool [rows of a table], by its variable's place: the rows that were looked up
    looked_up: dict[int, tf.Tensor]


class Share(NamedTuple):
    """The part of an update that one of several devices computes."""

    # places of the variables that the device updates; it has no gradients of the others
    own: Collection[int]
    # of each variable's unscaled gradient, from the device that has it: float32 [variables]
    squares: tf.Tensor


class TrainStep:
    """Accumulates the gradient of a stack of micro-batches and applies it once, in one compiled
    program.

    Equal, to float32 rounding, to one step on the full batch, and to this loop:

        for micro_batch in stack:
            loss_sum_i, weight_sum_i = loss_fn(micro_batch)
            gradient += grad(loss_sum_i * scale)                 # float32 sums
            loss_sum, weight_sum = loss_sum + loss_sum_i, weight_sum + weight_sum_i
        gradient = clip_by_global_norm(gradient / (scale * weight_sum), clip_norm)
        if weight_sum != 0 and isfinite(norm(gradient)) and isfinite(loss_sum) and isfinite(state):
            optimizer.apply(gradient, variables)
        if weight_sum != 0:
            loss_scale.update(isfinite(norm(gradient)))

    A skipped step leaves variables, slots, iterations and `state` bit-identical.

    Args: loss_fn: `loss_fn(micro_batch) -> (loss_sum, weight_sum)`: two scalars, the sum of the
        weighted losses and the
            sum of their weights. The step divides one total by the other. Don't return a mean and
                1: a mean of means is
            wrong if micro-batches weigh differently. AutoGraph traces the function once. Or an
            `Objective`.
        variables: tf.Variables or Keras variables to train.
        optimizer: Keras 3, tf_keras or tensorflow-addons optimizer, or a Keras name.
        loss_scale: a loss scale, a number for a static one; None for no scaling.
        clip_norm: the largest global norm of the final, unscaled gradient; None for no clipping.
        jit_compile: compile with XLA. False runs the same graph op by op.
        state: the tf.Variables that `loss_fn` assigns (batch statistics), and a skipped step
            restores; one that is trained and assigned too belongs here as well.

    Raises: TypeError: raised if a variable is not a variable, or the optimizer not an optimizer.
        ValueError: raised if there are no variables, clip_norm is not positive, or (at the first
        call) the leading
            axes of a stack differ, or loss_fn does not return two scalars or reaches no variable.

    >>> w = tf.Variable([0.0])
    >>> def squared_error(micro_batch):
    ...     x, y = micro_batch
    ...     return tf.reduce_sum((w * x - y) ** 2), tf.cast(tf.size(x), tf.float32)
    >>> step = TrainStep(squared_error, [w], "sgd")
    >>> x = tf.constant([[1.0, 2.0], [3.0, 4.0]])  # 2 micro-batches
    >>> stack = x, tf.constant([[2.0, 4.0], [6.0, 8.0]])
    >>> result = step(stack)
    >>> float(result.loss), float(result.weight)
    (30.0, 4.0)
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], tuple[tf.Tensor, tf.Tensor]] | Objective,
        variables: arguments.Variables,
        optimizer: arguments.KerasOptimizer | str,
        *,
        loss_scale: loss_scales.LossScale | float | None = None,
        clip_norm: float | None = None,
        jit_compile: bool = True,
        state: Sequence[tf.Variable] = (),
    ):
        state = listed("state", state)
        if isinstance(loss_fn, Objective) and state:
            raise ValueError("state belongs to the Objective passed: leave it out here.")
        self.objective = loss_fn if isinstance(loss_fn, Objective) else LossFunction(loss_fn, state)
        self.trained = listed("variables", variables)
        if not self.trained:
            raise ValueError(
                "variables is empty. Was the model not built? Then call it once, or build it, "
                "before."
            )
        self.variables = tf_variables("variables", self.trained)
        _require_trainable(self.variables)
        self.optimizer = optimizers.get(optimizer)
        self.loss_scale = loss_scales.get(loss_scale, compute_dtype="float32")
        self.clip_norm = checks.positive_or_none("clip_norm", clip_norm)
        jit_compile = checks.true_or_false("jit_compile", jit_compile)
        self.optimizer.build(self.trained)
        self._compiled = Program(self.run, jit_compile)

    def __call__(self, stack: arguments.Arrays) -> StepResult:
        """Runs one train step on a nest of tensors or arrays with leading axis `[micro-batches,
        ...]`.
        """
        with checks.naming("stack"):
            stack = tf.nest.map_structure(
                lambda t: None if t is None else checks.as_tensor("a leaf", t), stack
            )
        trip_count(stack)
        with compilable.translate_errors(None, "loss_fn with this stack"):
            return self._compiled(stack)

    @tf.autograph.experimental.do_not_convert
    def run(self, *stacks: arguments.Arrays) -> StepResult:
        """Computes the step by graph ops, for use inside a tf.function; the sums of stacks of other
        shapes add up.
        """
        return self.finish(self.accumulate(*stacks))

    def accumulate(
        self,
        *stacks: arguments.Arrays,
        counts: list[tf.Tensor] | None = None,
        typical_weight: float | tf.Tensor | None = None,
    ) -> Accumulated:
        """Sums gradients, losses and weights over the micro-batches of the stacks.

        Where they are a part of an update, `counts` (as in `Objective`) and `typical_weight` are of
        all of it.
        """
        objective = self.objective
        # Around the backward pass too: a layer that recomputes its activations there is called
        # again.
        with objective.scope():
            prepared = objective.prepare(stacks, counts)
            if typical_weight is None:
                typical_weight = objective.typical_weight(stacks)
            sums = Accumulated(
                gradients=[None] * len(self.variables),
                loss_sum=tf.constant(0.0),
                weight_sum=tf.constant(0.0),
                # A constant denominator keeps float16 cotangents in range whatever the stack's
                # size, and costs nothing.
                scale=self.loss_scale.scale() / typical_weight,
                state=[v.read_value() for v in objective.state],
                looked_up={},
            )
            for stack in stacks:
                sums = self._loop(stack, prepared, sums)
        if all(gradient is None for gradient in sums.gradients):
            raise ValueError(
                f"The loss reaches none of the {len(self.variables)} variables: compute it from "
                "these in TensorFlow."
            )
        return sums

    def _loop(self, stack: object, prepared: object, sums: Accumulated) -> Accumulated:
        """Adds the micro-batches of a stack to the sums: traces one, then loops over all."""
        micro_batches = trip_count(stack)
        zeros = [tf.zeros(v.shape, gradients.accumulator_dtype(v.dtype)) for v in self.variables]
        start = [
            zero if total is None else total
            for zero, total in zip(zeros, sums.gradients, strict=True)
        ]
        met = [
            sums.looked_up.get(j, tf.zeros(v.shape[:1], tf.bool))
            for j, v in enumerate(self.variables)
        ]
        # A weight that the forward pass assigns, as a SpectralNormalization does, does not stay
        # what it was.
        moving = {id(v) for v in self.objective.state}
        pairs = zip(self.trained, self.variables, strict=True)
        weights = [(v, tf_v.read_value()) for v, tf_v in pairs if id(tf_v) not in moving]
        # Only XLA adds to a part of a tensor in place. A single micro-batch would add to zeros.
        given = start if in_xla() and micro_batches > 1 else []
        specs = [tf.TensorSpec.from_tensor(total) for total in given]

        def micro_step(i, totals):
            micro_batch = tf.nest.map_structure(
                lambda t: None if t is None else tf.gather(t, i), stack
            )
            offered = gradients.Accumulators(self.variables, totals)
            with trace_context.current().extended(
                accumulators=offered, casts=hoisted_casts(weights)
            ):
                loss_i, weight_i, grads = self._gradients(
                    micro_batch, prepared, sums.scale, offered
                )
            slices = zip(tf.nest.flatten(micro_batch), tf.nest.flatten(stack), strict=True)
            wholes = {part.ref(): whole for part, whole in slices if part is not None}

            def choose(j, gradient):
                if (added := offered.with_added(gradient)) is not None:
                    return gradients.AddedAccumulator(start[j], *added)
                if isinstance(gradient, tf.IndexedSlices) and self.optimizer.needs_lookups:
                    return gradients.LookupAccumulator(start[j], gradient, met[j])
                return gradients.accumulator(
                    start[j], gradient, micro_batches, lambda t: wholes.get(t.ref())
                )

            added = {
                j: choose(j, gradient) for j, gradient in enumerate(grads) if gradient is not None
            }
            return (loss_i, weight_i, {j: each.terms for j, each in added.items()}), added

        # A function of its own: what the loop carries follows from the gradients that come out of
        # it.
        traced_step, accumulators = _trace(micro_step, tf.TensorSpec([], tf.int32), specs)
        by_kernels = {
            j for j, each in accumulators.items() if isinstance(each, gradients.AddedAccumulator)
        }

        def body(i, loss_sum, weight_sum, carried):
            # Those that no kernel adds to are not read: zeros from outside would be copied into the
            # loop in an order that differs from process to process, and with it the name by which a
            # compiled program is found again.
            totals = [
                carried[j][0] if j in by_kernels else tf.zeros(s.shape, s.dtype)
                for j, s in enumerate(specs)
            ]
            loss_i, weight_i, terms = traced_step(i, totals)
            with tf.name_scope("accumulate"):
                # Nothing may stand between a gradient and its add, or XLA cannot fuse the add into
                # the matmul.
                carried = {j: each.add(i, carried[j], terms[j]) for j, each in accumulators.items()}
                return [
                    loss_sum + tf.cast(loss_i, tf.float32),
                    weight_sum + tf.cast(weight_i, tf.float32),
                    carried,
                ]

        values = [
            sums.loss_sum,
            sums.weight_sum,
            {j: each.start() for j, each in accumulators.items()},
        ]
        loss_sum, weight_sum, carried = loop(
            micro_batches, body, values, turns_at_once(traced_step)
        )
        totals, looked_up = list(sums.gradients), {}
        with tf.name_scope("accumulate"):
            for j, each in accumulators.items():
                totals[j] = each.total(carried[j])
                if isinstance(each, gradients.LookupAccumulator):
                    looked_up[j] = each.met(carried[j])
        return sums._replace(
            gradients=totals, loss_sum=loss_sum, weight_sum=weight_sum, looked_up=looked_up
        )

    def _gradients(
        self,
        micro_batch: object,
        prepared: object,
        scale: tf.Tensor,
        offered: gradients.Accumulators,
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor | tf.IndexedSlices | None]]:
        """Computes the loss sum and the weight sum of a micro-batch, and the gradients of the
        scaled loss sum.
        """
        # The gradient is taken inside the loop: a tape around it would keep every micro-batch's
        # activations.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.variables)
            with tf.name_scope("forward"):
                loss, weight = _scalars(self.objective.sums(micro_batch, prepared))
                scaled = loss * tf.cast(scale, loss.dtype)
        offered.close()
        # accumulators take a table of slices apart again
        with tf.name_scope("backward"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Converting sparse IndexedSlices to a dense Tensor")
            return loss, weight, tape.gradient(scaled, self.variables)

    def squares(self, sums: Accumulated, own: Collection[int]) -> tf.Tensor:
        """Computes `Share.squares` of the variables in these places alone; 0 for the others."""
        denominator = sums.scale * self.objective.denominator(sums.weight_sum)
        _, grads, _ = self._with_penalty(sums, denominator)
        known = {j: g for j, g in enumerate(grads) if g is not None and j in own}
        squared = dict(
            zip(known, gradients.squares(list(known.values()), denominator), strict=True)
        )
        return tf.stack([squared.get(j, tf.constant(0.0)) for j in range(len(grads))])

    def finish(
        self, sums: Accumulated, accepted: tf.Tensor | bool = True, share: Share | None = None
    ) -> StepResult:
        """Unscales, clips and checks the sums of all devices; updates variables and loss scale if
        `accepted`.

        With a `share` only its own variables are updated.
        """
        objective = self.objective
        own, squared = (
            (range(len(self.trained)), None)
            if share is None
            else (share.own, tf.unstack(share.squares))
        )
        weight_sum = objective.denominator(sums.weight_sum)
        denominator = sums.scale * weight_sum
        loss = tf.math.divide_no_nan(sums.loss_sum, weight_sum)
        penalty, grads, looked_up = self._with_penalty(sums, denominator)
        grads = [g if j in own else None for j, g in enumerate(grads)]
        if left := [
            getattr(self.trained[j], "path", self.trained[j].name) for j in own if grads[j] is None
        ]:
            warn(
                "No gradient of the loss reaches these trainable variables, which stay as they "
                f"are: {left}. Is there a loss for each output, and is each layer called? If so, "
                "set their `trainable` to False.",
                UserWarning,
            )
        reduced = gradients.reduce(
            [g for g in grads if g is not None], denominator, self.clip_norm, squared
        )
        loss += penalty
        counted = tf.not_equal(weight_sum, 0.0) & objective.accepts() & accepted
        # A loss or a variance can overflow where the gradient is still finite.
        finite = (
            reduced.finite & tf.math.is_finite(loss) & _still_finite(objective.state, sums.state)
        )
        ok = finite & counted
        # Without XLA an operation may fail while others run: the variables are assigned after all
        # that can.
        with tf.name_scope("update"), tf.control_dependencies([ok]):
            final = [None if g is None else g * tf.cast(reduced.factor, g.dtype) for g in grads]
            self.optimizer.apply(final, self.trained, ok, looked_up)
            _keep_where(ok, objective.state, sums.state)
        before = [v.read_value() for v in self.loss_scale.variables]
        self.loss_scale.update(reduced.finite)
        _keep_where(counted, self.loss_scale.variables, before)
        return StepResult(loss, weight_sum, reduced.norm, finite, self.loss_scale.scale())

    def _with_penalty(
        self, sums: Accumulated, denominator: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], list[tf.Tensor | None]]:
        """Returns the penalty, the accumulators plus the penalty's gradient at their scale, and
        lookups still exact.
        """
        grads, looked_up = (
            sums.gradients,
            [sums.looked_up.get(j) for j in range(len(self.variables))],
        )
        with tf.GradientTape() as tape:
            penalty = self.objective.penalty()
        if penalty is None:
            return tf.constant(0.0), grads, looked_up
        added = [
            None if g is None else _times(g, denominator)
            for g in tape.gradient(penalty, self.variables)
        ]
        total = [
            a if g is None else g if a is None else g + a for g, a in zip(grads, added, strict=True)
        ]
        # With its own gradient, that of a table is one of all rows.
        looked_up = [rows if a is None else None for rows, a in zip(looked_up, added, strict=True)]
        return tf.cast(penalty, tf.float32), total, looked_up


def _trace(function: Callable[..., tuple[object, R]], *specs: object) -> tuple[ConcreteFunction, R]:
    """Traces a function that returns `(outputs, extra)`; returns the program of the outputs, and
    `extra`.
    """
    found = []

    @tf.function(autograph=False)
    @functools.wraps(function)
    def outputs(*args):
        returned, extra = function(*args)
        found.append(extra)
        return returned

    return outputs.get_concrete_function(*specs), found[-1]


def _keep_where(
    ok: tf.Tensor, variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]
) -> None:
    """Returns variables to their values `before`, unless `ok`."""
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(ok, variable.read_value(), value))


def _still_finite(variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether no element has become NaN or infinite: bool scalar. A running minimum may
    start at infinity.
    """
    return tf.reduce_all(
        [
            tf.reduce_all(tf.math.is_finite(variable.read_value()) | ~tf.math.is_finite(value))
            for variable, value in zip(variables, before, strict=True)
            if value.dtype.is_floating
        ]
        or True
    )


def _times(gradient, factor):
    dtype = gradients.accumulator_dtype(gradient.dtype)
    return tf.cast(tf.convert_to_tensor(gradient), dtype) * tf.cast(factor, dtype)


def _scalars(returned):
    try:
        loss_sum, weight_sum = returned
    except (TypeError, ValueError, tf.errors.OperatorNotAllowedInGraphError):
        raise ValueError(
            f"loss_fn must return (loss_sum, weight_sum); it returned {checks.shown(returned)}. "
            "Return the sum of the losses and the number (or the weights' sum) that they are to "
            "be divided by over the full batch."
        ) from None
    loss_sum = checks.as_tensor("loss_fn's loss_sum", loss_sum)
    weight_sum = checks.as_tensor("loss_fn's weight_sum", weight_sum)
    for name, value in (("loss_sum", loss_sum), ("weight_sum", weight_sum)):
        if value.shape.rank != 0:
            raise ValueError(
                f"loss_fn returned a {name} of shape {value.shape}; it must be a scalar: sum it."
            )
        if not value.dtype.is_floating and not (name == "weight_sum" and value.dtype.is_integer):
            raise TypeError(
                f"loss_fn returned a {name} of dtype {value.dtype.name}; it must be floating-point."
            )
    return loss_sum, weight_sum


def _require_trainable(variables: Sequence[tf.Variable]) -> None:
    for v in variables:
        if not v.dtype.is_floating:
            raise TypeError(
                f"variables holds {v.name!r} of dtype {v.dtype.name}: only floats are trained."
            )
        if not v.shape.is_fully_defined():
            raise ValueError(
                f"variables holds {v.name!r} of shape {v.shape}: its shape must be known."
            )
        if tf.executing_eagerly() and tf.is_symbolic_tensor(v.handle):
            raise ValueError(f"variables holds {v.name!r}, which belongs to another graph.")
