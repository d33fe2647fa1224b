"""dflash-serve, as far as its command line goes; the server itself: tests/server."""

import pytest

from dflash_aot.bin import serve


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host=0.0.0.0"], "open to other machines, and no API key is asked for: set DFLASH_API_KEY"),
        (["--host=::"], "no API key is asked for"),
        (["--host=example"], "no API key is asked for"),
        (["--port=65536"], "port"),
        (["--api_keys=/none"], "/none, cannot be read: No such file"),
        (["--tls_key=key.pem"], "both are needed"),
        (["--tls_key=key.pem", "--tls_certificate=chain.pem"], "--tls_certificate chain.pem, --tls_key key.pem:"),
        (["--k=some"], "--k some: must be auto, or a whole number"),
        (["--max_per_key=0"], "max_per_key"),
        (["--request_seconds=0"], "request_seconds"),
        (["--request_seconds=nan"], "--request_seconds nan: a number is needed"),
        (["--drain_seconds=inf"], "drain_seconds"),
        (["--temperature=-1"], "temperature"),
        (["--served_model_name="], "--served_model_name '': a name is needed"),
        (["--draft=/somewhere"], "/somewhere: no such directory"),
        (["stray"], "all arguments are flags"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_opened(command, arguments, words):
    done = command(serve, *arguments)
    assert done.code == 2 and words in done.err and "listening" not in done.err


def test_no_key_may_be_empty(command, monkeypatch):
    monkeypatch.setenv("DFLASH_API_KEY", "")
    done = command(serve)
    assert done.code == 2 and "DFLASH_API_KEY: the key is empty" in done.err


def test_short_keys_and_texts_in_the_clear_are_warned_of(command, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DFLASH_API_KEY", "short")
    done = command(serve, "--host=0.0.0.0", "--port=0", f"--bundle={tmp_path}")
    assert done.code == 2 and "there is no bundle" in done.err
    short, clear = (record.getMessage() for record in caplog.records)
    assert "less than 16 characters" in short and "cross the network as they are" in clear


def test_the_help_names_its_flags(command):
    done = command(serve, "--help")
    assert done.code == 0 and "--served_model_name" in done.out and "DFLASH_API_KEY" in done.out
