"""What `bench` says where there is no GPU."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

from harness import options, plan, registry, roofline
from harness.spec import Cost

NOTHING_NAMED = Namespace(case=None, mode=None, impl=None)


def test_floors_are_the_rooflines_and_name_what_sets_them(capsys, monkeypatch):
    monkeypatch.setattr(plan, "_harness", lambda command, arguments, interpret: 0)
    spec = registry.load("rmsnorm")
    case = spec.case("131072x8192-bf16")
    selection = options.Selection(spec, (case,), ("fwd",), ("triton",))
    assert plan.main([selection], "h100", NOTHING_NAMED) == 0
    printed = capsys.readouterr().out
    seconds = spec.cost(case, "fwd").bytes / roofline.get("h100").ceilings.bandwidth
    assert roofline.microseconds(seconds) in printed and "memory" in printed
    assert case.name in printed, "names are never cut short"
    assert printed.count("No GPU found") == 2


def test_the_floor_of_a_case_of_several_gpus_counts_their_links():
    spec = registry.load("rmsnorm")
    case = dataclasses.replace(spec.cases[0], name="ring", world_size=2)
    spec = dataclasses.replace(spec, cost=lambda case, mode: Cost(0, 10**6, link_bytes=45 * 10**7), cases=(case,))
    (row,) = plan.floors([options.Selection(spec, (case,), ("fwd",), ("triton",))], roofline.get("h200"))
    assert (row[1], *row[-2:]) == ("ring", "1000 µs", "link")


def test_a_failed_check_or_build_fails_the_bench(monkeypatch):
    spec = registry.load("rmsnorm")
    selection = options.Selection(spec, spec.cases[:1], ("fwd",), ("triton",))
    for broken in ("check", "build"):
        monkeypatch.setattr(plan, "_harness", lambda command, arguments, interpret, broken=broken: command == broken)
        assert plan.main([selection], "h200", NOTHING_NAMED) == 1


def test_what_is_named_is_what_is_checked_and_built(monkeypatch):
    words = []
    monkeypatch.setattr(plan, "_harness", lambda command, arguments, interpret: words.append(arguments) or 0)
    spec = registry.load("rmsnorm")
    case = spec.cases[0]
    named = Namespace(case=[case.name], mode=["fwd"], impl=["triton"])
    assert plan.main([options.Selection(spec, (case,), ("fwd",), ("triton",))], "h200", named) == 0
    expected = ["--kernel", "rmsnorm", "--case", case.name, "--mode", "fwd", "--impl", "triton"]
    assert [part[:8] for part in words] == [expected, expected]
