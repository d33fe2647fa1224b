"""Whether two programs choose the same tokens: what verify_host compares, and what it makes of differences."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft, Target

# Where rounding differs, near-ties fall otherwise: a token in a hundred or so. What computes something else is wrong
# in most of them.
LEAST_EQUAL = 0.9
# A draft that is wrong costs speed and no token: it shows in the tokens accepted per round alone.
LEAST_ACCEPTED = 0.7
MOST_SHOWN = 8
Prompt = list[int]
# Prompts and how many tokens each is to be continued by → the tokens
Decode = Callable[[Sequence[tuple[Prompt, int]]], list[list[int]]]


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, its greedy continuation at K = 0, and the drafted tokens accepted in each round at other Ks."""

    prompt_ids: Prompt
    token_ids: list[int]
    accepted: dict[int, list[int]]


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle of the pair made of some prompts, and in which arithmetic."""

    target: Target
    draft: Draft
    dtype: str
    platform: str
    runs: list[Run]

    @property
    def ks(self) -> frozenset[int]:
        """At which every run was recorded, K = 0 left out."""
        return frozenset(self.runs[0].accepted)


def read_golden(path: Path) -> Golden:
    """Raises BadInput."""
    try:
        golden = msgspec.json.decode(path.read_bytes(), type=Golden)
    except (OSError, msgspec.DecodeError) as error:
        raise BadInput(f"--golden {path}: {error}") from error
    if len({frozenset(run.accepted) for run in golden.runs}) != 1:
        raise BadInput(f"--golden {path}: holds no runs, or runs of different Ks")
    if not all(run.prompt_ids and run.token_ids and all(run.accepted.values()) for run in golden.runs):
        raise BadInput(f"--golden {path}: a run without a prompt, tokens or rounds")
    return golden


def check_golden(golden: Golden, manifest: Manifest, path: Path) -> None:
    """Raises BadInput where the bundle is of another pair, shares no K with the golden or is too short for it."""
    for role, recorded, built in (
        ("target", golden.target, manifest.target.facts),
        ("draft", golden.draft, manifest.draft.facts),
    ):
        if recorded != built:
            raise BadInput(
                f"--golden {path}: recorded with another {role} than the bundle's: {recorded} is not {built}"
            )
    grid = manifest.grid
    if len(grid.k) > 1 and golden.ks.isdisjoint(grid.k):
        here, there = (",".join(map(str, ks)) for ks in (grid.k, sorted({0, *golden.ks})))
        raise BadInput(
            f"--golden {path}: recorded with k={there}, and the bundle has k={here}: nothing to compare the draft by. "
            f"Record one with a bundle of the pair built for k={here}"
        )
    # The last token of an answer is written nowhere.
    longest = max(len(run.prompt_ids) + len(run.token_ids) - 1 for run in golden.runs)
    if longest > grid.capacity:
        raise BadInput(
            f"--golden {path}: its longest run takes {longest} positions, and the bundle ends at "
            f"length={grid.capacity}. Record one with a bundle whose longest length is at most that"
        )


def is_exact(platform: str, dtype: str) -> bool:
    """Whether rounding is far below the margins between tokens, so that any two programs choose the same.

    Not in bfloat16; and accelerators multiply float32 in shorter pieces unless they are told otherwise.
    """
    return platform == "cpu" and dtype == "float32"


@dataclass(frozen=True)
class Difference:
    """One token of an answer, behind the same text."""

    prompt: int
    position: int
    expected: int
    found: int


def compare(runs: Sequence[tuple[Prompt, list[int]]], decode: Decode) -> list[Difference]:
    """Each token of the expected answers for which another stands, behind the expected text before it.

    After a difference decoding begins again behind the expected token: the texts would have nothing more in common.
    """
    differences, at = [], [0] * len(runs)
    pending = list(range(len(runs)))
    while pending:
        left = {number: runs[number][1][at[number] :] for number in pending}
        asked = [(runs[number][0] + runs[number][1][: at[number]], len(left[number])) for number in pending]
        for number, found in zip(pending, decode(asked), strict=True):
            wrong = find_difference(left[number], found)
            if wrong is None:
                at[number] = len(runs[number][1])
            else:
                position = at[number] + wrong
                differences.append(Difference(number, position, left[number][wrong], found[wrong]))
                at[number] = position + 1
        pending = [number for number in pending if at[number] < len(runs[number][1])]
    return differences


def find_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place where they differ."""
    pairs = zip(expected, found, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


class Verdict:
    """What was compared, printed as it comes; `failures` is what was wrong."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def note_tokens(self, what: str, tokens: int, differences: Sequence[Difference], exact: bool) -> None:
        """`exact`: not one may differ."""
        print(f"{what}: {tokens - len(differences)} of {tokens} tokens equal")
        for one in differences[:MOST_SHOWN]:
            print(f"  prompt {one.prompt}, token {one.position}: {one.found}, expected {one.expected}")
        if len(differences) > MOST_SHOWN:
            print(f"  and {len(differences) - MOST_SHOWN} more")
        if exact and differences:
            self.failures.append(f"{what}: {len(differences)} of {tokens} tokens differ, in the same arithmetic")
        elif tokens - len(differences) < LEAST_EQUAL * tokens:
            self.failures.append(f"{what}: {len(differences)} of {tokens} tokens differ, more than rounding explains")

    def note_acceptance(self, what: str, expected: Sequence[int], found: Sequence[int]) -> None:
        """Drafted tokens accepted, round by round."""
        wanted, here = (statistics.mean(one) for one in (expected, found))
        print(f"{what}: {here:.2f} drafted tokens accepted per round, {wanted:.2f} expected")
        if here < LEAST_ACCEPTED * wanted:
            self.failures.append(f"{what}: {here:.2f} drafted tokens accepted per round instead of {wanted:.2f}")
