"""The train step on several replicas of which each owns some weights: it alone has their slots and
updates them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from fastaccum.adapters import slots
from fastaccum.adapters.attributes import raw
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.distribute import deal
from fastaccum.distribute.replicas import ReplicaProgram, Replicas, TracedProgram, first_components
from fastaccum.distribute.replicated_step import LocalValues, ReplicatedStep, Shared, widest
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import Share


class ShardedStep(ReplicatedStep):
    """Trains as `ReplicatedStep`, with each slot on one replica alone: the first stage of ZeRO.

        for each replica:  sums = accumulate(its rows)                # compiled
        sums = all_reduce(sums)                                       # each keeps the gradients of
        its own weights
        for each replica:  squares = measure(its part of the sums)    # compiled
        squares = all_reduce(squares)                                 # a number for each weight
        for each replica:  weights = finish(its part, squares)        # compiled
        for each replica:  assign(weights)                            # copied, or of several
            workers all-gathered

    The user's optimizer updates, in the program of each replica, the weights that are the replica's
    own. Weights are dealt out whole, so that a norm of one weight is what it was. The norm of all
    gradients is added up in the order of the weights, so that it has the same bits as without
    shares.
    """

    def _build_optimizer(self, model: Model, optimizer: Optimizer) -> None:
        slots.require_divisible(optimizer)
        replicas, self._trained = self._replicas, model.trainable_variables
        sizes = [raw(v).shape.num_elements() * raw(v).dtype.size for v in self._trained]
        self._owned = deal.deal(sizes, replicas.count)
        if not all(self._owned):
            raise ValueError(
                f"shard_optimizer=True: the model has {len(self._trained)} trainable variables, "
                f"and there are {replicas.count} replicas, each of which must own one. Pass "
                "shard_optimizer=False."
            )
        if replicas.workers > 1 and optimizer.optimizer.use_ema:
            raise ValueError(
                "use_ema=True: none of several workers has all averages. Pass "
                "shard_optimizer=False."
            )
        owner = {
            id(self._trained[place]): replica
            for replica, own in enumerate(self._owned)
            for place in own
        }
        if not optimizer.optimizer.built:
            # Keras makes a slot on the device of its weight, which has no room for those of all.
            placed = slots.placed(
                optimizer, lambda slot, weight: replicas.place(slot, owner[id(weight)])
            )
            with first_components(), self._alone(), placed:
                optimizer.optimizer.build(self._trained)
        optimizer.build(self._trained)  # raises where it was built on others
        slots.require_known_slots(optimizer, self._trained)
        for slot, place in list(slots.pair_slots(optimizer, self._trained)):
            replicas.place(slot, owner[id(self._trained[place])])
        self._optimizer = optimizer
        with slots.restricted(optimizer, self._trained, ()):
            shared = {id(v) for v in optimizer.variables}
        replicas.mirror([v for v in optimizer.optimizer.variables if id(raw(v)) in shared])
        slots.keep_from_keras(optimizer)

    @functools.cached_property
    def _owners(self) -> list[_Owner]:
        return [
            _Owner(self, self._replicas, i, own)
            for i, own in enumerate(self._owned[self._replicas.shards])
        ]

    @property
    def elsewhere(self) -> set[int]:
        pairs = slots.pair_slots(self._optimizer, self._trained)
        return {
            id(raw(slot)) for slot, place in pairs if place not in self._owned[self._replicas.first]
        }

    @property
    def holders(self) -> dict[int, int]:
        if self._replicas.workers == 1:
            return {}
        worker = {
            j: i // len(self._replicas.devices) for i, own in enumerate(self._owned) for j in own
        }
        return {
            id(raw(slot)): worker[place]
            for slot, place in slots.pair_slots(self._optimizer, self._trained)
        }

    @property
    def exchanged_bytes(self) -> int:
        # A buffer before it is reduced and after; the gradients go as the parts of them come.
        return self._gradient_bytes + 2 * min(deal.ROUND, self._gradient_bytes)

    @property
    def advice(self) -> list[str]:
        return []

    @property
    def _ends(self) -> list[ReplicaProgram]:
        return [program for owner in self._owners for program in (owner.measure, owner.finish)]

    def _trace_ends(self, shared: Shared, own: LocalValues) -> list[TracedProgram]:
        squares, specs = tf.TensorSpec([len(self._trained)], tf.float32), shared["gradients"]
        traced = []
        for replica, places in enumerate(self._owned):
            if all(specs[place] is None for place in places):
                raise ValueError(
                    f"shard_optimizer: of the weights that replica {replica} would own, "
                    f"{[self._trained[place].path for place in places]}, none has a gradient. Pass "
                    "shard_optimizer=False, or switch their `trainable` off."
                )
        for owner in self._owners:
            mine = {
                **shared,
                "gradients": [g if j in owner.own else None for j, g in enumerate(specs)],
            }
            traced += [owner.measure(mine), owner.finish(mine, squares, own["state"], own["seen"])]
        return traced

    def _run_ends(
        self, ends: list[TracedProgram], sums: list[tuple[Shared, LocalValues]]
    ) -> list[tuple[Executed, tf.Tensor]]:
        replicas = self._replicas
        seen = widest([own["seen"] for _, own in sums])
        totals = self._reduce([shared for shared, _ in sums])
        squares = replicas.all_reduce([ends[2 * i](i, total) for i, total in enumerate(totals)])
        given = enumerate(zip(totals, squares, sums, strict=True))
        results = [
            ends[2 * i + 1](i, total, each, own["state"], seen)
            for i, (total, each, (_, own)) in given
        ]
        (self._copy if replicas.workers == 1 else self._gather)(
            [weights for *_, weights in results]
        )
        return [(executed, working) for executed, working, _ in results]

    def _reduce(self, sums: list[Shared]) -> list[Shared]:
        """Returns on each replica the sums over all replicas: of the gradients those of its own
        weights.
        """
        replicas, specs = self._replicas, sums[0]["gradients"]
        rounds: list[list[Shared]] = []
        own: list[list[list[tf.Tensor]]] = [[[] for _ in specs] for _ in sums]
        for number, parts in enumerate(deal.cut(specs)):
            given = []
            for i, shared in enumerate(sums):
                others = (
                    {}
                    if number
                    else {name: each for name, each in shared.items() if name != "gradients"}
                )
                # A round's buffer is made once that of the round before has been reduced.
                before = [each[i]["gradients"][-1] for each in rounds[-1:]]
                with tf.device(replicas.devices[i]), tf.control_dependencies(before):
                    flat = [
                        tf.reshape(shared["gradients"][place], [-1])[start:stop]
                        for place, start, stop in parts
                    ]
                given.append({**others, "gradients": flat})
            rounds.append(replicas.all_reduce(given, number))
            for owner, found, total in zip(self._owners, own, rounds[-1], strict=True):
                for (place, *_), part in zip(parts, total["gradients"], strict=True):
                    if place in owner.own:
                        found[place].append(part)
        for device, total, found in zip(replicas.devices, rounds[0], own, strict=True):
            with tf.device(device):
                whole = (
                    tf.reshape(tf.concat(f, 0), s.shape) if f else None
                    for f, s in zip(found, specs, strict=True)
                )
                total["gradients"] = list(whole)
        return rounds[0]

    def _copy(self, weights: list[list[tf.Tensor]]) -> None:
        """Assigns the new weights of each owner on all other replicas, from device to device."""
        for replica, (owner, device) in enumerate(
            zip(self._owners, self._replicas.devices, strict=True)
        ):
            assigned: list[tf.Operation] = []
            for place, value in zip(owner.own, weights[replica], strict=True):
                # An owner's next weight waits on its device, or the others would make room for all
                # at once.
                with tf.device(device), tf.control_dependencies(assigned):
                    own = tf.identity(value)
                others = (v for i, v in enumerate(raw(self._trained[place]).values) if i != replica)
                assigned = [v.assign(own, read_value=False) for v in others]

    def _gather(self, weights: list[list[tf.Tensor]]) -> None:
        """Assigns them by a collective, which several workers need; all owners send as much as the
        largest.
        """
        replicas, owned, variables = self._replicas, self._owned, [raw(v) for v in self._trained]
        segment, rounds = deal.segments(owned, variables)
        gathered: list[list[tf.Tensor]] = [[] for _ in weights]
        for number in range(rounds):
            mine = []
            for i, owner in enumerate(self._owners):
                with tf.device(replicas.devices[i]), tf.control_dependencies(gathered[i][-1:]):
                    mine.append(deal.pack(owner.own, weights[i], variables, number, segment))
            for i, each in enumerate(replicas.all_gather(mine, number)):
                gathered[i].append(each)
        for i, device in enumerate(replicas.devices):
            for replica in sorted({*range(replicas.count)} - {replicas.first + i}):
                with tf.device(device):
                    parts = [
                        each[replica * segment : (replica + 1) * segment] for each in gathered[i]
                    ]
                    for place, value in deal.unpack(owned[replica], parts, variables):
                        variables[place].values[i].assign(value)


class _Owner:
    """The programs of the local replica that owns the weights at some places."""

    def __init__(self, step: ShardedStep, replicas: Replicas, replica: int, own: Sequence[int]):
        self.own, self._step = own, step
        self.measure, self.finish = (
            ReplicaProgram(
                function, replicas, step.objective.options.uses_xla, scope=self._alone, only=replica
            )
            for function in (self._measured, self._finished)
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        step = self._step
        with step._alone(), slots.restricted(step._optimizer, step._trained, self.own):
            yield

    def _measured(self, shared: Shared) -> tf.Tensor:
        return self._step.cycle.squares(self._step.accumulated(shared, []), self.own)

    def _finished(
        self, shared: Shared, squares: tf.Tensor, state: list[tf.Tensor], seen: tf.Tensor
    ) -> tuple[Executed, tf.Tensor, list[tf.Tensor]]:
        executed, working = self._step._finished(shared, state, seen, Share(self.own, squares))
        return (
            executed,
            working,
            [raw(self._step._trained[place]).read_value() for place in self.own],
        )
