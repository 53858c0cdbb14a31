"""What a checkpoint of a fit holds, and how a fit takes it up again."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import models
from fastaccum.checkpoint import callback_state
from fastaccum.checkpoint import store as checkpoint
from fastaccum.checkpoint.signals import Preempted, Preemption
from fastaccum.data.stacks import Dispatch, Position

# By which Keras tells apart what one process made: another process counts anew.
NUMBER = r"_\d+(?=[_/]|$)"


def variables_of(trainer: Any) -> dict[str, dict[str, tf.Variable]]:
    """Every variable that training changes, by group and by a name that is the same in every process."""
    model, step = trainer._model, trainer._step
    groups = {
        "model": [*model.model.variables, *model.state],
        "optimizer": trainer._optimizer.variables,
        "loss_scale": trainer.loss_scale.variables,
        "step": step.running,
    }
    return {group: _named(variables) for group, variables in groups.items()}


def _named(variables: list[Any]) -> dict[str, tf.Variable]:
    named, seen = {}, set()
    for variable in variables:
        raw = variable.value if isinstance(variable, keras.Variable) else variable
        if id(raw) in seen:
            continue
        seen.add(id(raw))
        path = getattr(variable, "path", None) or raw.name
        named[_free(path.split(":")[0], named)] = raw
    return named


def _free(path: str, taken: Container[str]) -> str:
    """`path` without numbers, or with the first of -2, -3, ... that makes it another than those taken."""
    same = re.sub(NUMBER, "", path)
    names = itertools.chain([same], (f"{same}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def description(trainer: Any, source: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: plain values."""
    variables = {
        group: {name: f"{_dtype(v).name}{v.shape.as_list()}" for name, v in named.items()}
        for group, named in variables_of(trainer).items()
    }
    loss_scale = {"rule": type(trainer.loss_scale).__name__, **trainer.loss_scale.get_config()}
    batch = {
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        "steps_per_execution": trainer.steps_per_execution,
        "clip_norm": trainer.clip_norm,
        "replicas": 1 if trainer._replicas is None else trainer._replicas.count,
        "fp32_weight_gradients": trainer.fp32_weight_gradients,
        "jit_compile": trainer.jit_compile,
        "data": [f"{spec.dtype.name}{spec.shape.as_list()}" for spec in tf.nest.flatten(source.sample)],
        **source.plan,
        **plan,
    }
    return callback_state.plain(
        {
            "model": {"layers": _layers(trainer._model), "variables": variables["model"]},
            "loss": _losses(trainer),
            "optimizer": {**trainer._optimizer.config, "variables": variables["optimizer"]},
            "loss_scale": {**loss_scale, "variables": variables["loss_scale"]},
            "metrics": {"variables": variables["step"]},
            "batch plan": batch,
        }
    )


def _layers(model: models.Model) -> dict[str, Any]:
    """Each layer's configuration, by a name that is the same in every process."""
    configurations: dict[str, Any] = {}
    for layer in model.layers:
        try:
            config = layer.get_config()
        except NotImplementedError:  # of one's own, without a `get_config`
            config = {}
        if "layers" in config:  # which are in the list themselves
            continue
        policy = getattr(getattr(layer, "dtype_policy", None), "name", None)
        configurations[_free(layer.name, configurations)] = {
            "class": type(layer).__name__,
            "policy": policy,
            **_without_names(config),
        }
    return configurations


def _without_names(config: Any) -> Any:
    """A configuration without what a trained variable no longer depends on: names, initial values."""
    if isinstance(config, dict):
        left_out = ("name", "dtype", "build_config")
        return {
            k: _without_names(v) for k, v in config.items() if k not in left_out and not str(k).endswith("initializer")
        }
    return config


def _losses(trainer: Any) -> Any:
    def plain(loss):
        if hasattr(loss, "get_config"):
            return {"class": type(loss).__name__, **_without_names(loss.get_config())}
        return getattr(loss, "__qualname__", loss)

    return tf.nest.map_structure(plain, dict(trainer._compile_arguments))


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Each item in which two descriptions differ, as "optimizer.learning_rate: 0.1 was saved, now 0.2"."""
    if isinstance(saved, dict) and isinstance(now, dict):
        names = [*saved, *(name for name in now if name not in saved)]
        found = [
            line
            for name in names
            for line in differences(saved.get(name, "nothing"), now.get(name, "nothing"), f"{path}.{name}".lstrip("."))
        ]
        return found or ([f"{path}: in another order"] if list(saved) != list(now) else [])
    return [] if saved == now else [f"{path}: {_shown(saved)} was saved, now {_shown(now)}"]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _dtype(variable: tf.Variable) -> tf.DType:
    # Under mixed precision the dtype of a tf_keras model's variable is the compute dtype.
    return getattr(variable, "true_dtype", variable.dtype)


def saver(directory: Any, every: Any, keep: Any) -> NotSaved:
    """What saves a fit, from the arguments of `fit`.

    Raises:
        TypeError, ValueError: an argument out of its range, or a folder that cannot be written to.
    """
    keep = checks.whole_number("keep", keep)
    if every is not None:
        every = checks.whole_number("checkpoint_every", every)
    if directory is None:
        if every is not None:
            raise ValueError(f"checkpoint_every={every} needs a checkpoint_dir.")
        return NotSaved()
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise TypeError(f"checkpoint_dir={directory!r} must be the path of a folder.")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"checkpoint_dir={str(directory)!r} cannot be written to: {error.strerror}.") from error
    return Saver(Path(directory).absolute(), every, keep)  # a callback may change the working directory


class NotSaved:
    """The place of `Saver` in a fit without checkpoints."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    stopped = False

    def resume(self, *_) -> None:
        """Nothing to resume."""

    def begin(self) -> None:
        """Called after `on_train_begin`."""

    def begin_epoch(self, epoch: int) -> int:
        """Called after `on_epoch_begin`; returns the train steps that are done of the epoch."""
        return 0

    def watched(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """An epoch's dispatches. Each has been executed by the time that the next is asked for."""
        return dispatches

    def end_epoch(self, last: bool) -> None:
        """Called after `on_epoch_end`."""


class Saver(NotSaved):
    """Saves the state of a fit, and takes it up again.

    The state is copied between two train steps and written by a thread, one write at a time. While entered, SIGTERM
    saves and then raises `Preempted`. Of several workers the chief alone writes, and all read: the others go on after
    SIGTERM for as long as the chief does, which would wait in vain for the one that had left.

    Args:
        directory: of the checkpoints.
        every: train steps from one to the next; None for each epoch's end.
        keep: how many newest are kept.
    """

    def __init__(self, directory: Path, every: int | None, keep: int):
        self.directory, self.every, self.keep = directory, every, keep
        self._resumed: checkpoint.Checkpoint | None = None
        self._done = self._saved = 0
        self._is_chief = True
        self._write: concurrent.futures.Future | None = None

    def __enter__(self):
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "fastaccum-checkpoint")
        self._preemption = Preemption().__enter__()
        return self

    def __exit__(self, kind, error, _):
        try:
            try:
                self._wait()
            except RuntimeError as failure:
                if error is None:
                    raise
                warnings.warn(str(failure), RuntimeWarning, stacklevel=2)
            lost_the_chief = not self._is_chief and isinstance(error, tf.errors.OpError)
            if self._preemption.requested and (error is None or lost_the_chief):
                raise Preempted(self._path(self._saved)) from error
        finally:
            self._writer.shutdown()
            self._preemption.__exit__()

    def resume(self, trainer, source, plan, hooks, first: int, epochs: int, verbose: Any) -> Position | None:
        """The position at which the last good checkpoint leaves off; None without one.

        Raises:
            ValueError: no checkpoint is good; nothing was changed.
            checkpoint.IncompatibleCheckpointError: the last good one is of another model, optimizer or plan;
                nothing was changed.
        """
        self._trainer, self._source, self._hooks = trainer, source, hooks
        source.track()
        self._variables = variables_of(trainer)
        self._description = description(trainer, source, plan)
        callback_state.require_one_resume(hooks)
        replicas = trainer._replicas
        if replicas is not None:
            self._is_chief = replicas.is_chief
            replicas.barrier()  # an earlier fit's last checkpoint may still be on its way
        if self._is_chief:
            checkpoint.remove_leftovers(self.directory)
        self._position = Position(first, first)
        found = checkpoint.latest(self.directory)
        self._tensors = {} if found is None else found.tensors()
        if replicas is not None:
            # Also holds the chief back, whose next checkpoint may take the place of the one that others still read.
            step = -1 if found is None else found.step
            replicas.require_same("All must see the same checkpoint_dir, on a disk that they share.", checkpoint=step)
        if found is None:
            return None
        different = differences(found.manifest["description"], self._description)
        if different:
            raise checkpoint.IncompatibleCheckpointError(
                f"{found.path} is of another training, and nothing was changed. Make these as they were, or name "
                f"another checkpoint_dir: {'; '.join(different)}"
            )
        source.restore(found.manifest["data"], self._of("data"))
        self._resumed = found
        progress = found.manifest["progress"]
        self._position = Position(progress["first_epoch"], progress["epoch"], progress["step_in_epoch"])
        self._done = self._saved = found.step
        self.stopped = progress["stopped"]
        callback_state.prepare(hooks)
        if verbose != 0:
            print(self._said(epochs), flush=True)
        return self._position

    def _said(self, epochs: int) -> str:
        _, epoch, step = self._position
        done = f"{self._done:,} train steps"
        if self.stopped or epoch >= epochs:
            how = "a callback had ended it" if self.stopped else f"{epoch} epochs, of {epochs} asked for"
            return f"training was complete in {self._resumed.path}: {done}, {how}"
        return f"resumed from {self._resumed.path}: {done} done, {step:,} of them in epoch {epoch + 1} of {epochs}"

    def begin(self) -> None:
        if self._resumed is not None:
            self._restore()

    def begin_epoch(self, epoch: int) -> int:
        if self._resumed is not None:
            # Once more in mid-epoch: `on_epoch_begin`, which may move a learning rate, was called for it before.
            if self._position.step:
                self._restore()
            self._resumed, self._tensors = None, {}
            return self._position.step
        self._position = Position(self._position.first, epoch)
        return 0

    def _of(self, group: str) -> dict[str, tf.Tensor]:
        return {n.removeprefix(f"{group}/"): t for n, t in self._tensors.items() if n.startswith(f"{group}/")}

    def _restore(self) -> None:
        for group, named in self._variables.items():
            for name, variable in named.items():
                variable.assign(self._tensors[f"{group}/{name}"])
        manifest = self._resumed.manifest
        callback_state.restore(self._hooks, manifest["callbacks"], self._of("callbacks"))
        history = self._trainer.model.history
        history.epoch = list(manifest["history"]["epoch"])
        history.history = {name: list(map(callback_state.value_of, v)) for name, v in self._resumed.history.items()}

    def watched(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        dispatch = next(dispatches, None)
        while dispatch is not None:
            self._done += dispatch.steps
            self._position = self._position._replace(step=self._position.step + dispatch.steps)
            yield dispatch
            # Copied before the next is read, which would move the place in the data; kept only if there is one, since
            # what follows an epoch's last step (validation, callbacks) belongs to the state after it.
            state = self._state(stopped=False) if self._due() and not self._ended() else None
            dispatch = next(dispatches, None)
            if state is not None and dispatch is not None:
                self._save(*state)

    def end_epoch(self, last: bool) -> None:
        self._position = Position(self._position.first, self._position.epoch + 1)
        if (self.every is None or last or self._due()) and self._done > self._saved:
            self._save(*self._state(stopped=bool(self._trainer.model.stop_training)))

    def _due(self) -> bool:
        crossed = self.every is not None and self._done // self.every > self._saved // self.every
        return crossed or (self._preemption.requested and self._is_chief)

    def _ended(self) -> bool:
        """Whether steps are skipped until an error that is still to be read: no state to go on from."""
        stuck = self._trainer._step.stuck_steps
        return stuck.since_end(stuck.seen()) is not None

    def _state(self, stopped: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """A manifest and tensors: copies, in host memory."""
        checks = self._trainer._step.index_checks
        checks.require(checks.seen())  # or the state would keep every later step from being applied
        tensors = {
            f"{group}/{name}": np.array(variable.read_value())
            for group, named in self._variables.items()
            for name, variable in named.items()
        }
        data, more = self._source.position()
        tensors.update({f"data/{name}": tensor for name, tensor in more.items()})
        callbacks, arrays = callback_state.state(self._hooks)
        tensors.update({f"callbacks/{name}": array for name, array in arrays.items()})
        history = self._trainer.model.history
        first, epoch, step = self._position
        manifest = {
            "progress": {
                "step": self._done,
                "epoch": epoch,
                "step_in_epoch": step,
                "first_epoch": first,
                "stopped": stopped,
            },
            "data": data,
            "history": callback_state.plain({"epoch": history.epoch, "history": history.history}),
            "callbacks": callbacks,
            "description": self._description,
        }
        return manifest, tensors

    def _save(self, manifest: dict[str, Any], tensors: dict[str, Any]) -> None:
        self._wait()
        self._saved = manifest["progress"]["step"]
        if not self._is_chief:
            return
        self._write = self._writer.submit(checkpoint.write, self.directory, manifest, tensors, self.keep)
        if self._preemption.requested:
            self._wait()
            path = self._path(self._saved)
            print(f"saved {path}, from which fit goes on", file=sys.stderr, flush=True)
            raise Preempted(path)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _wait(self) -> None:
        write, self._write = self._write, None
        if write is None:
            return
        try:
            write.result()
        except Exception as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise checkpoint.CheckpointWriteError(
                f"The checkpoint of step {self._saved} could not be written to {str(self.directory)!r}: {reason}. "
                "Earlier ones are as they were. Make room or mend the folder, then call fit again to go on from the "
                "last of them."
            ) from error
