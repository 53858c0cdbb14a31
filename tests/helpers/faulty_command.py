"""`python faulty_command.py FAULT train ...`: the tiny command, to which something happens on its
way.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
import time

import tiny_command

from fastaccum import cli


def none(recorder):
    """Nothing happens."""


def sigterm_while_evaluating(recorder):
    """The first time."""
    begun = []

    def ended(self, logs=None):
        if not begun:
            os.kill(os.getpid(), signal.SIGTERM)
        begun.append(True)

    recorder.on_test_begin = ended


def sigint_while_compiling(recorder):
    """A moment after the first step was asked for, which compiles before it runs."""
    begun = []

    def interrupted(self, batch, logs=None):
        if not begun:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun.append(batch)

    recorder.on_train_batch_begin = interrupted


def sigkill_while_saving_the_model(recorder):
    """Kills the process once the model is written, and before it has its name."""

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("model.keras"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def disk_full_at_step_80(recorder):
    """The one of the run folder, once the checkpoint of step 75 is there."""
    end = recorder.on_train_batch_end

    def filled(self, batch, logs=None):
        end(self, batch, logs)
        if self.steps == 80:
            # which is still being written
            while not (self.folder / "checkpoints" / "step-00000075").exists():
                time.sleep(0.05)
            with (
                open(self.folder.parent / "filler", "wb", buffering=0) as file,
                contextlib.suppress(OSError),
            ):
                while True:
                    file.write(bytes(4096))

    recorder.on_train_batch_end = filled


def files_limited_at_the_end(recorder):
    """To fewer bytes than the model has."""
    write = recorder.write

    def limited(self):
        write(self)
        if self.steps == self.run.options.steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    recorder.write = limited


if __name__ == "__main__":
    tiny_command.make_small()
    from fastaccum.app.train import Recorder

    globals()[sys.argv[1]](Recorder)
    sys.exit(cli.main(sys.argv[2:]))
