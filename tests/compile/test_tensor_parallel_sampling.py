"""Sampled rounds and scored prompts on several CPU devices give what one device gives."""

import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.model_config.architecture import AttentionShape, BlockConvolution, CandidateSelector
from tests.compile.quick import QUICK

DEVICES = 4
DFLASH2 = {"convolution": BlockConvolution(kernel=2, group=4), "selector": CandidateSelector(8, candidates=6)}
# Run in a process of its own: the number of CPU devices is set before JAX starts.
SERVE = """
import json, sys
import jax, msgspec, numpy as np
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.cache.devices import make_mesh
from dflash_aot.compile.programs import sampling
from dflash_aot.compile.programs.lowering import input_arrays, jit_program
from dflash_aot.compile.programs.programs import Programs

target, draft = msgspec.json.decode(sys.stdin.read(), type=tuple[Target, Draft])
grid, vocab = parse_grid("batch=3 length=32 k=3 prefill=16", draft.block), target.decoder.vocab
ASKED = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 11, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.4},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
)

KINDS = ("greedy", "sample", "prompt_logprobs")
sampling.SCORED_ROWS = 5  # four groups of a chunk, the last one with padding

class Server:
    def __init__(self, devices):
        self.devices = jax.devices()[:devices]
        self.programs = Programs(target, draft, "float32", devices=devices, sampling=KINDS)
        self.signatures = {one.label: one for one in self.programs.list_signatures(grid)}
        self.known, self.jitted = self.programs.arrays_by_name(grid), {}
        rng = np.random.default_rng(3)
        self.arrays = {array.name: np.zeros(array.shape, array.dtype) for array in self.known.values()}
        for recipe in self.programs.recipes():
            noise = rng.standard_normal(recipe.shape, np.float32)
            self.arrays[recipe.name] = 1 + noise / 4 if "norm" in recipe.name else noise / 2

    def run(self, label, **arguments):
        signature = self.signatures[label]
        if label not in self.jitted:
            function = self.programs.function(signature)
            self.jitted[label] = jit_program(signature, function, self.known, make_mesh(self.devices))
        given = {one.name: np.array(arguments[one.name], one.dtype) for one in signature.arguments}
        held = (*signature.weights, *signature.state)
        outputs = self.jitted[label](*(self.arrays[name] for name in held), *given.values())
        self.arrays.update(zip(signature.donated, outputs))
        return {one.name: np.asarray(array) for one, array in zip(signature.results, outputs[len(signature.donated):])}

    def admit(self, slot, asked):
        prompt = [(7 * slot + 3 * place) % 40 for place in range(6)]
        at, padded = {"pages": grid.separate_tables([slot]), "starts": [0]}, [*prompt[:-1], *[0] * 11]
        given = {"tokens": [padded], "slots": [slot], "counts": [5], "gives_first": [False]}
        found = self.run("prefill prefill=16 length=32", **given, **at)
        self.run("kv_write rows=1 width=16", features=found["features"], **at)
        columns, tokens = {**NEUTRAL_SAMPLING, **asked}, np.arange(vocab)
        self.run(
            "admit", slots=[slot], starts=[5], anchor=[prompt[-1]],
            slot_sampling=[[columns[name] for name in SAMPLING_COLUMNS]], slot_seeds=[[5, slot]],
            slot_bias=np.sin(tokens)[None], slot_prompted=np.isin(tokens, prompt)[None],
            slot_counts=(tokens % 3)[None], slot_tops=[1],  # as of an answer that goes on
        )

    def score(self):
        tokens, starts = np.arange(1, 18)[None] * 5 % 40, {"slots": [2], "starts": [0], "counts": [16]}
        found = self.run(
            "scored_prefill prefill=16 length=32", pages=grid.separate_tables([0]),
            tokens=tokens[:, :-1], next_tokens=tokens[:, 1:], gives_first=[True], **starts,
        )
        return {name: array.tolist() for name, array in found.items() if name != "features"}

    def round(self):
        pages = {"pages": grid.separate_tables(range(3))}
        drafted = self.run("draft batch=3 length=32 k=3", **pages, sampled=[True], penalised=[True])
        found = self.run("sampled_verify batch=3 length=32 k=3", **pages, **drafted, active=[True] * 3)
        self.run("kv_write rows=3 width=4", **pages, features=found["features"], starts=found["starts"])
        verdict = found["verdict"]
        return {
            "tokens": verdict[:, :8].tolist(),
            "logprobs": verdict[:, 8:].view(np.float32).tolist(),
            "top_tokens": found["top_tokens"].tolist(),
            "top_logprobs": found["top_logprobs"].tolist(),
        }

def serve(devices):
    server = Server(devices)
    for slot, asked in enumerate(ASKED):
        server.admit(slot, asked)
    rounds = [server.round() for _ in range(4)]
    server.run("move", source=[1], destination=[0])
    rounds.append(server.round())
    state = {name: np.asarray(server.arrays[name]).tolist() for name in ("lengths", "anchors", "counts", "prompted")}
    return {"rounds": rounds, "state": state, "scores": server.score()}

print(json.dumps({devices: serve(devices) for devices in (1, 4)}))
"""


@pytest.fixture(scope="module")
def served(small_pair):
    wide = {"attention": AttentionShape(heads=8, kv_heads=4, head_dim=8)}
    target, draft = (structs.replace(model, decoder=structs.replace(model.decoder, **wide)) for model in small_pair)
    models = target, structs.replace(draft, **DFLASH2)
    flags = {"xla_force_host_platform_device_count": DEVICES, **QUICK}
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        input=msgspec.json.encode(models).decode(),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_several_devices_choose_what_one_device_chooses(served):
    alone, together = served["1"], served["4"]
    assert together["state"] == alone["state"]
    for one, other in zip(alone["rounds"], together["rounds"], strict=True):
        assert (other["tokens"], other["top_tokens"]) == (one["tokens"], one["top_tokens"])
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(other[name], one[name], atol=1e-4)
    tokens = {token for one in alone["rounds"] for row in one["tokens"] for token in row[1:]}
    assert len(tokens) > 20 and np.sum(alone["state"]["counts"]) > 15
    assert np.ptp([one["logprobs"][0][0] for one in alone["rounds"]]) > 0.1
    alone, together = served["1"]["scores"], served["4"]["scores"]
    assert (together["first"], together["top_tokens"]) == (alone["first"], alone["top_tokens"])
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(together[name], alone[name], atol=1e-4)
    assert np.ptp(alone["logprobs"]) > 1
