"""Process groups of one, and silence."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import megallm
from megallm.models.megatron_setup import quiet_megatron
from tests.models.tiny_gguf import TINY, write_tiny

FRESH_PROCESS = """
import json, os, sys
from pathlib import Path
from megallm.models import load_model

report = {"light": not {"torch", "megatron"} & set(sys.modules)}
path = Path(sys.argv[1])
try:
    load_model(path, device="cpu", tp=2)
except ValueError as error:
    report["alone"] = str(error)

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed import fake_pg
dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
part, _ = load_model(path, device="cpu", tp=2)
report["rows"] = len(part.embedding.word_embeddings.weight)
parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
try:
    load_model(path, device="cpu")
except ValueError as error:
    report["virtual"] = str(error)
parallel_state.destroy_model_parallel()
dist.destroy_process_group()

threads = len(os.listdir("/proc/self/task"))
model, _ = load_model(path, device="cpu")
group = parallel_state.get_tensor_model_parallel_group()
load_model(path, device="cpu")
report["kept"] = group is parallel_state.get_tensor_model_parallel_group()
report["threads"] = len(os.listdir("/proc/self/task")) - threads
ours = {os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if fd.is_symlink()}
report["listening"] = [
    fields[1]
    for table in ("tcp", "tcp6")
    for line in Path("/proc/net", table).read_text().splitlines()[1:]
    if (fields := line.split())[3] == "0A" and f"socket:[{fields[9]}]" in ours
]
total = dist.get_world_size()
gathered = [None]
dist.all_gather_object(gathered, {"rank": dist.get_rank()})
report["gathered"] = gathered
print(json.dumps(report))
"""


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="counts sockets and threads as Linux lists them"
)
def test_a_fresh_process_is_set_up_alone_quietly_and_all_but_unreachable(tmp_path: Path) -> None:
    """One process, several promises: silence, one loopback socket, no whole model in each of many ranks."""
    write_tiny(tmp_path / "tiny.gguf")
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", FRESH_PROCESS, str(tmp_path / "tiny.gguf")],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(Path(megallm.__file__).parents[1])},
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["light"], "import megallm.models must leave torch and megatron alone"
    assert report["alone"] == (
        "tp=2, pp=1 and ep=1 need a multiple of 2 processes, and there are 1; start 2, as with torchrun "
        "--nproc-per-node 2, or choose smaller sizes"
    )
    assert report["rows"] == TINY.vocab_size // 2, "groups that the caller started are split as asked"
    assert "the virtual pipeline model parallel size is 2" in report["virtual"]
    assert report["kept"], "groups that are there must be left alone"
    assert [address.partition(":")[0] for address in report["listening"]] == ["0100007F"]
    assert report["threads"] < 30
    assert report["gathered"] == [{"rank": 0}]


def test_only_megatron_s_own_noise_is_hidden() -> None:
    """A warning of somebody else's that disappears here is a fault that nobody finds."""
    with quiet_megatron():
        warnings.warn("Apex is not installed. Falling back to Torch Norm", UserWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="Apex"):
        warnings.warn("Apex is not installed, said outside", UserWarning, stacklevel=1)


def test_only_the_known_log_lines_are_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """The loggers say other things too, and go on saying this one afterwards."""
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    with quiet_megatron():
        logger.warning("GPTModel IS DEPRECATED. Use another")
        logger.warning("out of ideas")
    logger.warning("GPTModel IS DEPRECATED, said outside")
    assert [record.getMessage() for record in caplog.records] == [
        "out of ideas",
        "GPTModel IS DEPRECATED, said outside",
    ]
