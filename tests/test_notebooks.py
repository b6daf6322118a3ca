"""Every notebook runs from top to bottom, and shows what it showed when it was written."""

import re
import warnings
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")

nbformat = pytest.importorskip("nbformat")


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def numbers(notebook):
    """Numbers in what cells print, figures apart."""
    texts = [
        output.get("text") or output["data"]["text/plain"]
        for cell in code_of(notebook)
        for output in cell.outputs
        if output.output_type == "stream" or "image/png" not in output["data"]
    ]
    return [float(found) for text in texts for found in NUMBER.findall(text)]


@pytest.mark.filterwarnings("ignore")  # those of the notebook's own machinery
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_its_prose_still_holds(path):
    nbclient = pytest.importorskip("nbclient")
    kept, fresh = (nbformat.read(path, as_version=4) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(fresh, timeout=120).execute()
    # Where this fails, run the notebook anew, and read what it says about its numbers.
    assert numbers(fresh) == pytest.approx(numbers(kept), rel=0.02)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_with_light_outputs_and_a_question_for_its_title(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in code_of(notebook))
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert path.stat().st_size < 120_000
    title = notebook.cells[0].source.partition("\n")[0]
    assert title.startswith("# ")
    assert title.endswith("?")
