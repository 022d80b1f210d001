"""Last import of the fork server: freeze everything imported so far out of garbage collection.

A worker's collector does not look at it again. To look at an object is to write to its page, and workers would copy
the server's memory page by page.
"""

from __future__ import annotations

import gc

gc.freeze()
gc.enable()
