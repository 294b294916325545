"""How much memory a cache may take: what the machine and its container leave."""

from pathlib import Path

import pytest
import torch

from megallm.core_async.device.memory import free_bytes

CPU = torch.device("cpu")
MIB = 1 << 20


def machine(root: Path, files: dict[str, str]) -> Path:
    """Gives the root of a made-up machine's files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {
    "proc/meminfo": "MemTotal:     4096 kB\nMemFree:   1024 kB\nMemAvailable:    3072 kB\nBuffers:   1 kB\n"
}


def test_this_machine_has_some_and_not_more_than_it_has() -> None:
    """The one test on real files: their names and forms are those of Linux."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    free = free_bytes(CPU)
    assert free is not None
    assert 0 < free <= total


def test_a_machine_without_limits_gives_what_linux_calls_available(tmp_path: Path) -> None:
    """MemFree leaves out the page cache, which Linux gives back when asked."""
    assert free_bytes(CPU, root=machine(tmp_path, MEMINFO)) == 3 * MIB


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """In a container /proc/meminfo is the host's: believing it would have the process killed."""
    limited = {
        **MEMINFO,
        "sys/fs/cgroup/memory.max": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{MIB}\n",
    }
    assert free_bytes(CPU, root=machine(tmp_path, limited)) == MIB


def test_cached_files_in_a_container_do_not_count_as_used(tmp_path: Path) -> None:
    """Reading a model's file fills the page cache; the container gives it back when memory is short."""
    limited = {
        **MEMINFO,
        "sys/fs/cgroup/memory.max": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {MIB}\nactive_file 7\n",
    }
    assert free_bytes(CPU, root=machine(tmp_path, limited)) == MIB


def test_a_container_of_the_older_kind_counts_too(tmp_path: Path) -> None:
    """Cgroup v1 has other names for the same."""
    folder = "sys/fs/cgroup/memory"
    limited = {
        **MEMINFO,
        f"{folder}/memory.limit_in_bytes": f"{2 * MIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{2 * MIB}\n",
        f"{folder}/memory.stat": f"cache 5\ninactive_file 9\ntotal_inactive_file {MIB}\n",
    }
    assert free_bytes(CPU, root=machine(tmp_path, limited)) == MIB


def test_a_container_without_a_limit_leaves_the_machines(tmp_path: Path) -> None:
    """`max` in the newer kind, a number beyond any memory in the older one."""
    newer = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    folder = "sys/fs/cgroup/memory"
    older = {
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/memory.usage_in_bytes": "5\n",
    }
    assert free_bytes(CPU, root=machine(tmp_path, {**MEMINFO, **newer, **older})) == 3 * MIB


def test_a_full_container_still_gives_a_number(tmp_path: Path) -> None:
    """The limits then say that not one block fits, which names the remedy."""
    full = {**MEMINFO, "sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "120\n"}
    assert free_bytes(CPU, root=machine(tmp_path, full)) == 0


def test_a_machine_that_does_not_say_gives_none(tmp_path: Path) -> None:
    """MacOS has neither file; the cache is as large as asked for then."""
    assert free_bytes(CPU, root=tmp_path) is None


@pytest.mark.gpu
def test_a_gpu_says_what_is_free_on_it() -> None:
    """Other processes' memory counts as used."""
    device = torch.device("cuda", 0)
    free, total = torch.cuda.mem_get_info(device)
    seen = free_bytes(device)
    assert seen is not None
    assert 0 < seen <= total
    assert abs(seen - free) < 1 << 30
