from ._export import export
from ._program import decompose
__all__=["export","decompose"]
