"""How answers are told: numbers, sentences, short forms and cards in a notebook."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trappm
from trappm.prediction.looking_up.answer import Answer
from trappm.profiler.number_text import number_text
from trappm.terminal.prediction_tables import print_comparison, print_prediction
from trappm.terminal.tables import cell


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def prediction(home):
    return trappm.predict("test_resnet", batch_size=8, input_size=64, device="a100")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (53820.1, "53,820"), (1.87e-14, "0"), (-0.0, "0"), (3e-5, "0.00003"), (101.56, "101.6"),
        (999.96, "1,000"), (0.1, "0.1"), (-2.5, "-2.5"), (8503.6, "8,504"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_numbers_are_as_people_write_them(value, text):
    assert number_text(value) == cell(value) == text


def test_three_lines_of_remarks_are_shown_unless_all_are_asked_for(prediction, capsys):
    talkative = replace(prediction, remarks=tuple(f"remark {n}" for n in range(8)))

    def remarks(show, **options):
        show(**options)
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if re.search(r"remark \d|\d+ more remarks", line)]

    for show in (
        lambda **o: print_prediction(talkative, **o),
        lambda **o: print_comparison([talkative, prediction], **o),
    ):
        assert len(remarks(show)) <= 3
        assert re.fullmatch(r"\d+ more remarks: add --explain", remarks(show)[-1])
        assert len(remarks(show, explain=True)) == 8


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 6))
def test_no_number_has_an_exponent_and_all_keep_their_size(value, digits):
    text = number_text(value, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=10.0 ** (1 - digits), abs=1e-9)


def test_the_answer_comes_first_and_the_memory_adds_up(prediction, capsys):
    print_prediction(prediction, explain=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(prediction)
    assert lines[0].startswith("Fits A100 40 GB: ")
    parts = prediction.memory_parts_mib
    assert sum(parts.values()) == pytest.approx(prediction.memory_mib)
    assert parts["tensors"] == prediction.simulated_memory.live_mib
    assert any(line.startswith("Memory by simulation (traced): tensors ") for line in lines)
    assert prediction.to_dict()["memory_parts_mib"] == parts


def test_what_is_missing_is_one_line(capsys):
    prediction = trappm.predict("test_resnet", batch_size=8, input_size=64, device="cpu-2t")
    print_prediction(prediction)
    shown = capsys.readouterr().out
    assert " - " not in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("No power"))
    assert line.startswith("No power, energy: no model was trained on the power of training steps")
    assert prediction.memory_parts_mib == {}


def test_what_needs_a_missing_figure_is_told_alone_where_it_is_all_that_is_missing(prediction):
    alone = replace(prediction, energy_j=None, missing={"energy_j": "it needs the power"})
    assert alone.gaps() == ["No energy: it needs the power."]


def test_long_steps_are_told_in_seconds(prediction):
    long = replace(
        prediction,
        step_time_ms=2e4,
        intervals={**prediction.intervals, "step_time_ms": (4e3, 127_612.0)},
    )
    assert "A step takes 20 s (4 to 128) in fp32 at batch 8." in str(long)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.words = [], []

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.names.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def test_a_notebook_shows_a_card_without_scripts(prediction):
    hostile = replace(prediction, model="<script>alert(1)</script>.onnx", remarks=("<b>&",))
    page = Tags()
    page.feed(hostile._repr_html_())
    assert set(page.names) == {"div", "strong", "table", "tr", "td", "small"}
    assert any("<script>alert(1)</script>.onnx" in word for word in page.words)
    assert str(prediction) in page.words[0]
    assert "step_time_ms" in page.words


def test_predictions_and_answers_have_a_short_form(prediction):
    short = f"test_resnet on a100-40gb, batch 8: {prediction}"
    assert repr(prediction) == f"<Prediction: {short}>"
    answer = Answer(
        model="test_resnet", device="a100-40gb", batch_size=8, source="predicted",
        step_time_ms=prediction.step_time_ms, memory_mib=prediction.memory_mib,
        memory_above_mib=None, power_w=prediction.power_w, labels=(), prediction=prediction,
    )  # fmt: skip
    assert repr(answer) == f"<Answer: test_resnet on a100-40gb, batch 8, predicted: {prediction}>"
    assert str(prediction) in answer._repr_html_()
    died = replace(
        answer, source="measured", prediction=None, step_time_ms=None, memory_mib=None,
        power_w=None, memory_above_mib=512.0,
    )  # fmt: skip
    assert str(died) == (
        "Does not fit a100-40gb: a step runs out of memory, it needs more than 512 MiB."
    )
