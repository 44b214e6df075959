"""The project's own files agree with each other: sessions, dependencies, options in the README, the wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness import registry, roofline

from . import standalone

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = registry.ROOT
SESSIONS = (
    "setup", "test", "build", "bench", "profile", "sanitize", "stress", "tune", "report", "trend", "compare", "lint",
    "types", "wheel", "new", "vendor", "support", "plan", "mutate", "notebook",
)  # fmt: skip
TARGETS = ("help", "setup", "test", "bench", "profile", "report", "compare", "lint", "clean")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def groups(*wanted: str) -> list[str]:
    """The requirements of dependency groups, with included groups followed."""
    everything = project()["dependency-groups"]
    found = []
    for item in (item for group in wanted for item in everything[group]):
        found += groups(item["include-group"]) if isinstance(item, dict) else [item]
    return found


def nox(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nox", "--no-venv", "--no-install", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """make as from a shell: the options of a `make test` that runs these tests would come through MAKEFLAGS."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def listed() -> dict[str, str]:
    """The sessions that `nox -l` shows, and their descriptions."""
    pytest.importorskip("nox", reason="nox is not installed")
    done = nox("-l")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^[*-] (\S+)(?: \[[^]]*\])? -> (.+)$", done.stdout, re.MULTILINE)
    return dict(found)


def test_every_session_has_a_description(listed: dict[str, str]) -> None:
    per_kernel = [f"{verb}-{name}" for name in registry.names() for verb in ("test", "bench", "profile")]
    assert sorted(listed) == sorted([*SESSIONS, *per_kernel])
    assert [name for name, text in listed.items() if not text.endswith(".") or len(text) > 120] == []


def test_the_tests_alone_run_by_default() -> None:
    pytest.importorskip("nox", reason="nox is not installed")
    assert re.findall(r"^\* (\S+)", nox("-l").stdout, re.MULTILINE) == ["test"]


def test_the_noxfile_does_not_load_torch() -> None:
    pytest.importorskip("nox", reason="nox is not installed")
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; import noxfile; print(noxfile.KERNELS)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == str(registry.names()), done.stderr


def test_options_reach_the_harness(listed: dict[str, str]) -> None:
    name = registry.names()[0]
    done = nox("-s", f"bench-{name}", "--", "--gpu", "h300", "--device", "cpu")
    assert done.returncode == 1
    assert f"-m harness bench --kernel {name} --gpu h300 --device cpu" in done.stderr
    assert "'h300'" in done.stdout + done.stderr


def test_no_venv_alone_does_not_install_into_what_is_there(listed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nox", "--no-venv", "-s", "setup"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "add --no-install" in done.stderr


@pytest.mark.parametrize(
    ("posargs", "expected"), [([], None), (["--out"], None), (["--out", "x"], "x"), (["--out=y"], "y")]
)
def test_noxfile_finds_where_records_go(posargs: list[str], expected: str | None) -> None:
    noxfile = pytest.importorskip("noxfile", reason="nox is not installed")
    for posargs, expected in (([], None), (["--out"], None), (["--out", "x"], "x"), (["--out=y", "--quick"], "y")):
        assert noxfile._option(["--quick", *posargs], "--out") == expected


def test_report_follows_a_bench_that_wrote_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noxfile = pytest.importorskip("noxfile", reason="nox is not installed")

    class Session:
        posargs = ("--gpu", "h200", "--out", str(tmp_path))

        def __init__(self) -> None:
            self.notified: list = []

        def notify(self, name: str, posargs: list[str]) -> None:
            self.notified.append((name, posargs))

    def bench(writes: bool, fails: bool = False) -> list:
        def harness(session: Session, *arguments: str) -> None:
            if writes:
                (tmp_path / "records").mkdir(exist_ok=True)
                (tmp_path / "records" / "rmsnorm.jsonl").write_text("{}\n")
            if fails:
                raise RuntimeError("a row above the roofline")

        monkeypatch.setattr(noxfile, "harness", harness)
        session = Session()
        if fails:
            with pytest.raises(RuntimeError):
                noxfile.bench_and_report(session)
        else:
            noxfile.bench_and_report(session)
        return session.notified

    assert bench(writes=False) == []
    assert bench(writes=True) == [("report", ["--out", str(tmp_path)])]
    assert bench(writes=False) == []
    assert bench(writes=True, fails=True) == [("report", ["--out", str(tmp_path)])]


def test_every_make_target_has_a_line_of_help() -> None:
    done = make("help")
    assert tuple(re.findall(r"^make (\S+)  *\S", done.stdout, re.MULTILINE)) == TARGETS


def test_make_passes_options_on() -> None:
    done = make("--dry-run", "bench", "NOX=mynox", "ARGS=--gpu h100 --quick")
    assert done.stdout == "mynox -s bench -- --gpu h100 --quick\n"


def test_every_dependency_of_the_environment_is_pinned() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+(; python_version (>=|<) \"3\.\d+\")?$", pin) for pin in pins)
    pinned = {name_of(pin) for pin in pins}
    by_torch = {"nvidia-cuda-nvrtc"}  # whose CUDA builds want one version of it, each another
    assert {name_of(requirement) for requirement in groups("dev")} - pinned == by_torch


def test_the_extra_dev_is_the_group_dev() -> None:
    """pip cannot install a group of another project, so the extra repeats it."""
    extra = {name_of(requirement) for requirement in project()["project"]["optional-dependencies"]["dev"]}
    required = {name_of(requirement) for requirement in project()["project"]["dependencies"]}
    assert extra | required == {name_of(requirement) for requirement in groups("dev")}


def test_every_dependency_says_why() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[dependency-groups]")[1].split("\n[tool")[0]
    bare = [line for line in lines.splitlines() if line.startswith('    "') and "  # " not in line]
    assert [line for line in bare if line.strip() != '"pytest",'] == []


def test_the_readme_names_what_there_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [gpu for gpu in roofline.table() if f"`{gpu}`" not in readme] == []
    assert [session for session in SESSIONS if session != "setup" and f"`{session}" not in readme] == []
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", readme):
        assert (ROOT / link).exists(), f"README.md links to {link}, which is not there"
    assert re.search(r"<!-- report:begin h200 -->\n.*<!-- report:end -->", readme, re.DOTALL)


def test_ci_runs_what_the_readme_tells_a_reader_to_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
    assert "\nmake test\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def wheel(path: Path, *files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, "")
    return path


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("harness/cli.py", "unexpected at top level"),
        ("kernels/__init__.py", "unexpected at top level"),
        ("ridgeline/rmsnorm/bench.py", "must not ship"),
        ("ridgeline/rmsnorm/test_rmsnorm.py", "must not ship"),
    ],
)
def test_a_wheel_that_ships_too_much_is_rejected(extra: str, message: str, tmp_path: Path) -> None:
    ops = [f"ridgeline/{name}/op.py" for name in registry.names()]
    metadata = "ridgeline_kernels-0.1.dist-info/METADATA"
    standalone.check_contents(wheel(tmp_path / "good.whl", *ops, metadata))
    with pytest.raises(AssertionError, match=message):
        standalone.check_contents(wheel(tmp_path / "bad.whl", *ops, metadata, extra))
    with pytest.raises(AssertionError, match="the wheel lacks"):
        standalone.check_contents(wheel(tmp_path / "short.whl", "ridgeline/__init__.py", metadata))


def test_the_wheel_is_the_kernels_under_another_name(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("hatchling or pip is not installed")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    standalone.check_contents(built)
