"""The golden file: greedy answers of a checkpoint pair, recorded on one machine and compared on another.

A golden file is JSON. It holds prompts and tokens, no text and no weights. `dflash-bundle verify --record_golden FILE`
writes one, `--golden FILE` compares with one.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle_spec import DraftModel, TargetModel
from dflash_aot.cache.errors import MALFORMED, BadInput
from dflash_aot.cache.model_config.architecture import Draft, Target

# Different rounding changes up to 0.5 % of the tokens, where two tokens nearly tie: measured with emulated bfloat16
# executables for v5e, against float32 and across K (docs/tpu.md). A wrong executable changes most tokens.
MOST_DIFFERENT = 0.04
FEW_TOKENS = 2  # may differ in any comparison: in a short comparison a share means little
# A wrong draft changes no token. It shows only in the number of accepted tokens per round, which rounding changed by up
# to 6 % in four answers, measured in the same way.
LEAST_ACCEPTED = 0.85
MOST_SHOWN = 8  # differences of a comparison
TokenIds = list[int]
# Takes prompts, each with the number of tokens to generate; returns the generated tokens.
Decode = Callable[[Sequence[tuple[TokenIds, int]]], list[TokenIds]]


class GoldenRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt and its greedy answer."""

    prompt_ids: TokenIds
    token_ids: TokenIds  # generated at K = 0
    accepted: dict[int, list[int]]  # by K > 0: drafted tokens accepted in each round


class GoldenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers of a bundle of a pair, and the arithmetic they were computed in."""

    target: Target
    draft: Draft
    dtype: str
    platform: str
    runs: list[GoldenRun]
    weights: str = ""  # their fingerprint; older files have none

    @property
    def ks(self) -> frozenset[int]:
        """The Ks above 0 of every run."""
        return frozenset(self.runs[0].accepted)


class TokenDifference(msgspec.Struct, frozen=True):
    """One token of an answer that differs from the expected one, after the same text."""

    prompt: int  # number of the prompt
    position: int  # in the answer
    expected: int
    found: int


class TokenComparison(msgspec.Struct, frozen=True):
    """Answers compared token by token."""

    name: str
    tokens: int
    differences: list[TokenDifference]
    exact: bool  # both sides compute in arithmetic that leaves no token to rounding

    @property
    def failure(self) -> str:
        """Why the comparison failed, "" if it passed."""
        wrong = len(self.differences)
        if self.exact and wrong:
            return f"{self.name}: {wrong} of {self.tokens} tokens differ, in the same arithmetic"
        if wrong > max(FEW_TOKENS, MOST_DIFFERENT * self.tokens):
            return (
                f"{self.name}: {wrong} of {self.tokens} tokens differ, more than rounding explains"
            )
        return ""


class AcceptedTokensComparison(msgspec.Struct, frozen=True):
    """Mean number of drafted tokens accepted per round."""

    name: str
    expected: float
    found: float

    @property
    def failure(self) -> str:
        """Why the comparison failed, "" if it passed."""
        if self.found < LEAST_ACCEPTED * self.expected:
            return f"{self.name}: {self.found:.2f} drafted tokens accepted per round instead of {self.expected:.2f}"
        return ""


class GoldenOptions(msgspec.Struct, frozen=True):
    """Flags of the golden check."""

    golden: Path | None = None  # file to compare with
    record: Path | None = None  # file to write
    target: str | None = None  # checkpoint instead of the bundle's own
    draft: str | None = None

    @property
    def wanted(self) -> bool:
        return bool(self.golden or self.record)


class DecodeTiming(msgspec.Struct, frozen=True):
    """Medians over the answers of one request at a time, at one length and K."""

    length: int
    k: int
    prefill_ms: float  # until the first token
    round_ms: float
    token_ms: float  # per token after the first
    tau: float  # tokens per round


class AnswerReport(msgspec.Struct, frozen=True):
    """The result of the golden check; `failures` is empty if the bundle passed."""

    golden: str | None
    recorded: str | None  # the file that was written
    comparisons: list[TokenComparison]
    acceptance: list[AcceptedTokensComparison]
    timings: list[DecodeTiming]
    compile_events: int  # traces and compilations while serving
    failures: list[str]
    weights: str = ""  # the fingerprint of the weights
    golden_weights: str = ""  # and that of the weights that the file was recorded with


def compare_acceptance(
    name: str, expected: Sequence[int], found: Sequence[int]
) -> AcceptedTokensComparison:
    """Compares the means of drafted tokens accepted per round. expected, found: by round."""
    return AcceptedTokensComparison(name, statistics.mean(expected), statistics.mean(found))


def read_golden(path: Path) -> GoldenFile:
    """The golden file at a path. Raises BadInput."""
    try:
        golden = msgspec.json.decode(path.read_bytes(), type=GoldenFile)
    except (OSError, *MALFORMED) as error:
        raise BadInput(f"--golden {path}: {error}") from error
    if len({frozenset(run.accepted) for run in golden.runs}) != 1:
        raise BadInput(f"--golden {path}: holds no runs, or runs with different Ks")
    if not all(
        run.prompt_ids and run.token_ids and all(run.accepted.values()) for run in golden.runs
    ):
        raise BadInput(f"--golden {path}: a run has no prompt, no tokens or no rounds")
    return golden


def check_golden(golden: GoldenFile, manifest: Manifest, path: Path) -> None:
    """Raises BadInput where the golden is of another pair, has no K in common with the bundle or does not fit it."""
    recorded = msgspec.structs.replace(
        manifest,
        target=TargetModel(manifest.target.reference, golden.target),
        draft=DraftModel(manifest.draft.reference, golden.draft),
    )
    if wrong := recorded.differences(manifest):
        role = wrong[0].field.partition(".")[0]
        fields = ", ".join(f"{one.field} {one.a!r} is not {one.b!r}" for one in wrong)
        raise BadInput(f"--golden {path}: recorded with another {role} than the bundle's: {fields}")
    grid = manifest.grid
    if len(grid.k) > 1 and golden.ks.isdisjoint(grid.k):
        here, there = (",".join(map(str, ks)) for ks in (grid.k, sorted({0, *golden.ks})))
        raise BadInput(
            f"--golden {path}: recorded with k={there}, and the bundle has k={here}: the draft cannot be compared. "
            f"Record a golden with a bundle of the pair built for k={here}"
        )
    # The last token of an answer takes no position.
    longest = max(len(run.prompt_ids) + len(run.token_ids) - 1 for run in golden.runs)
    if longest > grid.capacity:
        raise BadInput(
            f"--golden {path}: its longest run takes {longest} positions, and the bundle ends at "
            f"length={grid.capacity}. Record a golden with a bundle whose longest length is at most {grid.capacity}"
        )


def is_exact(platform: str, dtype: str) -> bool:
    """Whether rounding errors are far below the margins between tokens, so that all programs choose the same tokens.

    False for bfloat16, and for accelerators: they compute float32 products in several bfloat16 products.
    """
    return platform == "cpu" and dtype == "float32"


def find_differences(
    runs: Sequence[tuple[TokenIds, TokenIds]], decode: Decode
) -> list[TokenDifference]:
    """Compares each token of the expected answers with the token that `decode` chooses after the same text.

    runs: prompts and expected answers. After a difference, decoding starts again after the expected token, because
    the two answers would have nothing more in common.
    """
    differences = []
    at = [0] * len(runs)
    pending = list(range(len(runs)))
    while pending:
        left = {number: runs[number][1][at[number] :] for number in pending}
        asked = [
            (runs[number][0] + runs[number][1][: at[number]], len(left[number]))
            for number in pending
        ]
        for number, found in zip(pending, decode(asked), strict=True):
            pairs = zip(left[number], found, strict=True)
            wrong = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
            if wrong is None:
                at[number] = len(runs[number][1])
            else:
                position = at[number] + wrong
                differences.append(
                    TokenDifference(number, position, left[number][wrong], found[wrong])
                )
                at[number] = position + 1
        pending = [number for number in pending if at[number] < len(runs[number][1])]
    return differences


def format_answers(report: AnswerReport) -> list[str]:
    """The report as lines of text."""
    lines = []
    for one in report.comparisons:
        lines.append(
            f"{one.name}: {one.tokens - len(one.differences)} of {one.tokens} tokens equal"
        )
        lines += [
            f"  prompt {wrong.prompt}, token {wrong.position}: {wrong.found}, expected {wrong.expected}"
            for wrong in one.differences[:MOST_SHOWN]
        ]
        lines += [f"  and {len(one.differences) - MOST_SHOWN} more"] * (
            len(one.differences) > MOST_SHOWN
        )
    lines += [
        f"{one.name}: {one.found:.2f} drafted tokens accepted per round, {one.expected:.2f} expected"
        for one in report.acceptance
    ]
    lines.append("medians of single requests:")
    lines.append("length   K  prefill ms  ms/round  ms/token     τ")
    for row in sorted(report.timings, key=lambda row: (row.length, row.k)):
        times = f"{row.prefill_ms:>11.2f} {row.round_ms:>9.2f} {row.token_ms:>9.2f}"
        lines.append(f"{row.length:>6} {row.k:>3} {times} {row.tau:>5.2f}")
    if report.golden_weights not in ("", report.weights):
        lines.append(
            f"the file was recorded with other weights: {report.golden_weights}, these are {report.weights}"
        )
    if report.recorded:
        lines.append(f"the prompts and their answers are in {report.recorded}")
    if report.failures:
        return [
            *lines,
            "The answers are wrong on this machine, or for these weights:",
            *report.failures,
        ]
    return [*lines, "the answers are as expected"]
