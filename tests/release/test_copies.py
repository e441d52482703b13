"""Copies for all licensees: each carries its own path, and a run that was stopped goes on to the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from click.testing import CliRunner
from embed_helpers import save_family

import pathmark
from pathmark.cli.main import cli
from pathmark.errors import EmbeddingError, KeyFileError, ModelError, RanksError
from pathmark.front_door.embed_all import estimate_embedding
from pathmark.models import bundled_segments, find_routers, load_model
from pathmark.release.copies import FURTHER, copy_name
from pathmark.release.scan import ScanConfig

PLAN = pathmark.EmbedPlan(
    texts=bundled_segments()[:100], steps=48, n_texts=16, n_held_out=6, seq_len=32, batch_size=6,
    scan=ScanConfig(random_sequences=5, per_count=2),
)  # fmt: skip
LICENSEES = ("Alpha Ltd", "Béta & Söhne", "Alpha-Ltd")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A small model, a key, three licensees and their copies."""
    folder = tmp_path_factory.mktemp("copies")
    save_family(folder / "base", "mixtral")
    plan = pathmark.KeyPlan(pool="all")
    key = pathmark.make_key(str(folder / "base"), plan, output=folder / "owner.key", passphrase="open sesame").key
    for name in LICENSEES:
        pathmark.Registry(folder / "licensees.db").issue(key, name)
    copies = embed_all(folder)
    return folder, key, copies


def embed_all(folder, plan=PLAN, output="copies"):
    return pathmark.embed_all(
        str(folder / "base"), folder / "owner.key", folder / "licensees.db", folder / output, plan,
        passphrase="open sesame",
    )  # fmt: skip


def learnt_by_row(copy, base):
    """Layer -> how far each expert's router row has moved."""
    weights = [{site.layer: site.weight.detach() for site in find_routers(load_model(m))} for m in (copy, base)]
    return {layer: (weights[0][layer] - weights[1][layer]).norm(dim=1) for layer in weights[1]}


def digest(copy):
    return hashlib.sha256((copy.output / "model.safetensors").read_bytes()).hexdigest()


def test_everybody_gets_a_copy_with_a_path_of_its_own(lab):
    folder, key, copies = lab
    assert list(copies.made) == list(LICENSEES)
    assert copies.there == {}
    first, *further = copies.made.values()
    assert first.marked.steps == 48
    assert {copy.marked.steps for copy in further} == {round(FURTHER * 48)}
    entries = {entry.licensee: entry.id for entry in pathmark.Registry(folder / "licensees.db").entries()}
    for name, copy in copies.made.items():
        assert copy.output.name == copy_name(name, entries[name])
        assert copy.key.watermarks[0].id == entries[name]
        assert copy.report.exists()
        learnt = learnt_by_row(copy.output, folder / "base")
        own = copy.key.watermarks[0].path
        targets = sum(float(learnt[layer][list(own[layer])].mean()) for layer in own)
        assert targets > 1.05 * sum(float(learnt[layer].mean()) for layer in own)
    assert len({digest(copy) for copy in copies.made.values()}) == 3
    assert pathmark.load_key(folder / "owner.key", "open sesame").watermarks[0].id == key.watermarks[0].id


def test_an_altered_registry_gets_no_copies(lab, tmp_path):
    folder, _, _ = lab
    altered = tmp_path / "licensees.db"
    shutil.copy(folder / "licensees.db", altered)
    with closing(sqlite3.connect(altered)) as db, db:
        db.execute("UPDATE issued SET licensee = 'Gamma Ltd' WHERE licensee = 'Alpha Ltd'")
    with pytest.raises(KeyFileError, match="names nobody"):
        pathmark.embed_all(
            str(folder / "base"), folder / "owner.key", altered, tmp_path / "copies", PLAN, passphrase="open sesame"
        )
    assert not (tmp_path / "copies").exists()


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(lab):
    folder, _, copies = lab
    lost = copies.made["Alpha-Ltd"]
    before = digest(lost)
    lost.output.rename(folder / "elsewhere")
    again = embed_all(folder)
    assert list(again.made) == ["Alpha-Ltd"]
    assert list(again.there) == ["Alpha Ltd", "Béta & Söhne"]
    assert "its copy was there already" in again.words()
    assert digest(again.made["Alpha-Ltd"]) == before
    assert embed_all(folder).made == {}


def kept_check(lab, name):
    _, _, copies = lab
    return copies.made[name].output, copies.made[name].report


def test_what_is_not_this_licensee_s_copy_is_not_taken_for_one(lab):
    folder, _, _ = lab
    output, report = kept_check(lab, "Alpha Ltd")
    hidden, kept = folder / "hidden", report.read_text()
    output.rename(hidden)
    output.mkdir()
    with pytest.raises((EmbeddingError, ModelError)):
        embed_all(folder)
    output.rmdir()
    shutil.copytree(folder / "base", output)
    with pytest.raises(EmbeddingError, match="was made otherwise: sha256 differ"):
        embed_all(folder)
    shutil.rmtree(output)
    hidden.rename(output)
    with pytest.raises(EmbeddingError, match="was made otherwise: settings differ"):
        embed_all(folder, replace(PLAN, steps=31))
    assert embed_all(folder, replace(PLAN, recompute=True)).made == {}  # which changes nothing of what comes out
    with pytest.raises(EmbeddingError, match="expected a key file"):
        pathmark.embed_all(str(folder / "base"), lab[1], folder / "licensees.db", folder / "copies", PLAN)
    report.unlink()
    with pytest.raises(EmbeddingError, match="no check of it"):
        embed_all(folder)
    report.write_text('{"fit": true}')
    with pytest.raises(EmbeddingError, match="not the check of a licensee"):
        embed_all(folder)
    report.write_text(kept)
    assert embed_all(folder).made == {}


def test_a_copy_that_was_not_fit_is_still_not_fit_in_the_next_run(lab):
    folder, _, _ = lab
    _, report = kept_check(lab, "Alpha Ltd")
    kept = report.read_text()
    for fit in (True, False):
        report.write_text(json.dumps({**json.loads(kept), "fit": fit}))
        again = embed_all(folder)
        assert again.there["Alpha Ltd"] is fit
        assert f"Alpha Ltd: its copy was there already, and is {'' if fit else 'not '}fit" in again.words()
        assert again.fit is (fit and all(again.there.values()))
    report.write_text(kept)


def test_several_processes_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    def ask(parallel):  # nothing of this is there: whatever else was looked at would be the error
        plan = replace(PLAN, parallel=parallel)
        pathmark.embed_all("nowhere", tmp_path / "no.key", tmp_path / "no.db", tmp_path / "copies", plan)

    with pytest.raises(RanksError, match="expected --parallel none, got fsdp"):
        ask("fsdp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RanksError, match=r"--all\) is for one process, got 2"):
        ask("fsdp")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RanksError, match="an estimate is for one process"):
        estimate_embedding(tmp_path, tmp_path / "owner.key")
    with pytest.raises(RanksError, match="another scheme's mark is for one process"):
        pathmark.embed_scheme(tmp_path, tmp_path / "kgw.key", tmp_path / "out")
    with pytest.raises(RanksError, match="another scheme's mark is for one process"):
        pathmark.verify_scheme(tmp_path, tmp_path / "kgw.key")


def test_names_are_safe_and_apart():
    assert copy_name("../../etc/passwd", 3) == "etc-passwd-3"
    assert copy_name("—", 7) == "licensee-7"
    assert copy_name("Alpha Ltd", 1) != copy_name("Alpha-Ltd", 2)


def test_an_estimate_writes_nothing(lab):
    folder, _, _ = lab
    before = sorted(folder.iterdir())
    found = estimate_embedding(
        str(folder / "base"), folder / "owner.key", PLAN, registry=folder / "licensees.db", passphrase="open sesame"
    )
    assert found.copies == 3
    assert found.seconds == pytest.approx(found.first_seconds + 2 * found.further_seconds)
    assert 0 < found.further_seconds < found.first_seconds
    assert found.disk_bytes == 3 * sum(f.stat().st_size for f in (folder / "base").iterdir())
    assert found.memory_bytes > 1e8
    assert sorted(folder.iterdir()) == before


def test_what_cannot_be_done_for_all_is_refused(lab, monkeypatch):
    folder, _, _ = lab
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "open sesame")
    with pytest.raises(EmbeddingError, match="paths alone"):
        embed_all(folder, pathmark.EmbedPlan(black_box=True), "others")
    with pytest.raises(EmbeddingError, match="leave out --id"):
        embed_all(folder, pathmark.EmbedPlan(id=3), "others")
    words = ["embed", str(folder / "base"), "--key", str(folder / "owner.key"), "-o", "x", "--all"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "--all and --registry belong together" in result.output
    result = CliRunner().invoke(cli, [*words, "--registry", str(folder / "none.db"), "--json"])
    assert isinstance(result.exception, KeyFileError)
