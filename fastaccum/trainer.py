"""`Trainer`: Keras's fit, evaluate and predict, as a thin loop over the fused train step."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, cast

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import models, optimizers, own_loss
from fastaccum.adapters.callbacks import Callbacks, LateLogs, backed_up_epoch
from fastaccum.adapters.callbacks import require as require_callbacks
from fastaccum.adapters.data_adapters import as_dataset, read_once, with_sequences
from fastaccum.adapters.losses import Losses, sparse_labels
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.own_loss import Reduction
from fastaccum.checkpoint.saver import Saver
from fastaccum.data import arrays, source
from fastaccum.data.stacks import Batch, Dispatch, Position
from fastaccum.distribute import replicas, workers
from fastaccum.distribute.evaluation import Evaluation
from fastaccum.distribute.identity import Identity
from fastaccum.distribute.step_builder import Step, StepBuilder
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.memory import planner
from fastaccum.memory.guard import Guard
from fastaccum.memory.plan import Plan
from fastaccum.memory.summary import Summary, summary
from fastaccum.step import compilable, diagnosis, program
from fastaccum.step import compile_cache as compile_caches
from fastaccum.step import loss_scale as loss_scales
from fastaccum.step.by_hand import StacksByHand
from fastaccum.step.model_step import Unread
from fastaccum.step.options import OnNonfinite, Options, Schedule, capped
from fastaccum.step.train_step import StepResult

Verbose = Literal["auto", 0, 1, 2]
_INSTEAD = {"compile": "; pass optimizer, loss and metrics to Trainer(...)", "history": "; fit returns it"}


class Trainer:
    """Trains a Keras model with gradient accumulation.

    A train step takes `gradient_accumulation_steps` micro-batches of `batch_size` rows and applies one update, all in
    one XLA program. The update equals, to float32 rounding, that of Keras's own step on all these rows at once:

        update = optimizer( sum_ij w_ij * grad(l_ij) / denominator )

    Here i counts the micro-batches and j their rows or tokens; w are their weights and l their losses. The denominator
    is the one that the loss's `reduction` defines over the full batch. A short last batch counts by the rows that it
    holds; an update in which no row or token counts (all labels ignored, say) changes nothing. Batch statistics, as of
    BatchNormalization, are those of each micro-batch.

    The model is trained in place: save it, as any Keras model, by `trainer.model.save("model.keras")`.

    Embeddings differ from Keras 3 on purpose. Their gradient is summed by id before the optimizer sees it, as in
    tf_keras. Keras 3's `fit` doesn't sum it, and optimizers such as Adam then square each part of an id by itself.

    Args:
        model: a Keras 3 model, or a tf_keras model. The `jit_compile` and `steps_per_execution` that it was compiled
            with don't count: pass them here.
        optimizer: a Keras 3, tf_keras or tensorflow-addons optimizer; or the name of one, which is tf_keras's for a
            tf_keras model, else Keras 3's. Its schedules and `iterations` count updates. To use the one that a model
            was compiled with, pass `model.optimizer`.
        loss: a Keras loss or its name; a function `fn(y_true, y_pred)` that returns one loss per row or per token; or
            a list or dict of these, by output. None for the model's own loss: the one that it was compiled with (with
            its metrics, if none are given), its `compute_loss`, its `add_loss`, or the loss that a Hugging Face model
            returns. `y` may be left out where the loss doesn't need it.
        metrics: as in Keras's `compile`.
        loss_weights: factors of the outputs' losses, as in `compile`.
        weighted_metrics: metrics that use the sample weights, as in `compile`.
        gradient_accumulation_steps: micro-batches per update.
        loss_scale: a loss scale, or a number for a static one. "auto" for `DynamicLossScale()` if the model computes in
            float16, and none otherwise.
        clip_norm: clip the gradient of the whole update to this global norm. None for no clipping.
        fp32_weight_gradients: if the model computes in float16 or bfloat16, compute the gradients of its kernels and
            biases in float32, as `fastaccum.kernels.fp32_weight_gradients` does, but within the train step alone: the
            model stays as it is. No effect in float32 and on tf_keras models.
        jit_compile: compile with XLA. False runs the same step operation by operation.
        steps_per_execution: train steps in one call of the program. Callbacks see the last step of each call, as in
            Keras.
        on_nonfinite: what to do about a step whose gradient, loss or statistics are not finite, if no lower loss scale
            is left to try. Such a step never changes anything. "skip" goes on, and raises `NonFiniteError` after 10 of
            them in a row. "raise" raises it at the first.
        own_loss_reduction: whether a scalar that the model computes itself (in `compute_loss`, or for `add_loss`) is
            the "mean" or the "sum" over the rows of a micro-batch, which fastaccum can't see. With "sum", a penalty on
            weights counts once for each micro-batch: make it a regularizer. A loss that is neither (a masked mean, a
            comparison of rows) is computed for each micro-batch by itself, with a warning where that can be seen.
        compile_cache: a folder for compiled programs. The next process loads them from there instead of compiling
            them again, if versions, device and flags are the same. It applies to the whole process from here on.

    Raises:
        TypeError: if the model, optimizer, loss or a metric is not one.
        ValueError: if a number is out of its range, a name is unknown, the model overrides `train_step`, there is no
            loss, the optimizer accumulates or scales by itself, or XLA cannot compile a layer. Later: if an attribute
            is set after the train step was built with it.

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="line")
    >>> trainer = Trainer(model, "sgd", "mse", gradient_accumulation_steps=4)
    >>> trainer
    Trainer(Sequential 'line', optimizer=SGD, gradient_accumulation_steps=4, precision=float32)
    >>> x = np.random.default_rng(0).normal(size=(100, 2)).astype("float32")
    >>> history = trainer.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=20, verbose=0)
    >>> history.history["loss"][-1] < history.history["loss"][0] / 5
    True
    """

    gradient_accumulation_steps: int
    steps_per_execution: int
    loss_scale: loss_scales.LossScale
    clip_norm: float | None
    fp32_weight_gradients: bool
    jit_compile: bool
    on_nonfinite: OnNonfinite
    own_loss_reduction: Reduction

    @checks.keywords
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
        loss_scale: loss_scales.LossScale | float | Literal["auto"] | None = "auto",
        clip_norm: float | None = None,
        fp32_weight_gradients: bool = True,
        jit_compile: bool = True,
        steps_per_execution: int = 1,
        on_nonfinite: OnNonfinite = "skip",
        own_loss_reduction: Reduction = "mean",
        compile_cache: str | os.PathLike[str] | None = None,
    ):
        if compile_cache is not None:
            compile_caches.use(compile_cache)
        self._model = models.get(model)
        self.model = model
        own_loss.require_plain_steps(self._model)
        loss, loss_weights, metrics, weighted_metrics = own_loss.where_none_given(
            self._model, loss, loss_weights, metrics, weighted_metrics
        )
        self._optimizer = optimizers.get(optimizer, self._model.legacy)
        self._losses = Losses(loss, loss_weights)
        self._metrics = Metrics(metrics, weighted_metrics)
        self._options = Options(
            gradient_accumulation_steps=gradient_accumulation_steps,
            steps_per_execution=steps_per_execution,
            loss_scale=loss_scales.get(loss_scale, self._model.compute_dtype),
            clip_norm=clip_norm,
            fp32_weight_gradients=fp32_weight_gradients,
            jit_compile=jit_compile,
            on_nonfinite=on_nonfinite,
            own_loss_reduction=own_loss_reduction,
        )
        vars(self).update(vars(self._options))
        self._given = {"loss": loss, "loss_weights": loss_weights}
        self._replicas = replicas.of(self._model)
        if self._replicas is not None:
            self._replicas.require_optimizer(self._optimizer)
        passed = {**self._given, **dict(zip(("metrics", "weighted_metrics"), self._metrics.user, strict=True))}
        self._identity = Identity(self._model, self._optimizer, passed, self._replicas)
        self._builder = StepBuilder(
            self._model, self._optimizer, self._losses, self._metrics, self._given, self._replicas, self._identity
        )
        self._guard: Guard | None = None
        self._by_hand = StacksByHand(self._built, lambda: list(self._model.layers), self._builder.needs_targets)
        if jit_compile:
            compilable.require(self._model)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Options.names() and "_options" in vars(self):
            value = loss_scales.get(value, self._model.compute_dtype) if name == "loss_scale" else value
            self._options = self._options.replace(name, value, built=self._builder.step is not None)
            value = getattr(self._options, name)
        elif name[0] != "_" and not hasattr(self, name) and (near := get_close_matches(name, Options.names(), 1, 0.8)):
            raise AttributeError(f"Trainer has no attribute {name!r}: did you mean {near[0]}?", name=name, obj=self)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # or type checkers would take any name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, whose own error led here
                return super().__getattribute__(name)
            of_model = not name.startswith("_") and hasattr(vars(self).get("model"), name)
            hint = _INSTEAD.get(name, f"; its model has: trainer.model.{name}" if of_model else "")
            raise AttributeError(f"Trainer has no attribute {name!r}{hint}", name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A Trainer holds compiled programs and cannot be copied: copy its model, and make a new one.")

    def __repr__(self) -> str:
        parts = {
            "optimizer": type(self.optimizer).__name__,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "precision": self._model.compute_dtype,
        }
        if not isinstance(self.loss_scale, loss_scales.NoLossScale):
            parts["loss_scale"] = self.loss_scale
        model = f"{type(self.model).__name__} {self.model.name!r}"
        return f"Trainer({', '.join([model, *(f'{name}={value}' for name, value in parts.items())])})"

    @property
    def optimizer(self) -> Any:
        """The optimizer object that trains the model."""
        return self._optimizer.optimizer

    @workers.connected
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | Literal["auto"] | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        global_batch_size: int | None = None,
    ) -> keras.callbacks.History:
        """Trains for `epochs` passes, with the arguments and callbacks of Keras's `fit`.

        These things differ from Keras:

        - `batch_size` is that of a micro-batch.
        - `steps_per_epoch` and the batch numbers that callbacks see count train steps, that is, updates.
        - `class_weight` and `sample_weight` are multiplied if both are given.
        - The logs also have `grad_norm` and `loss_scale`, of the last step, and `skipped_steps`, the steps of the epoch
          so far that changed nothing because a value was not finite.
        - The logs that batch callbacks get are a mapping, which waits for the step only when it is read.

        As in Keras, `keras.utils.set_random_seed` determines the order of shuffled rows, and data that ends before
        `steps_per_epoch` ends the epoch with a warning. A KerasHub task that has a preprocessor gets its raw inputs,
        in order, as in its own `fit`.

        With `checkpoint_dir`, `fit` saves the state of the training there. The same call, made again, continues from
        the last good checkpoint, with the same results, bit for bit, as if it had never stopped (docs/reliability.md).
        It may split the same update into other pieces, by another `batch_size`, accumulation or number of devices; the
        results are then equal to float32 rounding. If the training was complete, it returns the `History` at once.
        SIGTERM saves, then raises `fastaccum.Preempted`, which ends the process with code 143. Data from Python code
        (generators, `keras.utils.PyDataset`, `tf.py_function`) is read again from the start of the epoch and must be
        the same.

        Args:
            checkpoint_dir: a folder for the checkpoints of this training alone. If it holds some, the last good one
                determines where training continues, and `initial_epoch` is ignored.
            checkpoint_every: the number of train steps between two checkpoints. None for one after every epoch.
            keep: how many checkpoints are kept, the newest ones.
            global_batch_size: rows of an update, with `batch_size="auto"`. The micro-batch is then the largest that
                fits the device, as `fastaccum.plan` finds it, and `gradient_accumulation_steps` is set accordingly. The
                result is the same, bit for bit, as with that `batch_size`. Batches of a `tf.data.Dataset` are cut anew.

        Returns:
            The `History`, which is also `model.history`.

        Raises:
            TypeError, ValueError: raised before any weight moves if data does not fit, or if none of the checkpoints in
                `checkpoint_dir` is good, or they are of another model, optimizer, loss scale or batch plan, or their
                place cannot be found in other pieces; raised with no weight moved by them if labels or ids are out of
                range.
            NonFiniteError: raised if training can only skip its steps (see `on_nonfinite`).
            OutOfMemoryError: raised before any weight moves if a train step cannot fit the device, or where memory ran
                out, with the `batch_size` that fits.
            RuntimeError: raised if a checkpoint could not be written.
            Preempted: raised after SIGTERM, with the state saved.
        """
        schedule = Schedule(
            epochs, initial_epoch, steps_per_epoch, validation_steps, validation_batch_size, validation_freq
        )
        saver = Saver(checkpoint_dir, checkpoint_every, keep)
        class_weight = checks.class_weight(class_weight)
        if checks.fraction("validation_split", validation_split) and validation_data is None:
            (x, y, sample_weight), validation_data = arrays.split(
                (x, y, sample_weight), validation_split, text=self._takes_text or self._model.preprocess is not None
            )
        validated, saved = validation_data is not None, checkpoint_dir is not None
        whole = {"validation_data": validated, "checkpoint_dir": saved, "checkpoint_every": checkpoint_every}
        self._identity.require_alike("fit", **dataclasses.asdict(schedule), class_weight=class_weight, **whole)
        seed = self._identity.agreed_seed(checks.true_or_false("shuffle", shuffle))
        options = {"shuffle": shuffle, "seed": seed, "class_weight": class_weight}
        data, batch_size = self._data((x, y, sample_weight), batch_size, global_batch_size, verbose, options)
        step = self._built(data.sample)
        self._losses.require_classes(class_weight)
        epochs_left = schedule.epochs - schedule.initial_epoch
        built_with = self._present_options
        stacks = data.stacks(self._builder.training_layout(built_with), schedule.steps_per_epoch, epochs_left)
        validate = self._validation(validation_data, schedule, batch_size, like=data.sample)
        hooks = Callbacks(
            callbacks, self.model, verbose=verbose, epochs=schedule.epochs, steps=stacks.steps_per_epoch, history=True
        )
        plan = {**stacks.plan, "class_weight": class_weight}
        training = functools.partial(
            self._identity.training, built_with, step, stacks, hooks, data.sample, plan, self._builder.split_sensitive
        )
        self._identity.require_one_fit(training)
        self.model.stop_training = False
        step.running.stuck_steps.reset()
        logs: dict[str, Any] = {}
        with saver, self._guarded(), self._builder.fitting():
            position = saver.resume(training, schedule.initial_epoch, schedule.epochs, verbose)
            with replicas.first_of(self._replicas):
                diagnosis.require_statistics(step.cycle, step.objective)
                diagnosis.warn_of_zero_lora(self._model.layers)
            hooks.list.on_train_begin()
            saver.begin()
            if epoch := backed_up_epoch(self.model, stacks.steps_per_epoch):
                position = Position(epoch, epoch)
            last = position.epoch if saver.stopped else schedule.epochs
            for epoch, dispatches in zip(range(position.epoch, last), stacks.epochs(position), strict=False):
                step.running.reset()
                hooks.list.on_epoch_begin(epoch)
                self._builder.require_same()
                done = saver.begin_epoch(epoch)
                logs = self._train_epoch(step, saver.watched(step.together(stacks, dispatches)), hooks, done)
                if validate is not None and schedule.validates(epoch):
                    logs.update({f"val_{name}": value for name, value in validate(hooks).items()})
                hooks.list.on_epoch_end(epoch, logs)
                saver.end_epoch(last=self.model.stop_training or epoch == last - 1)
                if self.model.stop_training:
                    break
            self._optimizer.finalize(self._model.trainable_variables)
            hooks.list.on_train_end(logs)
        return self.model.history

    def _data(
        self,
        given: Any,
        batch_size: int | Literal["auto"] | None,
        global_batch_size: int | None,
        verbose: Verbose,
        options: dict[str, Any],
    ) -> tuple[Any, int | None]:
        """The source of `fit`'s data, and the rows of a micro-batch: with "auto" the most that fit, of which so many
        are accumulated that they make the global batch.
        """
        auto = isinstance(batch_size, str) and batch_size == "auto"
        if auto and global_batch_size is None:
            raise ValueError('batch_size="auto" needs global_batch_size=N, the rows of an update.')
        if not auto and global_batch_size is not None:
            raise ValueError(
                f'global_batch_size={checks.shown(global_batch_size)} needs batch_size="auto", which divides it into '
                f"micro-batches that fit, and not batch_size={checks.shown(batch_size)}."
            )
        if global_batch_size is None:
            return self._source(*given, batch_size=batch_size, **options), cast("int | None", batch_size)
        data = self._source(*given, batch_size=None, **options)
        at_most = data.most_rows(1 if self._replicas is None else self._replicas.workers)
        plan = self._plan(data.sample, global_batch_size=global_batch_size, at_most=at_most, verbose=verbose)
        if verbose:
            print(plan.summary)
        self.gradient_accumulation_steps = plan.accumulation_steps
        data.cut_anew(plan.batch_size)
        return data, plan.batch_size

    def _plan(self, sample: Batch, **asked: Any) -> Plan:
        self._identity.require_alike("plan", **asked)
        with self._explained():
            return planner.plan(self._builder, self._present_options, sample, replicas=self._replicas, **asked)

    def _train_epoch(self, step: Step, dispatches: Iterator[Dispatch], hooks: Callbacks, first: int) -> dict[str, Any]:
        begin, end = hooks.hooks("train")
        waiting: Unread | None = None
        for dispatch in dispatches:
            begin(first)
            try:
                with self._explained(), program.announced(hooks.say if waiting is None else None):
                    executed = step.dispatch(dispatch)
            except tf.errors.OpError:
                if waiting is not None:
                    waiting.require()  # another worker may have failed for what is known here better
                raise
            if waiting is not None:
                # Read only now that the next step is on its way: the device never runs dry.
                waiting.require()
            waiting = Unread(step.require, executed, dispatch)
            late = LateLogs(executed.logs, waiting.require)
            end(first + dispatch.size - 1, functools.partial(lambda logs: logs, late))
            first += dispatch.steps
            if self.model.stop_training:
                break
        if waiting is None:
            raise ValueError("The data ended before the place to go on from: pass what the checkpoint was made with.")
        logs = dict(late)
        step.running.stuck_steps.warn(executed.stuck)
        return logs

    @workers.connected
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> float | list[float] | dict[str, float]:
        """Computes loss and metrics over a whole data set, with the arguments of Keras's `evaluate`.

        The loss is that of all rows as one batch: the sum of the losses divided by the sum of the weights, not a mean
        of the batches' means. Weights and state stay as they are. `steps` and the numbers that callbacks see count
        batches, as in Keras.

        Returns:
            The loss, a list of loss and metrics, or with `return_dict` a dict.
        """
        self._identity.require_alike("evaluate", steps=steps)
        checks.true_or_false("return_dict", return_dict)
        data = self._source(x, y, sample_weight, batch_size=batch_size, steps="steps")
        evaluation = self._evaluation(data, steps)
        hooks = Callbacks(callbacks, self.model, verbose=verbose, epochs=1, steps=evaluation.batches, history=False)
        with self._guarded():
            logs = evaluation(hooks)
        if return_dict:
            return logs
        values = evaluation.in_order(logs)
        return values[0] if len(values) == 1 else values

    def _evaluation(self, data: Any, steps: int | None, passes: int = 1) -> Evaluation:
        steps = capped("steps", steps)
        step = self._built(data.sample)
        # One micro-batch per dispatch where the caller counts them.
        micro_batches = self.gradient_accumulation_steps * self.steps_per_execution if steps is None else 1
        stacks = data.stacks(self._builder.evaluation_layout(micro_batches), steps, passes)
        return Evaluation(step, stacks, self.model, self._explained)

    @graph_scoped_gradients()
    def _validation(
        self, validation_data: Any, schedule: Schedule, batch_size: int | None, like: Batch
    ) -> Callable[[Callbacks], dict[str, float]] | None:
        if validation_data is None:
            return None
        with checks.naming("validation_data"):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
        # One source for all epochs: it is validated before training starts.
        names = {"what": "validation_data", "steps": "validation_steps"}
        data = self._source(x, y, sample_weight, batch_size=schedule.validation_batch_size or batch_size, **names)
        passes = sum(map(schedule.validates, range(schedule.initial_epoch, schedule.epochs)))
        evaluation = self._evaluation(data, schedule.validation_steps, passes)
        evaluation.require_traceable(data.sample, like)

        def validate(hooks: Callbacks) -> dict[str, float]:
            return evaluation(Callbacks(hooks.list, self.model, verbose=0, epochs=1, steps=None, history=False))

        return validate

    @workers.connected
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The model's outputs for `x`, as NumPy arrays: Keras's own `predict`."""
        self._identity.require_alike("predict", steps=steps)
        for name, value in (("batch_size", batch_size), ("steps", steps)):
            if value is not None:
                checks.whole_number(name, value)
        require_callbacks(callbacks, verbose, self._model.legacy)
        if self._model.preprocess is None:
            source.require_predictable(x, self._model.may_take_text)
        try:
            with checks.naming(f"x ({type(x).__name__})", AttributeError):
                given = with_sequences(x)
                if self._model.legacy and isinstance(given, keras.utils.PyDataset):
                    given = as_dataset(given)
                return self.model.predict(
                    given, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
                )
        except (tf.errors.InvalidArgumentError, StopIteration) as error:
            why = str(error) or "it yields nothing"
            raise ValueError(f"The model cannot be called with x ({type(x).__name__}): {why}") from error

    @workers.connected
    def train_step(self, stack: tuple[Any, ...]) -> StepResult:
        """One train step on `(x, y)` or `(x, y, sample_weight)`, every tensor `[micro-batches, rows, ...]`.

        Returns:
            The step's results, on the device: reading one waits for it.

        Raises:
            ValueError: raised if axes do not match, or labels or ids are out of range (with a GPU, which this does not
                wait for, at the next call).
            NonFiniteError: raised if training can only skip its steps (likewise; see `on_nonfinite`).
        """
        step, batch = self._by_hand.prepare(stack, text=self._takes_text)
        if self._replicas is not None:
            batch = self._builder.training_layout(self._present_options).shard(batch)
        with self._guarded(), self._explained():
            return self._by_hand.run(step, batch)

    @workers.connected
    def summary(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        sample_weight: Any = None,
        verbose: bool = True,
    ) -> Summary:
        """Prints what a train step computes, moves and holds: parameters, FLOPs, bytes, memory by kind, and what was
        compiled so far. Compiles the step where that was not done yet; runs nothing.

        Args:
            x: as `fit` takes it; only shapes and dtypes are read. None for the data that the trainer has seen first.
            y: as `fit` takes it.
            batch_size: rows of a micro-batch, as in `fit`; a dataset's, too, whose batches may differ.
            sample_weight: as `fit` takes it.
            verbose: False prints nothing.

        Returns:
            The figures: `flops`, `bytes`, `arithmetic_intensity`, `memory` and the others of the table, which is its
            `str`. Under tf.distribute they are those of one replica.

        Raises:
            TypeError: raised if x is an iterator, which could not be read again.
            ValueError: raised if there is no x and the trainer has seen none, if a dataset comes without batch_size, or
                if there is no XLA program.

        >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(10)])
        >>> trainer = Trainer(model, "sgd", "mse", gradient_accumulation_steps=4)
        >>> found = trainer.summary(tf.ones([64, 100]), tf.ones([64, 10]), batch_size=16, verbose=False)
        >>> found.trainable_parameters, found.memory.by_kind["weights"]
        (1010, 4040)
        """
        if read_once(x):
            raise TypeError(f"x is a {type(x).__name__}, which would lose what is read of it: pass one of its batches.")
        sample = self._builder.sample if x is None else self._source(x, y, sample_weight, batch_size=None).sample
        if sample is None:
            raise ValueError("x=None, and this Trainer has seen no data yet: pass x and y as for fit.")
        if batch_size is not None:
            sample = planner.specs(sample, checks.whole_number("batch_size", batch_size))
        with self._explained():
            step = self._built(sample)
            found = summary(step, sample, self._builder.training_layout(self._present_options))
        if checks.true_or_false("verbose", verbose):
            print(found)
        return found

    def compiler_ir(self, stack: tuple[Any, ...], stage: program.Stage = "optimized_hlo") -> str | bytes:
        """The compiled train step for a stack of this shape: "optimized_hlo", "stablehlo_serialized", ..."""
        return program.compiler_ir(*self._one_program(stack), stage=stage)

    def memory_analysis(self, stack: tuple[Any, ...]) -> program.MemoryAnalysis:
        """XLA's memory plan of the train step for a stack of this shape; nothing is run."""
        return program.memory_analysis(*self._one_program(stack))

    def _one_program(self, stack: tuple[Any, ...]) -> tuple[program.Program, Batch]:
        if self._replicas is not None:
            raise ValueError(
                f"Under {type(self._replicas.strategy).__name__} a train step is several programs: ask for that of the "
                "same model made outside the scope, with the batch_size of one replica."
            )
        step, batch = self._by_hand.prepare(stack, text=self._takes_text)
        return step.compiled_execute, batch

    def _source(self, x: Any, y: Any, sample_weight: Any, **options: Any) -> Any:
        sparse = sparse_labels(self._given["loss"])
        options |= {"sparse_labels": sparse, "needs_targets": self._builder.needs_targets, "text": self._takes_text}
        return source.of(x, y, sample_weight, preprocess=self._model.preprocess, **options)

    @property
    def _takes_text(self) -> bool:
        return not self.jit_compile and self._model.may_take_text

    @property
    def _present_options(self) -> Options:
        """As the attributes are, which a subclass may define."""
        return Options(**{name: getattr(self, name) for name in Options.names()})

    @property
    def _step(self) -> Step | None:
        return self._builder.step

    def _built(self, sample: Batch) -> Step:
        """The model's step; built, with the model, from the specs of the first micro-batch."""
        step = self._builder.of(sample, self._present_options)
        if self._guard is None:
            self._guard = Guard(step)
        return step

    def _guarded(self) -> AbstractContextManager[None]:
        """Around what runs programs: an error of memory is told by what takes it."""
        return self._guard.translate_oom_errors() if self._guard is not None else nullcontext()

    def _explained(self) -> AbstractContextManager[None]:
        """Around what traces, compiles or runs a program: an error of TensorFlow's is told in the caller's terms."""
        return compilable.explained(self._model)


@checks.keywords
def plan(
    trainer: Trainer,
    sample: Any,
    *,
    global_batch_size: int,
    memory_limit: int | str | None = None,
    recompute: Literal["auto"] | None = None,
    verbose: Verbose = "auto",
) -> Plan:
    """Finds the micro-batch with which an update of `global_batch_size` rows fits the device and is fastest.

    It compiles the train step for about five micro-batches at most, and reads XLA's plan of the memory of each. No data
    is made, no program is kept, and trainer and model stay as they are. `fit(..., batch_size="auto",
    global_batch_size=N)` does the same with its own data.

    The micro-batch divides the global batch, and is a multiple of the number of devices. It is the largest that fits.
    On a GPU a few sizes are also timed, on padding that moves no weight, and a smaller one is chosen if it is faster;
    not so if padding would change batch statistics. Worker processes agree on one that fits all of them.

    Args:
        trainer: a `Trainer`, trained or not.
        sample: data as `fit` takes it: `(x, y)`, `(x, y, sample_weight)`, or a `tf.data.Dataset` of batches. Only the
            shapes of its rows are read.
        global_batch_size: rows of an update.
        memory_limit: bytes of each device, or a string such as "16GiB". By default the environment variable
            FASTACCUM_MEMORY_LIMIT, or else what is free on the device, less a twentieth.
        recompute: "auto" to look for a policy of `fastaccum.remat` if no micro-batch fits, the one that computes least
            again first. The model stays as it is: pass it to `fastaccum.remat` with that policy.
        verbose: 0 for no messages on a terminal about what is being compiled.

    Returns:
        A `Plan`. To train with it, set `trainer.gradient_accumulation_steps = plan.accumulation_steps` and pass
        `batch_size=plan.batch_size` to `fit`.

    Raises:
        OutOfMemoryError: raised if no micro-batch fits: what the smallest needs, and for what.
        TypeError, ValueError: raised if the sample does not fit the model, if the replicas do not divide the global
            batch, or without XLA.

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    >>> trainer = Trainer(model, "sgd", "mse")
    >>> found = plan(trainer, (np.zeros((1, 8)), np.zeros((1, 1))), global_batch_size=4, memory_limit="1GiB")
    >>> found.batch_size, found.accumulation_steps
    (4, 1)
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer={trainer!r} is not a fastaccum.Trainer: pass fastaccum.Trainer(model, ...).")
    asked = {"global_batch_size": global_batch_size, "memory_limit": memory_limit, "recompute": recompute}
    return _plan(trainer, sample, {**asked, "verbose": verbose})


@workers.connected
def _plan(trainer: Trainer, sample: Any, asked: dict[str, Any]) -> Plan:
    if hasattr(sample, "__next__") or isinstance(with_sequences(sample), keras.utils.PyDataset):
        raise TypeError(f"sample is a {type(sample).__name__}: pass one of its batches, as a tuple.")
    with checks.naming("sample"):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(sample)
    data = trainer._source(x, y, weight, batch_size=None, what="sample")
    return trainer._plan(data.sample, **asked)
