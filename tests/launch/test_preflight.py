"""``distscale check`` on four ranks under the real torchrun: all well, and with odd ranks out."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sessions import run_in_session

import distscale
from distscale.preflight.exchange import Exchange
from distscale.preflight.facts import Facts, package_digests
from distscale.preflight.verdict import differences, files_that_differ, judge, notes
from distscale.sweep import cpu

DEADLINE_S = 90.0
# What each rank is started with: one may have an older distscale, other files, a clock that is ahead, or a sweep that
# sees no inf. Each takes itself for a host of its own.
START = """
import os, socket, sys, time

rank = os.environ["RANK"]
socket.gethostname = lambda: "n" + rank
if rank == os.environ.get("AHEAD"):
    right = time.time
    time.time = lambda: right() + 2.0
if rank == os.environ.get("OTHER_CODE"):
    # An editable installation is found by a finder that comes before any path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, "other")
if rank == os.environ.get("OTHER_FILES"):
    os.chdir("elsewhere")
if rank == os.environ.get("BAD_SWEEP"):
    from distscale import sweep
    from distscale.sweep import reference
    from distscale.sweep.choice import Choice
    from distscale.sweep.parts import INF_BITS

    class Blind:
        takes, scale_ = staticmethod(lambda parts: True), staticmethod(reference.scale_)

        @staticmethod
        def sweep(parts, request):
            swept = reference.sweep(parts, request)
            return swept._replace(slots=swept.slots.clamp(max=INF_BITS - 1))

    from distscale import diagnose
    diagnose.choose = lambda device: Choice(Blind, "native", "a test")
    sweep.backend_for = lambda device: Blind
from distscale.cli import main
sys.argv = ["distscale", "check", *sys.argv[1:]]
main()
"""


def check(folder: Path, *arguments: str, **odd: str) -> tuple[int, str, list[int]]:
    """Returns the exit code of torchrun, its output, and the exit codes of the ranks by its report."""
    (folder / "start.py").write_text(START)
    (folder / "run.toml").write_text("[run]\n")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("start.py", "run.toml", *arguments),
    ]
    ended = run_in_session(command, folder, odd, DEADLINE_S, subprocess.PIPE)
    out, err = ended.stdout, ended.stderr
    codes = [int(line.split(":")[1].split()[0]) for line in err.splitlines() if line.strip().startswith("exitcode")]
    assert ended.returncode == 0 or "start.py FAILED" in err, err
    return ended.returncode, out, codes


def test_ranks_that_fit_together_pass(tmp_path: Path) -> None:
    code, out, _ = check(tmp_path, "--json")
    found = json.loads(out)
    assert (code, found["problems"], found["passed"]) == (0, [], True), out
    assert (found["launcher"], found["world_size"]) == ("torchrun", 4)
    ranks = found["ranks"]
    assert [(rank["rank"], rank["host"]) for rank in ranks] == [(0, "n0"), (1, "n1"), (2, "n2"), (3, "n3")]
    assert len({(rank["code"], rank["files"]["run.toml"], rank["versions"]["torch"]) for rank in ranks}) == 1
    for rank in ranks:
        assert rank["sweep_faults"] == rank["exchange"]["faults"] == []
        assert rank["sweep_gb_per_s"] > 0
        assert rank["exchange"]["median_ms"] > 0
        assert rank["exchange"]["planted_on"] == 3


def test_the_odd_ranks_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.toml").write_text("[run]\nseed = 1\n")
    code, out, codes = check(tmp_path, OTHER_FILES="1", AHEAD="2", BAD_SWEEP="3")
    assert code == 1
    assert set(codes) <= {1, -signal.SIGTERM}, codes
    assert 1 in codes
    lines = " ".join(out.split())
    assert "rank 1: run.toml, with digest" in lines, out
    assert "the sweep of rank 3 is wrong: float32: an inf was not found" in lines
    assert "the exchange is wrong, on ranks 0, 1, 2, 3: the inf planted on rank 3 was not found" in lines
    # To within what this machine makes the ranks wait for each other.
    assert "the clock of n2 (rank 2) is off by +" in lines
    assert lines.count("the clock of ") == 1
    assert "passed" not in lines


def test_a_rank_with_other_code_is_named_with_its_file(tmp_path: Path) -> None:
    library = cpu._find()
    copy = tmp_path / "other" / "distscale"
    shutil.copytree(Path(distscale.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if library is not None:
        shutil.copy(library, copy / "sweep")
        with (copy / "sweep" / library.name).open("ab") as file:
            file.write(b"of another compiler")
    with (copy / "policy.py").open("a") as file:
        file.write("# of another version\n")
    code, out, _ = check(tmp_path, "--json", OTHER_CODE="2")
    found = json.loads(out)
    assert (code, found["passed"]) == (1, False)
    assert found["ranks"][0]["exchange"] is None  # not tried
    odd = ["distscale's files", "distscale/policy.py", *(["distscale/sweep/libdistscale.so"] if library else [])]
    assert [problem.partition(", with digest ")[0] for problem in found["problems"]] == [
        f"rank 2: {what}" for what in odd
    ]


def test_the_digest_is_of_all_code_and_the_library_that_is_loaded() -> None:
    package = Path(distscale.__file__).parent
    files = {f"distscale/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
    code = {file for file in files if "__pycache__" not in file and not file.endswith("py.typed")}
    library = cpu._find()
    digests = package_digests()
    assert set(digests) == code | ({"distscale/sweep/libdistscale.so"} if library else set())
    assert list(digests) == sorted(digests)
    if library is not None:
        assert digests["distscale/sweep/libdistscale.so"] == hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def facts(rank: int, **others: Any) -> Facts:
    versions = {"torch": "2.13.0", "cuda": None, "platform": f"kernel {rank}"}
    same: dict[str, Any] = {"host": f"n{rank // 2}", "device": "cpu", "hardware": "a CPU", "versions": versions}
    same |= {"code": "c0de", "files": {"run.toml": "f11e"}, "sweep": "native", "sweep_gb_per_s": 10.0}
    return Facts(rank, **{**same, "sweep_faults": (), **others})


def test_what_differs_is_said_of_the_fewest_ranks() -> None:
    alike = [facts(rank) for rank in range(4)]
    assert differences(alike) == notes(alike) == []
    older = {"torch": "2.12.0", "cuda": None, "platform": "kernel 2"}
    mixed = [*alike[:2], facts(2, versions=older, sweep="reference"), facts(3, files={"run.toml": None}, sweep="none")]
    assert differences(mixed) == [
        "rank 2: torch 2.12.0, where others have 2.13.0",
        "rank 2: sweep reference, where others have native",
        "rank 3: sweep none, where others have native",
        "rank 3: run.toml, with digest unreadable, where others have f11e",
    ]
    assert differences([facts(0, code="a"), facts(1, code="b")]) == [
        "rank 1: distscale's files, with digest b, where others have a"
    ]
    assert differences([facts(rank, files={"x": None}) for rank in range(2)]) == ["x cannot be read on any rank"]
    assert files_that_differ([{"a.py": "1", "b.py": "1"}, {"a.py": "1"}, {"a.py": "1", "b.py": "1"}]) == [
        "rank 1: b.py, with digest missing, where others have 1"
    ]
    slow = [*alike[:3], facts(3, hardware="another", sweep_gb_per_s=4.0)]
    assert notes(slow) == [
        "rank 3: hardware another, where others have a CPU",
        "rank 3 on n1 sweeps 4.0 GB/s, where 10.0 is the median",
    ]


def clocks_judged(hosts: str, clocks: Sequence[float]) -> list[str]:
    """What is said of the clocks of ranks on hosts with a letter each."""
    return judge([facts(rank, host=host) for rank, host in enumerate(hosts)], [], clocks)


def test_the_whole_spread_of_the_clocks_counts() -> None:
    alike = [facts(rank) for rank in range(4)]
    assert judge(alike, [Exchange(3, 1.0, ())] * 4, [0.0, 0.4, -0.4, 0.001]) == []
    assert clocks_judged("aabb", [0.0, 0.0, 1.0, 1.0]) == []
    assert clocks_judged("aabb", [0.0, 0.001, 1.5, 1.499]) == [
        "the clocks of a (rank 0) and b (rank 2) differ by 1.5 s"
    ]
    assert clocks_judged("abc", [0.0, -0.6, 0.6]) == ["the clocks of b (rank 1) and c (rank 2) differ by 1.2 s"]
    # Of which one is a container, or has a name that others have, too.
    assert clocks_judged("aa", [0.0, -1.5]) == ["the clocks of a (rank 1) and a (rank 0) differ by 1.5 s"]


@pytest.mark.parametrize("off", [-1.5, -90.0, 1.5, 90.0])
def test_a_clock_that_most_hosts_contradict_is_named_also_on_rank_0(off: float) -> None:
    assert clocks_judged("abc", [0.0, 0.0, off]) == [f"the clock of c (rank 2) is off by {off:+.1f} s"]
    assert clocks_judged("abc", [0.0, off, off]) == [f"the clock of a (rank 0) is off by {-off:+.1f} s"]
    # A host has one vote, however many its ranks are.
    assert clocks_judged("aaaabc", [0.0] * 4 + [off] * 2) == [
        f"the clock of a (ranks 0, 1, 2, 3) is off by {-off:+.1f} s"
    ]
    two = clocks_judged("abcde", [0.0, off, 0.0, 0.0, off])
    assert two == [f"the clock of {host} is off by {off:+.1f} s" for host in ("b (rank 1)", "e (rank 4)")]


@pytest.mark.parametrize("apart", [1.5, 5.0])
def test_no_host_is_blamed_without_a_majority(apart: float) -> None:
    for hosts, clocks in (("ab", [0.0, apart]), ("aaab", [0.0, 0.0, 0.0, apart]), ("abcd", [0.0, 0.0, apart, apart])):
        first, last = 0, clocks.index(apart)
        assert clocks_judged(hosts, clocks) == [
            f"the clocks of {hosts[first]} (rank {first}) and {hosts[last]} (rank {last}) differ by {apart} s"
        ]
