"""Saves a fit on its way, and resumes it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.processes import WorkerLostError
from fastaccum.basics.warnings import warn
from fastaccum.checkpoint import callback_state, same_training, settings, store
from fastaccum.checkpoint.cut import other_pieces
from fastaccum.checkpoint.errors import CheckpointWriteError
from fastaccum.checkpoint.lock import FolderLock
from fastaccum.checkpoint.signals import EndRequest, Preempted
from fastaccum.checkpoint.state import Training
from fastaccum.data.stacks import Dispatch, Position
from fastaccum.fingerprint.values import Json, plain
from fastaccum.fingerprint.variables import name_variables
from fastaccum.kernels.devices import has_gpu, has_op_determinism


class _State(NamedTuple):
    """A copy of all that a checkpoint holds."""

    manifest: Json
    tensors: dict[str, tf.Tensor | np.ndarray]  # by name


class Saver:
    """Saves the state of a fit, and resumes it.

    The state is copied between two train steps and written by a thread, one write at a time. While
    entered, SIGTERM saves and then raises `Preempted`.

    Of several workers the chief alone writes, and all read. After SIGTERM the others go on for as
    long as the chief does, which would wait in vain for a worker that had left. Where workers have
    variables that no other has, each writes its own, and SIGTERM to one ends all after the same
    step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        every: int | None,
        keep: int,
        resume: Collection[str] | str = (),
    ):
        self.keep = checks.whole_number("keep", keep)
        self.every: int | None = None
        if every is not None:
            self.every = checks.whole_number("checkpoint_every", every)
            if directory is None:
                raise ValueError(f"checkpoint_every={every} needs a checkpoint_dir.")
        self.resumes_with = settings.names(resume)
        if directory is None and self.resumes_with:
            raise ValueError(f"resume={settings.show(self.resumes_with)} needs a checkpoint_dir.")
        self.directory: Any = None
        if directory is not None:
            self.directory = _writable(directory)
        self._lock = FolderLock(self.directory or "")
        self.stopped = False  # by a callback, of the fit that is resumed
        self._pieces = ""
        self._told = ""  # the key of the latest checkpoint that this worker told of
        self._note_changes: Callable[[], None] = lambda: None
        self._resumed: Any = None  # the store.Checkpoint, until its epoch has begun
        self.changed_constants = False  # among the settings, of programs that were traced before
        self._changes: list[Json] = []  # of settings, in this fit and in those before
        self._kept: set[str] = set()  # names of the variables whose values stay as they are now
        self._done = 0  # train steps
        self._saved = 0  # train steps that were done at the latest save
        self._cut_short = False  # of the epoch
        self._process = os.getpid()
        self._is_chief = True
        self._workers: Any = None
        # Names of the tensors that this worker alone has, where each has some.
        self._own: Collection[str] = ()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "fastaccum-checkpoint")
        self._write: concurrent.futures.Future | None = None
        self._preemption = EndRequest(
            signal.SIGTERM, "SIGTERM: ending after this step, to save the training state"
        )

    def __enter__(self) -> Saver:
        if self.directory is not None:
            self._preemption.__enter__()
            if threading.current_thread() is not threading.main_thread():
                warn(
                    "fit runs outside the main thread, where SIGTERM is not caught: it may end "
                    "the process with no other checkpoint than the last one written."
                )
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # A forked child has no thread that writes.
        if self.directory is None or os.getpid() != self._process:
            return
        self._note_changes()
        try:
            try:
                self._wait()
            except (CheckpointWriteError, WorkerLostError) as failure:
                if error is None:
                    raise
                warn(str(failure))
            lost_the_chief = not self._is_chief and isinstance(error, tf.errors.OpError)
            if self._preemption.requested and (error is None or lost_the_chief):
                raise Preempted(self._path(self._saved)) from error
        finally:
            try:
                self._writer.shutdown()
            finally:  # Ctrl-C once more
                self._lock.release()
                self._preemption.__exit__()

    def resume(
        self, training: Callable[[], Training], first_epoch: int, epochs: int, verbose: str | int
    ) -> Position:
        """Returns the position at which the last good checkpoint leaves off, or the beginning.

        Nothing was changed where it raises: no checkpoint is good, another fit works in the folder,
        or the last good checkpoint is of another training.
        """
        self._position = Position(first_epoch, first_epoch)
        if self.directory is None:
            return self._position
        fit = training()
        self._training = fit
        settings.require_known(self.resumes_with, fit.description)
        elsewhere = self._collect_variables(fit)
        fit.stacks.track()
        callback_state.require_one_resume(fit.callbacks)

        checkpoint = self._open_latest(elsewhere)
        noted_rates: Json = {}
        if checkpoint is not None:
            same_training.require(checkpoint, fit, self.resumes_with)
            noted_rates = checkpoint.manifest.get("rates", {})
        self._note_changes = fit.note_changes
        rate_variables = fit.settings.get(settings.RATE, ())
        self._rates = settings.HookRates(rate_variables, fit.callbacks, noted_rates)
        if checkpoint is None:
            return self._position

        checkpoint.warn_of_other_versions()
        self._take_position(checkpoint, epochs)
        self._resumed = checkpoint
        self._done = checkpoint.step
        self._saved = checkpoint.step
        changes = self._take_settings()
        callback_state.prepare(fit.callbacks)

        if not self._complete(epochs):
            _warn_of_lost_bits(fit.description["batch plan"]["jit_compile"], fit.unsaved_draws)
        trained_epochs = self._position.epoch
        if trained_epochs > epochs:
            warn(
                f"{checkpoint.path} has {trained_epochs} epochs, more than epochs={epochs}: all "
                "are returned.",
                UserWarning,
            )
        if verbose != 0:
            print(self._describe_resumption(epochs, changes), flush=True)
        return self._position

    def _collect_variables(self, fit: Training) -> set[str]:
        """Collects the variables that this worker saves; returns the names of those it has not."""
        self._workers = fit.workers
        self._variables: dict[str, tf.Variable] = {}
        here_alone = set()
        elsewhere = set()
        for group, named in name_variables(fit.variables).items():
            for name_in_group, variable in named.items():
                name = f"{group}/{name_in_group}"
                holder = fit.holders.get(id(variable))
                if holder is not None and holder != self._workers.worker:
                    elsewhere.add(name)
                    continue
                self._variables[name] = variable
                if holder is not None:
                    here_alone.add(name)
        self._own = here_alone
        return elsewhere

    def _open_latest(self, elsewhere: set[str]) -> store.Checkpoint | None:
        """Takes the folder for this fit, and reads its last good checkpoint, if it has one."""
        workers = self._workers
        if workers is not None:
            self._is_chief = workers.is_chief
            # Waits for the last save of an earlier fit.
            numbers_of_workers = workers.gather([secrets.randbits(32)])
            (number_of_chief,) = numbers_of_workers[0]
            self._fit = f"{number_of_chief:08x}"
        if self._is_chief:
            self._lock.acquire()
            store.remove_leftovers(self.directory)

        checkpoint = store.latest(self.directory)
        self._tensors = {}
        step = -1  # stands for "no checkpoint" among the workers
        if checkpoint is not None:
            self._tensors = checkpoint.tensors(without=elsewhere)
            step = checkpoint.step
        if workers is not None:
            # This also holds the chief back, whose next checkpoint may take the place of the one
            # that others still read.
            workers.require_same(
                "All must see the same checkpoint_dir, on a disk that they share.", checkpoint=step
            )
        return checkpoint

    def _take_position(self, checkpoint: store.Checkpoint, epochs: int) -> None:
        """Takes the place in the epochs and in the data from a checkpoint."""
        fit = self._training
        progress = checkpoint.manifest["progress"]
        data = checkpoint.manifest["data"]
        saved_cut = checkpoint.manifest["cut"]
        self._position = Position(
            progress["first_epoch"], progress["epoch"], progress["step_in_epoch"]
        )
        self.stopped = progress["stopped"]
        self._pieces = other_pieces(saved_cut, fit.cut)
        if not self._pieces:
            fit.stacks.restore(data, self._of("data"))
            return
        if self._complete(epochs):
            return

        recut = any(fit.cut[name] != saved_cut[name] for name in fit.cut if name != "replicas")
        fit.stacks.find(data, self._pieces, recut)
        if fit.split_sensitive_layers:
            warn(
                f"Training goes on in other pieces ({self._pieces}), and "
                f"{', '.join(fit.split_sensitive_layers)} depend on them: the results will differ "
                "from those of the uninterrupted training."
            )

    def _take_settings(self) -> list[settings.Change]:
        """Lists the settings that `resume` names and that differ from the saved ones.

        These are not restored.
        """
        fit = self._training
        checkpoint = self._resumed
        self._changes = [*checkpoint.changes]
        changes = settings.changes(
            checkpoint.manifest["description"], fit.description, self.resumes_with
        )
        for change in changes:
            self._take(change)
        self.changed_constants = any(change.name not in fit.settings for change in changes)
        return changes

    def _describe_resumption(self, epochs: int, changes: Sequence[settings.Change]) -> str:
        """Writes the line that tells where the fit goes on."""
        _, epoch, step = self._position
        done = f"{self._done:,} train steps"
        if self._complete(epochs):
            how = f"{epoch} epochs, of {epochs} asked for"
            if self.stopped:
                how = "a callback had ended it"
            return f"training was complete in {self._resumed.path}: {done}, {how}"

        text = (
            f"resumed from {self._resumed.path}: {done} done, {step:,} of them in epoch "
            f"{epoch + 1} of {epochs}"
        )
        if self._pieces:
            text += f", in other pieces: {self._pieces}"
        for change in changes:
            text += f"; {change}"
        unchanged = self.resumes_with.difference(change.name for change in changes)
        if unchanged:
            text += f"; as saved: {', '.join(sorted(unchanged))}"
        return text

    def _complete(self, epochs: int) -> bool:
        return self.stopped or self._position.epoch >= epochs

    @contextlib.contextmanager
    def beginning_training(self) -> Iterator[None]:
        """Restores the state after the block, which calls `on_train_begin`."""
        if self.directory is None:
            yield
            return
        with self._calling(settings.TRAIN_HOOK, was_called=self._resumed is not None):
            yield
        # This raises what would otherwise come with the first save.
        callback_state.state(self._training.callbacks)
        if self._resumed is not None:
            self._restore()

    @contextlib.contextmanager
    def beginning_epoch(self, epoch: int) -> Iterator[None]:
        """Notes that an epoch begins, and restores the state after the block.

        The block calls `on_epoch_begin`.
        """
        if self._resumed is None:
            self._position = Position(self._position.first, epoch)
        if self.directory is None:
            yield
            return
        is_within = self._resumed is not None and self._position.step > 0
        with self._calling(settings.EPOCH_HOOK, was_called=is_within):
            yield
        # Within an epoch the state is restored once more: `on_epoch_begin`, which may move a
        # learning rate, was called for the epoch before the checkpoint.
        if is_within:
            self._restore()
        self._resumed = None
        self._tensors = {}

    @contextlib.contextmanager
    def _calling(self, hook: str, was_called: bool) -> Iterator[None]:
        """Notes the learning rates around the block, which calls a hook.

        A hook that the checkpoint has noted is repeated. If callbacks then leave another rate than
        the checkpoint has, that rate holds where `resume` names it. Otherwise the restored one
        holds, and a warning tells both.
        """
        rates = self._rates
        rate_is_new = any(self._variable_names(settings.RATE) & self._kept)
        if not was_called or rate_is_new or not rates.can_repeat(hook):
            with rates.noting(hook):
                yield
            return
        rates.prepare_repeat(hook)
        yield
        change = rates.change(hook)
        if change is None:
            return
        if settings.RATE in self.resumes_with:
            rates.take(hook)
            self._take(change)
            return
        warn(
            f"callbacks set learning_rate to {change.now:.6g} in {hook}, where they had set "
            f"{change.saved:.6g} before the checkpoint: training goes on with the rate that was "
            "saved. To go on with theirs, call fit(..., "
            f"resume={settings.show(self.resumes_with | {settings.RATE})}).",
            UserWarning,
        )

    def _take(self, change: settings.Change) -> None:
        """Records a setting that is not restored, but stays as it is now."""
        self._kept |= self._variable_names(change.name)
        self._changes.append(
            {"step": self._done, "epoch": self._position.epoch, **change._asdict()}
        )

    def _variable_names(self, setting: str) -> set[str]:
        held = {id(variable) for variable in self._training.settings.get(setting, ())}
        names = {name for name, variable in self._variables.items() if id(variable) in held}
        if setting == settings.RATE:  # tf_keras holds the value of a schedule, too
            for name in self._variables:
                if name.startswith("optimizer/") and settings.is_rate(name):
                    names.add(name)
        return names

    @property
    def step_in_epoch(self) -> int:
        """The number of train steps that are done of the epoch."""
        return self._position.step

    def _of(self, group: str) -> dict[str, tf.Tensor]:
        """Returns the tensors of a group of the checkpoint, by their names in the group."""
        prefix = f"{group}/"
        tensors = {}
        for name, tensor in self._tensors.items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
        return tensors

    def _restore(self) -> None:
        manifest = self._resumed.manifest
        callback_state.restore(
            self._training.callbacks, manifest["callbacks"], self._of("callbacks")
        )
        history = self._training.model.history
        history.epoch = list(manifest["history"]["epoch"])
        history.history = dict(self._resumed.history)
        for name, variable in self._variables.items():
            if name not in self._kept:
                variable.assign(self._tensors[name])

    def watched(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """Yields the dispatches of an epoch, and saves between them.

        A dispatch is executed before the next is asked for.
        """
        dispatch = next(dispatches, None)
        self._cut_short = True  # unless it is read to its end
        while dispatch is not None:
            self._done += dispatch.steps
            self._position = self._position._replace(step=self._position.step + dispatch.steps)
            yield dispatch
            # The state is copied before the next dispatch is read, which would move the place in
            # the data. It is kept only if there is a next one, since what follows an epoch's last
            # step (validation, callbacks) belongs to the state after it.
            copied = None
            if self._due():
                copied = self._state(stopped=False)
            dispatch = next(dispatches, None)
            if copied is not None and dispatch is not None:
                self._save(copied)
        self._cut_short = False

    def end_epoch(self, last: bool) -> None:
        """Saves after `on_epoch_end`.

        Raises ValueError where the next epoch would begin within the pass of this one.
        """
        if self.directory is not None and self._cut_short and not last:
            raise ValueError(
                f"A callback set model.stop_training within epoch {self._position.epoch + 1} and "
                "took it back at its end: no checkpoint could say where the next epoch begins "
                "in the data. Set it in on_epoch_end, pass steps_per_epoch, or leave "
                "checkpoint_dir out."
            )
        self._position = Position(self._position.first, self._position.epoch + 1)
        if self.directory is None:
            return
        is_due = self.every is None or last or self._due()
        if is_due and self._done > self._saved:
            copied = self._state(stopped=bool(self._training.model.stop_training))
            if copied is not None:
                self._save(copied)

    def _due(self) -> bool:
        if self.every is not None and self._done // self.every > self._saved // self.every:
            return True
        return self._is_ending()

    def _is_ending(self) -> bool:
        """Tells if SIGTERM has come to the chief, or to any worker where workers write together.

        Workers that write together must ask at once.
        """
        if self._own:
            requests = self._workers.gather([self._preemption.requested])
            return any(requested for (requested,) in requests)
        return self._preemption.requested and self._is_chief

    def _state(self, stopped: bool) -> _State | None:
        """Copies the state to host memory; returns None where it is none to go on from."""
        if not self._training.require_savable():
            return None
        tensors: dict[str, tf.Tensor | np.ndarray] = {}
        for name, variable in self._variables.items():
            tensors[name] = np.array(variable.read_value())
        data, data_tensors = self._training.stacks.position()
        for name, tensor in data_tensors.items():
            tensors[f"data/{name}"] = tensor
        callbacks, arrays = callback_state.state(self._training.callbacks)
        for name, array in arrays.items():
            tensors[f"callbacks/{name}"] = array

        history = self._training.model.history
        first, epoch, step = self._position
        progress = {
            "step": self._done,
            "epoch": epoch,
            "step_in_epoch": step,
            "first_epoch": first,
            "stopped": stopped,
        }
        manifest = {
            "progress": progress,
            "data": data,
            "history": {"epoch": plain(history.epoch), "history": plain(history.history)},
            "callbacks": callbacks,
            "description": self._training.description,
            "rates": dict(self._rates.record),
            "changes": [*self._changes],
            "cut": dict(self._training.cut),
        }
        return _State(manifest, tensors)

    def _save(self, copied: _State) -> None:
        self._wait()
        self._saved = copied.manifest["progress"]["step"]
        if self._own:
            self._submit(self._write_with_others, copied)
        elif self._is_chief:
            self._submit(store.write, self.directory, copied.manifest, copied.tensors, self.keep)
        if self._is_ending():
            self._wait()
            path = self._path(self._saved)
            print(f"saved {path}: the same fit goes on from there", file=sys.stderr, flush=True)
            raise Preempted(path)

    def _submit(self, write: Callable[..., object], *arguments: object) -> None:
        try:
            self._write = self._writer.submit(write, *arguments)
        except RuntimeError:  # the main thread has ended: Python starts no call in another
            self._write = concurrent.futures.Future()
            try:
                self._write.set_result(write(*arguments))
            except Exception as error:  # for `_wait`, as from a thread
                self._write.set_exception(error)

    def _write_with_others(self, copied: _State) -> None:
        """Writes what this worker alone has, and waits for the checkpoint.

        The chief writes all else and completes the checkpoint.
        """
        workers = self._workers
        told_before = self._told
        self._told = f"share/{self._fit}/{self._saved}"
        if self._is_chief:
            waits = []  # for the share of each other worker
            for worker in range(1, workers.workers):
                waits.append(functools.partial(workers.hear, self._told, worker))
            store.write(
                self.directory, copied.manifest, copied.tensors, self.keep, self._fit, waits
            )
        else:
            share = {name: copied.tensors[name] for name in self._own}
            store.write_share(self._path(self._saved), self._fit, workers.worker, share)
        workers.tell(self._told)
        if not self._is_chief:
            workers.hear(self._told, 0)  # this worker must not leave before the chief is done
        if told_before:  # all who have told of this checkpoint have heard of the one before
            workers.forget(told_before)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _wait(self) -> None:
        write = self._write
        self._write = None
        try:
            if write is not None:
                write.result()
        except WorkerLostError:  # the folder is good
            raise
        except Exception as error:
            first_line, _, _ = str(error).partition("\n")  # TensorFlow adds lines
            reason = first_line or type(error).__name__
            raise CheckpointWriteError(
                f"The checkpoint of step {self._saved} could not be written to "
                f"{str(self.directory)!r}: {reason}. No earlier one was touched. Make room or "
                "mend the folder, then call fit again."
            ) from error


def _warn_of_lost_bits(jit_compile: bool, draws: Sequence[str]) -> None:
    flag = "--xla_gpu_deterministic_ops=true"
    if jit_compile:
        is_deterministic = flag in os.environ.get("XLA_FLAGS", "")
        remedy = f"XLA_FLAGS={flag}"
    else:
        is_deterministic = has_op_determinism()
        remedy = "tf.config.experimental.enable_op_determinism()"
    if has_gpu() and not is_deterministic:
        warn(
            "This fit is resumed on a GPU without deterministic operations: it goes on from the "
            "state that was saved, but not bit for bit as it would have without the "
            f"interruption. It would with {remedy} in all of a training's processes, which costs "
            "speed."
        )
    if draws:
        warn(
            f"{len(draws)} operations of the model draw from TensorFlow's own random generators "
            f"({draws[0]}, ...), as tf_keras's layers do: no checkpoint has their state, so the "
            "numbers will not be those of the uninterrupted training. Keras 3's layers draw "
            "from seeds that are saved."
        )


def _writable(directory: str | os.PathLike[str]) -> Path:
    is_path = isinstance(directory, (str, os.PathLike)) and isinstance(os.fspath(directory), str)
    if not is_path or directory == "":
        raise TypeError(f"checkpoint_dir={directory!r} must be the path of a folder.")
    try:
        path = store.absolute(directory)  # a callback may change the working directory
        path.mkdir(parents=True, exist_ok=True)
        # This file is as deep as those of a checkpoint, and its name is as long as theirs.
        name = "-" * 60
        with tempfile.TemporaryDirectory(prefix=".step-00000000.writing-", dir=path) as folder:
            Path(folder, name).touch()
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = str(error.strerror)
        raise ValueError(
            f"checkpoint_dir={str(directory)!r} cannot be written to: {reason}."
        ) from error
    return path
