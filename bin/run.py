"""dflash-run: generates text with a bundle. The text goes to standard output, everything else to standard error.

dflash-run --bundle DIR|URL [--target DIR --draft DIR] --prompt TEXT [--max_tokens N] [--stop TEXT]... [--k auto|N]
    [--speculative_config JSON] [--hosts N --host_rank I --leader HOST:PORT]
    [--stats] [--json] [--trace]
    [--temperature T --top_k --top_p --min_p --seed] [--repetition_penalty --presence_penalty --frequency_penalty]
    [--logprobs N] [--prompt_logprobs N] [--min_tokens N] [--ignore_eos] [--require_signature PUBLIC.pem]
dflash-run --bundle DIR --input F.jsonl|- [--output G.jsonl [--resume]]
dflash-run --bundle DIR --chat [--thinking]
echo TEXT | dflash-run --bundle DIR
"""

import io
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from absl import flags

from dflash_aot.bin.command_line import (
    decode_text,
    name_phase,
    print_json,
    print_lines,
    run_command,
    seconds_since_process_start,
)
from dflash_aot.bin.engine_flags import EngineFlags, SamplingFlags, leave
from dflash_aot.bin.jsonl import (
    AnsweredLines,
    answer_lines,
    dump_json,
    output_line,
    read_answered,
)
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import BadInput, EngineFailed, RequestsFailed
from dflash_aot.cache.files.atomic_files import check_output, open_output
from dflash_aot.cache.files.locations import EMBEDDED, is_url
from dflash_aot.runtime.diagnostics import diagnose_prompt
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.metrics.counters import Counters, summarize_acceptance
from dflash_aot.runtime.requests.request import Delta, Result
from dflash_aot.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dflash_aot.server.tool_parsers import AnswerParser

logger = logging.getLogger(__name__)
IMPORTED = seconds_since_process_start()
STANDARD_INPUT = "-"

FLAGS = flags.FlagValues()
_ENGINE = EngineFlags(FLAGS)
_PROMPT = flags.DEFINE_string(
    "prompt", None, "the prompt; default: read from standard input", flag_values=FLAGS
)
_CHAT = flags.DEFINE_bool(
    "chat",
    False,
    "chat: each line of standard input is a user message, put through the chat template",
    flag_values=FLAGS,
)
_THINKING = flags.DEFINE_bool(
    "thinking",
    False,
    "with --chat: render the chat template with enable_thinking, for a draft trained on such texts",
    flag_values=FLAGS,
)
_INPUT = flags.DEFINE_string(
    "input",
    None,
    "a file of requests, one JSON object per line; - for standard input",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "the file for the results of --input; default: standard output",
    flag_values=FLAGS,
)
_RESUME = flags.DEFINE_bool(
    "resume",
    False,
    "keep the results in --output, and answer the lines of --input after them",
    flag_values=FLAGS,
)
_SAMPLING = SamplingFlags(FLAGS)
_STATS = flags.DEFINE_bool("stats", False, "print statistics of the run", flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "print results and statistics as JSON", flag_values=FLAGS)


def main() -> None:
    """The console script `dflash-run`."""
    leave(run_command("dflash-run", __doc__, FLAGS, run))


def run() -> None:
    """Generates from --prompt, --chat, --input or standard input, as the flags say."""
    sources = {
        "--prompt": _PROMPT.value is not None,
        "--chat": _CHAT.value,
        "--input": _INPUT.value is not None,
    }
    if sum(sources.values()) > 1:
        raise BadInput(
            f"{' and '.join(flag for flag, given in sources.items() if given)} are given: choose one"
        )
    if _OUTPUT.value is not None and _INPUT.value is None:
        raise BadInput("--output without --input: it is the file for the results of --input")
    if _RESUME.value and _OUTPUT.value is None:
        raise BadInput("--resume without --output: it continues after the results in that file")
    if _THINKING.value and not _CHAT.value:
        raise BadInput("--thinking without --chat: only the chat template reads it")
    params = _SAMPLING.read()
    for flag, given in (
        ("--trace", params.trace),
        ("--logprobs", params.logprobs is not None),
        ("--prompt_logprobs", params.prompt_logprobs is not None),
    ):
        if given and _INPUT.value is None and not _JSON.value:
            raise BadInput(f"{flag} without --json or --input: plain text cannot show it")
    if _ENGINE.join_hosts():
        return
    if _INPUT.value is not None:
        _generate_lines(_INPUT.value, params)
    elif _CHAT.value:
        _chat(params)
    else:
        _generate_prompt(params)


def _generate_prompt(params: SamplingParams) -> None:
    prompt = _read_input() if _PROMPT.value is None else _PROMPT.value
    if not prompt:
        raise BadInput("the prompt is empty: give --prompt TEXT or write text to standard input")
    with open_engine() as engine:
        if engine.manifest.target.reference != EMBEDDED and (
            advice := diagnose_prompt(engine.target, prompt)
        ):
            logger.warning(advice)
        result = _stream_text(engine, prompt, params)
        _report(engine, [result], None if not _JSON.value else result)


def _read_input() -> str:
    """Standard input without the line end that `echo` adds."""
    return decode_text(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _chat(params: SamplingParams) -> None:
    """Runs a chat until standard input ends. The prompt of every turn is the whole conversation so far.

    Thinking, where the chat template has markers for it, goes to standard error.
    """
    # Only a chat needs templates and their parsers.
    from dflash_aot.runtime.text.chat_template import read_chat_template, render_chat  # noqa: PLC0415
    from dflash_aot.server.chat_families import find_channels  # noqa: PLC0415
    from dflash_aot.server.tool_parsers import make_parser  # noqa: PLC0415

    messages: list[Mapping[str, str]] = []
    results = []
    with open_engine() as engine:
        tokenizer = engine.tokenizer
        channels = find_channels(read_chat_template(engine.target) or "", tokenizer.added_tokens)
        family = channels.family if channels else None
        markers = channels.surrogates if channels else {}
        for line in _read_messages():
            messages.append({"role": "user", "content": line})
            history = family.fit_history(messages) if family else messages
            spelled = [
                {key: tokenizer.break_special_tokens(text) for key, text in message.items()}
                for message in history
            ]
            text = render_chat(engine.target, spelled, {"enable_thinking": _THINKING.value})
            parser = make_parser(family, None, family.find_opening(text) if family else "")
            prompt = tokenizer.encode_chat(text)
            answer = SplitAnswer(parser)
            result = _stream_text(engine, prompt, params, answer, markers)
            results.append(replace(result, text=answer.text))
            if _JSON.value:
                print(_format_turn(results[-1], answer), flush=True)
            thought = {"reasoning_content": answer.thinking} if answer.thinking else {}
            # Templates that are given thinking write the lines after it themselves.
            content = answer.text.lstrip("\n") if thought else answer.text
            messages.append({"role": "assistant", "content": content, **thought})
        _report(engine, results, None)


def _format_turn(result: Result, answer: "SplitAnswer") -> str:
    """An answer as JSON, with the server's `reasoning_content` where the model has thought."""
    line = output_line(None, result, _SAMPLING.trace)
    if not answer.thinking:
        return line
    return dump_json({**json.loads(line), "reasoning_content": answer.thinking})


@dataclass
class SplitAnswer:
    """An answer whose thinking is apart from its text.

    Attributes:
        parser: of the answer; None where all of it is text.
        thinking, text: so far.
    """

    parser: "AnswerParser | None" = None
    thinking: str = ""
    text: str = ""

    def read(self, delta: Delta) -> tuple[str, str]:
        """The thinking and the text that are new with a delta."""
        thinking, text = "", delta.text
        if self.parser:
            from dflash_aot.server.tool_parsers import join_text, join_thinking  # noqa: PLC0415

            parts = self.parser.push(delta.text)
            if delta.finish_reason:
                parts += self.parser.flush(delta.finish_reason != "stop")
            thinking = join_thinking(parts)
            text = join_text(parts)
        self.thinking += thinking
        self.text += text
        return thinking, text


def _read_messages() -> Iterator[str]:
    """Lines of standard input, each after a "> " on standard error; empty lines are skipped."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = decode_text(sys.stdin.buffer.readline(), "standard input")
        if not line:
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def _generate_lines(lines_path: str, params: SamplingParams) -> None:
    """Writes a result for every line of a file; an invalid line gets an error and does not affect the others.

    Raises BadInput where every line failed, RequestsFailed where some did, EngineFailed where the engine fails: then
    the lines after that have no results, so that --resume answers them.
    """
    _check_output()
    answered = _read_answered()
    with (
        _open_lines(lines_path) as lines,
        open_engine() as engine,
        _open_results(answered.size) as write,
    ):
        results = []
        for identity, result in answer_lines(engine, lines, params, answered.ids):
            if result.finish_reason == "error" and engine.failure:
                raise EngineFailed(f"{engine.failure}. Earlier lines have results: see --resume")
            # a file may have millions of lines
            results.append(replace(result, text="", logprobs=None, prompt_logprobs=None))
            write(output_line(identity, result, _SAMPLING.trace) + "\n")
        _report(engine, results, None)
        failed = answered.failed + sum(result.finish_reason == "error" for result in results)
        count = len(answered.ids) + len(results)
        if failed and failed == count:
            reason = f"all {failed} requests failed; their result lines say why"
            raise BadInput(reason)
        if failed:
            raise RequestsFailed(f"{failed} of {count} requests failed; their result lines say why")


def _read_answered() -> AnsweredLines:
    """The results that --resume keeps. Raises BadInput."""
    if not _RESUME.value or _OUTPUT.value is None:
        return AnsweredLines()
    return read_answered(Path(_OUTPUT.value))


def _stream_text(
    engine: Engine,
    prompt: str | list[int],
    params: SamplingParams,
    answer: SplitAnswer | None = None,
    markers: Mapping[int, str] | None = None,
) -> Result:
    """Generates and prints the text, as tokens are committed; prints nothing with --json.

    answer: splits the text; its thinking is printed to standard error. markers: as `RequestOptions` has them.
    """
    answer = answer or SplitAnswer()
    stream = engine.stream(prompt, params, markers=markers or {})
    for delta in stream:
        thinking, text = answer.read(delta)
        if _JSON.value:
            continue
        if thinking:
            sys.stderr.write(thinking)
            sys.stderr.flush()
        if text and len(text) == len(answer.text) and answer.thinking:  # the text begins
            print(file=sys.stderr, flush=True)
        sys.stdout.write(text)
        sys.stdout.flush()
    if not _JSON.value:
        sys.stdout.write("\n")
        sys.stdout.flush()
    try:
        return stream.result()
    except EngineFailed as error:
        raise error.__cause__ or error from None  # CorruptBundle has another exit code


@contextmanager
def open_engine() -> Iterator[Engine]:
    """Opens the engine that the flags describe, on the platform that the bundle was built for."""
    bundle = _locate_bundle()
    select_jax_platforms(read_manifest(bundle, _ENGINE.signed_by).environment.platform)
    with Engine.open(
        bundle,
        _ENGINE.target,
        _ENGINE.draft,
        k=_ENGINE.k,
        require_signature=_ENGINE.signed_by,
        # A file of requests loads all executables first, so that a corrupt one is reported before the first result.
        preload=_INPUT.value is not None,
    ) as engine:
        yield engine


def _locate_bundle() -> Path:
    """The bundle's directory; a bundle at a URL is fetched first."""
    bundle = _ENGINE.bundle
    if is_url(bundle):
        from dflash_aot.bin.bundle_changes import fetch_with_progress  # noqa: PLC0415  imports tqdm: 40 ms

        return fetch_with_progress(bundle, _ENGINE.signed_by)
    return Path(bundle)


@contextmanager
def _open_lines(path: str) -> Iterator[BinaryIO]:
    """The file of requests; "-" is standard input. Raises BadInput."""
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    try:
        lines = open(path, "rb")  # noqa: SIM115  closed below
    except OSError as error:
        raise BadInput(f"--input {path}: {error.strerror}") from error
    with lines:
        yield lines


def _open_results(kept: int) -> AbstractContextManager[Callable[[str], None]]:
    """What writes the results: to --output after its first `kept` bytes, else to standard output."""
    return (
        nullcontext(_print_at_once)
        if _OUTPUT.value is None
        else open_output("--output", _OUTPUT.value, kept)
    )


def _print_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _check_output() -> None:
    """Raises BadInput for an output that is one of the files that are read: opening it would empty it."""
    signed_by = _ENGINE.signed_by
    bundle = _ENGINE.bundle
    inputs = {
        "--input": None if _INPUT.value == STANDARD_INPUT else _INPUT.value,
        "--require_signature": signed_by,
        "the bundle's manifest": None if is_url(bundle) else Path(bundle) / MANIFEST_FILE,
    }
    if _OUTPUT.value is not None:
        check_output("--output", _OUTPUT.value, inputs)
    else:
        # Not a file: the caller is a program that collects the output.
        with suppress(io.UnsupportedOperation):
            check_output("standard output", sys.stdout.fileno(), inputs)


def _report(engine: Engine, results: list[Result], single: Result | None) -> None:
    """Prints the statistics to standard error; with a `single` result as JSON, they are part of that object."""
    startup = {"imports": IMPORTED, **engine.startup}
    dialect = engine.manifest.draft.facts.dialect
    finished = FinishedRun(
        startup, dialect, engine.k, engine.executables, engine.weights, results, engine.stats()
    )
    if single is not None:
        line = json.loads(output_line(None, single, _SAMPLING.trace))
        print(dump_json({**line, **({"stats": report_fields(finished)} if _STATS.value else {})}))
    elif _STATS.value and _JSON.value:
        print_json(report_fields(finished), file=sys.stderr)
    elif _STATS.value:
        print_lines(*format_report(finished), file=sys.stderr)


# -- statistics


@dataclass(frozen=True)
class FinishedRun:
    """What the statistics are computed from.

    Attributes:
        startup: seconds of each start-up phase.
        dialect: checkpoint format of the draft.
        k: largest K that the engine may choose.
        executables: how many executables the engine can call.
        weights: the fingerprint of the weights.
        results: result of every request.
        counters: the engine's counters at the end.
    """

    startup: Mapping[str, float]
    dialect: str
    k: int
    executables: int
    weights: str
    results: Sequence[Result]
    counters: Counters


def report_fields(run: FinishedRun) -> dict[str, Any]:
    """All statistics by name. Times are in seconds."""
    started = [result for result in run.results if result.first_token_seconds is not None]
    counters = run.counters
    speculation = summarize_acceptance(run.results, run.counters)
    tokens = sum(len(result.token_ids) for result in started)
    return {
        "startup_seconds": {**run.startup, "total": sum(run.startup.values())},
        "executables": run.executables,
        "executables_loaded": counters.loaded,
        "dialect": run.dialect,
        "weights": run.weights,
        "k": run.k,
        "requests": len(run.results),
        "tokens": tokens,
        "time_to_first_token": _median([result.first_token_seconds for result in started]),
        "time_per_output_token": _median(
            [_seconds_per_output_token(result) for result in started if len(result.token_ids) > 1]
        ),
        "rounds": counters.rounds,
        "rounds_per_k": {str(k): rounds for k, rounds in _count_per_k(counters).items()},
        "sampled_rounds": sum(
            rounds for (_, sampled), rounds in counters.bucket_rounds.items() if sampled
        ),
        "padding_waste": _padding_waste(counters),
        "cached_tokens": counters.prefix_hits,
        "preemptions": counters.preemptions,
        "evictions": counters.evictions,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "tau_micro": speculation.micro_tau,
        "tau_mean": speculation.mean_tau,
        "acceptance_per_position": list(speculation.per_position),
        "host_seconds_per_round": counters.host_seconds / counters.rounds
        if counters.rounds
        else None,
        "host_wall_seconds_per_round": counters.host_wall_seconds / counters.rounds
        if counters.rounds
        else None,
        "compile_events": counters.compile_events,
    }


def format_report(run: FinishedRun) -> list[str]:
    """The statistics as lines of text."""
    fields = report_fields(run)
    phases = ", ".join(
        f"{name_phase(name)} {seconds:.2f} s" for name, seconds in run.startup.items()
    )
    per_position = " ".join(f"{share:.2f}" for share in fields["acceptance_per_position"])
    lines = [
        ("start-up", f"{fields['startup_seconds']['total']:.2f} s: {phases}"),
        ("executables", f"{fields['executables']}, {fields['executables_loaded']} of them loaded"),
        ("draft", f"{run.dialect} format"),
        ("weights", run.weights),
        ("requests", f"{fields['requests']}, {fields['tokens']} tokens"),
        ("time to first token", _format_milliseconds(fields["time_to_first_token"])),
        ("time per output token", _format_milliseconds(fields["time_per_output_token"])),
        ("rounds", _format_rounds(fields)),
        ("padding waste", _format_padding(fields["padding_waste"])),
        (
            "prompt tokens reused",
            f"{fields['cached_tokens']}; {fields['evictions']} kv pages evicted",
        ),
        ("preemptions", str(fields["preemptions"])),
        (
            "tokens per round (τ)",
            f"{fields['tau_micro']:.2f} over rounds, {fields['tau_mean']:.2f} over requests",
        ),
        ("draft tokens", f"{fields['drafted']} verified, {fields['accepted']} accepted"),
        ("accepted per position", per_position or "-"),
        ("host time per round", _format_host_time(fields)),
        ("compile events", f"{fields['compile_events']} while serving"),
    ]
    return [f"{name:<22} {value}" for name, value in lines]


def _seconds_per_output_token(result: Result) -> float:
    """Seconds per token after the first token (TPOT)."""
    assert result.first_token_seconds is not None
    return (result.seconds - result.first_token_seconds) / (len(result.token_ids) - 1)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _format_host_time(fields: dict[str, Any]) -> str:
    work, wall = (
        _format_milliseconds(fields[f"host_{kind}seconds_per_round"]) for kind in ("", "wall_")
    )
    return f"{work} of work, {wall} by the clock"


def _count_per_k(counters: Counters) -> dict[int, int]:
    """Number of rounds at each K, the smallest K first."""
    per_k: dict[int, int] = {}
    for (bucket, _), rounds in sorted(counters.bucket_rounds.items()):
        per_k[bucket.k] = per_k.get(bucket.k, 0) + rounds
    return dict(sorted(per_k.items()))


def _padding_waste(counters: Counters) -> float | None:
    """Share of the computed batch rows that no request used; None without a round."""
    rows = sum(bucket.batch * rounds for (bucket, _), rounds in counters.bucket_rounds.items())
    return counters.padded_rows / rows if rows else None


def _format_rounds(fields: dict[str, Any]) -> str:
    """Rounds at each K, and how many rounds sampled."""
    sampled = fields["sampled_rounds"]
    text = ", ".join(f"{rounds} of K = {k}" for k, rounds in fields["rounds_per_k"].items()) or "0"
    return f"{text}; {sampled} of them sampled" if sampled else text


def _format_padding(waste: float | None) -> str:
    return "-" if waste is None else f"{waste:.1%} of the rows computed"


def _format_milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
