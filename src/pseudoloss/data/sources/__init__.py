"""Where images come from: one module per kind of source. `lookup` chooses among them."""

from pseudoloss.data.sources.lookup import (
    FILE_OPTIONS,
    WITH_NOISE_RATIO,
    Source,
    absolute,
    check_exists,
    find_source,
    open_all,
    open_arrays,
    open_files,
    open_source,
    refuse_inside,
)

__all__ = [
    "FILE_OPTIONS",
    "WITH_NOISE_RATIO",
    "Source",
    "absolute",
    "check_exists",
    "find_source",
    "open_all",
    "open_arrays",
    "open_files",
    "open_source",
    "refuse_inside",
]
