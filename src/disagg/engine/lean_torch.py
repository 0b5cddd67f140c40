"""What `import torch` loads and no step of ours needs, left out: a quarter of that time, at every start.

torch registers in Python, operation by operation, what becomes of tensors that have a shape and no memory. Its compiler
asks for that, and libraries that make a model before they read its weights; a native model does neither. The module is
torch's own affair: where a later torch has none of that name, nothing is left out.
"""

import sys
from types import ModuleType

SHAPES_WITHOUT_MEMORY = "torch._meta_registrations"


def leave_out_shapes() -> None:
    """Before torch is imported; no effect afterwards. Not for a process that runs models which are not native."""
    if "torch" not in sys.modules:
        sys.modules.setdefault(SHAPES_WITHOUT_MEMORY, ModuleType(SHAPES_WITHOUT_MEMORY))
