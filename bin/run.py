"""dflash-run: serves a bundle from the command line. Text goes to standard output, everything else to standard error.

dflash-run --bundle DIR|URL --prompt TEXT [--max_tokens N] [--stop TEXT]... [--k auto|N] [--stats] [--json] [--trace]
    [--temperature T --top_k --top_p --min_p --seed] [--repetition_penalty --presence_penalty --frequency_penalty]
    [--logprobs N] [--require_signature PUBLIC.pem]
dflash-run --bundle DIR --input F.jsonl --output F.jsonl
dflash-run --bundle DIR --chat [--thinking]
echo TEXT | dflash-run --bundle DIR
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, TextIO

from absl import flags

from dflash_aot.bin.command_line import decode_text, run_command
from dflash_aot.bin.engine_flags import SamplingFlags, ServedFlags
from dflash_aot.bin.jsonl import answer_lines, dump_json, output_line
from dflash_aot.bin.run_report import Served, format_report, report_fields
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.cache.jax_platform import select_jax_platforms
from dflash_aot.cache.model_config.checkpoint_location import EMBEDDED
from dflash_aot.cache.remote.urls import is_url
from dflash_aot.runtime.diagnostics import diagnose_prompt
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.metrics.process_clock import seconds_since_process_start
from dflash_aot.runtime.requests.request import Result
from dflash_aot.runtime.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
IMPORTED = seconds_since_process_start()

FLAGS = flags.FlagValues()
_SERVED = ServedFlags(FLAGS)
_PROMPT = flags.DEFINE_string("prompt", None, "the text to continue; default: standard input", flag_values=FLAGS)
_CHAT = flags.DEFINE_bool("chat", False, "a conversation, a line each, by the tokenizer's template", flag_values=FLAGS)
_THINKING = flags.DEFINE_bool(
    "thinking",
    False,
    "let the template ask for thinking, for a draft that was trained on it (--chat only)",
    flag_values=FLAGS,
)
_INPUT = flags.DEFINE_string("input", None, "requests, one JSON object a line", flag_values=FLAGS)
_OUTPUT = flags.DEFINE_string("output", None, "where their answers go; default: standard output", flag_values=FLAGS)
_SAMPLING = SamplingFlags(FLAGS)
_STATS = flags.DEFINE_bool("stats", False, "say what happened", flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "answer and statistics as JSON", flag_values=FLAGS)


def main() -> None:
    """The console script."""
    sys.exit(run_command("dflash-run", __doc__, FLAGS, run))


def run() -> None:
    """One of the four ways to be asked."""
    ways = {"--prompt": _PROMPT.value is not None, "--chat": _CHAT.value, "--input": _INPUT.value is not None}
    if sum(ways.values()) > 1:
        raise BadInput(f"{' and '.join(way for way, given in ways.items() if given)} are given: one at a time")
    if _OUTPUT.value is not None and _INPUT.value is None:
        raise BadInput("--output without --input: answers to lines go there, and there are no lines")
    if _THINKING.value and not _CHAT.value:
        raise BadInput("--thinking without --chat: it is for the chat template to read")
    params = _SAMPLING.read()
    for flag, given in (("--trace", params.trace), ("--logprobs", params.logprobs is not None)):
        if given and _INPUT.value is None and not _JSON.value:
            raise BadInput(f"{flag} without --json or --input: there is no place for it beside plain text")
    if _INPUT.value is not None:
        _answer_file(_INPUT.value, params)
    elif _CHAT.value:
        _chat(params)
    else:
        _answer_prompt(params)


def _answer_prompt(params: SamplingParams) -> None:
    prompt = _read_input() if _PROMPT.value is None else _PROMPT.value
    if not prompt:
        raise BadInput("the prompt is empty: give --prompt TEXT, or text on standard input")
    with open_engine() as engine:
        if engine.manifest.target.reference != EMBEDDED and (advice := diagnose_prompt(engine.target, prompt)):
            logger.warning(advice)
        result = _stream_text(engine, prompt, params)
        _report(engine, [result], None if not _JSON.value else result)


def _read_input() -> str:
    """Without the line end that `echo` adds."""
    return decode_text(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _chat(params: SamplingParams) -> None:
    """Until standard input ends; the whole conversation is the prompt of every turn."""
    from dflash_aot.runtime.text.chat_template import render_chat  # noqa: PLC0415  only a chat needs templates

    messages: list[dict[str, str]] = []
    results = []
    with open_engine() as engine:
        for line in _read_turns():
            messages.append({"role": "user", "content": line})
            text = render_chat(engine.target, messages, {"enable_thinking": _THINKING.value})
            # The template has written all special tokens itself.
            prompt = engine.tokenizer.encode(text, add_special_tokens=False)
            results.append(_stream_text(engine, prompt, params))
            if _JSON.value:
                print(output_line(None, results[-1], _SAMPLING.trace), flush=True)
            messages.append({"role": "assistant", "content": results[-1].text or ""})
        _report(engine, results, None)


def _read_turns() -> Iterator[str]:
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = decode_text(sys.stdin.buffer.readline(), "standard input")
        if not line:
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def _answer_file(lines_path: str, params: SamplingParams) -> None:
    """Every line is answered, a broken one with an error; the others never notice."""
    with _open_lines(lines_path) as lines, open_engine() as engine, _open_output(_OUTPUT.value) as output:
        results = []
        for identity, result in answer_lines(engine, lines, params):
            results.append(result)
            output.write(output_line(identity, result, _SAMPLING.trace) + "\n")
            output.flush()
        if failed := sum(result.finish_reason == "error" for result in results):
            print(f"dflash-run: {failed} of {len(results)} lines answered with an error", file=sys.stderr)
        _report(engine, results, None)


def _stream_text(engine: Engine, prompt: str | list[int], params: SamplingParams) -> Result:
    """To standard output as it is committed, unless JSON is asked for."""
    stream = engine.stream(prompt, params)
    for delta in stream:
        if not _JSON.value:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    if not _JSON.value:
        sys.stdout.write("\n")
        sys.stdout.flush()
    try:
        return stream.result()
    except EngineFailed as error:
        raise error.__cause__ or error from None  # a corrupt executable has an exit code of its own


@contextmanager
def open_engine() -> Iterator[Engine]:
    """The engine that the flags describe; on the platform that the bundle is for."""
    bundle = _locate_bundle()
    select_jax_platforms(read_manifest(bundle, _SERVED.signed_by).environment.platform)
    with Engine.open(
        bundle,
        _SERVED.target,
        _SERVED.draft,
        k=_SERVED.k,
        require_signature=_SERVED.signed_by,
        # A file of requests waits for all executables: what is wrong with one is told before the first answer.
        preload=_INPUT.value is not None,
    ) as engine:
        yield engine


def _locate_bundle() -> Path:
    """Its directory, which is a copy of what lies behind a URL."""
    bundle = _SERVED.bundle
    if is_url(bundle):
        from dflash_aot.bin.bundle_changes import fetch_with_progress  # noqa: PLC0415  most runs need no fetch

        return fetch_with_progress(bundle, _SERVED.signed_by)
    return Path(bundle)


def _open_lines(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise BadInput(f"--input {path}: {error.strerror}") from error


def _open_output(path: str | None) -> AbstractContextManager[TextIO]:
    if path is None:
        return nullcontext(sys.stdout)
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--output {path}: {error.strerror}") from error


def _report(engine: Engine, results: list[Result], answer: Result | None) -> None:
    """Statistics to standard error; as JSON beside the answer where there is one."""
    startup, dialect = {"imports": IMPORTED, **engine.startup}, engine.manifest.draft.facts.dialect
    served = Served(startup, dialect, engine.k, engine.executables, results, engine.stats())
    if answer is not None:
        line = json.loads(output_line(None, answer, _SAMPLING.trace))
        print(dump_json({**line, **({"stats": report_fields(served)} if _STATS.value else {})}))
    elif _STATS.value:
        print(json.dumps(report_fields(served)) if _JSON.value else format_report(served), file=sys.stderr)


if __name__ == "__main__":
    main()
