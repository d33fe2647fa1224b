"""Published configs, a manifest of a pair of them, and a bundle."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dflash_aot.cache.arrays import KvShape, PairShapes, state_arrays
from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import SCHEMA, CallCost, Entry, ExecutableAnalysis, Manifest, MemoryUse
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle_spec import DraftModel, TargetModel
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import choose_compiler_options, executable_key
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.signature import ProgramWeights, list_signatures
from dflash_aot.cache.weight_recipe import Placement, WeightRecipe
from tests.executable_stand_in import make_stand_in

CONFIGS, GOLDEN = Path(__file__).parent / "configs", Path(__file__).parents[1] / "golden"
Config = dict[str, Any]


def load_config(name: str) -> Config:
    path = GOLDEN / name / "config.json" if "/" in name else CONFIGS / f"{name}.json"
    return json.loads(path.read_text())


QWEN3_4B, QWEN3_4B_DFLASH_B16 = load_config("Qwen3-4B"), load_config("Qwen3-4B-DFlash-b16")
TARGET_FILE, DRAFT_FILE = Path("qwen3-4b/config.json"), Path("dflash-b16/config.json")
# Only the differences from Qwen3Config(), for a target of the same hidden width and vocabulary.
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 5, "rope_theta": 1000000},
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 151669,
}


@pytest.fixture(scope="session")
def published() -> Callable[[str], Config]:
    return load_config


@pytest.fixture(scope="session")
def rewritten() -> Callable[[str], Config]:
    return lambda name: json.loads((GOLDEN / "alt_configs" / f"{name.replace('/', '.')}.v5.config.json").read_text())


@pytest.fixture
def read_published_target():
    def read(name: str, **changes: object) -> Target:
        return read_target(ConfigFile(TARGET_FILE, {**load_config(name), **changes}))

    return read


@pytest.fixture
def read_published_draft(read_published_target):
    def read(name: str, target: str, **changes: object) -> Draft:
        return read_draft(ConfigFile(DRAFT_FILE, {**load_config(name), **changes}), read_published_target(target))

    return read


@pytest.fixture
def read_changed_target(read_published_target):
    """Reads the facts of Qwen3-4B with changes; transformers writes None for an absent key."""
    return partial(read_published_target, "Qwen3-4B")


@pytest.fixture
def read_changed_draft(read_published_draft):
    """Reads the facts of Qwen3-4B's draft with changes; `inner` are changes inside dflash_config."""

    def read(inner: Config | None = None, **changes: object) -> Draft:
        section = {**QWEN3_4B_DFLASH_B16["dflash_config"], **(inner or {})}
        return read_published_draft("Qwen3-4B-DFlash-b16", "Qwen3-4B", **{"dflash_config": section, **changes})

    return read


@pytest.fixture
def read_changed_speculators(read_published_target):
    """Reads the facts of a speculators draft for Qwen3-8B with changes; `layers` are changes of the layer config."""

    def read(layers: Config | None = None, **changes: object) -> Draft:
        diff = {**SPECULATORS["transformer_layer_config"], **(layers or {})}
        config = {**SPECULATORS, "transformer_layer_config": diff, **changes}
        return read_draft(ConfigFile(DRAFT_FILE, config), read_published_target("Qwen3-8B"))

    return read


@pytest.fixture
def refusal():
    """Returns the message of the BadCheckpoint that a reader raises for its arguments."""

    def read(reader: Callable[..., object], *args: object, **changes: object) -> str:
        with pytest.raises(BadCheckpoint) as refused:
            reader(*args, **changes)
        return str(refused.value)

    return read


@pytest.fixture
def write_config(tmp_path):
    def write(content: object) -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return write


@pytest.fixture(scope="session")
def environment() -> Environment:
    return Environment(
        jax="0.10.2",
        jaxlib="0.10.2",
        libtpu="",
        platform="cpu",
        platform_version="<unknown>",
        device_kind="cpu",
        topology="",
        device_count=1,
        hosts=1,
        coordinates=("0",),
        machine="x86_64",
        cpu_features=("avx2", "fma", "sse4_2"),
        xla_flags="",
        libtpu_init_args="",
    )


@pytest.fixture(scope="session")
def blobs() -> list[bytes]:
    return [make_stand_in(bytes([seed]) * (85 + seed)) for seed in range(7)]


@pytest.fixture(scope="session")
def texts(blobs) -> list[bytes]:
    return [b"module " + blob for blob in blobs]


@pytest.fixture(scope="session")
def manifest(environment, blobs, texts) -> Manifest:
    """A complete manifest; its executables are `blobs`, its programs `texts`."""
    target = read_target(ConfigFile(TARGET_FILE, QWEN3_4B))
    draft = read_draft(ConfigFile(DRAFT_FILE, QWEN3_4B_DFLASH_B16), target)
    grid = parse_grid("batch=1 length=32 k=0,3 prefill=16", draft.block)
    pair = PairShapes(
        target_kv=KvShape(36, 8, 128),
        draft_kv=KvShape(5, 8, 128),
        feature_width=5 * 2560,
        block=16,
        vocab=151936,
        dtype="bfloat16",
    )
    placement = Placement("fc.weight", stored=(2560, 12800), offset=(0, 0), extent=(2560, 12800))
    weights = (WeightRecipe("draft.fc.weight", "draft", (2560, 12800), "bfloat16", (placement,)),)
    names = ProgramWeights(target=(), draft=(), context=("draft.fc.weight",))
    entries = tuple(
        Entry(
            **structs.asdict(pack_blob(blob)[0]),
            signature=signature,
            key=executable_key(text, signature, environment),
            program=pack_blob(text)[0],
            seconds=0.5,
            memory=MemoryUse(arguments=5, outputs=4, aliased=3, temporaries=2, code=1),
            cost=CallCost(flops=2.0, bytes_accessed=1.0),
            compiler_options=choose_compiler_options(environment, signature.program),
            analysis=ExecutableAnalysis(layouts={}, copies=(), collectives={}, donated=(), largest=""),
        )
        for signature, blob, text in zip(list_signatures(pair, grid, names), blobs, texts, strict=True)
    )
    return Manifest(
        schema=SCHEMA,
        environment=environment,
        target=TargetModel("Qwen/Qwen3-4B", target),
        draft=DraftModel("z-lab/Qwen3-4B-DFlash-b16", draft),
        dtype="bfloat16",
        sampling=("greedy",),
        grid=grid,
        state=state_arrays(pair, grid),
        weights=weights,
        entries=entries,
    )


@pytest.fixture(scope="session")
def find(manifest, texts) -> Callable[[Store, Entry], Entry | None]:
    programs = {entry.key: text for entry, text in zip(manifest.entries, texts, strict=True)}
    return lambda store, entry: store.find(entry.key, entry.signature, programs[entry.key])


@pytest.fixture
def store(tmp_path, manifest, blobs, texts):
    store = Store(tmp_path / "bundle")
    with store.open_for_building():
        for entry, blob, text in zip(manifest.entries, blobs, texts, strict=True):
            store.add(entry, pack_blob(blob)[1], pack_blob(text)[1])
        store.publish(manifest)
    return store
