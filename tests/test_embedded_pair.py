"""The embedded pair: format and size of its checkpoints, and its acceptance."""

import json

from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.runtime import Engine, SamplingParams

# In the style of the standard library, but in none of its files.
PROMPTS = (
    "class Counter:\n    def __init__(self, start=0):\n        self.value = start\n\n    def increment(self):\n",
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file as a list."""\n    with open(',
    "import os\nimport sys\n\n\ndef main(argv=None):\n    if argv is None:\n",
)


def test_embedded_pair_has_published_formats_and_a_chat_template():
    checkpoints = {role: locate_checkpoint(EMBEDDED, role) for role in ("target", "draft")}
    target = read_target(read_config(checkpoints["target"]))
    draft = read_draft(read_config(checkpoints["draft"]), target)
    assert draft.decoder.vocab == target.decoder.vocab
    template = json.loads((checkpoints["target"] / "tokenizer_config.json").read_text())
    assert "assistant" in template["chat_template"]
    sizes = [path.stat().st_size for directory in checkpoints.values() for path in directory.iterdir()]
    assert sum(sizes) <= 35_000_000


def test_speculation_keeps_the_text_and_saves_rounds(bundle):
    texts, rounds = {}, {}
    path = bundle("served")
    for k in (0, 7):
        with Engine.open(path, k=k) as engine:
            results = engine.generate_all(PROMPTS, SamplingParams(max_tokens=96, stop_token_ids=()))
        texts[k] = [result.text for result in results]
        rounds[k] = sum(len(result.accepted) for result in results)
    assert texts[0] == texts[7]
    assert all(text.isprintable() or "\n" in text for text in texts[0])
    assert rounds[7] < rounds[0] / 2.5
