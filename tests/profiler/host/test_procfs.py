"""How much memory a process may have, within made-up cgroups and the real one."""

import pytest

from trappm.profiler.host import procfs

GIB = 2**30
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 50331648 kB\n"  # 64 GiB, 48 of them available


def limited(group, names, limit, used, stat):
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (group / name).write_text(f"{value}\n", encoding="ascii")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO, encoding="ascii")
    return tmp_path / "proc"


def memory_gib(proc):
    """Available and allowed memory, in GiB."""
    cgroups = proc.parent / "cgroup"
    available = procfs.available_memory_mib(proc=proc, cgroups=cgroups)
    return available / 1024, procfs.allowed_memory_mib(proc=proc, cgroups=cgroups) / 1024


def test_without_cgroups_memory_is_that_of_the_machine(proc):
    assert memory_gib(proc) == (48, 64)
    (proc / "self/cgroup").write_text("0::/\n", encoding="ascii")
    assert memory_gib(proc) == (48, 64)


def test_the_narrowest_cgroup_limits_memory(proc):
    """A job of Slurm: its own group says max, that of the job has the limit."""
    (proc / "self/cgroup").write_text("0::/slurm/job_7/step_0/task\n", encoding="ascii")
    root = proc.parent / "cgroup"
    limited(root / "slurm/job_7/step_0/task", V2, "max", GIB, "anon 1\ninactive_file 5")
    # What the kernel keeps of files, half of what is in use, it gives back when asked.
    limited(root / "slurm/job_7", V2, 16 * GIB, 4 * GIB, f"anon 1\ninactive_file {2 * GIB}")
    limited(root / "slurm", V2, 60 * GIB, GIB, "anon 1")
    assert memory_gib(proc) == (14, 16)


def test_cgroup_version_1_is_supported(proc):
    lines = "11:cpu,cpuacct:/other\n4:memory:/slurm/uid_1/job_7\n0::/\n"
    (proc / "self/cgroup").write_text(lines, encoding="ascii")
    root = proc.parent / "cgroup"
    stat = f"inactive_file 0\ntotal_inactive_file {GIB}"
    limited(root / "memory/slurm/uid_1/job_7", V1, 8 * GIB, 3 * GIB, stat)
    limited(root / "memory", V1, 2**63 - 4096, 30 * GIB, "inactive_file 0")  # no limit
    assert memory_gib(proc) == (6, 8)


def test_containers_see_their_cgroup_as_root(proc):
    (proc / "self/cgroup").write_text("0::/docker/not-mounted-here\n", encoding="ascii")
    limited(proc.parent / "cgroup", V2, 2 * GIB, GIB, "inactive_file 0")
    assert memory_gib(proc) == (1, 2)


def test_waits_of_threads_are_read(tmp_path):
    for thread, waited_ns in (("7", 2_000_000), ("8", 500)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"12345 {waited_ns} 3\n", encoding="ascii")
    (tmp_path / "9").mkdir()  # has ended meanwhile
    assert procfs.run_queue_waits_ns(str(tmp_path)) == {"7": 2_000_000, "8": 500}


@pytest.mark.parametrize(
    ("waits_ms", "expected_ms"),
    [((4,), 4), ((0, 4), 4), ((6, 4), 8), ((1, 6, 4), 8), ((0, 0), 0), ((), 0)],
)
def test_lost_time_is_the_longest_wait_plus_half_of_the_next(waits_ms, expected_ms):
    before = {str(thread): 5_000_000 for thread in range(2)}
    after = {
        str(thread): before.get(str(thread), 0) + ms * 1_000_000
        for thread, ms in enumerate(waits_ms)
    }
    assert procfs.lost_ms(before, after) == pytest.approx(expected_ms)
