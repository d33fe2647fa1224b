"""Fixtures for all tests: reference runs, bundles, keys, a full disk, an S3 server."""

import fcntl
import functools
import gc
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import tokenizers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from msgspec.structs import replace
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from dflash_aot.cache import bundle_spec
from dflash_aot.cache.files.locations import EMBEDDED
from dflash_aot.cache.grid import Grid, parse_grid
from dflash_aot.cache.key import DEVICE_OPTIONS
from tests.object_server import SETTINGS, Bucket, ObjectServer

# LLVM's optimizations take most of the time of a build, and most tests need executables, not fast ones. For this
# process and its children; XLA reads it when JAX starts. A test that runs pytest sets the number of CPU devices.
UNOPTIMIZED = "--xla_backend_optimization_level=0"
if UNOPTIMIZED not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} {UNOPTIMIZED}".strip()
# PyTorch's threads wait for each other actively, which takes the cores from the other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A compiler option with XLA's default, as a user's build has it.
OPTIMIZED = {"xla_backend_optimization_level": "3"}

# Environment variables with which JAX's own calls fail, or programs compute something else.
JAX_SWITCHES = {
    "JAX_CHECK_TRACER_LEAKS": "1",
    "JAX_DEBUG_INFS": "1",
    "JAX_DEBUG_KEY_REUSE": "1",
    "JAX_DEBUG_NANS": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_DISABLE_JIT": "1",
    "JAX_ENABLE_CHECKS": "1",
    "JAX_ENABLE_X64": "1",
    "JAX_NO_EXECUTION": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_TRANSFER_GUARD": "disallow_explicit",
}

# A busy machine must not fail a test.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=int, default=900, help="requests of the soak tests: bash bin/test.sh -k soak --soak 100000"
    )


gc.set_threshold(20_000, 10, 10)  # traces are many objects that stay
MAPPINGS = 30_000  # of the 65,530 memory mappings that Linux gives a process


@pytest.fixture(scope="module", autouse=True)
def _release_executables() -> Iterator[None]:
    """Frees what a worker has compiled, once that takes many memory mappings: the next files compile it again."""
    yield
    if count_mappings() > MAPPINGS:
        gc.collect()  # takes a second, because a worker has millions of objects
        if count_mappings() > MAPPINGS:
            sys.modules["jax"].clear_caches()


def count_mappings() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@pytest.fixture(scope="session")
def soak_requests(pytestconfig: pytest.Config) -> int:
    """Requests of the soak tests: half are sent to a toy device, three tenths over HTTP."""
    return pytestconfig.getoption("--soak")


@dataclass(frozen=True)
class Golden:
    """A reference run: a checkpoint pair and what a reference implementation computed with it.

    Attributes:
        key: name of the run in the tests.
        directory: where its files lie.
        name: stem of its files.
        layout: directory of the draft, where it is not the one that the run names: the same weights as another version
            of the library stores them, or with the sliding windows in the config.
        target_layout: the same of the target.
    """

    key: str
    directory: Path
    name: str = "golden"
    layout: str | None = None
    target_layout: str | None = None

    @cached_property
    def facts(self) -> dict:
        return json.loads((self.directory / f"{self.name}.json").read_text())

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        return load_file(self.directory / f"{self.name}.safetensors")

    @property
    def target(self) -> Path:
        return (self.directory / (self.target_layout or self.facts["target_dir"])).resolve()

    @property
    def draft(self) -> Path:
        return self.directory / (self.layout or self.facts["draft_dir"])


LLAMA, SPECULATORS = GOLDEN / "llama-tiny", GOLDEN / "speculators-tiny"
UNTIED, SLIDING = GOLDEN / "qwen3-tiny-untied", GOLDEN / "qwen3-tiny-swa"
DSPARK = GOLDEN / "dspark-tiny"
DFLASH2_SPECULATORS, HYBRID = GOLDEN / "dflash2-tiny-speculators", GOLDEN / "qwen35-tiny"
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
        Golden("softcap", GOLDEN / "dflash-tiny-softcap"),
        Golden("causal", GOLDEN / "dflash-tiny-causal"),
        Golden("dflash2", GOLDEN / "dflash2-tiny"),
        Golden("dflash2_speculators", DFLASH2_SPECULATORS),
        Golden("dflash2_sliding", DFLASH2_SPECULATORS, "golden_sliding"),
        Golden("dspark", DSPARK),
        Golden("dspark_own_head", DSPARK, "golden_own_head"),  # which no other draft of this target has
        Golden("dspark_rank0", DSPARK, "golden_rank0"),  # DFlash with anchor sampling
        Golden("dspark_pruned", GOLDEN / "dspark-tiny-speculators", "golden_pruned_anchor"),
        Golden("hybrid", HYBRID),
        Golden("hybrid_text", HYBRID, target_layout="target_text"),
        Golden("hybrid_sliding", HYBRID, "golden_swa"),
        Golden("hybrid_experts", GOLDEN / "qwen35moe-tiny"),  # all experts of a layer in one tensor
        Golden("gpt_oss", GOLDEN / "gptoss-tiny"),
        Golden("gpt_oss_mxfp4", GOLDEN / "gptoss-tiny", "golden_mxfp4"),
        Golden("gemma", GOLDEN / "gemma4-tiny"),
        Golden("gemma_text", GOLDEN / "gemma4-tiny", target_layout="target_text"),
        Golden("gemma_experts", GOLDEN / "gemma4-tiny", "golden_moe"),
        Golden("separate_experts", GOLDEN / "qwen35moe-tiny", "golden_experts"),
    )
}


@pytest.fixture(params=RUNS, scope="session")
def run(request: pytest.FixtureRequest) -> Golden:
    """Each reference run in turn."""
    return RUNS[request.param]


@pytest.fixture(scope="session")
def runs() -> dict[str, Golden]:
    """All reference runs by key."""
    return RUNS


@pytest.fixture(scope="session")
def rounded_run() -> Golden:
    """A run with weights and arithmetic in bfloat16, where exact ties may be broken either way."""
    return COMPUTED_IN_BFLOAT16


@pytest.fixture(scope="session")
def golden_directory() -> Path:
    """The directory of all reference files."""
    return GOLDEN


@pytest.fixture(scope="session")
def tied() -> Golden:
    return RUNS["tied"]


@pytest.fixture(scope="session")
def untied() -> Golden:
    return RUNS["untied"]


# Small enough to build in seconds. The capacity leaves room for the largest k behind every golden prompt. `tied` has
# two batches, `swa` two lengths, `sampled` two widths of chunks. Executables for K = 0 are built where it is named.
SMALLEST = "batch=1 length=208 k=7 prefill=64"  # of bundles that are not in GRIDS
GRIDS = {
    "tied": "batch=1,3 length=208 k=0,7 prefill=16 page=8",
    "untied": "batch=2 length=224 k=15 prefill=32 page=24 mixed=1 packed=2",  # a single request leaves a padding row
    "tiny": "batch=1 length=32 k=0,3 prefill=16",  # of the tied pair, for tests that copy or damage a bundle
    "sampled": "batch=3 length=208 k=0,7 prefill=16,64 page=8 kv_positions=624",  # shares executables with "tied"
    # The first is of the tied pair, optimized, with sampled executables.
    **dict.fromkeys(("sampled_small", "sampled_dflash2", "gpt_oss"), "batch=1 length=208 k=0,7 prefill=64"),
    "swa": "batch=1 length=64,208 k=7 prefill=64",
    "served": "batch=4 length=256 k=0,7 prefill=64",  # of the embedded pair
    **dict.fromkeys(("llama", "llama3rope"), "batch=1 length=208 k=9 prefill=64"),
    "dspark_pruned": "batch=1 length=208 k=8 prefill=64",
}
# Chunks of one and of two blocks of the delta rule; the longest prompt has 200 tokens.
GRIDS["hybrid"] = GRIDS["hybrid_text"] = "batch=1 length=288 k=7 prefill=64 saved_states=2 offload=1"
# Chunks that are longer than a ring of the sliding layers, and pages of which a window takes more than one.
GRIDS["gemma"] = "batch=1 length=288 k=7 prefill=64 page=8"
GRIDS["hybrid_sliding"] = "batch=1 length=288 k=15 prefill=128"
GRIDS["bfloat16"] = "batch=1 length=224 k=15 prefill=64"
# Bundles whose weights are int8: a tied head (of dflash2), one of its own, and each kind of draft and of target. That
# of causal has a draft of plain weights.
INT8 = {f"int8 {run}": run for run in ("causal", "pruned", "dflash2", "hybrid_text")}
GRIDS |= {name: GRIDS.get(run, SMALLEST) for name, run in INT8.items()}
GRIDS["int8 causal"] = "batch=1 length=208 k=0,7 prefill=64"
GRIDS["int8 hybrid_text"] = "batch=1 length=288 k=7 prefill=64"
# Runs that use the executables of another run: other weights, or another checkpoint layout.
BUILT_AS = {"rounded": "untied", "pruned_v090": "pruned", "converted_v090": "converted", "hybrid_text": "hybrid"}
BUILT_AS |= {"separate_experts": "hybrid_experts", "dspark_own_head": "dspark"}
BUILT_AS |= {"gpt_oss_mxfp4": "gpt_oss", "gemma_text": "gemma"}
COMPUTED_IN_BFLOAT16 = Golden("bfloat16", UNTIED, "golden_bf16_compute")
# The pair of each bundle; all others are of the embedded pair.
PAIRS = {
    **RUNS,
    **{name: RUNS[run] for name, run in INT8.items()},
    **dict.fromkeys(("tiny", "sampled", "sampled_small"), RUNS["tied"]),
    "bfloat16": COMPUTED_IN_BFLOAT16,
    "sampled_dflash2": RUNS["dflash2"],
}
# The bundle that is compiled as a user's build compiles it.
OPTIMIZED_BUNDLE = "sampled_small"
SAMPLED = {
    "sampled": ("greedy", "sample"),
    "sampled_small": ("sample", "prompt_logprobs"),
    "sampled_dflash2": ("sample",),
    "served": ("greedy", "sample", "constrain", "prompt_logprobs"),
}
# Bundles that record self-tests. The others are proven by the tokens of their reference run.
SELF_TESTED = ("tiny", "served")


@contextmanager
def leave_out_k0() -> Iterator[None]:
    """Builds have no executables for K = 0, which every grid has otherwise."""

    def parse(text: str, block: int) -> Grid:
        grid = parse_grid(text, block)
        return replace(grid, k=grid.k[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_spec, "parse_grid", parse)
        yield


@pytest.fixture(scope="session")
def bundle(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a bundle by its name, at its first use. Read-only: a test that changes a bundle takes a copy.

    All but OPTIMIZED_BUNDLE are compiled without optimizations.

    Bundles are kept in pytest's cache. The first worker of a test run that needs a bundle builds what is missing of it,
    and writes the id of the run to the lock file, so that the other workers use it as it is.
    """
    cached = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    folder = pytestconfig.cache.mkdir("dflash-bundles") if cached else tmp_path_factory.mktemp("bundles")
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")

    @functools.cache
    def build(name: str) -> Path:
        if name in BUILT_AS:
            return build(BUILT_AS[name])
        path = folder / name
        with open(path.with_suffix(".lock"), "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            if not run_id or lock.read() != run_id:
                from dflash_aot.compile import precompile  # noqa: PLC0415  imports JAX, which takes seconds

                pair, text = PAIRS.get(name), GRIDS.get(name, SMALLEST)
                k = nullcontext() if "k=0" in text else leave_out_k0()
                with k, pytest.MonkeyPatch.context() as patch:
                    if name == OPTIMIZED_BUNDLE:
                        patch.setitem(DEVICE_OPTIONS, "cpu", OPTIMIZED)
                    precompile(
                        pair.target if pair else EMBEDDED,
                        pair.draft if pair else EMBEDDED,
                        path,
                        grid=text,
                        exact=True,  # the cache may hold an earlier grid
                        replace=True,  # or pair
                        platform="cpu",
                        dtype="bfloat16" if name == "bfloat16" else "float32",
                        weights="int8" if name.startswith("int8") else None,
                        draft_weights="float32" if name == "int8 causal" else None,
                        sampling=SAMPLED.get(name, ("greedy",)),
                        self_test=name in SELF_TESTED,
                        store=str(folder / "store"),  # bundles share executables
                    )
                lock.truncate(0)
                lock.write(run_id)
        return path

    return build


@pytest.fixture(scope="session")
def speaking_target(tied: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied target with a tokenizer, so that its tokens are text."""
    directory = tmp_path_factory.mktemp("speaking") / "target"
    shutil.copytree(tied.target, directory)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,  # the target has 512 tokens
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def chatting_target(speaking_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose chat template joins the messages, and appends " why" with enable_thinking."""
    directory = tmp_path_factory.mktemp("chatting") / "target"
    shutil.copytree(speaking_target, directory)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if enable_thinking %} why{% endif %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


@pytest.fixture
def make_key(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Makes an Ed25519 key: a name → the PEM files of the private and the public key, as openssl writes them."""

    def make(name: str) -> tuple[Path, Path]:
        key, private, public = Ed25519PrivateKey.generate(), tmp_path / f"{name}.pem", tmp_path / f"{name}.pub.pem"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return make


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A number of bytes → a context in which this process cannot make a file longer than that."""

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
    """An empty bucket, which this process and its children reach at `bucket.url`."""
    object_server.forget()
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": object_server.endpoint}.items():
        monkeypatch.setenv(name, value)
    yield Bucket(object_server)
    object_server.forget()


# Files whose tests take longest. They run first, so that no worker is left alone with one of them at the end.
LONGEST = (
    "tests/runtime/test_tensor_parallelism.py",
    "tests/runtime/test_emulated_golden_runs.py",
    "tests/runtime/test_golden_runs.py",
    "tests/bin/test_emulation.py",
    "tests/runtime/test_int8_runs.py",
    "tests/compile/test_tpu_executables.py",
    "tests/smollm2/test_smollm2.py",
    "tests/runtime/test_hybrid_engine.py",
    "tests/compile/test_emulation.py",
    "tests/runtime/test_engine_sampling.py",
    "tests/runtime/test_out_of_memory.py",
    "tests/test_readme.py",
    "tests/server/test_lifecycle.py",
    "tests/server/test_ray_replica.py",
    "tests/compile/test_ray_pool.py",
    "tests/benchmarks/test_contender_workers.py",
)


def pytest_sessionfinish() -> None:
    """pytest collects garbage five times at the end, which takes seconds each: a worker has millions of objects."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files of LONGEST first, and leaves all others in the order of their paths."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
