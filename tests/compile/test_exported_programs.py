"""Exported programs and their keys: moving code changes no byte of them.

A change that is meant to change programs records the digests anew, in a commit that says why they changed:
`JAX_PLATFORMS=cpu .venv/bin/python -m tests.compile.test_exported_programs`.

The digests are those of one version of JAX, because versions write other StableHLO. The rest of the machine does not
matter: no XLA_FLAGS, source file or line is in an exported program, and the environment of the keys is made up.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from dflash_aot.cache.bundle_spec import DraftModel, PlannedBundle, Slice, TargetModel
from dflash_aot.cache.chips import TOPOLOGIES
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.sampling_state import SAMPLING_KINDS, SamplingKind
from dflash_aot.cache.weight_recipe import PLAIN, WeightFormats
from dflash_aot.compile.pipeline.deployment import plan_deployment
from dflash_aot.compile.programs.programs import TracedPrograms
from tests.compile.conftest import read_published
from tests.conftest import RUNS

DIGESTS = Path(__file__).with_name("exported_programs.json")
GREEDY: tuple[SamplingKind, ...] = ("greedy",)
SAMPLED: tuple[SamplingKind, ...] = ("greedy", "sample")
ALL = SAMPLING_KINDS
INT8 = WeightFormats("int8", "int8")
GRID = "batch=2 length=64 k=3 prefill=16 rounds=2 page=16"
UNDRAFTED = GRID.replace("k=3", "k=0")
DIGITS = 16
LARGE = "batch=2 length=1024 k=3 prefill=128"  # whose kernels are lowered for a chip


@dataclass(frozen=True)
class Case:
    """What is exported: of a golden pair, or of a published one, for devices."""

    pair: str | tuple[str, ...]
    devices: str
    count: int = 1
    grid: str = GRID
    sampling: tuple[SamplingKind, ...] = GREEDY
    formats: WeightFormats = PLAIN
    programs: tuple[str, ...] = ()  # all of them if none is named

    @property
    def name(self) -> str:
        pair = self.pair if isinstance(self.pair, str) else " with ".join(self.pair)
        weights = " int8" if self.formats == INT8 else ""
        return f"{pair}{weights}, {self.devices} x {self.count}, {','.join(self.sampling)}, {self.grid}"

    def read_pair(self) -> tuple[Target, Draft]:
        if not isinstance(self.pair, str):
            changes = {"hidden_size": 2048, "num_target_layers": 48} if "A3B" in self.pair[0] else {}
            return read_published(*self.pair, **changes)
        run = RUNS[self.pair]
        target = read_target(read_config(run.target))
        return target, read_draft(read_config(run.draft), target)

    def make_environment(self) -> Environment:
        topology = TOPOLOGIES.get(self.devices)
        kind = topology.chip.device_kind if topology else self.devices
        platform = "tpu" if topology else self.devices
        return Environment("1", "1", "1", platform, "", kind, self.devices, self.count, 1, (), "", (), "", "")

    def compute_digests(self) -> dict[str, str]:
        """Of each executable, the first digits of its program's sha256 and of its key."""
        target, draft = self.read_pair()
        topology = TOPOLOGIES.get(self.devices)
        assert topology is None or topology.devices == self.count
        where = Slice.of(self.make_environment())
        spec = PlannedBundle(
            target=TargetModel("", target),
            draft=DraftModel("", draft),
            dtype="float32" if where.platform == "cpu" else "bfloat16",
            sampling=self.sampling,
            grid=parse_grid(self.grid, draft.verified_block),
            weight_formats=self.formats,
            slice=where,
        )
        planned = plan_deployment(spec, topology and topology.chip)
        source = TracedPrograms(planned.programs, spec.grid)
        digests = {}
        for signature in source.signatures:
            if self.programs and signature.program not in self.programs:
                continue
            if signature.bucket.get("k") == 0 and self.grid != UNDRAFTED:
                continue
            program = source.export(signature)
            key = executable_key(program, signature, self.make_environment())
            digests[signature.label] = f"{hashlib.sha256(program).hexdigest()[:DIGITS]} {key[:DIGITS]}"
        return digests


QWEN3 = ("Qwen3-4B", "Qwen3-4B-DFlash-b16")
DFLASH2 = ("Qwen3-8B", "Qwen3-8B-DFlash2-b16")
HYBRID = ("Qwen3.5-4B", "Qwen3.5-4B-DFlash")
EXPERTS = ("Qwen3-30B-A3B", "Qwen3-4B-DFlash-b16")
# Of the golden runs, those with facts of their own, but the pair above.
PAIRS = ("untied", "swa", "flash", "unwindowed", "anchored", "anchored_noncausal", "llama", "llama3rope", "pruned")
PAIRS += ("converted", "softcap", "causal", "dflash2", "dflash2_speculators", "dflash2_sliding", "hybrid_sliding")
DSPARK = ("dspark", "dspark_rank0", "dspark_pruned")
FAMILIES = ("hybrid_experts", "gpt_oss", "gemma", "gemma_experts")
FORWARD = ("prefill", "draft", "verify")
CASES = [
    # every program in every mode, on every kind of device
    Case("tied", "cpu", 1, GRID, ALL),
    Case("tied", "cpu", 2, GRID, ALL, programs=("draft", "kv_write", "constrained_verify")),
    Case("tied", "tpu", 1, UNDRAFTED, ALL, programs=("scored_prefill", "verify", "rounds", "sampled_rounds")),
    Case("tied", "tpu", 2, GRID, SAMPLED),
    Case("tied", "gpu", programs=FORWARD),
    Case("hybrid", "cpu", 1, GRID, SAMPLED, programs=("prefill", "sampled_verify", "move")),
    # every golden pair
    *(Case(pair, "cpu", programs=("draft", "kv_write")) for pair in PAIRS),
    *(Case(pair, "tpu", 2, programs=("draft", "verify")) for pair in PAIRS),
    *(Case(pair, "cpu", programs=("verify",)) for pair in FAMILIES),
    *(Case(pair, "tpu", 2, programs=("verify",)) for pair in FAMILIES),
    Case("gemma", "cpu", 1, GRID, SAMPLED, programs=("prefill", "move")),
    *(Case(pair, "cpu", programs=("draft", "kv_write")) for pair in DSPARK),
    *(Case(pair, "tpu", 2, GRID, SAMPLED, programs=("draft",)) for pair in DSPARK),
    Case("untied", "cpu", formats=INT8, programs=("verify",)),
    Case("pruned", "cpu", formats=INT8, programs=("draft",)),
    # kernels
    Case(QWEN3, "v5e:1x1", 1, LARGE, ALL, programs=("prefill", "draft", "kv_write", "constrained_verify")),
    Case(QWEN3, "v4:1x1x1", 1, LARGE, programs=("verify",)),
    Case(QWEN3, "v6e:1x1", 1, LARGE, formats=INT8, programs=("draft", "verify")),
    Case(DFLASH2, "tpu7x:1x1x1", 2, LARGE, SAMPLED, programs=("draft", "sampled_verify")),
    Case(HYBRID, "v5e:1x1", 1, LARGE, programs=("prefill", "verify")),
    Case(EXPERTS, "v6e:2x2", 4, LARGE, programs=("prefill", "draft", "verify")),
    Case(EXPERTS, "v6e:1x1", 1, LARGE, formats=INT8, programs=("verify",)),
]


def read_recorded() -> dict:
    return json.loads(DIGESTS.read_text())


@pytest.mark.skipif(
    read_recorded()["jax"] != jax.__version__, reason=f"digests were recorded with JAX {read_recorded()['jax']}"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exported_programs_and_keys_are_the_recorded_ones(case):
    assert case.compute_digests() == read_recorded()["digests"][case.name]


def test_every_golden_pair_is_exported():
    def read(pair: str) -> str:
        return repr(Case(pair, "cpu").read_pair())

    exported = {read(case.pair) for case in CASES if isinstance(case.pair, str)}
    assert {read(pair) for pair in RUNS} == exported


if __name__ == "__main__":
    recorded = {case.name: case.compute_digests() for case in CASES}
    DIGESTS.write_text(json.dumps({"jax": jax.__version__, "digests": recorded}, indent=1) + "\n")
