"""Every notebook runs from top to bottom."""

import warnings
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # those of the notebook's own machinery
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=120).execute()
