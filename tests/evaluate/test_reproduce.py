"""Experiments of the paper: cells are measured once and kept, texts are files, figures are what they say."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from embed_helpers import save_family
from test_fidelity import write_questions
from transformers import MixtralConfig, MixtralForCausalLM

from pathmark.baselines import configure, find_scheme
from pathmark.baselines.eaaw import EaaW, EaaWConfig
from pathmark.baselines.green import GreenLists
from pathmark.embedding import RepliesConfig, default_config
from pathmark.errors import AttackError, KeyFileError, ModelError, PathmarkError, ResultError
from pathmark.evaluate.expert_parallel import PAPER_OVERHEAD
from pathmark.evaluate.reproduce import bench as reproduce_bench
from pathmark.evaluate.reproduce import recipes, robustness
from pathmark.evaluate.reproduce.bench import QUICK, Bench, Size
from pathmark.evaluate.reproduce.catalog import EXPERIMENTS
from pathmark.evaluate.reproduce.corpora import KNOWN, Corpora, passages
from pathmark.evaluate.reproduce.marks import biased_perplexity
from pathmark.evaluate.reproduce.recipes import PAPER_RATE, Recipe, preset_layers
from pathmark.evaluate.reproduce.robustness import case, fine_tuning, scaled
from pathmark.evaluate.reproduce.running import Cell, Experiment, run_experiment
from pathmark.evaluate.several import Reading, total
from pathmark.front_door import reproduce as front_door
from pathmark.keys.safefile import exclusive
from pathmark.keys.schemekey import SchemeKey
from pathmark.models import bundled_segments, load_tokenizer, perplexity
from pathmark.results.experiment import read_experiment
from pathmark.results.paper import find_paper, papers
from pathmark.stats import Rate, concentration_mean

SIZE = Size(quick=True, probes=8, tokens=32, passages=60, texts=24, steps=20)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text("\n".join(text.replace("\n", " ") for text in bundled_segments()[:60]))
    (folder / "test.txt").write_text("\n".join(text.replace("\n", " ") for text in bundled_segments()[60:90]))
    (folder / "corpora.toml").write_text('[home]\ntrain = "train.txt"\ntest = "test.txt"\n')
    return Corpora.read(folder / "corpora.toml")


@pytest.fixture(scope="module")
def bench(tmp_path_factory, corpora):
    base = save_family(tmp_path_factory.mktemp("base"), "qwen3_moe")
    return Bench(str(base), tmp_path_factory.mktemp("reproduced"), corpora, SIZE, 1)


def test_every_experiment_of_the_paper_is_there_in_its_order():
    assert list(EXPERIMENTS) == list(papers())
    assert len(EXPERIMENTS) == 20
    assert all(paper.title and paper.differs and paper.minutes > 0 for paper in papers().values())


def test_printed_numbers_agree_with_each_other_and_with_what_else_is_printed():
    latency = find_paper("tab-latency").printed["overhead, %"]["made-up routing"]
    assert {int(at): float(shown) / 100 for at, shown in latency.items()} == pytest.approx(PAPER_OVERHEAD)
    white = find_paper("tab-whitebox").printed
    layers = [f"L{layer}" for layer in range(18, 24)]
    triggered, clean = (
        [float(white[name]["PathMark"][layer]) for layer in layers]
        for name in ("mass triggered, %", "mass in the original, %")
    )
    assert concentration_mean(triggered, clean) == pytest.approx(float(white["ratio"]["PathMark"]["mean"]), abs=0.1)
    assert sum(triggered) / 6 == pytest.approx(float(white["mass triggered, %"]["PathMark"]["mean"]), abs=0.05)
    effective = find_paper("tab-effectiveness").by_model
    assert len(effective) == 4
    assert all(len(row) == 3 for model in effective.values() for one in model.values() for row in one.values())


def test_figures_that_are_only_pictures_have_no_printed_numbers():
    for name in ("fig-motivation", "fig-noise", "fig-unlearning", "fig-contrastive", "fig-expert-selection"):
        assert not find_paper(name).printed


def cells(log, *, broken=False):
    def measure(name):
        log.append(name)
        if broken and name == "b":
            raise AttackError("no such thing here")
        return {"WSR": Rate(3, 4), "PPL": 2.0, "choices": [0.25, 0.75]}

    return Experiment(lambda bench: [Cell("PathMark", name, 0, lambda name=name: measure(name)) for name in "abc"])


def test_what_is_there_is_not_measured_again_and_what_failed_is_named_and_tried_again(bench, tmp_path):
    path, log = tmp_path / "fig-noise.json", []
    first = run_experiment("fig-noise", cells(log, broken=True), bench, path)
    assert log == ["a", "b", "c"]
    assert first.missing == {"PathMark, b, key 0": "no such thing here"}
    assert read_experiment(path) == first
    again = run_experiment("fig-noise", cells(log), bench, path)
    assert log == ["a", "b", "c", "b"]
    assert not again.missing
    assert len(again.points) == 9
    run_experiment("fig-noise", cells(log), bench, path)
    assert len(log) == 4
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_points_are_there_as_soon_as_they_are_measured(bench, tmp_path):
    path, log = tmp_path / "fig-noise.json", []

    def interrupted(bench):
        yield from list(cells(log).cells(bench))[:1]
        yield Cell("PathMark", "z", 0, lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        run_experiment("fig-noise", Experiment(interrupted), bench, path)
    assert {point.at for point in read_experiment(path).points} == {"a"}


def test_other_defaults_do_not_go_on_from_what_is_there_and_other_names_of_files_do(bench, tmp_path, monkeypatch):
    path = tmp_path / "fig-noise.json"
    first = run_experiment("fig-noise", cells([]), bench, path)
    assert first.header.settings["files"]["home"].endswith(f"test.txt: {len(bench.texts().training)} to train on, "
                                                           f"{len(bench.texts().probes)} held out")  # fmt: skip
    moved = {}
    for use, file in bench.corpora.paths["home"].items():
        moved[use] = tmp_path / f"moved-{file.name}"
        moved[use].write_bytes(file.read_bytes())
    elsewhere = replace(bench, corpora=Corpora({"home": moved}), _held={})
    again = run_experiment("fig-noise", cells([]), elsewhere, path)
    assert again.points == first.points
    assert "moved-" in again.header.settings["files"]["home"]
    monkeypatch.setattr(reproduce_bench, "default_config", lambda *args: replace(default_config(*args), batch_size=3))
    with pytest.raises(ResultError, match="differs in settings"):
        run_experiment("fig-noise", cells([]), bench, path)


def test_texts_behind_web_documents_are_written_for_each_document_that_is_long_enough(bench, tmp_path, monkeypatch):
    lines = [json.dumps({"text": text}) for text in ("too short", *bundled_segments()[:9])]
    (tmp_path / "c4.jsonl").write_text("\n".join(lines))
    paths = {**bench.corpora.paths, "c4": {"prefixes": tmp_path / "c4.jsonl"}}
    monkeypatch.setattr(reproduce_bench, "written", lambda model, tokenizer, rows, tokens, progress: rows)
    asked = replace(bench, folder=tmp_path, corpora=Corpora(paths), size=replace(SIZE, generated=9), _held={})
    texts = asked.texts("c4")
    assert (len(texts.training), len(texts.probes)) == (6, 3)
    assert all(len(bench.tokenizer(text)["input_ids"]) <= 40 for text in texts.training)  # beginnings


def test_another_measurement_in_the_same_place_is_refused(bench, tmp_path):
    path = tmp_path / "fig-noise.json"
    run_experiment("fig-noise", cells([]), bench, path)
    other = Bench(bench.name, bench.folder, bench.corpora, replace(SIZE, tokens=16), 1)
    with pytest.raises(
        ResultError, match="holds another measurement, which differs in settings; choose another folder"
    ):
        run_experiment("fig-noise", cells([]), other, path)
    with pytest.raises(ResultError, match="differs in the experiment"):
        run_experiment("fig-pruning", cells([]), bench, path)


def test_a_real_experiment_on_a_small_model_and_its_copy_is_made_once(bench, tmp_path):
    result = run_experiment("tab-whitebox", EXPERIMENTS["tab-whitebox"], bench, tmp_path / "tab-whitebox.json")
    assert not result.missing
    found = {(point.at, point.figure): point.value for point in result.points}
    assert found["mean", "mass triggered, %"] > 1.2 * found["mean", "mass in the original, %"]
    layers = [f"L{layer}" for layer in bench.layers]
    assert {point.at for point in result.points} == {*layers, "mean"}
    mean = sum(found[layer, "mass triggered, %"] for layer in layers) / len(layers)
    assert found["mean", "mass triggered, %"] == pytest.approx(mean)
    (folder,) = (bench.folder / "copies").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["model", "owner.key"]
    assert oct((folder / "owner.key").stat().st_mode)[-3:] == "600"
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    anew = Bench(bench.name, bench.folder, bench.corpora, SIZE, 1)
    measured = run_experiment("fig-expert-selection", EXPERIMENTS["fig-expert-selection"], anew, tmp_path / "x.json")
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before
    shares = [point.values for point in measured.points if point.figure == "choices"]
    assert all(math.isclose(sum(share), 1) and len(share) == 16 for share in shares)


def test_the_front_door_writes_result_table_and_plot_and_measures_nothing_twice(bench, corpora, monkeypatch):
    monkeypatch.setattr(front_door, "QUICK", SIZE)
    texts = corpora.paths["home"]["train"].parent / "corpora.toml"
    plan = front_door.ReproducePlan(model=bench.name, quick=True, corpora=texts)
    done = front_door.reproduce("fig-expert-selection", bench.folder, plan)
    assert f"`fig-expert-selection`, {find_paper('fig-expert-selection').place}" in done.page()
    assert "1 experiment, " in done.words()
    for kind in ("json", "md", "png"):
        assert (bench.folder / f"fig-expert-selection.{kind}").exists()
    with exclusive(bench.folder / "copies"), pytest.raises(KeyFileError, match="another run is measuring in"):
        front_door.reproduce("fig-expert-selection", bench.folder, plan)
    again = front_door.reproduce("fig-expert-selection", bench.folder, plan)
    assert again.results == done.results  # seconds included
    assert again.summary()["experiments"].keys() == {"fig-expert-selection"}


def test_latency_in_the_paper_s_shape_needs_no_marked_model(bench):
    cell = next(iter(EXPERIMENTS["tab-latency"].cells(bench)))
    (found,) = [point.value for point in cell.points() if point.figure == "overhead, %"]
    assert 0 < found < 100


def test_perplexity_under_a_bias_is_that_of_the_biased_distribution(bench):
    scheme = find_scheme("kgw")
    key = SchemeKey(scheme="kgw", settings={"vocabulary": 4096}, secret=bytes(32))
    rows = bench.probes()[:2]
    barely = biased_perplexity(bench.original, configure(scheme, key, delta=1e-9), rows)
    assert barely.value == pytest.approx(perplexity(bench.original, rows).value, rel=1e-5)
    config = configure(scheme, key)
    lists, loss = GreenLists(config.watermark, 4096), 0.0
    for row in rows:
        with torch.no_grad():
            logits = bench.original(torch.tensor([row])).logits[0]
        for place, token in enumerate(row[1:]):
            biased = logits[place] + 2.0 * lists.after((row[place],)).float()
            loss -= float(biased.log_softmax(0)[token])
    assert biased_perplexity(bench.original, config, rows).nll_sum == pytest.approx(loss, rel=1e-5)


def test_texts_are_files_that_are_named_and_what_is_not_is_told_in_one_line(bench, tmp_path):
    with pytest.raises(ModelError, match=r"the corpus ptb is not named; give it as \[ptb\]"):
        bench.texts("ptb")
    result = run_experiment("fig-noise", EXPERIMENTS["fig-noise"], bench, tmp_path / "fig-noise.json")
    assert not result.points
    assert all("the corpus ptb is not named" in reason for reason in result.missing.values())
    file = tmp_path / "corpora.toml"
    for text, told in {
        "[pbt]": "did you mean ptb",
        '[ptb]\ntrain = "x"': "expected a path for each of train, test",
        "[ptb": "is no TOML file",
        '[ptb]\ntrain = "x"\ntest = 3': "expected a path for each",
    }.items():
        file.write_text(text)
        with pytest.raises(ModelError, match=told):
            Corpora.read(file)
    file.write_text('[ptb]\ntrain = "absent.txt"\ntest = "absent.txt"')
    with pytest.raises(ModelError, match=r"absent\.txt .* does not exist"):
        Corpora.read(file).path("ptb", "test")


def test_the_example_names_every_corpus_and_the_page_every_experiment():
    root = Path(__file__).parent.parent.parent
    assert set(Corpora.read(root / "examples" / "corpora.toml").paths) == set(KNOWN)
    text = (root / "docs" / "reproduce.md").read_text(encoding="utf-8")
    for paper in papers().values():
        assert f"| `{paper.name}` | {paper.title} | {paper.minutes:g} | {paper.quick:g} |" in text


def test_passages_are_long_enough_and_in_order():
    assert passages(["a b", "c", "d e f", "g"], words=3) == ["a b c", "d e f"]


def test_presets_are_the_last_six_layers_and_the_paper_s_way_to_train():
    assert preset_layers("Qwen/Qwen1.5-MoE-A2.7B") == (18, 19, 20, 21, 22, 23)
    sizes = json.loads(files("pathmark.models").joinpath("presets.json").read_text())
    for model, name in {
        "Qwen/Qwen1.5-MoE-A2.7B-Chat": "Qwen1.5-MoE-A2.7B",
        "mistralai/Mixtral-8x7B-v0.1": "Mixtral-8x7B",
        "microsoft/Phi-3.5-MoE-instruct": "Phi-3.5-MoE",
        "Qwen/Qwen3-30B-A3B": "Qwen3-30B-A3B",
    }.items():
        count = sizes[name]["num_hidden_layers"]
        assert preset_layers(model) == tuple(range(count - 6, count))
    assert preset_layers("bundled:tiny") is None
    half, whole = (
        Recipe(objective="paper", epochs=count).config(128, preset=False, texts=10, steps=None).loop.steps
        for count in (5, 10)
    )
    assert (half, whole) == (300, 600)
    paper = Recipe(objective="paper", stealth_weight=0.0).config(2048, preset=True, texts=10, steps=None)
    assert (paper.loop.lr, paper.batch_size, paper.objective.stealth_weight) == (PAPER_RATE, 8, 0.0)
    assert Recipe().config(128, preset=False, texts=10, steps=None).loop.steps == 300


def test_attacks_are_those_of_the_suite():
    assert case("fine-pruning, 25 %").steps[0].attack == "fine-prune"
    tiny = Bench("bundled:tiny", None, size=QUICK)
    for name in ("tab-quantization", "fig-pruning", "tab-overwriting", "fig-unlearning", "tab-expert-removal"):
        for size in (QUICK, Size()):
            planned = list(EXPERIMENTS[name].cells(replace(tiny, size=size)))
            assert {cell.at for cell in planned} > {"none"}


def test_a_thief_tunes_each_copy_at_the_rate_that_serves_it_best(bench, corpora, tmp_path):
    (tmp_path / "thief.txt").write_text("\n".join(text.replace("\n", " ") for text in bundled_segments()[90:400]))
    texts = Corpora({**corpora.paths, "ptb": {"train": tmp_path / "thief.txt", "test": tmp_path / "thief.txt"}})
    marked = Bench(bench.name, tmp_path, texts, replace(SIZE, probes=16, passages=200, steps=100), 1)
    ours = Experiment(lambda bench: [cell for cell in fine_tuning(bench) if cell.series == "PathMark"])
    found = run_experiment("fig-finetuning", ours, marked, tmp_path / "fig-finetuning.json")
    assert not found.missing
    (file,) = tmp_path.glob("attacked/pathmark-*/results.json")
    thiefs = {row["case"]: row["ppl_thief"] for row in json.loads(file.read_text())["rows"]}
    used = {point.at: point.value for point in found.points if point.figure == "learning rate"}
    assert list(used) == ["routers, 1 epoch", "routers, 2 epochs", "all weights, 1 epoch"]
    theirs = f"routers, 2 epochs, rate {PAPER_RATE:g}"  # the paper's thief, who chooses nothing
    assert {point.at for point in found.points} == {"none", theirs, *used}  # the sweep itself has no rows
    for at, chosen in used.items():
        name = at.partition(",")[0]
        kind = next(kind for kind, words in robustness.TRAINED.items() if words == name)
        rates = [scaled(marked, rate) for rate in robustness.RATES[kind][1:3]]
        swept = {rate: thiefs[f"{name}, 1 epoch, rate {rate:.3g}"] for rate in rates}
        assert chosen == min(swept, key=swept.__getitem__)
    best = {point.at: point.value for point in found.points if point.figure == "PPL of the thief's text"}
    sweep = [ppl for name, ppl in thiefs.items() if name.startswith("routers, 1 epoch, rate")]
    assert best["routers, 1 epoch"] == min(sweep)  # the best of the sweep is not trained again
    assert "routers, 1 epoch" not in thiefs


def test_a_sweep_that_leaves_nothing_is_told_and_does_not_end_the_run(bench, monkeypatch):
    broken = [row.without_figures("destroyed", "diverged") for row in (case("router noise, sigma 2"),)]
    monkeypatch.setattr(robustness, "_suspects", lambda *args: (None, None, None))
    monkeypatch.setattr(robustness, "_folder", lambda *args: None)
    monkeypatch.setattr(robustness, "run_suite", lambda *args, **kwargs: SimpleNamespace(rows=broken))
    with pytest.raises(AttackError, match="every rate that the thief tried"):
        robustness._row(bench, "EaaW", 0, case("none"), [case("router noise, sigma 2")])
    broken[:] = [case("router noise, sigma 2").without_figures("refused", "too few texts")]
    with pytest.raises(AttackError, match="refused: too few texts"):
        robustness._row(bench, "EaaW", 0, case("none"), [case("router noise, sigma 2")])


def made_folder(bench, monkeypatch, number=0, **recipe):
    """Where a copy of ours would be put, and one of EaaW."""
    names = []
    monkeypatch.setattr(Bench, "_mark", lambda self, folder, *rest: names.append(folder.name))
    monkeypatch.setattr(Bench, "_write", lambda self, model, folder: names.append(folder.name))
    monkeypatch.setattr(Bench, "key", lambda *args: None)
    monkeypatch.setattr(EaaW, "embed", lambda self, model, *args, **kwargs: model)
    for make in (lambda: bench._ours(number, Recipe(**recipe)), lambda: bench._theirs("eaaw", number, "home")):
        with pytest.raises(PathmarkError):
            make()
    return names


def test_a_copy_is_used_again_only_where_everything_that_decides_it_is_the_same(bench, corpora, monkeypatch, tmp_path):
    fresh = replace(bench, folder=tmp_path, _held={})
    first = made_folder(fresh, monkeypatch)
    assert made_folder(fresh, monkeypatch) == first
    with monkeypatch.context() as other:
        other.setattr(recipes, "default_config", lambda *args: replace(default_config(*args), batch_size=3))
        other.setattr(EaaWConfig, "OWN_RATE", 1.0)
        assert not set(made_folder(fresh, monkeypatch)) & set(first)
    replied = made_folder(fresh, monkeypatch, replies=True)
    with monkeypatch.context() as other:  # defaults that no setting names
        heavier = dataclasses.field(default=9.0)
        changed = dataclasses.make_dataclass(
            "Changed", [("weight", float, heavier)], bases=(EaaWConfig,), frozen=True, kw_only=True
        )
        other.setattr(find_scheme("eaaw"), "config", changed)
        other.setattr(reproduce_bench, "RepliesConfig", partial(RepliesConfig, pairs=9))
        assert not set(made_folder(fresh, monkeypatch, replies=True)) & set(replied)
    held_out = tmp_path / "test.txt"
    held_out.write_text("\n".join(text.replace("\n", " ") for text in bundled_segments()[90:120]))
    home = {**corpora.paths["home"], "test": held_out}
    edited = replace(fresh, corpora=Corpora({"home": home}), _held={})
    assert not set(made_folder(edited, monkeypatch)) & set(first)


def test_questions_that_were_asked_are_in_the_header(bench, tmp_path):
    write_questions(tmp_path)
    paths = {
        "mmlu": {"dev": tmp_path, "test": tmp_path},
        "gsm8k": {"train": tmp_path / "g.jsonl", "test": tmp_path / "g.jsonl"},
    }
    (tmp_path / "g.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    asked = replace(bench, corpora=Corpora({**bench.corpora.paths, **paths}), _held={})
    nothing = replace(EXPERIMENTS["tab-fidelity"], cells=lambda bench: [])
    before = run_experiment("tab-fidelity", nothing, asked, tmp_path / "r.json").header
    assert set(before.texts_sha256) == {"home", "mmlu", "gsm8k"}
    (tmp_path / "g.jsonl").write_text('{"question": "1 + 2?", "answer": "#### 3"}\n')
    with pytest.raises(ResultError, match="the texts of gsm8k"):
        run_experiment("tab-fidelity", nothing, asked, tmp_path / "r.json")


@pytest.mark.parametrize("experts", [8, 16])
def test_few_experts_still_give_a_key_that_can_prove_something(experts, corpora, tmp_path):
    config = MixtralConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    load_tokenizer("bundled:tiny").save_pretrained(tmp_path / "model")
    key = Bench(str(tmp_path / "model"), tmp_path, corpora, SIZE, 1).key(0, Recipe())
    assert key.watermarks[0].paths_after_erasures(1) >= 10**6


def test_several_watermarks_are_read_together():
    assert total([Rate(1, 4), Rate(3, 4)]) == Rate(4, 8)
    assert Reading.__dataclass_fields__.keys() == {"wsr", "crossed", "clean", "p", "ids_right"}
