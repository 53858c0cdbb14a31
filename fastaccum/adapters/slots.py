"""The slots of a Keras optimizer by weight: each weight can be updated where its slots are."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.guards import Guard, is_users
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.storage import scales_of
from fastaccum.basics.attributes import Variable, kinds, raw, replaced
from fastaccum.basics.warnings import warn
from fastaccum.kernels import private

# Slots that hold more numbers for each number of a weight are not those of a Keras optimizer: its
# optimizers have at most three.
MOST_PER_WEIGHT = 8.0
# Methods that see all weights: a user's override may compute one weight's update from another's.
_OF_ALL_WEIGHTS = ("apply", "apply_gradients", *private.OVERRIDABLE_UPDATES)
_START_ANEW = (
    "To train on without shares, start all workers anew with shard_optimizer=False and the same "
    "checkpoint_dir."
)


def indivisible(optimizer: Optimizer) -> str:
    """Says why an optimizer's update of one weight may depend on another; "" if it does not."""
    of_user = optimizer.optimizer
    if "keras.MultiOptimizer" in kinds(of_user):
        return "has several optimizers, each with a count of its own updates"
    if of_user.global_clipnorm:
        return (
            f"has global_clipnorm={of_user.global_clipnorm}: make it without, and pass "
            "Trainer(clip_norm=...)"
        )
    for value in vars(of_user).values():
        if isinstance(value, keras.random.SeedGenerator):
            return "has a SeedGenerator, of which each replica would draw for its own weights alone"
    for name in _OF_ALL_WEIGHTS:
        if is_users(of_user, name):
            return f"overrides {name}, which sees all weights: override update_step instead"
    return ""


def require_divisible(optimizer: Optimizer) -> None:
    """Raises ValueError for an `indivisible` optimizer."""
    problem = indivisible(optimizer)
    if problem:
        raise ValueError(_refusal(optimizer, problem))


def require_known_slots(optimizer: Optimizer, trained: Sequence[Variable]) -> None:
    """Raises ValueError if the built optimizer holds state that belongs to no weight.

    Scalars of a Keras optimizer, such as its count of updates, may.
    """
    known = {id(optimizer.iterations), id(raw(private.learning_rate(optimizer.optimizer, None)))}
    for slot, _ in pair_slots(optimizer, trained):
        known.add(id(raw(slot)))
    is_own_update = is_users(optimizer.optimizer, "update_step")
    for variable in optimizer.variables:
        if id(variable) in known:
            continue
        if variable.shape.rank or is_own_update:
            problem = (
                f"holds {variable.name!r} of shape {variable.shape}, which is in no list with a "
                "slot for each weight that is trained"
            )
            raise ValueError(_refusal(optimizer, problem))


def slots_per_weight(optimizer: Optimizer) -> float:
    """Counts the numbers of slots for each number of a weight, on a copy of the optimizer."""
    size = 64
    of_user = optimizer.optimizer
    copy = type(of_user).from_config(of_user.get_config())
    copy.build([keras.Variable(tf.zeros([size, size]), name="kernel")])
    slots = [variable for variable in copy.variables if len(variable.shape)]
    return sum(math.prod(slot.shape) for slot in slots) / size**2


@contextmanager
def placed(
    optimizer: Optimizer, place: Callable[[keras.Variable, keras.Variable], None]
) -> Iterator[None]:
    """Calls `place(slot, weight)` inside the block as soon as Keras has made a weight's slot."""
    make = optimizer.optimizer.add_variable_from_reference

    def make_and_place(
        reference_variable: keras.Variable, *args: Any, **options: Any
    ) -> keras.Variable:
        slot = make(reference_variable, *args, **options)
        place(slot, reference_variable)
        return slot

    with replaced([(optimizer.optimizer, "add_variable_from_reference", make_and_place)]):
        yield


def keep_from_keras(optimizer: Optimizer) -> None:
    """Lets `model.fit` raise under a strategy.

    Keras would update a replica's own slots once per replica. Where other workers have slots, a
    saved model has none, with a warning.
    """
    of_user = optimizer.optimizer
    if _are_all_here(of_user):
        remedy = (
            "Train a step with Trainer(shard_optimizer=False) first: each replica has all slots "
            "then."
        )
    else:
        remedy = _START_ANEW
        vars(of_user)["save_own_variables"] = Guard(_save_none, of_user)
    vars(of_user)["apply_gradients"] = Guard(_apply_outside_strategies, of_user, remedy)


def return_to_keras(optimizer: Optimizer) -> None:
    """Takes back what `keep_from_keras` did.

    Raises ValueError where other workers have some of the slots.
    """
    of_user = optimizer.optimizer
    if not _are_all_here(of_user):
        raise ValueError(
            f"The slots of {type(of_user).__name__} are shared out over workers. {_START_ANEW}"
        )
    vars(of_user).pop("apply_gradients", None)


def _are_all_here(optimizer: keras.optimizers.Optimizer) -> bool:
    return all(raw(v).is_initialized() for v in optimizer.variables)


def _save_none(optimizer: keras.optimizers.Optimizer, store: object) -> None:
    warn(
        f"{type(optimizer).__name__} is saved without its slots, since each worker holds a "
        "share of them: checkpoint_dir has them all.",
        UserWarning,
    )


def _apply_outside_strategies(
    optimizer: keras.optimizers.Optimizer, remedy: str, grads_and_vars: Any
) -> Any:
    if tf.distribute.has_strategy():
        raise ValueError(
            f"The slots of {type(optimizer).__name__} are shared out over replicas "
            f"(shard_optimizer), which Keras's own fit cannot update. {remedy}"
        )
    return type(optimizer).apply_gradients(optimizer, grads_and_vars)


def _refusal(optimizer: Optimizer, problem: str) -> str:
    return (
        f"shard_optimizer=True: {type(optimizer.optimizer).__name__} {problem}. Or pass "
        "shard_optimizer=False."
    )


def pair_slots(
    optimizer: Optimizer, trained: Sequence[Variable]
) -> Iterator[tuple[keras.Variable, int]]:
    """Yields each slot with its weight's place in `trained`.

    Keras's optimizers keep slots in lists, in the order of their weights.
    """
    for part in optimizer.parts:
        place_of = {private.var_key(part, v): place for place, v in enumerate(trained)}
        places = []
        for variable in private.trainable_variables(part):
            places.append(place_of.get(private.var_key(part, variable)))

        for name, slots in vars(part).items():
            if name in (private.variables.name, private.trainable_variables.name):
                continue
            if not isinstance(slots, list) or len(slots) != len(places):
                continue
            for slot, place in zip(slots, places, strict=True):
                if place is None or not isinstance(slot, keras.Variable):
                    continue
                # A user's scalars for matrices may be anything; Keras's Adafactor has some.
                if slot.shape or not trained[place].shape or not is_users(part, "build"):
                    yield slot, place
                    scales = scales_of(slot)
                    if scales is not None:
                        yield scales, place


def restricted(
    optimizer: Optimizer, trained: Sequence[Variable], places: Collection[int]
) -> AbstractContextManager[None]:
    """Shows the optimizer, inside the block, only the weights at `places` of `trained`.

    Of slots it sees those of these weights.
    """
    hidden = {id(raw(v)) for place, v in enumerate(trained) if place not in places}
    for slot, place in pair_slots(optimizer, trained):
        if place not in places:
            hidden.add(id(raw(slot)))

    attributes: list[tuple[object, str, object]] = [
        (optimizer, "elsewhere", hidden),
        (optimizer, "trained", [trained[place] for place in places]),
    ]
    for part in optimizer.parts:
        if part.use_ema:  # it averages all that it was built with, whatever has a gradient
            weights = []
            averages = []
            for weight, average in zip(
                private.trainable_variables(part), private.moving_averages(part), strict=True
            ):
                if id(raw(weight)) not in hidden:
                    weights.append(weight)
                    averages.append(average)
            attributes.append((part, private.trainable_variables.name, weights))
            attributes.append((part, private.moving_averages.name, averages))
    return replaced(attributes)
