"""What `bench` says where there is no GPU."""

from __future__ import annotations

from argparse import Namespace

from harness import options, plan, registry, roofline


def test_floors_are_the_rooflines_and_name_what_sets_them(capsys, monkeypatch):
    monkeypatch.setattr(plan, "_harness", lambda command, arguments, interpret: 0)
    spec = registry.load("rmsnorm")
    case = spec.case("131072x8192-bf16")
    selection = options.Selection(spec, (case,), ("fwd",), ("triton",))
    assert plan.main([selection], "h100", Namespace()) == 0
    printed = capsys.readouterr().out
    seconds = spec.cost(case, "fwd").bytes / roofline.get("h100").ceilings.bandwidth
    assert roofline.microseconds(seconds) in printed and "memory" in printed
    assert case.name in printed, "names are never cut short"
    assert printed.count("No GPU found") == 2


def test_a_failed_check_or_build_fails_the_bench(monkeypatch):
    spec = registry.load("rmsnorm")
    selection = options.Selection(spec, spec.cases[:1], ("fwd",), ("triton",))
    for broken in ("check", "build"):
        monkeypatch.setattr(plan, "_harness", lambda command, arguments, interpret, broken=broken: command == broken)
        assert plan.main([selection], "h200", Namespace()) == 1
