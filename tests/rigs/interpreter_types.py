"""Triton's interpreter looks types up that it would make and compare anew at each operation.

Most of the interpreter's time goes into such types: a tensor's shape alone takes a dozen objects. What is computed
stays as it was: the values that are kept are never changed, and depend on nothing but what they are looked up by.
"""

from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """For the whole process; once."""
    core.block_type.__init__ = _block_types_by_shape(core.block_type.__init__)
    core.tensor.__init__ = _tensors_by_shape(core.tensor.__init__)
    core.dtype.__eq__ = _equal_by_name(core.dtype.__eq__)
    TritonSemantic.computation_type_impl = _computation_types(TritonSemantic.computation_type_impl)
    TritonSemantic.broadcast_impl_value = _broadcast_if_needed(TritonSemantic.broadcast_impl_value)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)


def _block_types_by_shape(original: Any) -> Any:
    """Types of blocks of one shape have the same object as their shape."""
    made: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = element_ty.name, sizes
        if key not in made:
            original(self, element_ty, shape)
            made[key] = shapes.setdefault(sizes, self.shape), self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = made[key]

    return init


def _tensors_by_shape(original: Any) -> Any:
    made: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in made:
            original(self, handle, type)
            made[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made[sizes]

    return init


def _equal_by_name(original: Any) -> Any:
    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else original(self, other)

    return equal


def _computation_types(original: Any) -> Any:
    found: dict[tuple[Any, ...], Any] = {}

    def computation_type_impl(
        self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in found:
            found[key] = original(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return found[key]

    return computation_type_impl


def _broadcast_if_needed(original: Any) -> Any:
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else original(self, lhs, rhs)

    return broadcast_impl_value


def _numpy_types(original: Any) -> Any:
    found: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in found:
            found[name] = original(tt_dtype)
        return found[name]

    return get_np_dtype
