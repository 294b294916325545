"""How much memory is free for the cache."""

from pathlib import Path

import torch

ROOT = Path("/")


def free_bytes(device: torch.device, *, root: Path = ROOT) -> int | None:
    """Gives the bytes free on a device; None where the machine does not say.

    On a CPU: what Linux calls available, within the process's cgroup. `root` is where the files
    are that Linux says it in.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    cgroups = root / "sys/fs/cgroup"
    bounds = [
        _available(root / "proc/meminfo"),
        _room(cgroups, limit="memory.max", used="memory.current", cached="inactive_file"),
        _room(
            cgroups / "memory",
            limit="memory.limit_in_bytes",
            used="memory.usage_in_bytes",
            cached="total_inactive_file",
        ),
    ]
    return min((bound for bound in bounds if bound is not None), default=None)


def _available(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _room(folder: Path, *, limit: str, used: str, cached: str) -> int | None:
    """Gives what a cgroup leaves; files it has cached and not used of late are given back when asked."""
    if not ((folder / limit).exists() and (folder / used).exists()):
        return None
    bound = (folder / limit).read_text().strip()
    if bound == "max":
        return None
    num_cached = 0
    if (folder / "memory.stat").exists():
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        num_cached = int(counts.get(cached, 0))
    return max(int(bound) - int((folder / used).read_text()) + num_cached, 0)
