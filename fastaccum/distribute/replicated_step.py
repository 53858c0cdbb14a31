"""The train step of a model on several replicas: its pieces as programs, with one all-reduce between them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from fastaccum.adapters.attributes import replaced
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import Outputs
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.distribute.replicas import ReplicaProgram, Replicas, WorkersDifferError, first_components
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.step.model_step import Executed, ModelStep
from fastaccum.step.program import Program
from fastaccum.step.train_step import Accumulated

PIECE = 16  # bits of an integer in one float32, which holds 24 exactly
SEED_STRIDE = 0x9E3779B1  # between replicas; a prime, so that seeds drawn one after the other do not meet


class Buffer:
    """A list of tensors as one flat tensor, float32 (float64 if any of them is), and back.

    >>> buffer = Buffer()
    >>> flat = buffer.pack([tf.constant([[1.0, 2.0]]), tf.constant(3.0)])
    >>> flat.numpy().tolist(), [t.numpy().tolist() for t in buffer.unpack(flat)]
    ([1.0, 2.0, 3.0], [[[1.0, 2.0]], 3.0])
    """

    def pack(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        self._specs = [(t.shape, accumulator_dtype(t.dtype)) for t in tensors]
        self._dtype = tf.float64 if any(dtype == tf.float64 for _, dtype in self._specs) else tf.float32
        return tf.concat([tf.reshape(tf.cast(t, self._dtype), [-1]) for t in tensors], 0)

    def unpack(self, flat: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(flat, [shape.num_elements() for shape, _ in self._specs])
        return [
            tf.cast(tf.reshape(part, shape), dtype) for part, (shape, dtype) in zip(parts, self._specs, strict=True)
        ]

    def zeros(self) -> tf.Tensor:
        """What `pack` makes of zeros alone."""
        return tf.zeros([sum(shape.num_elements() for shape, _ in self._specs)], self._dtype)


def spread(integers: tf.Tensor, replica: tf.Tensor, count: int) -> tf.Tensor:
    """Integers [n] as float32 [replicas, n, 4] whose sum over the replicas holds those of each, exactly."""
    shifts = tf.range(0, 64, PIECE, dtype=tf.int64)
    pieces = tf.bitwise.bitwise_and(tf.bitwise.right_shift(integers[:, tf.newaxis], shifts), 2**PIECE - 1)
    own = tf.one_hot(replica, count, dtype=tf.float32)
    return own[:, tf.newaxis, tf.newaxis] * tf.cast(pieces, tf.float32)


def collected(pieces: tf.Tensor) -> tf.Tensor:
    """The integers of each replica, int64 [replicas, n], from the sum of what `spread` made.

    >>> collected(spread(tf.constant([-2**63, 5]), 0, 2) + spread(tf.constant([2**40 + 1, -1]), 1, 2)).numpy().tolist()
    [[-9223372036854775808, 5], [1099511627777, -1]]
    """
    shifts = tf.range(0, 64, PIECE, dtype=tf.int64)
    return tf.reduce_sum(tf.bitwise.left_shift(tf.cast(pieces, tf.int64), shifts), -1)


class Exchange:
    """One round: what each local replica has for the others, added up over all of them.

    Args:
        replicas: whose sums these are.
        checks: index checks, which every replica is to know the outcome of.
        metrics: variables that each replica adds to by itself.
    """

    def __init__(self, replicas: Replicas, checks: Any, metrics: Sequence[tf.Variable]):
        self._replicas, self._checks, self._metrics = replicas, checks, list(metrics)
        self._buffer = Buffer()

    @contextlib.contextmanager
    def metrics_from_zero(self) -> Iterator[list[tf.Tensor]]:
        """Within it the metrics start from zero, and it adds to the list yielded what they have reached at its end."""
        before = [v.read_value() for v in self._metrics]
        for variable in self._metrics:
            variable.assign(tf.zeros_like(variable))
        reached: list[tf.Tensor] = []
        yield reached
        reached += [v.read_value() for v in self._metrics]
        for variable, value in zip(self._metrics, before, strict=True):
            variable.assign(value)

    def pack(self, replica: tf.Tensor, terms: list[tf.Tensor], reached: list[tf.Tensor]) -> tf.Tensor:
        """One replica's part: float terms, and what its metrics reached."""
        seen = tf.reshape(self._checks.seen(), [-1])
        working = tf.constant(1.0)
        return self._buffer.pack([*terms, *reached, spread(seen, replica, self._replicas.count), working])

    def unpack(self, flat: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The terms of all replicas together, and how many took part. Updates metrics and index checks."""
        *values, seen, working = self._buffer.unpack(flat)
        terms, reached = values[: len(values) - len(self._metrics)], values[len(values) - len(self._metrics) :]
        for variable, value in zip(self._metrics, reached, strict=True):
            variable.assign(variable + tf.cast(value, variable.dtype))
        seen = tf.reshape(collected(seen), [self._replicas.count, len(self._checks.lookups), 2])
        low, high = tf.unstack(seen, axis=-1)
        self._checks.assign(tf.stack([tf.reduce_min(low, 0), tf.reduce_max(high, 0)], -1))
        return terms, working

    def without_data(self) -> int:
        """Takes part in a round that others may have data for; how many replicas had."""
        nothing = [self._buffer.zeros() for _ in self._replicas.devices]
        reduced = self._replicas.all_reduce(nothing)[0]
        *_, working = self._buffer.unpack(reduced)
        return int(working)


class ReplicatedStep(ModelStep):
    """`ModelStep` on the replicas of a strategy; every stack holds the rows of the local ones, side by side.

        for each replica:  sums = accumulate(its rows)          # compiled
        sums = all_reduce(sums)                                 # one flat float32 buffer
        for each replica:  finish(sums)                         # compiled

    The pieces are those of one device, traced on the first replica's variables and called with each other's. All finish
    with the same numbers, so their variables stay equal bit for bit, the loss scale's and the metrics' among them.
    What XLA cannot hold, the collective, stands in between: in a graph that only calls the two programs.

    Moving statistics are averaged over the replicas; random masks differ between them. Several losses, whose divisors
    must be known before the first gradient, take one more all-reduce, of a few scalars.
    """

    def __init__(
        self,
        replicas: Replicas,
        model: Model,
        outputs: Outputs,
        losses: Any,
        metrics: Any,
        optimizer: Any,
        *,
        loss_scale,
        **options,
    ):
        if unknown := metrics.unknown_states:
            raise ValueError(
                f"metrics={unknown} are of classes of your own, whose states cannot be added up over replicas unless "
                "they are sums: derive them from keras.metrics.Mean or Sum, or pass fn(y_true, y_pred)."
            )
        self._replicas = replicas
        self._optimizers = [part for part in optimizer.parts if hasattr(part, "_distribution_strategy")]
        for part in self._optimizers:  # that of the scope in which it was made, if any
            part._distribution_strategy = replicas.strategy
        if not optimizer.optimizer.built:
            with replicas.strategy.scope():
                optimizer.optimizer.build(model.trainable_variables)
        replicas.mirror(optimizer.optimizer.variables)
        replicas.unmirror([*metrics.compiled.variables, loss_scale])
        with first_components():
            super().__init__(model, outputs, losses, metrics, optimizer, loss_scale=loss_scale, **options)
            self._seeds = model.seeds
        self._statistics = [v for v in self._state if v.dtype.is_floating]
        loss_means = [v.value for mean in self._loss_means.values() for v in mean.variables]
        metric_variables = [*metrics.variables, *loss_means]
        self._training = Exchange(replicas, self.index_checks, metric_variables)
        self._evaluation = Exchange(replicas, self.index_checks, metric_variables)
        self._length_known = True
        self._accumulate, self._finish, self._sum, self._total, self._count = (
            ReplicaProgram(function, replicas, self._jit_compile, around=self._alone)
            for function in (self._accumulated, self._finished, self._summed, self._totalled, self._counted_rows)
        )
        self._counter = Program(self._count_on_all, jit_compile=False)
        self._executor = Program(self._execute_on_all, jit_compile=False)
        self._evaluator = Program(self._evaluate_on_all, jit_compile=False)
        self.compiled_execute, self.compiled_evaluate = self._executed, self._evaluated

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Around the trace of a replica's program: nothing in it may reduce or update on other devices."""
        default = tf.distribute.get_strategy()
        strategies = [(part, "_distribution_strategy", default) for part in self._optimizers]
        with replaced(strategies):
            yield

    # On one replica, compiled.

    def _accumulated(self, replica: tf.Tensor, counts: Any, *stacks: Batch) -> tuple[tf.Tensor, list]:
        self._counted = counts
        state = [v.read_value() for v in self._state]  # before seeds are the replica's own
        with self._training.metrics_from_zero() as reached, self._own_masks(replica):
            sums = self.accumulate(*stacks)
        self._reached = [g is not None for g in sums.gradients]
        # The stacks of workers may differ in size, and so may their divisors of the scale.
        typical = self._typical_weight(*stacks)
        gradients = [g * tf.constant(typical, g.dtype) for g in sums.gradients if g is not None]
        means = [tf.cast(v.read_value(), tf.float32) / self._replicas.count for v in self._statistics]
        terms = [*gradients, *means, sums.loss_sum, sums.weight_sum]
        return self._training.pack(replica, terms, reached), state

    def _counts(self, *stacks: Batch) -> list[tf.Tensor]:
        return tf.unstack(self._counted)

    def _counted_rows(self, *stacks: Batch) -> tf.Tensor:
        return tf.stack(self.count(*stacks))

    @contextlib.contextmanager
    def _own_masks(self, replica: tf.Tensor) -> Iterator[None]:
        """Within it random seeds are the replica's own; they are shared again outside, so that one can be saved."""
        for seed in self._seeds:
            seed.assign_add(_offset(seed, replica))
        yield
        for seed in self._seeds:
            seed.assign_sub(_offset(seed, replica))

    def _finished(self, flat: tf.Tensor, state: list[tf.Tensor]) -> tuple[Executed, tf.Tensor]:
        terms, working = self._training.unpack(flat)
        self._all_work = tf.equal(working, float(self._replicas.count))
        terms = iter(terms)
        gradients = [next(terms) if reached else None for reached in self._reached]
        for variable in self._statistics:
            variable.assign(tf.cast(next(terms), variable.dtype))
        loss_sum, weight_sum = terms
        scale = self.loss_scale.scale()
        result = self.finish(Accumulated(gradients, loss_sum, weight_sum, scale, state))
        return self._report(self._tracked(scale, result)), working

    def _accept(self) -> tf.Tensor:
        return super()._accept() & self._all_work

    def _summed(self, replica: tf.Tensor, *stacks: Batch) -> tf.Tensor:
        with self._evaluation.metrics_from_zero() as reached:
            *sums, _ = self.evaluate(*stacks)
        return self._evaluation.pack(replica, sums, reached)

    def _totalled(self, flat: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        sums, working = self._evaluation.unpack(flat)
        return [*sums, self.index_checks.seen()], working

    # On all local replicas, in a graph that calls the compiled programs.

    def _count_on_all(self, *stacks: Batch) -> list[tf.Tensor]:
        shards = self._shards(stacks)
        count = self._count(*shards[0])
        return self._replicas.all_reduce([count(i, *share) for i, share in enumerate(shards)])

    def _execute_on_all(self, counts: list, *stacks: Batch) -> tuple[Executed, tf.Tensor]:
        replicas, shards = self._replicas, self._shards(stacks)
        accumulate = self._accumulate(replicas.ids[0], counts[0], *shards[0])
        finish = self._finish(*accumulate.outputs)
        replicas.synchronize()
        given = zip(replicas.ids, counts, shards, strict=True)
        sums = [accumulate(i, replica, count, *share) for i, (replica, count, share) in enumerate(given)]
        totals = replicas.all_reduce([flat for flat, _ in sums])
        results = [finish(i, total, state) for i, (total, (_, state)) in enumerate(zip(totals, sums, strict=True))]
        return results[0]

    def _evaluate_on_all(self, *stacks: Batch) -> tuple[list[tf.Tensor], tf.Tensor]:
        replicas, shards = self._replicas, self._shards(stacks)
        sums = self._sum(replicas.ids[0], *shards[0])
        total = self._total(sums.outputs)
        replicas.synchronize()
        parts = [sums(i, replica, *share) for i, (replica, share) in enumerate(zip(replicas.ids, shards, strict=True))]
        return total(0, replicas.all_reduce(parts)[0])  # the others' metrics are synchronized before the next step

    def _shards(self, stacks: Sequence[Batch]) -> list[list[Batch]]:
        """Each local replica's rows of the stacks."""
        count = len(self._replicas.devices)
        return [
            [tf.nest.map_structure(lambda t, i=i: tf.split(t, count, 1)[i], s) for s in stacks] for i in range(count)
        ]

    # One dispatch.

    def _executed(self, *stacks: Batch) -> Executed:
        counts = self._counter(*stacks) if self._has_several_terms else [None] * len(self._replicas.devices)
        executed, working = self._executor(counts, *stacks)
        self._require_all(working)
        return executed

    def _evaluated(self, *stacks: Batch) -> list[tf.Tensor]:
        sums, working = self._evaluator(*stacks)
        self._require_all(working)
        return sums

    def dispatch(self, dispatch: Dispatch) -> Executed:
        if not dispatch.is_multi_step:
            return self._executed(*dispatch.stacks)
        # The collective cannot be in a compiled loop, and steps that only pad the dispatch are left out.
        (stack,) = dispatch.stacks
        for i in range(dispatch.steps):
            executed = self._executed(tf.nest.map_structure(lambda t, i=i: t[i], stack))
        return executed

    def _steps_run(self, dispatch: Dispatch) -> int:
        return dispatch.steps

    @property
    def place(self) -> str:
        replicas = self._replicas
        if replicas.workers == 1:
            return ""
        return (
            f"Among the rows of worker {replicas.worker} of {replicas.workers} (what is wrong may be among another's: "
            "see its error): "
        )

    def on_one_device(self) -> contextlib.AbstractContextManager:
        return first_components()

    # One pass over the data.

    def together(
        self, source: Any, dispatches: Iterator[Dispatch], steps: int | None, training: bool = True
    ) -> Iterator[Dispatch]:
        if self._replicas.workers == 1:
            return dispatches
        return self._together(source, dispatches, steps, self._training if training else self._evaluation)

    def _together(self, source, dispatches, steps, exchange):
        known = steps or source.steps_per_epoch
        first = next(dispatches)
        self._replicas.require_same(
            f"Every worker must be given the same {source.what}, in the same order (a shuffle needs a seed), with the "
            "same batch_size and gradient_accumulation_steps; or a dataset of its own, with as many batches as the "
            "others', under auto_shard_policy OFF.",
            steps_in_a_pass=known or 0,
            gradient_accumulation_steps=source.layout.accumulation,
            data=source.checksum(),
        )
        before, self._length_known = self._length_known, bool(known)
        try:
            yield from itertools.chain([first], dispatches)
            if not known and (others := exchange.without_data()):
                raise self._apart(others)
        finally:
            self._length_known = before

    def _require_all(self, working: tf.Tensor) -> None:
        # Waits for the step, so only where a worker's data may have ended: it does not come to the next one.
        if not self._length_known and int(working) < self._replicas.count:
            raise self._apart(int(working))

    def _apart(self, working: int) -> WorkersDifferError:
        return WorkersDifferError(
            f"The workers' data ended at different steps: {working} of {self._replicas.count} replicas still had some. "
            "Nothing was updated with it. Give all workers as many batches, or pass steps_per_epoch (or steps)."
        )


def _offset(seed: tf.Variable, replica: tf.Tensor) -> tf.Tensor:
    own = tf.cast(replica * SEED_STRIDE, seed.dtype)
    return tf.one_hot(0, seed.shape[0], on_value=own, off_value=tf.zeros([], seed.dtype), dtype=seed.dtype)
