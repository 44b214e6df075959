"""Which cases execute which statements of a kernel's CUDA C++ in their accuracy checks, measured on a GPU.

Processes on the GPUs check the original, each some cases of a kernel, with marks in its CUDA C++ (`cuda_blocks`). After
each check the marks are read from the loaded modules. A mutant is near the cases that executed the mark which stands
for its position.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from .. import registry
from ..spec import KernelSpec
from . import checkout, cuda_blocks, mutants
from .mutants import Mutant, is_cuda
from .near import Launcher, few, size
from .team import environment

SHARE = 10  # launchers of a process, about: it starts in some seconds
CHECK = "accuracy"


def places_of(kernel: str) -> dict[str, list[cuda_blocks.Mark]]:
    """The marks of each file of CUDA C++ that is mutated. Their numbers run through all files."""
    folder = registry.folder(kernel)
    files = [path for path in mutants.own_files(folder) if is_cuda(path.name)]
    return {path.relative_to(folder).as_posix(): cuda_blocks.marks(path.read_text(encoding="utf-8")) for path in files}


def first_numbers(places: Mapping[str, Sequence[cuda_blocks.Mark]]) -> dict[str, int]:
    """The number of the first mark of each file."""
    return dict(zip(places, itertools.accumulate(map(len, places.values()), initial=0), strict=False))


def near(
    places: Mapping[str, Sequence[cuda_blocks.Mark]],
    every: Iterable[Mutant],
    executed: Mapping[int, Sequence[Launcher]],
) -> dict[str, list[list[str]]]:
    """Key of a mutant → a few launchers, given those of each mark, ordered by size. Mutants without a mark are left
    out."""
    first, found = first_numbers(places), {}
    for mutant in every:
        mark = cuda_blocks.mark_of(places.get(mutant.file, ()), mutant.start)
        if mark is not None:
            found[mutant.key] = [list(launcher) for launcher in few([executed.get(first[mutant.file] + mark, ())])]
    return found


def launchers(spec: KernelSpec) -> list[Launcher]:
    """Implementations that may launch CUDA C++, with the cases that are checked, ordered by size."""
    cases = sorted((case for case in spec.cases if not case.bench), key=size)
    return [(name, case.name) for case in cases for name in spec.implementations if not name.startswith("triton")]


class Measurement:
    """The processes that measure some kernels, and what they found.

    executed   kernel → mark → the launchers that executed it
    missing    kernel → the number of its processes that failed, or were not begun
    """

    def __init__(self, kernels: Sequence[str], deadline: float, say: Callable[[str], object]) -> None:
        self._order = {name: launchers(registry.load(name)) for name in kernels}
        shares = {name: -(-len(order) // SHARE) for name, order in self._order.items()}
        self._tasks = [(name, share, total) for name, total in shares.items() for share in range(total)]
        self._tasks.sort(key=lambda task: task[1])  # the kernels alternate
        self._deadline, self._say = deadline, say
        self._lock = threading.Lock()
        self.missing = Counter(shares)
        self.executed: dict[str, dict[int, set[Launcher]]] = defaultdict(lambda: defaultdict(set))

    def run(self, gpus: Sequence[str], jobs: int) -> None:
        """Measures with `jobs` processes at a time, until all are done or the deadline is reached."""
        with tempfile.TemporaryDirectory(prefix="coverage-", ignore_cleanup_errors=True) as scratch:
            serving = [
                threading.Thread(target=self._serve, args=(gpus[n % len(gpus)], Path(scratch))) for n in range(jobs)
            ]
            for thread in serving:
                thread.start()
            for thread in serving:
                thread.join()

    def by_mark(self, kernel: str) -> dict[int, list[Launcher]]:
        """Mark → launchers, ordered by size."""
        place = {launcher: index for index, launcher in enumerate(self._order[kernel])}
        return {mark: sorted(found, key=place.__getitem__) for mark, found in self.executed[kernel].items()}

    def _serve(self, gpu: str, scratch: Path) -> None:
        while True:
            with self._lock:
                if not self._tasks or time.monotonic() > self._deadline:
                    return
                kernel, share, shares = self._tasks.pop(0)
            out = scratch / f"{kernel}-{share}.jsonl"
            error = self._process(kernel, share, shares, gpu, out)
            lines = out.read_text(encoding="utf-8").splitlines(keepends=True) if out.exists() else []
            with self._lock:
                for line in (json.loads(line) for line in lines if line.endswith("\n")):
                    for mark in line["marks"]:
                        self.executed[kernel][mark].add((line["implementation"], line["case"]))
                self.missing[kernel] -= not error
                self._say(f"{kernel}, part {share + 1} of {shares}: {error or f'{len(lines)} checks'}")

    def _process(self, kernel: str, share: int, shares: int, gpu: str, out: Path) -> str:
        """Runs a process. Returns why it failed, or ""."""
        words = [sys.executable, "-m", "harness.mutation.coverage", kernel, str(share), str(shares), str(out)]
        variables = {**environment("cuda", out.parent), "CUDA_VISIBLE_DEVICES": gpu}
        try:
            left = max(0.0, self._deadline - time.monotonic())
            ended = subprocess.run(words, cwd=registry.ROOT, env=variables, capture_output=True, timeout=left)
        except subprocess.TimeoutExpired:
            return "time was up"
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
        return f"exit code {ended.returncode}, {errors[-1] if errors else ''}" if ended.returncode else ""


def main(kernel: str, share: int, shares: int, out: Path) -> None:
    """Checks a share of the launchers. Appends to `out` a line for each check: the launcher, the check's status, and
    the marks that were executed."""
    checkout.enter(out.with_suffix(""))
    size = write_marks(checkout.copied(kernel), places_of(kernel))
    from ..commands import check
    from ..compiling import nvrtc

    spec = registry.load(kernel)
    driver = nvrtc.driver_of(registry.package(kernel))
    if driver is None:
        raise ValueError(f"{kernel} has no CUDA C++")
    read = reader(driver, size)
    wanted = launchers(spec)[share::shares]
    items = check.plan(spec, "cuda", [case for case in spec.cases if not case.bench])
    chosen = [i for i in items if i.check == CHECK and i.skip is None and (i.implementation, i.case.name) in wanted]
    with out.open("a", encoding="utf-8") as file:
        for item in sorted(chosen, key=lambda item: wanted.index((item.implementation, item.case.name))):
            status = check.run(item, "cuda").status
            line = {"implementation": item.implementation, "case": item.case.name, "mode": item.mode, "status": status}
            file.write(json.dumps({**line, "marks": read()}) + "\n")
            file.flush()


def write_marks(folder: Path, places: Mapping[str, Sequence[cuda_blocks.Mark]]) -> int:
    """Writes the marks into a copy of a kernel's folder. Returns their number."""
    first, size = first_numbers(places), sum(map(len, places.values()))
    for file, own in places.items():
        path = folder / file
        path.write_text(cuda_blocks.marked(path.read_text(encoding="utf-8"), own, first[file]), encoding="utf-8")
    prelude = cuda_blocks.PRELUDE.format(array=cuda_blocks.ARRAY, size=max(1, size))
    for path in folder.rglob("*.cu"):
        path.write_text(prelude + path.read_text(encoding="utf-8"), encoding="utf-8")
    return size


def reader(driver: ModuleType, size: int) -> Callable[[], list[int]]:
    """A function that returns the marks set by the kernels that `driver` has loaded, since its last call."""
    import torch

    modules: list[ctypes.c_void_p] = []
    call = driver._call

    def noting(name: str, *arguments: object) -> None:
        call(name, *arguments)
        if name == "cuModuleLoadData":
            modules.append(arguments[0]._obj)  # type: ignore[attr-defined]

    driver._call = noting  # type: ignore[attr-defined]

    def read() -> list[int]:
        torch.cuda.synchronize()
        found: set[int] = set()
        for module in modules:
            address, length = ctypes.c_uint64(), ctypes.c_size_t()
            places = ctypes.byref(address), ctypes.byref(length)
            try:
                call("cuModuleGetGlobal_v2", *places, module, cuda_blocks.ARRAY.encode())
            except RuntimeError:  # no statement of this module has a mark
                continue
            values = ctypes.create_string_buffer(length.value)
            call("cuMemcpyDtoH_v2", values, address, length)
            call("cuMemsetD8_v2", address, 0, length)
            found.update(mark for mark in range(size) if values.raw[mark] != 0)
        return sorted(found)

    return read


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
