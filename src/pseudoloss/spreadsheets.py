"""Names that a spreadsheet would evaluate as a formula."""

from typing import Any

import pandas as pd

# A spreadsheet evaluates a cell that begins so; the last four are the full-width forms.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def safe_text(value: Any) -> Any:
    """Text with an apostrophe before what a spreadsheet would evaluate; other values unchanged."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def safe_for_spreadsheets(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `safe_text` in its columns of text, their names, and the index."""
    text = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    safe = table.assign(**{str(name): table[name].map(safe_text) for name in text})
    return safe.rename(index=safe_text, columns=safe_text)
