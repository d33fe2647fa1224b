"""Quantized checkpoints: formats of published configs, refusals, and lists of modules that stay unquantized."""

import copy
import json
from pathlib import Path

import pytest

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.quantization import plan_conversion, read_quantization
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.model_config.tensor_names import ModulePatterns, compile_patterns, names_any

PATH = Path("qwen3-4b/config.json")
FILE = f"{PATH}: quantization_config."
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS, "output_activations": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
SUPPORTED = "supported are 'fp8' with weight_block_size, 'mxfp4', and 'compressed-tensors' with symmetric int8 weights"
LAYER = "model.layers.3"
MODULES = ["lm_head", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj", f"{LAYER}.self_attn.q_proj"]


@pytest.fixture
def read_section(published):
    def read(section, key="quantization_config"):
        return read_quantization(ConfigFile(PATH, {**published("Qwen3-4B"), key: section}))

    return read


def change(section, path, value):
    section = copy.deepcopy(section)
    *outer, last = path.split(".")
    place = section
    for step in outer:
        place = place[step]
    place[last] = value
    return section


def test_published_format_is_read(published):
    for name, encoding, block, exact in [
        ("Qwen3-8B", None, None, None),
        ("Qwen3-8B-FP8", "fp8-blocks", (128, 128), False),
        ("Qwen3-30B-A3B-FP8", "fp8-blocks", (128, 128), False),
        ("Qwen3.5-27B-FP8", "fp8-blocks", (128, 128), False),
        ("Llama-3.1-8B-Instruct-quantized.w8a8", "int8-channels", None, True),
        ("Llama-3.1-8B-Instruct-quantized.w8a16", "int8-channels-packed", None, True),
    ]:
        config = ConfigFile(PATH, published(name))
        found = read_quantization(config)
        if encoding is None:
            assert found is None
        else:
            assert (found.encoding, found.block, found.exact) == (encoding, block, exact)


def test_facts_do_not_depend_on_the_format(read_published_target):
    for name, same in [
        ("Qwen3-8B-FP8", "Qwen3-8B"),
        ("Qwen3.5-27B-FP8", "Qwen3.5-27B"),
        ("Llama-3.1-8B-Instruct-quantized.w8a8", "Llama-3.1-8B-Instruct"),
    ]:
        assert read_published_target(name) == read_published_target(same)


def test_published_fp8_lists_name_routers_and_decays(published):
    found = read_quantization(ConfigFile(PATH, published("Qwen3-30B-A3B-FP8")))
    assert found.unquantized.select(MODULES) == {"lm_head", f"{LAYER}.mlp.gate"}
    found = read_quantization(ConfigFile(PATH, published("Qwen3.5-27B-FP8")))
    layer = "model.language_model.layers.2"
    floats = {f"{layer}.linear_attn.in_proj_a", f"{layer}.linear_attn.in_proj_b", "lm_head"}
    assert found.unquantized.select({*floats, f"{layer}.linear_attn.in_proj_qkv", f"{layer}.mlp.up_proj"}) == floats


def test_other_method_is_refused_with_what_is_supported(read_section, refusal):
    for section, words in [
        ({"quant_method": "awq", "bits": 4}, f"quant_method is 'awq': AWQ is not supported; {SUPPORTED}"),
        ({"quant_method": "gptq_marlin"}, f"quant_method is 'gptq_marlin': GPTQ is not supported; {SUPPORTED}"),
        ({"quant_method": "modelopt"}, "quant_method is 'modelopt': ModelOpt (NVFP4 or FP8 per tensor) is not"),
        ({"quant_method": "exl3"}, f"quant_method is 'exl3': the method is not supported; {SUPPORTED}"),
        ({}, "quant_method is missing; expected a text"),
    ]:
        assert (FILE + words) in refusal(read_section, section)


def test_other_fp8_is_refused(read_section, refusal):
    for path, value, words in [
        ("weight_block_size", None, "weight_block_size is None: FP8 with a scale per tensor is not supported"),
        ("weight_block_size", [128], "weight_block_size is [128]: expected two numbers"),
        ("weight_block_size", [0, 128], "weight_block_size is [0, 128]: expected two numbers"),
        ("activation_scheme", "static", "activation_scheme is 'static': supported: 'dynamic'"),
        ("fmt", "e5m2", "fmt is 'e5m2': supported: 'e4m3'"),
        ("scale_fmt", "ue8m0", "scale_fmt is 'ue8m0': supported: 'float'"),
        ("expert_dtype", "fp4", "expert_dtype is 'fp4': supported: 'fp8'"),
        ("modules_to_convert", ["model.embed_tokens"], "modules_to_convert is ['model.embed_tokens']: not supported"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is {'num_bits': 8}: not supported"),
        ("weight_per_tensor", True, "weight_per_tensor is True: not supported"),
        ("modules_to_not_convert", ["model.*"], "modules_to_not_convert is 'model.*': expected names of modules"),
        ("weight_scale_fmt", "x", "weight_scale_fmt is 'x': this key is not supported"),
    ]:
        message = refusal(read_section, change(FP8, path, value))
        assert (FILE + words) in message and SUPPORTED in message


def test_other_group_of_compressed_tensors_is_refused(read_section, refusal):
    for path, value, words in [
        ("weights.num_bits", 4, "weights.num_bits is 4: int4 (W4A16) is not supported"),
        ("weights.type", "float", "weights.type is 'float': supported: 'int'"),
        ("weights.strategy", "group", "weights.strategy is 'group': supported: 'channel'"),
        ("weights.symmetric", False, "weights.symmetric is False: supported: True"),
        ("weights.group_size", 128, "weights.group_size is 128: supported: -1"),
        ("weights.actorder", "group", "weights.actorder is 'group': supported: False, 'weight', 'static'"),
        ("weights.block_structure", [128, 128], "weights.block_structure is [128, 128]: not supported"),
        ("weights.rotation", 1, "weights.rotation is 1: this key is not supported"),
        ("input_activations.strategy", "tensor", "input_activations.strategy is 'tensor': supported: 'token'"),
        ("input_activations.dynamic", False, "input_activations.dynamic is False: supported: True"),
        ("output_activations", {"num_bits": 8}, "output_activations is {'num_bits': 8}: not supported"),
        ("targets", ["re:.*proj"], "targets is ['re:.*proj']: only ['Linear'] is supported"),
        ("format", "float-quantized", "format is 'float-quantized': FP8 per channel or per tensor is not supported"),
    ]:
        section = change(COMPRESSED, f"config_groups.group_0.{path}", value)
        message = refusal(read_section, section)
        assert (f"{FILE}config_groups.group_0.{words}") in message and SUPPORTED in message


def test_other_compressed_tensors_is_refused(read_section, refusal):
    for path, value, words in [
        ("config_groups", {}, "config_groups is {}: expected one group"),
        ("config_groups", {"a": GROUP, "b": GROUP}, ": expected one group"),
        ("config_groups", {"W8A8": ["Linear"]}, "config_groups.W8A8 is ['Linear']: expected an object"),
        ("format", "dense", "format is 'dense': supported: 'int-quantized', 'naive-quantized', 'pack-quantized'"),
        ("format", "nvfp4-pack-quantized", "format is 'nvfp4-pack-quantized': NVFP4 is not supported"),
        ("format", "mixed-precision", "format is 'mixed-precision': a mixture of formats is not supported"),
        ("quantization_status", "calibration", "quantization_status is 'calibration': supported: 'compressed'"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format is 'sparse-24-bitmask'"),
        ("transform_config", {"R1": {}}, "transform_config is {'R1': {}}: not supported"),
        ("ignore", "lm_head", "ignore is 'lm_head': expected a list"),
        ("ignore", ["re:(?!lm_head)"], "ignore is 're:(?!lm_head)': not a regular expression that is matched in"),
        ("ignore", ["re:" + "x" * 2000], "expected at most 1024 characters in a pattern"),
        ("ignore", ["re:x"] * 65, "expected at most 64 patterns"),
        ("bits", 8, "bits is 8: this key is not supported"),
    ]:
        message = refusal(read_section, change(COMPRESSED, path, value))
        assert message.startswith(FILE)
        assert words in message and SUPPORTED in message


def test_unsupported_format_is_refused_with_the_facts(read_changed_target, read_changed_draft, refusal):
    for read in (read_changed_target, read_changed_draft):
        assert "quant_method is 'gptq'" in refusal(read, quantization_config={"quant_method": "gptq"})


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_file_of_another_tool_is_refused(write_config, published, file):
    directory = write_config(json.dumps(published("Qwen3-4B")))
    (directory / file).write_text("{}")
    with pytest.raises(BadCheckpoint, match=rf"{file}: this checkpoint is quantized by "):
        read_quantization(read_config(directory))


def test_variant_with_the_same_meaning_is_accepted(read_section):
    for path, value in [
        ("config_groups.group_0.input_activations", None),
        ("config_groups.group_0.weights.group_size", -1),
        ("config_groups.group_0.format", "naive-quantized"),
        ("quantization_status", "frozen"),
        ("ignore", None),
        ("sparsity_config", {}),
        ("version", "0.18.0"),
    ]:
        assert read_section(change(COMPRESSED, path, value)).encoding == "int8-channels"


def test_format_of_the_group_precedes(read_section):
    section = change({**COMPRESSED, "format": "mixed-precision"}, "config_groups.group_0.format", "pack-quantized")
    assert read_section(section).encoding == "int8-channels-packed"


def test_conversion_says_whether_numbers_are_rounded(read_section):
    for section, weights, exact, summary in [
        (COMPRESSED, "int8", True, "int8 with a scale per output channel are kept"),
        (COMPRESSED, "bfloat16", False, "are multiplied out to bfloat16, rounded"),
        (FP8, "int8", False, "128 x 128 block become int8 with a scale per output channel, rounded"),
        (FP8, "float32", True, "FP8 with a scale per 128 x 128 block are multiplied out to float32"),
    ]:
        conversion = plan_conversion(read_section(section), weights, "bfloat16", [])
        assert conversion.exact == exact
        assert conversion.summary.endswith(summary)


def test_conversion_names_layers_that_stay_floats(read_section):
    for unquantized, dtype, exact, summary in [
        ([], "bfloat16", False, "are kept; those of in_proj_a and in_proj_b are multiplied out to bfloat16, rounded"),
        ([], "float32", True, "are kept; those of in_proj_a and in_proj_b are multiplied out to float32"),
        (["re:.*in_proj_a$"], "bfloat16", False, "those of in_proj_b are multiplied out to bfloat16, rounded"),
        (["model.language_model.layers.0.linear_attn.in_proj_a", "re:.*_b$"], "bfloat16", True, "channel are kept"),
        (["model.layers.0.linear_attn.in_proj_ba"], "bfloat16", True, "channel are kept"),  # both, as in Qwen3-Next
    ]:
        section = change(COMPRESSED, "ignore", unquantized)
        layers = [f"model.layers.0.linear_attn.in_proj_{name}" for name in "ab"]
        conversion = plan_conversion(read_section(section), "int8", dtype, layers)
        assert conversion.exact == exact
        assert conversion.summary.endswith(summary)


def test_list_may_name_experts_that_are_one_tensor():
    modules = [f"model.layers.0.mlp.experts.3.{name}_proj" for name in ("gate", "up", "down")]
    for listed, named in [("experts.gate_up_proj", True), ("experts.down_proj", True), ("gate_up_proj", False)]:
        patterns = ModulePatterns("ignore", frozenset([f"model.layers.0.mlp.{listed}"]))
        assert names_any(patterns, modules, "target") == named


def test_section_of_the_text_model_is_read(published):
    for key in ["quantization_config", "compression_config"]:
        config = published("Qwen3.5-4B")
        config["text_config"] = {**config["text_config"], key: FP8}
        assert read_quantization(ConfigFile(PATH, config)).encoding == "fp8-blocks"
        config["text_config"][key] = {"quant_method": "awq"}
        with pytest.raises(BadCheckpoint, match=rf"text_config.{key}.quant_method is 'awq': AWQ is not supported"):
            read_target(ConfigFile(PATH, config))
        with pytest.raises(BadCheckpoint, match=rf"text_config.{key} is .*: there is a quantization_config too"):
            read_quantization(ConfigFile(PATH, {**config, "quantization_config": FP8}))


def test_compressed_tensors_matches_whole_names_and_patterns(published):
    for entries, selected in [
        (["lm_head"], {"lm_head"}),
        ([f"{LAYER}.mlp"], set()),
        (["re:.*mlp.gate$"], {f"{LAYER}.mlp.gate"}),
        (["re:.*mlp.gate"], {f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj"}),
        (["re:a|lm"], {"lm_head"}),
    ]:
        assert make_patterns(published, entries, parts=False).select(MODULES) == selected


def test_fp8_matches_names_up_to_a_boundary(published):
    for entries, selected in [
        (["gate"], {f"{LAYER}.mlp.gate"}),
        (["mlp.gate_proj"], {f"{LAYER}.mlp.gate_proj"}),
        (["model.layers.3.mlp"], {f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj"}),
        (["model.layers.1", "proj", "head"], set()),
    ]:
        assert make_patterns(published, entries, parts=True).select(MODULES) == selected


def make_patterns(published, entries, parts) -> ModulePatterns:
    return compile_patterns(ConfigFile(PATH, published("Qwen3-4B")), "ignore", entries, parts)


def test_pattern_is_matched_in_linear_time(published):
    """Python's `re` would not come back from the first name."""
    assert not make_patterns(published, ["re:(.*)*(.+)+(a|a)*!"], parts=False).select(["a" * 200] * 100)
