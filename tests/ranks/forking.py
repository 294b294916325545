"""A process that has loaded torch and megatron, which takes seconds, and forks ranks on demand.

Takes the number of a socket. A message there, with one descriptor for each rank's output, starts ranks; an
empty one asks for the exit codes of the last ones started.
"""

import importlib
import json
import os
import runpy
import socket
import sys
from typing import Any

LOADED = ("megallm.sync.llm", "megallm.core_async.builder", "tests.small_llm", "tests.ranks.split_model")


def main() -> None:
    """Serves until the socket ends; in a rank, becomes that rank's program."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    for module in (
        "megallm.sync.llm",
        "megallm.core_async.builder",
        "tests.small_llm",
        "tests.ranks.split_model",
    ):
        importlib.import_module(module)
    pids: list[int] = []
    while True:
        message, outputs, _, _ = socket.recv_fds(sock, 65536, 16)
        if not message:
            return
        order: dict[str, Any] = json.loads(message)
        if not order:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            sock.sendall(json.dumps(codes).encode())
            continue
        pids = []
        for rank, output in enumerate(outputs):
            pid = os.fork()
            if not pid:
                sock.close()
                become(order, rank, output, outputs)
                return
            pids.append(pid)
        for output in outputs:
            os.close(output)
        sock.sendall(json.dumps(pids).encode())


def become(order: dict[str, Any], rank: int, output: int, outputs: list[int]) -> None:
    """Runs a rank's program in this process, as torchrun would have it."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    for each in outputs:
        os.close(each)
    os.environ.update(order["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__")


if __name__ == "__main__":
    main()
