"""Last import of the fork server: freeze everything imported so far out of garbage collection.

Workers' collectors then skip it. Inspecting an object writes to its page, so workers would copy the server's memory
page by page.
"""

from __future__ import annotations

import gc

gc.freeze()
gc.enable()
