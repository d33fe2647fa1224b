"""The embedded pair: format and size of its checkpoints, and its acceptance."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.model_config.architecture import AttentionShape, Decoder, DenseMlp, Target
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.runtime import Engine, SamplingParams

TRAINING = Path(__file__).parents[1] / "examples/embedded_pair"
# In the style of the standard library, but in none of its files.
PROMPTS = (
    "class Counter:\n    def __init__(self, start=0):\n        self.value = start\n\n    def increment(self):\n",
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file as a list."""\n    with open(',
    "import os\nimport sys\n\n\ndef main(argv=None):\n    if argv is None:\n",
)


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Path]:
    return {role: locate_checkpoint(EMBEDDED, role) for role in ("target", "draft")}


def test_embedded_pair_has_published_formats_and_a_chat_template(checkpoints):
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


# -- the training script


def train(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TRAINING / "train.py", *flags], capture_output=True, text=True, check=False)


def test_other_settings_than_those_of_the_first_run_are_refused(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"hidden": 384, "seed": 3}))
    done = train(f"--out={tmp_path}", "--seed=4")
    assert done.returncode == 1
    assert done.stderr.endswith("have other settings: --seed 4 instead of 3. Choose another --out\n")


@pytest.fixture
def script(monkeypatch):
    """Name → a module of the training script."""
    monkeypatch.syspath_prepend(str(TRAINING))
    return importlib.import_module


def test_training_and_generation_see_the_same_tokens(script):
    """Token by token with kv, and in one causal pass: several kv heads, so that no axis is taken for another."""
    rollouts, training = script("rollouts"), script("target_training")
    attention = AttentionShape(heads=6, kv_heads=3, head_dim=16)
    decoder = Decoder(3, 96, DenseMlp(128), attention, Rope(10000.0, 16), 1e-6, vocab=64, positions=512)
    target = AbstractModel(lambda: CausalLM(Target(decoder, tied=False), LayerForm("float32")))
    weights = script("optimize").init_weights(target.shapes(), decoder.layers, seed=0)
    stream = np.random.default_rng(1).integers(0, decoder.vocab, 4096)
    ids = rollouts.roll_out(target, weights, stream, rollouts.BATCH, seed=2)
    model, positions = target.bind(weights), np.broadcast_to(np.arange(rollouts.WIDTH), ids.shape)
    x, _, _ = model.forward(ids, positions, (0,), None, training.causal)
    following = np.argmax(model.logits(x), axis=-1)
    np.testing.assert_array_equal(following[:, rollouts.PROMPT - 1 : -1], ids[:, rollouts.PROMPT :])
    changes = np.diff(ids[:, rollouts.PROMPT - 1 :]) != 0
    assert changes.any(axis=1).mean() > 0.9  # otherwise the last token alone would decide
