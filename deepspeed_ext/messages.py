"""The core's error messages, said as a DeepSpeed user knows the options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said_in_json() -> Iterator[None]:
    """Messages of the core name flags; here options stand in a JSON."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"--megascale-device-budget (\d+)", r'"device_budget": \1', str(error))
        message = re.sub(r"--megascale-page-size (\w+)", r'"page_size_bytes": "\1"', message)
        message = re.sub(r" \(--megascale-(?!disk-path)[\w-]+( \w+)?\)", "", message)  # the option stands before it
        message = message.replace("--megascale-page-size", '"page_size_bytes"')
        message = message.replace("--megascale-disk-path", '"disk_path"')
        raise ValueError(message) from error
