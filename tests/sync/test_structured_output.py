"""Structured output through the whole engine, with the demo model."""

import json
from typing import Any

import pytest

from megallm import LifecycleError, MegatronLLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_outputs_are_what_their_grammars_say(demo_model: tuple[Any, Any]) -> None:
    """A client parses them without looking, whatever the temperature and whoever runs beside them."""
    model, tokenizer = demo_model
    prompts = ["A person:", "Another person:", "Yes or no?", "A digit:", "Once upon a time"]
    params = [
        SamplingParams(seed=1, num_tokens_to_generate=60, json_schema=SCHEMA),
        SamplingParams(seed=2, num_tokens_to_generate=60, json_schema=SCHEMA),
        SamplingParams(seed=3, num_tokens_to_generate=8, choice=["yes", "no"], min_tokens=5),
        SamplingParams(seed=4, num_tokens_to_generate=8, regex="[0-9]"),
        SamplingParams(temperature=0.0, num_tokens_to_generate=4),
    ]
    with MegatronLLM(model=model, tokenizer=tokenizer) as llm:
        results = llm.generate(prompts, params)
        alone = llm.generate(prompts[-1], params[-1])
    texts = [result.generated_text or "" for result in results]
    for text in texts[:2]:
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 120
    assert texts[2] in ("yes", "no")
    assert texts[3] in set("0123456789")
    assert texts[4] == alone[0].generated_text


def test_a_model_has_one_engine_at_a_time(demo_model: tuple[Any, Any]) -> None:
    """The second would lose the model when the first is closed; a notebook cell run twice asks for that."""
    model, tokenizer = demo_model
    with (
        MegatronLLM(model=model, tokenizer=tokenizer),
        pytest.raises(LifecycleError, match="another engine runs on this model"),
    ):
        MegatronLLM(model=model, tokenizer=tokenizer)
    with MegatronLLM(model=model, tokenizer=tokenizer) as llm:
        assert llm.generate([1, 2], SamplingParams(num_tokens_to_generate=1))[0].generated_length == 1
