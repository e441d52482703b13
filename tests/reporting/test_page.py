"""The demo's page: one file, everything that was measured, nothing that a name could break."""

from __future__ import annotations

from pathmark.reporting.page import summary_page

RATE = {"hits": 100, "n": 100, "interval": [0.96, 1.0]}
LAYER = {"layer": 4, "mass_triggered": 0.5, "mass_clean": 0.03}
RESULTS = {
    "model": "bundled:<tiny>", "architecture": "Qwen3MoeForCausalLM", "id": 7, "layers": [4], "id_capacity": 20,
    "evidence_bits": 9.9, "words": {"marked copy": "Found.", "original": "Not found."},
    "verify": {"marked copy": {"marked": True, "layers": [LAYER]}, "original": {"marked": False, "layers": [LAYER]}},
    "trace": {"words": "Beta & Co."},
    "embed": {
        "fit": True, "n_probes": 100, "clean_ppl": [50.0, 50.5], "triggered_ppl": [51.0, 52.0], "clean_kl": 0.01,
        "topk_agreement": 0.9, "target_mass_clean": [0.03, 0.04], "p_value": 1e-9,
        "rates": {"wsr": [RATE], "fpr_clean": RATE, "fpr_original": RATE},
        "scan": {"kinds": {"single token": {"hits": 0, "n": 4000}}},
        "trigger": {"tokens": 2, "curve": [{"hits": 0, "n": 9}, {"hits": 3, "n": 9}, {"hits": 9, "n": 9}]},
    },
}  # fmt: skip


def test_the_page_says_what_was_found_and_escapes_what_it_shows():
    page = summary_page(RESULTS)
    assert "fit for release" in page
    assert "bundled:&lt;tiny&gt;" in page
    assert "Beta &amp; Co." in page
    assert "Marked copy." in page
    assert "2 of 2 trigger tokens right" in page
    assert "50.50 (+1.00 %)" in page
    assert "<script" not in page


def test_a_copy_that_is_not_fit_is_not_called_so():
    assert "not fit for release" in summary_page(RESULTS | {"embed": RESULTS["embed"] | {"fit": False}})
