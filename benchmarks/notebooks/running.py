"""One notebook, run from top to bottom."""
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from benchmarks.notebooks import FOLDER
from common.outcome import UserError

SECONDS = 600                          # of one cell


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with what its cells print here. Raises UserError where one fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    try:
        client.execute()
    except CellExecutionError as error:
        raise UserError(f"{path.name}: a cell failed: {error.ename}: {error.evalue}") from None
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)                   # when each ran: it would change every time
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                         "language_info": {"name": "python"}}
    return notebook


def record(path: Path) -> None:
    """Run it, and keep what it printed."""
    nbformat.write(executed(path), path)
