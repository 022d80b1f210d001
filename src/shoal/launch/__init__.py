"""Start workers on this machine and on several. Callable: ``shoal.launch(fn, layout="fsdp=2")``."""

from __future__ import annotations

from shoal.facts.callable_package import make_callable

make_callable(__name__, "shoal.launch.library:launch")
