"""Self-test of executables: reproducible inputs, and the comparison of records."""

import json
import subprocess
import sys

import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.bundle.manifest import SelfTest, SelfTestOutput, read_manifest
from dflash_aot.cache.bundle.self_test import INPUTS_VERSION, is_comparable
from dflash_aot.runtime.executables.self_test import find_deviations, make_argument, make_state, make_weight

NOISE_ELSEWHERE = """
import json
import numpy as np
from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.runtime.executables.self_test import make_weight
print(json.dumps(make_weight(ArraySpec("target.lm_head.weight", (3, 5), "float32")).tolist()))
"""


def list_signatures(bundle):
    manifest = read_manifest(bundle("sampled"))
    return manifest, [entry.signature for entry in manifest.entries]


def test_inputs_have_the_shapes_and_dtypes_of_every_signature(bundle):
    manifest, signatures = list_signatures(bundle)
    known, vocab = manifest.arrays_by_name(), manifest.target.facts.decoder.vocab
    for signature in signatures:
        made = [(known[name], make_state(known[name], signature, vocab)) for name in signature.state]
        made += [(one, make_argument(one, signature, vocab)) for one in signature.arguments]
        for array, values in made:
            assert (values.shape, str(values.dtype)) == (array.shape, array.dtype), f"{signature.label}: {array.name}"
    for name in {name for signature in signatures for name in signature.weights}:
        values = make_weight(known[name])
        assert (values.shape, str(values.dtype)) == (known[name].shape, known[name].dtype)


def test_positions_stay_inside_their_bucket(bundle):
    manifest, signatures = list_signatures(bundle)
    for signature in signatures:
        for name, bucket_width in (("lengths", "k"), ("starts", "prefill")):
            arrays = [one for one in signature.arguments if one.name == name]
            if name in signature.state:
                arrays.append(manifest.arrays_by_name()[name])
            if "length" not in signature.bucket:
                continue
            for array in arrays:
                make = make_argument if array in signature.arguments else make_state
                width = signature.bucket.get("prefill", signature.bucket.get("k", 0) + 1)
                assert 0 < make(array, signature, 512).max() + width <= signature.bucket["length"], bucket_width


def test_kv_cache_is_empty_where_the_call_writes(bundle):
    manifest, signatures = list_signatures(bundle)
    verify = next(one for one in signatures if one.label == "verify batch=3 length=208 k=7")
    keys = make_state(manifest.arrays_by_name()["target_k"], verify, 512)
    start = int(make_state(manifest.arrays_by_name()["lengths"], verify, 512)[0])
    pool = keys.shape[1] - 1
    (pages,) = (make_argument(one, verify, 512, pool) for one in verify.arguments if one.name == "pages")
    for table in pages:
        row = np.concatenate([keys[:, page] for page in table], axis=2)
        assert np.abs(row[:, :, :start]).min(axis=-1).max() > 0
        assert not row[:, :, start:].any()
    assert not keys[:, 0].any()


def test_noise_is_the_same_in_every_process():
    """SplitMix64's first number from seed 0 is 0xE220A8397B1DCDAF; its upper 24 bits are where the noise begins."""
    found = json.loads(subprocess.run([sys.executable, "-c", NOISE_ELSEWHERE], stdout=subprocess.PIPE).stdout)
    weight = make_weight(ArraySpec("target.lm_head.weight", (3, 5), "float32"))
    assert found == weight.tolist()
    whole = make_weight(ArraySpec("target.lm_head.weight", (1_048_583,), "float32"))
    first = np.float32(0xE220A8 / 2**23 - 1) * np.float32(0.05)
    assert np.flatnonzero(whole == first).size > 0
    assert abs(whole.mean()) < 1e-4 and np.isclose(np.abs(whole).max(), 0.05, rtol=1e-4)


def test_norm_weights_are_near_one_and_maps_zero():
    assert np.isclose(make_weight(ArraySpec("target.model.norm.weight", (10_000,), "float32")).mean(), 1, atol=0.01)
    assert not make_weight(ArraySpec("draft.d2t", (7,), "int32")).any()


def test_transitions_decide_among_tokens():
    """Logits of published widths have a standard deviation near 2."""
    codes = [make_weight(ArraySpec(f"draft.markov_head.markov_w{n}.weight", (500, 256), "float32")) for n in (1, 2)]
    assert (codes[0] @ codes[1].T).std() > 1.9


FLOATS = SelfTestOutput("features", "float32", 100, (1.0, -2.0, 0.5), 1.2)
TOKENS = SelfTestOutput("verdict", "int32", 4, (0.0, 17.0, 3.0, 9.0), 7.25)
GOLDEN = SelfTest(INPUTS_VERSION, (FLOATS, TOKENS))


def deviations(floats=FLOATS, tokens=TOKENS, dtype="float32", **changes):
    return find_deviations(GOLDEN, structs.replace(SelfTest(1, (floats, tokens)), **changes), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_not_a_deviation(dtype):
    share = {"float32": 5e-4, "bfloat16": 0.05}[dtype]
    assert deviations() == []
    rounded = structs.replace(FLOATS, values=(1.0 + share, -2.0, 0.5 - share), mean=1.2 * (1 + share / 2))
    assert deviations(rounded, dtype=dtype) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_different_numbers_are_named(dtype):
    for changes, words in (
        ({"values": (1.0, -2.5, 0.5)}, "features: value 1 of 3 is -2.5, recorded is -2"),
        ({"mean": 1.4}, "features: the mean is 1.4, recorded is 1.2"),
        ({"changed": 50}, "features: 50 numbers were written, recorded are 100"),
    ):
        assert deviations(structs.replace(FLOATS, **changes), dtype=dtype) == [words]


def test_other_token_may_be_a_tie_in_bfloat16_only():
    one, all_ = (structs.replace(TOKENS, values=values) for values in ((0.0, 18.0, 3.0, 9.0), (5.0, 6.0, 7.0, 9.0)))
    words = ["1 of 4 whole numbers differ, the first: verdict is 18, recorded is 17"]
    assert deviations(tokens=one) == words
    assert deviations(tokens=one, dtype="bfloat16") == []
    assert deviations(tokens=all_, dtype="bfloat16") == [
        "3 of 4 whole numbers differ, the first: verdict is 5, recorded is 0"
    ]


def test_record_of_other_inputs_is_not_comparable():
    assert is_comparable(GOLDEN)
    assert not is_comparable(structs.replace(GOLDEN, version=INPUTS_VERSION + 1)) and not is_comparable(None)


def test_other_outputs_are_a_deviation():
    for outputs in ((FLOATS,), (TOKENS, FLOATS), (FLOATS, structs.replace(TOKENS, name="x")), (FLOATS, TOKENS, TOKENS)):
        (words,) = find_deviations(GOLDEN, SelfTest(1, outputs), "float32")
        assert words.startswith("outputs are ") and words.endswith("recorded are features float32, verdict int32")
