"""The training corpus: the sources of the Python standard library, which every machine with Python has."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, START_TURN, END_TURN, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL = (END, START_TURN, END_TURN, MASK)
# Tests and tables are repetitive and make up most of the bytes.
EXCLUDED = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "__pycache__",
}
HELD_OUT_EVERY = 25  # one of this many files is held out


def source_files() -> list[Path]:
    """Every file of the corpus, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    return sorted(path for path in files if not EXCLUDED & set(path.parts))


def is_held_out(path: Path) -> bool:
    """Decides by the hash of the name, so that other files do not change the split."""
    return hashlib.sha256(path.as_posix().encode()).digest()[0] % HELD_OUT_EVERY == 0


def read_split(held_out: bool) -> list[str]:
    """Texts of the held-out files, or of all other files."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen = [path for path in source_files() if is_held_out(path) == held_out]
    return [(root / path).read_text(encoding="utf-8", errors="replace") for path in chosen]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer: every text round-trips, and no token is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as token ids, each after an end-of-text token: int32 [N]."""
    end = tokenizer.token_to_id(END)
    return np.concatenate(
        [np.asarray([end, *tokenizer.encode(text).ids], np.int32) for text in texts]
    )


def windows(stream: np.ndarray, count: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """`count` random windows of `width` tokens: int32 [count, width]."""
    starts = rng.integers(0, len(stream) - width, count)
    return np.stack([stream[start : start + width] for start in starts])
