"""The exact tokens of an output, beside its text: what trainers read, by upstream's names and vLLM's."""

from megallm.core_async.messages import Completion
from megallm.http.answers.log_probs import finite


def token_fields(completion: Completion, *, returns_token_ids: bool = False) -> dict[str, object]:
    """Gives the fields of one choice that say which tokens it has and which weights they come from.

    `returns_token_ids`: also by the name that vLLM gives them.
    """
    fields: dict[str, object] = {"generation_token_ids": completion.token_ids}
    if completion.log_probs is not None:
        fields["generation_log_probs"] = [finite(each) for each in completion.log_probs]
    if returns_token_ids:
        fields["token_ids"] = completion.token_ids
    if completion.policy_epoch is not None:
        fields["policy_epoch"] = completion.policy_epoch
        fields["kv_cache_epoch"] = completion.kv_cache_epoch
    fields["num_evictions"] = completion.num_preemptions
    return fields


def ending_fields(completion: Completion) -> dict[str, object]:
    """Gives the fields of the chunk that ends a streamed choice: the whole output once more."""
    return {
        **token_fields(completion),
        "generated_text": completion.text,
        "generated_length": len(completion.token_ids),
    }
