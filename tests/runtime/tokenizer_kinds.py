"""Small tokenizers, one of each kind that checkpoints come with. They differ in how tokens become text."""

from collections.abc import Callable
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|end|>"  # a special token of all of them
VOCABULARY = 400
ALPHABET = "ab c\né東京タ🎉🎊👩‍👧e\u0301\x00\ufffd"  # of random texts
CORPUS = [
    "the cat ate the 🎉 at the café, 東京東京タワー 🎉🎊🎉🎊 naïve été\n",
    "a b c aaa bbb abab 東京 👩‍👩‍👧 ok\n",
] * 20
PIECES = ["▁", "▁the", "the", "▁▁", "▁a▁b", "cat", "▁cat", "é", "e", "\u0301", "東", "a", "b", "▁a", "ab", "\ufffd"]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen) that is not split at words: some tokens end or begin inside a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def list_byte_tokens(data: bytes) -> list[int]:
    """The token ids of `data` in the vocabulary of `byte_level`, one per byte."""
    letters = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    rest = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + rank) for rank, byte in enumerate(rest)})
    vocabulary = _byte_level_vocabulary()
    return [vocabulary[letters[byte]] for byte in data]


@cache
def _byte_level_vocabulary() -> dict[str, int]:
    return byte_level().get_vocab()


def byte_fallback() -> tokenizers.Tokenizer:
    """Byte fallback (Gemma): the id of a byte token is the byte; the vocabulary's words include their spaces."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    model = models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([END])
    return backend


def stripped_byte_fallback() -> tokenizers.Tokenizer:
    """Byte fallback (Llama 2) that prepends a space to every text and strips the space when it decodes."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """SentencePiece unigrams (T5): the first token of a text loses its spaces."""
    backend = tokenizers.Tokenizer(models.Unigram([("?", 0.0), *((piece, -1.0) for piece in PIECES)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([END])
    return backend


def word_pieces() -> tokenizers.Tokenizer:
    """WordPiece (BERT): spaces separate words, and do not precede a continuation of a word or a full stop."""
    words = ["?", "the", "##the", "cat", "##s", ".", ",", "n't", "'", "s", "do", "##é", "東", "a", "##a"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: rank for rank, word in enumerate(words)}, unk_token="?"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([END])
    return backend


def split_words() -> tokenizers.Tokenizer:
    """Words without a decoder: a space between any two tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1, "é": 2, "東": 3, "a": 4}, "the"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken(END, special=True)])
    return backend


# Added tokens of published tokenizers: those without text, and those with text.
ADDED_TOKENS = {
    "Qwen3": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"),
        ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<tool_response>", "<think>", "</think>"),
    ),
    "Llama 3.1": (
        ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|reserved_special_token_0|>"),
        (),
    ),
    "Gemma": (
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        ("<mask>", "[multimodal]", "<unused0>", "\n\n", "▁▁", "▁▁▁", "<table>", "</table>", "<h1>"),
    ),
    "gpt-oss": (("<|startoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|message|>", "<|call|>"), ()),
    # Letters of the byte alphabet and white space: GPT-NeoX, Phi, and tokenizers with added words.
    "words": (("<|é|>",), ("  ", "   ", "éé", "Ġx", "ÿ!", "Größe", "\t\t")),
    "tool markers marked special": (("<|im_end|>", "<tool_call>", "</tool_call>"), ("<think>",)),
}


def with_added_tokens(name: str) -> tokenizers.Tokenizer:
    """A small tokenizer with the added tokens of a published one."""
    backend = byte_fallback() if name == "Gemma" else byte_level()
    special, plain = ADDED_TOKENS[name]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return backend


BYTE_KINDS = (byte_level, byte_fallback, stripped_byte_fallback)
KINDS: tuple[Callable[[], tokenizers.Tokenizer], ...] = (*BYTE_KINDS, metaspace, word_pieces, split_words)
