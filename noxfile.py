"""Sessions. `nox -l` lists them, `nox -s SESSION -- OPTIONS` runs one; a bare `nox` runs the tests.

All sessions share one environment, `.venv`, which is created and filled when it is first needed. Without network
access, `nox --no-venv --no-install -s SESSION` uses the present environment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
# By default nox creates an environment for each session, each with its own torch. `environment` creates a shared one.
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
KERNELS = sorted(path.parent.name for kind in ("kernels", "workloads") for path in (ROOT / kind).glob("*/bench.py"))


def environment(session: nox.Session) -> str:
    """The Python interpreter that a session uses.

    Normally that of the shared environment, created and filled if necessary. With --no-install that of the shared
    environment as it is. With --no-venv --no-install the Python that runs nox or, if it has no torch, the one on PATH.
    """
    options = session._runner.global_config  # nox has no public interface for these two options
    if options.force_venv_backend == "none":
        if not options.no_install:
            session.error("--no-venv would install into the current environment: add --no-install to use it unchanged")
        if importlib.util.find_spec("torch"):
            return sys.executable
        python = shutil.which("python") or shutil.which("python3") or sys.executable
        if not _has_module(python, "torch"):
            session.error(f"neither {sys.executable} nor {python} has torch: activate the environment that has it")
        return python
    python = VENV / "bin" / "python"
    if options.no_install:
        if not python.exists():
            session.error("--no-install needs an existing .venv; add --no-venv to use the current environment")
        return str(python)
    if not python.exists():
        _make_venv(session, VENV)
    _fill_venv(session, str(python))
    return str(python)


def _make_venv(session: nox.Session, folder: Path) -> str:
    # virtualenv is installed with nox and brings its own pip: a Python without ensurepip suffices.
    session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--no-periodic-update", str(folder))
    return str(folder / "bin" / "python")


def _fill_venv(session: nox.Session, python: str) -> None:
    """Installs the dependency group `dev` and, if there is an NVIDIA driver, CuPy and the peers, unless installed."""
    project = nox.project.load_toml("pyproject.toml")
    dev = nox.project.dependency_groups(project, "dev")
    missed = {
        "cuda": "CuPy could not be installed: Triton versions run instead of the CUDA C++ ones.",
        "peers": "The peers could not be installed: reports will list them as skipped, with that reason.",
    }
    extras = {name: project["project"]["optional-dependencies"][name] for name in missed if _has_nvidia_driver()}
    wanted = "\n".join([*dev, *itertools.chain(*extras.values()), (ROOT / "constraints.txt").read_text()])
    stamp, digest = VENV / "ridgeline-installed", hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    session.log("Installing into .venv. The first time this downloads torch and takes some minutes.")
    session.run(*_pip_install(python), *dev, log=False)
    for name, packages in extras.items():
        if subprocess.run([*_pip_install(python), *packages]).returncode:
            session.warn(missed[name])
    stamp.write_text(digest)


def _pip_install(python: str) -> tuple[str, ...]:
    return python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _has_module(python: str, name: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", probe]).returncode == 0


def harness(session: nox.Session, *arguments: str) -> None:
    """Runs python -m harness ARGUMENTS, followed by the arguments after `--`."""
    # On Ctrl-C the harness closes its record and prints its results; nox would kill it after half a second.
    session.run(environment(session), "-m", "harness", *arguments, *session.posargs, interrupt_timeout=60)


def pytest(session: nox.Session, *arguments: str) -> None:
    """Runs pytest ARGUMENTS, followed by the arguments after `--`."""
    python = environment(session)
    # conftest.py makes `auto` one process on a GPU.
    # Some tests take a minute: worksteal lets an idle worker take tests from a busy one.
    workers = ("-n", "auto", "--dist", "worksteal") if _has_module(python, "xdist") else ()
    session.run(python, "-m", "pytest", *workers, *arguments, *session.posargs)


def bench_and_report(session: nox.Session, *arguments: str) -> None:
    """Runs the bench, and queues the report if records were written: without a GPU there is nothing to report."""
    out = _option(session.posargs, "--out")
    before = _records(out)
    try:
        harness(session, "bench", *arguments)
    finally:  # a bench that failed, e.g. on a row above the roofline, also has useful rows
        if _records(out) != before:
            session.notify("report", posargs=["--out", out] if out else [])


def _option(arguments: list[str], name: str) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == name:
            return next(iter(arguments[index + 1 :]), None)
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def _records(out: str | None) -> dict[Path, int]:
    """Every record and when it was last written."""
    found = Path(out).glob("records/*.jsonl") if out else (ROOT / "reports").glob("*/records/*.jsonl")
    return {path: path.stat().st_mtime_ns for path in found}


@nox.session(default=False)
def setup(session: nox.Session) -> None:
    """Create the shared environment, .venv, and print its versions."""
    versions = "import torch, triton; print('torch', torch.__version__, '| triton', triton.__version__)"
    python = environment(session)
    session.log(python)
    session.run(python, "-c", versions, log=False)


@nox.session(tags=["check"])
def test(session: nox.Session) -> None:
    """Run all tests except the slow ones (`-- -m slow`); GPU tests are skipped without a GPU."""
    pytest(session, "-m", "not slow")


@nox.session(default=False, tags=["check"])
def build(session: nox.Session) -> None:
    """Compile every JIT kernel ahead of time, without a GPU; tables of registers, spills and shared memory."""
    harness(session, "build")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Check and time every kernel against peers and roofline; without a GPU: check, compile, roofline bounds."""
    bench_and_report(session)


@nox.session(default=False, tags=["gpu"])
def profile(session: nox.Session) -> None:
    """Profile every kernel with Nsight Compute: utilisation, stall reasons, and DRAM traffic."""
    harness(session, "profile")


@nox.session(default=False, tags=["gpu"])
def sanitize(session: nox.Session) -> None:
    """Run compute-sanitizer on the small cases: memcheck and initcheck; racecheck and synccheck on request."""
    harness(session, "sanitize")


@nox.session(default=False, tags=["gpu"])
def stress(session: nox.Session) -> None:
    """Repeat calls in several processes on one GPU and compare results bit by bit: finds data races under load."""
    harness(session, "stress")


@nox.session(default=False, tags=["gpu"])
def tune(session: nox.Session) -> None:
    """Time every candidate configuration and compare the best with the one that the kernel selects."""
    harness(session, "tune")


@nox.session(default=False)
def mutate(session: nox.Session) -> None:
    """Mutation testing: how many small faults in a kernel's source its checks reject: -- --kernel NAME."""
    if "--report" in session.posargs:
        session.run(environment(session), "-m", "tests.planted", "reports/mutants/planted.json")
    harness(session, "mutate")


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Generate the reports (Markdown and SVG) from the records."""
    harness(session, "report")


@nox.session(default=False)
def trend(session: nox.Session) -> None:
    """Write a page per kernel on how its times changed, from the records in the git history."""
    harness(session, "trend")


@nox.session(default=False)
def compare(session: nox.Session) -> None:
    """Classify each row of two sets of records as FASTER, SAME, SLOWER or UNSURE; fails on SLOWER."""
    harness(session, "compare")


@nox.session(default=False, tags=["check"])
def lint(session: nox.Session) -> None:
    """Run ruff check and ruff format --check."""
    python = environment(session)
    session.run(python, "-m", "ruff", "check", *(session.posargs or ["."]))
    session.run(python, "-m", "ruff", "format", "--check", *(session.posargs or ["."]))


@nox.session(default=False, tags=["check"])
def types(session: nox.Session) -> None:
    """Run mypy over the harness and the kernels."""
    session.run(environment(session), "-m", "mypy", *session.posargs)


# Without times of day and without warnings: both depend on the machine that ran it.
RUN_NOTEBOOK = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, record_timing=False).execute()
for cell in notebook.cells:
    if "outputs" in cell:
        cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
nbformat.write(notebook, sys.argv[1])
"""


@nox.session(default=False, tags=["gpu"])
def notebook(session: nox.Session) -> None:
    """Run examples/llm_demo.ipynb and store its outputs in it."""
    python = environment(session)
    if not session._runner.global_config.no_install:
        # nbclient runs a notebook as Jupyter does, in a kernel of ipykernel.
        session.run(*_pip_install(python), "nbclient", "ipykernel", log=False)
    elif missing := [name for name in ("nbclient", "ipykernel") if not _has_module(python, name)]:
        session.error(f"the notebook needs {' and '.join(missing)}, which {python} lacks: run without --no-install")
    session.run(python, "-c", RUN_NOTEBOOK, str(ROOT / "examples" / "llm_demo.ipynb"))


@nox.session(default=False)
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it into a new environment and run every kernel, info, selftest and patch there."""
    python = environment(session)
    standalone = ROOT / "tests" / "standalone.py"
    with tempfile.TemporaryDirectory() as scratch:
        inputs, site = Path(scratch, "inputs.pt"), Path(scratch, "site")
        session.run(python, "-m", "tests.standalone", "inputs", str(inputs))
        built = _build_wheel(session, python, Path(scratch))
        if built is None:
            session.warn("no wheel is built, since hatchling or pip is missing: testing its files instead")
            session.run(python, "-m", "tests.standalone", "ship", str(site))
        elif session._runner.global_config.no_install:
            offline = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
            session.run(python, "-m", "pip", "install", *offline, "--target", str(site), str(built))
        else:
            python = _make_venv(session, Path(scratch, "empty"))
            session.run(*_pip_install(python), "numpy<2.5", str(built), log=False)  # numpy for the interpreter
        with session.chdir(scratch):
            session.run(python, "-I", str(standalone), "run", "ridgeline", str(inputs), str(site))
            session.run(python, "-I", str(standalone), "begin", "ridgeline", str(site))


def _build_wheel(session: nox.Session, python: str, folder: Path) -> Path | None:
    """Builds into `dist`, checks what is inside and returns the path; None where the tools are not there."""
    if not (_has_module(python, "hatchling") and _has_module(python, "pip")):
        return None
    # Without build isolation, because an isolated build downloads hatchling again.
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    session.run(python, "-m", "pip", "wheel", *flags, "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    session.run(python, "-m", "tests.standalone", "contents", str(built))
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(built, ROOT / "dist"))


@nox.session(default=False)
def new(session: nox.Session) -> None:
    """Create the folder of a new kernel from a template: nox -s new -- NAME [--cuda]."""
    # It only copies files, so it need not wait for torch to be installed.
    session.run(sys.executable, "-m", "harness", "new", *session.posargs)


@nox.session(default=False)
def vendor(session: nox.Session) -> None:
    """Update the copies of parts/ in the kernels' folders; -- --check changes nothing."""
    session.run(sys.executable, "-m", "harness", "vendor", *session.posargs)


@nox.session(default=False)
def plan(session: nox.Session) -> None:
    """Predict a case's time on many GPUs with a performance model: nox -s plan -- --gpus 64 --seq 1048576."""
    harness(session, "plan")


@nox.session(default=False)
def support(session: nox.Session) -> None:
    """Write docs/SUPPORT.md from the SPECs; -- --check changes nothing."""
    harness(session, "support")


#: tests that run over every kernel, of which --kernel selects one's
OF_EVERY_KERNEL = ("tests/test_specs.py", "tests/test_call.py", "tests/test_cost.py")


def kernel_sessions(kernel: str) -> None:
    """test-<kernel>, bench-<kernel> and profile-<kernel>."""
    kind = "kernels" if (ROOT / "kernels" / kernel).is_dir() else "workloads"

    def run_tests(session: nox.Session) -> None:
        pytest(session, f"{kind}/{kernel}", *OF_EVERY_KERNEL, "--kernel", kernel)

    def run_bench(session: nox.Session) -> None:
        bench_and_report(session, "--kernel", kernel)

    def run_profile(session: nox.Session) -> None:
        harness(session, "profile", "--kernel", kernel)

    run_tests.__doc__ = f"Run the tests of {kernel}."
    run_bench.__doc__ = f"Check and time {kernel}."
    run_profile.__doc__ = f"Profile {kernel} with Nsight Compute."
    for verb, run in (("test", run_tests), ("bench", run_bench), ("profile", run_profile)):
        nox.session(name=f"{verb}-{kernel}", default=False, tags=["kernel"])(run)


for name in KERNELS:
    kernel_sessions(name)
