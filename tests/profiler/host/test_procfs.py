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


@pytest.mark.parametrize(
    ("lines", "groups", "expected_gib"),
    [
        ("0::/", {}, (48, 64)),
        # A job of Slurm: its own group says max, that of the job has the limit. What the kernel
        # keeps of files, half of what is in use, it gives back when asked.
        ("0::/slurm/job_7/step_0/task",
         {"slurm/job_7/step_0/task": (V2, "max", GIB, "anon 1\ninactive_file 5"),
          "slurm/job_7": (V2, 16 * GIB, 4 * GIB, f"anon 1\ninactive_file {2 * GIB}"),
          "slurm": (V2, 60 * GIB, GIB, "anon 1")}, (14, 16)),
        # Version 1, in which the root has no limit.
        ("11:cpu,cpuacct:/other\n4:memory:/slurm/uid_1/job_7\n0::/",
         {"memory/slurm/uid_1/job_7":
          (V1, 8 * GIB, 3 * GIB, f"inactive_file 0\ntotal_inactive_file {GIB}"),
          "memory": (V1, 2**63 - 4096, 30 * GIB, "inactive_file 0")}, (6, 8)),
        # A container sees its cgroup as the root.
        ("0::/docker/not-mounted-here", {".": (V2, 2 * GIB, GIB, "inactive_file 0")}, (1, 2)),
    ],
)  # fmt: skip
def test_the_narrowest_cgroup_limits_memory(lines, groups, expected_gib, proc):
    (proc / "self/cgroup").write_text(f"{lines}\n", encoding="ascii")
    for name, files in groups.items():
        limited(proc.parent / "cgroup" / name, *files)
    assert memory_gib(proc) == expected_gib


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/", {}, None),
        # A pod of Kubernetes with 8 cores, of which the container has 6.
        ("0::/pod/c", {"pod/c/cpu.max": "600000 100000", "pod/cpu.max": "800000 100000"}, 6),
        ("0::/pod/c", {"pod/c/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 0.5),
        ("0::/docker/not-mounted-here", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "250000",
                                "cpu/job/cpu.cfs_period_us": "100000"}, 2.5),
        ("3:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1",
                        "cpu/job/cpu.cfs_period_us": "100000"}, None),
    ],
)  # fmt: skip
def test_the_narrowest_cgroup_limits_processor_time(line, files, cores, proc):
    (proc / "self/cgroup").write_text(f"{line}\n", encoding="ascii")
    for name, text in files.items():
        path = proc.parent / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    assert procfs.cpu_quota(proc=proc, cgroups=proc.parent / "cgroup") == cores


def test_waits_of_threads_are_read(tmp_path):
    for thread, waited_ns in (("7", 2_000_000), ("8", 500)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"12345 {waited_ns} 3\n", encoding="ascii")
    (tmp_path / "9").mkdir()  # has ended meanwhile
    assert procfs.run_queue_waits_ns(str(tmp_path)) == {"7": 2_000_000, "8": 500}


@pytest.mark.parametrize(
    ("waits_ms", "expected_ms"),
    [((4,), 4), ((1, 6, 4), 8), ((0, 0), 0), ((), 0)],
)
def test_lost_time_is_the_longest_wait_plus_half_of_the_next(waits_ms, expected_ms):
    before = {str(thread): 5_000_000 for thread in range(2)}
    after = {
        str(thread): before.get(str(thread), 0) + ms * 1_000_000
        for thread, ms in enumerate(waits_ms)
    }
    assert procfs.lost_ms(before, after) == pytest.approx(expected_ms)
