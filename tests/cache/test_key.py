"""Keys of executables."""

from dflash_aot.cache.key import executable_key


def test_compiler_options_change_the_key_and_their_order_does_not(manifest):
    signature, environment = manifest.entries[0].signature, manifest.environment

    def key(**options: str) -> str:
        return executable_key(b"program", signature, environment, options)

    assert len({key(), key(a="1"), key(a="2"), key(a="1", b="1")}) == 4
    assert key(a="1", b="2") == key(b="2", a="1")
