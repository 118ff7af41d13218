"""Other people's kernels, as they published them: named files of released packages, fetched, checked and loaded.

None of their code is in this repository. `sources.toml` names package, version, files and their SHA-256; `labkit fetch`
takes these files out of the released package into a cache outside the tree; `load` imports one of them.
"""

from labkit.sources.catalogue import Source, folder, is_fetched, manifest, named, source
from labkit.sources.fetching import SourceError, fetch
from labkit.sources.loading import NotFetched, changed, load

__all__ = [
    "NotFetched",
    "Source",
    "SourceError",
    "changed",
    "fetch",
    "folder",
    "is_fetched",
    "load",
    "manifest",
    "named",
    "source",
]
