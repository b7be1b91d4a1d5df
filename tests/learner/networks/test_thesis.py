"""The thesis's predictors: trees that know the device, a language model that reads a graph."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from workload_samples import mape, targets, workloads

from trappm.learner.baselines import adapted_decoders
from trappm.learner.baselines.adapted_decoders import stored_decoder, tiny_decoder
from trappm.learner.baselines.tabular import Boosting
from trappm.learner.baselines.thesis_boosting import (
    DEVICE_FEATURES,
    SETTINGS,
    device_features,
    listed_card,
    thesis_xgboost,
)
from trappm.learner.baselines.thesis_language_model import (
    GRAPH_TOKENS,
    TRAINING,
    LanguageNetwork,
    ThesisLanguageModel,
    prompt,
)
from trappm.learner.estimators import Surroundings, check_names, estimator_named
from trappm.learner.networks.dataset import batches, to_data
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import cards
from trappm.profiler.errors import InputError
from trappm.profiler.models.torchvision_shim import register_missing_operators
from trappm.profiler.records import Phase, Precision

FEW_TREES = Boosting(n_estimators=200, max_depth=8, learning_rate=0.1)


def language_model(zoo, steps=120, decoder=None, card="rtx-3090"):
    training = replace(TRAINING, steps=steps, batch_nodes=2048)
    return ThesisLanguageModel(
        "thesis", zoo.encoder, card, decoder or tiny_decoder(), training=training
    )


@pytest.fixture
def labelled(zoo, measure):
    """Workloads with labels, which of them are held out, and the architecture of each."""
    test = np.isin(zoo.names, sorted(set(zoo.names))[::4])
    return np.array(workloads(zoo)), measure(zoo.graphs)[:, 0], test, np.array(zoo.names)


def typical_error(values, test):
    typical = np.exp(np.log(values[~test]).mean())
    return np.mean(np.abs(typical / values[test] - 1))


def test_the_trees_are_the_published_ones():
    regression = thesis_xgboost(lambda _: listed_card("a100")).regression(7)
    assert (regression.n_estimators, regression.max_depth) == (2000, 8)
    assert (SETTINGS.n_estimators, SETTINGS.max_depth) == (2000, 8)


def test_a_device_is_twenty_numbers_that_tell_cards_apart():
    assert len(DEVICE_FEATURES) == 20
    rows = {card.name: tuple(device_features(card)) for card in cards()}
    assert np.isfinite(list(rows.values())).all()
    names = ("a100 sxm4 80gb", "a100 pcie 40gb", "v100 sxm2 16gb", "rtx-3090", "t4")
    assert len({tuple(device_features(listed_card(name))) for name in names}) == len(names)
    assert device_features(listed_card("v100"))[1] == 0  # no TF32


def test_one_fit_over_two_devices_tells_them_apart(labelled, zoo):
    everything, values, test, names = labelled
    again = np.array(workloads(zoo))
    both = np.concatenate([everything, again])
    card = dict.fromkeys(everything, listed_card("a100"))
    card |= dict.fromkeys(again, listed_card("t4"))
    slower = np.concatenate([values, 3 * values])
    held_out, groups = np.tile(test, 2), np.tile(names, 2)
    estimator = thesis_xgboost(card.__getitem__, FEW_TREES)
    model = estimator.fit(
        both[~held_out], targets(slower[~held_out], groups[~held_out]), np.random.default_rng(0)
    )
    assert mape(model, both[held_out], slower[held_out]) < 0.3 * typical_error(slower, held_out)
    ratio = model.predict(again[test]).median / model.predict(everything[test]).median
    assert np.median(ratio) == pytest.approx(3, rel=0.1)


def test_how_a_step_is_run_and_what_of_it_is_timed_count(zoo):
    graph = zoo.graphs[0]
    trained, inferred = (Workload(graph=graph, phase=phase) for phase in Phase)
    estimator = thesis_xgboost(lambda _: listed_card("a100"), FEW_TREES)
    some = [trained, inferred] * 8
    model = estimator.fit(some, targets([9.0, 3.0] * 8, "ab" * 8), np.random.default_rng(0))
    np.testing.assert_allclose(model.predict([trained, inferred]).median, [9, 3], rtol=0.05)


def test_a_device_without_a_data_sheet_is_one_line(zoo):
    given = Surroundings(
        metric="step_time_ms", card="cpu-2t", make_encoder=lambda *_: zoo.encoder, estimates_mib={}
    )
    with pytest.raises(InputError, match="data sheet, and none is listed for 'cpu-2t'"):
        estimator_named("thesis-xgboost", given)


def test_the_language_model_learns_and_predicts_in_the_metric_s_unit(zoo, labelled):
    everything, values, test, names = labelled
    learned_from = everything[~test], targets(values[~test], names[~test])
    untrained, trained = (
        language_model(zoo, steps).fit(*learned_from, np.random.default_rng(0))
        for steps in (0, 120)
    )
    known = everything[~test]
    assert mape(trained, known, values[~test]) < 0.5 * mape(untrained, known, values[~test])
    assert mape(trained, everything[test], values[test]) < 0.6 * typical_error(values, test)
    estimate = trained.predict(everything[test])
    assert estimate.median.shape == (test.sum(),)
    assert np.all(estimate.low < estimate.median)
    assert trained.predict([]).median.shape == (0,)


def test_the_same_seed_predicts_the_same_and_another_does_not(zoo, labelled):
    everything, values, test, names = labelled
    learned_from = everything[~test], targets(values[~test], names[~test])
    first, again, other = (
        language_model(zoo, 10)
        .fit(*learned_from, np.random.default_rng(seed))
        .predict(everything[test])
        .median
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_only_adapters_projection_and_regression_learn(zoo, labelled):
    everything, values, _, names = labelled
    some = everything[:30]
    learned_from = some, targets(values[:30], names[:30])
    before, after = (
        language_model(zoo, steps).fit(*learned_from, np.random.default_rng(0)).networks[0]
        for steps in (0, 20)
    )
    changed = {
        name
        for name, weight in before.state_dict().items()
        if not torch.equal(weight, after.state_dict()[name])
    }
    parts = {"lora" if "lora" in name else name.split(".")[0] for name in changed}
    assert parts == {"lora", "projection", "output"}


def test_a_text_is_read_to_its_end_and_not_beyond(zoo):
    """What pads shorter prompts changes nothing, and every word counts."""
    made = language_model(zoo, card="a100")
    torch.manual_seed(0)
    network = LanguageNetwork(zoo.encoder.width, made.decoder.make()).eval()
    torch.nn.init.normal_(network.output.weight)
    short = Workload(graph=zoo.graphs[0])
    long = Workload(graph=zoo.graphs[0], precision=Precision.AMP_BF16)
    vector = np.ones(zoo.encoder.width, dtype=np.float32)

    def outputs(some):
        data = [
            to_data(w.graph, zoo.encoder.scaler, vector=vector, tokens=row)
            for w, row in zip(some, made.tokens(some), strict=True)
        ]
        with torch.no_grad():
            return network(next(batches(data, 10**9, range(len(some)))))[:, 0]

    alone, beside = outputs([short]), outputs([short, long])
    torch.testing.assert_close(beside[0], alone[0])
    assert abs(beside[1] - beside[0]) > 1e-3
    assert GRAPH_TOKENS > 1


def test_the_prompt_tells_the_configuration(zoo):
    text = prompt(Workload(graph=zoo.graphs[2], phase=Phase.INFER), "rtx-3090")
    assert text == ("inference on rtx-3090, batch 16, size 16, fp32")
    assert "training on a100" in prompt(Workload(graph=zoo.graphs[0]), "a100")


def test_a_stored_language_model_is_read_with_its_tokenizer(zoo, labelled, tmp_path):
    """The code path of a real one: weights as safetensors and a tokenizer in a folder."""
    register_missing_operators()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["training", "inference", "on", "batch", "size", ",", "-"]
    tokens = ["[UNK]", *words, *map(str, range(99))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=len(vocabulary), n_embd=32, n_layer=2, n_head=2, n_positions=64
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    everything, values, test, names = labelled
    decoder = stored_decoder(str(tmp_path))
    assert decoder.token_ids("training on") == [vocabulary["training"], vocabulary["on"]]
    model = language_model(zoo, 100, decoder).fit(
        everything[~test], targets(values[~test], names[~test]), np.random.default_rng(0)
    )
    assert mape(model, everything[~test], values[~test]) < 0.6 * typical_error(values, ~test)
    stored = decoder.make().get_input_embeddings().weight
    torch.testing.assert_close(model.networks[0].words.weight, stored)


def test_what_is_no_language_model_here_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="nothing is downloaded") as error:
        stored_decoder(str(tmp_path / "none"))
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(InputError, match="vit"):
        stored_decoder(str(tmp_path))
    for missing in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"trappm\[transformers\]"):
        adapted_decoders.tiny_decoder()
    with pytest.raises(InputError, match=r"trappm\[transformers\]"):
        check_names(["thesis-language-model"])
