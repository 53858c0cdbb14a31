"""The train step of a model on several replicas: two programs with one all-reduce between them."""

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
from fastaccum.adapters.losses import BoundLosses
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.storage import Storage
from fastaccum.basics.attributes import raw, replaced, restored
from fastaccum.basics.processes import WorkersDifferError
from fastaccum.data.source import Stacks
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.distribute.replicas import ReplicaProgram, Replicas, TracedProgram, first_components
from fastaccum.graphs.traces import list_python_calls
from fastaccum.kernels import private
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.step.built_model import BuiltModel
from fastaccum.step.device_engine import DeviceEngine
from fastaccum.step.engine import Engine, FirstRun
from fastaccum.step.program import Program, make_programs
from fastaccum.step.running_state import Executed
from fastaccum.step.train_step import Accumulated, Share

# The distance between the seeds of two replicas. It is a prime, so that seeds that are drawn one
# after the other do not meet.
SEED_STRIDE = 0x9E3779B1
Shared = dict[str, tf.Tensor | list[tf.Tensor | None]]  # what replicas add up, by name
LocalValues = dict[str, Any]  # what a replica keeps to itself until the end of the step, by name


class ReplicatedEngine(Engine):
    """Trains and evaluates a model on the replicas of a strategy.

    A stack holds the rows of the local replicas side by side.

        for each replica:  sums = accumulate(its rows)          # compiled
        sums = all_reduce(sums)                                 # one flat float32 buffer
        for each replica:  finish(sums)                         # compiled

    The objective and the cycle are those of one device, traced with the first replica's variables
    and called with every replica's. All replicas finish with the same numbers, so that their
    variables stay equal bit for bit, also those of the loss scale and the metrics. XLA cannot
    compile the collective: a graph calls the two programs and reduces between them.

    Moving statistics are averaged over the replicas; random masks differ between replicas. The
    denominators of several losses must be known before the first gradient, which takes one more
    all-reduce, of a few scalars.
    """

    def __init__(self, replicas: Replicas, built: BuiltModel):
        model = built.model
        losses = built.losses
        metrics = built.metrics
        optimizer = built.optimizer
        unknown = metrics.unknown_states
        if unknown:
            raise ValueError(
                f"metrics={unknown} are of classes of your own, whose states cannot be added up "
                "over replicas unless they are sums: derive them from keras.metrics.Mean or "
                "Sum, or pass fn(y_true, y_pred)."
            )
        names = model.unmanaged_state
        if names:
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
        self._build_optimizer(model, optimizer, built.options.storage)
        replicas.unmirror([*metrics.compiled.variables, built.options.loss_scale])

        with first_components():
            self._device_engine = DeviceEngine(built, compile_parts=built.options.uses_xla)
            self._seeds = model.seeds
        self.objective = self._device_engine.objective
        self.cycle = self._device_engine.cycle
        self.running = self._device_engine.running
        self._statistics = [v for v in self.objective.state if v.dtype.is_floating]
        self._length_known = True

        self._accumulate_program = self._make_replica_program(self._accumulate_replica)
        self._finish_program = self._make_replica_program(self._finish_replica)
        self._sum_program = self._make_replica_program(self._sum_replica)
        self._total_program = self._make_replica_program(self._take_totals)
        self._count_program = self._make_replica_program(self.objective.count_stacked)
        self._counter, self._executor, self._evaluator = make_programs(
            (self._count_on_all, self._execute_on_all, self._evaluate_on_all), jit_compile=False
        )
        self._executor.admit = functools.partial(
            self._admit_graph, [self._accumulate_program, *self._ends], True
        )
        self._evaluator.admit = functools.partial(
            self._admit_graph, [self._sum_program, self._total_program], False
        )
        is_on_host = "CPU" in replicas.devices[0]
        self.sharing = len(replicas.devices) if is_on_host else 1  # logical devices share memory

    def _make_replica_program(self, function: Callable[..., object]) -> ReplicaProgram:
        """Makes a program of a function that computes for one replica."""
        uses_xla = self.objective.options.uses_xla
        return ReplicaProgram(function, self._replicas, uses_xla, scope=self._alone)

    def _mirror_weights(self, losses: BoundLosses) -> None:
        """Gives the variables among the weights of losses a component on every replica."""
        variables = losses.weight_variables
        outside = []
        for variable in variables:
            if isinstance(variable, tf.Variable) and not self._replicas.holds(variable):
                outside.append(variable.name)
        if outside:
            raise ValueError(
                f"loss_weights holds {outside}, made outside the strategy's scope: make it inside, "
                "or a keras.Variable."
            )
        self._replicas.mirror([v for v in variables if isinstance(v, keras.Variable)])

    def _build_optimizer(self, model: Model, optimizer: Optimizer, storage: Storage) -> None:
        """Makes the slots, and gives each optimizer variable a component on every replica."""
        optimizer.require_known(model.trainable_variables)
        with self._replicas.strategy.scope():
            optimizer.create(model.trainable_variables, storage)
        slots.return_to_keras(optimizer)
        self._replicas.mirror(optimizer.optimizer.variables)

    @property
    def _ends(self) -> list[ReplicaProgram]:
        """The programs that follow the reduction of gradients."""
        return [self._finish_program]

    def _alone(self) -> AbstractContextManager[None]:
        """Lets the optimizers inside the block compute for the traced replica alone.

        They neither reduce gradients nor update variables on other devices.
        """
        no_strategy = []
        for part in self._optimizers:
            name = private.optimizer_strategy.name
            no_strategy.append((part, name, tf.distribute.get_strategy()))
        return replaced(no_strategy)

    # On one replica, compiled.

    def _accumulate_replica(
        self, replica: tf.Tensor, counts: tf.Tensor | None, *stacks: Batch
    ) -> tuple[Shared, LocalValues]:
        """Returns the sums that replicas add up, and what this replica keeps to itself."""
        objective = self.objective
        state = [v.read_value() for v in objective.state]  # before the replica offsets its seeds
        with self._metrics_from_zero() as metric_values, self._own_masks(replica):
            totals = None
            if counts is not None:
                totals = objective.unstack_counts(counts)
            sums = self.cycle.accumulate(*stacks, counts=totals)

        # `TrainStep.accumulate` has divided the scale by the typical weight of these stacks, and
        # those of another worker may weigh otherwise: the replicas' sums are of the whole scale.
        typical_weight = objective.typical_weight(stacks)
        gradients: list[tf.Tensor | None] = []
        for gradient in sums.gradients:
            if gradient is not None:
                gradient = gradient * tf.constant(typical_weight, gradient.dtype)
            gradients.append(gradient)

        count = self._replicas.count
        statistics = [tf.cast(v.read_value(), tf.float32) / count for v in self._statistics]
        shared = {
            "gradients": gradients,
            "statistics": statistics,
            "loss_sum": sums.loss_sum,
            "weight_sum": sums.weight_sum,
            "rows": objective.rows(stacks),
            **self._common(metric_values),
        }
        return shared, {"state": state, "seen": self.running.index_checks.seen()}

    def as_accumulated(self, shared: Shared, state: list[tf.Tensor]) -> Accumulated:
        """Returns the sums over all replicas as the cycle takes them."""
        scale = self.cycle.loss_scale.scale()
        return Accumulated(
            gradients=shared["gradients"],
            loss_sum=shared["loss_sum"],
            weight_sum=shared["weight_sum"],
            scale=scale,
            state=state,
            looked_up={},
        )

    def _finish_replica(
        self, shared: Shared, state: list[tf.Tensor], seen: tf.Tensor, share: Share | None = None
    ) -> tuple[Executed, tf.Tensor]:
        in_range = self._take_over(shared, seen)
        for variable, mean in zip(self._statistics, shared["statistics"], strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        sums = self.as_accumulated(shared, state)
        all_have_data = tf.equal(shared["working"], float(self._replicas.count))
        result = self.cycle.finish(sums, all_have_data & in_range, share)
        result = self.running.add_step(sums.scale, result, shared["rows"])
        return self.running.report(result, fine=in_range), shared["working"]

    def _sum_replica(self, *stacks: Batch) -> tuple[Shared, tf.Tensor]:
        with self._metrics_from_zero() as metric_values:
            sums = self.objective.evaluate(*stacks)
        shared = {"sums": sums, **self._common(metric_values)}
        return shared, self.running.index_checks.seen()

    def _take_totals(
        self, shared: Shared, seen: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        return shared["sums"], self._take_over(shared, seen), shared["working"]

    def _common(self, metric_values: list[tf.Tensor]) -> Shared:
        """Returns what both train steps and evaluations add up.

        These are the metrics, the count of replicas whose indices are in range, and the count of
        replicas that are at work.
        """
        in_range = self.running.index_checks.in_range()
        return {
            "metrics": metric_values,
            "in_range": tf.cast(in_range, tf.float32),
            "working": tf.constant(1.0),
        }

    def _take_over(self, shared: Shared, seen: tf.Tensor) -> tf.Tensor:
        """Updates metrics and index checks; returns if every replica's indices are in range."""
        variables = self.running.micro_batch_variables
        for variable, value in zip(variables, shared["metrics"], strict=True):
            variable.assign(variable + tf.cast(value, variable.dtype))
        self.running.index_checks.assign(seen)
        return tf.equal(shared["in_range"], shared["working"])

    @contextlib.contextmanager
    def _metrics_from_zero(self) -> Iterator[list[tf.Tensor]]:
        """Starts the metrics from zero inside the block.

        Yields a list that gets the values of the metrics as the block ends.
        """
        variables = self.running.micro_batch_variables
        with restored(variables):
            for variable in variables:
                variable.assign(tf.zeros_like(variable))
            metric_values: list[tf.Tensor] = []
            yield metric_values
            metric_values += [v.read_value() for v in variables]

    @contextlib.contextmanager
    def _own_masks(self, replica: tf.Tensor) -> Iterator[None]:
        """Offsets the random seeds by the replica inside the block.

        Outside the block all replicas share the seeds that are saved.
        """
        for seed in self._seeds:
            seed.assign_add(_offset(seed, replica))
        yield
        for seed in self._seeds:
            seed.assign_sub(_offset(seed, replica))

    # On all local replicas, in a graph that calls the compiled programs.

    def _count_on_all(self, *stacks: Batch) -> list[tf.Tensor]:
        shards = self._shards(stacks)
        count = self._count_program(*shards[0])
        return self._replicas.all_reduce([count(i, *shard) for i, shard in enumerate(shards)])

    def _execute_on_all(self, counts: list, *stacks: Batch) -> tuple[Executed, tf.Tensor]:
        replicas = self._replicas
        shards = self._shards(stacks)
        accumulate = self._accumulate_program(replicas.ids[0], counts[0], *shards[0])
        ends = self._trace_ends(*accumulate.outputs)
        replicas.synchronize()

        # The gradient of a tf.py_function is that of its last call, which must be the same
        # replica's. Replicas whose programs call Python therefore run one after the other.
        runs_in_turn = False
        if not self.objective.options.uses_xla:
            runs_in_turn = bool(list_python_calls(accumulate.concrete.graph))
        sums: list[tuple[Shared, LocalValues]] = []
        for i, (replica, count, shard) in enumerate(zip(replicas.ids, counts, shards, strict=True)):
            earlier = []
            if runs_in_turn:
                earlier = [tensor for tensor in tf.nest.flatten(sums) if tensor is not None]
            with tf.control_dependencies(earlier):
                sums.append(accumulate(i, replica, count, *shard))
        executed_by_replica = self._run_ends(ends, sums)
        return executed_by_replica[0]  # all replicas finish with the same numbers

    def _trace_ends(self, shared: Shared, local: LocalValues) -> list[TracedProgram]:
        """Traces the programs of `_ends` for the specs of what `_accumulate_replica` returns."""
        return [self._finish_program(shared, local["state"], local["seen"])]

    def _run_ends(
        self, ends: list[TracedProgram], sums: list[tuple[Shared, LocalValues]]
    ) -> list[tuple[Executed, tf.Tensor]]:
        """Reduces what each local replica has accumulated, and ends the step on each."""
        (finish,) = ends
        totals = self._replicas.all_reduce([shared for shared, _ in sums])
        seen = widest([local["seen"] for _, local in sums])
        results = []
        for i, (total, (_, local)) in enumerate(zip(totals, sums, strict=True)):
            results.append(finish(i, total, local["state"], seen))
        return results

    def _evaluate_on_all(
        self, *stacks: Batch
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor]:
        replicas = self._replicas
        shards = self._shards(stacks)
        sum_shard = self._sum_program(*shards[0])
        total = self._total_program(*sum_shard.outputs)
        replicas.synchronize()

        results = [sum_shard(i, *shard) for i, shard in enumerate(shards)]
        seen = widest([seen for _, seen in results])
        totals = replicas.all_reduce([shared for shared, _ in results])
        # Only the first replica takes the totals over. The next step synchronizes the metrics of
        # the others before it begins.
        sums, in_range, working = total(0, totals[0], seen)
        return sums, in_range, working, seen

    def _shards(self, stacks: Sequence[Batch]) -> list[list[Batch]]:
        """Splits the rows of the stacks by local replica."""
        count = len(self._replicas.devices)
        shards = []
        for i in range(count):
            shards.append([_shard(stack, i, count) for stack in stacks])
        return shards

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
        if self._replicas.count <= 1:
            return []
        return ["shard_optimizer=True leaves each device its share of the optimizer's slots."]

    @property
    def programs(self) -> dict[str, Program]:
        return {"train step": self._executor, "evaluation": self._evaluator}

    def _admit_graph(
        self, programs: list[ReplicaProgram], training: bool, graph: ConcreteFunction
    ) -> AbstractContextManager[None]:
        """Admits a replica's programs with the first run of the graph that calls them."""
        stacks, _ = graph.structured_input_signature
        if training:
            stacks = stacks[1:]  # without the counts of `_execute_on_all`

        captured = []
        on_first_replica = []
        for program in programs:
            traced = program.last
            for handles in traced.captured.values():
                captured += handles
            if 0 in traced.captured:
                on_first_replica.append(traced.concrete)

        run = FirstRun(
            on_first_replica,
            captured,
            Dispatch(stacks),
            training,
            is_compiled=self.objective.options.uses_xla,
        )
        return self._admit(run)

    def retrace(self) -> None:
        self._device_engine.retrace()
        programs = [
            self._accumulate_program,
            self._sum_program,
            self._total_program,
            self._count_program,
            *self._ends,
            self._counter,
            self._executor,
            self._evaluator,
        ]
        for program in programs:
            program.retrace()

    @property
    def _training_programs(self) -> list[ReplicaProgram]:
        return [self._accumulate_program, *self._ends, self._count_program]

    def _dispatch(self, dispatch: Dispatch) -> Executed:
        # The host loops over the steps, since no compiled loop can hold the collective. Steps that
        # only pad the dispatch are left out.
        for stacks in self._steps(dispatch):
            has_several_terms = self.objective.has_several_terms
            with self._replicas.in_step("run"):
                counts = [None] * len(self._replicas.devices)
                if has_several_terms:
                    counts = self._counter(*stacks)
                executed, working = self._executor(counts, *stacks)
            self._require_all(working)
        return executed

    def trace(self, dispatch: Dispatch) -> list[ConcreteFunction]:
        shards = len(self._replicas.devices)

        def shard_spec(tensor: tf.Tensor | tf.TensorSpec) -> tf.TensorSpec:
            shape = tensor.shape
            if dispatch.is_multi_step:
                shape = shape[1:]
            micro_batches, rows, *row_shape = shape
            return tf.TensorSpec([micro_batches, rows // shards, *row_shape], tensor.dtype)

        stacks = tf.nest.map_structure(shard_spec, dispatch.stacks)
        counts = None
        if self.objective.has_several_terms:
            counts = self._count_program(*stacks).outputs
        accumulate = self._accumulate_program(self._replicas.ids[0], counts, *stacks)
        ends = self._trace_ends(*accumulate.outputs)
        ends_on_first_replica = [end.concrete for end in ends if 0 in end.captured]
        return [accumulate.concrete, *ends_on_first_replica]

    def _evaluate_dispatch(self, dispatch: Dispatch) -> tuple[list[tf.Tensor], Callable[[], None]]:
        with self._replicas.in_step("evaluation"):
            sums, in_range, working, seen = self._evaluator(*dispatch.stacks)
        self._require_all(working)
        return sums, lambda: self._require_in_range(seen, in_range)

    def _require(self, executed: Executed, dispatch: Dispatch) -> None:
        replicas = self._replicas
        with replicas.in_step("outcome"):  # on a GPU it is here that it waits
            if executed.fine:
                return

        place = ""
        if replicas.workers > 1:
            place = (
                f"Among the rows of worker {replicas.worker} of {replicas.workers} (what is "
                "wrong may be among another's: see its error): "
            )
        if dispatch.is_multi_step:
            steps = dispatch.steps
            stacks = tf.nest.map_structure(lambda t: t[:steps], dispatch.stacks)
            dispatch = dispatch._replace(stacks=stacks)
        with first_components():
            self._device_engine._require(executed, dispatch, place)
        self._require_in_range(executed.indices, False)

    def _steps(self, dispatch: Dispatch) -> Iterator[Sequence[Batch]]:
        if not dispatch.is_multi_step:
            yield dispatch.stacks
            return
        (stack,) = dispatch.stacks
        for step in range(dispatch.steps):
            yield [tf.nest.map_structure(lambda t, step=step: t[step], stack)]

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
        steps_per_epoch = stacks.steps_per_epoch
        if self.holders and training and not steps_per_epoch:
            raise ValueError(
                "Workers that share slots out need data of known length: pass steps_per_epoch."
            )
        if training:
            self._require_same_rates()
        first = next(dispatches)
        self._replicas.require_same(
            f"Every worker must be given the same {stacks.what}, in the same order (a shuffle "
            "needs a seed), with the same batch_size and gradient_accumulation_steps; or a "
            "dataset of its own, with as many batches as the others', under auto_shard_policy "
            "OFF.",
            steps_in_a_pass=steps_per_epoch or 0,
            gradient_accumulation_steps=stacks.layout.accumulation,
            data=stacks.checksum(),
        )

        length_known_before = self._length_known
        self._length_known = bool(steps_per_epoch)
        try:
            yield from itertools.chain([first], dispatches)
            if not steps_per_epoch:
                program = self._accumulate_program if training else self._sum_program
                working = self._without_data(program)
                if working:
                    raise self._apart(working)
        finally:
            self._length_known = length_known_before

    def _require_same_rates(self) -> None:
        """Raises WorkersDifferError on every worker if the workers differ in a learning rate."""
        rates = {}
        for number, optimizer in enumerate(self._optimizers):
            suffix = "" if number == 0 else str(number)
            rate = tf.convert_to_tensor(raw(optimizer.learning_rate))
            rates[f"learning_rate{suffix}"] = rate.numpy().item()
        self._replicas.require_same(
            "Give a callback that sets it to all, or to none.",
            **rates,
        )

    def _without_data(self, program: ReplicaProgram) -> int:
        """Takes part in a round without data; returns how many replicas had some."""
        shared, _ = program.last.outputs
        zeros = tf.nest.map_structure(_zeros, shared)
        totals = self._replicas.all_reduce([zeros] * len(self._replicas.devices))
        return int(totals[0]["working"])

    def _require_all(self, working: tf.Tensor) -> None:
        # Reading `working` waits for the step, so this does so only where the data of a worker may
        # have ended. Such a worker does not come to the next step.
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


def _shard(stack: Batch, index: int, count: int) -> Batch:
    """Takes one of `count` equal shards of a stack's rows."""
    return tf.nest.map_structure(lambda t: tf.split(t, count, 1)[index], stack)


def _zeros(spec: tf.TensorSpec | None) -> tf.Tensor | None:
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)


def _offset(seed: tf.Variable, replica: tf.Tensor) -> tf.Tensor:
    """Returns what a replica adds to a seed: a multiple of SEED_STRIDE, to its first number."""
    offset = tf.cast(replica * SEED_STRIDE, seed.dtype)
    zero = tf.zeros([], seed.dtype)
    return tf.one_hot(0, seed.shape[0], on_value=offset, off_value=zero, dtype=seed.dtype)
