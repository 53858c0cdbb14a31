"""The GPU benchmark, on the CPU: a program is exported, and run where there is JAX and need be no
TensorFlow.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import __main__ as runner

ROOT = Path(__file__).parents[2]
PROGRAM = "check-float16-blockwise"
pytestmark = pytest.mark.slow


def command(module, *arguments):
    # JAX would take a CUDA plugin for a GPU.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", f"benchmarks.gpu{module}", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)


def measured(module, *arguments):
    process = command(module, *arguments)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if importlib.util.find_spec("jaxlib") is None:
        pytest.skip('exporting StableHLO takes jaxlib: pip install "fastaccum[h200]"')
    folder = tmp_path_factory.mktemp("exported")
    process = command(".export", folder, "--program", PROGRAM)
    assert process.returncode == 0, process.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def program(folder):
    (program,) = json.loads((folder / "manifest.json").read_text())["programs"]
    return program


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    """Runs the command; returns its output and its files on the program."""
    results = tmp_path_factory.mktemp("results")
    process = command("", folder, "--results", results)
    assert process.returncode == 0, process.stderr[-4000:]
    (result,) = json.loads((results / "results.json").read_text())["results"]
    assert (result["contestant"], result["program"]) == ("fastaccum", PROGRAM)
    assert (results / "results.md").read_text() in process.stdout
    return result, process.stdout


needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None,
    reason='exported programs run through JAX: pip install "fastaccum[bench]"',
)


def test_weights_are_arguments_and_every_variable_has_a_next_value(folder, program):
    assert (folder / program["file"]).stat().st_size < 2**20
    arguments = {argument["name"]: argument for argument in program["arguments"]}
    assert len(arguments) == len(program["arguments"])
    assert set(program["weights"]) <= set(arguments)
    outputs = [argument["output"] for argument in program["arguments"]]
    assert outputs[:2] == [None, None] and None not in outputs[2:]
    assert len(set(outputs)) == len(outputs) - 1 and program["loss"] not in outputs


def test_the_first_losses_fall_from_those_of_a_uniform_guess(program):
    first, second, third = program["losses"]
    assert first == pytest.approx(np.log(program["sizes"]["vocabulary_size"]), rel=0.1)
    assert first > second > third


@needs_jax
def test_the_program_trains_as_tensorflow_does(ran, program):
    result, shown = ran
    np.testing.assert_allclose(result["losses"], program["losses"], rtol=1e-5)
    kept = sum(4 * np.prod(a["shape"]) for a in program["arguments"] if a["dtype"] == "float32")
    assert result["alias_bytes"] >= kept
    assert result["step_seconds"] > 0 and result["model_flops_utilisation"] > 0
    assert f"agree with TensorFlow's on a CPU: {PROGRAM}." in shown


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is not None, reason="JAX is installed, so nothing is skipped"
)
def test_what_is_skipped_is_told_by_name(ran):
    result, shown = ran
    assert result["skipped"] == "jax not installed"
    assert f"on {PROGRAM}: jax not installed" in shown


@needs_jax
def test_a_program_that_needs_a_gpu_says_so_where_there_is_none():
    from benchmarks.gpu import run

    program = {"name": "small", "purpose": "check", "attention": "blockwise"}
    run.require_gpu(program, "cpu")
    for other in ({"attention": "auto"}, {"purpose": "time"}):
        run.require_gpu({**program, **other}, "gpu")
        with pytest.raises(SystemExit, match="small needs a GPU, and JAX sees none"):
            run.require_gpu({**program, **other}, "cpu")


@needs_jax
def test_other_weights_are_noticed(folder, program, tmp_path):
    for argument in program["arguments"]:
        if argument["name"] == "final_norm/gamma":
            other = {**argument, "initial": {"fill": 2.0}}
    arguments = [
        other if argument["name"] == other["name"] else argument
        for argument in program["arguments"]
    ]
    (tmp_path / "manifest.json").write_text(
        json.dumps({"programs": [{**program, "arguments": arguments}]})
    )
    (tmp_path / program["file"]).write_bytes((folder / program["file"]).read_bytes())
    process = command(".run", tmp_path, PROGRAM)
    assert process.returncode == 1
    assert f"AssertionError: {PROGRAM}: the loss of step 0" in process.stderr


@pytest.mark.parametrize("device, warned", [("NVIDIA H200", False), ("NVIDIA L4", True)])
def test_the_prediction_stands_beside_what_was_measured(device, warned):
    about = {
        "purpose": "time",
        "preset": "124m",
        "dtype": "bfloat16",
        "peak_bytes": 2**30,
        "losses": [10.8],
    }
    about |= {
        "step_seconds": 0.05,
        "tokens_per_second": 1e6,
        "model_flops_utilisation": 0.5,
        "device": device,
    }
    predicted = {"device": "H200", "ms": 40.0, "serial_ms": 48.0}
    ours = {**about, "label": "fastaccum", "predicted": predicted}
    text = runner.table([ours, {**about, "label": "JAX scan", "predicted": None}])
    assert (
        "| fastaccum | 50.0 | 40.0 to 48.0 | 1,000,000 |" in text
        and "| JAX scan | 50.0 |  | 1,000,000 |" in text
    )
    assert "Predicted for an H200" in text and ("**This is no H200**: NVIDIA L4." in text) == warned


def test_pytorch_trains_the_same_model(folder, program):
    pytest.importorskip("torch", reason='a peer is PyTorch: pip install "fastaccum[bench]"')
    ran = measured(".torch_peer", folder, PROGRAM, "--eager")
    np.testing.assert_allclose(ran["losses"], program["losses"], rtol=1e-3)


@needs_jax
def test_an_unknown_program_is_named(folder):
    process = command(".run", folder, "nano")
    assert process.returncode == 2
    assert f"error: no program 'nano' in {folder}: choose one of {PROGRAM}" in process.stderr


def test_a_folder_that_holds_no_programs_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        runner.main([str(tmp_path)])
    assert (
        f"error: {tmp_path / 'manifest.json'} is missing: write it with" in capsys.readouterr().err
    )
