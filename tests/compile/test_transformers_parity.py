"""Our Qwen3 against the one that everybody's checkpoints are saved by."""

import numpy as np
import pytest
import torch
import transformers

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def theirs(request):
    """Random weights, with norms that show; heads · head_dim is not the hidden width, two queries share a head."""
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=request.param,
    )
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) / 4)
    return model


@pytest.fixture(scope="module")
def ours(theirs, load_target, tmp_path_factory):
    """The same model, read from what transformers saves."""
    directory = tmp_path_factory.mktemp("saved")
    theirs.save_pretrained(directory)
    return load_target(directory)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(5).integers(0, 96, 150)


def test_logits_are_those_of_transformers(ours, theirs, tokens):
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)[None]).logits[0].numpy()
    logits, _ = ours.read(tokens, taps=(0, 1))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_a_tap_is_the_hidden_state_behind_its_layer(ours, theirs, tokens):
    with torch.no_grad():
        hidden = theirs(torch.tensor(tokens)[None], output_hidden_states=True).hidden_states
    _, features = ours.read(tokens, taps=(0, 1))
    expected = np.concatenate([hidden[1][0], hidden[2][0]], axis=-1)
    np.testing.assert_allclose(features, expected, rtol=0, atol=TOLERANCE)
