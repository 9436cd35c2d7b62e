"""The guard finds nothing in the course, and finds each fault that is planted."""

import pytest
from nbformat.v4 import new_output
from run import PIXEL, save, small_notebook

from perflab.course import check
from perflab.course.lint import MAX_BYTES, MEASURED


def test_the_course_is_clean(notebook):
    assert check([notebook]) == []


def test_a_notebook_without_a_fault_passes(tmp_path):
    assert check([save(small_notebook(), tmp_path / "small.ipynb")]) == []


def say(nb, text):
    nb.cells[1].outputs[0].text = text


def show(nb, **data):
    nb.cells[2].outputs[0].data = {mime.replace("_", "/"): value for mime, value in data.items()}


PLANTED = {
    "another kernel": (lambda nb: nb.metadata.kernelspec.update(name="mine"), "not in normal form"),
    "a carriage return": (lambda nb: say(nb, "1 of 2\r2 of 2\n"), "not in normal form"),
    "cell metadata": (lambda nb: nb.cells[1].metadata.update(collapsed=True), "not in normal form"),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), "widget state"),
    "a stripped cell": (lambda nb: nb.cells[2].update(execution_count=None, outputs=[]), "not executed 1 to n"),
    "cells out of order": (lambda nb: nb.cells[1].update(execution_count=7), "not executed 1 to n"),
    "a misspelt tag": (lambda nb: nb.cells[1].metadata.update(tags=["nbval-ignore-ouput"]), "unknown tag"),
    "an error": (
        lambda nb: nb.cells[1].outputs.append(new_output("error", ename="ValueError", evalue="no")),
        "without the tag raises-exception: ValueError: no",
    ),
    "a tag without an error": (lambda nb: nb.cells[1].metadata.update(tags=["raises-exception"]), "raised nothing"),
    "a warning": (lambda nb: nb.cells[1].outputs[0].update(name="stderr"), "output on stderr"),
    "an address": (lambda nb: say(nb, "<Line2D at 0x7f00deadbeef>\n"), "a memory address"),
    "a home": (lambda nb: say(nb, "read /home/kim/photos\n"), "home folder"),
    "a home in HTML": (lambda nb: show(nb, text_plain="x", text_html="<i>/root/x</i>"), "home folder"),
    "a scratch folder": (lambda nb: say(nb, "wrote /tmp/x\n"), "temporary folder"),
    "a kernel's path": (lambda nb: say(nb, "ipykernel_417/1.py:1: hm\n"), "path of the kernel"),
    "a huge output": (lambda nb: say(nb, "x" * MAX_BYTES), "MB, more than"),
    "a long cell": (lambda nb: nb.cells[1].update(source="\n".join(["f()"] * 21)), "21 lines of code"),
    "long cells": (
        lambda nb: [cell.update(source="\n".join(["f()"] * 7)) for cell in nb.cells[1:]],
        "7 lines in the median",
    ),
    "a measured number": (lambda nb: nb.cells[0].update(source="It takes 3.2 ms."), "'3.2 ms'"),
    "a figure without a record": (
        lambda nb: nb.cells[0].update(source="It takes 3.2 ms.", metadata={"figures": {"3.2 ms": "result('no.such')"}}),
        "no.such is not recorded",
    ),
    "a figure that the record does not have": (
        lambda nb: nb.cells[0].update(source="It takes 3.2 ms.", metadata={"figures": {"3.2 ms": "0.0041 + 0"}}),
        "is 4.1 in the record",
    ),
    "a figure that does not stand there": (
        lambda nb: nb.cells[0].update(metadata={"figures": {"61 %": "0.61 + 0"}}),
        "does not stand in the text",
    ),
    "a figure that runs code": (
        lambda nb: nb.cells[0].update(source="61 %", metadata={"figures": {"61 %": "[x for x in (1,)]"}}),
        "more than a look-up",
    ),
    "a bare figure": (
        lambda nb: show(nb, image_png=PIXEL, text_plain="<Figure size 640x480 with 1 Axes>"),
        "without alternative text",
    ),
    "a mute figure": (lambda nb: show(nb, image_png=PIXEL), "without alternative text"),
    "a mute image in HTML": (
        lambda nb: show(nb, text_plain="x", text_html='<img src="a.png">'),
        "HTML without alternative text",
    ),
    "a mute image in prose": (lambda nb: nb.cells[0].update(source="![](a.png)"), "without alternative text"),
    "a repeated id": (lambda nb: nb.cells[2].update(id=nb.cells[1].id), "not in normal form"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path):
    plant, sentence = PLANTED[fault]
    nb = small_notebook()
    plant(nb)
    found = check([save(nb, tmp_path / "small.ipynb")])
    assert any(sentence in line for line in found), found
    assert [line for line in found if sentence not in line and "not in normal form" not in line] == []


def test_a_definition_may_type_numbers(tmp_path):
    nb = small_notebook()
    nb.cells[0].source = "One KiB is 1024 bytes, so 4 KiB are 4096 bytes.\n<!-- definition -->"
    assert check([save(nb, tmp_path / "small.ipynb")]) == []


TIMES = ["3.2 ms", "3.2ms", "12 us", "12 µs", "0.5 s", "5s", "2 seconds", "20 min"]
RATES = ["3.35 TB/s", "900 img/s", "8000 samples/s", "989 TFLOP/s", "7 GFLOPS"]
SIZES = ["1.5 GiB", "1,024 MiB", "25&nbsp;GB", "30 %", "30%", r"30\,\%"]


@pytest.mark.parametrize("text", [*TIMES, *RATES, *SIZES])
def test_a_number_with_a_unit_is_seen(text):
    assert MEASURED.search(f"It was {text}, as said.")


@pytest.mark.parametrize(
    "text", ["4 workers", "batch 64", "C2.2-6", "in the 1990s", "fp16", "2 GPUs", "500x375", "step 3", "H200"]
)
def test_a_count_or_a_name_is_not_taken_for_one(text):
    assert not MEASURED.search(f"It was {text}, as said.")
