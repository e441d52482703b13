"""Pages: everything a reader needs is there, nothing is fetched, no name breaks anything, the HTML is sound."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from page_fixtures import CHECK, DEMO, ROBUSTNESS, UNFIT, VERDICT, WATERMARK, bundle_files

import pathmark
from pathmark.errors import MissingLibraryError, ReportError
from pathmark.reporting import pdf
from pathmark.reporting.page import result_page
from pathmark.results.evidence import EvidenceBundle

BUNDLE = EvidenceBundle({name: json.dumps(content).encode() for name, content in bundle_files().items()})
ALL = {
    "embedding": CHECK, "unfit": UNFIT, "verdict": VERDICT, "robustness": ROBUSTNESS, "demo": DEMO, "bundle": BUNDLE
}  # fmt: skip


@pytest.fixture(scope="module")
def pages():
    return {name: result_page(result)[1] for name, result in ALL.items()}


class Tree(HTMLParser):
    """Ids, links and the nesting of what must be closed."""

    VOID = frozenset({"meta", "br", "img", "link", "hr"})

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.targets, self.outside, self.headings = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.targets += [name for key in ("aria-labelledby",) for name in given.get(key, "").split()]
        for key in ("href", "src", "xlink:href", "srcset", "action"):
            value = given.get(key, "")
            (self.targets if value.startswith("#") else self.outside).append(value.removeprefix("#"))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ALL)
def test_a_page_is_sound_and_fetches_nothing(pages, name):
    tree = Tree(pages[name])
    assert not tree.open
    assert len(tree.ids) == len(set(tree.ids))
    assert set(tree.targets) <= set(tree.ids)
    assert all(not value or value.startswith("data:image/png;base64,") for value in tree.outside)
    assert tree.headings[0] == "h1"
    assert tree.headings.count("h1") == 1
    assert "default-src 'none'" in pages[name]
    assert not re.search(r"@import|url\((?!#)", pages[name])
    assert all(
        f'id="{svg}-desc"' in pages[name] for svg in re.findall(r'aria-labelledby="(\S+)-title \1-desc"', pages[name])
    )


@pytest.mark.parametrize("name", ALL)
def test_only_sortable_tables_bring_a_script(pages, name):
    assert ("<script>" in pages[name]) == ('sortable">' in pages[name])
    assert pages[name].count("<script") <= 1


def test_the_same_result_gives_the_same_page(pages):
    assert result_page(DEMO)[1] == pages["demo"]


def test_an_embedding_shows_every_bound_beside_its_figure(pages):
    assert "<h1>Fit for release</h1>" in pages["embedding"]
    assert "All 2 bounds hold" in pages["embedding"]
    assert "marked &lt;b&gt;" in pages["embedding"]
    for part in ("KL of clean routing", "at most 0.05", 'id="trigger-curve"', 'id="clean-routing"', "single token"):
        assert part in pages["embedding"]
    assert "more --steps" not in pages["embedding"]
    assert "<h1>Not fit for release</h1>" in pages["unfit"]
    assert "more --steps" in pages["unfit"]
    assert "pathmark commit" not in pages["unfit"]
    rows = re.findall(r'<th scope="row">(.*?)</th>', pages["unfit"])
    assert rows[0] == "WSR"  # what is broken stands first


def test_a_bundle_shows_where_the_tokens_went(pages):
    page = pages["bundle"]
    for part in ("heat-map-triggered", "heat-map-clean", "null", "barcode-expected", "barcode-recovered"):
        assert f'<figure id="{part}">' in page
    assert page.index("One in 200") < page.index("heat-map-triggered")  # the verdict first
    assert "Figures\n" not in page.split("<nav")[0]
    assert "&lt;people&gt;" in page
    assert "&lt;i&gt;Ada&lt;/i&gt;" in page
    assert '<span class="on">4</span>' in page
    assert page.count('class="on"') == 6  # five hits behind the trigger, one without
    assert "the key is not dated" in page
    assert "pathmark evidence check DIR" in page
    assert "The experts that the key names get 80 % in layer 4, 80 % in layer 5, 80 % in layer 6." in page
    assert "of 216 paths" in " ".join(page.split())


def test_a_layer_that_did_not_speak_has_no_barcode():
    silent = WATERMARK | {"barcodes": {"expected": [4, 5, 0], "recovered": [4, None, 0]}}
    files = bundle_files()
    files["measured.json"]["watermarks"] = [silent]
    page = result_page(EvidenceBundle({n: json.dumps(c).encode() for n, c in files.items()}))[1]
    assert "No barcode: 4 - 0" in page
    assert "1 of 3 layers do not speak clearly" in page


def test_a_verdict_alone_shows_no_target(pages):
    assert "heat-map" not in pages["verdict"]
    assert "<h1>Found: ./suspect</h1>" in pages["verdict"]
    assert "--evidence DIR" in pages["verdict"]


def test_a_robustness_run_can_be_sorted(pages):
    page = pages["robustness"]
    assert "<h1>The mark is found after 1 of 2 attacks</h1>" in page
    assert "1 more destroyed the model" in page
    assert "Not found after: 2 (fine-tune hard)." in page
    assert "thief&#39;s &lt;texts&gt;" in page
    assert "refused: too few experts" in page
    assert page.count('<button type="button">') == 9 + 6


def test_the_demo_says_what_was_found_and_whose_copy_it_was(pages):
    for part in ("bundled:&lt;tiny&gt;: fit for release", "Beta &amp; Co.", "heat-map-triggered", "trigger-curve"):
        assert part in pages["demo"]


@pytest.mark.parametrize("result", [{"something": "else"}, CHECK | {"bounds": 3}, VERDICT | {"verdict": "perhaps"}])
def test_what_no_page_can_be_made_of_is_refused(result):
    with pytest.raises(ReportError, match=r"expected an evidence bundle|damaged or of another version"):
        result_page(result)


def test_a_page_is_private_whole_and_never_written_over(tmp_path):
    made = pathmark.report(CHECK, tmp_path / "page.html")
    assert made.summary() == {"kind": "embedding", "output": str(tmp_path / "page.html"), "pdf": None}
    assert made.output.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ReportError, match="already exists"):
        pathmark.report(CHECK, tmp_path / "page.html")
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name, content in BUNDLE.files.items():
        (folder / name).write_bytes(content)
    assert pathmark.report(folder, tmp_path / "bundle.html").kind == "verification"
    assert f"pathmark evidence check {folder}" in (tmp_path / "bundle.html").read_text()


def test_without_a_browser_pdf_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    with pytest.raises(MissingLibraryError, match="needs Chromium or Chrome"):
        pathmark.report(CHECK, tmp_path / "page.html", pdf=True)
    assert not list(tmp_path.iterdir())
