"""Writes checkpoints of both models in their published formats: weights, configs, tokenizer."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from dflash_aot.cache.model_config.architecture import Decoder, Draft, Target
from dflash_aot.cache.weight_recipe import WeightRecipe

from corpus import END, END_TURN, MASK, START_TURN
from optimize import Weights

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + START_TURN
    + "{{ message['role'] }}\n{{ message['content'] }}"
    + END_TURN
    + "\n"
    "{% endfor %}{% if add_generation_prompt %}" + START_TURN + "assistant\n{% endif %}"
)


def save_weights(path: Path, weights: Weights, recipes: tuple[WeightRecipe, ...]) -> None:
    """Splits each parameter into its checkpoint tensors and saves them in bfloat16."""
    tensors = {}
    for recipe in recipes:
        array = np.asarray(weights[recipe.name.partition(".")[2]].astype(jnp.bfloat16))
        for part in recipe.placements:
            region = tuple(
                slice(start, start + size)
                for start, size in zip(part.offset, part.extent, strict=True)
            )
            tensors[part.tensor] = np.ascontiguousarray(array[region].reshape(part.stored))
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def decoder_config(decoder: Decoder) -> dict:
    """The config fields that target and draft share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": decoder.attention.head_dim,
        "hidden_act": "silu",
        "hidden_size": decoder.hidden,
        "initializer_range": 0.02,
        "intermediate_size": decoder.mlp.width,
        "layer_types": ["full_attention"] * decoder.layers,
        "max_position_embeddings": decoder.positions,
        "max_window_layers": decoder.layers,
        "model_type": "qwen3",
        "num_attention_heads": decoder.attention.heads,
        "num_hidden_layers": decoder.layers,
        "num_key_value_heads": decoder.attention.kv_heads,
        "rms_norm_eps": decoder.epsilon,
        "rope_scaling": None,
        "rope_theta": decoder.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": decoder.vocab,
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_target(
    path: Path,
    target: Target,
    weights: Weights,
    recipes: tuple[WeightRecipe, ...],
    tokenizer: Tokenizer,
) -> None:
    """Writes a Qwen3ForCausalLM directory with its tokenizer."""
    save_weights(path, weights, recipes)
    end = tokenizer.token_to_id(END)
    ends = {"bos_token_id": end, "eos_token_id": end}
    write_json(
        path / "config.json",
        {"architectures": ["Qwen3ForCausalLM"], **decoder_config(target.decoder), **ends},
    )
    write_json(
        path / "generation_config.json",
        {"do_sample": False, **ends, "eos_token_id": [end, tokenizer.token_to_id(END_TURN)]},
    )
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END,
            "mask_token": MASK,
            "clean_up_tokenization_spaces": False,
            "model_max_length": target.decoder.positions,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def save_draft(
    path: Path,
    draft: Draft,
    target_layers: int,
    weights: Weights,
    recipes: tuple[WeightRecipe, ...],
) -> None:
    """Writes a directory of z-lab's DFlashDraftModel or DFlash2DraftModel, or SpecForge's of a DSpark draft."""
    save_weights(path, weights, recipes)
    inner = {"mask_token_id": draft.mask_token, "target_layer_ids": list(draft.target_layer_ids)}
    if draft.convolution and draft.heads.selector:
        inner |= {
            "conv_kernel_size": draft.convolution.kernel,
            "conv_group_size": draft.convolution.group,
        }
        inner |= {
            "selector_rank": draft.heads.selector.rank,
            "selector_top_k": draft.heads.selector.candidates,
        }
    if draft.heads.markov:
        inner |= {"projector_type": "dspark", "markov_rank": draft.heads.markov.rank}
        inner |= {"markov_head_type": "vanilla"}
    config = {
        "architectures": [f"{draft.generation}DraftModel"],
        **decoder_config(draft.decoder),
        "block_size": draft.block,
        "dflash_config": inner,
        "num_target_layers": target_layers,
    }
    write_json(path / "config.json", config)
