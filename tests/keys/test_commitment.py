"""Commitments and claims: what is published says nothing, what is opened can't be changed."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_fixtures import GOLDEN, golden_key, make_key, secret_forms

from pathmark.errors import KeyFileError
from pathmark.keys import (
    check_claim,
    check_commitment,
    commit_key,
    commit_release,
    load_commitment,
    parse_commitment,
    reveal_watermark,
    write_commitment,
)
from pathmark.keys.canonical import Document
from pathmark.keys.leaves import LATEST, leaves
from pathmark.keys.merkle import check_proof, leaf_hash, merkle_proof, merkle_root, padded_size


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    (folder / "deeper").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(10_000))
    (folder / "config.json").write_text("{}")
    (folder / "deeper" / "tokenizer.json").write_text("[]")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


@given(st.integers(1, 40), st.data())
def test_merkle_proofs(count: int, data: st.DataObject) -> None:
    leaves = [{"leaf": str(i)} for i in range(padded_size(count))]
    hashes = [leaf_hash(leaf) for leaf in leaves]
    root = merkle_root(hashes)
    i = data.draw(st.integers(0, len(leaves) - 1))
    proof = merkle_proof(hashes, i)
    assert check_proof(leaves[i], proof, root)
    assert not check_proof(leaves[i - 1], proof, root)
    assert not check_proof(leaves[i], {**proof, "index": proof["index"] ^ 1}, root)
    assert not check_proof(leaves[i], {**proof, "siblings": proof["siblings"][:-1]}, root)
    assert not check_proof(leaves[i], {**proof, "siblings": [*proof["siblings"], "00" * 32]}, root)


@pytest.mark.parametrize("version", [1, 2])
def test_golden_commitments_and_claims_still_hold(version: int) -> None:
    commitment = load_commitment(GOLDEN / f"key-v{version}.commitment.json")
    assert commitment.version == version
    assert check_commitment(commitment, golden_key()) == []
    assert commitment.created_at.year == 2025
    claim = json.loads((GOLDEN / f"key-v{version}.claim.json").read_text())
    revealed = check_claim(claim, commitment)
    assert revealed.watermark == golden_key().watermarks[0]
    assert revealed.choices == {1: None, 2: 2}[version]


def test_a_commitment_of_version_1_says_what_it_cannot_prove() -> None:
    assert "dates nothing for a third party" in load_commitment(GOLDEN / "key-v1.commitment.json").limits[0]
    assert commit_key(golden_key()).limits == []
    assert commit_key(golden_key(), created="2025-01-03T00:00:00Z") == load_commitment(
        GOLDEN / "key-v2.commitment.json"
    )


def test_a_commitment_is_safe_to_publish() -> None:
    key = golden_key()
    text = json.dumps(commit_key(key).document())
    assert not any(form in text.encode() for form in secret_forms(key))
    assert not any(word in text for word in ("trigger", "pool", "layers", "targets", '"path"', "block"))
    # Neither the number of watermarks nor that of attachments shows.
    one = commit_key(make_key()).document()
    assert {k: len(str(v)) for k, v in one.items()} == {k: len(str(v)) for k, v in json.loads(text).items()}


def test_another_key_or_id_does_not_fit() -> None:
    commitment = commit_key(golden_key())
    assert "made by key" in check_commitment(commitment, make_key(secret=b"x" * 32))[0]
    assert "differ from what was committed" in check_commitment(commitment, golden_key().with_id(5))[0]
    later = golden_key().attach("profiles.npz", b"1")
    assert check_commitment(commitment, later) == []
    assert "at revision 2" in check_commitment(commit_key(later), golden_key())[0]
    assert commit_key(later).root != commitment.root


def test_every_altered_field_is_noticed() -> None:
    document = commit_key(golden_key()).document()
    assert parse_commitment(document).document() == document
    for field, value in document.items():
        changed = {
            **document,
            field: value + 1 if isinstance(value, int) else value[:-1] + "0Z"[value[-1] == "0"],
        }
        with pytest.raises(KeyFileError):
            parse_commitment(changed)
        with pytest.raises(KeyFileError):
            parse_commitment({k: v for k, v in document.items() if k != field})
    with pytest.raises(KeyFileError, match="additional fields"):
        parse_commitment({**document, "note": "x"})


def test_release_commitment(release: Path) -> None:
    key = golden_key()
    commitment = commit_release(key, release)
    assert [f.path for f in commitment.files] == ["config.json", "deeper/tokenizer.json", "model.safetensors"]
    assert check_commitment(parse_commitment(commitment.document()), key, release) == []
    data = bytearray((release / "model.safetensors").read_bytes())
    data[5000] ^= 1
    (release / "model.safetensors").write_bytes(data)
    (release / "config.json").unlink()
    (release / "deeper" / "more.bin").write_bytes(b"")
    problems = check_commitment(commitment, key, release)
    assert len(problems) == 3
    assert any(p.startswith("model.safetensors: changed") for p in problems)
    assert "config.json: missing" in problems
    assert "deeper/more.bin: not in the commitment" in problems


def test_release_needs_a_folder_and_a_release_commitment(release: Path, tmp_path: Path) -> None:
    assert "binds no files" in check_commitment(commit_key(golden_key()), None, release)[0]
    with pytest.raises(KeyFileError, match="not a folder"):
        commit_release(golden_key(), tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyFileError, match="no files"):
        commit_release(golden_key(), tmp_path / "empty")
    (release / "loop").symlink_to(tmp_path)
    with pytest.raises(KeyFileError, match="link to a folder"):
        commit_release(golden_key(), release)


@pytest.mark.parametrize("index", [0, 1])
def test_one_watermark_revealed_alone(index: int) -> None:
    key = golden_key()
    commitment = commit_key(key)
    claim = json.loads(json.dumps(reveal_watermark(key, index)))
    revealed = check_claim(claim, commitment)
    assert revealed.watermark == key.watermarks[index]
    assert revealed.id_committed
    assert revealed.model == key.model
    assert set(revealed.attachments) == {"sketches.npz"}
    # Nothing of the owner's secret or of the other watermark is in it.
    text = json.dumps(claim)
    other = key.watermarks[1 - index]
    assert key.secret.reveal().hex() not in text
    assert other.subkey.reveal().hex() not in text
    for trigger in other.triggers:
        assert trigger.text not in text
        assert trigger.mark.text not in text


def test_claims_of_an_earlier_revision_and_of_a_licensee() -> None:
    key = golden_key()
    early = commit_key(key, revision=0)
    assert check_claim(reveal_watermark(key, 0, revision=0), early).attachments == {}
    with pytest.raises(KeyFileError, match="not in the commitment"):
        check_claim(reveal_watermark(key, 0), early)
    licensee = check_claim(reveal_watermark(key, 0), commit_key(key), id=77)
    assert licensee.watermark.path == key.with_id(77).watermarks[0].path
    assert not licensee.id_committed
    with pytest.raises(KeyFileError, match="does not exist"):
        reveal_watermark(key, 2)


def test_altered_claims_are_refused() -> None:
    key = golden_key()
    commitment, claim = commit_key(key), reveal_watermark(key, 0)
    for change in (
        lambda c: c["openings"][1]["leaf"]["content"]["layers"][0]["block"].reverse(),
        lambda c: c["openings"][1]["leaf"].update(salt="00" * 32),
        lambda c: c["openings"][2]["leaf"]["content"].update(id="4"),
        lambda c: c["openings"].pop(1),
        lambda c: c["openings"].pop(0),
        lambda c: c.update(watermark=1),
        lambda c: c.update(openings=7),
        lambda c: c.update(version=1),
        lambda c: c["openings"].append(c["openings"][1]),
    ):
        altered = copy.deepcopy(claim)
        change(altered)
        with pytest.raises(KeyFileError, match="does not hold"):
            check_claim(altered, commitment)


def test_id_salts_differ_between_licensees() -> None:
    """Who has seen one licensee's opened id must not be able to try out another's."""
    salts = []
    for number in (1, 2):
        claim = reveal_watermark(golden_key().with_id(number), 0)
        salts.append(next(o["leaf"]["salt"] for o in claim["openings"] if o["leaf"]["leaf"] == "id/0"))
    assert salts[0] != salts[1]


@pytest.mark.parametrize("junk", ["", "[]", "{}", '{"format":"pathmark-commitment","version":1}', "\xff"])
def test_junk_is_refused(junk: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(junk)
    with pytest.raises(KeyFileError):
        load_commitment(tmp_path / "c.json")
    with pytest.raises(KeyFileError, match="No such file"):
        load_commitment(tmp_path / "none.json")


def two_keys_under_one_root() -> tuple[Document, list[Document]]:
    """The forger's tree: places 1 and 2 both hold a leaf of the name watermark/0, each of another key."""
    first, second = make_key(), make_key(secret=b"x" * 32)
    grown = leaves(first, 0, LATEST)
    grown[3] = {**leaves(second, 0, LATEST)[1], "leaf": "watermark/0"}
    hashes = [leaf_hash(leaf) for leaf in grown]
    body = commit_key(first)
    forged = replace(body, root=merkle_root(hashes)).signed_by(first)
    claims = []
    for place in (1, 3):
        opened = [{"leaf": grown[i], "proof": merkle_proof(hashes, i)} for i in (0, place, 2)]
        claim = {**reveal_watermark(first, 0), "root": forged.root.hex(), "openings": opened}
        claims.append(claim)
    return forged.document(), claims


def test_one_root_holds_one_key() -> None:
    document, (honest, other) = two_keys_under_one_root()
    commitment = parse_commitment(document)
    assert check_claim(honest, commitment).choices == 1
    with pytest.raises(KeyFileError, match="the one place that its name has"):
        check_claim(other, commitment)


def test_the_number_of_watermarks_is_committed_and_told() -> None:
    assert check_claim(reveal_watermark(golden_key(), 1), commit_key(golden_key())).choices == 2


def test_nobody_else_signs_an_owners_root() -> None:
    owner, thief = golden_key(), make_key(secret=b"thief" + bytes(27))
    stolen = replace(commit_key(owner), created="2001-01-01T00:00:00Z").signed_by(thief)
    resigned = parse_commitment(stolen.document())  # its signature holds
    with pytest.raises(KeyFileError, match="signed by another key"):
        check_claim(reveal_watermark(owner, 0), resigned)


def test_attachments_cannot_be_left_out() -> None:
    key = golden_key()
    claim = reveal_watermark(key, 0)
    claim["openings"] = [o for o in claim["openings"] if not o["leaf"]["leaf"].startswith("attachment/")]
    with pytest.raises(KeyFileError, match="leaves out an attachment"):
        check_claim(claim, commit_key(key))


def test_a_commitment_is_written_whole_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_commitment(commit_key(golden_key()), path)
    assert load_commitment(path).revision == 1
    with pytest.raises(KeyFileError, match="already exists"):
        write_commitment(commit_key(golden_key()), path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
