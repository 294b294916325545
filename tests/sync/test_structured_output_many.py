"""Many outputs of many JSON schemas, sampled at temperature 1: each parses, and each is of its schema."""

import json
from typing import Any

import jsonschema

from megallm import MegatronLLM, SamplingParams

SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 10},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
        },
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    },
    "a list of choices": {
        "type": "array",
        "items": {"enum": ["red", "green", "blue", 7, None]},
        "minItems": 1,
        "maxItems": 4,
    },
    "nested, by reference": {
        "$defs": {
            "point": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "minimum": 0, "maximum": 99},
                    "y": {"type": "boolean"},
                },
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2}},
        "required": ["points"],
        "additionalProperties": False,
    },
    "a multiple": {"type": "integer", "minimum": -50, "maximum": 50, "multipleOf": 5},
    "a tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"const": "end"}],
        "items": False,
        "minItems": 2,
    },
}


def all_hold(demo_model: tuple[Any, Any], num_prompts: int) -> None:
    """Fails unless each of many outputs is JSON of its schema."""
    model, tokenizer = demo_model
    names = list(SCHEMAS)
    wanted = [SCHEMAS[names[number % len(names)]] for number in range(num_prompts)]
    prompts = [
        f"Write {names[number % len(names)]} as JSON, number {number}:" for number in range(num_prompts)
    ]
    params = [
        SamplingParams(temperature=1.0, seed=number, num_tokens_to_generate=120, json_schema=schema)
        for number, schema in enumerate(wanted)
    ]
    with MegatronLLM(model=model, tokenizer=tokenizer) as llm:
        results = llm.generate(prompts, params)
    for result, schema in zip(results, wanted, strict=True):
        assert result.finish_reason == "stop", result.generated_text
        jsonschema.validate(json.loads(result.generated_text or ""), schema)
    assert len({result.generated_text for result in results}) > len(names), "it does sample"


def test_outputs_of_several_schemas_hold(demo_model: tuple[Any, Any]) -> None:
    """A client parses without looking: one that does not hold in a thousand is an outage."""
    all_hold(demo_model, 7)
