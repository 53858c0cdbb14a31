"""Cost of longer windows at the same number of tokens an update: only attention may cost more."""

import pytest

from benchmarks.support import axes, models, processes
from benchmarks.support.scores import milliseconds, ratio


@pytest.mark.parametrize("workload", [models.GPT], ids=lambda w: w.name)
def test_sequence_length(workload, benchmark, report, series):
    lengths = (256,) if benchmark.disabled else (256, 512, 1024, 2048, 4096)
    points = {length: (models.gpt_of_length, length) for length in lengths}
    with processes.contestants_of(points) as contestants:
        footprints = {length: contestant.footprint() for length, contestant in contestants.items()}
        times, rate = processes.take_turns(benchmark, contestants, workload.rounds)

    if not benchmark.disabled:
        shortest, *_, longest = lengths
        note = (
            f"{milliseconds(times[longest], 1)}, {shortest} tokens "
            f"{milliseconds(times[shortest], 1)}"
        )
        value = ratio(times[longest], times[shortest])
        report(
            f"time per token: windows of {longest:,} tokens / {shortest:,}", workload, value, note
        )
    axes.record(
        series, "sequence length", workload.name, footprints, times, rate, 2 * 4096, "token"
    )
