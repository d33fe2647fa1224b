"""Bundle verification: the manifest against itself, every file against the manifest; nothing is loaded."""

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec

from dflash_aot.cache.arrays import MESH_AXIS, ArraySpec, derive_pair_shapes, state_arrays
from dflash_aot.cache.bundle.blob import MAX_BLOB_BYTES, find_blob_flaw
from dflash_aot.cache.bundle.manifest import (
    MANIFEST_FILE,
    Blob,
    Entry,
    Manifest,
    generic_build_command,
)
from dflash_aot.cache.bundle.manifest_signature import SIGNATURE_FILE
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY, FaultKind, quarantine_file
from dflash_aot.cache.bundle.store import INPUTS_FILE, Store
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle
from dflash_aot.cache.files.atomic_files import file_kind, is_temporary_file, read_plain
from dflash_aot.cache.files.directory_lock import LOCK_FILE
from dflash_aot.cache.grid import AXES, MAX_SIZE
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.signature import ProgramWeights, Signature, list_signatures
from dflash_aot.cache.weight_recipe import WeightRecipe, find_pairing_flaw, find_recipe_flaw

# -- the manifest: entries, state and weights agree with the facts of the models and with the grid


def check_consistent(path: Path, manifest: Manifest) -> None:
    """Checks that every bucket of the grid has its executables, with the right signatures. Raises CorruptBundle."""
    if flaw := find_contradiction(manifest):
        # An invalid grid would be useless in the command, and may be long.
        again = (
            generic_build_command(path)
            if _find_flaw_of_grid(manifest)
            else manifest.build_command(path)
        )
        raise CorruptBundle(f"{path}/manifest.json: {flaw}. Build it again: {again}")


def find_contradiction(manifest: Manifest) -> str | None:
    """Returns the first inconsistency of a manifest as text, None if there is none."""
    try:
        return next(_find_flaws(manifest), None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"impossible facts or grid: {type(error).__name__}: {error}"  # forged numbers may cause any of them


def _find_flaw_of_grid(manifest: Manifest) -> str | None:
    """Checks the grid before any bucket is created: a few sizes on each axis make billions of buckets."""
    for axis in AXES:
        sizes = getattr(manifest.grid, axis)
        if not sizes or any(size >= after for size, after in pairwise(sizes)):
            return f"grid: {axis} is empty or not ascending"
    grid = manifest.grid
    if grid.rounds < 1:
        return f"grid: rounds is {grid.rounds}, expected at least 1"
    if not 1 <= grid.page <= MAX_SIZE:
        return f"grid: page is {grid.page}, expected 1 to {MAX_SIZE}"
    if grid.kv_positions is not None and not grid.capacity <= grid.kv_positions <= MAX_SIZE:
        return f"grid: kv_positions is {grid.kv_positions}, expected {grid.capacity} to {MAX_SIZE}"
    if not 0 <= grid.saved_states <= MAX_SIZE:
        return f"grid: saved_states is {grid.saved_states}, expected 0 to {MAX_SIZE}"
    for key in ("mixed", "offload"):
        if (value := getattr(grid, key)) not in (0, 1):
            return f"grid: {key} is {value}, expected 0 or 1"
    if grid.packed and not 2 <= grid.packed <= min(grid.slots, grid.prefill[-1]):
        return f"grid: packed is {grid.packed}, expected 0, or 2 to the largest batch and prefill"
    if (count := manifest.grid.count()) > len(manifest.entries):
        return f"the grid has {count} buckets and chunks, but there are {len(manifest.entries)} entries"
    return None


def _find_flaws(manifest: Manifest) -> Iterator[str]:
    if flaw := _find_flaw_of_grid(manifest):
        yield flaw
    facts = manifest.target.facts, manifest.draft.facts
    devices = manifest.environment.device_count
    pair = derive_pair_shapes(*facts, manifest.dtype, manifest.sampling, devices)
    expected = {
        one.label: one for one in list_signatures(pair, manifest.grid, ProgramWeights((), (), ()))
    }
    found = [entry.signature.label for entry in manifest.entries]
    if missing := sorted(expected.keys() - set(found)):
        yield f"has no entry for {', '.join(missing)}, which the grid {manifest.grid} needs"
    if unknown := sorted(set(found) - expected.keys()):
        yield f"has entries for {', '.join(unknown)}, which the grid {manifest.grid} does not need"
    if len(set(found)) < len(found):
        yield f"has two entries for {Counter(found).most_common(1)[0][0]}"
    if manifest.state != (state := state_arrays(pair, manifest.grid)):
        yield f"state is {_list_names(manifest.state)}, but models and grid need {_list_names(state)}"
    if manifest.grid.saved_states and pair.recurrent is None:
        yield "grid: saved_states is set, but the target has no recurrent state"
    if manifest.grid.mixed and pair.recurrent:
        yield "grid: mixed is set, but the target has recurrent state"
    if manifest.grid.packed and pair.recurrent:
        yield "grid: packed is set, but the target has recurrent state"
    if manifest.grid.offload and (
        pair.rings or (pair.recurrent and not manifest.grid.saved_states)
    ):
        yield "grid: offload is set, but prefixes are not shared"
    weights = {recipe.name for recipe in manifest.weights}
    for recipe in manifest.weights:
        if flaw := find_recipe_flaw(recipe):
            yield f"weights: {recipe.name}: {flaw}"
        if recipe.otherwise is not None and recipe.otherwise not in weights:
            yield f"weights: {recipe.name} may be replaced by {recipe.otherwise}, which weights does not have"
        if not _can_split(recipe, devices):
            yield f"weights: {recipe.name} {list(recipe.shape)} cannot be split as {recipe.sharding}"
    for model, name in (("target", "target.model.layers."), ("draft", "draft.fc.")):
        encoded = any(
            recipe.encoding for recipe in manifest.weights if recipe.name.startswith(name)
        )
        if encoded != (getattr(manifest.formats, model) == "int8"):
            yield f"weights: those of the {model} contradict weight_formats"
    if flaw := find_pairing_flaw(manifest.weights):
        yield f"weights: {flaw}"
    for entry in manifest.entries:
        yield from _compare_signatures(entry.signature, expected[entry.signature.label])
        if lost := sorted(set(entry.signature.weights) - weights):
            yield f"{entry.signature.label} takes {', '.join(lost)}, which weights does not have"


def _can_split(recipe: WeightRecipe, devices: int) -> bool:
    if len(recipe.sharding) not in (0, len(recipe.shape)) or set(recipe.sharding) - {
        None,
        MESH_AXIS,
    }:
        return False
    return not any(
        axis and size % devices for axis, size in zip(recipe.sharding, recipe.shape, strict=False)
    )


def _compare_signatures(found: Signature, expected: Signature) -> Iterator[str]:
    for field in Signature.__struct_fields__:
        one = getattr(found, field)
        other = getattr(expected, field)
        if field != "weights" and one != other:
            yield f"{found.label}: {field} is {_list_names(one)}, but models and grid need {_list_names(other)}"


def _list_names(values: object) -> str:
    """Returns arrays for people: name, dtype and shape of each."""
    if not isinstance(values, tuple):
        return str(values)
    return (
        ", ".join(one if isinstance(one, str) else _format_array(one) for one in values)
        or "nothing"
    )


def _format_array(array: ArraySpec) -> str:
    split = f" split {array.sharding}" if any(array.sharding) else ""
    return f"{array.name} {array.dtype}{list(array.shape)}{split}"


# -- files

RECORD_NAME = re.compile(r"[0-9a-f]{64}\.json")
BLOB_NAME = re.compile(r"[0-9a-f]{64}")


class ExpectedFile(msgspec.Struct, frozen=True):
    """A file that the manifest names.

    Attributes:
        path: the file.
        blob: its description in the manifest.
        label: the executable or program that it holds, for people.
    """

    path: Path
    blob: Blob
    label: str

    @property
    def pickled(self) -> bool:
        """Whether the content is a pickle: executables are, programs are not."""
        return isinstance(self.blob, Entry)


class FileFlaw(msgspec.Struct, frozen=True):
    """A file that differs from the manifest.

    Attributes:
        path: the file.
        label: the executable or program that it should hold.
        field: what differs.
        expected: the value in the manifest.
        found: the value found.
        content: whether the bytes themselves are wrong; such a file is useless.
    """

    path: Path
    label: str
    field: str
    expected: str
    found: str
    content: bool


class UnexpectedFile(msgspec.Struct, frozen=True):
    """A file that the manifest does not name, and that nothing reads.

    Attributes:
        path: the file.
        what: its kind, judged by its place.
        bytes: its size.
    """

    path: Path
    what: str
    bytes: int


def list_expected_files(bundle: Path, manifest: Manifest) -> list[ExpectedFile]:
    """Returns the files that the manifest names, each once, although several entries may share a file."""
    store = Store(bundle)
    expected_files = (
        expected
        for entry in manifest.entries
        for expected in (
            ExpectedFile(store.executable_path(entry), entry, entry.signature.label),
            ExpectedFile(
                store.program_path(entry), entry.program, f"program of {entry.signature.label}"
            ),
        )
    )
    return list({expected.path: expected for expected in expected_files}.values())


def find_file_flaws(bundle: Path, manifest: Manifest) -> list[FileFlaw]:
    """Returns the first flaw of each file, in the manifest's order, then cache keys that do not match their entry."""
    flaws = [
        flaw
        for expected in list_expected_files(bundle, manifest)
        if (flaw := find_file_flaw(expected))
    ]
    broken = {flaw.path for flaw in flaws}
    store = Store(bundle)
    for entry in manifest.entries:
        if store.program_path(entry) not in broken and (
            flaw := find_key_flaw(store, entry, manifest.environment)
        ):
            flaws.append(flaw)
    return flaws


def find_key_flaw(store: Store, entry: Entry, environment: Environment) -> FileFlaw | None:
    """Returns the flaw of an entry whose key is not the recomputed one, as after an edit of its signature."""
    key = executable_key(
        store.read_program(entry), entry.signature, environment, entry.compiler_options
    )
    if key == entry.key:
        return None
    label = f"program of {entry.signature.label}"
    return FileFlaw(store.program_path(entry), label, "key", entry.key, key, content=False)


def find_file_flaw(expected: ExpectedFile) -> FileFlaw | None:
    """Returns the flaw of one file: its kind, its content (see `unpack_blob`); None if it has none."""
    blob = expected.blob
    path = expected.path

    def flaw(wanted: str, found: str, content: bool) -> FileFlaw:
        return FileFlaw(path, expected.label, "file", wanted, found, content)

    if path.parent.is_symlink():
        return flaw(
            "a directory of the bundle", f"{path.parent.name} is a symbolic link", content=False
        )
    try:
        content = read_plain(path, MAX_BLOB_BYTES)
    except FileNotFoundError:
        return flaw(f"a file of {blob.bytes} bytes", "missing", content=False)
    except OSError as error:
        # A link or a fifo is certainly wrong; a read error or a missing permission does not prove the file corrupt.
        return flaw(f"a file of {blob.bytes} bytes", str(error.strerror), content=_is_special(path))
    if broken := find_blob_flaw(blob, content):
        return FileFlaw(
            path, expected.label, broken.field, broken.expected, broken.found, broken.content
        )
    return None


def quarantine_flaws(
    bundle: Path, manifest: Manifest, flaws: list[FileFlaw]
) -> tuple[dict[Path, Path], str | None]:
    """Quarantines the files of these flaws that are still corrupt.

    Returns the new path of each moved file, and a message if not all could be moved.
    """
    broken = {flaw.path for flaw in flaws if flaw.content}

    def find_still_broken() -> Iterator[tuple[Path, FaultKind, str]]:
        for expected in list_expected_files(bundle, manifest):
            if expected.path in broken and (flaw := find_file_flaw(expected)) and flaw.content:
                yield (
                    expected.path,
                    "bytes",
                    f"{flaw.field} is {flaw.found}, the manifest says {flaw.expected}",
                )

    return quarantine_files(bundle, find_still_broken()) if broken else ({}, None)


def quarantine_files(
    bundle: Path, found: Iterable[tuple[Path, FaultKind, str]]
) -> tuple[dict[Path, Path], str | None]:
    """Quarantines files under the bundle's lock; `found` yields path, kind and reason, and is iterated under the lock.

    Returns the new path of each moved file, and a message if not all could be moved.
    """
    moved: dict[Path, Path] = {}
    try:
        with Store(bundle).hold_lock():
            for path, kind, words in found:
                if place := quarantine_file(bundle, path, kind, words):
                    moved[path] = place
    except (BadInput, BuildFailed, OSError) as error:
        return moved, str(error)
    return moved, None


def find_unexpected_files(bundle: Path, manifest: Manifest) -> list[UnexpectedFile]:
    """Returns all files of the bundle that the manifest does not name, sorted by name; links are not followed."""
    known = {expected.path for expected in list_expected_files(bundle, manifest)}
    keys = {f"{entry.key}.json" for entry in manifest.entries}
    own = {bundle / name for name in (MANIFEST_FILE, SIGNATURE_FILE, LOCK_FILE, INPUTS_FILE)}
    found = []
    for path in list_files(bundle):
        if (
            path in known
            or path in own
            or (path.parent == bundle / "entries" and path.name in keys)
        ):
            continue
        with suppress(FileNotFoundError):  # a running build has just renamed it
            status = path.lstat()
            found.append(
                UnexpectedFile(
                    path, _name_unexpected_file(bundle, path, status.st_mode), status.st_size
                )
            )
    return found


def list_files(directory: Path) -> Iterator[Path]:
    """Yields all files and links below a directory. Raises OSError for a directory that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(directory, onerror=refuse):
        folders.sort()
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (Path(folder) / name for name in sorted([*files, *links]))


def _name_unexpected_file(bundle: Path, path: Path, mode: int) -> str:
    kinds: dict[str, Callable[[str], object]] = {
        "entries": RECORD_NAME.fullmatch,
        "executables": BLOB_NAME.fullmatch,
        "programs": BLOB_NAME.fullmatch,
    }
    if (bundle / QUARANTINE_DIRECTORY) in path.parents:
        return "quarantined"
    if is_temporary_file(path):
        return "unfinished: a build was killed, or is running"
    if not stat.S_ISREG(mode):
        return f"unknown, a {file_kind(mode)}"
    known = kinds.get(path.parent.name) if path.parent.parent == bundle else None
    return "not referred to" if known and known(path.name) else "unknown"


def _is_special(path: Path) -> bool:
    """Whether something other than a regular file has this path."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
