"""The train step on several replicas, each of which owns some weights.

A replica alone has the slots of its weights, and alone updates them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from fastaccum.adapters import slots
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.storage import Storage
from fastaccum.basics.attributes import raw
from fastaccum.distribute import deal
from fastaccum.distribute.replicas import ReplicaProgram, Replicas, TracedProgram, first_components
from fastaccum.distribute.replicated_engine import LocalValues, ReplicatedEngine, Shared, widest
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import Share


class ShardedEngine(ReplicatedEngine):
    """Trains as `ReplicatedEngine`, with each slot on one replica alone: the first stage of ZeRO.

        for each replica:  sums = accumulate(its rows)                # compiled
        sums = all_reduce(sums)                                       # each keeps its part
        for each replica:  squares = measure(its part of the sums)    # compiled
        squares = all_reduce(squares)                                 # a number for each weight
        for each replica:  weights = finish(its part, squares)        # compiled
        for each replica:  assign(weights)                            # copied or gathered

    A replica's part of the sums has the gradients of the weights that the replica owns. New weights
    are copied from device to device; several workers all-gather them.

    In the program of each replica, the user's optimizer updates the weights that the replica owns.
    Weights are dealt out whole, so that a norm of one weight is what it was. The norm of all
    gradients is added up in the order of the weights, so that it has the same bits as without
    shares.
    """

    def _build_optimizer(self, model: Model, optimizer: Optimizer, storage: Storage) -> None:
        slots.require_divisible(optimizer)
        replicas = self._replicas
        self._trained = model.trainable_variables
        weights = [raw(variable) for variable in self._trained]
        bytes_of_weights = [weight.shape.num_elements() * weight.dtype.size for weight in weights]
        self._owned = deal.deal(bytes_of_weights, replicas.count)
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

        owner_of_weight = {}
        for replica, places in enumerate(self._owned):
            for place in places:
                owner_of_weight[id(self._trained[place])] = replica

        def place_slot(slot: keras.Variable, weight: keras.Variable) -> None:
            replicas.place(slot, owner_of_weight[id(weight)])

        if not optimizer.optimizer.built:
            # Keras would make each slot on the device of its weight, which is one for all weights
            # and has no room for all slots.
            with first_components(), self._alone(), slots.placed(optimizer, place_slot):
                optimizer.create(self._trained, storage)
        optimizer.build(self._trained, storage)  # raises where it was built on others
        slots.require_known_slots(optimizer, self._trained)
        for slot, place in list(slots.pair_slots(optimizer, self._trained)):
            place_slot(slot, self._trained[place])
        self._optimizer = optimizer

        # Variables that are no weight's slots, such as `iterations`, are on every replica.
        with slots.restricted(optimizer, self._trained, ()):
            shared = {id(v) for v in optimizer.variables}
        replicas.mirror([v for v in optimizer.optimizer.variables if id(raw(v)) in shared])
        slots.keep_from_keras(optimizer)

    @functools.cached_property
    def _owners(self) -> list[_Owner]:
        owned_here = self._owned[self._replicas.shards]
        return [_Owner(self, self._replicas, i, places) for i, places in enumerate(owned_here)]

    @property
    def elsewhere(self) -> set[int]:
        owned_by_first = self._owned[self._replicas.first]
        pairs = slots.pair_slots(self._optimizer, self._trained)
        return {id(raw(slot)) for slot, place in pairs if place not in owned_by_first}

    @property
    def holders(self) -> dict[int, int]:
        if self._replicas.workers == 1:
            return {}
        worker_of_place = {}
        for replica, places in enumerate(self._owned):
            for place in places:
                worker_of_place[place] = replica // len(self._replicas.devices)
        pairs = slots.pair_slots(self._optimizer, self._trained)
        return {id(raw(slot)): worker_of_place[place] for slot, place in pairs}

    @property
    def exchanged_bytes(self) -> int:
        # A buffer is there twice, before and after it is reduced. The gradients of the replica are
        # freed while their sums arrive.
        return self._gradient_bytes + 2 * min(deal.ROUND, self._gradient_bytes)

    @property
    def advice(self) -> list[str]:
        return []

    @property
    def _ends(self) -> list[ReplicaProgram]:
        programs = []
        for owner in self._owners:
            programs += [owner.measure, owner.finish]
        return programs

    def _trace_ends(self, shared: Shared, local: LocalValues) -> list[TracedProgram]:
        squares = tf.TensorSpec([len(self._trained)], tf.float32)
        gradients = shared["gradients"]
        for replica, places in enumerate(self._owned):
            if all(gradients[place] is None for place in places):
                raise ValueError(
                    f"shard_optimizer: replica {replica} would own the weights "
                    f"{[self._trained[place].path for place in places]}, and none of them has a "
                    "gradient. Pass shard_optimizer=False, or set their `trainable` to False."
                )

        traced = []
        for owner in self._owners:
            owned_gradients = [g if j in owner.places else None for j, g in enumerate(gradients)]
            part = {**shared, "gradients": owned_gradients}
            traced.append(owner.measure(part))
            traced.append(owner.finish(part, squares, local["state"], local["seen"]))
        return traced

    def _run_ends(
        self, ends: list[TracedProgram], sums: list[tuple[Shared, LocalValues]]
    ) -> list[tuple[Executed, tf.Tensor]]:
        # `_trace_ends` lists the two programs of each owner one after the other.
        measures = ends[0::2]
        finishes = ends[1::2]

        seen = widest([local["seen"] for _, local in sums])
        totals = self._reduce([shared for shared, _ in sums])
        own_squares = []
        for i, measure in enumerate(measures):
            own_squares.append(measure(i, totals[i]))
        squares = self._replicas.all_reduce(own_squares)
        results = []
        new_weights = []
        for i, finish in enumerate(finishes):
            _, local = sums[i]
            executed, working, weights = finish(i, totals[i], squares[i], local["state"], seen)
            results.append((executed, working))
            new_weights.append(weights)

        if self._replicas.workers == 1:
            self._copy(new_weights)
        else:
            self._gather(new_weights)
        return results

    def _reduce(self, sums: list[Shared]) -> list[Shared]:
        """Sums over all replicas; each local replica gets only the gradients of its own weights."""
        replicas = self._replicas
        gradients = sums[0]["gradients"]  # of the same shapes on all
        first_totals: list[Shared] = []
        totals: list[Shared] = []  # of the latest round
        # By local replica and by the place of the weight: the reduced pieces of the gradient.
        pieces: list[list[list[tf.Tensor]]] = [[[] for _ in gradients] for _ in sums]

        for number, parts in enumerate(deal.cut(gradients)):
            addends = []
            for i, shared in enumerate(sums):
                # A round's buffer is made once that of the round before has been reduced.
                reduced = []
                if number > 0:
                    reduced = [totals[i]["gradients"][-1]]
                with tf.device(replicas.devices[i]), tf.control_dependencies(reduced):
                    flat_parts = [
                        tf.reshape(shared["gradients"][place], [-1])[start:stop]
                        for place, start, stop in parts
                    ]
                if number == 0:  # the first round also sums all that is no gradient
                    addends.append({**shared, "gradients": flat_parts})
                else:
                    addends.append({"gradients": flat_parts})

            totals = replicas.all_reduce(addends, number)
            if number == 0:
                first_totals = totals
            for owner, owner_pieces, total in zip(self._owners, pieces, totals, strict=True):
                for (place, _, _), piece in zip(parts, total["gradients"], strict=True):
                    if place in owner.places:
                        owner_pieces[place].append(piece)

        for device, total, owner_pieces in zip(replicas.devices, first_totals, pieces, strict=True):
            with tf.device(device):
                total["gradients"] = _join(owner_pieces, gradients)
        return first_totals

    def _copy(self, weights: list[list[tf.Tensor]]) -> None:
        """Assigns the new weights of each owner on all other replicas, from device to device."""
        devices = self._replicas.devices
        for replica, (owner, device) in enumerate(zip(self._owners, devices, strict=True)):
            assigned: list[tf.Operation] = []
            for place, value in zip(owner.places, weights[replica], strict=True):
                # An owner's next weight waits on its device. Otherwise the other replicas would
                # make room for all weights at once.
                with tf.device(device), tf.control_dependencies(assigned):
                    new_weight = tf.identity(value)
                assigned = []
                for i, component in enumerate(raw(self._trained[place]).values):
                    if i != replica:
                        assigned.append(component.assign(new_weight, read_value=False))

    def _gather(self, weights: list[list[tf.Tensor]]) -> None:
        """Assigns the new weights on all other replicas by a collective, as several workers need.

        All owners send as much as the owner with the most.
        """
        replicas = self._replicas
        variables = [raw(v) for v in self._trained]
        length, rounds = deal.segments(self._owned, variables)

        gathered: list[list[tf.Tensor]] = [[] for _ in weights]  # by local replica and round
        for number in range(rounds):
            segments = []
            for i, owner in enumerate(self._owners):
                round_before = gathered[i][-1:]  # none in the first round
                with tf.device(replicas.devices[i]), tf.control_dependencies(round_before):
                    segments.append(deal.pack(owner.places, weights[i], variables, number, length))
            for i, buffer in enumerate(replicas.all_gather(segments, number)):
                gathered[i].append(buffer)

        for i, device in enumerate(replicas.devices):
            for replica in range(replicas.count):
                if replica == replicas.first + i:
                    continue
                start = replica * length
                with tf.device(device):
                    line = [buffer[start : start + length] for buffer in gathered[i]]
                    for place, value in deal.unpack(self._owned[replica], line, variables):
                        variables[place].values[i].assign(value)


def _join(
    pieces: list[list[tf.Tensor]], gradients: list[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Joins the pieces of each gradient in its shape; None where there are none."""
    joined: list[tf.Tensor | None] = []
    for gradient_pieces, gradient in zip(pieces, gradients, strict=True):
        if gradient is None or not gradient_pieces:
            joined.append(None)
        else:
            joined.append(tf.reshape(tf.concat(gradient_pieces, 0), gradient.shape))
    return joined


class _Owner:
    """The programs of the local replica that owns the weights at some places."""

    def __init__(
        self, engine: ShardedEngine, replicas: Replicas, replica: int, places: Sequence[int]
    ):
        self.places = places
        self._engine = engine
        uses_xla = engine.objective.options.uses_xla
        self.measure = ReplicaProgram(
            self._measured, replicas, uses_xla, scope=self._alone, only=replica
        )
        self.finish = ReplicaProgram(
            self._finish_replica, replicas, uses_xla, scope=self._alone, only=replica
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        engine = self._engine
        with engine._alone(), slots.restricted(engine._optimizer, engine._trained, self.places):
            yield

    def _measured(self, shared: Shared) -> tf.Tensor:
        sums = self._engine.as_accumulated(shared, [])
        return self._engine.cycle.squares(sums, self.places)

    def _finish_replica(
        self, shared: Shared, squares: tf.Tensor, state: list[tf.Tensor], seen: tf.Tensor
    ) -> tuple[Executed, tf.Tensor, list[tf.Tensor]]:
        share = Share(self.places, squares)
        executed, working = self._engine._finish_replica(shared, state, seen, share)
        weights = [raw(self._engine._trained[place]).read_value() for place in self.places]
        return executed, working, weights
