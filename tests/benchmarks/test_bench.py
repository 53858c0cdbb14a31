"""The command that runs the benchmarks: what it runs, tells, writes and draws."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.support import scores
from benchmarks.support.scores import Score
from benchmarks.tools import charts, readme, report, runner
from fastaccum import cli

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.long

# What the suites' own conftest records, for suites that need no TensorFlow.
MACHINE = """
def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.update(gpus=[], cores=2, versions={"tensorflow": "2.21.0"})
"""


@pytest.fixture(autouse=True)
def no_worker(monkeypatch):
    """A pytest that a test runs must not take itself for an xdist worker, where pytest-benchmark
    measures nothing.
    """
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)


def folder_of(path, **files):
    for name, text in files.items():
        (path / f"{name}.py").write_text(textwrap.dedent(text))
    return path


def run_of(*extra, date="2026-11-21", **more):
    """A run in the form of pytest-benchmark's JSON, a benchmark for each `extra_info`."""
    return {
        "datetime": f"{date}T09:32:47+00:00",
        "machine_info": {
            "gpus": [],
            "cores": 2,
            "cpu": {"brand_raw": "AMD EPYC"},
            "python_version": "3.11.7",
            "versions": {"tensorflow": "2.21.0", "jax": "0.10.2"},
        },
        "commit_info": {"id": "25b2b02d1540697d", "dirty": False},
        "benchmarks": [
            {"name": f"test_{i}", "extra_info": info, "stats": {}} for i, info in enumerate(extra)
        ],
        **more,
    }


def scores_of(values):
    """The `extra_info` of a benchmark with these scores, `{(measure, workload): value}`."""
    return {
        "scores": [
            {"measure": m, "workload": w, "value": v, "note": ""} for (m, w), v in values.items()
        ]
    }


def result_of(name, run=None, skipped=()):
    return runner.Result(
        name, seconds=1.0, passed=1, skipped=dict(skipped), failed={}, output="", run=run
    )


@pytest.mark.slow
def test_one_suite_of_the_real_ones(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compile", "--quick", "--out", tmp_path / "out"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: " in done.stdout and "weight_gradients\n" in done.stdout
    assert "compile: 2 passed, " in done.stdout
    assert f"report: {tmp_path / 'out' / 'README.md'}" in done.stdout

    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert list(run["suites"]) == ["compile"] and run["suites"]["compile"]["passed"] == 2
    assert "train_step" in run["left_out"] and "compile" not in run["left_out"]
    assert {benchmark["suite"] for benchmark in run["benchmarks"]} == {"compile"}
    assert [(score.measure, score.value) for score in scores.of_run(run)] == [
        ("programs compiled in a ragged epoch, plain", 2),
        ("programs compiled in a ragged epoch, batch statistics", 2),
    ]
    assert {"tensorflow", "keras", "fastaccum"} <= set(run["machine_info"]["versions"])
    assert "node" not in run["machine_info"]

    text = (tmp_path / "out" / "README.md").read_text()
    assert f"{run['machine_info']['cores']} cores of" in text
    assert f"tensorflow {run['machine_info']['versions']['tensorflow']}" in text
    assert "| programs compiled in a ragged epoch, plain " in text
    assert "Left out: " in text and "weight_gradients." in text


@pytest.mark.slow
def test_quick_trims_the_workloads_and_series_become_a_chart(tmp_path, capsys):
    folder = folder_of(
        tmp_path,
        conftest="from benchmarks.conftest import *\nfrom benchmarks.suites.conftest import *",
        test_growth="""
            import pytest
            from benchmarks.support import models

            @pytest.mark.parametrize("workload", models.ALL, ids=lambda w: w.name)
            def test_growth(workload, benchmark, report, series):
                benchmark.pedantic(lambda: None, rounds=workload.rounds)
                report("train step: eager loop / ours", workload, 4.25)
                series("memory against micro-batches", workload.name, [2, 8], [1.5, 1.5], "micro-batches", "MB")

            def test_more(benchmark, series):
                with pytest.raises(ValueError, match=r"'MLP 128' has 2 x and 1 y"):
                    series("memory against micro-batches", "MLP 128", [1, 2], [3.0], "micro-batches", "MB")
                benchmark.pedantic(lambda: None, rounds=1)
                series("memory against micro-batches", "MLP 128", [1], [1.25], "micro-batches", "MB")
            """,
    )
    assert command.main(["growth", "--quick", "--out", str(tmp_path / "out")], folder) == 0
    assert "skipped: test_growth[MLP 2048], test_growth[ConvNet]" in capsys.readouterr().out

    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [benchmark["name"] for benchmark in run["benchmarks"]] == [
        "test_growth[MLP 128]",
        "test_more",
    ]
    assert run["benchmarks"][0]["stats"]["rounds"] == 3
    assert charts.time_by_peer(run, "train step") == {"MLP 128": {"eager loop": 4.25}}
    assert charts.line_charts(run) == {
        "memory against micro-batches": {
            "x_label": "micro-batches",
            "y_label": "MB",
            "lines": {"MLP 128": [(1, 1.25), (2, 1.5), (8, 1.5)]},
        }
    }
    text = (tmp_path / "out" / "README.md").read_text()
    for picture in ("train-step-time-by-peer.png", "against-micro-batches.png"):
        assert f"]({picture})" in text
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_fails_and_what_is_skipped_is_named(tmp_path, capsys):
    folder = folder_of(
        tmp_path,
        conftest=MACHINE,
        test_absent="""
            import pytest
            pytest.importorskip("no_such_peer", reason="no_such_peer is not installed")
            """,
        test_broken="import no_such_module",
        test_crash="""
            import os, signal
            def test_crash():
                os.kill(os.getpid(), signal.SIGKILL)
            """,
        test_wrong="""
            import pytest
            def test_timed(benchmark):
                benchmark.pedantic(lambda: None, rounds=1)
                benchmark.extra_info["scores"] = [{"measure": "a / b", "workload": "MLP 128", "value": 1.5, "note": ""}]
            def test_disagrees():
                print("seen while it ran")
                assert 1 == 2, "losses of the peer"
            def test_peer():
                pytest.skip("the peer is not installed")
            """,
    )
    assert command.main(["--out", str(tmp_path / "out")], folder) == 1
    told = capsys.readouterr().out
    assert "absent: 1 skipped" in told and "skipped: absent: no_such_peer is not installed" in told
    assert "failed: broken: ModuleNotFoundError: No module named 'no_such_module'" in told
    assert "failed: crash: pytest ended with exit code -9" in told
    assert "wrong: 1 passed, 1 skipped, 1 failed" in told
    assert (
        "failed: test_disagrees: AssertionError: losses of the peer" in told
        and "seen while it ran" in told
    )
    assert "skipped: test_peer: the peer is not installed" in told
    assert told.rstrip().endswith("failed: broken, crash, wrong")

    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [name for name, ended in run["suites"].items() if ended["failed"]] == [
        "broken",
        "crash",
        "wrong",
    ]
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| a / b " in text
    assert (
        "- failed in crash: " in text
        and "- skipped in absent: absent: no_such_peer is not installed" in text
    )


def test_the_readme_keeps_its_figures_when_a_suite_failed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)  # where there is nothing to rewrite
    ended = {
        name: {"seconds": 1.0, "passed": 0, "skipped": {}, "failed": {}} for name in runner.known()
    }
    ended["fit"]["failed"] = {"test_fit": "losses differ"}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_of({}, suites=ended, left_out=[])))
    assert command.main(["--from", str(path), "--readme", "--out", str(tmp_path / "out")]) == 1
    assert "failed: fit; the measured tables stay as they were" in capsys.readouterr().out


@pytest.mark.parametrize("whole", [{}, {"suites": {"fit": {}}}])
def test_the_readme_keeps_its_figures_when_a_run_is_not_whole(whole, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_of({}, **whole)))
    with pytest.raises(SystemExit):
        command.main(["--from", str(path), "--readme"])
    assert "--readme needs a run of all suites" in capsys.readouterr().err


def test_ctrl_c_leaves_a_report_of_the_suites_that_had_ended(tmp_path, capsys, monkeypatch):
    body = "def test_it(benchmark):\n    benchmark.pedantic(lambda: None, rounds=1)\n"
    folder = folder_of(tmp_path, conftest=MACHINE, test_a=body, test_b=body)
    run = runner.run

    def run_one(name, *args):
        if name == "b":
            raise KeyboardInterrupt
        return run(name, *args)

    monkeypatch.setattr(runner, "run", run_one)
    assert command.main(["--out", str(tmp_path / "out")], folder) == 130
    assert json.loads((tmp_path / "out" / "run.json").read_text())["left_out"] == ["b"]
    assert "interrupted; left out: b" in capsys.readouterr().out


def test_nothing_measured_is_no_success(tmp_path, capsys):
    skipped = "import pytest\npytest.skip('no peer', allow_module_level=True)"
    folder = folder_of(tmp_path, conftest=MACHINE, test_peer=skipped)
    assert command.main(["--out", str(tmp_path / "out")], folder) == 1
    assert "no suite measured anything" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_runs_of_suites_are_merged():
    first = run_of(scores_of({("a", "GPT"): 1.5}))
    first["benchmarks"][0]["stats"] = {"median": 0.5, "data": [0.5, 0.25]}
    second = run_of(scores_of({("b", "GPT"): 2.5}), {}, date="2026-11-22")
    results = [
        result_of("none", skipped={"test_jax": "no jax"}),
        result_of("one", first),
        result_of("two", second),
    ]
    run = runner.merge(results, ["three"], quick=True)
    assert [benchmark["suite"] for benchmark in run["benchmarks"]] == ["one", "two", "two"]
    assert [(score.measure, score.value) for score in scores.of_run(run)] == [
        ("a", 1.5),
        ("b", 2.5),
    ]
    assert run["benchmarks"][0]["stats"] == {"median": 0.5}
    assert run["datetime"] == first["datetime"] and run["machine_info"] == first["machine_info"]
    assert run["suites"]["none"]["skipped"] == {"test_jax": "no jax"}
    assert (run["quick"], run["left_out"]) == (True, ["three"])


def test_quick_names_suites_that_exist():
    assert set(runner.QUICK) < set(runner.known())


def test_part_of_the_benchmarks_has_a_folder_of_its_own():
    whole = run_of(suites={"fit": {}, "memory": {}}, left_out=[])
    assert report.folder_name(whole) == "2026-11-21-2-cores"
    assert (
        report.folder_name({**whole, "left_out": ["attention"]}) == "2026-11-21-2-cores-fit-memory"
    )
    assert (
        report.folder_name({**whole, "left_out": ["attention"], "quick": True})
        == "2026-11-21-2-cores-quick"
    )


def test_an_earlier_run_is_written_up_without_running(tmp_path, capsys):
    ratios = {
        ("fit: Keras GA default / ours", "MLP 128"): 12.5,
        ("fit: Keras GA default / ours", "GPT"): 0.75,
        ("train step: JAX scan / ours", "GPT"): 1.75,
        ("temp memory: 64 micro-batches / 2", "GPT"): 1.0,
    }
    growing = {"chart": "first step", "line": "unrolled", "x": [4, 48], "y": [3, 30]}
    growing |= {"x_label": "layers", "y_label": "s"}
    level = {**growing, "line": "LayerStack", "y": [1, 1.25]}
    path = tmp_path / "earlier.json"
    path.write_text(
        json.dumps(run_of(scores_of(ratios), {"series": [growing]}, {"series": [level]}))
    )
    assert command.main(["--from", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "reached" in capsys.readouterr().out

    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert charts.time_by_peer(run, "fit") == {
        "MLP 128": {"Keras GA default": 12.5},
        "GPT": {"Keras GA default": 0.75},
    }
    assert list(charts.line_charts(run)["first step"]["lines"]) == ["unrolled", "LayerStack"]
    pictures = {
        picture.name: picture.stat().st_size for picture in (tmp_path / "out").glob("*.png")
    }
    assert set(pictures) == {
        "train-step-time-by-peer.png",
        "fit-time-by-peer.png",
        "first-step.png",
    }
    assert max(pictures.values()) < 150_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran_step"], "unknown suite 'tran_step'; the suites are "),
        (["fit", "--readme"], "--readme needs a run of all suites"),
        (["--quick", "--readme"], "--readme needs a run of all suites"),
        (["--from", "missing.json"], "--from missing.json is not there"),
        (["--from", "missing.json", "--quick"], "--from runs nothing"),
        (["fit", "--out", str(ROOT / "pyproject.toml")], "is a file: name a folder"),
        (["--from", str(ROOT / "pyproject.toml")], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[]", '{"benchmarks": []}', json.dumps({**run_of(), "benchmarks": 3})]
)
def test_json_that_is_not_a_run_is_refused(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        command.main(["--from", str(path)])
    assert "is not a run" in capsys.readouterr().err


def test_the_tables_of_the_readme(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    performance, kernels = tmp_path / "docs" / "performance.md", tmp_path / "docs" / "kernels.md"
    for path in (tmp_path / "README.md", performance, kernels):
        path.write_text("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    missing = readme.update(
        [
            Score("train step: eager loop / ours", "MLP 128", 40.25),
            Score("train step: eager loop / ours", "GPT", 5.125),
            Score("fit / bare train step", "GPT", 1.0),
            Score("attention: time / unfused", "2,048 tokens", 0.5, "ours 1 ms"),
        ]
    )
    assert (
        "train step: JAX scan / ours" in missing and "train step: eager loop / ours" not in missing
    )
    assert (tmp_path / "README.md").read_text().splitlines() == [
        "before",
        "<!-- measured -->",
        "",
        "|  | MLP 128 | GPT |",
        "| --- | --- | --- |",
        "| train step: hand-written eager loop / ours | 40.2 | 5.12 |",
        "",
        "<!-- end -->",
        "after",
    ]
    assert "| `fit` / the train step alone | 1.00 |" in performance.read_text()
    assert "| attention: time / unfused | 2,048 tokens | 0.50 | ours 1 ms |" in kernels.read_text()


@pytest.mark.skipif(
    not Path(cli.__file__).parents[1].joinpath("benchmarks").exists(),
    reason="an installed package has no benchmarks",
)
def test_fastaccum_bench_is_the_same_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "--help"])
    told = capsys.readouterr().out
    assert exit.value.code == 0
    assert told.startswith("usage: fastaccum bench") and "--from RUN.JSON" in told


def test_fastaccum_bench_without_a_clone_says_where_to_run_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "fastaccum" / "cli.py"))
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "--quick"])
    assert exit.value.code == 2
    assert "run `python -m benchmarks` in a clone of the repository" in capsys.readouterr().err
