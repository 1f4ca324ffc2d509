"""Import-only torchvision: SGLang imports it for image models, which a CPU text run never calls.

The compiled package needs a torch built alongside it, and images have no part here.
"""

import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class _Absent:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent()

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return object

    __ror__ = __or__


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent()


class _Submodules:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, cls) if name.startswith("torchvision.") else None

    @staticmethod
    def create_module(spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__
        return module

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(_Submodules)
