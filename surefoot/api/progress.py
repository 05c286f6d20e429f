"""Progress bars on a terminal; where there is none, a line per stage or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, float], None]
"""Called with a stage and how much of it is done, 0 … 1."""


@contextlib.contextmanager
def loading_bar(console: Console) -> Iterator[Report]:
    """A bar for the stages of loading a model, gone when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        stages = {"starting"}

        def report(stage: str, fraction: float) -> None:
            bar.update(task, description=stage, completed=fraction)
            if stage not in stages and not console.is_terminal:
                console.print(f"{stage} …", markup=False)
            stages.add(stage)

        yield report
