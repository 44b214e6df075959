"""`python -m ridgeline info` and `python -m ridgeline selftest`: which kernels run here, and if they are correct."""

from __future__ import annotations

import argparse
import os
import sys

import torch

MOST_JOBS = 4  # of selftest: each has a CUDA context and examples of a size typical of models


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ridgeline", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("info", "prints the GPU, versions, the kernels that each op launches, and what is missing"),
        (
            "selftest",
            "compares each op with its reference, forward and backward; without a GPU, in Triton's interpreter",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--op", action="append", metavar="NAME", help="only this op; may be given more than once")
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    command.add_argument(
        "--jobs", type=int, default=jobs, metavar="N", help=f"number of processes (default here: {jobs})"
    )
    given, unrecognized = parser.parse_known_args(arguments)
    if unrecognized:  # argparse itself would show the usage of `parser`, which lacks the options of the command
        commands.choices[given.command].error(f"unrecognized arguments: {' '.join(unrecognized)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and given.command == "selftest":
        os.environ["TRITON_INTERPRET"] = "1"  # before the ops are imported: it is read when a kernel is defined
    from . import info, selftest

    known = selftest.ops()
    if unknown := sorted(set(given.op or ()) - set(known)):
        parser.error(f"unknown op {', '.join(unknown)}; known: {', '.join(known)}")
    names = [name for name in known if name in (given.op or known)]
    if given.command == "info":
        return info.report(names, device)
    selftest.prepare(device)
    return selftest.report(names, device, given.jobs)


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of standard output has ended, as in `info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
