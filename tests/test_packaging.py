"""A plain and an editable install import `fastaccum.kernels`, from inside a checkout and outside
it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CITATION.cff")
OUTER = sysconfig.get_path("purelib")

# Asks the import system as `import` would, but runs no fastaccum/__init__.py and so waits for no
# TensorFlow.
FIND = """
import json, os, sys
def find(name):
    path = None
    parts = name.split(".")
    for i in range(len(parts)):
        specs = (f.find_spec(".".join(parts[: i + 1]), path) for f in sys.meta_path)
        spec = next((s for s in specs if s), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return os.path.realpath(spec.origin)
print(json.dumps({name: find(name) for name in sys.argv[1:]}))
"""


def checkout(folder, link=True):
    """Copies what a build needs of the repository, since a build writes into its source."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fastaccum", "kernels", "src"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "constraints.txt", "LICENSE", *PAGES):
        shutil.copy(ROOT / name, folder)
    if not link:
        for path in (folder / "fastaccum" / "kernels", folder / "src" / "fastaccum"):
            target = os.readlink(path)
            path.unlink()
            path.write_text(target)
    return folder


def install(folder, source, *flags):
    """A new environment with nothing but fastaccum, built with this one's setuptools: no
    download.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "--no-deps",
    ]
    run(*pip, "--no-build-isolation", "--ignore-installed", *flags, source, PYTHONPATH=OUTER)
    return python, Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )


def run(*command, cwd=None, **env):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | env
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(python, *flags, cwd, **env):
    names = ("fastaccum", "fastaccum.kernels", "fastaccum.kernels.gradients", "kernels")
    return json.loads(run(python, *flags, "-c", FIND, *names, cwd=cwd, **env))


def linked_from(folder, pages):
    """The files of the repository that these pages link to and show."""
    links = re.findall(
        r"\]\((?!\w+:)([^)#\s]+)", "".join((folder / page).read_text() for page in pages)
    )
    return {link.rstrip("/") for link in links}


def found_in(package, kernels, result):
    """Returns whether every module of the package comes from these two folders."""
    return (
        result["fastaccum"] == str(package / "__init__.py")
        and result["fastaccum.kernels"] == str(kernels / "__init__.py")
        and result["fastaccum.kernels.gradients"] == str(kernels / "gradients.py")
    )


if not (ROOT / "src").is_dir():
    pytest.skip(
        "these install a checkout, and a source distribution is none", allow_module_level=True
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("packaging").resolve()
    (base / "elsewhere").mkdir()
    return base


@pytest.fixture(scope="module")
def plain(base):
    (base / "plain").mkdir()
    source = checkout(base / "plain")
    return source, *install(base / "plain-venv", source)


@pytest.fixture(scope="module", params=[True, False], ids=["link", "no-link"])
def editable(base, request):
    """Git on Windows may write the link as a text file: setuptools' own mapping must then do."""
    source = base / f"editable-{request.param}"
    source.mkdir()
    checkout(source, link=request.param)
    return source, *install(base / f"editable-{request.param}-venv", source, "-e")


@pytest.mark.slow
@pytest.mark.sample
def test_plain_install_outside_the_checkout(plain, base):
    _, python, site_packages = plain
    package = site_packages / "fastaccum"
    result = found(python, cwd=base / "elsewhere")
    assert found_in(package, package / "kernels", result), result
    assert result["kernels"] is None
    assert (package / "py.typed").is_file() and (package / "__init__.pyi").is_file()
    assert (site_packages.parents[2] / "bin" / "fastaccum").is_file()
    assert sorted(p.name for p in site_packages.iterdir() if p.suffix != ".dist-info") == [
        "fastaccum"
    ]


@pytest.mark.slow
def test_plain_install_inside_the_checkout(plain):
    source, python, site_packages = plain
    result = found(python, cwd=source)
    assert found_in(source / "fastaccum", source / "kernels", result), result
    # A program that leaves the working folder off sys.path, such as `pytest` here, gets the
    # installed copy.
    package = site_packages / "fastaccum"
    assert found_in(package, package / "kernels", found(python, "-I", cwd=source))


@pytest.mark.slow
def test_editable_install(editable, base):
    source, python, _ = editable
    for flags, cwd in [((), base / "elsewhere"), ((), source), (("-I",), source)]:
        result = found(python, *flags, cwd=cwd)
        assert found_in(source / "fastaccum", source / "kernels", result), (flags, cwd, result)
    assert found(python, cwd=base / "elsewhere")["kernels"] is None


@pytest.mark.slow
def test_editable_install_is_a_path_that_type_checkers_follow(base, editable):
    source, _, site_packages = editable
    lines = [line for path in site_packages.glob("*.pth") for line in path.read_text().splitlines()]
    if (source / "src" / "fastaccum").is_dir():
        assert lines == [str(source / "src")]
        assert [path.name for path in (source / "src").iterdir() if path.suffix != ".egg-info"] == [
            "fastaccum"
        ]
    else:
        assert [line.split()[0] for line in lines] == ["import"], (
            "without links, Python's import hook"
        )


@pytest.mark.slow
def test_links_of_the_description_work_on_a_package_index(plain):
    """An index shows README.md, and has none of the files beside it."""
    metadata = next(plain[2].glob("fastaccum-*.dist-info")) / "METADATA"
    _, _, text = metadata.read_text().partition("\n\n")
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in re.findall("^#+ (.*)", text, re.M)
    }
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert "\n# fastaccum\n" in f"\n{text}" and "docs/memory.md" in text
    assert not [
        link
        for link in links
        if not link.startswith("https://") and link.removeprefix("#") not in headings
    ]


@pytest.mark.slow
def test_type_checkers_see_the_installed_package(plain, editable, base):
    if not (editable[0] / "src" / "fastaccum").is_dir():
        pytest.skip("Python's import hook is not for type checkers")
    script = ROOT / "tests" / "typing" / "wrong.py"
    for _, python, _ in (plain, editable):
        mypy = ["mypy", "--ignore-missing-imports", "--python-executable", python, script]
        pyright = ["pyright", "--pythonpath", python, script]
        for command, message in (
            (mypy, 'argument "batchsize" for "fit"'),
            (pyright, 'No parameter named "batchsize"'),
        ):
            command = [sys.executable, "-m", *map(str, command)]
            done = subprocess.run(command, cwd=base / "elsewhere", capture_output=True, text=True)
            assert message in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_source_distribution(base, tmp_path):
    source = checkout(tmp_path / "source")
    for name in (".ci", "benchmarks", "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=source, PYTHONPATH=OUTER)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert linked_from(source, PAGES) <= held
    assert {
        path.relative_to(source).as_posix() for path in (source / "tests").rglob("*.py")
    } <= held
    _, site_packages = install(tmp_path / "venv", archive)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastaccum").rglob("*.py*")}
    installed = {
        path.relative_to(site_packages).as_posix()
        for path in (site_packages / "fastaccum").rglob("*.py*")
    }
    assert {name for name in modules if not name.endswith(".pyc")} <= installed
    assert (site_packages / "fastaccum" / "kernels" / "__init__.py").is_file()


@pytest.mark.slow
def test_checkout_on_pythonpath_needs_no_install(base, tmp_path):
    source = checkout(tmp_path)
    result = found(sys.executable, "-S", cwd=base / "elsewhere", PYTHONPATH=str(source))
    assert found_in(source / "fastaccum", source / "kernels", result), result


@pytest.mark.slow
def test_import_statements_run(plain, base):
    """The real imports, once: TensorFlow takes seconds."""
    _, python, site_packages = plain
    # A line in a .pth file extends the path at its end: the outer environment's own fastaccum stays
    # hidden.
    (site_packages / "outer.pth").write_text(OUTER)
    code = (
        "import importlib.metadata, fastaccum.kernels; from fastaccum import kernels\n"
        "print(kernels.__file__, fastaccum.__version__, importlib.metadata.version('fastaccum'))"
    )
    file, *versions = run(
        python, "-c", code, cwd=base / "elsewhere", TF_CPP_MIN_LOG_LEVEL="2"
    ).split()
    assert file == str(site_packages / "fastaccum" / "kernels" / "__init__.py")
    assert len(set(versions)) == 1, versions


def test_ci_runs_the_commands_of_the_readme():
    """Runs each block that makes an environment in a fresh clone, and the tests of exactness in the
    environment that README's test command made.
    """
    readme = (ROOT / "README.md").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    environments = []
    headings = []
    for heading, text in re.findall(r"(?ms)^(#+ [^\n]*)\n(.*?)(?=^#+ [A-Z]|\Z)", readme):
        if "```bash\npython3.11 -m venv .venv" in text:
            environments.append(heading)
            headings.append(heading)
        elif "```bash\nXLA_FLAGS= .venv/bin/pytest" in text:
            headings.append(heading)
    assert re.findall(r'(?m)^readme "(.*?)"', script) == headings
    assert len(re.findall(r"(?m)^fresh_clone ", script)) == len(environments)
    assert headings.index("### Exactness alone") == headings.index("## Test") + 1
    (by_readme,) = re.findall(r"\"-m (not \(.*\))\"", (ROOT / "pyproject.toml").read_text())
    (chosen,) = re.findall(r'pytest -q --unpassed -m "(.*)"', script)
    assert chosen == f"{by_readme} or (sample and not zoo)", (
        "all of README's tests that were skipped, and the sample"
    )


def test_the_citation_and_the_changelog_name_the_version():
    package = (ROOT / "fastaccum" / "__init__.py").read_text()
    version = re.search(r'(?m)^__version__ = "(.*)"', package)[1]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released, date = re.search(r"(?m)^## \[(\d.*)\] - (\S+)$", changelog).groups()
    citation = (ROOT / "CITATION.cff").read_text()
    assert released == version
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation


def test_the_cpu_wheel_of_the_readme_is_of_the_tested_version():
    tested = re.search(r"(?m)^tensorflow==(.*)", (ROOT / "constraints.txt").read_text())[1]
    assert re.findall(r"tensorflow-cpu==(\S+)", (ROOT / "README.md").read_text()) == [tested]


def test_ci_leaves_no_marked_test_out():
    """Checks that .ci/full chooses every marker that README's command leaves out."""
    full = (ROOT / ".ci" / "full").read_text()
    (by_readme,) = re.findall(r"\"-m not \((.*)\)\"", (ROOT / "pyproject.toml").read_text())
    chosen = set(re.findall(r"\w+", " ".join(re.findall(r"-m (\"[^\"]*\"|docs)", full))))
    assert {*by_readme.split(" or ")} <= chosen


def test_constraints_are_names_and_versions():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert line.startswith("#") or (name and version and not set(line) & set("/@:; ")), line


@pytest.mark.slow
def test_public_names_are_the_same_whatever_was_imported_first():
    """A submodule named like a function would take its place in the package."""
    code = (
        "import importlib, pkgutil, fastaccum\nfor module in "
        "pkgutil.iter_modules(fastaccum.__path__):\n    if module.name not in ('__main__', "
        "'addons'):\n        "
        "importlib.import_module(f'fastaccum.{module.name}')\nprint(*(type(getattr(fastaccum, "
        "name)).__name__ for name in fastaccum.__all__ if name != 'addons'))\n"
    )
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.split().count("module") == 2, (
        "of the public names, only checkpoint and kernels are modules"
    )
