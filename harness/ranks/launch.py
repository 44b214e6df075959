"""Starts the ranks through torchrun's elastic launcher, watches over them, and terminates all of them in the end.

The launcher ends all ranks when one of them fails. It does not detect a rank that hangs. The watchdog does, by the
steps that the ranks write (`heartbeat`): it requests each rank's stack, then kills them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import heartbeat
from .heartbeat import Beat, Heartbeat

#: no step of any rank within this time means that one hangs
TIMEOUT = 300.0
#: limit for a process until its first step, and after its last: it imports and unloads PyTorch
START_SECONDS = 180.0
#: limit for the answer to a request for the stack
STACK_SECONDS = 0.5
POLL_SECONDS = 0.1
#: the environment variable that identifies the processes of a launcher: its id
LAUNCHER = "RIDGELINE_LAUNCHER"
#: Environment defaults of the ranks. Thread pools of several ranks would compete for the cores, so torchrun sets one
#: thread too. NVLink multicast stays off: on some hosts it disables GPUs, and figures should not differ by host.
DEFAULTS = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class RanksFailed(RuntimeError):
    """A rank died or hung. The message names it and its step, then those of all ranks."""


@dataclass(frozen=True)
class Rank:
    """The argument of `work` in each process: its rank, the world size, its device, and its heartbeat."""

    rank: int
    size: int
    device: torch.device
    beat: Heartbeat

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0


def launch(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    device: str = "cuda",
    timeout: float = TIMEOUT,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs work(Rank, *arguments) in `size` processes of this host, one per GPU, and returns what each returned.

    `work` and its arguments are pickled. The default process group is initialised: NCCL for CUDA tensors, gloo for CPU
    tensors. Raises RanksFailed if a rank raised or was killed, or if no rank made a step for `timeout` seconds;
    KeyboardInterrupt if the run was interrupted. In either case no process is left.
    """
    before = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="ridgeline-ranks-") as scratch:
        folder = Path(scratch)
        config = _config(size, scratch)
        watch = Watch(folder, size, timeout, before)
        variables = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
        variables |= {**(environment or {}), LAUNCHER: str(os.getpid())}
        with _environment(variables), _signals(), watch:
            try:
                results = elastic_launch(config, _process)(scratch, device, timeout, work, arguments)
            except ChildFailedError as error:
                if error.get_first_failure()[1].exitcode == -signal.SIGINT:  # the ranks receive Ctrl-C too
                    raise KeyboardInterrupt from None
                raise watch.failed(error) from None
            except SignalException as error:
                raise KeyboardInterrupt(str(error)) from None
            finally:
                _kill(_children(before))
    return [results[rank] for rank in range(size)]


def _config(size: int, logs: str) -> LaunchConfig:
    """One host, a free port, no restarts."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=f"ridgeline-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        monitor_interval=POLL_SECONDS,
    )


def _process(scratch: str, device: str, timeout: float, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Runs one rank, from its first step to the end of its process group."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it even inside a waiting library call; the launcher reports it
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    beat = Heartbeat(Path(scratch), rank)
    with beat.named_if_it_raises():
        chosen = torch.device(device, rank) if device == "cuda" else torch.device(device)
        beat.step("creating the process group")
        # The watchdog must expire first, since it names the step. NCCL and gloo would only name a collective.
        patience = timedelta(seconds=max(60.0, 4 * timeout))
        if device == "cuda":
            torch.cuda.set_device(chosen)
            distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=patience, device_id=chosen)
        else:
            distributed.init_process_group("gloo", timeout=patience)
        result = work(Rank(rank, size, chosen, beat), *arguments)
        beat.step("waiting for the other ranks to end")
        distributed.barrier()
        distributed.destroy_process_group()
        beat.step(heartbeat.END)
    return result


class Watch:
    """A watchdog thread of the launcher that ends a run in which no rank makes progress."""

    def __init__(self, folder: Path, size: int, timeout: float, before: set[Any]) -> None:
        self._folder, self._size, self._timeout, self._before = folder, size, timeout, before
        self._over, self._found = threading.Event(), ""
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def failed(self, error: ChildFailedError) -> RanksFailed:
        """The exception to raise for a failure that the launcher saw."""
        if self._found:
            return RanksFailed(self._found)
        rank, failure = error.get_first_failure()
        beats = heartbeat.read(self._folder, self._size)
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        return RanksFailed(f"rank {rank} {how} in the step: {beats[rank].doing}\n{self._report(beats)}")

    def _look(self) -> None:
        beats, since = self._read(), time.monotonic()
        while not self._over.wait(POLL_SECONDS):
            now = self._read()
            if now != beats:
                beats, since = now, time.monotonic()
            patience = self._timeout if all(b.at_work for b in beats) else max(self._timeout, START_SECONDS)
            if time.monotonic() - since > patience:
                self._end(beats, patience)
                return

    def _end(self, beats: list[Beat], patience: float) -> None:
        for beat in beats:
            if beat.at_work:
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, heartbeat.STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        last = heartbeat.behind(self._folder, beats)[0]
        said = f"no rank has made progress for {patience:g} s; rank {last.rank} blocks the others, in the step: "
        self._found = f"{said}{last.doing}\n{self._report(beats)}"
        _kill(_children(self._before))

    def _read(self) -> list[Beat]:
        return heartbeat.read(self._folder, self._size)

    def _report(self, beats: list[Beat]) -> str:
        return heartbeat.report(self._folder, beats)


def _children(before: set[Any]) -> list[Any]:
    """The processes of the ranks that still run."""
    return [child for child in multiprocessing.active_children() if child not in before]


def _kill(children: list[Any]) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.join(10)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which started processes have these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals() -> Iterator[None]:
    """Restores the signal handlers that the launcher replaces."""
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
