"""Makes the reference that greedy generation and tokenizing are held against; run by hand.

    python tests/models/make_reference.py

Everything in it comes from transformers' own reading of the demo model's GGUF file, in float32 on
one CPU thread: none of megallm's readers takes part. Needs transformers and accelerate.

`reference/smollm2_greedy.json`: prompts of 1 to 700 ids and the 64 ids that greedy decoding gives
for each (an end-of-sequence token does not end it), with the log-probability of each id and its
logit's lead over the second best. A prompt is taken only if every lead is at least MIN_LEAD, so
that no difference of summation order flips a token.

`reference/smollm2_tokens.json`: texts and their ids, and conversations and theirs.
"""

import json
import platform
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import transformers  # pyright: ignore[reportMissingImports] - it is asked for above, and no requirement
from tokenizers import pre_tokenizers

from megallm.models.catalog import KNOWN_MODELS, fetch

FOLDER: Final = Path(__file__).parent / "reference"
PROMPT_LENGTHS: Final = (
    1,
    2,
    3,
    5,
    7,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    700,
)
NUM_NEW_TOKENS: Final = 64
MIN_LEAD: Final = 5e-3
TOKEN_TEXTS: Final = (
    "",
    " ",
    "a",
    "Hello, world!",
    "  leading and trailing  ",
    "one two  three   four    five     six",
    "tabs\tand\t\ttabs, lines\nand\n\nlines\r\nand\r\n\r\nmore \n \n  \n",
    "It's we're I've you'll he'd I'm DON'T can't'S",
    "3.14159 and 1,000,000 and 0x1F and 2024-03-18T07:42:10Z and 10km",
    " 1", "a  1", "x   12  34\n 5\n\n  6\t7", "½ ²³ ٣٤ Ⅷ ⑨ 1st 2nd",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # ok\n\n\nclass A:\n\tpass\n',
    '{"a": [1, 2.5, null, true], "b\\n": "\\u00e9"}',
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; } /* done */",
    "漢字とひらがなとカタカナ、それから한국어와 中文。",
    "naïve café Ångström Zażółć gęślą jaźń ÀÉÎÕÜ ß",
    "e\u0301 n\u0303 a\u0308\u0304 \u200d \ufeff \u00a0 \u3000 \u2028",
    "Ελληνικά Русский العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧 👍🏽 🇵🇹🇯🇵 ❤️‍🔥 🏳️‍🌈 😀😀😀",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 🀄 𠜎",
    "!!!???...---___***===>>><<<~~~```'''\"\"\"",
    "https://example.org/a_b-c/%20?q=1&r=two#three me@example.org C:\\dir\\file.txt",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> <|im_end", "<|im_start|><|im_start|> <repo_name>x<file_sep>y<empty_output>",
    "supercalifragilisticexpialidocious aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f\x1b[0m",
)  # fmt: skip

CHATS: Final = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "  What is  12 x 3?\n"}],
    [
        {"role": "user", "content": "漢字 👩‍👩‍👧"},
        {"role": "assistant", "content": "<|im_end|> & <b>"},
        {"role": "user", "content": "", "name": None},
    ],
)


def main() -> None:
    """Writes both files."""
    torch.set_num_threads(1)
    path = fetch(KNOWN_MODELS["smollm2-135m"])
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers takes every GGUF of this kind for GPT-2's; SmolLM2 takes digits apart first (llama.cpp's
    # "smollm" rule), which shows where several blanks stand in front of a digit
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    texts: dict[str, str] = json.loads((FOLDER / "texts.json").read_text())
    streams = prompt_streams(tokenizer, texts)
    origin = {
        "model": KNOWN_MODELS["smollm2-135m"].requirement,
        "sha256": KNOWN_MODELS["smollm2-135m"].sha256,
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
    }
    cases = [find_case(model, streams, length, index) for index, length in enumerate(PROMPT_LENGTHS)]
    write("smollm2_greedy.json", {**origin, "num_new_tokens": NUM_NEW_TOKENS, "min_lead": MIN_LEAD}, cases)
    tokens = [{"text": text, "ids": tokenizer(text).input_ids} for text in (*TOKEN_TEXTS, *texts.values())]
    chats = [
        {
            "messages": messages,
            "add_generation_prompt": asks,
            "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=asks)["input_ids"],
        }
        for messages in CHATS
        for asks in (False, True)
    ]
    write("smollm2_tokens.json", {**origin, "chats": chats}, tokens)


def prompt_streams(tokenizer: Any, texts: dict[str, str]) -> list[list[int]]:
    """Gives a long row of ids for each text: itself, then the others, to cut any length from."""
    ids = [tokenizer(text).input_ids for text in texts.values()]
    return [list(chain(*ids[first:], *ids[:first])) for first in range(len(ids))]


def find_case(model: Any, streams: list[list[int]], length: int, index: int) -> dict[str, Any]:
    """Gives the first prompt of `length` ids whose continuation is nowhere close to a tie."""
    for attempt in range(200):
        start = 5 * (attempt // len(streams))
        prompt = streams[(index + attempt) % len(streams)][start : start + length]
        case = greedy(model, prompt)
        if min(case["leads"]) >= MIN_LEAD:
            check_without_cache(model, case)
            print(length, attempt, min(case["leads"]))  # noqa: T201 - a script run by hand
            return case
    raise RuntimeError(f"no prompt of {length} ids has every lead above {MIN_LEAD}")


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    """Decodes greedily with transformers' cache, one token at a time."""
    generated: list[int] = []
    log_probs: list[float] = []
    leads: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    for _ in range(NUM_NEW_TOKENS):
        output = model(inputs, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[0, -1], output.past_key_values
        best, second = logits.topk(2).values.tolist()
        generated.append(int(logits.argmax()))
        log_probs.append(round(float(logits.log_softmax(-1)[generated[-1]]), 5))
        leads.append(round(best - second, 5))
        if leads[-1] < MIN_LEAD:
            break
        inputs = torch.tensor([[generated[-1]]])
    return {"prompt": prompt, "generated": generated, "log_probs": log_probs, "leads": leads}


@torch.inference_mode()
def check_without_cache(model: Any, case: dict[str, Any]) -> None:
    """Holds a case against one forward pass over prompt and continuation, without any cache."""
    prompt, generated = case["prompt"], case["generated"]
    logits = model(torch.tensor([prompt + generated[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    again = logits.log_softmax(-1).gather(1, torch.tensor(generated)[:, None])[:, 0]
    if logits.argmax(-1).tolist() != generated or not torch.allclose(
        again, torch.tensor(case["log_probs"]), atol=2e-4
    ):
        raise RuntimeError(f"with and without cache differ for a prompt of {len(prompt)} ids")


def write(name: str, origin: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """Writes a file, one case a line so that a change of one shows as one."""
    lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
    (FOLDER / name).write_text(f'{json.dumps(origin)[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
