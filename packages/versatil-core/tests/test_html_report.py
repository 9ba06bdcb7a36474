"""The page says what the report does, holds what any name may be, and loads nothing."""

import math
import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from versatil_core.html_report import render_html
from versatil_core.number_text import decibel, file_size
from versatil_core.report_result import Report
from versatil_core.report_tables import kernel_share_lines

SAMPLES: dict[str, Report]
SAMPLES = runpy.run_path(str(Path(__file__).with_name("report_samples.py")))["SAMPLES"]
VOID = {"br", "meta", "wbr"}
APART = {"td", "th", "dt", "dd", "br"}
LOADING = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}


LETTERS = {ord("\N{MULTIPLICATION SIGN}"): "x", ord("\N{MINUS SIGN}"): "-"}


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in APART or "under" in (dict(attrs).get("class") or ""):
            self.texts.append(("", " "))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @cached_property
    def text(self) -> str:
        """What is read on the page, without titles of pictures, and signs as letters."""
        shown = "".join(data for tag, data in self.texts if tag not in {"title", "style"})
        return " ".join(shown.translate(LETTERS).split())

    @property
    def ids(self) -> list[str]:
        """The sections."""
        return [attrs["id"] or "" for _, attrs in self.elements if "id" in attrs]

    def titles(self) -> Iterator[str]:
        """What pointers show over pictures."""
        return (data for tag, data in self.texts if tag == "title")


def page(report: Report) -> Page:
    return Page(render_html(report))


@pytest.mark.parametrize("name", SAMPLES)
def test_page_is_well_formed_and_loads_nothing(name: str) -> None:
    text = render_html(SAMPLES[name])
    found = Page(text)

    assert not [attrs for _, attrs in found.elements if LOADING & attrs.keys()]
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "use"}
    assert not [attrs for _, attrs in found.elements if any(key.startswith("on") for key in attrs)]
    style = "".join(data for tag, data in found.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    assert "http:" not in text
    assert "https:" not in text
    policy = {
        attrs.get("http-equiv"): attrs["content"]
        for _, attrs in found.elements
        if "content" in attrs
    }
    assert policy["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'"


@pytest.mark.parametrize("name", SAMPLES)
def test_pictures_have_names_and_lie_on_the_page(name: str) -> None:
    found = page(SAMPLES[name])

    pictures = [attrs for tag, attrs in found.elements if tag == "svg" and "role" in attrs]
    unlabelled = [attrs for attrs in pictures if "aria-label" not in attrs]
    # The squares of the islands have titles instead.
    assert len(unlabelled) == len(SAMPLES[name].layers)
    for tag, attrs in found.elements:
        numbers = [
            attrs.get(key) or "0" for key in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r")
        ]
        for number in (*numbers, attrs.get("width") or "0", attrs.get("height") or "0"):
            value = float(number.removesuffix("%").removesuffix("device-width"))
            assert math.isfinite(value), (tag, attrs)
            assert value >= 0 or tag == "svg", (tag, attrs)


@pytest.mark.parametrize("name", SAMPLES)
def test_verdict_comes_first(name: str) -> None:
    report = SAMPLES[name]
    found = page(report)

    sentence = report.verdict.sentence.replace("->", "→")
    before, _, _ = found.text.partition("Kernels")
    assert sentence in before
    assert ("This report is partial." in before) == report.is_partial


def test_a_partial_report_says_what_is_missing() -> None:
    text = page(SAMPLES["partial"]).text

    assert "stopped before it was done with kernels and speed; what follows was measured" in text


@pytest.mark.parametrize("name", SAMPLES)
def test_every_layer_is_everywhere(name: str) -> None:
    report = SAMPLES[name]
    found = page(report)

    titles = [*found.titles()]
    pictures = 1 + any(layer.int8_run for layer in report.layers)
    pictures += any(layer.accuracy for layer in report.layers)
    for number, layer in enumerate(report.layers, start=1):
        assert sum(title.startswith(f"{number}. {layer.name}: ") for title in titles) == pictures
        assert layer.name in found.text
        assert layer.int8_run is None or layer.int8_run.implementation in found.text


def test_any_name_is_only_text() -> None:
    hostile = "</style><script>alert(1)</script>&amp;'\"{{ 7 * 7 }}"
    report = SAMPLES["faster"]
    report = replace(
        report,
        title=hostile,
        notes=(hostile,),
        layers=(replace(report.layers[2], module_path=hostile), *report.layers[3:]),
        ranges=(replace(report.ranges[0], readers=(hostile,)), *report.ranges[1:]),
        environment=replace(report.environment, command=hostile, settings={hostile: hostile}),
    )

    text = render_html(report)
    found = Page(text)

    assert "<script" not in text
    assert "script" not in {tag for tag, _ in found.elements}
    assert found.text.count(hostile) >= 6
    assert "head.<script>alert('1 & 2')</script>[bold]" in found.text


@pytest.mark.parametrize(
    ("missing", "section", "heading"),
    [
        ({"accuracy": None}, None, "Cosine similarity"),
        ({"ranges": ()}, None, "Ranges of activations"),
        ({"speed": ()}, None, "The three models took turns"),
        ({"first_result": {}}, None, "First result"),
        ({"speed": (), "first_result": {}}, "speed", "First result"),
        ({"size": None}, "size", "Weights in memory"),
        ({"gates": ()}, None, "Conditions"),
        ({"notes": ()}, None, "Notes"),
    ],
)
def test_what_was_not_measured_is_left_out(
    missing: dict[str, Any], section: str | None, heading: str
) -> None:
    whole, without = page(SAMPLES["faster"]), page(replace(SAMPLES["faster"], **missing))

    assert heading in whole.text
    assert heading not in without.text
    assert set(whole.ids) - set(without.ids) == ({section} if section else set())


def test_a_bare_report_has_two_sections() -> None:
    found = page(SAMPLES["bare"])

    assert found.ids == ["kernels", "environment"]
    assert "kernel that ran" not in found.text


def test_numbers_are_those_of_the_report() -> None:
    report = SAMPLES["faster"]
    text = page(report).text
    accuracy, size = report.accuracy, report.size
    assert accuracy is not None
    assert size is not None

    assert f"SQNR {decibel(accuracy.sqnr_db or 0)}" in text
    assert f"SQNR, reference {decibel(accuracy.reference_sqnr_db or 0)}" in text
    assert f"SQNR, kernels {decibel(accuracy.kernels_sqnr_db or 0)}" in text
    assert "Exact operations 11 of 11" in text
    assert "top1 0.978 → 0.975 float → int8: -0.003" in text
    assert "On 48 samples in 6 batches; the layers on 4 of them." in text
    assert f"File {file_size(size.float_file)} {file_size(size.int8_file)} 3.9x smaller" in text
    assert "2 8 8x3x224x224 35.3 ms 34.2 ms to 37.0 ms 25.2 ms" in text
    assert "2.10x faster 2.04 to 2.21 30" in text
    assert "int8 2.35 s 198 ms 8.12 s 10.8 s" in text
    assert "no int8 kernel for embedding" in text
    assert "embeddings.word_embeddings and 1 more (embedding)" in text
    assert "✗ failed SQNR of at least 40 dB wanted: 31.4 dB" in text
    assert "✓ passed speedup of at least 1.5x wanted" in text
    assert "saturation safe this CPU has no VNNI" in text
    assert report.environment.command in text


def test_signs_are_signs() -> None:
    text = render_html(SAMPLES["faster"])

    assert "1.70\N{MULTIPLICATION SIGN} faster" in text
    assert "\N{MINUS SIGN}0.003" in text
    assert "1.70x" not in text
    assert "->" not in text
    # What looks like a ratio and is part of a name stays what it is.
    layers = (replace(SAMPLES["faster"].layers[2], module_path="block.2x"),)
    report = replace(SAMPLES["tiny"], layers=layers, notes=("see block.2x",))
    assert "see block.2x" in render_html(report)


def test_times_of_layers_share_a_unit() -> None:
    report = SAMPLES["tiny"]
    layer = report.layers[0]
    assert layer.int8_run is not None
    text = page(report).text
    assert "float, ms int8, ms" in text
    assert f"{layer.int8_run.seconds * 1e3:.3f} {layer.speedup:.2f}x" in text

    quick = tuple(
        replace(each, float_run=None, int8_run=replace(layer.int8_run, seconds=4.2e-6))
        for each in report.layers
    )
    assert "float, µs int8, µs" in page(replace(report, layers=quick)).text


def test_losing_layers_are_marked() -> None:
    report = SAMPLES["slower"]
    found = page(report)

    assert len(report.losing_layers) == 4
    marks = [attrs for tag, attrs in found.elements if attrs.get("class") == "loses"]
    cut = sum(each.maximum > each.grid_high + 5.1 for each in report.ranges)
    assert len(marks) == 4 + cut
    assert found.text.count("▼ slower") == 4 + 1  # and the legend
    assert "Slower in int8, by what they lose: encoder.layer.7" in found.text
    assert "▼" not in page(SAMPLES["tiny"]).text


def test_share_of_the_kernels_in_a_call() -> None:
    report = SAMPLES["faster"]
    [line] = kernel_share_lines(report)

    assert line in page(report).text
    assert "These kernels take" not in page(replace(report, speed=())).text


def test_tiny_ratios_are_not_nothing() -> None:
    report = SAMPLES["tiny"]
    run = report.layers[0].float_run
    assert run is not None
    layer = replace(report.layers[0], int8_run=replace(run, seconds=run.seconds * 400))

    assert "0.003x" in page(replace(report, layers=(layer,))).text


def test_inexact_layers_are_marked() -> None:
    text = page(SAMPLES["inexact"]).text

    assert "nothing in common nan dB up to 26 steps, in 3 % ✗ inexact" in text
    assert "the kernels do not give what the reference defines" in text
    assert "✗ inexact" not in page(SAMPLES["faster"]).text


def test_ranges_worth_a_look_come_first() -> None:
    found = page(SAMPLES["faster"]).text

    worst, _, others = found.partition("Worth a look")[2].partition("The other 2 activations")
    assert "11.8 % used" in worst
    assert "2 of 384 channels stand out" in worst
    assert "94.1 % used" in others
    assert "a.query, a.key and 1 more" in others


def test_a_long_report_stays_small_and_closed() -> None:
    report = SAMPLES["many"]
    text = render_html(report)
    found = Page(text)

    assert len(text.encode()) < 1_500_000
    assert [attrs for tag, attrs in found.elements if tag == "details" and "open" in attrs] == []
    short = page(SAMPLES["tiny"])
    assert [attrs for tag, attrs in short.elements if tag == "details" and "open" in attrs]


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.1 defines it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    """Contrast ratio as WCAG 2.1 defines it."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_enough_in_light_dark_and_print() -> None:
    css = (files("versatil_core") / "templates" / "report.css").read_text(encoding="utf-8")
    themes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]

    assert len(themes) == 3
    for colours in themes:
        for text in ("ink", "soft", "accent", "good", "int8"):
            assert contrast(colours[text], colours["paper"]) >= 4.5, (text, colours)
            if text in {"ink", "soft"}:
                assert contrast(colours[text], colours["shade"]) >= 4.5, (text, colours)
        # Marks of pictures: WCAG 2.1, 1.4.11.
        for mark in ("int8", "float", "accent"):
            assert contrast(colours[mark], colours["paper"]) >= 3, (mark, colours)


def test_to_html_writes_the_page(tmp_path: Path) -> None:
    report = SAMPLES["tiny"]

    report.to_html(tmp_path / "report.html")

    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render_html(report)


def test_a_model_without_float_outputs_has_no_sqnr() -> None:
    report = SAMPLES["faster"]
    assert report.accuracy is not None
    integers = replace(
        report.accuracy,
        sqnr_db=None,
        reference_sqnr_db=None,
        kernels_sqnr_db=None,
        cosine=None,
        equal_share=0.975,
    )
    text = page(replace(report, accuracy=integers)).text

    assert "Equal integers 97.5 %" in text
    assert "Cosine" not in text
    assert "SQNR, kernels" not in text
