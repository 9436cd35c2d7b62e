"""The public names: each has a docstring with one call, and what the cheap ones print is so."""

import ast
import doctest
import inspect

import pytest
import torch

import perflab

CALLS = sorted(set(perflab.__all__) - {"PerflabError"})


@pytest.mark.parametrize("name", CALLS)
def test_the_example_of_a_public_name_prints_what_its_docstring_says(name, monkeypatch):
    monkeypatch.delenv("PERFLAB_BUDGET", raising=False)
    names = {public: getattr(perflab, public) for public in CALLS}
    names |= {"torch": torch, getattr(perflab, name).__name__: getattr(perflab, name)}  # by its name at home, too
    text = inspect.getdoc(getattr(perflab, name))
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert example.examples, f"{name} has no example"
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


def test_editors_see_the_names_that_are_loaded_lazily():
    tree = ast.parse(inspect.getsource(perflab))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {f"{a.asname or a.name}": (node.module, a.name) for node in block.body for a in node.names}
    assert set(seen) == set(perflab.__all__)
    for name, (module, own_name) in seen.items():
        home, _, renamed = perflab._HOME[name].partition(":")
        assert (f"perflab.{home}", renamed or name) == (module, own_name)


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'varied'"):
        perflab.varied  # noqa: B018
