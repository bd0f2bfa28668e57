"""Addresses of stores far away, wherever a path may be."""

import pickle
from pathlib import Path

import pytest

from ooc.stores.errors import ConfigError
from ooc.stores.io.remote.url import StoreUrl, refuse_url, store_path


@pytest.mark.parametrize(
    "text", ["s3://bucket/a/papers.ooc", "https://host:80/papers.ooc", "gs://b/p.ooc", "file:///data/p.ooc"]
)
def test_a_url_stays_what_was_written(text: str) -> None:
    url = store_path(text)
    assert isinstance(url, StoreUrl)
    assert str(url) == text
    assert str(url / "x" / "zarr.json") == f"{text}/x/zarr.json"
    assert url.name == text.rpartition("/")[2]
    assert url.absolute() is url
    assert store_path(Path(text)) == store_path(text + "/") == url == pickle.loads(pickle.dumps(url))
    assert str(store_path(Path(text))) == text


@pytest.mark.parametrize("text", ["papers.ooc", "/data/papers.ooc", "a:b/papers.ooc", "", "."])
def test_a_path_stays_a_path(text: str) -> None:
    assert store_path(text) == refuse_url(text, "changed") == Path(text)
    assert type(store_path(text)) is type(Path(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftp://host/papers.ooc", r"begins with s3://, gs://, https://, http://, not ftp://"),
        ("s3://", "names no store: write s3://BUCKET/PATH"),
        ("https://", "write https://HOST/PATH"),
        ("https://user:secret@host/p.ooc", "by the environment"),
        ("https://host/p.ooc?X-Amz-Signature=secret", "by the environment"),
        ("s3://key:secret@bucket/p.ooc", "by the environment"),
    ],
)
def test_other_urls_are_refused_without_repeating_a_secret(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        store_path(text)
    assert "secret" not in str(refused.value)


def test_what_changes_a_store_is_refused_at_a_url() -> None:
    with pytest.raises(ConfigError, match=r"s3://b/p.ooc cannot be appended to where it is: change a local copy"):
        refuse_url("s3://b/p.ooc", "appended to")
