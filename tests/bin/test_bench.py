"""dflash-bench: flags from settings, records, exit codes, and pages generated from records."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_aot.benchmarks.prompts import load_questions
from dflash_aot.benchmarks.record import read_record, setting
from dflash_aot.benchmarks.tables import Chart, Findings, Series, Table
from dflash_aot.bin import bench
from dflash_aot.cache.errors import GridMiss

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Steps:
    """How a toy counts."""

    steps: int = setting(2, "how far it counts", least=1)
    weights: tuple[float, ...] = setting((1.0, 2.5), "what it counts with", least=0.5)
    ks: tuple[int, ...] = setting((), "at which depths", least=0)
    way: str = setting("up", "which way", choices=("up", "down"))
    label: str | None = setting(None, "what it is called")
    loud: bool = setting(False, "whether it says so")
    kind: bool = setting(True, "whether it is kind")
    broken: int = setting(99, "where it breaks")


class Toy:
    """Counts; finds fault with a three."""

    Settings = Steps

    def measure(self, settings, scratch, note):
        assert scratch.is_dir()
        for step in range(settings.steps):
            if step == settings.broken:
                raise GridMiss("the toy broke")
            note(f"step {step}")
            yield {"way": settings.way, "step": step, "weight": settings.weights[0]}

    def find_fault(self, samples):
        return "a three" if any(sample["step"] == 3 for sample in samples) else ""

    def make_findings(self, record):
        steps = [sample["step"] for sample in record.samples]
        rows = tuple((f"{step}", "1.0") for step in steps)
        return Findings(
            (Table("Steps of a toy", ("step", "weight"), rows, "Odd."),),
            (Chart("steps-chart", "Steps", "x", "y", (Series("toy", tuple(steps), tuple(map(float, steps))),)),),
        )


@pytest.fixture
def run(command, monkeypatch, tmp_path):
    """dflash-bench with a toy among its benchmarks, in an empty directory."""
    monkeypatch.setitem(bench.BENCHMARKS, "toy", Toy)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command(bench, *arguments)


@pytest.fixture
def measure(run):
    """The toy, into `out`, with what it keeps in `scratch`."""
    return lambda *arguments: run("toy", "--out=docs/results", "--scratch=scratch", *arguments)


def test_benchmark_prints_tables_and_writes_record_and_charts(measure, run):
    done = measure("--steps=3", "--label=a b", "--weights=4,5", "--ks=1,2", "--way=down", "--loud", "--nokind")
    assert done.code == 0
    assert "Steps of a toy\nstep  weight\n0        1.0\n" in done.out and "Odd." in done.out
    assert "dflash-bench: step 2" in done.err
    written = Path("docs/results")
    assert {path.name for path in written.iterdir()} == {"toy.json", "toy-steps-chart.svg"}
    record = read_record(written / "toy.json")
    assert (
        record.command
        == "dflash-bench toy --steps=3 --weights=4.0,5.0 --ks=1,2 --way=down '--label=a b' --loud --nokind"
    )
    assert record.settings == {
        **{"steps": 3, "weights": [4.0, 5.0], "ks": [1, 2], "way": "down"},
        **{"label": "a b", "loud": True, "kind": False, "broken": 99},
    }
    assert [sample["step"] for sample in record.samples] == [0, 1, 2]
    again = run(*shlex.split(record.command)[1:], "--out=again", "--scratch=scratch", "--name=other")
    assert again.code == 0
    assert read_record(Path("again/other.json")).settings == record.settings


def test_void_record_ends_with_1_and_prints_no_tables(measure):
    done = measure("--steps=4")
    assert done.code == 1 and done.out == ""
    assert "void: a three. The samples are in docs/results/toy.json" in done.err
    assert read_record(Path("docs/results/toy.json")).void == "a three"


def test_error_ends_with_its_code_and_keeps_earlier_samples(measure):
    done = measure("--steps=3", "--broken=1")
    assert done.code == GridMiss.exit_code and "the toy broke" in done.err
    record = read_record(Path("docs/results/toy.json"))
    assert len(record.samples) == 1 and "the toy broke" in record.void


WRONG_ARGUMENTS = [
    ((), "no command given; the commands are decode, load, startup"),
    (("--steps=1",), "steps"),
    (("dance",), "dance: no such command; the commands are decode, load, startup"),
    (("toy", "--steps=0"), "--steps 0: at least 1"),
    (("toy", "--weights=1,0.25"), "--weights 1.0,0.25: at least 0.5"),
    (("toy", "--ks=1,x"), "ks"),
    (("toy", "--way=left"), "way"),
    (("toy", "there"), "unexpected 'there'"),
    (("data", "--data=nowhere"), "nowhere: no such file"),
    (("data", "--count=0"), "--count 0: at least 1"),
    (("data", "--target=nowhere"), "nowhere: no such directory"),
    (("render",), "render takes one directory"),
    (("render", "a"), "a has no records"),
]


def test_wrong_arguments_end_with_2_and_a_message(run):
    for arguments, complaint in WRONG_ARGUMENTS:
        done = run(*arguments)
        assert done.code == 2 and complaint in done.err and done.out == ""


def test_data_prints_and_writes_the_questions(run):
    done = run("data", "--count=3", "--jsonl=asked.jsonl")
    assert done.code == 0 and done.out.startswith("held-out: 3 prompts of 3 turns; tokens of the first turns: ")
    assert load_questions("asked.jsonl") == load_questions("held-out", 3)


@pytest.fixture
def rendered(measure, run):
    """A directory whose pages are up to date with its record."""
    measure("--steps=2")
    assert run("render", "docs/results").code == 0


def test_check_names_changed_files_and_writes_nothing(rendered, run):
    page = Path("docs/results.md")
    page.write_text(page.read_text().replace("| 1 |", "| 9 |"))
    done = run("render", "docs/results", "--check")
    assert done.code == 2 and "docs/results.md" in done.err and "dflash-bench render docs/results" in done.err
    assert "| 9 |" in page.read_text()


def test_committed_page_is_up_to_date_with_the_records(command, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert command(bench, "render", "docs/results", "--check").code == 0
