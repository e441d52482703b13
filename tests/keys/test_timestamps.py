"""Dates that somebody else vouches for: answers of a real RFC 3161 authority, checked offline."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from key_fixtures import golden_key, make_key
from tsa import Authority

from pathmark.errors import KeyFileError
from pathmark.keys import commit_key, parse_commitment
from pathmark.keys.timestamps import existed_by, load_roots, stamp, timestamp_request

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command as an authority")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authorities") / "known")


def test_an_authority_dates_a_commitment(authority: Authority) -> None:
    commitment = commit_key(golden_key(), created="2001-01-01T00:00:00Z")
    roots = load_roots(authority.root)
    assert existed_by(commitment, roots) is None  # what the owner says is no date
    stamped = stamp(commitment, authority.answer(timestamp_request(commitment)))
    again = parse_commitment(stamped.document())
    assert again == stamped
    moment = existed_by(again, roots)
    assert moment is not None
    assert abs(datetime.datetime.now(datetime.UTC) - moment) < datetime.timedelta(minutes=5)
    assert existed_by(again, []) is None  # nobody is trusted by default


def test_an_authority_of_the_claimant_dates_nothing(authority: Authority, tmp_path: Path) -> None:
    commitment = commit_key(golden_key())
    own = Authority(tmp_path / "own")
    stamped = stamp(commitment, own.answer(timestamp_request(commitment)))
    assert existed_by(stamped, load_roots(own.root)) is not None
    assert existed_by(stamped, load_roots(authority.root)) is None


def test_a_timestamp_over_something_else_is_refused(authority: Authority) -> None:
    answer = authority.answer(timestamp_request(commit_key(make_key(secret=b"x" * 32))))
    commitment = commit_key(golden_key())
    with pytest.raises(KeyFileError, match="over something else"):
        stamp(commitment, answer)
    smuggled = parse_commitment({**commitment.document(), "timestamps": [answer.hex()]})
    assert existed_by(smuggled, load_roots(authority.root)) is None


def test_every_altered_byte_of_an_answer_is_noticed(authority: Authority) -> None:
    commitment = commit_key(golden_key())
    answer, roots = authority.answer(timestamp_request(commitment)), load_roots(authority.root)
    genuine = existed_by(stamp(commitment, answer), roots)
    for place in range(0, len(answer), 41):
        altered = bytearray(answer)
        altered[place] ^= 1
        seen = parse_commitment({**commitment.document(), "timestamps": [bytes(altered).hex()]})
        # what is not signed may change, such as the order of certificates; a date never does
        assert existed_by(seen, roots) in (None, genuine)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_junk_is_no_timestamp(junk: bytes) -> None:
    with pytest.raises(KeyFileError):
        stamp(commit_key(golden_key()), junk)


def test_roots_are_pem(tmp_path: Path) -> None:
    (tmp_path / "roots.pem").write_text("nothing")
    with pytest.raises(KeyFileError, match="no certificates"):
        load_roots(tmp_path / "roots.pem")
