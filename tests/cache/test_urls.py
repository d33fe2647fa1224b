"""Which places are URLs, and that no secret of theirs is shown."""

import pytest

from dflash_aot.cache.remote.urls import hide_secrets, is_url


@pytest.mark.parametrize("place", ["s3://bucket/a", "file:///a", "memory://", "simplecache::s3://bucket", "S3://b"])
def test_a_url_is_one(place):
    assert is_url(place)


@pytest.mark.parametrize("place", ["", "bundle", "/a/b", "a:b", "./s3://bucket", "C:/bundle", "a b://c", "~/store"])
def test_a_path_is_none(place):
    assert not is_url(place)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a b", "s3://bucket/a b"),
        ("s3://key:sec/ret@bucket", "s3://key:sec/ret@bucket"),  # no user: a bucket "key:sec", as URLs are read
        ("ftp://me:p@ss@host/a", "ftp://host/a"),
        ("https://token@host/a?sig=secret", "https://host/a"),
        ("cannot read 'https://me:pw@host/a?sig=secret', why?", "cannot read 'https://host/a', why?"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("abfs://me:pw@account/a", "abfs://account/a"),
        ("what is it?", "what is it?"),
    ],
)
def test_secrets_are_not_shown(text, shown):
    assert hide_secrets(text) == shown
