"""Who may call the sync facade, and from where: many threads, running loops, notebooks."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio

from tests.engines import expect_balanced
from tests.fake_llm import FakeLLM, HeldRunner, lifecycle_config
from tests.fakes import continuation
from tests.small_llm import expected, greedy, make_async_llm, shared_model, sync_llm, tokens_of, untouched

ROOT = Path(__file__).parents[2]
NUM_THREADS = 8
NUM_CALLS = 50


def test_fifty_calls_of_each_of_eight_threads_get_their_own_answers() -> None:
    """Batches and single prompts, of different lengths, no two calls alike; the model is a quick fake."""
    wrong: list[str] = []

    def call_all(thread: int) -> None:
        for turn in range(NUM_CALLS):
            prompts, num_tokens = [[thread, turn, place] for place in range(1 + turn % 3)], 3 + turn % 4
            results = llm.generate(prompts, greedy(num_tokens))
            if tokens_of(results) != [continuation(prompt, num_tokens) for prompt in prompts]:
                wrong.append(f"thread {thread}, call {turn}")

    config = lifecycle_config()
    llm = FakeLLM(config, HeldRunner(config))
    try:
        threads = [threading.Thread(target=call_all, args=(thread,)) for thread in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert llm.engine.stats().step < NUM_THREADS * NUM_CALLS * 4, "they batch together"
        llm.generate([1], greedy(1))
        expect_balanced(llm.engine.stats(), config.num_blocks)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("outer", ["asyncio", "trio"])
def test_both_facades_work_inside_a_running_loop(outer: str) -> None:
    """The sync one stalls it meanwhile; the async one, made before the loop, is hosted beside it."""

    async def main() -> list[list[int]]:
        with sync_llm() as llm:
            tokens = tokens_of(llm.generate(["A"], greedy(4)))
            tokens += [[token for delta in llm.stream("B", greedy(4)) for token in delta.token_ids]]
        hosted = make_async_llm()
        results = await hosted.generate(["A", "B"], greedy(4))
        assert isinstance(results, list)
        tokens += tokens_of(results)
        await hosted.shutdown()
        return tokens

    with untouched(shared_model()):
        got = asyncio.run(main()) if outer == "asyncio" else trio.run(main)
        assert got == [expected("A", 4), expected("B", 4)] * 2


NOTEBOOK = r"""
import sys
sys.path[:0] = {paths!r}
from tests.engines import expect_balanced
from tests.fake_llm import FakeLLM, HeldRunner, lifecycle_config
from tests.fakes import continuation
from tests.small_llm import expected, greedy, make_async_llm, make_llm, tokens_of
llm = make_llm()
assert tokens_of(llm.generate(["A", "B"], greedy(4))) == [expected("A", 4), expected("B", 4)]
print("PLAIN", "ok")
import asyncio
await asyncio.sleep(0); inside = tokens_of(llm.generate(["A"], greedy(4))); assert asyncio.get_running_loop()
assert inside == [expected("A", 4)]
print("AWAIT", "ok")
"".join(delta.text for delta in llm.stream("A", greedy(4)))
llm.shutdown()
native = make_async_llm()
(await native.generate("A", greedy(4))).generated_tokens == expected("A", 4)
[delta async for delta in native.stream("B", greedy(4))][-1].finish_reason
await native.shutdown()
async with make_async_llm() as own: print("ENTERED", (await own.generate("A", greedy(4))).finish_reason)
llm = make_llm()
del llm
print("END", "ok")
"""


def test_cells_of_a_notebook_work_with_a_loop_running_and_without() -> None:
    """IPython runs each line as a cell; those that await run in its loop, where `generate` is called."""
    source = NOTEBOOK.format(paths=[str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "IPython", "--quick", "--no-banner", "--simple-prompt"],
        input=source + "exit\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": os.devnull},
    )
    assert done.returncode == 0, done.stderr
    for said in ("PLAIN ok", "AWAIT ok", "True", "'length'", "ENTERED length", "END ok"):
        assert said in done.stdout, f"no {said}:\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout, done.stdout
