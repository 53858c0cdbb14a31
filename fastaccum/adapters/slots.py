"""The slots of a Keras optimizer by weight, so that each weight can be updated where its slots
are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.optimizers import Optimizer, is_users
from fastaccum.basics.attributes import Variable, kinds, raw, replaced
from fastaccum.basics.warnings import warn
from fastaccum.kernels import private

# more numbers than the slots of any optimizer of Keras's hold for each of a weight
MOST_PER_WEIGHT = 8.0
# What a class of the user's own may override to compute one weight's update from another's.
_OF_ALL_WEIGHTS = ("apply", "apply_gradients", *private.OVERRIDABLE_UPDATES)
_ANEW = (
    "To train on without shares, start all workers anew with shard_optimizer=False and the same "
    "checkpoint_dir."
)


def indivisible(optimizer: Optimizer) -> str:
    """Returns why an optimizer's update of one weight depends on another, or cannot be seen not to;
    else "".
    """
    own = optimizer.optimizer
    if "keras.MultiOptimizer" in kinds(own):
        return "has several optimizers, each with a count of its own updates"
    if own.global_clipnorm:
        return (
            f"has global_clipnorm={own.global_clipnorm}: make it without, and pass "
            "Trainer(clip_norm=...)"
        )
    if any(isinstance(each, keras.random.SeedGenerator) for each in vars(own).values()):
        return "has a SeedGenerator, of which each replica would draw for its own weights alone"
    overridden = [name for name in _OF_ALL_WEIGHTS if is_users(own, name)][:1]
    return "".join(
        f"overrides {name}, which sees all weights: override update_step instead"
        for name in overridden
    )


def require_divisible(optimizer: Optimizer) -> None:
    """Raises ValueError for an `indivisible` optimizer."""
    if problem := indivisible(optimizer):
        raise ValueError(_refusal(optimizer, problem))


def require_known_slots(optimizer: Optimizer, trained: Sequence[Variable]) -> None:
    """Raises ValueError if the built optimizer holds state that belongs to no weight, besides what
    Keras's hold.
    """
    counted = optimizer.iterations, raw(private.learning_rate(optimizer.optimizer, None))
    known = {id(v) for v in counted} | {id(raw(slot)) for slot, _ in pair_slots(optimizer, trained)}
    of_user = is_users(optimizer.optimizer, "update_step")
    for variable in optimizer.variables:
        if id(variable) not in known and (variable.shape.rank or of_user):
            what = f"{variable.name!r} of shape {variable.shape}"
            problem = (
                f"holds {what}, which is in no list with a slot for each weight that is trained"
            )
            raise ValueError(_refusal(optimizer, problem))


def slots_per_weight(optimizer: Optimizer) -> float:
    """Measures how many numbers the slots hold for each number of a weight, with a copy of the
    optimizer.
    """
    own, size = optimizer.optimizer, 64
    copy = type(own).from_config(own.get_config())
    copy.build([keras.Variable(tf.zeros([size, size]), name="kernel")])
    return sum(math.prod(v.shape) for v in copy.variables if len(v.shape)) / size**2


@contextmanager
def placed(
    optimizer: Optimizer, place: Callable[[keras.Variable, keras.Variable], None]
) -> Iterator[None]:
    """Calls `place` inside the block with each slot, as soon as Keras has made it, and the weight
    that it is like.
    """
    make = optimizer.optimizer.add_variable_from_reference

    def make_and_place(
        reference_variable: keras.Variable, *args: Any, **options: Any
    ) -> keras.Variable:
        place(slot := make(reference_variable, *args, **options), reference_variable)
        return slot

    with replaced([(optimizer.optimizer, "add_variable_from_reference", make_and_place)]):
        yield


def keep_from_keras(optimizer: Optimizer) -> None:
    """Lets `model.fit` raise under a strategy, where Keras would update a replica's own slots once
    per replica.

    Where other workers have slots, a saved model has none, with a warning.
    """
    own = optimizer.optimizer
    remedy = (
        "Train a step with Trainer(shard_optimizer=False) first: each replica has all slots then."
    )
    own.apply_gradients = functools.partial(
        _apply_outside_strategies, own, remedy if _are_all_here(own) else _ANEW
    )
    if not _are_all_here(own):
        own.save_own_variables = functools.partial(_save_none, own)


def return_to_keras(optimizer: Optimizer) -> None:
    """Takes back what `keep_from_keras` did; raises ValueError where other workers have some of the
    slots.
    """
    own = optimizer.optimizer
    if not _are_all_here(own):
        raise ValueError(f"The slots of {type(own).__name__} are shared out over workers. {_ANEW}")
    vars(own).pop("apply_gradients", None)


def _are_all_here(own: keras.optimizers.Optimizer) -> bool:
    return all(raw(v).is_initialized() for v in own.variables)


def _save_none(own: keras.optimizers.Optimizer, store: object) -> None:
    name = type(own).__name__
    warn(
        f"{name} is saved without its slots, since each worker holds a share of them: "
        "checkpoint_dir has them all.",
        UserWarning,
    )


def _apply_outside_strategies(
    own: keras.optimizers.Optimizer, remedy: str, grads_and_vars: Any
) -> Any:
    if tf.distribute.has_strategy():
        raise ValueError(
            f"The slots of {type(own).__name__} are shared out over replicas (shard_optimizer), "
            f"which Keras's own fit cannot update. {remedy}"
        )
    return type(own).apply_gradients(own, grads_and_vars)


def _refusal(optimizer: Optimizer, problem: str) -> str:
    return (
        f"shard_optimizer=True: {type(optimizer.optimizer).__name__} {problem}. Or pass "
        "shard_optimizer=False."
    )


def pair_slots(
    optimizer: Optimizer, trained: Sequence[Variable]
) -> Iterator[tuple[keras.Variable, int]]:
    """Yields each slot with its weight's place in `trained`: Keras's optimizers have lists in the
    weights' order.
    """
    for part in optimizer.parts:
        places = {private.var_key(part, v): j for j, v in enumerate(trained)}
        weights = [places.get(private.var_key(part, v)) for v in private.trainable_variables(part)]
        lists = (
            held
            for name, held in vars(part).items()
            if name not in (private.variables.name, private.trainable_variables.name)
        )
        for held in lists:
            if isinstance(held, list) and len(held) == len(weights):
                for slot, place in zip(held, weights, strict=True):
                    if not isinstance(slot, keras.Variable) or place is None:
                        continue
                    # A user's scalars for matrices may be anything; Keras's Adafactor has some.
                    if slot.shape or not trained[place].shape or not is_users(part, "build"):
                        yield slot, place


def restricted(
    optimizer: Optimizer, trained: Sequence[Variable], own: Collection[int]
) -> AbstractContextManager[None]:
    """Lets the optimizer know, inside the block, the weights in these places of `trained` alone,
    and their slots.
    """
    slots = {id(raw(slot)) for slot, place in pair_slots(optimizer, trained) if place not in own}
    others = slots | {id(raw(v)) for j, v in enumerate(trained) if j not in own}
    attributes: list[tuple[object, str, object]] = [(optimizer, "elsewhere", others)]
    attributes.append((optimizer, "trained", [trained[j] for j in own]))
    for part in optimizer.parts:
        if part.use_ema:  # it averages all that it was built with, whatever has a gradient
            pairs = zip(
                private.trainable_variables(part), private.moving_averages(part), strict=True
            )
            kept = [pair for pair in pairs if id(raw(pair[0])) not in others]
            attributes.append(
                (part, private.trainable_variables.name, [weight for weight, _ in kept])
            )
            attributes.append(
                (part, private.moving_averages.name, [average for _, average in kept])
            )
    return replaced(attributes)
