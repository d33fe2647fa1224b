"""The dflash-run command: what it writes to which stream, its flags, refusals and exit codes."""

import json
import re
import shlex
import threading

import pytest

from dflash_aot.bin import precompile, run
from dflash_aot.bin.jsonl import answer_lines
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.server.chat_families import QWEN

PROMPT = "def bundle"


@pytest.fixture(scope="session")
def served(bundle, speaking_target) -> list[str]:
    return [f"--bundle={bundle('tiny')}", f"--target={speaking_target}"]


def test_standard_output_holds_only_the_text(command, served, speaking_target):
    plain = command(run, *served, f"--prompt={PROMPT}", "--max_tokens=12")
    assert (plain.code, plain.err) == (0, "")
    piped = command(run, *served, "--max_tokens=12", "--k=0", stdin=PROMPT.encode() + b"\n")
    assert piped == plain
    told = command(run, *served, f"--prompt={PROMPT}", "--max_tokens=12", "--k=3", "--json", "--trace", "--stats")
    answer = json.loads(told.out)
    assert answer["text"] + "\n" == plain.out
    assert answer["text"] == Tokenizer.open(speaking_target).decode(answer["token_ids"])
    assert len(answer["token_ids"]) == 12 and answer["finish_reason"] == "length"
    assert [len(block) for block in answer["drafted"]] == [3] * len(answer["accepted"])
    assert answer["stats"]["compile_events"] == 0 and answer["stats"]["k"] == 3
    assert answer["error"] is None and told.err == "" and "logprobs" not in answer
    assert answer["stats"]["rounds_per_k"] == {"3": answer["stats"]["rounds"]}
    assert (answer["stats"]["padding_waste"], answer["stats"]["sampled_rounds"]) == (0, 0)


def test_stats_go_to_standard_error(command, served):
    done = command(run, *served, f"--prompt={PROMPT}", "--max_tokens=12", "--k=3", "--stats")
    assert done.code == 0
    times = ("start-up", "imports", "weights", "time to first token", "per output token")
    for words in (*times, "τ", "of K = 3", "padding waste", "0 while serving"):
        assert words in done.err and words not in done.out


def test_chat_prompt_is_the_whole_conversation(command, served, chatting_target):
    target, flags = f"--target={chatting_target}", ("--chat", "--max_tokens=3")
    done = command(run, served[0], target, *flags, stdin=b"de\n\nf b\n")
    first = command(run, served[0], target, "--prompt=de", "--max_tokens=3").out
    assert done.code == 0 and done.out.startswith(first)
    said = "de" + first.removesuffix("\n") + "f b"
    second = command(run, served[0], target, f"--prompt={said}", "--max_tokens=3").out
    assert done.out == first + second
    assert done.err.count("> ") == 4  # two turns, an empty line, the end
    lines = command(run, served[0], target, *flags, "--json", stdin=b"de\n\nf b\n").out
    assert "".join(json.loads(line)["text"] + "\n" for line in lines.splitlines()) == done.out
    thinking = command(run, served[0], target, *flags, "--thinking", stdin=b"de\n").out
    assert thinking == command(run, served[0], target, "--prompt=de why", "--max_tokens=3").out != first


def test_thinking_of_a_chat_goes_to_standard_error(command, bundle, make_target):
    template = "{{ messages|map(attribute='content')|join }}{% if enable_thinking %}<think>{% endif %}"
    served = (f"--bundle={bundle('served')}", f"--target={make_target(template, QWEN.markers[:2])}")
    flags = (*served, "--max_tokens=4", "--temperature=0", "--k=0")
    text = command(run, *flags, "--prompt=def<think>").out
    thoughtful = command(run, *flags, "--chat", "--thinking", stdin=b"def\n")
    assert (thoughtful.out, thoughtful.err) == ("\n", f"> {text.removesuffix(chr(10))}> \n")
    turn = json.loads(command(run, *flags, "--chat", "--thinking", "--json", stdin=b"def\n").out)
    assert (turn["text"], turn["reasoning_content"] + "\n") == ("", text)
    assert command(run, *flags, "--chat", stdin=b"def\n").out == command(run, *flags, "--prompt=def").out


LINES = [
    b'{"id": 1, "prompt": "def bundle", "max_tokens": 5}',
    b'{"id": "two", "prompt": "def bun',
    b'{"id": 3, "prompt_ids": [1, 2, 3], "max_tokens": 5}',
    b'{"id": 4, "prompt": "x", "prompt_ids": [1]}',
    b'{"id": 5}',
    b'{"id": 6, "prompt": "x", "max_token": 5}',
    b'{"id": 7, "prompt_ids": [1, 2, 3], "max_tokens": 40}',
    b'{"id": 8, "prompt_ids": [1, 999]}',
    b"[1, 2]",
    b"\xff\xfe",
    b'{"id": 11, "prompt_ids": "1 2 3"}',
    b'{"id": 12, "prompt": 3}',
    b'{"id": 13, "prompt_ids": [1], "temperature": 0.5}',
    b'{"id": 14, "prompt_ids": [1], "stop": "x"}',
    b'{"id": 15, "prompt_ids": [1], "stop_token_ids": 3}',
    b"",
    b'{"id": {"any": ["thing"]}, "prompt_ids": [1, 2, 3], "max_tokens": 5, "stop": null}',
    b'{"prompt": "", "max_tokens": 5}',
    b'{"prompt": "\\ud800"}',
    b'{"id": 20, "prompt_ids": [1, 2, 3], "stop_token_ids": []}',
]
ERRORS = {
    2: "line 2: not JSON",
    4: "prompt and prompt_ids",
    5: "neither",
    6: "line 6: unknown fields max_token;",
    7: "line 7: outside the grid: batch=1, length=42",
    8: "999",
    9: "line 9: a list, not an object",
    10: "line 10: not JSON",
    11: "list of token ids",
    12: "text is needed",
    13: "temperature",
    14: "stop",
    15: "stop_token_ids",
    18: "empty",
    19: "UTF-8",
}


def test_every_input_line_is_answered_in_order(command, served, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(LINES))
    files = [f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
    done = command(run, *served, *files, "--trace")
    assert (done.code, done.out) == (7, "")
    summary = f"dflash-run: {len(ERRORS)} of {len(LINES) - 1} requests failed; their result lines say why\n"
    assert done.err.endswith(summary)
    whole = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(whole[:7]) + whole[7][:9])  # a run that was stopped
    done = command(run, *served, *files, "--trace", "--resume")
    assert done.code == 7 and done.err.endswith(summary)
    answers = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)[:7] == whole[:7]
    numbers = [number for number, line in enumerate(LINES, 1) if line]
    assert [answer["id"] for answer in answers] == [
        1, None, 3, 4, 5, 6, 7, 8, None, None, 11, 12, 13, 14, 15, {"any": ["thing"]}, None, None, 20
    ]  # fmt: skip
    by_number = dict(zip(numbers, answers, strict=True))
    for number, answer in by_number.items():
        assert (answer["finish_reason"] == "error") == (number in ERRORS) == (answer["error"] is not None)
        if number in ERRORS:
            assert ERRORS[number] in answer["error"] and answer["token_ids"] == []
            assert answer["error"].startswith(f"line {number}: ")
    assert by_number[1]["text"] and by_number[1]["prompt_tokens"] > 1
    assert by_number[3]["token_ids"] == by_number[17]["token_ids"] == by_number[20]["token_ids"][:5]
    assert len(by_number[3]["token_ids"]) == 5
    assert len(by_number[20]["token_ids"]) == 30  # to the end of the grid
    assert all(len(block) <= 3 for answer in answers for block in answer["drafted"])


def test_result_is_returned_before_the_next_line_is_written(bundle):
    answered, ids = threading.Event(), []

    def ask():
        for number in range(3):
            yield b'{"id": %d, "prompt_ids": [1, 2], "max_tokens": 2}' % number
            assert answered.wait(60)
            answered.clear()

    with Engine.open(bundle("tiny"), k=0) as engine:
        for identity, result in answer_lines(engine, ask(), SamplingParams()):
            ids.append(identity)
            assert len(result.token_ids) == 2
            answered.set()
    assert ids == [0, 1, 2]


WRONG_FLAGS = [
    (["--unknown=1"], "unknown"),
    (["hello"], "unexpected 'hello'"),
    (["--prompt=a", "--chat"], "--prompt and --chat are given"),
    (["--prompt=a", "--input=b"], "--prompt and --input are given"),
    (["--prompt=a", "--output=b"], "--output without --input"),
    (["--prompt="], "prompt is empty"),
    (["--prompt=a", "--max_tokens=-1"], "max_tokens"),
    (["--prompt=a", "--temperature=-1"], "temperature is -1.0"),
    (["--prompt=a", "--min_p=2"], "min_p is 2.0"),
    (["--prompt=a", "--frequency_penalty=inf"], "frequency_penalty is inf"),
    (["--prompt=a", "--logprobs=21", "--json"], "logprobs is 21"),
    (["--prompt=a", "--logprobs=1"], "--logprobs without --json"),
    (["--prompt=a", "--thinking"], "--thinking without --chat"),
    (["--prompt=a", "--stop="], "stop"),
    (["--prompt=a", "--k=most"], "--k most"),
    (["--prompt=a", "--k=-1"], "--k -1"),
    (["--prompt=a", "--trace"], "--json"),
    (["--input=/nowhere/in.jsonl"], "/nowhere/in.jsonl"),
    (["--input=-", "--output=/nowhere/out.jsonl"], "/nowhere/out.jsonl"),
    (["--input=-", "--output=/dev/full"], "--output /dev/full: No space left on device"),
    (["--bundle=/nowhere/none", "--prompt=a"], "dflash-precompile --bundle /nowhere/none"),
    (["--prompt=a", "--draft=/nowhere"], "/nowhere"),
]


def test_wrong_flags_are_refused_by_name(command, served):
    for arguments, words in WRONG_FLAGS:
        done = command(run, *served, *arguments, stdin=LINES[0])
        assert (done.code, done.out) == (2, "")
        assert words in done.err and done.err.startswith("dflash-run: ")


def test_output_that_is_the_input_is_refused_and_kept(command, served, tmp_path, monkeypatch):
    lines = tmp_path / "in.jsonl"
    lines.write_bytes(LINES[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("in.jsonl")
    (tmp_path / "hard").hardlink_to(lines)
    for output in ("link", "hard", "in.jsonl", f"../{tmp_path.name}/./in.jsonl"):
        done = command(run, *served, f"--input={lines}", f"--output={output}")
        assert done.code == 2 and f"--output {output} is the same file as --input {lines}" in done.err
        assert lines.read_bytes() == LINES[0]


def test_resume_needs_the_results_of_the_same_input(command, served, tmp_path):
    (tmp_path / "in").write_bytes(LINES[0] + b"\n" + LINES[2] + b"\n")
    files = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--resume"]
    ok = '{"id": %s, "finish_reason": "stop"}\n'
    for written, words in [
        (ok % 2, "line 1 of the input has the id 1, its result has 2"),
        (ok % 1 + ok % 3 + ok % 4, "the output has 3 results, 1 more than the input has lines"),
        ('{"a": 1}\n', "out, line 1, is no result: 'id'"),
    ]:
        (tmp_path / "out").write_text(written)
        done = command(run, *served, *files)
        assert done.code == 2 and words in done.err
        assert (tmp_path / "out").read_text() == written
    assert "--resume without --output" in command(run, *served, files[0], "--resume").err


def test_lines_may_come_from_standard_input(command, served):
    done = command(run, *served, "--input=-", "--stats", "--json", stdin=LINES[0] + b"\n" + LINES[2] + b"\n")
    assert done.code == 0
    assert [json.loads(line)["id"] for line in done.out.splitlines()] == [1, 3]
    assert json.loads(done.err)["requests"] == 2


def test_file_whose_requests_all_fail_exits_with_2(command, served):
    done = command(run, *served, "--input=-", stdin=LINES[1] + b"\n" + LINES[4] + b"\n")
    assert done.code == 2 and "dflash-run: all 2 requests failed" in done.err
    assert [json.loads(line)["finish_reason"] for line in done.out.splitlines()] == ["error", "error"]


GRID_MISSES = (
    (["--prompt=a", "--max_tokens=100"], "batch=1 length=32,100 k=0,3 prefill=16"),
    (["--prompt=" + "x y z " * 20], "batch=1 length=32,120 k=0,3 prefill=16"),
    (["--prompt=a", "--k=2"], "batch=1 length=32 k=0,2,3 prefill=16"),
)
OTHER_MISSES = (
    (["--prompt=a", "--k=99"], "More than k=7 cannot be added: a block has 8 tokens"),
    (["--prompt=a", "--temperature=0.8"], "--sampling greedy,sample"),
)


def test_command_in_a_grid_miss_can_be_pasted(command, served, bundle):
    for flags, buckets in GRID_MISSES:
        done = command(run, *served, *flags)
        words = shlex.split(done.err.split(": dflash-precompile ")[1])
        assert done.code == 6 and words[:2] == ["--bundle", str(bundle("tiny"))] and buckets in words
    planned = command(precompile, *words, "--plan", "--json")
    assert json.loads(planned.out)["grid"] == buckets
    for flags, remedy in OTHER_MISSES:
        done = command(run, *served, *flags)
        assert (done.code, done.out) == (6, "") and remedy in done.err


def test_version_names_the_package_and_its_compiler(command):
    done = command(run, "--version")
    assert done.code == 0 and re.fullmatch(r"dflash-aot \d+\.\d+\.\d+\S*, jaxlib \d+\.\d+\S*\n", done.out)
    assert "(default: 'false')" not in command(run, "--help").out


def test_every_sampling_flag_reaches_the_engine(command, bundle, tmp_path):
    asked = {"max_tokens": 100, "temperature": 3.0, "seed": 4, "top_k": 10, "top_p": 0.8, "min_p": 0.2}
    asked |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [1, 2, 3]}')
    where = [f"--bundle={bundle('sampled_small')}", f"--input={tmp_path / 'in.jsonl'}"]
    answer = json.loads(command(run, *where, *(f"--{name}={value}" for name, value in asked.items())).out)
    params = SamplingParams(**asked)
    with Engine.open(bundle("sampled_small")) as engine:
        assert engine.generate([1, 2, 3], params).token_ids == answer["token_ids"]
