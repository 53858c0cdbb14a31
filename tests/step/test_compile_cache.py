"""Loads programs that another process compiled if they are whole and ours, and hides all others
from TensorFlow.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import small_disk

from fastaccum import Trainer
from fastaccum.step import compile_cache
from fastaccum.step.compile_cache import CompileCache

pytestmark = pytest.mark.long

HELPER = Path(__file__).parents[1] / "helpers" / "warm_start.py"
ENTRY = "xla_compile_cache__1__2__XLA_CPU_JIT.pb"


@pytest.fixture
def cache(tmp_path):
    """A cache with one sealed entry."""
    cache = CompileCache(tmp_path / "cache")
    written = tmp_path / ENTRY
    written.write_bytes(b"machine code" * 100)
    cache.keep("__inference_step", 41.0, [written])
    return cache


def offered(cache, folder, function="__inference_step"):
    staging = folder / "staging"
    staging.mkdir(exist_ok=True)
    for path in staging.iterdir():
        path.unlink()
    names = sorted(cache.offer(function, staging))
    assert sorted(path.name for path in staging.iterdir()) == names
    return names


def test_a_sealed_entry_is_offered_to_its_program_alone(cache, tmp_path):
    assert cache.folder.stat().st_mode & 0o777 == cache.store.stat().st_mode & 0o777 == 0o700
    assert offered(cache, tmp_path) == [ENTRY]
    assert offered(cache, tmp_path, "__inference_other") == []
    assert cache.seals("__inference_step")[ENTRY].seconds == 41.0


def flip(entry):
    content = bytearray(entry.read_bytes())
    content[500] ^= 1
    entry.write_bytes(content)


def truncate(entry):
    entry.write_bytes(entry.read_bytes()[:-1])


def link(entry):
    twin = entry.with_name("twin")
    entry.rename(twin)
    entry.symlink_to(twin)


@pytest.mark.parametrize("damage", [flip, truncate, link])
def test_a_damaged_entry_is_moved_aside(cache, tmp_path, damage):
    damage(cache.store / ENTRY)
    with pytest.warns(RuntimeWarning, match="damaged or was changed: moved aside"):
        assert offered(cache, tmp_path) == []
    assert os.path.lexists(cache.store / f"{ENTRY}.damaged") and not os.path.lexists(
        cache.store / ENTRY
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offered(cache, tmp_path) == []  # once


@pytest.mark.parametrize(
    "seal", [None, "", "{}", "[]", '{"key": "another", "function": "__inference_step"}', "\0"]
)
def test_planted_and_unsealed_entries_are_not_loaded(cache, tmp_path, seal):
    """Leaves entries unsealed, as a process that is killed does, or renames another version's
    folder.
    """
    planted = ENTRY.replace("1", "3")
    (cache.store / planted).write_bytes(b"planted")
    if seal is not None:
        (cache.store / f"{planted}.seal").write_text(seal)
    assert offered(cache, tmp_path) == [ENTRY]


def test_other_versions_devices_and_flags_have_folders_of_their_own(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    other = CompileCache(cache.folder)
    assert other.store != cache.store
    cache.store.rename(other.store)
    assert offered(other, tmp_path) == [], "another's seal"


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("flags\t\t: fpu sse2 avx2", "flags\t\t: fpu sse2 avx2 avx512f"),
        ("Features\t: fp asimd", "Features\t: fp asimd sve"),
        ("model name\t: AMD EPYC 7B12", "model name\t: Intel(R) Xeon(R)"),
    ],
)
def test_another_cpu_has_a_folder_of_its_own(tmp_path, monkeypatch, line, other):
    """Separates CPUs, since an entry may be compiled for instructions that another lacks."""

    read = Path.read_text

    def store(of_cpu):
        said = f"processor\t: 0\n{of_cpu}\nbogomips\t: 4500\n"
        monkeypatch.setattr(
            Path, "read_text", lambda p, *a, **k: said if p.name == "cpuinfo" else read(p, *a, **k)
        )
        return CompileCache(tmp_path).store

    assert store(line) == store(f"{line}\ncpu MHz\t: 2250") != store(other)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match="may be written to by others"):
        CompileCache(tmp_path)


def test_a_folder_of_someone_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="belongs to user"):
        CompileCache(tmp_path)


def test_the_oldest_entries_go_first(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "LIMIT", 2500)
    os.utime(cache.store / ENTRY, (0, 0))
    for number in "56":
        written = tmp_path / ENTRY.replace("1", number)
        written.write_bytes(b"x" * 1200)
        cache.keep("__inference_step", 1.0, [written])
    assert {int(name.split("__")[1]) for name in offered(cache, tmp_path)} == {5, 6}
    assert not (cache.store / f"{ENTRY}.seal").exists()


def test_the_seconds_of_last_time_are_those_of_the_newest_entry(cache, tmp_path):
    for number, seconds in (("5", 9.0), ("6", 2.0)):
        written = tmp_path / ENTRY.replace("1", number)
        written.write_bytes(b"x")
        cache.keep("__inference_step", seconds, [written])
        os.utime(cache.store / f"{written.name}.seal", (2**32, 2**32 + int(number)))
    process = compile_cache._Process()
    assert process.last("__inference_step") is None
    process.cache = cache
    assert process.last("__inference_step") == 2.0


def test_the_users_folder(monkeypatch):
    monkeypatch.delenv("FASTACCUM_COMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile_cache.user_folder() == Path("/somewhere/fastaccum")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compile_cache.user_folder() == Path.home() / ".cache/fastaccum"
    monkeypatch.setenv("FASTACCUM_COMPILE_CACHE", "")
    assert compile_cache.user_folder() is None


def _is(output, given):
    return output is given or (output.op.type == "Identity" and output.op.inputs[0] is given)


def test_the_loop_of_a_step_takes_no_constants_from_outside():
    """TensorFlow copies them into the loop in an order, and by names, that differ from process to
    process.
    """
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(2)]
    )
    program, batch = Trainer(
        model, "adamw", "mse", gradient_accumulation_steps=2
    )._step_inputs.program(2 * (np.ones((2, 3, 2)),))
    graph = program.trace(batch).graph
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    assert loops
    for loop in loops:
        body = graph._get_function(loop.get_attr("body").name).graph
        kept = [
            t.op.name
            for t, i, o in zip(loop.inputs, body.inputs, body.outputs, strict=True)
            if _is(o, i)
        ]
        constants = [
            name for name in kept if graph.get_operation_by_name(name).type in ("Const", "Fill")
        ]
        assert len(constants) <= 1  # the loop's own bound


def test_while_a_program_loads_what_ends_the_process_is_still_told(capfd):
    level, _ = compile_cache._log_level_functions()
    before = level()
    with compile_cache.silence_tensorflow():
        assert level() == 3  # FATAL, which absl never leaves out
        os.write(2, b"CHECK failed")
        assert capfd.readouterr().err == "CHECK failed"  # by no thread, which would end first
    assert level() == before


# In processes of their own: XLA reads once where it is to keep what it compiles.


def start(folder, *changes, **options):
    command = [sys.executable, str(HELPER), str(folder), *changes]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def ended(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    assert "XlaSerializedCacheEntry" not in err and "SIGILL" not in err
    return json.loads(out.splitlines()[-1])


def entries(folder):
    return sorted(Path(folder).glob("*/*.pb"))


def corrupt(*entries):
    """Leaves them whole and sealed, but no programs."""
    for entry in entries:
        flip(entry)
        seal = entry.with_name(f"{entry.name}.seal")
        checksum = hashlib.sha256(entry.read_bytes()).hexdigest()
        seal.write_text(json.dumps(json.loads(seal.read_text()) | {"sha256": checksum}))


@pytest.fixture(scope="module")
def plain():
    """Returns the output of a process without a cache."""
    return ended(start(""))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache, and what the process printed that filled it."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    return folder, ended(start(folder))


@pytest.fixture
def first(filled, tmp_path):
    """Returns the output of the process that filled the cache in `tmp_path`."""
    shutil.copytree(filled[0], tmp_path / "cache")
    return filled[1]


@pytest.mark.faults
def test_a_second_process_loads_what_the_first_compiled(plain, first, tmp_path):
    # What was traced before moves the numbers in the names that TensorFlow gives.
    second = ended(start(tmp_path / "cache", "import tensorflow as tf; tf.function(tf.exp)(1.0)"))
    assert first["weights"] == second["weights"] == plain["weights"]
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text().splitlines()
    shown = next(line for line in page if line.startswith("Tracing the train step: "))
    assert "loaded" not in first["said"]
    assert re.sub(r"[\d.]+ s", "", shown) in re.sub(r"[\d.]+ s", "", second["said"])
    assert first["warned"] == second["warned"] == plain["warned"] == []
    assert len(entries(tmp_path / "cache")) == 1
    assert not list(tmp_path.glob("cache/*/staging-*"))


REPLICAS = """
    import sys, keras, numpy as np, tensorflow as tf
    import fastaccum as fa

    keras.utils.set_random_seed(0)
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    x = np.ones([4, 8], "float32")
    fa.Trainer(model, "sgd", "mse", compile_cache=sys.argv[1]).fit(x, x[:, :4], batch_size=4, verbose=0)
"""


@pytest.mark.faults
def test_programs_of_replicas_are_kept_too(tmp_path):
    def run():
        command = [sys.executable, "-c", textwrap.dedent(REPLICAS), str(tmp_path / "cache")]
        done = subprocess.run(command, timeout=300, check=True, capture_output=True, text=True)
        return {path.name: path.stat().st_ino for path in entries(tmp_path / "cache")}, done.stderr

    (first, _), (second, _) = run(), run()
    assert len(first) == 2 and first == second  # the sums and the end of a step, written once
    corrupt(*entries(tmp_path / "cache"))
    third, said = run()
    assert said.count("moved aside") == 2 and len(third) == 2


@pytest.mark.faults
def test_a_damaged_entry_is_compiled_anew(first, tmp_path):
    flip(entries(tmp_path / "cache")[0])
    second = ended(start(tmp_path / "cache"))
    assert second["weights"] == first["weights"] and "loaded" not in second["said"]
    assert len(second["warned"]) == 1 and "moved aside" in second["warned"][0]
    assert "loaded from" in ended(start(tmp_path / "cache"))["said"]


@pytest.mark.faults
def test_an_entry_that_does_not_load_is_compiled_anew(first, tmp_path):
    """Whole and sealed, but no program: as another build of the same version might leave it."""
    corrupt(*entries(tmp_path / "cache"))
    second = ended(start(tmp_path / "cache"))
    assert second["weights"] == first["weights"] and "moved aside" in second["warned"][0]


@pytest.mark.faults
def test_two_processes_at_once_and_one_that_is_killed(tmp_path):
    pair = [start(tmp_path / "cache") for _ in range(2)]
    first, second = map(ended, pair)
    assert first["weights"] == second["weights"] and len(entries(tmp_path / "cache")) == 1
    kill = "import os, signal; os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)"
    killed = start(tmp_path / "other", kill)
    assert killed.wait(300) == -signal.SIGKILL
    assert list(tmp_path.glob("other/*/staging-*")) and not entries(tmp_path / "other")
    after = ended(start(tmp_path / "other"))
    assert after["weights"] == first["weights"] and len(entries(tmp_path / "other")) == 1
    assert not list(tmp_path.glob("other/*/staging-*"))


@pytest.fixture
def full(tmp_path):
    """A file system with room for less than a program."""
    with small_disk.mounted(tmp_path / "disk", "100k") as path:
        yield path


@pytest.mark.faults
def test_training_goes_on_without_a_disk(plain, full):
    for folder in (full / "cache", "/proc/1/cache"):
        went_on = ended(start(folder))
        assert went_on["weights"] == plain["weights"]
        assert (
            len(went_on["warned"]) == 1
            and "compile_cache is not used from here on" in went_on["warned"][0]
        )
    assert not list(full.glob("cache/*/*"))


@pytest.mark.faults
def test_too_late_is_said(tmp_path):
    late = (
        "import tensorflow as tf\n"
        "tf.function(tf.exp, jit_compile=True)(1.0)\n"
        "from fastaccum.step import compile_cache\n"
        f"compile_cache.use({str(tmp_path)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", late], capture_output=True, text=True, timeout=300, check=True
    )
    assert "Make the Trainer with compile_cache before anything is compiled" in done.stderr
