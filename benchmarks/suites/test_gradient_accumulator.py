"""One epoch of `fit`: ours, and tf_keras with the `gradient-accumulator` package.

The package asks for numpy <= 1.23.2, which current TensorFlow does not take, but runs with a newer
one: hence `--no-deps`.
"""

import importlib
import importlib.util

import pytest

from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio

NAME = "gradient-accumulator"
INSTALL = {
    "tensorflow_addons": 'pip install -c constraints.txt -e ".[addons]"',
    "tf_keras": 'pip install -c constraints.txt -e ".[addons]"',
    "gradient_accumulator": "pip install --no-deps gradient-accumulator==0.5.2",
}


# The GPT is a Keras 3 model, and tf_keras's BatchNorm keeps another variance.
@pytest.mark.parametrize("workload", [models.MLP_128, models.MLP_2048], ids=lambda w: w.name)
def test_gradient_accumulator(workload, benchmark, report):
    for package, install in INSTALL.items():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{NAME}: {package} is not installed; {install} adds it")
    ours = contestants.make_fit(workload)
    theirs = importlib.import_module("benchmarks.peers.gradient_accumulator_fit").make(workload)
    our_outcome = agreement.outcome_of_fit(ours, workload)
    agreement.assert_agree(our_outcome, agreement.outcome_of_fit(theirs, workload), NAME)

    updates = 1 if benchmark.disabled else workload.fit_updates
    x, y = workload.arrays(updates)
    times = race(
        benchmark, lambda: ours.epoch(x, y), {NAME: lambda: theirs.epoch(x, y)}, workload.rounds
    )
    if times:
        note = (
            f"ours {milliseconds(times['ours'], updates)}, theirs "
            f"{milliseconds(times[NAME], updates)}"
        )
        report(f"fit: {NAME} / ours", workload, ratio(times[NAME], times["ours"]), note)
