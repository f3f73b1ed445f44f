"""A package, so that a `tests` package that some dependency installs cannot take its place."""
