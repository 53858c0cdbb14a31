"""This checkout against a commit: `python -m benchmarks.tools.compare COMMIT`.

For each workload both train from the same weights on the same data in a process of their own; then
they take turns at train steps and at `fit`. Printed are whether losses and weights are equal, and
the ratios, now / before, of the time (medians of interleaved rounds) and of XLA's temp memory.
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
SERVE = f"import runpy; runpy.run_path({__file__!r}, run_name='__serve__')"


def main(argv=None):
    # Not at the top: a process that serves another checkout runs this file too.
    from benchmarks.support import models
    from benchmarks.support.scores import ratio

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.compare", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("commit", help="what to compare with, as git names it")
    parser.add_argument("--workload", nargs="+", choices=[w.name for w in models.ALL], help="(all)")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    print(
        f"{'now / before':12}  {'train step':>10}  {'fit':>6}  {'temp memory':>11}  losses and "
        "weights"
    )
    with _worktree(options.commit) as before, tempfile.TemporaryDirectory() as scratch:
        for workload in options.workload or [w.name for w in models.ALL]:
            with (
                _Side(ROOT, workload, Path(scratch, "now")) as now,
                _Side(before, workload, Path(scratch, "b")) as old,
            ):
                times = {(side, what): [] for side in (now, old) for what in ("step", "fit")}
                for i in range(options.rounds):
                    for what in ("step", "fit"):
                        for side in (now, old) if i % 2 else (old, now):
                            times[side, what].append(side.seconds(what))
                step, fit = (ratio(times[now, what], times[old, what]) for what in ("step", "fit"))
                memory = now.temp_bytes / old.temp_bytes
                print(
                    f"{workload:12}  {step:10.3f}  {fit:6.3f}  {memory:11.3f}  "
                    f"{_difference(now, old)}",
                    flush=True,
                )


@contextlib.contextmanager
def _worktree(commit):
    """A checkout of the commit, for as long as the scope lasts."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


class _Side:
    """A process that trains a workload with the code of one checkout."""

    def __init__(self, checkout, workload, outcome):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, workload, outcome],
            cwd=checkout,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.source, self.losses, self.temp_bytes = self._answer()
        if Path(self.source).parent.parent != checkout.resolve():
            raise RuntimeError(f"the process for {checkout} imported {self.source}.")
        self.weights = list(np.load(f"{outcome}.npz").values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()  # closes its input, at which it ends

    def seconds(self, what):
        """The time of a block of train steps, or of one epoch of `fit`."""
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}.")
        return json.loads(line)


def _difference(now, old):
    pairs = list(zip(now.weights, old.weights, strict=True))
    if now.losses == old.losses and all(np.array_equal(a, b) for a, b in pairs):
        return "equal bit for bit"
    loss = max(abs(a - b) / abs(b) for a, b in zip(now.losses, old.losses, strict=True))
    weight = max(np.max(abs(a - b)) / np.max(abs(b)) for a, b in pairs if b.any())
    return f"differ: losses by {loss:.1e}, weights by {weight:.1e} of the largest of each variable"


def serve(name, outcome):
    """Trains, says what came out, then times what it is asked for, a line each. Imports this
    process's checkout.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow prints is not an answer
    import fastaccum

    try:
        from benchmarks.support import contestants, models
    except ImportError:  # a commit that has no benchmarks/support yet
        from benchmarks import contestants, models

    workload = next(w for w in models.ALL if w.name == name)
    trainer = contestants.trainer(workload)
    step, fit = contestants.as_train_step(trainer), contestants.as_fit(trainer, workload)
    losses = [float(step.update(step.feed(stack))) for stack in workload.stacks(UPDATES)]
    np.savez(outcome, *trainer.model.get_weights())
    temp_bytes = (
        contestants.trainer(workload, jit_compile=True)
        .memory_analysis(workload.stacks(1)[0])
        .temp_bytes
    )
    block, arrays = (
        step.block(workload, workload.step_updates),
        workload.arrays(workload.step_updates),
    )
    blocks = {"step": block, "fit": lambda: fit.epoch(*arrays)}
    blocks["fit"]()  # compiles
    print(
        json.dumps([os.path.realpath(fastaccum.__file__), losses, temp_bytes]),
        file=answers,
        flush=True,
    )
    for what in sys.stdin:
        started = time.perf_counter()
        blocks[what.strip()]()
        print(time.perf_counter() - started, file=answers, flush=True)


if __name__ == "__serve__":
    serve(*sys.argv[1:])
elif __name__ == "__main__":
    main()
