"""Finds out why a train step is not finite: runs the step once more, one micro-batch at a time,
when training ends.
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

from fastaccum.adapters.attributes import restored
from fastaccum.adapters.interceptors import Interceptor, Role, intercepting
from fastaccum.adapters.models import Model
from fastaccum.data.stacks import Batch, trip_count
from fastaccum.lines import warn
from fastaccum.step.guards import NonFiniteError
from fastaccum.step.model_objective import ModelObjective
from fastaccum.step.program import Program
from fastaccum.step.train_step import TrainStep

NAMES = 5  # of variables, layers or rows in one line; the rest are counted
# attributes of Keras's layers
_LORA = {f"lora_{of}_{which}" for of in ("kernel", "embeddings") for which in "ab"}


class Seen(NamedTuple):
    """The values of one micro-batch, and flags of those that hold NaN or inf."""

    loss_sum: tf.Tensor  # float32 scalar
    weight_sum: tf.Tensor  # float32 scalar
    gradients: tf.Tensor  # bool [variables], of the scaled loss
    largest: tf.Tensor  # float32 [variables], the gradients' largest absolute element, unscaled
    outputs: tf.Tensor  # bool [layer calls], in the order of the forward pass
    state: tf.Tensor  # bool [state variables], after it


class _Failed(NamedTuple):
    cycle: TrainStep
    objective: ModelObjective
    stacks: Sequence[Batch]
    place: str


def error(
    cycle: TrainStep, objective: ModelObjective, stacks: Sequence[Batch], place: str
) -> NonFiniteError:
    """Returns the error of a train step that was not finite, and that no lower loss scale can help.

    Run again, micro-batches give what they gave then, since a skipped step changes nothing; `place`
    begins their line.
    """
    updates, scale = int(cycle.optimizer.iterations.numpy()), cycle.loss_scale
    patience = objective.running.stuck_steps.patience
    lines = [
        ("A train step is" if patience == 1 else f"{patience} train steps in a row were")
        + f" not finite, after {updates:,} updates, and no lower loss scale can help: it is "
        f"{float(scale.scale()):g}, of {type(scale).__name__}. "
        "Weights, slots and statistics are those of the last good step."
    ]
    try:
        lines += _findings(_Failed(cycle, objective, stacks, place))
    except Exception as failure:  # the error matters more than its explanation
        lines.append(f"Why could not be found out: {type(failure).__name__}: {failure}")
    return NonFiniteError("\n  ".join(lines))


def require_statistics(cycle: TrainStep, objective: ModelObjective) -> None:
    """Raises ValueError for statistics of Keras's layers that hold NaN before a step: no step would
    mend them.
    """
    if spoilt := [
        v for v in objective.model.statistics if np.isnan(v.numpy().astype("float64")).any()
    ]:
        step = _Failed(cycle, objective, (), "")
        raise ValueError(
            f"The model's statistics {_some(_name(step, v) for v in spoilt)} hold NaN before "
            "training begins, and would keep it: set them to numbers, or load weights that are "
            "finite."
        )


def warn_of_zero_lora(layers: Sequence[keras.layers.Layer]) -> None:
    """Warns of layers whose LoRA matrices are both 0, as Keras's `load_model` and `load_weights`
    leave them.
    """
    held = ((layer, _LORA & vars(layer).keys()) for layer in layers)
    if zero := [
        layer.name
        for layer, own in held
        if own and not any(getattr(layer, n).numpy().any() for n in own)
    ]:
        warn(
            f"The LoRA matrices of {_some(zero)} are all 0, so none has a gradient: Keras has "
            "merged them into the weights that it loaded. Give one of them new values "
            "(docs/guides/saving.md)."
        )


def _findings(step: _Failed) -> list[str]:
    """Describes what is not finite, where it begins, and what to do about it, in a line for
    each.
    """
    held = [
        v for v in (*step.cycle.variables, *step.cycle.optimizer.variables) if v.is_initialized()
    ]
    if spoilt := [v for v in held if _is_bad(v).numpy()]:
        return [
            f"The variables {_some(_name(step, v) for v in spoilt)} themselves hold NaN or inf: "
            "an earlier update overflowed, from a gradient that was finite, or they were set so.",
            "What to do: go back to weights that are finite, and lower the learning rate or set "
            "clip_norm.",
        ]
    micro_batches = [
        (s, i) for s, stack in enumerate(step.stacks) for i in range(trip_count(stack))
    ]
    with restored([*step.objective.state, *step.objective.running.variables]):
        look, layers = _looker(step)
        for at, (s, i) in enumerate(micro_batches):
            batch = tf.nest.map_structure(lambda t, i=i: t[i], step.stacks[s])
            seen = Seen(*(t.numpy() for t in look(batch)))
            if np.any(seen.gradients) or np.any(seen.state) or not np.isfinite(seen.loss_sum):
                where = (
                    f"{step.place}In micro-batch {at} of the step's {len(micro_batches)} "
                    "(counted from 0):"
                )
                return [where, *_of_micro_batch(step, batch, seen, layers)]
        return _of_step(step, seen)


def _of_micro_batch(
    step: _Failed, batch: Batch, seen: Seen, layers: list[keras.layers.Layer]
) -> list[str]:
    inputs = list(_bad_inputs(batch))
    lines = [f"{each}." for each in inputs]
    bad = next(itertools.compress(layers, seen.outputs), None)
    layer = f"{bad.name!r} ({type(bad).__name__})" if bad is not None else None
    if layer:
        lines.append(f"The first layer whose output is not finite: {layer}.")
    loss = (
        float(seen.loss_sum) / float(seen.weight_sum) if seen.weight_sum else float(seen.loss_sum)
    )
    lines.append(f"The loss: {loss:g}.")
    if variables := list(itertools.compress(step.cycle.variables, seen.gradients)):
        owners = dict.fromkeys(name for v in variables if (name := step.objective.model.owner(v)))
        lines.append(
            f"Gradients that are not finite: {len(variables)} of {len(step.cycle.variables)}: "
            f"{_some(_name(step, v) for v in variables)}; of the layers {_some(map(repr, owners))}."
        )
    if statistics := list(itertools.compress(_floats(step.objective.state), seen.state)):
        lines.append(
            f"Statistics that became NaN or inf: {_some(_name(step, v) for v in statistics)}."
        )
    return [
        *lines,
        f"What to do: {_remedy(step, inputs, layer, bool(variables), bool(statistics))}",
    ]


def _remedy(
    step: _Failed, inputs: list[str], layer: str | None, gradients: bool, statistics: bool
) -> str:
    if inputs:
        return (
            "correct these rows, or leave them out (a sample_weight of 0 does not: 0 * NaN is NaN)."
        )
    if statistics and not layer:
        return "scale the inputs of these layers down: the variance of a batch overflows."
    half = step.objective.model.compute_dtype == "float16"
    if layer:
        return (
            f"lower the learning rate or set clip_norm; or look in layer {layer} for a division, "
            "logarithm or root at "
            "0"
            + (
                ", or for values above 65504, where float16 ends: bfloat16 does not."
                if half
                else "."
            )
        )
    if gradients and half and float(step.cycle.loss_scale.scale()) > 1.0:
        return "lower the loss scale or its floor, or pass loss_scale='auto'."
    if gradients:
        return (
            "the outputs are finite, the gradients are not: look in the loss, and in these "
            "layers, for a division, "
            "logarithm, root or norm at 0, and add an epsilon"
            + (", or use bfloat16." if half else ".")
        )
    return (
        "look in the loss for a logarithm of 0, a division by 0 or an overflow: its gradient is "
        "finite."
    )


def _of_step(step: _Failed, seen: Seen) -> list[str]:
    """Describes a step whose micro-batches are finite by themselves."""
    with tf.GradientTape() as tape:
        penalty = step.objective.penalty()
    if penalty is not None:
        gradients = tape.gradient(penalty, step.cycle.variables)
        bad = [
            v
            for v, g in zip(step.cycle.variables, gradients, strict=True)
            if g is not None and _is_bad(g).numpy()
        ]
        if bad or _is_bad(penalty).numpy():
            largest = max(step.cycle.variables, key=lambda v: np.abs(v.numpy()).max(initial=0.0))
            return [
                f"The weight regularisers give {float(penalty):g}"
                + (
                    f", and gradients that are not finite to {_some(_name(step, v) for v in bad)}"
                    if bad
                    else ""
                )
                + f"; the largest weight stands in {_name(step, largest)}.",
                "What to do: go back to smaller weights, and lower the learning rate or set "
                "clip_norm.",
            ]
    i = int(np.argmax(seen.largest))
    return [
        f"{step.place}Each micro-batch is finite by itself, but their sum, or its norm, is not. "
        f"The largest gradient is that of {_name(step, step.cycle.variables[i])}: "
        f"{seen.largest[i]:g} in the last micro-batch.",
        "What to do: scale the loss down (the mean rather than the sum), or lower the learning "
        "rate.",
    ]


def _looker(step: _Failed) -> tuple[Callable, list[keras.layers.Layer]]:
    """Returns a program from a micro-batch to a `Seen`, as a tuple, and a list that its trace fills
    with the layers.
    """
    layers: list[keras.layers.Layer] = []
    cycle, objective, jit_compile = step.cycle, step.objective, step.objective.options.uses_xla
    scale = cycle.loss_scale.scale() / objective.typical_weight(step.stacks)
    with objective.scope():
        counts = (
            Program(objective.count, jit_compile)(*step.stacks)
            if objective.has_several_terms
            else None
        )
        prepared = objective.prepare(step.stacks, counts)

    def look(batch):
        layers.clear()
        outputs: list[list[tf.Tensor]] = []
        noting = _note_outputs(objective.model, layers, outputs)
        with objective.scope(), intercepting(noting), tf.GradientTape() as tape:
            loss_sum, weight_sum = objective.sums(batch, prepared)
            scaled = tf.cast(loss_sum, tf.float32) * scale
            forward = len(outputs)
            gradients = tape.gradient(scaled, cycle.variables)
        # What a layer that recomputes its activations put out again, in the backward pass, is no
        # news.
        del layers[forward:], outputs[forward:]
        gradients = [tf.zeros([1]) if g is None else tf.convert_to_tensor(g) for g in gradients]
        return (
            tf.cast(loss_sum, tf.float32),
            tf.cast(weight_sum, tf.float32),
            tf.stack([_is_bad(g) for g in gradients]),
            tf.stack(
                [
                    tf.reduce_max(tf.abs(tf.cast(g, tf.float32)), keepdims=False) / scale
                    for g in gradients
                ]
            ),
            tf.convert_to_tensor(
                [tf.reduce_any([_is_bad(t) for t in tensors]) for tensors in outputs], tf.bool
            ),
            tf.convert_to_tensor([_is_bad(v) for v in _floats(objective.state)], tf.bool),
        )

    return Program(look, jit_compile), layers


def _note_outputs(
    model: Model, layers: list[keras.layers.Layer], outputs: list[list[tf.Tensor]]
) -> list[Interceptor]:
    """Returns interceptors by which each layer called notes itself and what it returned, which
    nothing reads yet.
    """
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
        Interceptor(each, "call", functools.partial(note, each), Role.OBSERVE)
        for each in model.called_layers
    ]


def _bad_inputs(batch: Batch) -> Iterator[str]:
    """Describes the rows of a micro-batch's tensors that hold NaN or inf."""
    given: Any = batch._replace(valid=())
    for (field, *path), tensor in zip(
        optree.tree_paths(given), optree.tree_leaves(given), strict=True
    ):
        if not tensor.dtype.is_floating:
            continue
        values = tf.cast(tensor, tf.float64).numpy()
        values = values.reshape(len(values), -1)
        if len(rows := np.flatnonzero(~np.isfinite(values).all(1))):
            kinds = [k for k, test in (("NaN", np.isnan), ("inf", np.isinf)) if test(values).any()]
            whole = Batch._fields[field] + "".join(f"[{key!r}]" for key in path)
            yield f"{whole} holds {' and '.join(kinds)} in its rows {_some(map(str, rows))}"


def _is_bad(tensor: tf.Tensor | tf.Variable) -> tf.Tensor:
    return (
        ~tf.reduce_all(tf.math.is_finite(tensor))
        if tensor.dtype.is_floating
        else tf.constant(False)
    )


def _floats(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    return [v for v in variables if v.dtype.is_floating]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:NAMES]) + (
        f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    )


def _name(step: _Failed, variable: tf.Variable) -> str:
    """Returns the variable's path in the model, as Keras has it."""
    known = (
        *step.objective.model.model.variables,
        *getattr(step.cycle.optimizer.optimizer, "variables", ()),
    )
    paths = (
        each.path for each in known if isinstance(each, keras.Variable) and each.value is variable
    )
    return next(paths, variable.name)
