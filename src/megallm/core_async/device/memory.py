"""How much memory is free for the cache."""

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Gives the bytes free on a device; None where the machine does not say.

    On a CPU: what Linux calls available, within the process's cgroup.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    bounds = [
        bound for bound in (_available(Path("/proc/meminfo")), _cgroup_room(Path("/sys/fs/cgroup"))) if bound
    ]
    return min(bounds, default=None)


def _available(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(folder: Path) -> int | None:
    limit, used = folder / "memory.max", folder / "memory.current"
    if not (limit.exists() and used.exists()):
        return None
    bound = limit.read_text().strip()
    return None if bound == "max" else max(int(bound) - int(used.read_text()), 1)
