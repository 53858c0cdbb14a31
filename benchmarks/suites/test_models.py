"""What each model takes: the first step, memory, the time of an example, and how near that is to
the matmul rate.

And a vocabulary of 32,768: the loss that never holds the logits against Keras's, which needs them.
"""

import statistics

import pytest

from benchmarks.support import agreement, axes, models, processes
from benchmarks.support.scores import milliseconds, ratio

LOSSES = {"without logits": models.named, "with logits": models.with_logits}


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
    report(
        "fraction of the matmul rate",
        workload,
        axes.fraction_of_matmul_rate(footprint, times, rate),
        note,
    )


@pytest.mark.parametrize("workload", [models.GPT_32K], ids=lambda w: w.name)
def test_large_vocabulary(workload, benchmark, report):
    points = {loss: (make, workload.name) for loss, make in LOSSES.items()}
    with processes.contestants_of(points) as contestants:
        footprints = {loss: contestant.footprint() for loss, contestant in contestants.items()}
        agreement.assert_agree(*(contestants[loss].outcome() for loss in LOSSES), "Keras's loss")
        times, rate = processes.take_turns(
            benchmark, contestants, workload.rounds, workload.step_updates
        )

    ours, keras = LOSSES
    report_footprint(report, workload, footprints[ours])
    for name, size in {
        "XLA temp memory": "temp_bytes",
        "process peak memory": "process_bytes",
    }.items():
        sizes = [getattr(footprints[loss], size) for loss in LOSSES]
        note = "{:.4g} MB, Keras's loss {:.4g} MB".format(*(1e-6 * each for each in sizes))
        report(f"LinearCrossEntropy: {name} / Keras's loss", workload, sizes[0] / sizes[1], note)
    if not benchmark.disabled:
        report_time(report, workload, footprints[ours], times[ours], rate)
        note = f"{milliseconds(times[ours], 1)}, Keras's loss {milliseconds(times[keras], 1)}"
        report(
            "LinearCrossEntropy: step / Keras's loss",
            workload,
            ratio(times[ours], times[keras]),
            note,
        )
