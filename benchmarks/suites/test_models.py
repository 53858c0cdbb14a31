"""First step, memory, and time of an example of each model, and its part of the matmul rate.

For a vocabulary of 32,768, the loss that never holds the logits runs against Keras's, which does.
"""

import statistics

import pytest

from benchmarks.support import agreement, axes, models, processes
from benchmarks.support.scores import milliseconds, ratio

OURS = "without logits"
KERAS = "with logits"


@pytest.mark.parametrize("workload", models.ALL, ids=lambda w: w.name)
def test_model(workload, benchmark, report):
    if benchmark.disabled and workload.name != models.MLP_128.name:
        pytest.skip("timed runs only: it compiles in a process of its own")
    with processes.contestants_of({"ours": (models.named, workload.name)}) as contestants:
        footprint = contestants["ours"].footprint()
        times, rate = processes.take_turns(
            benchmark, contestants, workload.rounds, workload.step_updates
        )
    report_footprint(report, workload, footprint)
    if not benchmark.disabled:
        report_time(report, workload, footprint, times["ours"], rate)


def report_footprint(report, workload, footprint):
    report("first step of a process, seconds", workload, footprint.first_step)
    report(
        "process peak memory, MB",
        workload,
        footprint.process_bytes / 1e6,
        "TensorFlow and the data included",
    )
    report("XLA temp memory, MB", workload, footprint.temp_bytes / 1e6)


def report_time(report, workload, footprint, times, rate):
    seconds = statistics.median(times)
    report(
        "time per example, ms",
        workload,
        1e3 * seconds / workload.update_size,
        milliseconds(times, 1),
    )
    note = f"{footprint.flops / seconds / 1e9:.3g} of {rate / 1e9:.3g} GFLOP/s"
    fraction = axes.fraction_of_matmul_rate(footprint, times, rate)
    report("fraction of the matmul rate", workload, fraction, note)


@pytest.mark.parametrize("workload", [models.GPT_32K], ids=lambda w: w.name)
def test_large_vocabulary(workload, benchmark, report):
    points = {OURS: (models.named, workload.name), KERAS: (models.with_logits, workload.name)}
    with processes.contestants_of(points) as contestants:
        footprints = {loss: contestant.footprint() for loss, contestant in contestants.items()}
        our_outcome = contestants[OURS].outcome()
        agreement.assert_agree(our_outcome, contestants[KERAS].outcome(), "Keras's loss")
        times, rate = processes.take_turns(
            benchmark, contestants, workload.rounds, workload.step_updates
        )

    ours = footprints[OURS]
    keras = footprints[KERAS]
    report_footprint(report, workload, ours)
    report_memory(report, workload, "XLA temp memory", ours.temp_bytes, keras.temp_bytes)
    report_memory(report, workload, "process peak memory", ours.process_bytes, keras.process_bytes)
    if not benchmark.disabled:
        report_time(report, workload, ours, times[OURS], rate)
        note = f"{milliseconds(times[OURS], 1)}, Keras's loss {milliseconds(times[KERAS], 1)}"
        report(
            "LinearCrossEntropy: step / Keras's loss",
            workload,
            ratio(times[OURS], times[KERAS]),
            note,
        )


def report_memory(report, workload, name, ours, keras):
    note = f"{1e-6 * ours:.4g} MB, Keras's loss {1e-6 * keras:.4g} MB"
    report(f"LinearCrossEntropy: {name} / Keras's loss", workload, ours / keras, note)
