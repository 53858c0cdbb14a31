"""Compares this checkout with a commit: `python -m benchmarks.tools.compare COMMIT`.

For each workload both train from the same weights on the same data, each in a process of its own;
then they take turns at train steps and at `fit`. The table says if losses and weights are equal,
and has the ratios, now / before, of the time (medians of interleaved rounds) and of XLA's temp
memory.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
UPDATES = 3  # trained for the comparison of losses and weights
# The program of both sides' processes: it runs this file, but imports fastaccum and the benchmarks
# of the checkout that its path names.
SERVE = f"import runpy; runpy.run_path({__file__!r}, run_name='__serve__')"


def main(argv=None):
    """Runs the command line."""
    # Not at the top: a process that serves another checkout runs this file too.
    from benchmarks.support import models

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.compare", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("commit", help="what to compare with, as git names it")
    parser.add_argument("--workload", nargs="+", choices=[w.name for w in models.ALL], help="(all)")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    header = f"{'now / before':12}  {'train step':>10}  {'fit':>6}  {'temp memory':>11}"
    print(f"{header}  losses and weights")
    with _worktree(options.commit) as checkout, tempfile.TemporaryDirectory() as scratch:
        for workload in options.workload or [workload.name for workload in models.ALL]:
            with (
                _Side(ROOT, workload, Path(scratch, "now")) as now,
                _Side(checkout, workload, Path(scratch, "before")) as before,
            ):
                step, fit = _ratios(now, before, options.rounds)
                memory = now.temp_bytes / before.temp_bytes
                row = f"{workload:12}  {step:10.3f}  {fit:6.3f}  {memory:11.3f}"
                print(f"{row}  {_difference(now, before)}", flush=True)


def _ratios(now, before, rounds):
    """Times both sides in turn and returns the ratios of the train step and of `fit`."""
    from benchmarks.support.scores import ratio

    times_now = {"step": [], "fit": []}
    times_before = {"step": [], "fit": []}
    for i in range(rounds):
        for block in ("step", "fit"):
            if i % 2:
                times_now[block].append(now.seconds(block))
                times_before[block].append(before.seconds(block))
            else:
                times_before[block].append(before.seconds(block))
                times_now[block].append(now.seconds(block))
    step = ratio(times_now["step"], times_before["step"])
    fit = ratio(times_now["fit"], times_before["fit"])
    return step, fit


@contextlib.contextmanager
def _worktree(commit):
    """Checks the commit out in a folder that goes with the scope."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


class _Side:
    """Process that trains a workload with the code of one checkout.

    It saves the trained weights as `weights_file`, a path without the suffix.
    """

    def __init__(self, checkout, workload, weights_file):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, workload, weights_file],
            cwd=checkout,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.source, self.losses, self.temp_bytes = self._answer()
        if Path(self.source).parent.parent != checkout.resolve():
            raise RuntimeError(f"the process for {checkout} imported {self.source}.")
        self.weights = list(np.load(f"{weights_file}.npz").values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()  # closes its input, at which it ends

    def seconds(self, block):
        """Times a block of train steps ("step"), or one epoch of `fit` ("fit")."""
        print(block, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}.")
        return json.loads(line)


def _difference(now, before):
    """Says if losses and weights are equal, or by how much they differ at most."""
    if now.losses == before.losses and all(map(np.array_equal, now.weights, before.weights)):
        return "equal bit for bit"
    loss_differences = [
        abs(new - old) / abs(old) for new, old in zip(now.losses, before.losses, strict=True)
    ]
    weight_differences = [
        np.max(abs(new - old)) / np.max(abs(old))
        for new, old in zip(now.weights, before.weights, strict=True)
        if old.any()  # a variable of zeros has no relative difference
    ]
    return (
        f"differ: losses by {max(loss_differences):.1e}, weights by "
        f"{max(weight_differences):.1e} of the largest of each variable"
    )


def serve(name, weights_file):
    """Trains with the checkout on this process's path, prints its results, then times blocks.

    Every line of the standard input names a block, "step" or "fit"; the answer is its seconds.

    Args:
        name: the workload's.
        weights_file: the file for the trained weights, without its suffix.
    """
    # Answers go to the standard output as it is now. What TensorFlow prints there from here on goes
    # to the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import fastaccum

    try:
        from benchmarks.support import contestants, models
    except ImportError:  # a commit that has no benchmarks/support yet
        from benchmarks import contestants, models

    workload = models.named(name)
    trainer = contestants.trainer(workload)
    step = contestants.as_train_step(trainer)
    fit = contestants.as_fit(trainer, workload)
    losses = [float(step.update(step.feed(stack))) for stack in workload.stacks(UPDATES)]
    np.savez(weights_file, *trainer.model.get_weights())
    # The trainer may run without XLA, whose plan has the temp memory.
    compiled = contestants.trainer(workload, jit_compile=True)
    temp_bytes = compiled.memory_analysis(workload.stacks(1)[0]).temp_bytes
    arrays = workload.arrays(workload.step_updates)
    blocks = {
        "step": step.block(workload, workload.step_updates),
        "fit": lambda: fit.epoch(*arrays),
    }
    blocks["fit"]()  # compiles
    source = os.path.realpath(fastaccum.__file__)
    print(json.dumps([source, losses, temp_bytes]), file=answers, flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        blocks[line.strip()]()
        print(time.perf_counter() - started, file=answers, flush=True)


if __name__ == "__serve__":
    serve(*sys.argv[1:])
elif __name__ == "__main__":
    main()
