"""Finds out why a train step is not finite.

The step is run once more, one micro-batch at a time, when training ends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import optree
import tensorflow as tf

from fastaccum.adapters.models import Model
from fastaccum.basics.attributes import restored
from fastaccum.basics.warnings import warn
from fastaccum.data.stacks import Batch, trip_count
from fastaccum.layers.interceptors import Interceptor, Role, intercepting
from fastaccum.step.guards import NonFiniteError
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program
from fastaccum.step.train_step import TrainStep

# Variables, layers or rows that one line names; the rest are counted, or the line would be unread.
NAMES = 5
# The attributes of Keras's layers that hold LoRA matrices.
_LORA = {"lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b"}


class Values(NamedTuple):
    """The values of one micro-batch, and flags of those that hold NaN or inf."""

    loss_sum: tf.Tensor  # float32 scalar
    weight_sum: tf.Tensor  # float32 scalar
    gradients: tf.Tensor  # bool [variables], of the scaled loss
    largest: tf.Tensor  # float32 [variables], the gradients' largest absolute element, unscaled
    outputs: tf.Tensor  # bool [layer calls], in the order of the forward pass
    state: tf.Tensor  # bool [state variables], after it


class _Failed(NamedTuple):
    """A train step that was not finite."""

    cycle: TrainStep
    objective: ModelObjective
    stacks: Sequence[Batch]
    place: str  # the beginning of the line that says where in the step it went wrong


def error(
    cycle: TrainStep, objective: ModelObjective, stacks: Sequence[Batch], place: str
) -> NonFiniteError:
    """Returns the error of a train step that was not finite, and that no lower loss scale can help.

    Run again, micro-batches give what they gave then, since a skipped step changes nothing; `place`
    begins their line.
    """
    updates = int(cycle.optimizer.iterations.numpy())
    scale = cycle.loss_scale
    patience = objective.running.stuck_steps.patience
    steps = "A train step is"
    if patience != 1:
        steps = f"{patience} train steps in a row were"
    lines = [
        f"{steps} not finite, after {updates:,} updates, and no lower loss scale can help: it is "
        f"{float(scale.scale()):g}, of {type(scale).__name__}. "
        "Weights, slots and statistics are those of the last good step."
    ]
    try:
        lines += _findings(_Failed(cycle, objective, stacks, place))
    except Exception as failure:  # the error matters more than its explanation
        lines.append(f"The cause could not be found: {type(failure).__name__}: {failure}")
    return NonFiniteError("\n  ".join(lines))


def require_statistics(cycle: TrainStep, objective: ModelObjective) -> None:
    """Raises ValueError for statistics of Keras's layers that hold NaN before a step.

    No step would mend them.
    """
    spoilt = []
    for variable in objective.model.statistics:
        if np.isnan(variable.numpy().astype("float64")).any():
            spoilt.append(variable)
    if spoilt:
        step = _Failed(cycle, objective, (), "")
        raise ValueError(
            f"The model's statistics {_some_variables(step, spoilt)} hold NaN before "
            "training begins, and would keep it: set them to numbers, or load weights that are "
            "finite."
        )


def warn_of_zero_lora(layers: Sequence[keras.layers.Layer]) -> None:
    """Warns of layers whose LoRA matrices are both 0.

    Keras's `load_model` and `load_weights` leave them so.
    """
    zero = []
    for layer in layers:
        names = _LORA & vars(layer).keys()
        if names and not any(getattr(layer, name).numpy().any() for name in names):
            zero.append(layer.name)
    if zero:
        warn(
            f"The LoRA matrices of {_some(zero)} are all 0, so none has a gradient: Keras has "
            "merged them into the weights that it loaded. Give one of them new values "
            "(docs/guides/saving.md)."
        )


def _findings(step: _Failed) -> list[str]:
    """Describes what is not finite, where it begins and what to do about it: a line for each."""
    spoilt = []
    for variable in (*step.cycle.variables, *step.cycle.optimizer.variables):
        if variable.is_initialized() and _is_bad(variable).numpy():
            spoilt.append(variable)
    if spoilt:
        return [
            f"The variables {_some_variables(step, spoilt)} themselves hold NaN or inf: "
            "an earlier update overflowed, from a gradient that was finite, or they were set so.",
            "What to do: go back to weights that are finite, and lower the learning rate or set "
            "clip_norm.",
        ]

    total = sum(trip_count(stack) for stack in step.stacks)
    with restored([*step.objective.state, *step.objective.running.variables]):
        compute, layers = _make_program(step)
        for number, batch in enumerate(_micro_batches(step.stacks)):
            values = Values(*(tensor.numpy() for tensor in compute(batch)))
            has_bad_loss = not np.isfinite(values.loss_sum)
            if np.any(values.gradients) or np.any(values.state) or has_bad_loss:
                where = f"In micro-batch {number} of the step's {total} (counted from 0):"
                findings = _of_micro_batch(step, batch, values, layers)
                return [f"{step.place}{where}", *findings]
        return _of_step(step, values)


def _micro_batches(stacks: Sequence[Batch]) -> Iterator[Batch]:
    """Yields the micro-batches of all stacks in their order."""
    for stack in stacks:
        for i in range(trip_count(stack)):
            yield tf.nest.map_structure(lambda t, i=i: t[i], stack)


def _of_micro_batch(
    step: _Failed, batch: Batch, values: Values, layers: list[keras.layers.Layer]
) -> list[str]:
    bad_inputs = list(_bad_inputs(batch))
    lines = [f"{bad_input}." for bad_input in bad_inputs]

    first_bad = next(itertools.compress(layers, values.outputs), None)
    layer = None
    if first_bad is not None:
        layer = f"{first_bad.name!r} ({type(first_bad).__name__})"
        lines.append(f"The first layer whose output is not finite: {layer}.")

    loss = float(values.loss_sum)
    if values.weight_sum:
        loss = loss / float(values.weight_sum)
    lines.append(f"The loss: {loss:g}.")

    variables = list(itertools.compress(step.cycle.variables, values.gradients))
    if variables:
        owners: dict[str, None] = {}  # a set that keeps the order
        for variable in variables:
            owner = step.objective.model.owner(variable)
            if owner:
                owners[owner] = None
        lines.append(
            f"Gradients that are not finite: {len(variables)} of {len(step.cycle.variables)}: "
            f"{_some_variables(step, variables)}; of the layers {_some(map(repr, owners))}."
        )
    statistics = list(itertools.compress(_floats(step.objective.state), values.state))
    if statistics:
        lines.append(f"Statistics that became NaN or inf: {_some_variables(step, statistics)}.")

    remedy = _remedy(step, bad_inputs, layer, bool(variables), bool(statistics))
    lines.append(f"What to do: {remedy}")
    return lines


def _remedy(
    step: _Failed, bad_inputs: list[str], layer: str | None, gradients: bool, statistics: bool
) -> str:
    """Says what to do about what is not finite: inputs, a layer's output, gradients, statistics."""
    if bad_inputs:
        return (
            "correct these rows, or leave them out (a sample_weight of 0 does not: 0 * NaN is NaN)."
        )
    if statistics and not layer:
        return "scale the inputs of these layers down: the variance of a batch overflows."
    is_half = step.objective.model.compute_dtype == "float16"
    if layer:
        remedy = (
            f"lower the learning rate or set clip_norm; or look in layer {layer} for a division, "
            "logarithm or root at 0"
        )
        if is_half:
            return f"{remedy}, or for values above 65504, where float16 ends: bfloat16 does not."
        return f"{remedy}."
    if gradients and is_half and float(step.cycle.loss_scale.scale()) > 1.0:
        return "lower the loss scale or its floor, or pass loss_scale='auto'."
    if gradients:
        remedy = (
            "the outputs are finite, the gradients are not: look in the loss, and in these "
            "layers, for a division, logarithm, root or norm at 0, and add an epsilon"
        )
        if is_half:
            return f"{remedy}, or use bfloat16."
        return f"{remedy}."
    return (
        "look in the loss for a logarithm of 0, a division by 0 or an overflow: its gradient is "
        "finite."
    )


def _of_step(step: _Failed, values: Values) -> list[str]:
    """Describes a step whose micro-batches are finite by themselves."""
    with tf.GradientTape() as tape:
        penalty = step.objective.penalty()
    if penalty is not None:
        gradients = tape.gradient(penalty, step.cycle.variables)
        bad = []
        for variable, gradient in zip(step.cycle.variables, gradients, strict=True):
            if gradient is not None and _is_bad(gradient).numpy():
                bad.append(variable)
        if bad or _is_bad(penalty).numpy():
            largest = max(step.cycle.variables, key=lambda v: np.abs(v.numpy()).max(initial=0.0))
            findings = f"The weight regularisers give {float(penalty):g}"
            if bad:
                names = _some_variables(step, bad)
                findings += f", and gradients that are not finite to {names}"
            return [
                f"{findings}; the largest weight stands in {_name(step, largest)}.",
                "What to do: go back to smaller weights, and lower the learning rate or set "
                "clip_norm.",
            ]
    i = int(np.argmax(values.largest))
    return [
        f"{step.place}Each micro-batch is finite by itself, but their sum, or its norm, is not. "
        f"The largest gradient is that of {_name(step, step.cycle.variables[i])}: "
        f"{values.largest[i]:g} in the last micro-batch.",
        "What to do: scale the loss down (the mean rather than the sum), or lower the learning "
        "rate.",
    ]


def _make_program(step: _Failed) -> tuple[Callable, list[keras.layers.Layer]]:
    """Returns a program from a micro-batch to its `Values`, and the layers in order.

    The list of layers is filled by the program's trace.
    """
    layers: list[keras.layers.Layer] = []
    cycle = step.cycle
    objective = step.objective
    jit_compile = objective.options.uses_xla
    scale = cycle.loss_scale.scale() / objective.typical_weight(step.stacks)
    with objective.scope():
        counts = None
        if objective.has_several_terms:
            counts = Program(objective.count, jit_compile)(*step.stacks)
        prepared = objective.prepare(step.stacks, counts)

    def compute(batch):
        layers.clear()
        outputs: list[list[tf.Tensor]] = []
        noting = _note_outputs(objective.model, layers, outputs)
        # A loop over layers would hide which of them gave what.
        with (
            objective.scope(loops=False),
            intercepting(noting),
            tf.GradientTape() as tape,
        ):
            loss_sum, weight_sum = objective.sums(batch, prepared)
            scaled = tf.cast(loss_sum, tf.float32) * scale
            calls_forward = len(outputs)
            gradients = tape.gradient(scaled, cycle.variables)
        # A layer that recomputes its activations returns them again in the backward pass.
        del layers[calls_forward:]
        del outputs[calls_forward:]

        dense = []
        for gradient in gradients:
            if gradient is None:
                dense.append(tf.zeros([1]))
            else:
                dense.append(tf.convert_to_tensor(gradient))
        loss_sum = tf.cast(loss_sum, tf.float32)
        weight_sum = tf.cast(weight_sum, tf.float32)
        bad_gradients = tf.stack([_is_bad(gradient) for gradient in dense])
        largest = []
        for gradient in dense:
            largest.append(tf.reduce_max(tf.abs(tf.cast(gradient, tf.float32))) / scale)
        largest = tf.stack(largest)
        bad_outputs = []
        for tensors in outputs:
            bad_outputs.append(tf.reduce_any([_is_bad(tensor) for tensor in tensors]))
        bad_outputs = tf.convert_to_tensor(bad_outputs, tf.bool)
        bad_state = [_is_bad(variable) for variable in _floats(objective.state)]
        bad_state = tf.convert_to_tensor(bad_state, tf.bool)
        return Values(
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            gradients=bad_gradients,
            largest=largest,
            outputs=bad_outputs,
            state=bad_state,
        )

    return Program(compute, jit_compile), layers


def _note_outputs(
    model: Model, layers: list[keras.layers.Layer], outputs: list[list[tf.Tensor]]
) -> list[Interceptor]:
    """Returns interceptors by which each layer called notes itself and what it returned."""
    graph = tf.compat.v1.get_default_graph()

    def note(layer, call, *args, **kwargs):
        returned = call(*args, **kwargs)
        tensors = [t for t in tf.nest.flatten(returned) if tf.is_tensor(t) and t.dtype.is_floating]
        # Those of a loop inside (a LayerStack's, an RNN's) cannot leave it: the layer around it
        # stands for them.
        if tensors and all(t.graph is graph for t in tensors):
            layers.append(layer)
            outputs.append(tensors)
        return returned

    return [
        Interceptor(layer, "call", functools.partial(note, layer), Role.OBSERVE)
        for layer in model.called_layers
    ]


def _bad_inputs(batch: Batch) -> Iterator[str]:
    """Describes the rows of a micro-batch's tensors that hold NaN or inf."""
    tensors: Any = batch._replace(valid=())
    paths = optree.tree_paths(tensors)
    for path, tensor in zip(paths, optree.tree_leaves(tensors), strict=True):
        if not tensor.dtype.is_floating:
            continue
        values = tf.cast(tensor, tf.float64).numpy()
        values = values.reshape(len(values), -1)
        bad_rows = np.flatnonzero(~np.isfinite(values).all(1))
        if len(bad_rows) == 0:
            continue
        kinds = []
        if np.isnan(values).any():
            kinds.append("NaN")
        if np.isinf(values).any():
            kinds.append("inf")
        field, *keys = path
        name = Batch._fields[field] + "".join(f"[{key!r}]" for key in keys)
        yield f"{name} holds {' and '.join(kinds)} in its rows {_some(map(str, bad_rows))}"


def _is_bad(tensor: tf.Tensor | tf.Variable) -> tf.Tensor:
    """Tells if a tensor holds NaN or inf: bool scalar."""
    if not tensor.dtype.is_floating:
        return tf.constant(False)
    return ~tf.reduce_all(tf.math.is_finite(tensor))


def _floats(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    return [v for v in variables if v.dtype.is_floating]


def _some(names: Iterable[str]) -> str:
    """Lists the first names, and counts the others."""
    names = list(names)
    listed = ", ".join(names[:NAMES])
    if len(names) > NAMES:
        return f"{listed} and {len(names) - NAMES} more"
    return listed


def _some_variables(step: _Failed, variables: Iterable[tf.Variable]) -> str:
    return _some(_name(step, variable) for variable in variables)


def _name(step: _Failed, variable: tf.Variable) -> str:
    """Returns the variable's path in the model, as Keras has it."""
    variables = (
        *step.objective.model.model.variables,
        *getattr(step.cycle.optimizer.optimizer, "variables", ()),
    )
    for known in variables:
        if isinstance(known, keras.Variable) and known.value is variable:
            return known.path
    return variable.name
