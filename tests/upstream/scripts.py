"""Programs as users of megatron-core's high-level API write them: text, so that only the import changes.

`build()` stands for what such a program does first: it loads a checkpoint and puts it in eval mode.
"""

OFFLINE = """
import threading

from megatron.core.inference.apis import DynamicInferenceRequest, MegatronLLM, SamplingParams
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode

model, tokenizer = build()
config = InferenceConfig(
    block_size_tokens=16,
    buffer_size_gb=0.01,
    max_sequence_length=128,
    max_requests=8,
    kv_cache_management_mode=KVCacheManagementMode.OFFLOAD,
)
params = SamplingParams(top_k=1, num_tokens_to_generate=16, termination_id=-1)
prompts = ["Hello", "The quick brown fox", "A"]

# ---- one engine, from start to end ----
with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config) as llm:
    assert llm.is_primary_rank
    results = llm.generate(prompts, params)
    assert all(isinstance(result, DynamicInferenceRequest) for result in results)
    for prompt, result in zip(prompts, results):
        print("RESULT", prompt, result.generated_tokens)
    assert isinstance(llm.generate("Hello", params), list)
    assert llm.context.step_count > 0

    # ---- between two training steps: freeze, give the memory to the trainer, go on ----
    llm.pause()
    llm.suspend()
    llm.resume()
    llm.unpause()
    again = llm.generate(prompts, params)
    assert [r.generated_tokens for r in again] == [r.generated_tokens for r in results]

    # ---- requests in flight are frozen, not lost ----
    long = SamplingParams(top_k=1, num_tokens_to_generate=100, termination_id=-1)
    late = []
    caller = threading.Thread(target=lambda: late.extend(llm.generate(prompts, long)))
    caller.start()
    for _ in range(3):
        llm.pause()
        llm.suspend()
        llm.resume()
        llm.unpause()
    caller.join()
    for prompt, result in zip(prompts, late):
        print("LATE", prompt, result.generated_tokens)
    print("STATS", llm.engine.stats().free_blocks == llm.engine.stats().free_blocks)

# ---- a serving script's shape: another thread waits for the end ----
llm = MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config)
ended = threading.Event()

def wait():
    llm.wait_for_shutdown()
    ended.set()

waiter = threading.Thread(target=wait)
waiter.start()
llm.generate(prompts, params)
assert not ended.is_set()
llm.shutdown()
waiter.join(20)
assert ended.is_set()
llm.shutdown()

# ---- direct mode ----
llm = MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config, use_coordinator=False)
direct = llm.generate(prompts, params)
assert [r.generated_tokens for r in direct] == [r.generated_tokens for r in results]
try:
    llm.pause()
except RuntimeError as error:
    assert "use_coordinator=True" in str(error)
llm.wait_for_shutdown()
llm.shutdown()
print("DONE")
"""

ASYNC = """
import asyncio

from megatron.core.inference.apis import MegatronAsyncLLM, SamplingParams
from megatron.core.inference.config import InferenceConfig

model, tokenizer = build()
config = InferenceConfig(block_size_tokens=16, buffer_size_gb=0.01, max_sequence_length=128)
params = SamplingParams(top_k=1, num_tokens_to_generate=16, termination_id=-1)
prompts = ["Hello", "The quick brown fox", "A"]


async def main():
    llm = MegatronAsyncLLM(model=model, tokenizer=tokenizer, inference_config=config)
    batch, *singles = await asyncio.gather(
        llm.generate(prompts, params), *(llm.generate(prompt, params) for prompt in prompts)
    )
    assert [r.generated_tokens for r in batch] == [r.generated_tokens for r in singles]
    for prompt, result in zip(prompts, batch):
        print("RESULT", prompt, result.generated_tokens)
    await llm.pause()
    queued = asyncio.ensure_future(llm.generate("Hello", params))
    await llm.suspend()
    await llm.resume()
    assert not queued.done()
    await llm.unpause()
    assert (await queued).generated_tokens == batch[0].generated_tokens
    waiter = asyncio.ensure_future(llm.wait_for_shutdown())
    await asyncio.sleep(0)
    await llm.shutdown()
    await waiter
    async with MegatronAsyncLLM(model=model, tokenizer=tokenizer, inference_config=config) as llm:
        assert (await llm.generate("Hello", params)).generated_tokens == batch[0].generated_tokens


asyncio.run(main())
print("DONE")
"""

SERVER = """
import json
import threading
import urllib.request

from megatron.core.inference.apis import MegatronLLM, SamplingParams, ServeConfig
from megatron.core.inference.config import InferenceConfig

model, tokenizer = build()
config = InferenceConfig(block_size_tokens=16, buffer_size_gb=0.01, max_sequence_length=128)


def ask(path, body=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config) as llm:
    llm.serve(ServeConfig(host="127.0.0.1", port=port, frontend_replicas=1), blocking=False)
    assert json.loads(ask("/v1/health"))["status"] == "ok"
    body = {"prompt": "Hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = json.loads(ask("/v1/completions", body))
    print("TEXT", json.dumps(answer["choices"][0]["text"]))
    lines = ask("/completions", {**body, "stream": True}).splitlines()
    events = [line[len("data: "):] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events
    texts = [choice.get("text") or "" for event in events[:-1] for choice in json.loads(event)["choices"]]
    print("TEXT", json.dumps("".join(texts)))
    params = SamplingParams(top_k=1, num_tokens_to_generate=16, termination_id=-1)
    print("TEXT", json.dumps(llm.generate("Hello", params)[0].generated_text))
print("DONE")
"""
