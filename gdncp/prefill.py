"""`python -m gdncp.prefill`, alone or under torchrun: one prefill, or a sweep of them, as conf/ and the overrides say.

`gdncp.prefill` is also the library call.  Importing this module rebinds that name in the package to the module, so
the module can be called and hands its arguments on.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from gdncp import api
from gdncp.installed import need


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return api.prefill(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


@record  # a rank's traceback reaches torchrun
def main() -> None:
    need("gdncp.prefill", "cli", "hydra", "rich")
    from gdncp.cli import control, ranks  # the library call needs neither Hydra nor rich

    with ranks.join() as peers:
        exit_code = control.run(peers)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
