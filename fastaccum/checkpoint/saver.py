"""Saves a fit on its way, and resumes it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.processes import WorkerLostError
from fastaccum.basics.warnings import warn
from fastaccum.checkpoint import (
    callback_state,
    resume_point,
    same_training,
    settings,
    store,
    stored_slots,
)
from fastaccum.checkpoint.errors import CheckpointWriteError
from fastaccum.checkpoint.lock import FolderLock
from fastaccum.checkpoint.resume_point import ResumePoint
from fastaccum.checkpoint.signals import EndRequest, Preempted
from fastaccum.checkpoint.state import Training
from fastaccum.checkpoint.writer import Copy, Writer
from fastaccum.data.stacks import Dispatch, Position
from fastaccum.fingerprint.values import Json, plain
from fastaccum.fingerprint.variables import name_variables


class Saver:
    """Saves the state of a fit, and resumes it.

    The state is copied between two train steps and written by a thread, one write at a time. While
    entered, SIGTERM saves and then raises `Preempted`.

    Of several workers the chief alone writes, and all read. After SIGTERM the others go on for as
    long as the chief does, which would wait in vain for a worker that had left. Where workers have
    variables that no other has, each writes its own, and SIGTERM to one ends all after the same
    step.

    Without a directory nothing is saved, and a fit begins at its beginning.
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
        self._process = os.getpid()
        self._preemption = EndRequest(
            signal.SIGTERM, "SIGTERM: ending after this step, to save the training state"
        )

        # What `find` learns of the fit.
        self._training: Any = None  # a Training
        self._writer: Writer | None = None
        self._variables: dict[str, tf.Variable] = {}  # that this worker saves, by name
        self._held_here: set[str] = set()  # the names of those that no other worker has
        # The name of the scales of int8 codes, of any worker, by that of the codes.
        self._names_of_scales: dict[str, str] = {}
        self._rates: Any = None  # a HookRates
        # The checkpoint that the fit goes on from and its tensors, until its epoch has begun.
        self._resumed: ResumePoint | None = None
        self._tensors: dict[str, tf.Tensor] = {}

        # Where the fit stands.
        self._position = Position(0, 0)
        self._done = 0  # train steps
        self._saved = 0  # train steps that were done at the latest save
        self._cut_short = False  # of the epoch
        self._changes: list[Json] = []  # of settings, in this fit and in those before
        self._kept: set[str] = set()  # names of the variables whose values stay as they are now

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
        try:
            if self._writer is not None:
                self._end(self._writer, error)
        finally:
            try:
                if self._writer is not None:
                    self._writer.close()
            finally:  # Ctrl-C once more
                self._lock.release()
                self._preemption.__exit__()

    def _end(self, writer: Writer, error: BaseException | None) -> None:
        """Waits for the last write of a fit that ends, perhaps with an error."""
        self._training.note_changes()
        try:
            writer.wait()
        except (CheckpointWriteError, WorkerLostError) as failure:
            if error is None:
                raise
            warn(str(failure))
        lost_the_chief = not self._is_chief and isinstance(error, tf.errors.OpError)
        if self._preemption.requested and (error is None or lost_the_chief):
            raise Preempted(store.folder(self.directory, self._saved)) from error

    def find(
        self, training: Callable[[], Training], first_epoch: int, epochs: int, verbose: str | int
    ) -> ResumePoint:
        """Finds the last good checkpoint and its place in the data; without one, the beginning.

        Nothing was changed where it raises: no checkpoint is good, another fit works in the folder,
        or the last good checkpoint is of another training. `beginning_training` and
        `beginning_epoch` apply the checkpoint.
        """
        start = ResumePoint(Position(first_epoch, first_epoch))
        self._position = start.position
        if self.directory is None:
            return start
        fit = training()
        self._training = fit
        settings.require_known(self.resumes_with, fit.description)
        elsewhere = self._collect_variables(fit)
        fit.stacks.track()
        callback_state.require_one_resume(fit.callbacks)

        name_of_fit = self._take_folder(fit)
        checkpoint = store.latest(self.directory)
        step = -1  # stands for "no checkpoint" among the workers
        if checkpoint is not None:
            self._tensors = checkpoint.tensors(without=elsewhere)
            step = checkpoint.step
        if fit.workers is not None:
            # This also holds the chief back, whose next checkpoint may take the place of the one
            # that others still read.
            fit.workers.require_same(
                "All must see the same checkpoint_dir, on a disk that they share.", checkpoint=step
            )
        noted_rates: Json = {}
        if checkpoint is not None:
            same_training.require(checkpoint, fit, self.resumes_with)
            # Checkpoints from before slots could be int8 name no scales.
            scales_then = checkpoint.manifest.get("scales", {})
            stored_slots.convert_in_place(
                self._tensors, self._variables, scales_then, self._names_of_scales
            )
            noted_rates = checkpoint.manifest["rates"]
        self._writer = Writer(self.directory, self.keep, fit.workers, name_of_fit, self._held_here)
        rate_variables = fit.settings.get(settings.RATE, ())
        self._rates = settings.HookRates(rate_variables, fit.callbacks, noted_rates)
        if checkpoint is None:
            return start

        checkpoint.warn_of_other_versions()
        start = resume_point.place(checkpoint, self._tensors, fit, epochs, self.resumes_with)
        self._resumed = start
        self._position = start.position
        self._done = checkpoint.step
        self._saved = checkpoint.step
        self._changes = [*checkpoint.changes]
        for change in start.changes:
            self._take(change)
        callback_state.prepare(fit.callbacks)
        if not start.is_complete(epochs):
            resume_point.warn_of_lost_bits(
                fit.description["batch plan"]["jit_compile"], fit.unsaved_draws
            )
        if start.position.epoch > epochs:
            warn(
                f"{checkpoint.path} has {start.position.epoch} epochs, more than epochs={epochs}: "
                "all are returned.",
                UserWarning,
            )
        if verbose != 0:
            print(start.describe(epochs, self.resumes_with), flush=True)
        return start

    def _collect_variables(self, fit: Training) -> set[str]:
        """Collects the variables that this worker saves; returns the names of those it has not."""
        elsewhere = set()
        name_of = {}
        for group, named in name_variables(fit.variables).items():
            for name_in_group, variable in named.items():
                name = f"{group}/{name_in_group}"
                name_of[id(variable)] = name
                holder = fit.holders.get(id(variable))
                if holder is not None and fit.workers is not None:
                    if holder != fit.workers.worker:
                        elsewhere.add(name)
                        continue
                    self._held_here.add(name)
                self._variables[name] = variable
        # The chief writes the names of all workers' scales.
        for codes, scales in fit.scales.items():
            self._names_of_scales[name_of[codes]] = name_of[id(scales)]
        return elsewhere

    def _take_folder(self, fit: Training) -> str:
        """Takes the folder for this fit, and returns a name of the fit that its workers share."""
        name = ""
        if fit.workers is not None:
            # Waits for the last save of an earlier fit.
            numbers_of_workers = fit.workers.gather([secrets.randbits(32)])
            (number_of_chief,) = numbers_of_workers[0]
            name = f"{number_of_chief:08x}"
        if self._is_chief:
            self._lock.acquire()
            store.remove_leftovers(self.directory)
        return name

    @property
    def _is_chief(self) -> bool:
        workers = self._training.workers
        return workers is None or workers.is_chief

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
            self._apply(self._resumed)

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
        resumed = self._resumed
        is_within = resumed is not None and resumed.is_within_epoch
        with self._calling(settings.EPOCH_HOOK, was_called=is_within):
            yield
        # `on_epoch_begin` was called for this epoch before the checkpoint. What it moves now, such
        # as a learning rate, is as the checkpoint has it.
        if resumed is not None and is_within:
            self._apply(resumed)
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
        rate_is_new = not self._kept.isdisjoint(self._variable_names(settings.RATE))
        if not was_called or rate_is_new or not rates.can_repeat(hook):
            with rates.noting(hook):
                yield
            return
        rates.prepare_repeat(hook)
        yield
        change = rates.find_change(hook)
        if change is None:
            return
        if settings.RATE in self.resumes_with:
            rates.record_repeat(hook)
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

    def _apply(self, start: ResumePoint) -> None:
        """Restores the callbacks, the History and the variables from a checkpoint.

        The hooks that a resumed fit calls first find the state as it was saved, and leave it so.
        """
        assert start.checkpoint is not None
        manifest = start.checkpoint.manifest
        callback_state.restore(
            self._training.callbacks,
            manifest["callbacks"],
            resume_point.group(self._tensors, "callbacks"),
        )
        history = self._training.model.history
        history.epoch = list(manifest["history"]["epoch"])
        history.history = dict(start.checkpoint.history)
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
                copied = self._copy(stopped=False)
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
            copied = self._copy(stopped=bool(self._training.model.stop_training))
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
        if self._held_here:
            requests = self._training.workers.gather([self._preemption.requested])
            return any(requested for (requested,) in requests)
        return self._preemption.requested and self._is_chief

    def _copy(self, stopped: bool) -> Copy | None:
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
            "scales": dict(self._names_of_scales),
        }
        return Copy(manifest, tensors)

    def _save(self, copied: Copy) -> None:
        assert self._writer is not None
        self._writer.write(copied)
        self._saved = copied.step
        if self._is_ending():
            self._writer.wait()
            path = store.folder(self.directory, self._saved)
            print(f"saved {path}: the same fit goes on from there", file=sys.stderr, flush=True)
            raise Preempted(path)


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
