"""The train step of a model on several replicas: its pieces as programs, with one all-reduce
between them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters import slots
from fastaccum.adapters.attributes import raw, replaced, restored
from fastaccum.adapters.losses import Losses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.outputs import Outputs
from fastaccum.adapters.traces import list_python_calls
from fastaccum.data.source import Stacks
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.distribute.replicas import ReplicaProgram, Replicas, TracedProgram, first_components
from fastaccum.distribute.workers import WorkersDifferError
from fastaccum.kernels import private
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.step.model_step import ModelStep
from fastaccum.step.options import Options
from fastaccum.step.program import Program, make_programs
from fastaccum.step.running_state import Executed
from fastaccum.step.step import FirstRun, Step
from fastaccum.step.train_step import Accumulated, Share

# between replicas; a prime, so that seeds drawn one after the other do not meet
SEED_STRIDE = 0x9E3779B1
Shared = dict[str, tf.Tensor | list[tf.Tensor | None]]  # what replicas add up, by name
Own = dict[str, Any]  # what a replica keeps of its own for the end of the step, by name


class ReplicatedStep(Step):
    """Trains and evaluates a model on the replicas of a strategy; a stack holds the local replicas'
    rows side by side.

        for each replica:  sums = accumulate(its rows)          # compiled
        sums = all_reduce(sums)                                 # one flat float32 buffer
        for each replica:  finish(sums)                         # compiled

    The objective and the cycle are those of one device, traced with the first replica's variables
    and called with every replica's. All replicas finish with the same numbers, so that their
    variables stay equal bit for bit, also those of
    the loss scale and the metrics. XLA cannot compile the collective: a graph calls the two
        programs and reduces
    between them.

    Moving statistics are averaged over the replicas; random masks differ between replicas. Several
    losses, whose denominators must be known before the first gradient, take one more all-reduce, of
    a few scalars.
    """

    def __init__(
        self,
        replicas: Replicas,
        model: Model,
        outputs: Outputs,
        losses: Losses,
        metrics: Metrics,
        optimizer: Optimizer,
        options: Options,
    ):
        if unknown := metrics.unknown_states:
            raise ValueError(
                f"metrics={unknown} are of classes of your own, whose states cannot be added up "
                "over replicas unless they are sums: derive them from keras.metrics.Mean or "
                "Sum, or pass fn(y_true, y_pred)."
            )
        if names := model.unmanaged_state:
            raise ValueError(
                f"The model's call assigns {names}, tf.Variables that no layer has made by "
                f"`add_weight`: under {type(replicas.strategy).__name__}, make them by "
                "self.add_weight(..., trainable=False)."
            )
        if model.overrides("compute_metrics"):
            raise ValueError(
                f"{type(model.model).__name__} overrides compute_metrics, whose results cannot "
                "be added up over replicas: update metrics of the model's own in compute_loss "
                "or call, or pass metrics=[...]."
            )
        self._replicas = replicas
        self._optimizers = [
            part for part in optimizer.parts if private.optimizer_strategy.exists(part)
        ]
        for part in self._optimizers:  # that of the scope in which it was made, if any
            private.optimizer_strategy.set(part, replicas.strategy)
        replicas.mirror(model.trainable_variables)  # LoRA may be enabled outside the scope
        self._mirror_weights(losses)
        self._build_optimizer(model, optimizer)
        replicas.unmirror([*metrics.compiled.variables, options.loss_scale])
        losses.replicas = replicas.count
        with first_components():
            step = self._step = ModelStep(
                model, outputs, losses, metrics, optimizer, options, options.uses_xla
            )
            self._seeds = model.seeds
        self.objective, self.cycle, self.running = step.objective, step.cycle, step.running
        self._statistics = [v for v in self.objective.state if v.dtype.is_floating]
        self._length_known = True
        self._accumulate, self._finish, self._sum, self._total, self._count = (
            ReplicaProgram(function, replicas, self.objective.options.uses_xla, scope=self._alone)
            for function in (
                self._accumulated,
                self._finished,
                self._summed,
                self._totalled,
                self.objective.count_stacked,
            )
        )
        self._counter, self._executor, self._evaluator = make_programs(
            (self._count_on_all, self._execute_on_all, self._evaluate_on_all), jit_compile=False
        )
        for program in (self._counter, self._executor, self._evaluator):
            program.anew = self.retrace
        self._executor.admit = functools.partial(
            self._admit_graph, [self._accumulate, *self._ends], True
        )
        self._evaluator.admit = functools.partial(
            self._admit_graph, [self._sum, self._total], False
        )
        # The logical devices of a host share its memory.
        self.sharing = len(replicas.devices) if "CPU" in replicas.devices[0] else 1

    def _mirror_weights(self, losses: Losses) -> None:
        """Gives the variables among the weights of losses a component on every replica."""
        variables = losses.weight_variables
        plain = [
            v.name for v in variables if isinstance(v, tf.Variable) and not self._replicas.holds(v)
        ]
        if plain:
            raise ValueError(
                f"loss_weights holds {plain}, made outside the strategy's scope: make it inside, "
                "or a keras.Variable."
            )
        self._replicas.mirror([v for v in variables if isinstance(v, keras.Variable)])

    def _build_optimizer(self, model: Model, optimizer: Optimizer) -> None:
        """Makes the slots, and gives all of the optimizer's variables a component on every
        replica.
        """
        if not optimizer.optimizer.built:
            with self._replicas.strategy.scope():
                optimizer.optimizer.build(model.trainable_variables)
        slots.return_to_keras(optimizer)
        self._replicas.mirror(optimizer.optimizer.variables)

    @property
    def _ends(self) -> list[ReplicaProgram]:
        """The programs that follow the reduction of gradients."""
        return [self._finish]

    def _alone(self) -> AbstractContextManager[None]:
        """Keeps the optimizers inside the block from reducing, or updating on other devices, in a
        replica's trace.
        """
        return replaced(
            [
                (part, private.optimizer_strategy.name, tf.distribute.get_strategy())
                for part in self._optimizers
            ]
        )

    # On one replica, compiled.

    def _accumulated(
        self, replica: tf.Tensor, counts: tf.Tensor | None, *stacks: Batch
    ) -> tuple[Shared, Own]:
        """Returns the sums that replicas add up, and the state that this replica keeps for the end
        of the step.
        """
        objective, count = self.objective, self._replicas.count
        state = [v.read_value() for v in objective.state]  # before seeds are the replica's own
        with self._metrics_from_zero() as reached, self._own_masks(replica):
            sums = self.cycle.accumulate(
                *stacks, counts=None if counts is None else tf.unstack(counts)
            )
        # The stacks of workers may differ in size, and so may what the scale was divided by.
        typical = objective.typical_weight(stacks)
        shared = {
            "gradients": [
                None if g is None else g * tf.constant(typical, g.dtype) for g in sums.gradients
            ],
            "statistics": [tf.cast(v.read_value(), tf.float32) / count for v in self._statistics],
            "loss_sum": sums.loss_sum,
            "weight_sum": sums.weight_sum,
            "rows": objective.rows(stacks),
            **self._common(reached),
        }
        return shared, {"state": state, "seen": self.running.index_checks.seen()}

    def accumulated(self, shared: Shared, state: list[tf.Tensor]) -> Accumulated:
        """Returns the sums over all replicas as the cycle takes them."""
        scale = self.cycle.loss_scale.scale()
        return Accumulated(
            shared["gradients"], shared["loss_sum"], shared["weight_sum"], scale, state, {}
        )

    def _finished(
        self, shared: Shared, state: list[tf.Tensor], seen: tf.Tensor, share: Share | None = None
    ) -> tuple[Executed, tf.Tensor]:
        in_range = self._take_over(shared, seen)
        for variable, mean in zip(self._statistics, shared["statistics"], strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        sums = self.accumulated(shared, state)
        result = self.cycle.finish(
            sums, tf.equal(shared["working"], float(self._replicas.count)) & in_range, share
        )
        result = self.running.add_step(sums.scale, result, shared["rows"])
        return self.running.report(result, fine=in_range), shared["working"]

    def _summed(self, *stacks: Batch) -> tuple[Shared, tf.Tensor]:
        with self._metrics_from_zero() as reached:
            sums = self.objective.evaluate(*stacks)
        return {"sums": sums, **self._common(reached)}, self.running.index_checks.seen()

    def _totalled(
        self, shared: Shared, seen: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        return shared["sums"], self._take_over(shared, seen), shared["working"]

    def _common(self, reached: list[tf.Tensor]) -> Shared:
        """Returns what train steps and evaluations add up: metrics, and counts of replicas at work
        and in range.
        """
        in_range = self.running.index_checks.in_range()
        return {
            "metrics": reached,
            "in_range": tf.cast(in_range, tf.float32),
            "working": tf.constant(1.0),
        }

    def _take_over(self, shared: Shared, seen: tf.Tensor) -> tf.Tensor:
        """Updates metrics and index checks; returns if every replica's indices are in range."""
        for variable, value in zip(
            self.running.micro_batch_variables, shared["metrics"], strict=True
        ):
            variable.assign(variable + tf.cast(value, variable.dtype))
        self.running.index_checks.assign(seen)
        return tf.equal(shared["in_range"], shared["working"])

    @contextlib.contextmanager
    def _metrics_from_zero(self) -> Iterator[list[tf.Tensor]]:
        """Starts the metrics from zero inside the block, and yields a list that gets their values
        at its end.
        """
        variables = self.running.micro_batch_variables
        with restored(variables):
            for variable in variables:
                variable.assign(tf.zeros_like(variable))
            reached: list[tf.Tensor] = []
            yield reached
            reached += [v.read_value() for v in variables]

    @contextlib.contextmanager
    def _own_masks(self, replica: tf.Tensor) -> Iterator[None]:
        """Offsets random seeds by the replica inside the block; outside all share the seeds that
        are saved.
        """
        for seed in self._seeds:
            seed.assign_add(_offset(seed, replica))
        yield
        for seed in self._seeds:
            seed.assign_sub(_offset(seed, replica))

    # On all local replicas, in a graph that calls the compiled programs.

    def _count_on_all(self, *stacks: Batch) -> list[tf.Tensor]:
        shards = self._shards(stacks)
        count = self._count(*shards[0])
        return self._replicas.all_reduce([count(i, *shard) for i, shard in enumerate(shards)])

    def _execute_on_all(self, counts: list, *stacks: Batch) -> tuple[Executed, tf.Tensor]:
        replicas, shards = self._replicas, self._shards(stacks)
        accumulate = self._accumulate(replicas.ids[0], counts[0], *shards[0])
        ends = self._trace_ends(*accumulate.outputs)
        replicas.synchronize()
        # The gradient of a tf.py_function is that of its last call, which is to be the same
        # replica's: one by one.
        calls_python = not self.objective.options.uses_xla and list_python_calls(
            accumulate.concrete.graph
        )
        sums: list[tuple[Shared, Own]] = []
        for i, (replica, count, shard) in enumerate(zip(replicas.ids, counts, shards, strict=True)):
            before = tf.nest.flatten(sums) if calls_python else []
            with tf.control_dependencies([t for t in before if t is not None]):
                sums.append(accumulate(i, replica, count, *shard))
        executed, *_ = self._run_ends(ends, sums)
        return executed

    def _trace_ends(self, shared: Shared, own: Own) -> list[TracedProgram]:
        """Traces the programs of `_ends` for the specs of what `_accumulated` returns."""
        return [self._finish(shared, own["state"], own["seen"])]

    def _run_ends(
        self, ends: list[TracedProgram], sums: list[tuple[Shared, Own]]
    ) -> list[tuple[Executed, tf.Tensor]]:
        """Reduces what each local replica has accumulated, and ends the step on each."""
        (finish,) = ends
        totals = self._replicas.all_reduce([shared for shared, _ in sums])
        seen = widest([own["seen"] for _, own in sums])
        given = enumerate(zip(totals, sums, strict=True))
        return [finish(i, total, own["state"], seen) for i, (total, (_, own)) in given]

    def _evaluate_on_all(
        self, *stacks: Batch
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor]:
        replicas, shards = self._replicas, self._shards(stacks)
        sums = self._sum(*shards[0])
        total = self._total(*sums.outputs)
        replicas.synchronize()
        parts = [sums(i, *shard) for i, shard in enumerate(shards)]
        seen = widest([seen for _, seen in parts])
        # The others' metrics are synchronized before the next step.
        return *total(0, replicas.all_reduce([shared for shared, _ in parts])[0], seen), seen

    def _shards(self, stacks: Sequence[Batch]) -> list[list[Batch]]:
        """Splits the rows of the stacks by local replica."""
        count = len(self._replicas.devices)
        return [
            [tf.nest.map_structure(lambda t, i=i: tf.split(t, count, 1)[i], s) for s in stacks]
            for i in range(count)
        ]

    # Called by the host.

    @property
    def exchanged_bytes(self) -> int:
        return 2 * self._gradient_bytes

    @property
    def _gradient_bytes(self) -> int:
        return sum(
            math.prod(v.shape) * accumulator_dtype(v.dtype).size for v in self.cycle.variables
        )

    @property
    def advice(self) -> list[str]:
        said = "shard_optimizer=True leaves each device its share of the optimizer's slots."
        return [said] * (self._replicas.count > 1)

    @property
    def programs(self) -> dict[str, Program]:
        return {"train step": self._executor, "evaluation": self._evaluator}

    def _admit_graph(
        self, programs: list[ReplicaProgram], training: bool, graph: ConcreteFunction
    ) -> AbstractContextManager[None]:
        """Admits a replica's programs with the first run of the graph that calls them."""
        stacks, _ = graph.structured_input_signature
        captured = [
            handle for each in programs for own in each.last.captured.values() for handle in own
        ]
        concrete = [each.last.concrete for each in programs if 0 in each.last.captured]
        dispatch = Dispatch(stacks[1:] if training else stacks)
        is_compiled = self.objective.options.uses_xla
        return self._admit(
            FirstRun(concrete, captured, dispatch, training, is_compiled=is_compiled)
        )

    def retrace(self) -> None:
        self._step.retrace()
        on_one = self._accumulate, self._sum, self._total, self._count
        for program in (*on_one, *self._ends, self._counter, self._executor, self._evaluator):
            program.retrace()

    @property
    def _training_programs(self) -> list[ReplicaProgram]:
        return [self._accumulate, *self._ends, self._count]

    def _dispatch(self, dispatch: Dispatch) -> Executed:
        # The collective cannot be in a compiled loop, and steps that only pad the dispatch are left
        # out.
        for stacks in self._steps(dispatch):
            several = self.objective.has_several_terms
            with self._replicas.in_step("run"):
                counts = self._counter(*stacks) if several else [None] * len(self._replicas.devices)
                executed, working = self._executor(counts, *stacks)
            self._require_all(working)
        return executed

    def trace(self, dispatch: Dispatch) -> list[ConcreteFunction]:
        shards, first = len(self._replicas.devices), int(dispatch.is_multi_step)

        def shard(t: tf.Tensor | tf.TensorSpec) -> tf.TensorSpec:
            micro_batches, rows, *inner = t.shape[first:]
            return tf.TensorSpec([micro_batches, rows // shards, *inner], t.dtype)

        stacks = tf.nest.map_structure(shard, dispatch.stacks)
        counts = self._count(*stacks).outputs if self.objective.has_several_terms else None
        accumulate = self._accumulate(self._replicas.ids[0], counts, *stacks)
        ends = self._trace_ends(*accumulate.outputs)
        return [accumulate.concrete, *(each.concrete for each in ends if 0 in each.captured)]

    def _evaluate_dispatch(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        with self._replicas.in_step("evaluation"):
            sums, in_range, working, seen = self._evaluator(*dispatch.stacks)
        self._require_all(working)
        return sums, lambda: self._require_in_range(seen, in_range)

    def _require(self, executed: Executed, dispatch: Dispatch) -> None:
        with self._replicas.in_step("outcome"):  # on a GPU it is here that it waits
            if executed.fine:
                return
        replicas, place = self._replicas, ""
        if replicas.workers > 1:
            place = (
                f"Among the rows of worker {replicas.worker} of {replicas.workers} (what is "
                "wrong may be among another's: see its error): "
            )
        if dispatch.is_multi_step:
            dispatch = dispatch._replace(
                stacks=tf.nest.map_structure(lambda t: t[: dispatch.steps], dispatch.stacks)
            )
        with first_components():
            self._step._require(executed, dispatch, place)
        self._require_in_range(executed.indices, False)

    def _steps(self, dispatch: Dispatch) -> Iterator[Sequence[Batch]]:
        if not dispatch.is_multi_step:
            yield dispatch.stacks
            return
        (stack,) = dispatch.stacks
        for i in range(dispatch.steps):
            yield [tf.nest.map_structure(lambda t, i=i: t[i], stack)]

    def _require_in_range(self, seen: tf.Tensor, in_range: tf.Tensor | bool) -> None:
        self.running.index_checks.require(seen)
        if not in_range:
            raise ValueError(
                "Another worker has seen labels or ids that are out of range: its error says "
                "which. Nothing was updated with them."
            )

    # One pass over the data.

    def _lockstep(
        self, stacks: Stacks, dispatches: Iterator[Dispatch], training: bool
    ) -> Iterator[Dispatch]:
        if self._replicas.workers == 1:
            yield from dispatches
            return
        known = stacks.steps_per_epoch
        if self.holders and training and not known:
            raise ValueError(
                "Workers that share slots out need data of known length: pass steps_per_epoch."
            )
        if training:
            rates = [
                tf.convert_to_tensor(raw(each.learning_rate)).numpy().item()
                for each in self._optimizers
            ]
            advice = "Give a callback that sets it to all, or to none."
            self._replicas.require_same(
                advice, **{f"learning_rate{i or ''}": rate for i, rate in enumerate(rates)}
            )
        first = next(dispatches)
        self._replicas.require_same(
            f"Every worker must be given the same {stacks.what}, in the same order (a shuffle "
            "needs a seed), with the same batch_size and gradient_accumulation_steps; or a "
            "dataset of its own, with as many batches as the others', under auto_shard_policy "
            "OFF.",
            steps_in_a_pass=known or 0,
            gradient_accumulation_steps=stacks.layout.accumulation,
            data=stacks.checksum(),
        )
        before, self._length_known = self._length_known, bool(known)
        try:
            yield from itertools.chain([first], dispatches)
            if not known and (
                others := self._without_data(self._accumulate if training else self._sum)
            ):
                raise self._apart(others)
        finally:
            self._length_known = before

    def _without_data(self, program: ReplicaProgram) -> int:
        """Takes part in a round without data; returns how many replicas had some."""
        shared, _ = program.last.outputs
        nothing = tf.nest.map_structure(
            lambda s: None if s is None else tf.zeros(s.shape, s.dtype), shared
        )
        return int(self._replicas.all_reduce([nothing] * len(self._replicas.devices))[0]["working"])

    def _require_all(self, working: tf.Tensor) -> None:
        # Waits for the step, so only where a worker's data may have ended: it does not come to the
        # next one.
        if not self._length_known and int(working) < self._replicas.count:
            raise self._apart(int(working))

    def _apart(self, working: int) -> WorkersDifferError:
        return WorkersDifferError(
            f"The workers' data ended at different steps: {working} of {self._replicas.count} "
            "replicas still had some. Nothing was updated with it. Give all workers as many "
            "batches, or pass steps_per_epoch (or steps)."
        )


def widest(seen: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the ranges of indices that hold all of several ranges: int64 [lookups, 2]."""
    low, high = tf.unstack(tf.stack(seen), axis=-1)
    return tf.stack([tf.reduce_min(low, 0), tf.reduce_max(high, 0)], -1)


def _offset(seed: tf.Variable, replica: tf.Tensor) -> tf.Tensor:
    own = tf.cast(replica * SEED_STRIDE, seed.dtype)
    return tf.one_hot(
        0, seed.shape[0], on_value=own, off_value=tf.zeros([], seed.dtype), dtype=seed.dtype
    )
