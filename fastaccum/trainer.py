"""`Trainer`: Keras's fit, evaluate and predict, as a thin loop over the fused train step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import models, optimizers
from fastaccum.adapters.callbacks import Callbacks, LateLogs
from fastaccum.adapters.losses import Losses, takes_class_indices
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.outputs import Outputs
from fastaccum.checkpoint import saver as savers
from fastaccum.checkpoint.state import Training, describe
from fastaccum.data import arrays, by_hand
from fastaccum.data import source as data
from fastaccum.data.stacks import Batch, Dispatch, Layout, Position
from fastaccum.distribute import replicas as distribution
from fastaccum.distribute.replicated_step import ReplicatedStep
from fastaccum.kernels.device import has_gpu
from fastaccum.step import compilable
from fastaccum.step import loss_scale as loss_scales
from fastaccum.step import program as compiled
from fastaccum.step.model_step import ModelStep, Unread
from fastaccum.step.train_step import StepResult


class Trainer:
    """Trains a Keras model with gradient accumulation, each cycle one XLA program.

    A train step takes `gradient_accumulation_steps` micro-batches of `batch_size` rows and applies one update,
    equal to float32 rounding to the update of Keras's own step on all their rows at once:

        update = optimizer( sum_ij w_ij * grad(l_ij) / denominator )     i: micro-batches, j: rows or tokens

    where the denominator is the one that the loss's `reduction` defines over the full batch. A short last stack and
    batches of varying size count exactly, by the rows that they hold. Batch statistics are those of the micro-batches.

    Args:
        model: a Keras 3 model, or a tf_keras model.
        optimizer: a Keras 3, tf_keras or tensorflow-addons optimizer, or a Keras name. Its schedules and `iterations`
            count updates.
        loss: a Keras loss or its name; `fn(y_true, y_pred)` that returns one loss per example or per token, each of
            that row alone; or a list or dict of these by output.
        metrics: as in Keras's `compile`; computed inside the program.
        loss_weights: factors of the outputs' losses, as in `compile`.
        weighted_metrics: metrics that use the sample weights, as in `compile`.
        gradient_accumulation_steps: micro-batches per update.
        loss_scale: "auto" for `DynamicLossScale()` under float16 compute and none otherwise; or a loss scale.
        clip_norm: the largest global norm of the final, unscaled gradient.
        fp32_weight_gradients: under float16 and bfloat16 compute, take the gradients of kernels and biases in
            float32, as `fastaccum.kernels.fp32_weight_gradients` does, but only within the train step: the model
            itself stays as it is. Changes nothing in float32, nor for a tf_keras model.
        jit_compile: compile with XLA; False runs the same step op by op.
        steps_per_execution: train steps per dispatch, as one more loop in the same program. Callbacks see the last
            step of each dispatch, as in Keras.
        on_nonfinite: what to do about a step whose gradient, loss or statistics are not finite although the loss scale
            cannot go lower (no scaling, a static scale, or a dynamic one at its floor). Such a step changes nothing.
            "skip" goes on, and raises after 10 of them in a row; "raise" raises at the first.

    Raises:
        TypeError: a model, optimizer, loss or metric that is none.
        ValueError: a number out of its range, an unknown name, an optimizer that accumulates or scales by itself,
            or layers that XLA cannot compile.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> trainer = Trainer(model, "sgd", "mse", gradient_accumulation_steps=4)
    >>> x = np.random.default_rng(0).normal(size=(100, 2)).astype("float32")
    >>> history = trainer.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=20, verbose=0)
    >>> history.history["loss"][-1] < history.history["loss"][0] / 5
    True
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = "adamw",
        loss: Any = None,
        metrics: Any = (),
        *,
        loss_weights: Any = None,
        weighted_metrics: Any = (),
        gradient_accumulation_steps: int = 1,
        loss_scale: Any = "auto",
        clip_norm: float | None = None,
        fp32_weight_gradients: bool = True,
        jit_compile: bool = True,
        steps_per_execution: int = 1,
        on_nonfinite: str = "skip",
    ):
        self._model = models.get(model)
        self.model = model
        self._optimizer = optimizers.get(optimizer)
        self._losses = Losses(loss, loss_weights)
        self._metrics = Metrics(metrics, weighted_metrics)
        self.gradient_accumulation_steps = checks.whole_number(
            "gradient_accumulation_steps", gradient_accumulation_steps
        )
        self.steps_per_execution = checks.whole_number("steps_per_execution", steps_per_execution)
        self.clip_norm = checks.positive_or_none("clip_norm", clip_norm)
        self.fp32_weight_gradients = checks.true_or_false("fp32_weight_gradients", fp32_weight_gradients)
        self.jit_compile = checks.true_or_false("jit_compile", jit_compile)
        self.on_nonfinite = checks.one_of("on_nonfinite", on_nonfinite, ("skip", "raise"))
        self.loss_scale = loss_scales.get(loss_scale, self._model.compute_dtype)
        self._step: ModelStep | None = None
        self._unread: Unread | None = None
        self._known_stacks: set[tuple] = set()
        self._layers: list[Any] = []
        self._compile_arguments = {"loss": loss, "loss_weights": loss_weights}
        self._replicas = distribution.of(self._model)
        if self._replicas is not None:
            self._replicas.require_optimizer(self._optimizer)
        if jit_compile:
            compilable.require(self._model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A Trainer holds compiled programs and cannot be copied: copy its model, and make a new one.")

    @property
    def optimizer(self) -> Any:
        """The optimizer object that trains the model."""
        return self._optimizer.optimizer

    @distribution.connected
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        checkpoint_dir: str | os.PathLike | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
    ) -> keras.callbacks.History:
        """Trains for `epochs` passes, with the arguments and callbacks of Keras's `fit`.

        What differs from Keras: `batch_size` is that of a micro-batch; `steps_per_epoch` and the batch number that
        callbacks see count train steps (updates); `class_weight` and `sample_weight` multiply; and logs add
        `grad_norm` and `loss_scale` (the last step's) and `skipped_steps` (in the epoch so far, for a gradient, loss
        or statistics that were not finite). Logs reach batch callbacks as a mapping that waits for the step only when
        it is read.

        Shuffling follows `keras.utils.set_random_seed`.

        With `checkpoint_dir` the training state is saved there, between train steps and at the end, and a fit that
        finds checkpoints there goes on from the last good one, bit-identical to one that was never interrupted
        (docs/reliability.md). A fit that was complete returns its History at once. SIGTERM saves, then raises
        `fastaccum.Preempted`, which ends the process with code 143. Data that Python code yields (generators,
        `keras.utils.PyDataset`, a `tf.py_function`) is read again from the start of the pass, and what was used is
        dropped, so it must yield the same again.

        Args:
            checkpoint_dir: a folder for checkpoints, of this training alone. Where it holds some, the last good one
                says where to go on, whatever `initial_epoch`.
            checkpoint_every: train steps from one to the next, at the end of a dispatch; None for the end of every
                epoch.
            keep: how many of the newest are kept.

        Returns:
            The `History`, also found as `model.history`.

        Raises:
            TypeError, ValueError: data that does not fit, before any weight moves; labels or ids out of range, with
                no weight moved by them; a `checkpoint_dir` without a good checkpoint among those in it, or of another
                model, optimizer, loss scale or batch plan, before anything moves.
            NonFiniteError: training that can only skip its steps (see `on_nonfinite`).
            RuntimeError: a checkpoint could not be written.
            Preempted: after SIGTERM, with the state saved.
        """
        epochs = checks.whole_number("epochs", epochs)
        initial_epoch = checks.whole_number("initial_epoch", initial_epoch, minimum=0)
        if steps_per_epoch is not None:
            steps_per_epoch = checks.whole_number("steps_per_epoch", steps_per_epoch)
        if validation_steps is not None:
            validation_steps = checks.whole_number("validation_steps", validation_steps)
        if validation_batch_size is None:
            validation_batch_size = batch_size
        else:
            checks.whole_number("validation_batch_size", validation_batch_size)
        validation_split = checks.fraction("validation_split", validation_split)
        shuffle = checks.true_or_false("shuffle", shuffle)
        class_weight = checks.class_weight(class_weight)
        should_validate = _schedule(validation_freq)
        saver = savers.get(checkpoint_dir, checkpoint_every, keep)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = arrays.split((x, y, sample_weight), validation_split)
        seed = int(np.random.randint(2**31 - 1)) if shuffle else 0
        if self._replicas is not None:
            self._replicas.require_same("Pass the same to all.", epochs=epochs, initial_epoch=initial_epoch)
            (seed,) = self._replicas.broadcast([seed])
        source = self._source(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed if shuffle else None,
            class_weight=class_weight,
        )
        step = self._built(source.sample)
        self._losses.require_classes(class_weight)
        layout = self._layout(self._exact_in_training())._replace(steps_per_execution=self.steps_per_execution)
        stacks = source.stacks(layout, steps_per_epoch, epochs - initial_epoch)
        validate = self._validation(validation_data, validation_batch_size, validation_steps, like=source.sample)

        hooks = Callbacks(
            callbacks,
            self.model,
            verbose=verbose,
            epochs=epochs,
            steps=stacks.steps_per_epoch,
            history=True,
        )
        self.model.stop_training = False
        step.stuck_steps.reset()
        logs: dict[str, float] = {}
        with saver:
            plan = {**stacks.plan, "class_weight": class_weight}
            training = functools.partial(self._training, stacks, source.sample, plan, hooks)
            position = saver.resume(training, initial_epoch, epochs, verbose)
            epochs = position.epoch if saver.stopped else epochs
            hooks.list.on_train_begin()
            saver.begin()
            if resumed := getattr(self.model, "_initial_epoch", None):  # by BackupAndRestore, for this fit only
                self.model._initial_epoch = None
                position = Position(resumed, resumed)
            passes = stacks.epochs(position)
            for epoch in range(position.epoch, epochs):
                step.reset()
                hooks.list.on_epoch_begin(epoch)
                done = saver.begin_epoch(epoch)
                dispatches = step.together(stacks, next(passes), steps_per_epoch)
                logs = self._train_epoch(step, saver.watched(dispatches), hooks, done)
                if validate is not None and should_validate(epoch):
                    val_logs = validate(callbacks=hooks.list)
                    logs.update({f"val_{name}": value for name, value in val_logs.items()})
                hooks.list.on_epoch_end(epoch, logs)
                saver.end_epoch(last=self.model.stop_training or epoch == epochs - 1)
                if self.model.stop_training:
                    break
            self._optimizer.finalize(self._model.trainable_variables)
            hooks.list.on_train_end(logs)
        return self.model.history

    def _training(self, stacks, sample: Batch, plan: dict[str, Any], hooks: Callbacks) -> Training:
        """What of this fit a checkpoint holds."""
        step = self._step
        variables = {
            "model": [*self.model.variables, *self._model.state],
            "optimizer": self._optimizer.variables,
            "loss_scale": self.loss_scale.variables,
            "step": step.running,
        }
        description = describe(
            self._model,
            self._compile_arguments,
            self._optimizer,
            self.loss_scale,
            variables,
            options=self,
            replicas=1 if self._replicas is None else self._replicas.count,
            sample=sample,
            plan=plan,
        )

        def require_savable() -> bool:
            if step.stuck_steps.since_end(step.stuck_steps.seen()) is not None:
                return False
            step.index_checks.require(step.index_checks.seen())
            return True

        return Training(self.model, variables, description, stacks, hooks, require_savable, self._replicas)

    def _train_epoch(self, step: ModelStep, dispatches: Any, hooks: Callbacks, first: int) -> dict[str, float]:
        begin, end = hooks.hooks("train")
        logs, waiting = None, None
        for dispatch in dispatches:
            begin(first)
            executed = self._run(step.dispatch, dispatch)
            if waiting is not None:
                # Read only now that the next step is on its way: the device never runs dry.
                waiting.require()
            waiting = Unread(step, executed, dispatch)
            first += dispatch.steps
            logs = LateLogs(executed.logs, waiting.require)
            end(first - 1, lambda logs=logs: logs)
            if self.model.stop_training:
                break
        logs = dict(logs)
        step.stuck_steps.warn(executed.stuck)
        return logs

    @distribution.connected
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics over a whole set, with the arguments of Keras's `evaluate`.

        The loss is that of all rows as one batch: `loss_sum / weight_sum` over the set, not a mean of the batches'
        means. Weights and state stay as they are. `steps` counts batches, as in Keras.

        Returns:
            The loss, a list of loss and metrics, or with `return_dict` a dict.
        """
        stacks, _ = self._evaluation_stacks(x, y, sample_weight, batch_size, steps)
        hooks = Callbacks(
            callbacks,
            self.model,
            verbose=verbose,
            epochs=1,
            steps=stacks.steps_per_epoch,
            history=False,
        )
        logs = self._evaluate(stacks, steps, hooks)
        if return_dict:
            return logs
        values = [logs[name] for name in self._names_in_order(logs)]
        return values[0] if len(values) == 1 else values

    def _names_in_order(self, logs: dict[str, float]) -> list[str]:
        """Log names in the order in which Keras's `evaluate` lists them."""
        losses = [f"{output.name}_loss" for output in self._losses.outputs]
        if self._outputs.is_dict:
            losses.sort()
        known = ["loss", *(metric.name for metric in self._metrics.compiled.metrics), *losses]
        return list(dict.fromkeys([*(name for name in known if name in logs), *sorted(logs)]))

    def _evaluation_stacks(self, x, y, sample_weight, batch_size, steps):
        """The stacks of an evaluation, and specs of one micro-batch."""
        if steps is not None:
            checks.whole_number("steps", steps)
        source = self._source(x, y, sample_weight, batch_size=batch_size)
        self._built(source.sample)
        layout = self._layout(bool(self._model.added_reductions) or self._metrics.need_exact_rows)
        if steps is not None:  # one micro-batch per dispatch where the caller counts them
            layout = layout._replace(accumulation=1)
        return source.stacks(layout, steps), source.sample

    def _evaluate(self, stacks, steps: int | None, hooks: Callbacks) -> dict[str, float]:
        step = self._step
        self._metrics.reset()
        self.model.stop_evaluating = False
        hooks.list.on_test_begin()
        begin, end = hooks.hooks("test")
        totals = None
        dispatches = step.together(stacks, next(stacks.epochs(Position(0, 0))), steps, training=False)
        for batch, dispatch in enumerate(dispatches):
            begin(batch)
            *sums, indices = self._run(step.compiled_evaluate, *dispatch.stacks)
            totals = sums if totals is None else [a + b for a, b in zip(totals, sums, strict=True)]
            check = functools.partial(step.index_checks.require, indices)
            end(batch, functools.partial(self._evaluated, totals, check))
            if self.model.stop_evaluating:
                break
        logs = self._evaluated(totals, check)
        hooks.list.on_test_end(logs)
        return logs

    def _evaluated(self, totals: list[tf.Tensor], check: Callable[[], None]) -> dict[str, float]:
        check()
        return self._step.evaluated([t.numpy().item() for t in totals])

    def _validation(self, validation_data, batch_size, steps, like):
        if validation_data is None:
            return None
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
        # The same for all epochs: they are checked before training starts.
        stacks, sample = self._evaluation_stacks(x, y, sample_weight, batch_size, steps)
        if _row_shapes(sample) != _row_shapes(like):
            # What does not fit is found by a trace, which here comes before training rather than after an epoch of it.
            one = tf.nest.map_structure(lambda s: tf.TensorSpec([1, s.shape[0] or 1, *s.shape[1:]], s.dtype), sample)
            self._run(tf.function(self._step.evaluate, autograph=False).get_concrete_function, one)

        def validate(callbacks):
            hooks = Callbacks(callbacks, self.model, verbose=0, epochs=1, steps=None, history=False)
            return self._evaluate(stacks, steps, hooks)

        return validate

    @distribution.connected
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The model's outputs for `x`, as NumPy arrays: Keras's own `predict`."""
        return self.model.predict(x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)

    @distribution.connected
    def train_step(self, stack: tuple) -> StepResult:
        """One train step on `(x, y)` or `(x, y, sample_weight)`, every tensor `[micro-batches, rows, ...]`.

        Returns:
            The step's results, on the device: reading one waits for it.

        Raises:
            ValueError: axes that do not match, or labels or ids out of range (with a GPU, which this does not wait
                for, at the next call).
            NonFiniteError: training that can only skip its steps (likewise; see `on_nonfinite`).
        """
        batch, step = self._prepared(stack)
        if self._replicas is not None:
            batch = self._layout(self._exact_in_training()).shard(batch)
        executed = self._run(step.compiled_execute, batch)
        unread = Unread(step, executed, Dispatch((batch,)))
        late, self._unread = (unread, None) if not has_gpu() else (self._unread, unread)
        if late is not None:
            try:
                late.require()
            except Exception:
                self._unread = None  # not applied, for what came before it
                raise
        return executed.result

    def compiler_ir(self, stack: tuple, stage: str = "optimized_hlo") -> str | bytes:
        """The compiled train step for a stack of this shape: "optimized_hlo", "stablehlo_serialized", ..."""
        self._require_one_program()
        batch, step = self._prepared(stack)
        return compiled.compiler_ir(step.compiled_execute, batch, stage=stage)

    def memory_analysis(self, stack: tuple) -> compiled.MemoryAnalysis:
        """XLA's memory plan of the train step for a stack of this shape; nothing is run."""
        self._require_one_program()
        batch, step = self._prepared(stack)
        return compiled.memory_analysis(step.compiled_execute, batch)

    def _require_one_program(self) -> None:
        if self._replicas is not None:
            raise ValueError(
                f"Under {type(self._replicas.strategy).__name__} a train step is several programs: ask for that of the "
                "same model made outside the scope, with the batch_size of one replica."
            )

    def _prepared(self, stack: tuple) -> tuple[Batch, ModelStep]:
        """The stack as the model's step takes it, and that step; what is like a stack before is not checked again."""
        batch = Batch(*stack) if type(stack) in (tuple, list) and len(stack) in (2, 3) else stack
        if isinstance(batch, Batch) and self._signature(batch) in self._known_stacks:
            return batch, self._step
        batch = by_hand.as_stack(stack)
        if self._signature(batch) not in self._known_stacks:
            self._built(by_hand.sample(batch))
            self._known_stacks.add(self._signature(batch))
        return batch, self._step

    def _signature(self, batch: Batch) -> tuple:
        """What `_built` checks: the stack, and what may have been set since the step was built."""
        trainable = tuple([layer.trainable for layer in self._layers])
        return compiled.flat(batch)[1], trainable, self.clip_norm, id(self.loss_scale), self.on_nonfinite

    def _source(self, x, y, sample_weight, **options):
        sparse = takes_class_indices(self._compile_arguments["loss"])
        return data.of(x, y, sample_weight, sparse_labels=sparse, **options)

    def _layout(self, exact_rows: bool = False) -> Layout:
        layout = Layout(self.gradient_accumulation_steps, exact_rows=exact_rows)
        if self._replicas is None:
            return layout
        return layout._replace(replicas=self._replicas.count, shards=self._replicas.shards)

    def _exact_in_training(self) -> bool:
        return self._model.couples_rows or self._metrics.need_exact_rows

    def _built(self, sample: Batch) -> ModelStep:
        """The model's step; built, with the model, from the specs of the first micro-batch."""
        self._model.require_inputs(sample.x)
        if self._step is None:
            with distribution.scope_of(self._replicas):  # a model that is not built yet
                y_pred = self._model.symbolic_call(sample.x, training=True)
            y_true = tf.nest.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), sample.y)
            if self.jit_compile:
                compilable.require(self._model)
            self._outputs = Outputs(self._model.output_names, y_pred)
            self._losses.build(self._outputs, y_true)
            self._metrics.build(self._outputs, y_true)
            step = ModelStep if self._replicas is None else functools.partial(ReplicatedStep, self._replicas)
            self._step = step(
                self._model,
                self._outputs,
                self._losses,
                self._metrics,
                self._optimizer,
                loss_scale=self.loss_scale,
                clip_norm=self.clip_norm,
                fp32_weight_gradients=self.fp32_weight_gradients,
                jit_compile=self.jit_compile,
                on_nonfinite=self.on_nonfinite,
            )
            self._model.adopt(self.optimizer, self._metrics, **self._compile_arguments)
        if [id(v) for v in self._model.trainable_variables] != [id(v) for v in self._step.trained]:
            raise ValueError(
                "The model's trainable variables have changed since this Trainer was built (a layer was added, or its "
                "`trainable` was switched). Make a new Trainer, with a new optimizer."
            )
        for name in ("clip_norm", "loss_scale", "on_nonfinite"):
            if getattr(self, name) != getattr(self._step, name):
                raise ValueError(
                    f"{name} was set to {getattr(self, name)!r} after the train step was built with "
                    f"{getattr(self._step, name)!r}. Make a new Trainer, with a new optimizer."
                )
        self._layers = list(self._model.layers)
        # Targets for other outputs, on a program that exists, would be an obscure error of tf.function's.
        self._outputs.match(sample.y, "y")
        return self._step

    def _run(self, program, *args):
        with compilable.explained(self._model):
            return program(*args)


def _row_shapes(sample: Batch) -> Any:
    return tf.nest.map_structure(lambda spec: tuple(spec.shape[1:]), (sample.x, sample.y))


def _schedule(validation_freq: Any):
    if isinstance(validation_freq, (list, tuple, set)):
        if not validation_freq:
            raise ValueError(f"validation_freq={validation_freq} names no epoch: pass the epochs to validate after.")
        epochs = {checks.whole_number("validation_freq", epoch) for epoch in validation_freq}
        return lambda epoch: epoch + 1 in epochs
    every = checks.whole_number("validation_freq", validation_freq)
    return lambda epoch: (epoch + 1) % every == 0
