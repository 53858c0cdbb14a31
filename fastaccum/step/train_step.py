"""One gradient-accumulation cycle as one XLA program: the heart of fastaccum."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum import checks
from fastaccum.adapters.storage import STATE_DTYPES, StateDtype, Storage
from fastaccum.basics import arguments
from fastaccum.basics.attributes import Variable
from fastaccum.basics.warnings import warn
from fastaccum.data.stacks import trip_count
from fastaccum.families import adapt_optimizer
from fastaccum.kernels import gradients, trace_context
from fastaccum.kernels.hoisted_casts import hoisted_casts
from fastaccum.kernels.variable_stack import VariableStack
from fastaccum.kernels.xla_ops import loop, opaque, turns_at_once
from fastaccum.step import compilable
from fastaccum.step import loss_scale as loss_scales
from fastaccum.step.objective import LossFunction, Objective, listed, tf_variables
from fastaccum.step.program import Program

R = TypeVar("R")


class StepResult(NamedTuple):
    """The results of one train step: scalars on the device. Reading one waits for the step.

    Attributes:
        loss: float32, the sum of all micro-batches' losses divided by `weight`, 0 if that is 0; and
            the penalty.
        weight: the denominator, float32: the sum of the weights; for a Keras loss that is a sum, 1,
            or 0 without rows.
        grad_norm: the global norm of the gradient before clipping, float32.
        grads_finite: whether the gradient's norm, the loss and the new state are finite, bool. If
            not, the step was skipped, as is one of weight 0: only the loss scale may have moved,
            down where the norm was not finite.
        loss_scale: the loss scale after the step, float32.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    grad_norm: tf.Tensor
    grads_finite: tf.Tensor
    loss_scale: tf.Tensor


class Accumulated(NamedTuple):
    """Sums over micro-batches; those of several devices add up to those of the whole stack."""

    # Of `loss_sum * scale`, by variable, in float32 (float64 for float64 variables); None for those
    # that the loss does not reach.
    gradients: list[tf.Tensor | None]
    loss_sum: tf.Tensor  # float32 scalar
    weight_sum: tf.Tensor  # float32 scalar
    # What the losses of `gradients` were multiplied by: float32 scalar, the same on every device.
    scale: tf.Tensor
    state: list[tf.Tensor]  # what the state variables held before the first micro-batch
    # The rows of a table that were looked up, by its variable's place: bool [rows of the table].
    looked_up: dict[int, tf.Tensor]


class Share(NamedTuple):
    """The part of an update that one of several devices computes."""

    # The places of the variables that the device updates; it has no gradients of the others.
    places: Collection[int]
    # The sum of squares of each variable's unscaled gradient, from the device that has it: float32
    # [variables].
    squares: tf.Tensor


class _Penalised(NamedTuple):
    """The sums of a step with its penalty."""

    penalty: tf.Tensor  # float32 scalar
    gradients: list[tf.Tensor | None]  # by the variable's place
    # The rows of a table that were looked up; None for a variable to which the penalty adds.
    looked_up: list[tf.Tensor | None]


class TrainStep:
    """Accumulates the gradient of a stack of micro-batches and applies it once, in one program.

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

    Args:
        loss_fn: `loss_fn(micro_batch) -> (loss_sum, weight_sum)`: two scalars, the sum of the
            weighted losses and the sum of their weights. The step divides one total by the other.
            Don't return a mean and 1: a mean of means is wrong if micro-batches weigh differently.
            AutoGraph traces the function once. Or an `Objective`.
        variables: tf.Variables or Keras variables to train.
        optimizer: Keras 3, tf_keras or tensorflow-addons optimizer, or a Keras name.
        loss_scale: a loss scale, a number for a static one; None for no scaling.
        clip_norm: the largest global norm of the final, unscaled gradient; None for no clipping.
        jit_compile: compile with XLA. False runs the same graph op by op.
        optimizer_state_dtype: as of `Trainer`.
        stochastic_rounding: as of `Trainer`, for bfloat16 slots and bfloat16 `variables`.
        state: the tf.Variables that `loss_fn` assigns (batch statistics), and a skipped step
            restores; one that is trained and assigned too belongs here as well.

    Raises:
        TypeError: raised if a variable is not a variable, or the optimizer not an optimizer.
        ValueError: raised if there are no variables, clip_norm is not positive, or (at the first
            call) the leading axes of a stack differ, or loss_fn does not return two scalars or
            reaches no variable.

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
        optimizer_state_dtype: StateDtype = "float32",
        stochastic_rounding: bool = True,
        state: Sequence[tf.Variable] = (),
    ):
        state = listed("state", state)
        if isinstance(loss_fn, Objective) and state:
            raise ValueError("state belongs to the Objective passed: leave it out here.")
        if isinstance(loss_fn, Objective):
            self.objective = loss_fn
        else:
            self.objective = LossFunction(loss_fn, state)
        self.trained = listed("variables", variables)
        if not self.trained:
            raise ValueError(
                "variables is empty: a model has variables only after it is built, so call it on "
                "a batch, or build it, before."
            )
        self.variables = tf_variables("variables", self.trained)
        self._places = {id(variable): j for j, variable in enumerate(self.trained)}
        _require_trainable(self.variables)
        self.optimizer = adapt_optimizer(optimizer)
        self.loss_scale = loss_scales.get(loss_scale, compute_dtype="float32")
        self.clip_norm = checks.positive_or_none("clip_norm", clip_norm)
        jit_compile = checks.true_or_false("jit_compile", jit_compile)
        checks.one_of("optimizer_state_dtype", optimizer_state_dtype, STATE_DTYPES)
        checks.true_or_false("stochastic_rounding", stochastic_rounding)
        self.optimizer.build(self.trained, Storage(optimizer_state_dtype, stochastic_rounding))
        self._compiled = Program(self.run, jit_compile)

    def __call__(self, stack: arguments.Arrays) -> StepResult:
        """Runs one train step, of as many micro-batches as the stack has.

        Args:
            stack: a nest of tensors or arrays of [micro-batches, ...], whose micro-batches
                `loss_fn` takes one after the other.

        Returns:
            The step's figures, scalars on the device. Reading one of them waits for the step.

        Raises:
            ValueError: raised if the leading axes differ, or (at the first call) if XLA cannot
                compile `loss_fn`, or `loss_fn` is refused (see the class).
        """
        with checks.naming("stack"):
            stack = tf.nest.map_structure(_as_tensor, stack)
        trip_count(stack)
        with compilable.translate_errors(None, "loss_fn with this stack"):
            return self._compiled(stack)

    @tf.autograph.experimental.do_not_convert
    def run(self, *stacks: arguments.Arrays) -> StepResult:
        """Computes the step by graph ops, for use inside a tf.function.

        Stacks may differ in shape: their sums add up.
        """
        return self.finish(self.accumulate(*stacks))

    def accumulate(
        self,
        *stacks: arguments.Arrays,
        counts: Any = None,
        typical_weight: float | tf.Tensor | None = None,
    ) -> Accumulated:
        """Sums gradients, losses and weights over the micro-batches of the stacks.

        Where they are a part of an update, `counts` (as in `Objective`) and `typical_weight` are of
        all of it.
        """
        objective = self.objective
        # The scope is around the backward pass too: a layer that recomputes its activations there
        # is called again.
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
        lasting = self._lasting_weights()
        float8_kernels = self._lasting_float8_kernels()
        trained_stacks = [layers for layers in self.objective.weight_stacks if self._trains(layers)]
        # Weights that a loop over layers takes as a stack have one gradient together.
        trained = [*self.variables, *trained_stacks]
        before = gradients.totals_before(trained, sums.gradients, sums.looked_up)
        outside = tf.compat.v1.get_default_graph()

        def forward_and_backward(i, offered_totals):
            micro_batch = _micro_batch_at(stack, i)
            offered = gradients.OfferedTotals(trained, offered_totals)
            stacked: dict[VariableStack, tf.Tensor] = {}
            read: dict[VariableStack, tf.Tensor] = {}  # their values outside of the loop
            casts = hoisted_casts(lasting, outside, read, float8_kernels)

            inside = tf.compat.v1.get_default_graph()

            def read_stack(layers: VariableStack) -> tf.Tensor:
                if tf.compat.v1.get_default_graph() is not inside:
                    # What is traced in a graph of its own is differentiated there.
                    return layers.read()
                if layers not in stacked:
                    # The gradient ends at the stack: its variables would count it again.
                    with tape.stop_recording():
                        with outside.as_default():
                            read[layers] = layers.read()
                        stacked[layers] = tf.identity(read[layers])
                    tape.watch(stacked[layers])
                return stacked[layers]

            with trace_context.current().extended(
                accumulators=offered, casts=casts, read_stack=read_stack
            ):
                # The tape is inside the loop: one around it would keep every micro-batch's
                # activations.
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(self.variables)
                    with tf.name_scope("forward"):
                        loss_sum, weight_sum = _scalars(self.objective.sums(micro_batch, prepared))
                        scaled_loss = loss_sum * tf.cast(sums.scale, loss_sum.dtype)
                offered.close()
                with tf.name_scope("backward"), _slices_may_become_dense():
                    grads, grads_of_stacks = tape.gradient(
                        scaled_loss, [self.variables, list(stacked.values())]
                    )
            gradient_of_stack = dict(zip(stacked, grads_of_stacks, strict=True))
            grads = [*grads, *(gradient_of_stack.get(layers) for layers in trained_stacks)]
            # An optimizer whose update of lookups is not known is refused only where there are any.
            has_lookups = any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
            notes_lookups = has_lookups and self.optimizer.needs_lookups
            gradient_sums = gradients.GradientSums(
                before,
                grads,
                offered,
                micro_batches,
                stacked=_stacked_by_slice(micro_batch, stack),
                notes_lookups=notes_lookups,
            )
            return (loss_sum, weight_sum, gradient_sums.terms), gradient_sums

        # What the loop carries follows from the gradients that come out of one micro-batch, which
        # is therefore traced as a function of its own.
        offered_specs = gradients.offered_specs(before, micro_batches)
        micro_step, gradient_sums = _trace(
            forward_and_backward, tf.TensorSpec([], tf.int32), offered_specs
        )

        def add_micro_batch(i, loss_sum, weight_sum, carried):
            loss_i, weight_i, terms = micro_step(i, gradient_sums.offered(offered_specs, carried))
            with tf.name_scope("accumulate"):
                carried = gradient_sums.add(i, carried, terms)
                loss_sum = loss_sum + tf.cast(loss_i, tf.float32)
                weight_sum = weight_sum + tf.cast(weight_i, tf.float32)
            return [loss_sum, weight_sum, carried]

        loss_sum, weight_sum, carried = loop(
            micro_batches,
            add_micro_batch,
            [sums.loss_sum, sums.weight_sum, gradient_sums.start()],
            turns_at_once(micro_step),
        )
        with tf.name_scope("accumulate"):
            totals_of_stack = gradient_sums.totals(carried)
            totals = list(sums.gradients)
            for j in range(len(totals)):
                totals[j] = totals_of_stack.get(j, totals[j])
            depths = {len(layers.variables) for layers in trained_stacks}
            numbers = {depth: opaque([tf.constant(k) for k in range(depth)]) for depth in depths}
            for k, layers in enumerate(trained_stacks):
                total = totals_of_stack.get(len(totals) + k)
                if total is not None:
                    parts = [tf.gather(total, i) for i in numbers[len(layers.variables)]]
                    self._hand_out(parts, layers, totals)
        return sums._replace(
            gradients=totals,
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            looked_up=gradient_sums.looked_up(carried),
        )

    def _lasting_weights(self) -> list[tuple[Variable, tf.Variable]]:
        """Lists the trained variables that keep their values while micro-batches are computed."""
        return self._lasting(zip(self.trained, self.variables, strict=True))

    def _lasting_float8_kernels(self) -> list[tuple[Variable, tf.Variable]]:
        """Lists weights that keep their values, too, and of which float8 copies are read."""
        kernels = self.objective.float8_kernels
        return self._lasting(zip(kernels, tf_variables("variables", kernels), strict=True))

    def _lasting(
        self, weights: Iterable[tuple[Variable, tf.Variable]]
    ) -> list[tuple[Variable, tf.Variable]]:
        # A weight that the forward pass assigns, as a SpectralNormalization does, does not stay
        # what it was.
        moving = {id(v) for v in self.objective.state}
        return [(weight, variable) for weight, variable in weights if id(variable) not in moving]

    def _trains(self, layers: VariableStack) -> bool:
        return id(layers.variables[0]) in self._places

    def _hand_out(
        self,
        parts: Sequence[tf.Tensor],
        layers: VariableStack,
        totals: list[tf.Tensor | None],
    ) -> None:
        """Adds each layer's part of a stack's gradient to the variable's total."""
        for variable, part in zip(layers.variables, parts, strict=True):
            j = self._places[id(variable)]
            before = totals[j]
            if before is None:
                totals[j] = part
            else:
                totals[j] = before + part

    def finish(
        self, sums: Accumulated, accepted: tf.Tensor | bool = True, share: Share | None = None
    ) -> StepResult:
        """Updates variables and loss scale by the sums of all devices, if `accepted`.

        It unscales, clips and checks the sums first. With a `share` only its own variables are
        updated.
        """
        objective = self.objective
        places: Collection[int] = range(len(self.trained))
        squares = None
        if share is not None:
            places = share.places
            squares = tf.unstack(share.squares)

        weight_sum = objective.denominator(sums.weight_sum)
        denominator = sums.scale * weight_sum
        loss = tf.math.divide_no_nan(sums.loss_sum, weight_sum)
        penalised = self._with_penalty(sums, denominator)
        grads: list[tf.Tensor | None] = [None] * len(self.trained)
        for j in places:
            grads[j] = penalised.gradients[j]
        _warn_of_unreached([self.trained[j] for j in places if grads[j] is None])

        reduced = gradients.reduce(
            [g for g in grads if g is not None], denominator, self.clip_norm, squares
        )
        loss += penalised.penalty
        counted = tf.not_equal(weight_sum, 0.0) & objective.accepts() & accepted
        # A loss or a variance can overflow where the gradient is still finite.
        state_is_finite = _still_finite(objective.state, sums.state)
        finite = reduced.finite & tf.math.is_finite(loss) & state_is_finite
        ok = finite & counted

        # Without XLA an operation may fail while others run: the variables are assigned after all
        # that can.
        with tf.name_scope("update"), tf.control_dependencies([ok]):
            factor = reduced.factor
            if gradients.has_parts(grads):
                # Each layer's update takes these two; XLA would compute them again in every one.
                ok, factor = opaque([ok, factor])
            final_grads: list[tf.Tensor | None] = [None] * len(grads)
            for j, gradient in enumerate(grads):
                if gradient is not None:
                    final_grads[j] = gradient * tf.cast(factor, gradient.dtype)
            self.optimizer.apply(final_grads, self.trained, ok, penalised.looked_up)
            _keep_where(ok, objective.state, sums.state)

        loss_scale_before = [v.read_value() for v in self.loss_scale.variables]
        self.loss_scale.update(reduced.finite)
        _keep_where(counted, self.loss_scale.variables, loss_scale_before)
        return StepResult(loss, weight_sum, reduced.norm, finite, self.loss_scale.scale())

    def squares(self, sums: Accumulated, places: Collection[int]) -> tf.Tensor:
        """Computes `Share.squares` of the variables in these places alone; 0 for the others."""
        denominator = sums.scale * self.objective.denominator(sums.weight_sum)
        penalised = self._with_penalty(sums, denominator)
        grads = {}
        for j, gradient in enumerate(penalised.gradients):
            if gradient is not None and j in places:
                grads[j] = gradient
        squares_of_share = gradients.squares(list(grads.values()), denominator)
        squares = [tf.constant(0.0) for _ in self.trained]
        for j, square in zip(grads, squares_of_share, strict=True):
            squares[j] = square
        return tf.stack(squares)

    def _with_penalty(self, sums: Accumulated, denominator: tf.Tensor) -> _Penalised:
        """Adds the gradient of the penalty to the sums, at their scale."""
        grads = list(sums.gradients)
        looked_up = [sums.looked_up.get(j) for j in range(len(self.variables))]
        with tf.GradientTape() as tape:
            penalty = self.objective.penalty()
        if penalty is None:
            return _Penalised(tf.constant(0.0), grads, looked_up)

        of_penalty: list[tf.Tensor | None] = [None] * len(grads)
        for j, gradient in enumerate(tape.gradient(penalty, self.variables)):
            if gradient is not None:
                of_penalty[j] = _times(gradient, denominator)
        for j, gradient in enumerate(of_penalty):
            if gradient is None:
                continue
            # The gradient of a table is one of all rows now.
            looked_up[j] = None
            if grads[j] is None:
                grads[j] = gradient
            else:
                grads[j] = grads[j] + gradient
        return _Penalised(tf.cast(penalty, tf.float32), grads, looked_up)


def _micro_batch_at(stack: object, i: tf.Tensor) -> Any:
    """Returns micro-batch `i` of a stack, a nest of tensors and None."""

    def gather(tensor):
        if tensor is None:
            return None
        return tf.gather(tensor, i)

    return tf.nest.map_structure(gather, stack)


def _stacked_by_slice(micro_batch: object, stack: object) -> dict[Hashable, tf.Tensor]:
    """Returns the tensors of the stack by the `ref` of the slice of each in one micro-batch."""
    stacked_by_slice = {}
    slices = tf.nest.flatten(micro_batch)
    for part, stacked in zip(slices, tf.nest.flatten(stack), strict=True):
        if part is not None:
            stacked_by_slice[part.ref()] = stacked
    return stacked_by_slice


@contextlib.contextmanager
def _slices_may_become_dense() -> Iterator[None]:
    """Silences TensorFlow's warning of a dense table of slices: the sums take it apart again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting sparse IndexedSlices to a dense Tensor")
        yield


def _trace(function: Callable[..., tuple[object, R]], *specs: object) -> tuple[ConcreteFunction, R]:
    """Traces a function that returns `(outputs, extra)`.

    Returns the program of the outputs, and `extra`.
    """
    extras = []

    @tf.function(autograph=False)
    @functools.wraps(function)
    def outputs(*args):
        returned, extra = function(*args)
        extras.append(extra)
        return returned

    program = outputs.get_concrete_function(*specs)
    return program, extras[-1]


def _warn_of_unreached(variables: Sequence[Variable]) -> None:
    """Warns of trainable variables to which the loss has no gradient."""
    if not variables:
        return
    names = [getattr(variable, "path", variable.name) for variable in variables]
    warn(
        "No gradient of the loss reaches these trainable variables, which stay as they "
        f"are: {names}. Is there a loss for each output, and is each layer called? If so, "
        "set their `trainable` to False.",
        UserWarning,
    )


def _keep_where(
    ok: tf.Tensor, variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]
) -> None:
    """Returns variables to their values `before`, unless `ok`."""
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(ok, variable.read_value(), value))


def _still_finite(variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether no element has become NaN or infinite, a bool scalar.

    A running minimum may start at infinity.
    """
    all_finite = []
    for variable, value in zip(variables, before, strict=True):
        if value.dtype.is_floating:
            is_fine = tf.math.is_finite(variable.read_value()) | ~tf.math.is_finite(value)
            all_finite.append(tf.reduce_all(is_fine))
    if not all_finite:
        return tf.reduce_all(True)
    return tf.reduce_all(all_finite)


def _times(gradient, factor):
    dtype = gradients.accumulator_dtype(gradient.dtype)
    return tf.cast(tf.convert_to_tensor(gradient), dtype) * tf.cast(factor, dtype)


def _as_tensor(leaf):
    if leaf is None:
        return None
    return checks.as_tensor("a leaf", leaf)


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
    scalars = {"loss_sum": loss_sum, "weight_sum": weight_sum}
    for name, value in scalars.items():
        if value.shape.rank != 0:
            raise ValueError(
                f"loss_fn returned a {name} of shape {value.shape}; it must be a scalar: sum it."
            )
        is_count = name == "weight_sum" and value.dtype.is_integer
        if not value.dtype.is_floating and not is_count:
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
