"""Checkpoints and reference numbers that every room's tests share."""

import fcntl
import functools
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import tokenizers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.object_server import SETTINGS, Bucket, ObjectServer

# A loaded machine is no reason to fail: nothing here is about time.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One run: a checkpoint pair and what the reference implementation made of it.

    `key` is its name here. `layout` is the draft's directory where it is not the one of the run: the same weights as
    another version of the library stores them, or with the reading of the windows written down.
    """

    key: str
    directory: Path
    name: str = "golden"
    layout: str | None = None

    @cached_property
    def facts(self) -> dict:
        return json.loads((self.directory / f"{self.name}.json").read_text())

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        return load_file(self.directory / f"{self.name}.safetensors")

    @property
    def target(self) -> Path:
        return (self.directory / self.facts["target_dir"]).resolve()

    @property
    def draft(self) -> Path:
        return self.directory / (self.layout or self.facts["draft_dir"])


LLAMA, SPECULATORS = GOLDEN / "llama-tiny", GOLDEN / "speculators-tiny"
UNTIED, SLIDING = GOLDEN / "qwen3-tiny-untied", GOLDEN / "qwen3-tiny-swa"
RUNS = {
    run.key: run
    for run in (
        Golden("tied", GOLDEN / "qwen3-tiny-tied"),
        Golden("untied", UNTIED),
        Golden("rounded", UNTIED, "golden_bf16_weights_f32_compute"),
        Golden("swa", SLIDING, "golden_swa_causal"),
        Golden("flash", SLIDING, "golden_swa_flash", "draft_flash"),
        Golden("unwindowed", SLIDING, "golden_full", "draft_full"),
        Golden("anchored", SLIDING, "golden_speculators_causal"),
        Golden("anchored_noncausal", SLIDING, "golden_speculators_noncausal", "draft_speculators_noncausal"),
        Golden("llama", LLAMA),
        Golden("llama3rope", LLAMA, "golden_llama3rope"),
        Golden("pruned", SPECULATORS),
        Golden("pruned_v090", SPECULATORS, layout="draft_v090"),
        Golden("converted", SPECULATORS, "golden_converted"),
        Golden("converted_v090", SPECULATORS, "golden_converted", "draft_converted_v090"),
    )
}
SETS = {key: RUNS[key] for key in ("tied", "untied", "swa")}


@pytest.fixture(params=SETS, scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """The Qwen3 sets with a z-lab draft, one after the other: what most properties are shown on."""
    return SETS[request.param]


@pytest.fixture(params=RUNS, scope="session")
def run(request: pytest.FixtureRequest) -> Golden:
    """Every run of the reference, one after the other."""
    return RUNS[request.param]


@pytest.fixture(scope="session")
def runs() -> dict[str, Golden]:
    """All of them by key."""
    return RUNS


@pytest.fixture(scope="session")
def rounded_run() -> Golden:
    """Weights and arithmetic in bfloat16, where ties are exact and fall as they may."""
    return COMPUTED_IN_BFLOAT16


@pytest.fixture(scope="session")
def golden_directory() -> Path:
    """What else the reference said lies here."""
    return GOLDEN


@pytest.fixture(scope="session")
def tied() -> Golden:
    return RUNS["tied"]


@pytest.fixture(scope="session")
def untied() -> Golden:
    return RUNS["untied"]


# Small enough to build in seconds, wide enough that prompts meet every edge: no k is cut short near the capacity by
# a golden prompt, and `tied` has two sizes on every axis.
SMALLEST = "batch=1 length=208 k=0,7 prefill=64"
GRIDS = {
    "tied": "batch=1,3 length=64,208 k=0,3,7 prefill=16,64",
    "untied": "batch=2 length=224 k=0,15 prefill=32",  # a single request leaves a row empty
    "tiny": "batch=1 length=32 k=0,3 prefill=16",  # of the tied pair, for tests that copy or damage a bundle
    "sampled": "batch=1,3 length=208 k=0,3,7 prefill=16,64",  # of the tied pair, the one with sampled executables too
    "one row": SMALLEST,  # of the embedded pair
    "bursts": f"{SMALLEST} rounds=4",
    "embedded": "batch=3 length=192 k=0,7 prefill=64",
    "served": "batch=4 length=256 k=0,7 prefill=64",  # of the embedded pair too, with sampled executables
    **dict.fromkeys(("llama", "llama3rope"), "batch=1 length=208 k=0,9 prefill=64"),
    **dict.fromkeys(("swa", "flash", "unwindowed", "anchored", "anchored_noncausal", "pruned", "converted"), SMALLEST),
}
GRIDS["bfloat16"] = "batch=1 length=224 k=0,15 prefill=64"
# Other weights, or another way to store them, for the executables of another set.
BUILT_AS = {"rounded": "untied", "pruned_v090": "pruned", "converted_v090": "converted"}
COMPUTED_IN_BFLOAT16 = Golden("bfloat16", UNTIED, "golden_bf16_compute")
# The embedded pair needs no flags.
PAIRS = {**RUNS, "tiny": RUNS["tied"], "sampled": RUNS["tied"], "bfloat16": COMPUTED_IN_BFLOAT16}


@pytest.fixture(scope="session")
def bundle(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of a set by its name, built at its first use. Read-only: a test that changes one takes a copy.

    Kept in pytest's cache: builds are incremental, and the next run only checks that nothing is missing.
    """
    cached = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    shelf = pytestconfig.cache.mkdir("dflash-bundles") if cached else tmp_path_factory.mktemp("bundles")

    @functools.cache
    def build(name: str) -> Path:
        if name in BUILT_AS:
            return build(BUILT_AS[name])
        path = shelf / name
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another test run may be building the same one
            pair = PAIRS.get(name)
            named = {"target": pair.target, "draft": pair.draft} if pair else {}
            sampling = "greedy,sample" if name in ("sampled", "served") else "greedy"
            store = shelf / "store"  # sets share executables
            flags = {**named, "bundle": path, "buckets": GRIDS[name], "sampling": sampling, "store": store}
            dtype = "bfloat16" if name == "bfloat16" else "float32"
            command = [sys.executable, "-m", "dflash_aot.bin.precompile", "--platform=cpu", f"--dtype={dtype}"]
            done = subprocess.run(
                [*command, *(f"--{flag}={value}" for flag, value in flags.items())], text=True, stderr=subprocess.PIPE
            )
        assert done.returncode == 0, done.stderr
        return path

    return build


@pytest.fixture(scope="session")
def speaking_target(tied: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied target with a tokenizer: what it says makes no sense, but it is text."""
    directory = tmp_path_factory.mktemp("speaking") / "target"
    shutil.copytree(tied.target, directory)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,  # of the 512 that the target may choose from
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def make_key(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A name → the files of a new Ed25519 key, the private and the public one, in PEM form as openssl writes it."""

    def make(name: str) -> tuple[Path, Path]:
        key, private, public = Ed25519PrivateKey.generate(), tmp_path / f"{name}.pem", tmp_path / f"{name}.pub.pem"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return make


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A number of bytes → a context in which no file of this process gets longer."""

    @contextmanager
    def fill(longest: int) -> Iterator[None]:
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest, most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))

    return fill


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    """An S3 server on loopback, see `Bucket`."""
    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty one, which this process and its children find at `bucket.url`."""
    object_server.forget()
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": object_server.endpoint}.items():
        monkeypatch.setenv(name, value)
    yield Bucket(object_server)
    object_server.forget()
