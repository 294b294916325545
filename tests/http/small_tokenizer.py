"""A byte-level tokenizer of the fake model's 97 ids, which can go to another process as a real one."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megallm.models.base_tokenizer import SpecialIds
from megallm.models.tokenizer import ByteLevelTokenizer
from tests.fakes import VOCAB_SIZE

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
)


def small_tokenizer() -> ByteLevelTokenizer:
    """Gives one token for each printable ASCII character, and one that ends a text, the last."""
    symbols = [
        "\u0120",
        *map(chr, range(33, 127)),
        "\u010a",
    ]  # a blank and a line's end, as GPT-2 spells them
    vocab = {symbol: token_id for token_id, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], fuse_unk=False, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False, special=True)])  # pyright: ignore[reportUnknownMemberType] - no types
    assert backend.get_vocab_size() == VOCAB_SIZE, backend.get_vocab_size()
    return ByteLevelTokenizer(
        backend, special_ids=SpecialIds(eos=VOCAB_SIZE - 1), chat_template=TEMPLATE, path="small"
    )
