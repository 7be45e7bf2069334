"""The result of a comparison: rows that print as a table, plot themselves, and become dicts and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from kvjax.errors import KvjaxError
from kvjax.eval.page import summary
from kvjax.eval.page.summary import EvalRow
from kvjax.utils import display
from kvjax.utils.files import expand_user, write_text
from kvjax.utils.packages import import_optional

if TYPE_CHECKING:
    from kvjax.eval.page.charts import Picture

TABLE_COLUMNS = 112  # columns that the table needs, whatever the terminal says


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Sequence[EvalRow]):
    """Rows of methods, tasks and lengths: prints as the table of `kvjax eval`."""

    rows: tuple[EvalRow, ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Comparison:
        """Makes a comparison from the rows of `kvjax.eval.page.summary.rows`."""
        return cls(tuple(EvalRow(**row) for row in rows))

    @overload
    def __getitem__(self, index: int) -> EvalRow: ...
    @overload
    def __getitem__(self, index: slice) -> Comparison: ...
    def __getitem__(self, index: int | slice) -> EvalRow | Comparison:
        return Comparison(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        wide = max(Console().width, TABLE_COLUMNS)
        # Without force_jupyter a notebook would get the table as output, whatever the file.
        console = Console(file=(text := io.StringIO()), width=wide, color_system=None, force_jupyter=False)
        console.print(summary.table(self.to_dicts()))
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())

    def _repr_html_(self) -> str:
        table = summary.table(self.to_dicts())
        heads = [str(column.header).replace("\n", "") for column in table.columns]
        title = "; ".join(str(part) for part in (table.title, table.caption) if part)
        return display.table(title, heads, zip(*(column.cells for column in table.columns), strict=True))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns each row as a dict of all its fields, as `pandas.DataFrame` takes them."""
        return [dataclasses.asdict(row) for row in self.rows]

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the rows as a JSON list, and writes it to `path` if there is one."""
        text = json.dumps(self.to_dicts(), indent=2) + "\n"
        if path is not None:
            write_text(expand_user(path), text)
        return text

    def plot(self, path: str | Path | None = None) -> Picture:
        """Plots quality against bytes on the device, a panel per family of tasks; a notebook shows the picture.

        Args:
          path: a file to write, in the format of its ending (.png, .svg, .pdf, .html).

        Returns:
          A picture, whose `chart` is Altair's.

        Raises:
          KvjaxError: Altair is not installed, or no row has both a quality and bytes.
        """
        import_optional("altair", "plots need")
        from kvjax.eval.page import charts

        rows = self.to_dicts()
        length = summary.main_length(rows)
        chart = charts.draw_tradeoff(summary.at_length(rows, length), summary.distinct_values(rows, "method"))
        if chart is None:
            raise KvjaxError("there is no row with both a quality and bytes to draw; compare methods on a task first")
        picture = charts.Picture("tradeoff", "tradeoff", length, chart)
        if path is not None:
            picture.save(expand_user(path))
        return picture
